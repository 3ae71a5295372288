"""vLLM's wheel for CUDA on a machine without CUDA, for tests only.

vLLM loads `install` in every process, as a plugin beside mlakit's (`engine.plugin_folder`). It
supplies the few compiled CPU ops that the wheel has not, as Python, and takes back what the CPU
platform decides for MLA: which backend runs, and that there is no chunked prefill and no prefix
cache. What it does not touch is vLLM as it is released, and mlakit.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CALLS = "MLAKIT_TEST_CALLS"  # a folder: one empty file for each entry call of each process
ORACLE = "MLAKIT_TEST_ORACLE"  # decode by a float64 oracle instead
_LIBRARY: list[torch.library.Library] = []


def install() -> None:
    """Idempotent, as plugins must be."""
    if _LIBRARY:
        return
    from mlakit.integrations.vllm import seams

    _LIBRARY.extend(torch.library.Library(name, "FRAGMENT") for name in ("_C", "_C_cache_ops"))
    _define_ops(_LIBRARY)
    _take_the_asked_backend()
    _keep_chunks_and_prefixes()
    _map_slots()
    if seams.RELEASES.installed < (0, 27):
        _do_not_pin()
        _merge_contexts()
    _correct_shards()
    _record_calls()
    if os.environ.get(ORACLE):
        from mlakit.integrations import steps

        steps.decode = oracle


def _define_ops(libraries: list[torch.library.Library]) -> None:
    def define(schema: str, function: Callable[..., Any], library=libraries[0]) -> None:
        name = schema.partition("(")[0]
        if not hasattr(getattr(torch.ops, library.ns), name):
            library.define(schema)
            library.impl(name, function, "CompositeExplicitAutograd")

    def reject(out, cu, draft, target, bonus, is_greedy, max_spec_len):
        start = 0
        for request, end in enumerate(cu.tolist()):
            drafts = end - start
            for i in range(drafts):
                out[request, i] = target[start + i]
                if draft[start + i] != target[start + i]:
                    break
            else:
                out[request, drafts] = bonus.view(-1)[request]
            start = end

    def gather(src, dst, table, cu, request_of, tokens, kind, scale, starts):
        assert src.dtype == dst.dtype, f"gathers rows as they are, got {kind}"
        request = request_of[:tokens].long()
        at = torch.arange(tokens) - cu[request]
        at = at if starts is None else at + starts[request]
        size = src.shape[1]
        dst[:tokens] = src[table[request, at // size].long(), at % size]

    def silu_and_mul(out, input):
        gate, up = input.chunk(2, -1)
        out.copy_(torch.nn.functional.silu(gate) * up)

    define(
        "gather_and_maybe_dequant_cache(Tensor src, Tensor(a!) dst, Tensor table, Tensor cu, "
        "Tensor request_of, int tokens, str kind, Tensor scale, Tensor? starts) -> ()",
        gather,
        libraries[1],
    )
    define("silu_and_mul(Tensor(a!) out, Tensor input) -> ()", silu_and_mul)
    define("init_cpu_memory_env(int[] nodes) -> ()", lambda nodes: None)
    define("greedy_argmax(Tensor logits) -> Tensor", lambda logits: logits.argmax(-1).view(-1))
    define(
        "rejection_greedy_sample_kernel_impl(Tensor(a!) out, Tensor cu, Tensor draft, "
        "Tensor target, Tensor bonus, Tensor? is_greedy, int max_spec_len) -> ()",
        reject,
    )


def _take_the_asked_backend() -> None:
    """The CPU platform has backends of its own for MLA, whatever is asked for."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.mla.prefill import registry
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

    from mlakit.integrations.vllm import plugin

    def backend(cls, selected_backend, attn_selector_config, num_heads=None):
        return selected_backend.get_path()

    def prefill(cls, mla_selector_config):
        return MLAPrefillBackendEnum["MLAKIT"].get_class()

    CpuPlatform.get_attn_backend_cls = classmethod(backend)
    if hasattr(CpuPlatform, "get_mla_prefill_backend_cls"):
        CpuPlatform.get_mla_prefill_backend_cls = classmethod(prefill)
    else:  # vLLM 0.26 takes FlashAttention on every CPU
        path = plugin.PREFILL_BACKENDS[plugin.PREFILL]
        registry.register_mla_prefill_backend(MLAPrefillBackendEnum.FLASH_ATTN, path)


def _keep_chunks_and_prefixes() -> None:
    from vllm.platforms.cpu import CpuPlatform

    inner = CpuPlatform.check_and_update_config.__func__

    def keep(cls, config):
        scheduler, cache = config.scheduler_config, config.cache_config
        chunks = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        prefixes = cache.enable_prefix_caching
        inner(cls, config)
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = chunks
        cache.enable_prefix_caching = prefixes

    CpuPlatform.check_and_update_config = classmethod(keep)


