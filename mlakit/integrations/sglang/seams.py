"""Everything that depends on the release of SGLang. Other modules take SGLang's names from here.

`from mlakit.integrations.sglang.seams import AttentionBackend` imports SGLang's module at that
moment and not before; an SGLang that is missing, or lacks a name, is an UnsupportedError that says
so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlakit.integrations.releases import Releases
from mlakit.integrations.seams import Seam

_ATTENTION = "sglang.srt.layers.attention"
_DEEPSEEK = "sglang.srt.models.deepseek_common"
_CHOICES = Seam("sglang.srt.arg_groups.choices", earlier=((0, 5, 20), "sglang.srt.server_args"))
_SELECTION = ("forward_batch", "layer_id", "q_fp8", "weights", "metadata")
SEAMS = {
    "ATTENTION_BACKENDS": Seam(f"{_ATTENTION}.attention_registry"),
    "ATTENTION_BACKEND_CHOICES": _CHOICES,
    "AttentionBackend": Seam(
        f"{_ATTENTION}.base_attn_backend",
        {
            "forward_decode": ("q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
            "forward_extend": ("q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
            "get_cuda_graph_seq_len_fill_value": (),
            "init_cuda_graph_state": ("max_bs", "max_num_tokens"),
            "init_forward_metadata_in_graph": ("forward_batch",),
            "init_forward_metadata_out_graph": ("forward_batch", "in_capture"),
        },
    ),
    "AttentionBackendRegistry": Seam(f"{_DEEPSEEK}.attention_backend_handler"),
    "AttnForwardMethod": Seam(f"{_DEEPSEEK}.attention_forward_methods.forward_methods"),
    "BaseIndexerMetadata": Seam(f"{_ATTENTION}.dsa.dsa_indexer_metadata"),
    "CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS": _CHOICES,
    "DraftBackendFactory": Seam(
        "sglang.srt.speculative.draft_utils",
        {
            "_create_backend": ("backend_name", "backend_map", "error_template"),
            "create_decode_backend": (),
            "create_draft_extend_backend": (),
        },
        attributes=("draft_model_runner", "speculative_num_steps"),
    ),
    "FORWARD_ABSORB_CORE_ATTENTION_BACKENDS": Seam(f"{_DEEPSEEK}.utils"),
    "Indexer": Seam(
        f"{_ATTENTION}.dsa.dsa_indexer",
        {
            "_get_index_k_read_buffer": ("pool", "layer_id"),
            "_get_topk_paged": _SELECTION,
            "_get_topk_ragged": ("enable_dual_stream", *_SELECTION, "topk_result"),
        },
    ),
    "KVWriteLoc": Seam(
        "sglang.srt.mem_cache.memory_pool",
        {"for_batch": ("forward_batch",)},
        since=(0, 5, 22),
    ),
    "add_attention_backend_choices": _CHOICES,
    "add_chunked_prefix_cache_attention_backend": _CHOICES,
    "get_dsa_index_kpool": Seam("sglang.srt.configs.model_config", since=(0, 5, 20)),
    "get_dsa_index_topk": Seam("sglang.srt.configs.model_config"),
    "get_parallel": Seam("sglang.srt.runtime_context"),
    "get_spec": Seam("sglang.srt.runtime_context"),
    "get_token_to_kv_pool": Seam("sglang.srt.model_executor.forward_context"),
    "named_draft_backends": Seam(
        "sglang.srt.speculative.draft_utils",
        {"_create_backend": ("stamps_children",)},
        names="DraftBackendFactory",
        since=(0, 5, 18),
    ),
    "is_deepseek_dsa": Seam("sglang.srt.configs.model_config"),
    "is_dsa_enable_prefill_cp": Seam(f"{_ATTENTION}.dsa.utils"),
    "register_attention_backend": Seam(f"{_ATTENTION}.attention_registry"),
}
RELEASES = Releases("SGLang", "sglang", SEAMS, run=("0.5.23",), first="0.5.17", last="0.5.23")
# expanded attention, and absorbed attention where a prefix is short, by the rules for this backend
RULES_OF = "fa3"


def __getattr__(name: str) -> Any:
    """A name of SGLang, imported now."""
    return RELEASES.find(__name__, name)


def _find(name: str) -> Any:
    return __getattr__(name)


def why_not() -> str | None:
    """Return why this package cannot serve: SGLang is missing, or lacks a name."""
    return RELEASES.why_not()


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


def add_draft_backends(
    name: str, decode: Callable[[Any, int], Any], extend: Callable[[Any], Any]
) -> None:
    """Let a backend serve draft models, too. A second call changes nothing.

    decode  (runner of the draft model, steps) makes the backends of all steps but the last
    extend  (runner) makes the one that takes in what was verified
    """
    factory = _find("DraftBackendFactory")
    own = factory._create_backend
    if getattr(own, "is_mlakit", False):
        return

    def create(
        self: Any, backend_name: str, backend_map: dict[str, Any], *others: Any, **named: Any
    ) -> Any:
        runner, steps = self.draft_model_runner, self.speculative_num_steps
        is_decode = "_decode_" in next(iter(backend_map.values())).__name__

        def ours() -> Any:
            made = decode(runner, steps) if is_decode else extend(runner)
            return (name, made) if RELEASES.has("named_draft_backends") else made

        return own(self, backend_name, {**backend_map, name: ours}, *others, **named)

    create.is_mlakit = True  # type: ignore[attr-defined]
    factory._create_backend = create


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
    if not RELEASES.has("KVWriteLoc"):
        return forward_batch.out_cache_loc
    return _find("KVWriteLoc").for_batch(forward_batch)


def keys_per_index_key(config: Any) -> int:
    """Tokens that an index key stands for."""
    name = "get_dsa_index_kpool"
    return int(_find(name)(config)) if RELEASES.has(name) else 1
