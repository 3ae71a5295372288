"""The backend MLAKIT: decode of models whose every token attends to all tokens before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mlakit import NULL, KVShard, RowShape, format_of_dtype
from mlakit.integrations import steps
from mlakit.integrations.vllm import calls, plugin, seams, workspaces
from mlakit.integrations.vllm.cached_layer import CachedLayer
from mlakit.integrations.vllm.seams import (
    AttentionCGSupport,
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadataBuilder,
    MultipleOf,
    QueryLenSupport,
)
from mlakit.integrations.warmup import compile_kernels
from mlakit.kernels.launch import target

PAGE = 64  # tokens
FLOAT_CACHES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class DenseBackend(MLACommonBackend):
    """The description of dense attention that vLLM reads before it takes a backend."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(calls.CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        return plugin.DENSE

    @staticmethod
    def get_impl_cls() -> type[DenseImpl]:
        return DenseImpl

    @staticmethod
    def get_builder_cls() -> type[DenseMetadataBuilder]:
        return DenseMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Pages of 64 tokens, a tile of Hopper's kernels, unless the user asks for others."""
        return default_block_size if default_block_size % PAGE == 0 else PAGE

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        is_packed = cache_dtype_str == calls.PACKED_CACHE_DTYPE
        return num_blocks, block_size, calls.PACKED_BYTES if is_packed else head_size

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # all

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        *others: Any,
        **named: Any,
    ) -> str | None:
        if FLOAT_CACHES.get(kv_cache_dtype or "auto", dtype) != dtype:
            own = str(dtype).removeprefix("torch.")
            return f"a {kv_cache_dtype} cache needs queries of its dtype, and the model has {own}"
        return None


@dataclass
class DecodeMetadata(MLACommonDecodeMetadata):
    """vLLM's fields, and what the ops take; the plan in it is shared by all layers of a step."""

    batch: steps.DecodeBatch | None = None


def warm_up(kv_cache_spec: Any, layer_name: str, vllm_config: Any, device: Any) -> None:
    """Compile the kernels of the layers of a backend while vLLM starts."""

    def describe() -> dict[str, Any]:
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        impl = vllm_config.compilation_config.static_forward_context[layer_name].impl
        return {
            "model": model.hf_text_config,
            # decode has the heads of all ranks that share the tokens
            "heads": impl.num_heads * parallel.decode_context_parallel_size,
            "format": calls.format_of(impl.kv_cache_dtype, model.dtype),
            "page_size": kv_cache_spec.block_size,
            "dtype": format_of_dtype(model.dtype),
            "max_context": model.max_model_len,
            "max_tokens": vllm_config.scheduler_config.max_num_batched_tokens,
            "is_batch_invariant": bool(seams.batch_invariant),
        }

    compile_kernels("vllm", device, describe)


def bounded_splits(
    kv_cache_spec: Any, layer_name: str, vllm_config: Any, device: torch.device
) -> int | None:
    """Return the parts of a request in batch-invariant decode; see `invariant_splits`."""
    if device.type != "cuda" or not seams.batch_invariant:
        return None
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    impl = vllm_config.compilation_config.static_forward_context[layer_name].impl
    drafting, pages = vllm_config.speculative_config, kv_cache_spec.block_size
    rows = workspaces.context_rows(model.max_model_len, scheduler.max_num_seqs, pages)
    widths = impl.qk_nope_head_dim + impl.v_head_dim
    return workspaces.invariant_splits(
        workspaces.Layer(
            RowShape(impl.kv_lora_rank, impl.qk_rope_head_dim),
            calls.format_of(impl.kv_cache_dtype, model.dtype),
            model.dtype,
            impl.num_heads * vllm_config.parallel_config.decode_context_parallel_size,
            pages,
        ),
        target(device),
        requests=scheduler.max_num_seqs,
        drafts=0 if drafting is None else drafting.num_speculative_tokens,
        max_model_len=model.max_model_len,
        budget=rows * impl.num_heads * widths * model.dtype.itemsize,
    )


class DenseMetadataBuilder(MLACommonMetadataBuilder):
    """Metadata of a step, built outside of CUDA graphs: no plan is made here."""

    # every request of a captured graph has the same number of queries, or none
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[Any] = QueryLenSupport.VARLEN
    # the block of a draft, each of whose tokens sees all of the others
    supports_non_causal_multi_token_decode: ClassVar[bool] = True
    supports_non_causal_multi_token_dcp: ClassVar[bool] = True

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(
            kv_cache_spec, layer_names, vllm_config, device, supports_dcp_with_varlen=True
        )
        first = self.compilation_config.static_forward_context[layer_names[0]]
        self.dcp_rank: int = first.impl.dcp_rank
        # asked for once: vLLM reads its environment at every look, which each step would wait for
        self.is_batch_invariant = bool(seams.batch_invariant)
        self.num_splits = bounded_splits(kv_cache_spec, layer_names[0], vllm_config, device)
        warm_up(kv_cache_spec, layer_names[0], vllm_config, device)

    def _build_decode(
        self,
        *,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        max_seq_len: int,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: Tensor | None,
        max_query_len: int | None = None,
    ) -> DecodeMetadata:
        if max_query_len is None:  # vLLM before 0.31
            # without drafts a request that counts as decode has one query at most
            has_drafts = self.reorder_batch_threshold > 1
            max_query_len = int(query_start_loc_cpu.diff().max()) if has_drafts else 1
        shard = None
        if self.dcp_world_size > 1:
            interleave = seams.interleave(self.vllm_config)
            shard = KVShard(self.dcp_rank, self.dcp_world_size, interleave)
        batch = calls.decode_batch(
            block_table_tensor,
            seq_lens_device,
            query_start_loc_device,
            max_query_len,
            num_decode_tokens,
            is_batch_invariant=self.is_batch_invariant,
            num_splits=self.num_splits,
            global_seq_lens=dcp_tot_seq_lens_device,
            shard=shard,
        )
        return DecodeMetadata(block_table_tensor, seq_lens_device, dcp_tot_seq_lens_device, batch)


class DenseImpl(CachedLayer, MLACommonImpl):
    """One layer."""

    backend: ClassVar[str] = plugin.DENSE
    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True
    supports_pcp: bool = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # e4m3 queries for e4m3 rows, as in vLLM's own backends; their result is bf16
        is_bf16 = torch.get_default_dtype() == torch.bfloat16
        self.supports_quant_query_input = self.kv_cache_dtype in calls.FP8_CACHE_DTYPES and is_bf16

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (out [tokens, heads, D_C], lse) of the decode tokens."""
        pool = self.pools.of(kv_c_and_k_pe_cache, layer._k_scale)
        batch = attn_metadata.decode.batch
        if not getattr(attn_metadata, "causal", True):  # vLLM before 0.32 has causal ones only
            batch.mask = NULL
        results = steps.decode(q, pool, batch, self.scale, layer._q_scale)
        self.announce("mla_decode", pool)
        return results
