"""What random problems do not hold: numbers that are not finite, and negative scales."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from mlakit import reference
from mlakit.dispatch import selection
from mlakit.dispatch.checks import UnsupportedError
from mlakit.model.masks import CAUSAL, NULL, Mask, sliding_window_causal
from mlakit.ops import mla_prefill
from mlakit.tools.testing import assert_matches
from mlakit.tools.workloads import PrefillCase
from tests.ops.cases import SCALE, Call, starts
from tests.ops.every_op import assert_same_results
from tests.ops.random_cases import problems_of

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


@pytest.mark.parametrize("result", ["q", "k_nope", "v"])
@pytest.mark.parametrize("mask", [CAUSAL, sliding_window_causal(3)], ids=["causal", "window"])
def test_prefill_on_the_cpu_may_write_into_its_inputs(mask, result):
    """With a NaN fused attention stops after it has written: the rows are computed again."""

    def make() -> Call:
        q, k_nope, v = (torch.randn(12, 2, 8, generator=generator) for _ in range(3))
        v[-1] = torch.nan  # seen by the last query only
        arguments = {"q": q, "k_nope": k_nope, "k_rope": torch.empty(12, 0), "v": v}
        bounds = {"q_starts": starts([5, 7]), "kv_starts": starts([5, 7])}
        return Call(mla_prefill, arguments | bounds | {"softmax_scale": SCALE, "mask": mask})

    generator = torch.Generator().manual_seed(0)
    want = make().run()
    generator.manual_seed(0)
    call = make()
    assert_same_results(call.run(out=call.arguments[result]), want)


@pytest.mark.slow
@problems_of("mla_prefill")
def test_problems_match_the_oracle(problem, device, pytestconfig):
    problem(device, pytestconfig.getoption("--hypothesis-seed"))
