"""FlashAttention-3: an installed `flash_attn_interface`, or the build in vLLM's wheel.

Absorbed attention is called as in vLLM: K is the rope columns, V the latent columns, and `qv` adds
the latent part of the scores; all are views into the pages. Top-k rows are a page table with pages
of one row.
"""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mlakit.tools.bench.peers import fetched
from mlakit.tools.bench.peers.peer import Call, Peer, Unsupported, installed_or_fetched
from mlakit.tools.bench.problems import (
    LATENT,
    ROPE,
    Attention,
    DenseDecode,
    DensePrefill,
    SparseDecode,
    SparsePrefill,
)

MAX_SCHEDULED = 992  # requests the scheduler metadata supports


def load() -> ModuleType:
    return installed_or_fetched("flash_attn_interface", fetched.FA3_WRAPPER, _load_fetched)


def _load_fetched(folder: Path) -> ModuleType:
    fetched.load_packed_library(folder / fetched.FA3_PACKED, folder / fetched.FA3)
    return fetched.load_wrapper(folder / fetched.FA3_WRAPPER, "fa3")


def prepare(problem: Attention) -> Call:
    match problem:
        case DenseDecode():
            return _decode(load(), problem)
        case SparsePrefill():
            return _sparse_prefill(load(), problem)
        case SparseDecode():
            raise Unsupported("does not support 656-byte FP8 rows")
        case DensePrefill():
            return _dense_prefill(load(), problem)


def _decode(library: ModuleType, problem: DenseDecode) -> Call:
    build = _vllm_decode if _is_vllm_build(library) else _upstream_decode
    return build(library, problem)


def _sparse_prefill(library: ModuleType, problem: SparsePrefill) -> Call:
    tokens, topk = problem.indices.shape
    if problem.indices.min() < 0 or problem.indices.max() >= problem.kv.shape[0]:
        raise Unsupported("does not support invalid indices")
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
    """The interface of vLLM's build: ragged queries, and `q_v` instead of `qv`."""
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
    # it assumes this length for the longest request
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
    """Scheduler metadata, made before the call as in vLLM; None for top-k and large batches."""
    batch, s_q, heads, _ = problem.q.shape
    page_size = problem.pages.shape[1]
    if page_size == 1 or batch > MAX_SCHEDULED:
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
    version = {"fa_version": 3} if _is_vllm_build(library) else {}

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


def _is_vllm_build(library: ModuleType) -> bool:
    return "fa_version" in signature(library.flash_attn_varlen_func).parameters


def _columns(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The latent and the rope columns, without a copy."""
    return rows[..., :LATENT], rows[..., LATENT:]


def _out(result: Any) -> Tensor:
    """The output; older releases also return the log-sum-exp."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


PEER = Peer("fa3", "FlashAttention-3", load, prepare, packages=("flash_attn_3",))
