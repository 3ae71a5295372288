"""Everything that depends on the release of SGLang. Other modules take SGLang's names from here.

`from mlakit.integrations.sglang.seams import AttentionBackend` imports SGLang's module at that
moment and not before; an SGLang that is missing or of another release is an UnsupportedError that
says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlakit.integrations.releases import Release

RELEASE = "0.5.23"
_RELEASE = Release("SGLang", "sglang", RELEASE)

_ATTENTION = "sglang.srt.layers.attention"
_DEEPSEEK = "sglang.srt.models.deepseek_common"
PATHS = {
    "ATTENTION_BACKENDS": f"{_ATTENTION}.attention_registry",
    "ATTENTION_BACKEND_CHOICES": "sglang.srt.arg_groups.choices",
    "AttentionBackend": f"{_ATTENTION}.base_attn_backend",
    "AttentionBackendRegistry": f"{_DEEPSEEK}.attention_backend_handler",
    "AttnForwardMethod": f"{_DEEPSEEK}.attention_forward_methods.forward_methods",
    "BaseIndexerMetadata": f"{_ATTENTION}.dsa.dsa_indexer_metadata",
    "CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS": "sglang.srt.arg_groups.choices",
    "FORWARD_ABSORB_CORE_ATTENTION_BACKENDS": f"{_DEEPSEEK}.utils",
    "Indexer": f"{_ATTENTION}.dsa.dsa_indexer",
    "KVWriteLoc": "sglang.srt.mem_cache.memory_pool",
    "add_attention_backend_choices": "sglang.srt.arg_groups.choices",
    "add_chunked_prefix_cache_attention_backend": "sglang.srt.arg_groups.choices",
    "get_dsa_index_kpool": "sglang.srt.configs.model_config",
    "get_dsa_index_topk": "sglang.srt.configs.model_config",
    "get_parallel": "sglang.srt.runtime_context",
    "get_spec": "sglang.srt.runtime_context",
    "get_token_to_kv_pool": "sglang.srt.model_executor.forward_context",
    "is_deepseek_dsa": "sglang.srt.configs.model_config",
    "is_dsa_enable_prefill_cp": f"{_ATTENTION}.dsa.utils",
    "register_attention_backend": f"{_ATTENTION}.attention_registry",
}
# expanded attention, and absorbed attention where a prefix is short, by the rules for this backend
RULES_OF = "fa3"


def __getattr__(name: str) -> Any:
    """A name of SGLang, imported now."""
    return _RELEASE.find(PATHS, __name__, name)


def _find(name: str) -> Any:
    return __getattr__(name)


def why_not() -> str | None:
    """Return why this package cannot serve: SGLang is missing, or of an untested release."""
    return _RELEASE.why_not()


def take_separate_rope(name: str) -> None:
    """Let DeepSeek layers hand over the rotated columns of q and k as tensors of their own."""
    backends = _find("FORWARD_ABSORB_CORE_ATTENTION_BACKENDS")
    if name not in backends:
        backends.append(name)


def choose_forward_method(name: str, index_topk: int | None) -> None:
    """Say when DeepSeek layers use expanded attention and when absorbed attention.

    index_topk  tokens that a sparse model selects; None for a dense model
    """
    registry = _find("AttentionBackendRegistry")

    def method(attention: Any, forward_batch: Any) -> Any:
        own = registry.get_handler(RULES_OF)(attention, forward_batch)
        if index_topk is None or own == _find("AttnForwardMethod").MLA:
            return own
        # a prompt that is shorter than its selection is attended to as a whole
        has_prefix = any(forward_batch.extend_prefix_lens_cpu)
        is_short = int(forward_batch.seq_lens_cpu.max()) <= index_topk
        return own if is_short and not has_prefix else _find("AttnForwardMethod").MLA

    registry.register(name, method)


def replace_selection(select: Callable[..., Any], is_ours: Callable[[Any], bool]) -> None:
    """Put `select` in the place of the indexer's scores and top-k, for metadata that is ours.

    select  (indexer, layer_id, q_fp8, weights, metadata, out or None)

    Indexers of other backends go on as before. A second call changes nothing.
    """
    indexer = _find("Indexer")
    own_paged, own_ragged = indexer._get_topk_paged, indexer._get_topk_ragged
    if getattr(own_paged, "is_mlakit", False):
        return

    def paged(
        self: Any, forward_batch: Any, layer_id: int, q_fp8: Any, weights: Any, metadata: Any
    ) -> Any:
        if is_ours(metadata):
            return select(self, layer_id, q_fp8, weights, metadata, None)
        return own_paged(self, forward_batch, layer_id, q_fp8, weights, metadata)

    def ragged(
        self: Any,
        enable_dual_stream: bool,
        forward_batch: Any,
        layer_id: int,
        q_fp8: Any,
        weights: Any,
        metadata: Any,
        topk_result: Any = None,
    ) -> Any:
        if is_ours(metadata):
            return select(self, layer_id, q_fp8, weights, metadata, topk_result)
        return own_ragged(
            self,
            enable_dual_stream,
            forward_batch,
            layer_id,
            q_fp8,
            weights,
            metadata,
            topk_result,
        )

    paged.is_mlakit = True  # type: ignore[attr-defined]
    indexer._get_topk_paged, indexer._get_topk_ragged = paged, ragged


def index_keys(indexer: Any, layer_id: int) -> Any:
    """Return [pages, page bytes]: the index keys of a layer, 128 e4m3 each, then their scales."""
    return indexer._get_index_k_read_buffer(_find("get_token_to_kv_pool")(), layer_id)


def num_draft_tokens() -> int:
    """Tokens per request that a verification step has; 0 without speculative decoding."""
    return int(_find("get_spec")().speculative_num_draft_tokens or 0)


def speculative_topk() -> int:
    """Tokens that speculative decoding proposes at one position."""
    return int(_find("get_spec")().speculative_eagle_topk or 0)


def write_location(forward_batch: Any) -> Any:
    """Return the slots that the cache rows of a step are written to."""
    return _find("KVWriteLoc").for_batch(forward_batch)