def _map_slots() -> None:
    """The CPU override of this release does not match its kernel's arguments."""
    from vllm.v1.worker.block_table import BlockTable

    def compute(self, num_reqs, query_start_loc, positions):
        slots, size = self.slot_mapping.gpu, self.block_size
        world = getattr(self, "dcp_world_size", 1)
        rank = self.dcp_rank if world > 1 else 0
        interleave = self.cp_kv_cache_interleave_size if world > 1 else 1
        slots.fill_(-1)
        starts = query_start_loc[: num_reqs + 1].tolist()
        for request in range(num_reqs):
            tokens = slice(starts[request], starts[request + 1])
            position = positions[tokens].long()
            block = self.block_table.gpu[request].long()[position // (size * world)]
            offset = position % (size * world)
            local = offset // (world * interleave) * interleave + offset % interleave
            is_here = offset // interleave % world == rank
            slots[tokens] = torch.where(is_here, block * size + local, -1)

    BlockTable.compute_slot_mapping = compute


def _do_not_pin() -> None:
    """vLLM 0.26 pins the lengths of chunks on machines without a GPU too."""

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *sizes, pin_memory=False, **named: make(*sizes, **named)

    torch.empty, torch.zeros = unpinned(torch.empty), unpinned(torch.zeros)


def _merge_contexts() -> None:
    """vLLM 0.26 merges the attention to parts of a context by Triton kernels on every machine."""
    from vllm.model_executor.layers.attention import mla_attention

    def merge(
        output,
        prefix_output,
        prefix_lse,
        suffix_output,
        suffix_lse,
        output_lse=None,
        prefill_tokens_with_context=None,
        output_scale=None,
    ):
        total = torch.logaddexp(prefix_lse, suffix_lse)
        weights = [(lse - total).exp().T[..., None] for lse in (prefix_lse, suffix_lse)]
        output.copy_(prefix_output * weights[0] + suffix_output * weights[1])
        if output_lse is not None:
            output_lse.copy_(total)

    mla_attention.merge_attn_states = merge
    # mlakit's results of requests without context are what this makes of them
    mla_attention.mask_empty_context = lambda *arguments: None


def _correct_shards() -> None:
    """The correction of a rank's result by all ranks' lse is a Triton kernel."""
    try:
        from vllm.v1.attention.ops import dcp
    except ImportError:  # vLLM 0.26
        from vllm.v1.attention.ops import common as dcp

    def correct(out, lses, cp_rank, ctx=None, is_lse_base_on_e=True):
        assert is_lse_base_on_e
        total = lses.logsumexp(0)
        weight = (lses[cp_rank] - total).exp().nan_to_num(0.0)[..., None]
        corrected = torch.where(weight == 0, 0.0, out.float() * weight)
        return corrected.to(out.dtype), total

    dcp.correct_attn_out = correct


def _record_calls() -> None:
    folder = os.environ.get(CALLS)
    if not folder:
        return
    from mlakit.integrations import steps
    from mlakit.integrations.vllm import calls

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            kind = name
            if name == "decode":
                batch = arguments[2]
                kind += "-drafts" if batch.q_starts is not None else ""
                kind += "-shard" if batch.shard is not None else ""
            if name == "prefill":
                kind += "" if named["is_causal"] else "-chunk"
            Path(folder, f"{kind}.{os.getpid()}").touch()
            return function(*arguments, **named)

        return call

    for module, name in ((calls, "update_cache"), (steps, "decode"), (steps, "prefill")):
        setattr(module, name, recorded(name, getattr(module, name)))


def oracle(q, pool, batch, softmax_scale, q_scale=None):
    """`steps.decode` in float64, one query at a time, over the same rows."""
    q = torch.cat(q, -1) if isinstance(q, tuple) else q
    starts = list(range(len(q) + 1)) if batch.q_starts is None else batch.q_starts.tolist()
    out = q.new_zeros(*q.shape[:2], pool.row.v_width)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    for request, length in enumerate(batch.kv_lens.tolist()):
        position = torch.arange(length)
        page = batch.block_table[request, position // pool.page_size].long()
        slots = page * pool.page_size + position % pool.page_size
        rows = pool.layer(0).read(slots, torch.float64)
        for token in range(starts[request], starts[request + 1]):
            seen = rows[: length - (starts[request + 1] - token) + 1]
            scores = q[token].double() @ seen.T * softmax_scale
            out[token] = (scores.softmax(-1) @ seen[:, : pool.row.v_width]).to(q.dtype)
            lse[token] = scores.logsumexp(-1).float()
    return out, lse
