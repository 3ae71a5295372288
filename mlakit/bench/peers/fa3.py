"""FlashAttention-3: an installed `flash_attn_interface`, or the one out of vLLM's wheel.

Absorbed attention is called as vLLM calls it: the rotated columns are its keys, the latent ones its
values and, with `qv`, its keys too, all views into the pages. A list of rows per token is a table
of pages of one row.
"""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mlakit.bench.peers import folder
from mlakit.bench.peers.peer import Call, CannotTake, Peer, installed_or_fetched
from mlakit.bench.problems import (
    LATENT,
    ROPE,
    DenseDecode,
    DensePrefill,
    Problem,
    SparseDecode,
    SparsePrefill,
)

MOST_SCHEDULED = 992  # requests that can be scheduled before the call


def load() -> ModuleType:
    return installed_or_fetched("flash_attn_interface", folder.FA3_WRAPPER, _load_fetched)


def _load_fetched(fetched: Path) -> ModuleType:
    folder.load_packed_library(fetched / folder.FA3_PACKED, fetched / folder.FA3)
    return folder.load_wrapper(fetched / folder.FA3_WRAPPER, "fa3")


def prepare(problem: Problem) -> Call:
    match problem:
        case DenseDecode():
            return _decode(load(), problem)
        case SparsePrefill():
            return _sparse_prefill(load(), problem)
        case SparseDecode():
            raise CannotTake("reads no rows of 656 bytes")
        case DensePrefill():
            return _dense_prefill(load(), problem)


def _decode(library: ModuleType, problem: DenseDecode) -> Call:
    build = _vllm_decode if _is_vllms(library) else _upstream_decode
    return build(library, problem)


def _sparse_prefill(library: ModuleType, problem: SparsePrefill) -> Call:
    tokens, topk = problem.indices.shape
    if problem.indices.min() < 0 or problem.indices.max() >= problem.kv.shape[0]:
        raise CannotTake("takes no lists with invalid rows")
    as_pages = DenseDecode(
        problem.q.unsqueeze(1),
        problem.kv.unsqueeze(1),
        problem.indices,
        torch.full((tokens,), topk, dtype=torch.int32, device=problem.q.device),
        problem.softmax_scale,
        causal=False,
    )
    call = _decode(library, as_pages)
    return lambda: call().squeeze(1)


def _vllm_decode(library: ModuleType, problem: DenseDecode) -> Call:
    """The interface of vLLM's build: queries are ragged, `qv` is `q_v`."""
    batch, s_q, heads, _ = problem.q.shape
    q_latent, q_rope = _columns(problem.q.flatten(0, 1))
    latent, rope = _columns(problem.pages.unsqueeze(2))
    starts = s_q * torch.arange(batch + 1, dtype=torch.int32, device=problem.q.device)
    longest = int(problem.kv_lens.max())
    schedule = _schedule(library, problem, longest, cu_seqlens_q=starts)

    def call() -> Tensor:
        out: Tensor = library.flash_attn_varlen_func(
            q=q_rope,
            k=rope,
            v=latent,
            q_v=q_latent,
            max_seqlen_q=s_q,
            cu_seqlens_q=starts,
            max_seqlen_k=longest,
            seqused_k=problem.kv_lens,
            block_table=problem.page_table,
            softmax_scale=problem.softmax_scale,
            causal=problem.causal,
            scheduler_metadata=schedule,
            fa_version=3,
        )
        return out.view(batch, s_q, heads, LATENT)

    return call


def _upstream_decode(library: ModuleType, problem: DenseDecode) -> Call:
    q_latent, q_rope = _columns(problem.q)
    latent, rope = _columns(problem.pages.unsqueeze(2))
    # what it takes for the longest request, having no other way to know
    capacity = problem.page_table.shape[1] * problem.pages.shape[1]
    schedule = _schedule(library, problem, capacity)

    def call() -> Tensor:
        return _out(
            library.flash_attn_with_kvcache(
                q_rope,
                rope,
                latent,
                qv=q_latent,
                cache_seqlens=problem.kv_lens,
                page_table=problem.page_table,
                softmax_scale=problem.softmax_scale,
                causal=problem.causal,
                scheduler_metadata=schedule,
            )
        )

    return call


def _schedule(
    library: ModuleType, problem: DenseDecode, longest: int, **ragged: Tensor
) -> Tensor | None:
    """Made before the call, as vLLM does; but not for lists of rows, nor for very many requests."""
    batch, s_q, heads, _ = problem.q.shape
    page_size = problem.pages.shape[1]
    if page_size == 1 or batch > MOST_SCHEDULED:
        return None
    schedule: Tensor = library.get_scheduler_metadata(
        batch_size=batch,
        max_seqlen_q=s_q,
        max_seqlen_k=longest,
        num_heads_q=heads,
        num_heads_kv=1,
        headdim=ROPE,
        cache_seqlens=problem.kv_lens,
        qkv_dtype=problem.q.dtype,
        headdim_v=LATENT,
        page_size=page_size,
        causal=problem.causal,
        **ragged,
    )
    return schedule


def _dense_prefill(library: ModuleType, problem: DensePrefill) -> Call:
    version = {"fa_version": 3} if _is_vllms(library) else {}

    def call() -> Tensor:
        return _out(
            library.flash_attn_varlen_func(
                q=problem.q,
                k=problem.k,
                v=problem.v,
                cu_seqlens_q=problem.starts,
                cu_seqlens_k=problem.starts,
                max_seqlen_q=problem.max_len,
                max_seqlen_k=problem.max_len,
                softmax_scale=problem.softmax_scale,
                causal=problem.causal,
                **version,
            )
        )

    return call


def _is_vllms(library: ModuleType) -> bool:
    return "fa_version" in signature(library.flash_attn_varlen_func).parameters


def _columns(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The latent and the rotated columns, without a copy."""
    return rows[..., :LATENT], rows[..., LATENT:]


def _out(result: Any) -> Tensor:
    """Older releases return the log-sum-exp as well."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


PEER = Peer("fa3", load, prepare)
