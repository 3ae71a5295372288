"""The backend MLAKIT_SPARSE: models whose tokens attend to those that an indexer selects."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from mlakit import KVShard
from mlakit.integrations.vllm import calls, plugin, seams
from mlakit.integrations.vllm.cached_layer import CachedLayer
from mlakit.integrations.vllm.dense import DenseBackend, warm_up
from mlakit.integrations.vllm.seams import (
    AttentionCGSupport,
    MultipleOf,
    SparseMLACommonImpl,
    SparseMLACommonMetadataBuilder,
)


class SparseBackend(DenseBackend):
    """The description of sparse attention that vLLM reads before it takes a backend."""

    @staticmethod
    def get_name() -> str:
        return plugin.SPARSE

    @staticmethod
    def get_impl_cls() -> type[SparseImpl]:
        return SparseImpl

    @staticmethod
    def get_builder_cls() -> type[SparseMetadataBuilder]:
        return SparseMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(64)]  # the index keys are in blocks of 64

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False  # the lists of a large batch are cut less often than those of a small one

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False  # a selection says what a token sees


class SparseMetadata:
    """The metadata of a step under releases of vLLM that have no class in common for it."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


def metadata_class() -> Any:
    common = "SparseMLACommonMetadata"
    return getattr(seams, common) if seams.RELEASES.has(common) else SparseMetadata


class SparseMetadataBuilder(SparseMLACommonMetadataBuilder):
    """Drafts count as decode tokens: a selection says what each of them sees."""

    metadata_cls: ClassVar[Any] = metadata_class()
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(
            1, supports_spec_as_decode=True, supports_dcp_with_varlen=True
        )
        warm_up(kv_cache_spec, layer_names[0], vllm_config, device)


class SparseImpl(CachedLayer, SparseMLACommonImpl):
    """One layer."""

    backend: ClassVar[str] = plugin.SPARSE
    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True
    supports_pcp: bool = False

    def __init__(self, *arguments: Any, sinks: Tensor | None = None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.config = seams.get_current_vllm_config()
        if sinks is not None:
            ranks = self.config.parallel_config.decode_context_parallel_size
            calls.check_sinks(plugin.SPARSE, sinks, self.num_heads, ranks)
            # vLLM's dense attention of short prompts has no sinks
            self.supports_dense_mha_prefill = False
        self.sinks = sinks

    @property
    def shard(self) -> KVShard | None:
        """This rank's tokens of each request, where ranks share them."""
        if self.dcp_world_size <= 1:
            return None
        return KVShard(self.dcp_rank, self.dcp_world_size, seams.interleave(self.config))

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (out [tokens, heads, D_C], lse): decode tokens, or those of prefill as well."""
        tokens = (q[0] if isinstance(q, tuple) else q).shape[0]
        requests = attn_metadata.num_reqs
        if attn_metadata.num_prefills and tokens == attn_metadata.num_decode_tokens:
            requests = attn_metadata.num_decodes  # prefill tokens go another way
        pool = self.pools.of(kv_c_and_k_pe_cache, layer._k_scale)
        results = calls.sparse(
            q,
            pool,
            self.topk_indices_buffer[:tokens],
            attn_metadata.block_table[:requests],
            attn_metadata.query_start_loc[: requests + 1],
            self.scale,
            self.sinks,
            self.shard,
        )
        self.announce("sparse_mla", pool)
        return results
