"""Nothing here depends on `torch.autocast`: its results have the same bits in such a scope."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit import reference, steps
from mlakit.cache import PagedLatentCache
from mlakit.dispatch.autocast import without_autocast
from mlakit.formats import FORMATS
from mlakit.model.geometry import RowShape
from mlakit.tools.testing import assert_same_bits
from tests.ops.cases import CALLS
from tests.steps.step_oracles import STEPS, Step

SCOPE = {"device_type": "cpu", "dtype": torch.bfloat16}


def outcome(call: Any) -> list[tuple[str, Tensor]]:
    """The results of a call of an op and every tensor it can reach, afterwards."""
    results = [(f"result {i}", result) for i, result in enumerate(call.run())]
    return [*results, *call.tensors()]


@pytest.mark.parametrize("name", CALLS)
def test_ops_have_the_same_bits(name):
    plain = outcome(CALLS[name]())
    with torch.autocast(**SCOPE):
        scoped = outcome(CALLS[name]())
    for (what, got), (_, want) in zip(scoped, plain, strict=True):
        assert_same_bits(what, got, want)


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS.values(), ids=list(STEPS))
@pytest.mark.parametrize("branch", [steps.decode_branch, steps.prefill_branch])
def test_branches_have_the_same_bits(branch, step: Step):
    *plain, plain_batch = step.arguments()
    *scoped, scoped_batch = step.arguments()
    want = branch(*plain, plain_batch)
    with torch.autocast(**SCOPE):
        got = branch(*scoped, scoped_batch)
    assert_same_bits("out", got, want)
    assert_same_bits("payload", scoped_batch.cache.payload, plain_batch.cache.payload)


@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_written_and_read_the_same(format):
    rows = torch.randn(5, 72, generator=torch.Generator().manual_seed(0))
    slots = torch.arange(5)

    def stored() -> tuple[Tensor, Tensor]:
        cache = PagedLatentCache.allocate(RowShape(64, 8), format, num_pages=2, page_size=4)
        layer = cache.layer(0)
        layer.write(slots, rows)
        return cache.payload, layer.read(slots)

    plain = stored()
    with torch.autocast(**SCOPE):
        scoped = stored()
    for name, got, want in zip(("payload", "read"), scoped, plain, strict=True):
        assert_same_bits(name, got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_oracles_have_the_same_bits(dtype, generator):
    q, rows = torch.randn(2, 3, 40, generator=generator), torch.randn(9, 40, generator=generator)

    def attended() -> tuple[Tensor, ...]:
        return reference.mla_decode(q, [rows], [2], softmax_scale=0.3, v_width=32, dtype=dtype)

    plain = (*attended(), reference.rotate(rows[:, :8].double(), rows[0, 8:16].double()))
    with torch.autocast(**SCOPE):
        scoped = (*attended(), reference.rotate(rows[:, :8].double(), rows[0, 8:16].double()))
    for name, got, want in zip(("out", "lse", "rotated"), scoped, plain, strict=True):
        assert got.dtype == want.dtype
        assert_same_bits(name, got, want)


def test_the_scope_goes_on_afterwards():
    @without_autocast
    def inside() -> bool:
        return torch.is_autocast_enabled("cpu")

    with torch.autocast(**SCOPE):
        assert not inside()
        assert torch.is_autocast_enabled("cpu")
    assert not inside()
