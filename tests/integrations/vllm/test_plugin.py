"""The plugin where vLLM is not installed: what it registers and what it refuses."""

from __future__ import annotations

import enum
import importlib
import importlib.metadata
import pickle
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mlakit import UnsupportedError
from mlakit.integrations.vllm import plugin, seams


def version_is(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def find(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", find)


def test_without_vllm_the_plugin_warns(monkeypatch):
    version_is(monkeypatch, None)
    message = r"vLLM must be installed: pip install 'mlakit\[vllm\]'"
    with pytest.raises(UnsupportedError, match=message):
        _ = seams.MLACommonBackend
    monkeypatch.setattr(seams, "add_backend", pytest.fail)
    with pytest.warns(UserWarning, match=message):
        plugin.register()  # an error would stop a vLLM that does not use it


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cu130"])
def test_builds_of_the_release_are_taken(version, monkeypatch):
    version_is(monkeypatch, version)
    assert seams.why_not() is None


def test_a_name_that_is_no_seam():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = seams.nothing


def registries(has_register: bool) -> tuple[Any, Any]:
    """Registries like those of vLLM: an enum of backends, and one of prefill backends."""

    class Registry(enum.Enum):
        FLASHMLA = "vllm.FlashMLA"

    class PrefillRegistry(enum.Enum):
        FLASH_ATTN = "vllm.FlashAttention"

    def register(registry: Any, name: str, value: str) -> None:
        assert name not in registry.__members__  # an error in vLLM
        seams._add_member(registry, name, value)

    if has_register:
        for each in (Registry, PrefillRegistry):
            type.__setattr__(each, "register", classmethod(register))
    return Registry, PrefillRegistry


@pytest.mark.parametrize(("version", "has_register"), [("0.26.0", False), ("0.32.0", True)])
def test_names_are_registered_once(version, has_register, monkeypatch):
    version_is(monkeypatch, version)
    monkeypatch.setattr(seams, "why_not", lambda: None)
    (dense, prefill), replaced = registries(has_register), {}

    def register_oot(cls: type, name: str) -> None:
        assert name not in replaced
        replaced[name] = cls

    fakes = {
        "AttentionBackendEnum": dense,
        "MLAPrefillBackendEnum": prefill,
        "op_registry_oot": replaced,
        "CustomOp": SimpleNamespace(register_oot=register_oot),
    }
    for name, fake in fakes.items():
        monkeypatch.setitem(vars(seams), name, fake)
    indexer = SimpleNamespace(Indexer=type("Indexer", (), {}))
    monkeypatch.setitem(sys.modules, "mlakit.integrations.vllm.indexer", indexer)
    plugin.register()
    plugin.register()
    assert [each.name for each in dense] == ["FLASHMLA", "MLAKIT", "MLAKIT_SPARSE"]
    assert dense["MLAKIT"].value == "mlakit.integrations.vllm.dense.DenseBackend"
    assert dense["MLAKIT_SPARSE"].value == "mlakit.integrations.vllm.sparse.SparseBackend"
    assert prefill["MLAKIT"].value == "mlakit.integrations.vllm.prefill.PrefillBackend"
    assert dense.MLAKIT is dense("mlakit.integrations.vllm.dense.DenseBackend")
    assert pickle.loads(pickle.dumps(dense.MLAKIT)) is dense.MLAKIT
    assert replaced == {"SparseAttnIndexer": indexer.Indexer}


def test_the_indexers_function_is_replaced_wherever_it_has_a_name(monkeypatch):
    def own() -> str:
        return "vLLM's"

    path = seams.SEAMS["SparseAttnIndexer"].module
    modules = {each: ModuleType(each) for each in (path, "a_layer", "another")}
    modules[path].sparse_attn_indexer = modules["a_layer"].sparse_attn_indexer = own
    modules["another"].sparse_attn_indexer = other = lambda: "not vLLM's"
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for _ in range(2):
        seams.replace_fused_call(lambda found: lambda: f"ours, not {found()}")
    assert modules[path].sparse_attn_indexer() == "ours, not vLLM's"
    assert modules["a_layer"].sparse_attn_indexer() == "ours, not vLLM's"
    assert modules["another"].sparse_attn_indexer is other


def config(backend: Any, **per_kind: Any) -> Any:
    attention = SimpleNamespace(backend=backend, backend_per_kind=per_kind or None)
    return SimpleNamespace(attention_config=attention)


def test_what_a_config_selects():
    chosen = SimpleNamespace(name="MLAKIT_SPARSE")
    assert seams.selects(config(chosen), "MLAKIT_SPARSE")
    assert seams.selects(config("MLAKIT_SPARSE"), "MLAKIT_SPARSE")
    assert seams.selects(config(None, mla_attention=chosen), "MLAKIT_SPARSE")
    assert not seams.selects(config(None), "MLAKIT_SPARSE")
    assert not seams.selects(config(SimpleNamespace(name="MLAKIT")), "MLAKIT_SPARSE")
