"""Everything that depends on the release of vLLM. Other modules take vLLM's names from here.

`from mlakit.integrations.vllm.seams import MLACommonBackend` imports vLLM's module at that moment
and not before; a vLLM that is missing or of another release is an UnsupportedError that says so.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mlakit.integrations.releases import Release

RELEASE = "0.32.0"
_RELEASE = Release("vLLM", "vllm", RELEASE)

_ATTENTION = "vllm.model_executor.layers.attention"
_BACKENDS = "vllm.v1.attention.backends"
_INDEXER = "vllm.model_executor.layers.sparse_attn_indexer"
_FUSED_LAYER = "vllm.models.deepseek_v32.attention"  # calls the indexer's function, not its module
PATHS = {
    "AttentionBackendEnum": f"{_BACKENDS}.registry",
    "AttentionCGSupport": "vllm.v1.attention.backend",
    "AttentionType": "vllm.v1.attention.backend",
    "CustomOp": "vllm.model_executor.custom_op",
    "MLACommonBackend": f"{_ATTENTION}.mla_attention",
    "MLACommonDecodeMetadata": f"{_ATTENTION}.mla_attention",
    "MLACommonImpl": f"{_ATTENTION}.mla_attention",
    "MLACommonMetadataBuilder": f"{_ATTENTION}.mla_attention",
    "MLAPrefillBackend": f"{_BACKENDS}.mla.prefill.base",
    "MLAPrefillBackendEnum": f"{_BACKENDS}.mla.prefill.registry",
    "MultipleOf": "vllm.v1.attention.backend",
    "QueryLenSupport": f"{_ATTENTION}.mla_attention",
    "SparseAttnIndexer": _INDEXER,
    "SparseMLACommonImpl": f"{_ATTENTION}.sparse_mla_attention",
    "SparseMLACommonMetadata": f"{_ATTENTION}.sparse_mla_attention",
    "SparseMLACommonMetadataBuilder": f"{_ATTENTION}.sparse_mla_attention",
    "direct_register_custom_op": "vllm.utils.torch_utils",
    "get_current_vllm_config": "vllm.config",
    "get_forward_context": "vllm.forward_context",
    "op_registry_oot": "vllm.model_executor.custom_op",
    "register_backend": f"{_BACKENDS}.registry",
    "register_mla_prefill_backend": f"{_BACKENDS}.mla.prefill.registry",
}


def __getattr__(name: str) -> Any:
    """A name of vLLM, imported now."""
    return _RELEASE.find(PATHS, __name__, name)


def why_not() -> str | None:
    """Return why this package cannot serve: vLLM is missing, or of an untested release."""
    return _RELEASE.why_not()


def pickle_by(member: Any, find: Callable[[str], Any], name: str) -> None:
    """Let `find(name)` restore a member of a registry in another process.

    A spawned process unpickles its configuration before it loads plugins, and does not know a
    member that a plugin has registered.
    """
    member.__reduce_ex__ = lambda protocol: (find, (name,))


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


def indexer_function() -> Any:
    """vLLM's own function behind SparseAttnIndexer."""
    return importlib.import_module(_INDEXER).sparse_attn_indexer


def replace_fused_call(function: Any) -> None:
    """Put `function` in the place of the indexer's, which DeepSeek-V3.2 layers call directly."""
    layer = sys.modules.get(_FUSED_LAYER)
    if layer is not None:
        layer.sparse_attn_indexer = function  # type: ignore[attr-defined]


def layer_metadata(layer_name: str) -> Any:
    """The metadata of a layer in this step; None in a dummy run."""
    metadata = importlib.import_module("vllm.forward_context").get_forward_context().attn_metadata
    return metadata[layer_name] if isinstance(metadata, dict) else None


def attends_densely(layer_name: str) -> bool:
    """Return whether no layer of this step uses a selection: short prompts attend to all tokens.

    The condition is that of vLLM's indexer; a captured graph always selects.
    """
    context = importlib.import_module("vllm.forward_context").get_forward_context()
    modes = importlib.import_module("vllm.config").CUDAGraphMode
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
    return int(importlib.import_module("vllm.envs").VLLM_SPARSE_INDEXER_MAX_LOGITS_MB) * 2**20
