"""`trtllm_batch_decode_with_kv_cache_mla`: dense and sparse decoding over rows in one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache
from mlakit.compat.flashinfer.arguments import LOG2_E, one_of, refuse
from mlakit.dispatch.checks import E4M3, Dims
from mlakit.model.geometry import RowShape
from mlakit.ops import mla_decode, sparse_mla
from mlakit.ops._checks import INTEGERS

NAME = "trtllm_batch_decode_with_kv_cache_mla"
BACKENDS = ("auto", "xqa", "trtllm-gen", "cute-dsl", "sparse")
NATURAL_LSE = ("cute-dsl",)
SCALE_FORMATS = ("auto", "pow2_fp32", "arbitrary_fp32")


def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor | None,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: Tensor | None = None,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    sinks: Sequence[Tensor] | Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: Tensor | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    sparse_mla_top_k_lens: Tensor | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of each request's newest tokens over its rows, or over the rows listed.

    query         [batch, q_len, heads, kv_lora_rank + qk_rope_head_dim]; with cum_seq_lens_q
                  [batch + 1] it is [tokens, heads, …]. bf16, fp16, f32 or e4m3
    kv_cache      [pages, page_size, row] or [pages, 1, page_size, row] in q's dtype or e4m3; rows
                  of 656 bytes (uint8) have their scales inside
    block_tables  [batch, columns] pages; with sparse_mla_top_k [batch, q_len, top_k], or
                  [tokens, top_k], rows of the cache, of which negative ones do not count
    seq_lens      [batch] cached tokens, the queries included. Sparse over 656-byte rows: [batch,
                  q_len] or [batch · q_len] valid entries of each list, or None; over other rows
                  it is not read, and sparse_mla_top_k_lens [tokens] says how many are valid
    bmm1_scale    softmax scale times the scales of q and K; a number or a tensor of one float32
    bmm2_scale    scale of V and of the result
    sinks         [heads] float32, itself or in a list; joins out's denominator only
    backend       auto, xqa, trtllm-gen, cute-dsl or sparse: only the base of lse depends on it
    lse           float32 to write to: [tokens, heads], or [batch, q_len, heads]
    enable_dcp    the cache holds the tokens p with p % cp_world == cp_rank, and
                  causal_seqlens_kv_global [batch] counts those of all ranks; merge the results

    Returns out [..., heads, kv_lora_rank] in q's dtype (bf16 for e4m3), with return_lse also the
    lse, base 2, or natural with backend "cute-dsl" as there; −inf where no key is seen.
    """
    dims = Dims(NAME)
    refuse(
        NAME,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        uses_shared_paged_kv_idx=uses_shared_paged_kv_idx,
        use_fp16_softmax=use_fp16_softmax,
    )
    one_of(dims, "backend", backend, *BACKENDS)
    one_of(dims, "kv_scale_format", kv_scale_format, *SCALE_FORMATS)
    row = RowShape(
        dims.integer("kv_lora_rank", kv_lora_rank, 1),
        dims.integer("qk_rope_head_dim", qk_rope_head_dim, 0),
    )
    dims.bind("row width", row.width, "kv_lora_rank + qk_rope_head_dim")
    q, q_starts = _queries(dims, query, cum_seq_lens_q)
    call, out_factor = _scaled(dims, kv_cache, row, bmm1_scale, bmm2_scale, len(q))
    shape = (*query.shape[:-1], row.v_width)
    if sinks is not None:
        call["sink"] = _sink(dims, sinks)
    if out is not None:
        call["out"] = _as_tokens(dims, "out", out, shape, query.ndim - 2)
    if lse is not None:
        lse_shape = q.shape[:2] if lse.ndim == 2 else shape[:-1]
        call["lse"] = _as_tokens(dims, "lse", lse, lse_shape, lse.ndim - 1)
    if dims.integer("sparse_mla_top_k", sparse_mla_top_k, 0):
        dims.require(not enable_dcp, "enable_dcp", "be False with sparse_mla_top_k", enable_dcp)
        dims.bind("top_k", sparse_mla_top_k, "sparse_mla_top_k")
        axes = ("tokens", "top_k") if query.ndim == 3 else ("batch", "q_len", "top_k")
        rows = dims.match("block_tables", block_tables, *axes, dtypes=INTEGERS).flatten(0, -2)
        has_byte_rows = kv_cache.dtype in (torch.uint8, torch.int8)
        valid = seq_lens if has_byte_rows else sparse_mla_top_k_lens
        valid = None if valid is None else dims.tensor("seq_lens", valid).flatten()
        attended, natural, _ = sparse_mla(q, rows=rows, topk_lens=valid, **call)
    else:
        refuse(NAME, sparse_mla_top_k_lens=sparse_mla_top_k_lens)
        lengths = seq_lens
        if enable_dcp:
            dims.require(return_lse, "return_lse", "be True with enable_dcp", return_lse)
            lengths, call["kv_shard"] = causal_seqlens_kv_global, (cp_rank, cp_world, 1)
        else:
            refuse(NAME, causal_seqlens_kv_global=causal_seqlens_kv_global)
            dims.require(cp_world == 1, "cp_world", "be 1 without enable_dcp", cp_world)
        name = "causal_seqlens_kv_global" if enable_dcp else "seq_lens"
        kv_lens = dims.match(name, lengths, "batch", dtypes=INTEGERS)
        dims.match("block_tables", block_tables, "batch", "columns", dtypes=INTEGERS)
        attended, natural = mla_decode(
            q, page_table=block_tables, kv_lens=kv_lens, q_starts=q_starts, **call
        )
    if out_factor is not None:
        attended.mul_(out_factor)
    out = attended.view(shape) if out is None else out
    if (return_lse or lse is not None) and backend not in NATURAL_LSE:
        natural.mul_(LOG2_E)
    return (out, natural if lse is None else lse) if return_lse else out


