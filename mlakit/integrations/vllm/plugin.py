"""The entry point of the group `vllm.general_plugins`: names for vLLM's registries."""

from __future__ import annotations

import warnings
from typing import Any

from mlakit.integrations.vllm import seams

PACKAGE = "mlakit.integrations.vllm"
DENSE, SPARSE, PREFILL, INDEXER = "MLAKIT", "MLAKIT_SPARSE", "MLAKIT", "SparseAttnIndexer"
# vLLM asks that is_sparse() of a backend is that of the model: one class cannot be both
BACKENDS = {DENSE: f"{PACKAGE}.dense.DenseBackend", SPARSE: f"{PACKAGE}.sparse.SparseBackend"}
PREFILL_BACKENDS = {PREFILL: f"{PACKAGE}.prefill.PrefillBackend"}


def register() -> None:
    """Make the backends known to vLLM by name; none is selected by that.

    vLLM calls it in every process, maybe more than once. Registering a name twice is an error
    there, so that names that are registered already are left as they are. A vLLM that lacks a name
    gets a warning and no backend: an error here would stop it for those who do not ask for one.
    """
    if refusal := seams.why_not():
        warnings.warn(refusal, stacklevel=2)
        return
    for name, path in BACKENDS.items():
        seams.add_backend(seams.AttentionBackendEnum, name, path, backend_named)
    for name, path in PREFILL_BACKENDS.items():
        seams.add_backend(seams.MLAPrefillBackendEnum, name, path, prefill_backend_named)
    if INDEXER not in seams.op_registry_oot:
        # it acts as vLLM's own one unless MLAKIT_SPARSE is selected
        from mlakit.integrations.vllm.indexer import Indexer

        seams.CustomOp.register_oot(Indexer, name=INDEXER)


def backend_named(name: str) -> Any:
    """The member of vLLM's registry, in a process that may not have loaded its plugins yet."""
    register()
    return seams.AttentionBackendEnum[name]


def prefill_backend_named(name: str) -> Any:
    """The same among the prefill backends."""
    register()
    return seams.MLAPrefillBackendEnum[name]
