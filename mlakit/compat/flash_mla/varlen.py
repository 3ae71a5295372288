"""`flash_attn_varlen_func` and its packed forms: dense prefill over ragged batches."""

from __future__ import annotations

from torch import Tensor

from mlakit.compat.dense_prefill import attend
from mlakit.dispatch.checks import Dims, UnsupportedError

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
    if dropout_p != 0.0:
        raise UnsupportedError(f"{dims.op}: dropout_p must be 0.0, got {dropout_p}")
    return attend(dims, q, k, v, q_starts, kv_starts, {"softmax_scale": softmax_scale}, causal)
