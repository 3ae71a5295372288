"""`flash_attn_varlen_func` and its packed forms: attention over ragged batches, forward."""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.checks import FLOATS, Dims, UnsupportedError
from mlakit.masks import CAUSAL, NULL
from mlakit.ops import mla_prefill
from mlakit.ops._arguments import INTEGERS
from mlakit.ops._library import refuse_grad

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
       fp16 and f32; h_q is a multiple of h_kv, and KV head j serves query heads j·h_q/h_kv on
    cu_seqlens_qo, cu_seqlens_kv   [batch + 1]: where each request's rows start
    max_seqlen_qo, max_seqlen_kv, deterministic, is_varlen
                                   accepted and not needed: results are always deterministic
    causal                         the queries of a request are the newest of its tokens

    Returns out [total_q, h_q, d_v] and lse [total_q, h_q] float32, natural log. Where nothing was
    attended, out is 0 and lse −inf (here FlashMLA too has −inf).
    """
    return _attend(
        NAME,
        {"q": q, "k": k, "v": v},
        (("cu_seqlens_qo", cu_seqlens_qo), ("cu_seqlens_kv", cu_seqlens_kv)),
        dropout_p,
        softmax_scale,
        causal,
    )


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
    op = "flash_attn_varlen_qkvpacked_func"
    d = _check_packed(Dims(op), "qkv", qkv, head_dim_qk, parts=2)
    return _attend(
        op,
        {"q": qkv[:, :, :d], "k": qkv[:, :, d : 2 * d], "v": qkv[:, :, 2 * d :]},
        (("cu_seqlens", cu_seqlens), ("cu_seqlens", cu_seqlens)),
        dropout_p,
        softmax_scale,
        causal,
    )


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
    op = "flash_attn_varlen_kvpacked_func"
    d = _check_packed(Dims(op), "kv", kv, head_dim_qk, parts=1)
    return _attend(
        op,
        {"q": q, "k": kv[:, :, :d], "v": kv[:, :, d:]},
        (("cu_seqlens_qo", cu_seqlens_qo), ("cu_seqlens_kv", cu_seqlens_kv)),
        dropout_p,
        softmax_scale,
        causal,
    )


def _check_packed(dims: Dims, arg: str, packed: Tensor, head_dim_qk: int, *, parts: int) -> int:
    """head_dim_qk, of which a row holds `parts` before the value."""
    dims.match(arg, packed, "total", "heads", "columns")
    d = dims.integer("head_dim_qk", head_dim_qk, 1)
    columns = packed.shape[2]
    dims.require(columns > parts * d, f"{arg}.shape[2]", f"exceed {parts} · head_dim_qk", columns)
    return d


def _attend(
    op: str,
    tensors: dict[str, Tensor],  # q, k, v
    offsets: tuple[tuple[str, Tensor], tuple[str, Tensor]],  # of the queries, of the keys
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    dims = Dims(op)
    refuse_grad(op, **tensors)
    if dropout_p != 0.0:
        raise UnsupportedError(f"{op}: dropout_p must be 0.0, got {dropout_p}")
    _check_tensors(dims, **tensors)
    for (name, starts), total in zip(offsets, ("total_q", "total_kv"), strict=True):
        dims.match(name, starts, "batch + 1", dtypes=INTEGERS)
        dims.starts(name, starts, dims[total], total)
    q, k, v = tensors.values()
    scale = q.shape[2] ** -0.5
    if softmax_scale is not None:
        scale = dims.finite("softmax_scale", softmax_scale)

    out = q.new_empty(*q.shape[:2], v.shape[2])
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    for heads, own_k, own_v in _groups(q, k, v):
        mla_prefill(
            q[:, heads],
            own_k,
            k.new_empty(len(k), 0),  # a head's keys are its own: none of their columns is shared
            own_v,
            *(starts for _, starts in offsets),
            softmax_scale=scale,
            mask=CAUSAL if causal else NULL,
            out=out[:, heads],
            lse=lse[:, heads],
        )
    return out, lse


def _groups(q: Tensor, k: Tensor, v: Tensor) -> list[tuple[slice, Tensor, Tensor]]:
    """Query heads with keys and values for each of them, in the memory of k and v.

    All heads at once where each has its own keys, else those of one KV head: heads that repeat in
    groups have no single stride.
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
    h_q, h_kv = dims["h_q"], dims["h_kv"]
    dims.require(h_kv >= 1, "h_kv", "be at least 1", h_kv)
    dims.require(h_q >= h_kv and h_q % h_kv == 0, "h_q", f"be a multiple of h_kv, {h_kv}", h_q)
