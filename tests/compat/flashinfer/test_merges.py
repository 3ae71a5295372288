"""Merges of states whose lse is base 2."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mlakit import reference
from mlakit.compat.flashinfer import merge_state, merge_state_in_place, merge_states
from mlakit.tools.testing import assert_matches, assert_same_bits, assert_unchanged, snapshot
from tests.compat.flashinfer.inputs import LOG2_E

LN_2 = 1 / LOG2_E


def states(count: int, device: torch.device | str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """v [5, count, 3, 64], s [5, count, 3]; the values of an empty state are NaN."""
    generator = torch.Generator().manual_seed(count)
    v = torch.randn(5, count, 3, 64, generator=generator).to(dtype)
    s = torch.randn(5, count, 3, generator=generator) * 6
    s[0] = -torch.inf
    s[1, 0] = -torch.inf
    v[torch.isneginf(s)] = torch.nan
    return v.to(device), s.to(device)


def check(v: Tensor, s: Tensor, got: tuple[Tensor, Tensor]) -> None:
    outs, lses = v.cpu().transpose(0, 1), s.cpu().transpose(0, 1).double() * LN_2
    exact, naive = (
        reference.merge_states(outs.to(dtype), lses.to(dtype), dtype=dtype)
        for dtype in (torch.float64, torch.float32)
    )
    assert_matches("v", got[0].cpu(), exact[0], naive[0])
    assert_matches("s", got[1].cpu(), exact[1] * LOG2_E, naive[1] * LOG2_E)


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_many_states(count, dtype, device):
    v, s = states(count, device, dtype)
    before = snapshot(v=v, s=s)
    got = merge_states(v, s)
    assert got[0].dtype == dtype
    check(v, s, got)
    assert_unchanged(before)


def test_two_states(device):
    v, s = states(2, device, torch.bfloat16)
    got = merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    check(v, s, got)
    in_place = v[:, 0].clone(), s[:, 0].clone()
    merge_state_in_place(*in_place, v[:, 1], s[:, 1])
    for name, mine, other in zip(("v", "s"), in_place, got, strict=True):
        assert_same_bits(name, mine, other)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_a_mask_leaves_states_as_they_are(dtype, device):
    v, s = states(2, device, torch.bfloat16)
    want = merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    mask = torch.tensor([0, 1, 0, 1, 0], dtype=dtype, device=device)
    mine, lse = v[:, 0].clone(), s[:, 0].clone()
    merge_state_in_place(mine, lse, v[:, 1], s[:, 1], mask)
    is_merged = mask.bool()
    for name, got, merged, old in (("v", mine, want[0], v[:, 0]), ("s", lse, want[1], s[:, 0])):
        assert_same_bits(name, got[is_merged], merged[is_merged])
        assert_same_bits(name, got[~is_merged], old[~is_merged])


def test_wrong_states_are_refused_by_name():
    v, s = states(2, "cpu", torch.bfloat16)
    one = v[:, 0], s[:, 0]
    with pytest.raises(ValueError, match=r"merge_state: v_b.shape\[0\] \(seq_len\) must equal v_a"):
        merge_state(*one, v[1:, 1], s[1:, 1])
    with pytest.raises(TypeError, match="merge_state_in_place: s must be float32, got bfloat16"):
        merge_state_in_place(one[0], one[1].bfloat16(), *one)
    with pytest.raises(TypeError, match="mask must be bool or uint8, got int64"):
        merge_state_in_place(*one, *one, torch.ones(5, dtype=torch.int64))
    with pytest.raises(ValueError, match="v must be writable"):
        merge_state_in_place(one[0][:1].expand(5, 3, 64), one[1], *one)
    with pytest.raises(ValueError, match=r"s.shape\[1\] \(num_states\) must equal"):
        merge_states(v, s[:, :1])
    with pytest.raises(ValueError, match="must be at least one state, got 0"):
        merge_states(v[:, :0], s[:, :0])
