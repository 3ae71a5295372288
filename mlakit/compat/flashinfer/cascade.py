"""Merging attention states, whose lse is base 2."""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit import ops
from mlakit.compat.flashinfer.arguments import LN_2, LOG2_E
from mlakit.dispatch.checks import FLOATS, Dims

AXES = ("seq_len", "num_heads", "head_dim")


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two states over disjoint keys: v [seq_len, num_heads, head_dim], s base-2 lse.

    A state whose s is −inf is not read. Returns (v, s); s is float32.
    """
    dims = Dims("merge_state")
    for name, v, s in (("a", v_a, s_a), ("b", v_b, s_b)):
        dims.match(f"v_{name}", v, *AXES, dtypes=FLOATS)
        dims.match(f"s_{name}", s, *AXES[:2], dtypes=FLOATS)
    v, lse = ops.merge_states([v_a, v_b], [_natural(s_a), _natural(s_b)])
    return v, lse.mul_(LOG2_E)


def merge_state_in_place(
    v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None
) -> None:
    """Merge another state into (v, s), in place.

    mask  [seq_len] bool or uint8, where to merge; None is everywhere
    """
    dims = Dims("merge_state_in_place")
    dims.match("v", v, *AXES, dtypes=FLOATS)
    dims.match("s", s, *AXES[:2], dtypes=[torch.float32])
    dims.match("v_other", v_other, *AXES, dtypes=FLOATS)
    dims.match("s_other", s_other, *AXES[:2], dtypes=FLOATS)
    for name, written in (("v", v), ("s", s)):
        dims.writable(name, written)
    if mask is None:
        _, lse = ops.merge_states([v, v_other], [_natural(s), _natural(s_other)], out=v)
        s.copy_(lse.mul_(LOG2_E))
        return
    dims.match("mask", mask, AXES[0], dtypes=[torch.bool, torch.uint8])
    is_merged = mask.bool()[:, None]
    merged, lse = ops.merge_states([v, v_other], [_natural(s), _natural(s_other)])
    v.copy_(torch.where(is_merged[..., None], merged, v))
    s.copy_(torch.where(is_merged, lse.mul_(LOG2_E), s))


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the states v [seq_len, num_states, num_heads, head_dim], s [seq_len, num_states,
    num_heads] over disjoint keys."""
    dims = Dims("merge_states")
    dims.match("v", v, AXES[0], "num_states", *AXES[1:], dtypes=FLOATS)
    dims.match("s", s, AXES[0], "num_states", AXES[1], dtypes=FLOATS)
    dims.require(dims["num_states"] >= 1, "v.shape[1]", "be at least one state", 0)
    merged, lse = ops.merge_states(v.unbind(1), _natural(s).unbind(1))
    return merged, lse.mul_(LOG2_E)


def _natural(s: Tensor) -> Tensor:
    return s.float() * LN_2
