"""`flash_mla_sparse_fwd`: sparse prefill, attention of query tokens over selected rows."""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.compat.flash_mla.results import flash_mla_lse
from mlakit.compat.flash_mla.rows import row_format, wrap_cache
from mlakit.dispatch.checks import FLOATS, Dims
from mlakit.ops import sparse_mla
from mlakit.ops._checks import INTEGERS
from mlakit.ops._refusals import refuse_grad

NAME = "flash_mla_sparse_fwd"


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    *,
    out: Tensor | None = None,
    indexer_topk: int = 0,
) -> tuple[Tensor, ...]:
    """Attention of every query over the rows of `kv` in its `indices`; there is no batch axis.

    q             [s_q, h_q, d_qk] bf16, fp16 or f32
    kv            [s_kv, 1, d_qk] in q's dtype
    indices       [s_q, 1, topk]; indices outside [0, s_kv) are ignored
    d_v           number of leading columns of a row that are the value
    attn_sink     [h_q] float32 logit in the denominator of out, not in lse
    topk_length   [s_q] valid entries of `indices`
    out           [s_q, h_q, d_v] to write to
    indexer_topk  if positive, also returns the lse over the first `indexer_topk` entries, [s_q,
                  h_q] (for the training loss of an indexer); needs a second pass

    Returns (out [s_q, h_q, d_v], max_logits [s_q, h_q], lse [s_q, h_q]); max_logits and lse are
    float32, lse is natural log. Without valid entries, out is 0, max_logits −inf and lse +inf.
    """
    dims = Dims(NAME)
    refuse_grad(NAME, q=q, kv=kv, out=out)
    dims.match("q", q, "s_q", "h_q", "d_qk", dtypes=FLOATS)
    dims.rows_contiguous("q", q)
    width = dims.integer("d_v", d_v, 1)
    dims.require(width <= dims["d_qk"], "d_v", f"not exceed d_qk of q, {dims['d_qk']}", width)
    dims.bind("h_kv", 1, "the one KV head")
    dims.match("kv", kv, "s_kv", "h_kv", "d_qk", dtypes=[q.dtype])
    dims.match("indices", indices, "s_q", "h_kv", "topk", dtypes=INTEGERS)
    scale = dims.finite("sm_scale", sm_scale)
    if attn_sink is not None:
        dims.match("attn_sink", attn_sink, "h_q", dtypes=[torch.float32])
    if topk_length is not None:
        dims.match("topk_length", topk_length, "s_q", dtypes=INTEGERS)
        dims.lengths("topk_length", topk_length, dims["topk"], "topk")
    prefix = dims.integer("indexer_topk", indexer_topk, 0)
    dims.bind("d_v", width, "d_v")
    if out is None:
        out = q.new_empty(*q.shape[:2], width)
    dims.match("out", out, "s_q", "h_q", "d_v", dtypes=[q.dtype])
    dims.writable("out", out)

    # page size 1, so that one kernel supports every s_kv
    pool = wrap_cache(dims, "kv", kv, *row_format(dims, "kv", kv, q, width))
    rows = indices[:, 0]
    lse, max_logits = (q.new_empty(q.shape[:2], dtype=torch.float32) for _ in range(2))
    if q.numel() > 0:
        sparse_mla(
            q,
            pool,
            rows,
            softmax_scale=scale,
            topk_lens=topk_length,
            sink=attn_sink,
            out=out,
            lse=lse,
            max_logits=max_logits,
        )
    lse = flash_mla_lse(lse)
    if prefix == 0:
        return out, max_logits, lse
    if prefix >= rows.shape[1] or q.numel() == 0:
        return out, max_logits, lse, lse.clone()
    valid = None if topk_length is None else topk_length.clamp(max=prefix)
    _, prefix_lse, _ = sparse_mla(q, pool, rows[:, :prefix], softmax_scale=scale, topk_lens=valid)
    return out, max_logits, lse, flash_mla_lse(prefix_lse)
