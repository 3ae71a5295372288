"""`flash_attn_varlen_func` and its packed forms: dense prefill over ragged batches."""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.dispatch.checks import FLOATS, Dims, UnsupportedError
from mlakit.model.masks import CAUSAL, NULL
from mlakit.ops import mla_prefill
from mlakit.ops._checks import INTEGERS
from mlakit.ops._refusals import refuse_grad

NAME = "flash_attn_varlen_func"


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_qo: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[Tensor, Tensor]:
    """Multi-head attention of each request's queries over its keys.

    q  [total_q, h_q, d_qk], k [total_kv, h_kv, d_qk], v [total_kv, h_kv, d_v], one dtype of bf16,
       fp16 and f32; each KV head serves h_q / h_kv consecutive query heads
    cu_seqlens_qo, cu_seqlens_kv   [batch + 1]: the first row of each request
    max_seqlen_qo, max_seqlen_kv, deterministic, is_varlen
                                   accepted without effect: results are always deterministic
    causal                         the queries of a request are its newest tokens

    Returns out [total_q, h_q, d_v] and lse [total_q, h_q] float32, natural log. For a query that
    sees no key, out is 0 and lse is −inf (as in FlashMLA, unlike decoding).
    """
    starts = {"cu_seqlens_qo": cu_seqlens_qo}, {"cu_seqlens_kv": cu_seqlens_kv}
    return _attend(Dims(NAME), q, k, v, *starts, dropout_p, softmax_scale, causal)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[Tensor, Tensor]:
    """`flash_attn_varlen_func` of qkv [total, heads, 2 · head_dim_qk + d_v]."""
    dims = Dims("flash_attn_varlen_qkvpacked_func")
    q, k, v = _unpack(dims.op, "qkv", qkv, head_dim_qk)
    starts = {"cu_seqlens": cu_seqlens}
    return _attend(dims, q, k, v, starts, starts, dropout_p, softmax_scale, causal)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_qo: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[Tensor, Tensor]:
    """`flash_attn_varlen_func` of kv [total_kv, h_kv, head_dim_qk + d_v]."""
    dims = Dims("flash_attn_varlen_kvpacked_func")
    k, v = _unpack(dims.op, "kv", kv, head_dim_qk)
    starts = {"cu_seqlens_qo": cu_seqlens_qo}, {"cu_seqlens_kv": cu_seqlens_kv}
    return _attend(dims, q, k, v, *starts, dropout_p, softmax_scale, causal)


def _unpack(op: str, arg: str, packed: Tensor, head_dim_qk: int) -> list[Tensor]:
    """The tensors that `arg` ("qkv" or "kv") names; all but v have head_dim_qk columns."""
    dims = Dims(op)
    dims.match(arg, packed, "total", "heads", "columns")
    d = dims.integer("head_dim_qk", head_dim_qk, 1)
    columns, before_v = packed.shape[2], len(arg) - 1
    must = f"exceed {before_v} · head_dim_qk"
    dims.require(columns > before_v * d, f"{arg}.shape[2]", must, columns)
    return [*packed[:, :, : before_v * d].split(d, dim=2), packed[:, :, before_v * d :]]


def _attend(
    dims: Dims,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: dict[str, Tensor],  # by argument name
    kv_starts: dict[str, Tensor],
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    refuse_grad(dims.op, q=q, k=k, v=v)
    if dropout_p != 0.0:
        raise UnsupportedError(f"{dims.op}: dropout_p must be 0.0, got {dropout_p}")
    _check_tensors(dims, q, k, v)
    for starts, total in ((q_starts, "total_q"), (kv_starts, "total_kv")):
        for name, offsets in starts.items():
            dims.match(name, offsets, "batch + 1", dtypes=INTEGERS)
            dims.starts(name, offsets, dims[total], total)
    scale = q.shape[2] ** -0.5
    if softmax_scale is not None:
        scale = dims.finite("softmax_scale", softmax_scale)

    out = q.new_empty(*q.shape[:2], v.shape[2])
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
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
