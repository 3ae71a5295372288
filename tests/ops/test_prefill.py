"""What random problems do not hold: numbers that are not finite, and negative scales."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from mlakit import reference
from mlakit.dispatch import selection
from mlakit.dispatch.checks import UnsupportedError
from mlakit.model.masks import CAUSAL, NULL, Mask
from mlakit.ops import mla_prefill
from mlakit.tools.testing import assert_matches
from mlakit.tools.workloads import PrefillCase

NAN, INF = torch.nan, torch.inf
MASKS = (
    CAUSAL,
    NULL,
    Mask("sliding_window_causal", 30),
    Mask("sliding_window_noncausal", 20),
    Mask("chunked", 33),
    Mask("chunked_causal", 33),
)


STARTS = [0, 140, 150], [0, 155, 170]


def not_finite() -> tuple[torch.Tensor, ...]:
    """q, k_nope, k_rope, v with NaN and infinity in some keys."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    q, k_nope, k_rope, v = (
        normal(150, 2, 24),
        normal(170, 2, 16),
        normal(170, 8),
        normal(170, 2, 20),
    )
    v[60, 0, 3], v[69, 1, 2], v[100, 1, 2], v[165, 0, 0] = NAN, INF, NAN, INF
    v[110, 1] = -INF
    k_nope[90, 1, 0] = NAN
    return q, k_nope, k_rope, v


def options(mask: Mask) -> dict[str, Any]:
    return {"softmax_scale": 0.3, "mask": mask, "sink": torch.tensor([0.5, -1.0])}


@lru_cache
def wanted(mask: Mask, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """(out, lse) of the oracle, which takes a second: every kernel is compared with it."""
    return reference.mla_prefill(*not_finite(), *STARTS, **options(mask), dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.kind)
@pytest.mark.parametrize("spec", selection.specs("mla_prefill"), ids=str)
def test_values_that_are_not_finite_reach_exactly_the_queries_that_attend_to_them(
    spec, mask, device
):
    arguments = options(mask)
    arguments["sink"] = arguments["sink"].to(device)
    try:
        results = mla_prefill(
            *(tensor.to(device) for tensor in not_finite()),
            *(torch.tensor(each, dtype=torch.int32, device=device) for each in STARTS),
            **arguments,
            backend=spec.backend,
        )
    except UnsupportedError as refusal:
        pytest.skip(str(refusal))
    exact, naive = wanted(mask, torch.float64), wanted(mask, torch.float32)
    assert exact[0].isnan().any()
    for name, result, want, plain in zip(("out", "lse"), results, exact, naive, strict=True):
        assert_matches(name, result.cpu(), want, plain)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("spec", selection.specs("mla_prefill"), ids=str)
def test_a_negative_scale_favours_the_lowest_scores(spec, dtype, device):
    case = PrefillCase(kv_lens=(40, 7), q_lens=(23, 7), heads=2, sharpness=-2.0, dtype=dtype)
    try:
        case.run(device, spec.backend)
    except UnsupportedError as refusal:
        pytest.skip(str(refusal))
