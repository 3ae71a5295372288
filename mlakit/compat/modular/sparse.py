"""`mla_sm100_prefill_sparse`: absorbed attention over the selected rows of each query."""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.compat.modular.arguments import check_key_cache
from mlakit.compat.modular.collection import KeyCache
from mlakit.dispatch.checks import FLOATS, INTEGERS, Dims, as_signed
from mlakit.formats import FORMATS
from mlakit.ops import sparse_mla

QK_DEPTH, V_DEPTH = 576, 512


def mla_sm100_prefill_sparse(
    output: Tensor,
    q: Tensor,
    kv_cache: KeyCache,
    indices: Tensor,
    topk_lengths: Tensor,
    attn_sink: Tensor | None,
    scale: float,
    *,
    num_q_heads: int,
    qk_depth: int,
    v_depth: int,
    indices_stride: int,
) -> Tensor:
    """Attention of every query token over the cache rows in its `indices`.

    output        [tokens, heads, 512] in q's dtype, written
    q             [tokens, heads, 576], absorbed and rotated
    kv_cache      a KeyCache of 576-wide rows
    indices       tokens × indices_stride physical rows, page · page_size + offset; negative and
                  too large ones are ignored. There is no mask: the selection must be causal
    topk_lengths  [tokens] valid entries of `indices`
    attn_sink     [heads] float32 logits (natural log) in the denominator of output, or None

    A duplicate row counts twice; a query without valid rows gives zeros, with and without a sink.
    Supports every device and head count. Returns `output`.
    """
    dims = Dims("mla_sm100_prefill_sparse")
    cache = check_key_cache(dims, "kv_cache", kv_cache)
    for name, depth, documented in (
        ("qk_depth", qk_depth, QK_DEPTH),
        ("v_depth", v_depth, V_DEPTH),
    ):
        dims.require(dims.integer(name, depth, 1) == documented, name, f"be {documented}", depth)
    widths = (cache.row.width, cache.row.v_width)
    dims.require(
        widths == (QK_DEPTH, V_DEPTH), "kv_cache", "have rows of 576 with 512 value columns", widths
    )
    format = cache.layer.codec.name
    dims.require(
        format in FORMATS,
        "kv_cache",
        "hold bf16, f16, f32, unit-scale float8 or rope-aware rows (others are dense only)",
        f"format {format}",
    )
    dims.require(
        cache.scales_lookup_table is None,
        "kv_cache",
        "have scales in the pages of its rows (an index has one page)",
        "a scales_lookup_table",
    )
    dims.bind("heads", dims.integer("num_q_heads", num_q_heads, 1), "num_q_heads")
    dims.bind("qk", QK_DEPTH, "qk_depth")
    dims.bind("v", V_DEPTH, "v_depth")
    stored = cache.layer.payload.dtype
    dtypes = (stored,) if stored in FLOATS else FLOATS
    dims.match("q", q, "tokens", "heads", "qk", dtypes=dtypes)
    dims.rows_contiguous("q", q)
    dims.match("output", output, "tokens", "heads", "v", dtypes=[q.dtype])
    dims.writable("output", output)
    rows = _check_indices(dims, indices, indices_stride)
    dims.match("topk_lengths", topk_lengths, "tokens", dtypes=INTEGERS)
    dims.lengths("topk_lengths", topk_lengths, rows.shape[1], "indices_stride")
    if attn_sink is not None:
        dims.match("attn_sink", attn_sink, "heads", dtypes=[torch.float32])
    scale = dims.finite("scale", scale)
    if len(q) == 0:
        return output

    sparse_mla(
        q,
        cache.layer.as_pool,
        rows,
        softmax_scale=scale,
        topk_lens=as_signed(topk_lengths),
        sink=attn_sink,
        out=output,
    )
    return output


def _check_indices(dims: Dims, indices: Tensor, indices_stride: int) -> Tensor:
    """The indices as [tokens, indices_stride], signed."""
    stride = dims.integer("indices_stride", indices_stride, 1)
    tensor = dims.tensor("indices", indices)
    dims.dtype("indices", tensor, *INTEGERS)
    dims.same_device("indices", tensor)
    tokens = dims["tokens"]
    shape = tuple(tensor.shape)
    dims.require(
        shape in ((tokens * stride,), (tokens, stride)),
        "indices",
        f"have {tokens} tokens × {stride} entries, in one axis or two",
        f"shape {shape}",
    )
    return as_signed(tensor).view(tokens, stride) if tensor.ndim == 1 else as_signed(tensor)
