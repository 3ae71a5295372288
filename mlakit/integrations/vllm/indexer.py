"""The lightning indexer of models on MLAKIT_SPARSE, in the place of vLLM's SparseAttnIndexer.

It reads and writes vLLM's cache of index keys and its buffer of selected tokens, with mlakit's
kernels; DeepGEMM is not needed. vLLM makes it for every model with such an indexer; where
MLAKIT_SPARSE is not selected, or ranks split a prompt, it is vLLM's own.
"""

# no `from __future__ import annotations`: torch reads the types of the op's function

from collections.abc import Callable
from typing import Any

import torch

from mlakit import KVShard, PagedLatentCache, RowShape
from mlakit.integrations.vllm import calls, plugin, seams, selection, workspaces
from mlakit.integrations.vllm.seams import SparseAttnIndexer
from mlakit.kernels.launch import target

OP = "mlakit_select_tokens"
# indexers that run here, by the name of their cache
INDEXERS: dict[str, "Indexer"] = {}


class Indexer(SparseAttnIndexer):
    """One layer's indexer, under vLLM's constructor."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        config = seams.get_current_vllm_config()
        is_selected = seams.selects(config, plugin.SPARSE)
        if is_selected:
            with seams.deep_gemm_optional():
                super().__init__(*arguments, **named)
        else:
            super().__init__(*arguments, **named)
        self.runs_here = is_selected and why_not(self) is None
        self.config = config
        seams.schedule_deep_gemm(is_needed=not self.runs_here)
        if self.runs_here:
            INDEXERS[self.k_cache.prefix] = self
            seams.replace_fused_call(selecting_or)
            register_op()

    def forward(
        self,
        hidden_states: torch.Tensor,
        q_quant: Any,
        k: torch.Tensor | None,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Append the keys k of this step, and fill `topk_indices_buffer`."""
        if not self.runs_here:
            own: torch.Tensor = super().forward(hidden_states, q_quant, k, weights)
            return own
        keys = None if self.skip_k_cache_insert else k
        buffer: torch.Tensor = self.topk_indices_buffer
        getattr(torch.ops.vllm, OP)(q_quant, keys, weights, buffer, self.k_cache.prefix)
        return buffer


def why_not(indexer: Any) -> str | None:
    """Return why vLLM's own indexer has to run."""
    if indexer.use_pcp:
        return "the index keys are split over ranks of prefill"
    if indexer.use_fp4_cache:
        return "the index keys are FP4"
    may_compress = seams.RELEASES.has("indexer_of_blocks")
    if may_compress and (indexer.compress_ratio != 1 or indexer.candidate_blocks is not None):
        return "index keys stand for blocks of tokens"
    return None


def register_op() -> None:
    """An op of its own, which torch.compile does not look into: it reads the step's metadata."""
    if not hasattr(torch.ops.vllm, OP):
        seams.direct_register_custom_op(
            OP, select_tokens, mutates_args=["topk_tokens"], fake_impl=_nothing
        )


def select_tokens(
    q: torch.Tensor,
    keys: torch.Tensor | None,
    weights: torch.Tensor,
    topk_tokens: torch.Tensor,
    cache_name: str,
) -> None:
    """The selection of one layer in this step."""
    indexer = INDEXERS[cache_name]
    metadata = seams.layer_metadata(cache_name)
    if metadata is None:  # vLLM measures memory
        torch.empty(most_bytes(indexer, q), dtype=torch.uint8, device=q.device)
        return
    is_unused = False
    if seams.RELEASES.has("indexer_of_dense_prompts"):
        is_unused = seams.attends_densely(indexer.dense_mha_metadata_layer_name)
    selection.select_step(
        q,
        keys,
        weights,
        topk_tokens[:, : indexer.topk_tokens],
        PagedLatentCache.wrap_index_keys(indexer.k_cache.kv_cache),
        metadata,
        max_model_len=indexer.max_model_len,
        power_of_two_scales=indexer.scale_fmt == "ue8m0",
        is_unused=is_unused,
        ranks=ranks_of(indexer),
    )


def most_bytes(indexer: Any, q: torch.Tensor) -> int:
    """Return the most memory that the selection of a layer, or the attention to it, takes in any
    step, in bytes."""
    logits_bytes = seams.max_logits_bytes()
    if not q.is_cuda:
        return logits_bytes
    scheduler, drafting = indexer.config.scheduler_config, indexer.config.speculative_config
    drafts = 0 if drafting is None else drafting.num_speculative_tokens
    limits = selection.Limits(
        max_model_len=indexer.max_model_len,
        decode_tokens=scheduler.max_num_seqs * (1 + drafts),
        prefill_tokens=scheduler.max_num_batched_tokens,
        logits_bytes=logits_bytes,
    )
    selected = selection.workspace_bytes(q, indexer.topk_tokens, limits)
    tokens = max(limits.prefill_tokens, limits.decode_tokens)
    attended = workspaces.sparse_bytes(
        layer_of(indexer.config), target(q.device), tokens=tokens, k=indexer.topk_tokens
    )
    return max(selected, attended)


def layer_of(config: Any) -> workspaces.Layer:
    """Describe the attention that uses the selection."""
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    widths = model.hf_text_config
    return workspaces.Layer(
        RowShape(widths.kv_lora_rank, widths.qk_rope_head_dim),
        calls.format_of(cache.cache_dtype, model.dtype),
        model.dtype,
        model.get_num_attention_heads(parallel) * parallel.decode_context_parallel_size,
        selection.INDEX_PAGE,
    )


def ranks_of(indexer: Any) -> selection.Ranks | None:
    """Return the ranks that share the keys; None where this one has all of them."""
    world = indexer.dcp_world_size
    if world == 1:
        return None
    group = seams.get_dcp_group()
    shard = KVShard(group.rank_in_group, world, seams.interleave(indexer.config))
    return selection.Ranks(shard, group.device_group)


def _nothing(
    q: torch.Tensor,
    keys: torch.Tensor | None,
    weights: torch.Tensor,
    topk_tokens: torch.Tensor,
    cache_name: str,
) -> None:
    return None


def selecting_or(own: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's function `sparse_attn_indexer`, called by layers that have written their keys."""

    def select_or_defer(
        hidden_states: torch.Tensor,
        k_cache_prefix: Any,
        kv_cache: Any,
        q_quant: Any,
        *others: Any,
        **named: Any,
    ) -> Any:
        name = getattr(k_cache_prefix, "value", k_cache_prefix)
        if name not in INDEXERS:
            return own(hidden_states, k_cache_prefix, kv_cache, q_quant, *others, **named)
        weights, buffer = others[2], others[9]
        select_tokens(q_quant, None, weights, buffer, name)
        return buffer

    return select_or_defer
