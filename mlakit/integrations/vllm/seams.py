"""Everything that depends on the release of vLLM. Other modules take vLLM's names from here.

`from mlakit.integrations.vllm.seams import MLACommonBackend` imports vLLM's module at that moment
and not before; a vLLM that is missing, or lacks a name, is an UnsupportedError that says so.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mlakit.integrations.releases import Releases
from mlakit.integrations.seams import Seam

_ATTENTION = "vllm.model_executor.layers.attention"
_MLA, _SPARSE_MLA = f"{_ATTENTION}.mla_attention", f"{_ATTENTION}.sparse_mla_attention"
_BACKENDS = "vllm.v1.attention.backends"
_INDEXER = "vllm.model_executor.layers.sparse_attn_indexer"
_INDEX_METADATA = "vllm.v1.attention.backends.mla.indexer"
_OPS = "vllm.model_executor.custom_op"
# what every layer of vLLM with latent rows is made with
_LAYER = (
    "num_heads",
    "head_size",
    "scale",
    "num_kv_heads",
    "alibi_slopes",
    "sliding_window",
    "kv_cache_dtype",
    "logits_soft_cap",
)
_FORWARD = ("q", "kv_c_and_k_pe_cache", "attn_metadata", "layer")
_UPDATE = (
    "kv_c_normed",
    "k_pe",
    "kv_cache",
    "slot_mapping",
    "kv_cache_dtype",
    "k_scale",
    "skip_scale",
)
_BUILDER = ("kv_cache_spec", "layer_names", "vllm_config", "device")
_DECODE = (
    "block_table_tensor",
    "seq_lens_device",
    "max_seq_len",
    "query_start_loc_cpu",
    "query_start_loc_device",
    "num_decode_tokens",
    "dcp_tot_seq_lens_device",
)
# layers of DeepSeek-V3.2 call the indexer's function, not its module
_FUSED_CALL = "sparse_attn_indexer"
SEAMS = {
    "AttentionBackendEnum": Seam(f"{_BACKENDS}.registry"),
    "AttentionCGSupport": Seam("vllm.v1.attention.backend"),
    "CUDAGraphMode": Seam("vllm.config"),
    "CustomOp": Seam(_OPS, {"register_oot": ("name",)}),
    "DeepSeekV32IndexerDecodeMetadata": Seam(
        _INDEX_METADATA, attributes=("block_table", "decode_lens", "global_seq_lens", "seq_lens")
    ),
    "DeepseekV32IndexerMetadata": Seam(
        _INDEX_METADATA,
        attributes=(
            "decode",
            "max_seq_len",
            "num_decode_tokens",
            "num_decodes",
            "num_prefills",
            "prefill",
            "seq_lens",
            "slot_mapping",
        ),
    ),
    "DeepseekV32IndexerPrefillChunkMetadata": Seam(
        _INDEX_METADATA,
        attributes=(
            "block_table",
            "cu_seq_lens",
            "cu_seqlen_ke",
            "cu_seqlen_ks",
            "local_cu_seq_lens",
            "token_end",
            "token_start",
            "total_seq_lens",
        ),
    ),
    "MLACommonBackend": Seam(_MLA, overrides={"get_preferred_block_size": ("default_block_size",)}),
    "MLACommonDecodeMetadata": Seam(
        _MLA, attributes=("block_table", "seq_lens", "dcp_tot_seq_lens")
    ),
    "MLACommonImpl": Seam(
        _MLA,
        {"__init__": _LAYER},
        overrides={"forward_mqa": _FORWARD, "do_kv_cache_update": _UPDATE},
    ),
    "MLACommonMetadataBuilder": Seam(
        _MLA,
        {"__init__": (*_BUILDER, "supports_dcp_with_varlen"), "_build_decode": _DECODE},
        overrides={"_build_decode": (*_DECODE, "max_query_len")},
    ),
    "MLAPrefillBackend": Seam(
        f"{_BACKENDS}.mla.prefill.base",
        {
            "run_prefill_context_chunk": ("q", "k", "v"),
            "prepare_metadata": ("prefill_metadata",),
        },
        overrides={
            "run_prefill_new_tokens": ("q", "k", "v", "return_softmax_lse", "out", "output_scale"),
            "run_prefill_context_chunk": ("chunk", "chunk_idx", "q", "k", "v", "out"),
        },
        attributes=("scale", "qk_nope_head_dim", "_prefill_metadata"),
    ),
    "MLAPrefillBackendEnum": Seam(f"{_BACKENDS}.mla.prefill.registry"),
    "MultipleOf": Seam("vllm.v1.attention.backend"),
    "QueryLenSupport": Seam(_MLA),
    "SparseAttnIndexer": Seam(
        _INDEXER,
        attributes=(
            "dcp_world_size",
            "k_cache",
            "max_model_len",
            "scale_fmt",
            "skip_k_cache_insert",
            "topk_indices_buffer",
            "topk_tokens",
            "use_fp4_cache",
            "use_pcp",
        ),
    ),
    "SparseMLACommonImpl": Seam(
        _SPARSE_MLA,
        {"__init__": (*_LAYER, "topk_indices_buffer")},
        overrides={"forward_mqa": _FORWARD, "do_kv_cache_update": _UPDATE},
    ),
    "SparseMLACommonMetadata": Seam(_SPARSE_MLA, since=(0, 30)),
    "SparseMLACommonMetadataBuilder": Seam(
        _SPARSE_MLA,
        {
            "__init__": _BUILDER,
            "_init_reorder_batch_threshold": (
                "reorder_batch_threshold",
                "supports_spec_as_decode",
                "supports_dcp_with_varlen",
            ),
        },
        attributes=("metadata_cls",),
    ),
    "batch_invariant": Seam("vllm.envs", names="VLLM_BATCH_INVARIANT"),
    "direct_register_custom_op": Seam(
        "vllm.utils.torch_utils", {"": ("op_name", "op_func", "mutates_args", "fake_impl")}
    ),
    # a layer that took the function from another module would keep vLLM's
    "fused_layer": Seam(
        "vllm.models.deepseek_v32.attention",
        names=_FUSED_CALL,
        earlier=((0, 27), "vllm.models.deepseek_v32.nvidia.attention"),
    ),
    "get_current_vllm_config": Seam("vllm.config"),
    "get_dcp_group": Seam("vllm.distributed.parallel_state"),
    "get_forward_context": Seam("vllm.forward_context"),
    "has_deep_gemm": Seam(_INDEXER),
    "indexer_of_blocks": Seam(
        _INDEXER,
        attributes=("compress_ratio", "candidate_blocks"),
        names="SparseAttnIndexer",
        since=(0, 30),
    ),
    "indexer_of_dense_prompts": Seam(
        _INDEXER,
        attributes=("dense_mha_metadata_layer_name",),
        names="SparseAttnIndexer",
        since=(0, 27),
    ),
    "index_metadata_of_requests": Seam(
        _INDEX_METADATA,
        attributes=("per_req_decode_lens",),
        names="DeepSeekV32IndexerDecodeMetadata",
        since=(0, 32),
    ),
    "index_metadata_of_tables": Seam(
        _INDEX_METADATA,
        attributes=("block_table",),
        names="DeepseekV32IndexerMetadata",
        since=(0, 32),
    ),
    "max_logits_mb": Seam("vllm.envs", names="VLLM_SPARSE_INDEXER_MAX_LOGITS_MB"),
    "op_registry_oot": Seam(_OPS),
    "register_by_name": Seam(
        f"{_BACKENDS}.registry",
        {"register": ("name", "value")},
        names="AttentionBackendEnum",
        since=(0, 32),
    ),
    "register_prefill_by_name": Seam(
        f"{_BACKENDS}.mla.prefill.registry",
        {"register": ("name", "value")},
        names="MLAPrefillBackendEnum",
        since=(0, 32),
    ),
    "schedules_deep_gemm": Seam(_INDEX_METADATA, names="has_deep_gemm"),
    "sparse_attn_indexer": Seam(
        _INDEXER,
        {"": ("k_cache_prefix", "q_quant", "weights", "topk_indices_buffer")},
    ),
}
RELEASES = Releases("vLLM", "vllm", SEAMS, run=("0.32.0", "0.33.0"), first="0.26.0", last="0.33.0")


def __getattr__(name: str) -> Any:
    """A name of vLLM, imported now."""
    return RELEASES.find(__name__, name)


def why_not() -> str | None:
    """Return why this package cannot serve: vLLM is missing, or lacks a name."""
    return RELEASES.why_not()


def add_backend(registry: Any, name: str, path: str, find: Callable[[str], Any]) -> None:
    """Add a backend to one of vLLM's registries, which are enums; one that is there is left.

    find  restores the member in another process: a spawned process unpickles its configuration
          before it loads plugins, and does not know the member
    """
    if name not in registry.__members__:
        if RELEASES.has("register_by_name"):
            registry.register(name, path)
        else:
            _add_member(registry, name, path)
    registry[name].__reduce_ex__ = lambda protocol: (find, (name,))


def _add_member(registry: Any, name: str, path: str) -> None:
    """Do what vLLM 0.32 does: before, a registry had one member, CUSTOM, for all plugins."""
    member = object.__new__(registry)
    member._name_, member._value_ = name, path
    type.__setattr__(registry, name, member)
    registry._member_map_[name] = registry._value2member_map_[path] = member
    registry._member_names_.append(name)


def selects(config: Any, backend: str) -> bool:
    """Return whether a VllmConfig names an attention backend, for all or for MLA layers."""
    attention = config.attention_config
    per_kind = getattr(attention, "backend_per_kind", None) or {}
    asked = [attention.backend, *per_kind.values()]
    return backend in [getattr(each, "name", each) for each in asked]


def interleave(config: Any) -> int:
    """Consecutive tokens on one rank of a context-parallel group.

    vLLM may change it after the layers are made, so that it is read at every call.
    """
    size: int = config.parallel_config.cp_kv_cache_interleave_size
    return size


@contextmanager
def deep_gemm_optional() -> Iterator[None]:
    """The constructor of SparseAttnIndexer refuses a CUDA machine without DeepGEMM."""
    module: Any = importlib.import_module(_INDEXER)
    before = module.has_deep_gemm
    module.has_deep_gemm = lambda: True
    try:
        yield
    finally:
        module.has_deep_gemm = before


def schedule_deep_gemm(is_needed: bool) -> None:
    """Let vLLM make DeepGEMM's schedule of every step, or not: only vLLM's own indexer reads it."""
    module: Any = importlib.import_module(_INDEX_METADATA)
    found = module.has_deep_gemm
    own = getattr(found, "own", found)

    def no_deep_gemm() -> bool:
        return False

    no_deep_gemm.own = own  # type: ignore[attr-defined]
    module.has_deep_gemm = own if is_needed else no_deep_gemm


def replace_fused_call(make: Callable[[Any], Any]) -> None:
    """Put `make(vLLM's function)` in the place of the indexer's function.

    Layers of DeepSeek-V3.2 call the function directly. Those that are loaded have a name for it;
    others will take it from the indexer's module. A second call changes nothing.
    """
    module: Any = importlib.import_module(_INDEXER)
    own = getattr(module, _FUSED_CALL)
    if hasattr(own, "is_mlakit"):
        return
    replacement = make(own)
    replacement.is_mlakit = True
    for each in list(sys.modules.values()):
        if vars(each).get(_FUSED_CALL) is own:
            setattr(each, _FUSED_CALL, replacement)


def layer_metadata(layer_name: str) -> Any:
    """The metadata of a layer in this step; None in a dummy run."""
    metadata = __getattr__("get_forward_context")().attn_metadata
    return metadata[layer_name] if isinstance(metadata, dict) else None


def attends_densely(layer_name: str) -> bool:
    """Return whether no layer of this step uses a selection: short prompts attend to all tokens.

    The condition is that of vLLM's indexer; a captured graph always selects.
    """
    context = __getattr__("get_forward_context")()
    modes = __getattr__("CUDAGraphMode")
    if not layer_name or context.cudagraph_runtime_mode == modes.FULL:
        return False
    if not isinstance(context.attn_metadata, dict):
        return False
    metadata = context.attn_metadata.get(layer_name)
    prefill = getattr(metadata, "prefill", None)
    return (
        bool(getattr(prefill, "use_dense_mha", False))
        and getattr(metadata, "num_decode_tokens", -1) == 0
    )


def max_logits_bytes() -> int:
    """Scores that an indexer may hold at the same time, as the user set it."""
    return int(__getattr__("max_logits_mb")) * 2**20
