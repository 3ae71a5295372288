"""Attention of ragged batches with a key and a value per KV head, for drop-ins."""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.dispatch.checks import FLOATS, Dims
from mlakit.model.masks import CAUSAL, NULL
from mlakit.ops import mla_prefill
from mlakit.ops._checks import INTEGERS
from mlakit.ops._refusals import refuse_grad


def attend(
    dims: Dims,
    q: Tensor,  # [total_q, h_q, d_qk]
    k: Tensor,  # [total_kv, h_kv, d_qk]
    v: Tensor,  # [total_kv, h_kv, d_v]
    q_starts: dict[str, Tensor],  # [batch + 1] by argument name; all of them are checked
    kv_starts: dict[str, Tensor],
    softmax_scale: dict[str, float | None],  # by argument name; None is d_qk ** -0.5
    causal: bool,
    out: Tensor | None = None,  # [total_q, h_q, d_v]
    lse: Tensor | None = None,  # [total_q, h_q] float32
) -> tuple[Tensor, Tensor]:
    """Attention of each request's queries, its newest tokens; gives out and the natural lse.

    Each KV head serves h_q / h_kv consecutive query heads.
    """
    refuse_grad(dims.op, q=q, k=k, v=v, out=out)
    _check_tensors(dims, q, k, v)
    for starts, total in ((q_starts, "total_q"), (kv_starts, "total_kv")):
        for name, offsets in starts.items():
            dims.match(name, offsets, "batch + 1", dtypes=INTEGERS)
            dims.starts(name, offsets, dims[total], total)
    scale = q.shape[2] ** -0.5
    for name, given in softmax_scale.items():
        scale = scale if given is None else dims.finite(name, given)
    if out is None:
        out = q.new_empty(*q.shape[:2], v.shape[2])
    if lse is None:
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    dims.match("out", out, "total_q", "h_q", "d_v", dtypes=[q.dtype])
    dims.match("lse", lse, "total_q", "h_q", dtypes=[torch.float32])
    for name, result in (("out", out), ("lse", lse)):
        dims.writable(name, result)
    if out.numel() == 0:
        return out, lse
    for heads, group_k, group_v in _groups(q, k, v):
        mla_prefill(
            q[:, heads],
            group_k,
            k.new_empty(len(k), 0),  # no key columns are shared by all heads
            group_v,
            *q_starts.values(),
            *kv_starts.values(),
            softmax_scale=scale,
            mask=CAUSAL if causal else NULL,
            out=out[:, heads],
            lse=lse[:, heads],
        )
    return out, lse


def _groups(q: Tensor, k: Tensor, v: Tensor) -> list[tuple[slice, Tensor, Tensor]]:
    """Return (query heads, keys, values) of each call, in the memory of k and v.

    One call if every query head has its own KV head, otherwise one per KV head: repeated KV heads
    have no single stride.
    """
    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    if group == 1:
        return [(slice(None), k, v)]
    return [
        (
            slice(head * group, (head + 1) * group),
            k[:, head : head + 1].expand(-1, group, -1),
            v[:, head : head + 1].expand(-1, group, -1),
        )
        for head in range(kv_heads)
    ]


def _check_tensors(dims: Dims, q: Tensor, k: Tensor, v: Tensor) -> None:
    dims.match("q", q, "total_q", "h_q", "d_qk", dtypes=FLOATS)
    dims.match("k", k, "total_kv", "h_kv", "d_qk", dtypes=[q.dtype])
    dims.match("v", v, "total_kv", "h_kv", "d_v", dtypes=[q.dtype])
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        dims.rows_contiguous(name, tensor)
    for axis in ("d_qk", "d_v"):
        dims.require(dims[axis] >= 1, axis, "be at least 1", dims[axis])
    h_q, h_kv = dims["h_q"], dims["h_kv"]
    dims.require(h_kv >= 1, "h_kv", "be at least 1", h_kv)
    dims.require(h_q >= h_kv and h_q % h_kv == 0, "h_q", f"be a multiple of h_kv, {h_kv}", h_q)