def _scaled(
    dims: Dims,
    kv_cache: Tensor,
    row: RowShape,
    bmm1_scale: float | Tensor,
    bmm2_scale: float | Tensor,
    tokens: int,
) -> tuple[dict[str, Any], float | Tensor | None]:
    """The arguments of an op that the scales decide, and a factor of its result."""
    blocks = dims.tensor("kv_cache", kv_cache)
    if blocks.ndim == 4:
        dims.require(blocks.shape[1] == 1, "kv_cache.shape[1]", "be 1", blocks.shape[1])
        blocks = blocks.squeeze(1)
    first, second = _factor(dims, "bmm1_scale", bmm1_scale), _factor(dims, "bmm2_scale", bmm2_scale)
    call: dict[str, Any] = {}
    out_factor: float | Tensor | None = None
    if blocks.dtype == E4M3:  # a row is K and V: V's scale is the pool's, the rest is of the scores
        call["cache"] = PagedLatentCache.wrap(blocks, row, tensor_scale=second)
        first = first / second
    else:
        call["cache"] = PagedLatentCache.wrap(blocks, row)
        out_factor = None if isinstance(second, float) and second == 1.0 else second
    if isinstance(first, Tensor):
        call.update(softmax_scale=1.0, q_scale=first.expand(tokens))
    else:
        call["softmax_scale"] = first
    return call, out_factor


def _queries(dims: Dims, query: Tensor, cum_seq_lens_q: Tensor | None) -> tuple[Tensor, Tensor]:
    """(q [tokens, heads, width], q_starts [batch + 1])."""
    dims.tensor("query", query)
    if cum_seq_lens_q is not None:
        dims.match("query", query, "tokens", "heads", "row width")
        dims.match("cum_seq_lens_q", cum_seq_lens_q, "batch + 1", dtypes=INTEGERS)
        dims.bind("batch", len(cum_seq_lens_q) - 1, "one less than cum_seq_lens_q")
        return query, cum_seq_lens_q
    dims.match("query", query, "batch", "q_len", "heads", "row width")
    batch, q_len = query.shape[:2]
    starts = torch.arange(0, batch + 1, dtype=torch.int32, device=query.device) * q_len
    dims.bind("tokens", batch * q_len, "the tokens of query")
    return query.flatten(0, 1), starts


def _factor(dims: Dims, arg: str, value: float | Tensor) -> float | Tensor:
    """A number, or a tensor [1] float32."""
    if not isinstance(value, Tensor):
        return dims.finite(arg, value)
    dims.dtype(arg, value, torch.float32)
    dims.require(value.numel() == 1, arg, "have one element", f"shape {tuple(value.shape)}")
    dims.same_device(arg, value)
    return value.reshape(1)


def _sink(dims: Dims, sinks: Sequence[Tensor] | Tensor) -> Tensor:
    if isinstance(sinks, Tensor):
        return sinks
    dims.require(len(sinks) == 1, "sinks", "be one tensor", f"{len(sinks)} tensors")
    return sinks[0]


def _as_tokens(dims: Dims, arg: str, given: Tensor, shape: Sequence[int], joined: int) -> Tensor:
    """A view of a tensor to write to, whose first `joined` axes are one."""
    got = tuple(given.shape)
    dims.require(got == tuple(shape), arg, f"have shape {tuple(shape)}", got)
    if joined == 1:
        return given
    dims.require(given.is_contiguous(), arg, "be contiguous", f"strides {given.stride()}")
    return given.flatten(0, 1)
