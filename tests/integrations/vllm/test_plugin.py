"""The plugin where vLLM is not installed: its entry point, what it imports, what it refuses."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mlakit import UnsupportedError
from mlakit.integrations.vllm import plugin, seams
from tests.paths import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it where the standard library has none
    import tomli as tomllib

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]


def version_is(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def find(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", find)


def test_the_entry_point_is_the_function_that_registers():
    (point,) = PROJECT["entry-points"]["vllm.general_plugins"].values()
    module, _, name = point.partition(":")
    assert getattr(importlib.import_module(module), name) is plugin.register


def test_the_extra_is_the_release_of_the_seams():
    assert PROJECT["optional-dependencies"]["vllm"] == [f"vllm=={seams.RELEASE}"]


def test_importing_the_plugin_is_cheap():
    code = (
        "import sys, mlakit.integrations.vllm.plugin\n"
        "print([m for m in ('torch', 'triton', 'vllm', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, r"vLLM must be installed: pip install 'mlakit\[vllm\]'"),
        ("0.31.1", r"vLLM must be 0.32.0, the release that was tested, got 0.31.1"),
        ("0.33.0rc1", r"got 0.33.0rc1"),
    ],
)
def test_another_vllm_is_refused(version, message, monkeypatch):
    version_is(monkeypatch, version)
    with pytest.raises(UnsupportedError, match=message):
        _ = seams.MLACommonBackend
    monkeypatch.setitem(vars(seams), "register_backend", pytest.fail)
    with pytest.warns(UserWarning, match=message):
        plugin.register()  # an error would stop a vLLM that does not use it


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cu130"])
def test_builds_of_the_release_are_taken(version, monkeypatch):
    version_is(monkeypatch, version)
    assert seams.why_not() is None


def test_a_name_that_is_no_seam():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = seams.nothing


class Registry:
    """A registry of vLLM: an enum whose members may be added, each once."""

    def __init__(self, own: str) -> None:
        self.__members__ = {own: SimpleNamespace(path="")}

    def __getitem__(self, name: str) -> Any:
        return self.__members__[name]

    def register(self, name: str, path: str) -> None:
        assert name not in self.__members__  # an error in vLLM
        self.__members__[name] = SimpleNamespace(path=path)


def test_names_are_registered_once(monkeypatch):
    version_is(monkeypatch, seams.RELEASE)
    dense, prefill, replaced = Registry("FLASHMLA"), Registry("FLASH_ATTN"), {}

    def register_oot(cls: type, name: str) -> None:
        assert name not in replaced
        replaced[name] = cls

    fakes = {
        "AttentionBackendEnum": dense,
        "MLAPrefillBackendEnum": prefill,
        "register_backend": dense.register,
        "register_mla_prefill_backend": prefill.register,
        "op_registry_oot": replaced,
        "CustomOp": SimpleNamespace(register_oot=register_oot),
    }
    for name, fake in fakes.items():
        monkeypatch.setitem(vars(seams), name, fake)
    indexer = SimpleNamespace(Indexer=type("Indexer", (), {}))
    monkeypatch.setitem(sys.modules, "mlakit.integrations.vllm.indexer", indexer)
    plugin.register()
    plugin.register()
    assert dense["MLAKIT"].path == "mlakit.integrations.vllm.dense.DenseBackend"
    assert dense["MLAKIT_SPARSE"].path == "mlakit.integrations.vllm.sparse.SparseBackend"
    assert prefill["MLAKIT"].path == "mlakit.integrations.vllm.prefill.PrefillBackend"
    assert replaced == {"SparseAttnIndexer": indexer.Indexer}


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
