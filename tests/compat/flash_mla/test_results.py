"""The drop-in for FlashMLA writes its results and nothing else, and copies no cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit.compat.flash_mla import flash_attn_varlen_func, flash_mla_with_kvcache
from mlakit.tools.testing import (
    assert_matches,
    assert_same_bits,
    assert_unchanged,
    poison,
    snapshot,
)
from tests.compat.flash_mla.dense_cases import DenseCase
from tests.compat.flash_mla.inputs import padded
from tests.compat.flash_mla.running import KINDS
from tests.compat.flash_mla.sparse_cases import SMALL, PrefillCase, Scope, SparseCase
from tests.compat.flash_mla.varlen_cases import VarlenCase

SOME = [
    DenseCase(3, 2, 70, True, True, zeros=True, h_q=6, h_kv=2),
    SparseCase(3, 2, Scope(60, 20, 5, True), Scope(90, 17, 61, True), h_q=3, d=512, zeros=True),
    SparseCase(3, 2, SMALL, h_q=3, zeros=True),
    PrefillCase(13, 40, 64, 4, 512, True, True),
    VarlenCase(20, 50, 3, h=4, h_k=2, causal=True),
]


def tensors_of(problem: Any) -> dict[str, Tensor]:
    found = {}
    for owner, prefix in (
        (problem, ""),
        *((getattr(problem, n, None), n) for n in ("main", "extra")),
    ):
        for name, value in vars(owner).items() if owner is not None else ():
            if isinstance(value, Tensor):
                found[f"{prefix} {name}"] = value
    return found


@pytest.mark.parametrize("case", SOME, ids=str)
def test_inputs_stay_as_they_are_and_two_runs_are_equal(case, device):
    problem = case.make(device)
    before = snapshot(**tensors_of(problem))
    run = KINDS[type(case)][0]
    for first, second in zip(run(problem), run(problem), strict=True):
        assert_same_bits(str(case), first, second)
    assert_unchanged(before)


@pytest.mark.parametrize("case", SOME[:4], ids=str)
@pytest.mark.parametrize("strides", ["packed", "padded"])
def test_out_is_written_and_returned(case, strides, device):
    problem = case.make(device)
    run = KINDS[type(case)][0]
    want = run(problem)
    out = poison(torch.empty_like(want[0]))
    if strides == "padded":
        out = padded(out)
    got = run(problem, out=out)
    assert got[0] is out
    for name, mine, other in zip(("out", "lse", "more"), got, want, strict=False):
        assert_same_bits(name, mine, other)


@pytest.mark.parametrize("h_kv", [1, 2])
def test_no_cache_is_copied(h_kv):
    """A cache of 2**34 rows that all lie in one page: no copy of it would fit."""
    cache = torch.randn(1, 64, h_kv, 576).bfloat16().expand(2**28, 64, h_kv, 576)
    q = torch.randn(2, 1, 2, 576).bfloat16()
    table = torch.tensor([[2**28 - 1, 5], [3, 7]], dtype=torch.int32)
    lengths = torch.tensor([100, 30], dtype=torch.int32)
    got = flash_mla_with_kvcache(q, cache, table, lengths, 512)
    small = flash_mla_with_kvcache(q, cache[:1], torch.zeros_like(table), lengths, 512)
    for mine, other in zip(got, small, strict=True):
        assert_same_bits("result", mine, other)


def test_keys_of_shared_heads_are_not_copied():
    k = torch.randn(1, 1, 192).expand(2**31, 4, 192)
    q = torch.randn(1, 8, 192)
    starts = (torch.tensor([0, 1]), torch.tensor([0, 3]))
    out, _ = flash_attn_varlen_func(q, k[:3], k[:3, :, :128], *starts, 1, 3)
    v = k[:1, 0, :128].expand(8, 128)  # the values of all three keys, so that of their mean
    assert_matches("out", out[0], v.double(), v)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SOME, ids=str)
def test_no_call_waits_for_the_gpu(case, device):
    problem = case.make(device)
    run = KINDS[type(case)][0]
    run(problem)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(problem)
    finally:
        torch.cuda.set_sync_debug_mode("default")
