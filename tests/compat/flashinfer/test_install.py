"""The drop-in for FlashInfer takes its name: `install`, `uninstall`, and the page about it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch

from mlakit.compat import flashinfer, installation
from mlakit.compat.flashinfer.installation import UTILS


@pytest.fixture(autouse=True)
def no_other(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No other flashinfer seems to be on this machine; ours is gone when the test ends."""
    for name in [name for name in sys.modules if name.split(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(installation, "find_spec", lambda name: None)
    yield
    flashinfer.uninstall()


# where FlashInfer 0.6.18 has them
PLACES = {
    "flashinfer": [*set(flashinfer.__all__) - {"Installation", "install", "uninstall"}],
    "flashinfer.mla": ["BatchMLAPagedAttentionWrapper", "trtllm_batch_decode_with_kv_cache_mla"],
    "flashinfer.decode": ["trtllm_batch_decode_with_kv_cache_mla"],
    "flashinfer.prefill": [
        "BatchPrefillWithRaggedKVCacheWrapper",
        "single_prefill_with_kv_cache",
        "single_prefill_with_kv_cache_return_lse",
    ],
    "flashinfer.cascade": ["merge_state", "merge_state_in_place", "merge_states"],
    "flashinfer.page": [
        "append_paged_mla_kv_cache",
        "get_batch_indices_positions",
        "get_seq_lens",
    ],
    "flashinfer.topk": [
        "top_k",
        "top_k_page_table_transform",
        "top_k_ragged_transform",
    ],
}


def test_every_name_is_where_flashinfer_has_it():
    with flashinfer.install():
        for place, names in PLACES.items():
            module = import_module(place)
            assert {name: getattr(module, name) for name in names} == {
                name: getattr(flashinfer, name) for name in names
            }
        assert import_module("flashinfer").__version__ == flashinfer.__version__ == "0.6.18"
        scope: dict[str, Any] = {}
        exec("import flashinfer.mla as m\nimport flashinfer\nfrom flashinfer import *", scope)
        assert scope["flashinfer"].mla is scope["m"]
        assert scope["merge_states"] is flashinfer.merge_states
        with pytest.raises(ImportError, match=r"flashinfer\.fused_moe"):
            import_module("flashinfer.fused_moe")
        with pytest.raises(ImportError, match="rmsnorm"):
            exec("from flashinfer import rmsnorm", {})
    assert not [name for name in sys.modules if name.split(".")[0] == "flashinfer"]


def test_compilation_does_nothing():
    with flashinfer.install():
        attention, jit = (import_module(f"flashinfer.{name}") for name in ("jit.attention", "jit"))
        for name in ("batch_mla", "batch_prefill", "single_prefill"):
            assert getattr(attention, f"gen_{name}_module")("fa3", torch.float16, 192) is None
        assert jit.build_jit_specs([None], verbose=False) is None
        assert jit.attention is attention
        utils = import_module("flashinfer.utils")
        assert utils.has_flashinfer_jit_cache()
        assert set(UTILS) <= set(vars(utils))


@pytest.mark.parametrize(
    ("capability", "supported"), [((8, 0), None), ((9, 0), 90), ((10, 0), 100), ((11, 0), 110)]
)
def test_devices_are_told_apart_by_their_capability(capability, supported, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for arch in (90, 100, 110):
        found = UTILS[f"is_sm{arch}a_supported"]
        assert found(torch.device("cuda")) == (arch == supported)
        assert not found(torch.device("cpu"))


def test_another_flashinfer_is_not_hidden_by_accident(monkeypatch):
    real, mla = ModuleType("flashinfer"), ModuleType("flashinfer.mla")
    monkeypatch.setitem(sys.modules, "flashinfer", real)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", mla)
    with pytest.raises(RuntimeError, match=r"another flashinfer is already imported.*force=True"):
        flashinfer.install()
    with flashinfer.install(force=True):
        flashinfer.install()
        assert import_module("flashinfer.mla") is not mla
    assert sys.modules["flashinfer"] is real
    assert sys.modules["flashinfer.mla"] is mla
    assert "flashinfer.jit" not in sys.modules
