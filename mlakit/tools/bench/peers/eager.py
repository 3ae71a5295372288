"""Eager attention as in transformers: scores, mask, softmax in float32, P·V.

Paged rows are gathered before the clock starts, since the cache of transformers is contiguous.
Top-k rows are gathered and FP8 rows are dequantised in the call. Heads share rows without copies.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from mlakit.formats import row_codec
from mlakit.model.geometry import RowShape
from mlakit.tools.bench.peers.peer import Call, Peer, Unsupported
from mlakit.tools.bench.problems import (
    LATENT,
    ROPE,
    Attention,
    DenseDecode,
    DensePrefill,
    SparseDecode,
    SparsePrefill,
)

BYTES_PER_SCORE = 12  # scores and P in the dtype of q, float32 in the softmax, the mask
BYTES_PER_FP8_ROW = 8 * (LATENT + ROPE)  # the FP8 row, and its float32 and bf16 copies


def load() -> str:
    """Always available."""
    return f"torch {torch.__version__}"


def prepare(problem: Attention) -> Call:
    match problem:
        case DenseDecode():
            return _dense_decode(problem)
        case SparsePrefill():
            return _sparse_prefill(problem)
        case SparseDecode():
            return _sparse_decode(problem)
        case DensePrefill():
            return _dense_prefill(problem)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """q [..., queries, width], k and v [..., keys, width]; `bias` is 0 or -inf."""
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    if bias is not None:
        scores = scores + bias
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v)


def _dense_decode(problem: DenseDecode) -> Call:
    batch, s_q, heads, width = problem.q.shape
    longest = int(problem.kv_lens.max())
    _require_memory(problem.q, batch * longest * (2 * width + s_q * heads * BYTES_PER_SCORE))
    if problem.kv_lens.min() < (s_q if problem.causal else 1):
        raise Unsupported("does not support a softmax over no keys")
    page_size = problem.pages.shape[1]
    # table entries past a request's last page are arbitrary
    positions = torch.arange(longest, device=problem.q.device).expand(batch, -1)
    last = problem.kv_lens[:, None].long() - 1
    within = positions.minimum(last)
    page = problem.page_table.long().gather(1, within // page_size)
    rows = problem.pages[page, within % page_size]  # [b, longest, 576]
    ends = last + 1 - (torch.arange(s_q - 1, -1, -1, device=last.device) if problem.causal else 0)
    hidden = positions[:, None] >= ends.expand(batch, s_q)[:, :, None]  # [b, s_q, longest]
    bias = _bias(hidden.repeat_interleave(heads, dim=1), problem.q.dtype)
    q = problem.q.flatten(1, 2)

    def call() -> Tensor:
        out = attend(q, rows, rows[..., :LATENT], problem.softmax_scale, bias)
        return out.view(batch, s_q, heads, LATENT)

    return call


def _sparse_prefill(problem: SparsePrefill) -> Call:
    tokens, heads, width = problem.q.shape
    topk = problem.indices.shape[-1]
    _require_memory(problem.q, tokens * topk * (2 * width + heads * BYTES_PER_SCORE))
    listed, bias = _listed(problem.indices, problem.kv.shape[0], problem.q.dtype)

    def call() -> Tensor:
        rows = problem.kv[listed]  # [tokens, topk, 576]
        return attend(problem.q, rows, rows[..., :LATENT], problem.softmax_scale, bias)

    return call


def _sparse_decode(problem: SparseDecode) -> Call:
    batch, s_q, heads, _ = problem.q.shape
    topk = problem.indices.shape[-1]
    _require_memory(problem.q, batch * s_q * topk * (BYTES_PER_FP8_ROW + heads * BYTES_PER_SCORE))
    codec = row_codec("fp8_block128", RowShape(LATENT, ROPE))
    pool = problem.pages.flatten(0, 1)
    listed, bias = _listed(problem.indices.flatten(0, 1), pool.shape[0], problem.q.dtype)
    q = problem.q.flatten(0, 1)

    def call() -> Tensor:
        rows = codec.decode(pool[listed], None, dtype=q.dtype)
        out = attend(q, rows, rows[..., :LATENT], problem.softmax_scale, bias)
        return out.view(batch, s_q, heads, LATENT)

    return call


def _dense_prefill(problem: DensePrefill) -> Call:
    """Request by request, to keep the scores of one request at a time."""
    heads, longest = problem.q.shape[1], problem.max_len
    _require_memory(problem.q, heads * longest * longest * BYTES_PER_SCORE)
    requests = [slice(*ends) for ends in pairwise(problem.starts.tolist())]
    bias = None
    if problem.causal:
        square = torch.ones(longest, longest, dtype=torch.bool, device=problem.q.device)
        bias = _bias(square.triu(1), problem.q.dtype)

    def call() -> Tensor:
        out = torch.empty_like(problem.v)
        for own in requests:
            q, k, v = (each[own].transpose(0, 1) for each in (problem.q, problem.k, problem.v))
            length = q.shape[1]
            seen = None if bias is None else bias[:length, :length]
            out[own] = attend(q, k, v, problem.softmax_scale, seen).transpose(0, 1)
        return out

    return call


def _listed(indices: Tensor, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Valid indices [tokens, topk] to gather, and the bias that masks the invalid ones."""
    invalid = (indices < 0) | (indices >= num_rows)
    if invalid.all(-1).any():
        raise Unsupported("does not support a softmax over no keys")
    return indices.long().masked_fill(invalid, 0), _bias(invalid[:, None], dtype)


def _bias(hidden: Tensor, dtype: torch.dtype) -> Tensor | None:
    """-inf where `hidden`, else 0; None if nothing is hidden."""
    if not hidden.any():
        return None
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill(
        hidden, -torch.inf
    )


def _require_memory(like: Tensor, num_bytes: int) -> None:
    """On a GPU: raise Unsupported unless so much memory is free or cached by torch."""
    if not like.is_cuda:
        return
    kept = torch.cuda.memory_reserved(like.device) - torch.cuda.memory_allocated(like.device)
    free = torch.cuda.mem_get_info(like.device)[0] + kept
    if num_bytes > free:
        gib = 1 << 30
        raise Unsupported(f"needs {num_bytes / gib:.0f} GiB, and {free / gib:.0f} are free")


PEER = Peer("eager", "eager attention as in transformers", load, prepare, in_grid=False)
