"""The seams against SGLang itself, where it is installed: no GPU is needed to import it."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from mlakit.integrations.sglang import plugin, seams
from tests.integrations.sglang import cpu_shim, fake_engine

pytestmark = pytest.mark.skipif(
    not cpu_shim.is_installed(), reason="SGLang is not installed; `make test-sglang` installs it"
)


@pytest.fixture(scope="module", autouse=True)
def _own_classes() -> None:
    """The backends have the bases of this engine, and not those of the fake one."""
    for module in fake_engine.BACKEND_MODULES:
        sys.modules.pop(module, None)


@pytest.mark.parametrize("name", sorted(seams.SEAMS))
def test_every_name_is_where_it_was(name):
    if seams.RELEASES.has(name):
        assert getattr(seams, name) is not None


def test_the_plugin_registers_once_in_the_real_registries():
    plugin.register()
    plugin.register()
    assert seams.ATTENTION_BACKEND_CHOICES.count("mlakit") == 1
    assert seams.ATTENTION_BACKENDS["mlakit"] is plugin.create_backend


def test_the_command_line_takes_the_name():
    plugin.register()
    arguments = importlib.import_module("sglang.srt.server_args")
    assert arguments.ATTENTION_BACKEND_CHOICES is seams.ATTENTION_BACKEND_CHOICES


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "kwargs"]


@pytest.mark.parametrize(
    "name",
    [
        "init_forward_metadata",
        "init_forward_metadata_out_graph",
        "init_forward_metadata_in_graph",
        "init_cuda_graph_state",
        "get_cuda_graph_seq_len_fill_value",
        "get_indexer_metadata",
        "forward_decode",
        "forward_extend",
    ],
)
def test_methods_take_the_arguments_of_the_base(name):
    from mlakit.integrations.sglang.sparse import SparseBackend

    base = parameters(getattr(seams.AttentionBackend, name))
    assert parameters(getattr(SparseBackend, name))[: len(base)] == base


def test_the_indexer_metadata_is_complete():
    from mlakit.integrations.sglang.sparse import IndexerMetadata

    assert issubclass(IndexerMetadata, seams.BaseIndexerMetadata)
    assert not IndexerMetadata.__abstractmethods__


@pytest.mark.parametrize("name", ["_get_topk_paged", "_get_topk_ragged"])
def test_the_replaced_selection_has_the_signature_of_the_indexers(name, monkeypatch):
    indexer = seams.Indexer
    own = parameters(getattr(indexer, name))
    for each in ("_get_topk_paged", "_get_topk_ragged"):  # put back after the test
        monkeypatch.setattr(indexer, each, getattr(indexer, each))
    calls: list[Any] = []
    seams.replace_selection(lambda *arguments: calls.append(arguments), lambda metadata: True)
    assert parameters(getattr(indexer, name)) == own
    given = dict.fromkeys(own[1:])
    getattr(indexer, name)(object(), **given)
    assert len(calls) == 1
    assert len(calls[0]) == 6


def test_the_factory_of_draft_backends_asks_for_ours(monkeypatch):
    factory = seams.DraftBackendFactory
    monkeypatch.setattr(factory, "_create_backend", factory._create_backend)  # put back
    decode, extend = mock.MagicMock(), mock.MagicMock()
    seams.add_draft_backends("mlakit", decode, extend)
    made = object.__new__(factory)
    fields = {"draft_attn_backend": "mlakit", "speculative_num_steps": 3, "qsa_profile": None}
    vars(made).update(fields, draft_model_runner="runner", server_args=mock.MagicMock())
    for name in ("_assert_draft_needs_no_conv_sidecar", "attention_backends", "get_spec"):
        answer = mock.MagicMock(return_value=mock.MagicMock())
        if name == "attention_backends":
            answer.return_value = ("mlakit", "mlakit")
        monkeypatch.setattr(f"{factory.__module__}.{name}", answer, raising=False)
    registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
    for name in ("attn_backend_wrapper_for_draft_extend", "attn_backend_wrapper_for_draft_decode"):
        monkeypatch.setattr(registry, name, lambda runner, backend: backend, raising=False)
    assert made.create_decode_backend() is decode.return_value
    assert made.create_draft_extend_backend() is extend.return_value
    decode.assert_called_once_with("runner", 3)
    extend.assert_called_once_with("runner")


@pytest.mark.parametrize(
    ("fake", "path"),
    [
        ("ForwardMode", "sglang.srt.model_executor.forward_batch_info"),
        ("AttnForwardMethod", seams.SEAMS["AttnForwardMethod"].module),
    ],
)
def test_the_fake_engine_has_members_of_the_real_one(fake, path):
    own = getattr(importlib.import_module(path), fake)
    for member in getattr(fake_engine, fake):
        assert member.name in own.__members__


def test_forward_modes_answer_as_the_real_ones():
    real = importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
    questions = [name for name in vars(fake_engine.ForwardMode) if name.startswith("is_")]
    assert questions
    for member in fake_engine.ForwardMode:
        for question in questions:
            assert getattr(member, question)() == getattr(real[member.name], question)()


def test_the_fake_pool_has_methods_of_the_real_one():
    pool = importlib.import_module("sglang.srt.mem_cache.memory_pool").MLATokenToKVPool
    for name in ("get_key_buffer", "set_mla_kv_buffer", "set_kv_buffer"):
        own = parameters(getattr(fake_engine.Pool, name))
        assert len(parameters(getattr(pool, name))) >= len(own)


def test_a_layer_has_the_fields_that_are_read():
    layer = seams_layer()
    for name in vars(fake_engine.layer_of(16, fake_row(), 0.1)):
        assert hasattr(layer, name), name


def seams_layer() -> Any:
    attention = importlib.import_module("sglang.srt.layers.radix_attention").RadixAttention
    return attention(16, 576, 0.1, 1, layer_id=1, v_head_dim=512)


def fake_row() -> Any:
    from mlakit import RowShape

    return RowShape(512, 64)


def test_the_rules_of_fa3_exist():
    assert seams.AttentionBackendRegistry._handlers[seams.RULES_OF]
    assert seams.RULES_OF in seams.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS


def test_the_start_of_an_engine_on_arm64_finds_its_ops(monkeypatch):
    bootstrap = importlib.import_module("sglang.srt.distributed.bootstrap")
    monkeypatch.setattr(bootstrap, "_is_cpu_arm64", True)
    ranks = SimpleNamespace(tp_size=2, tp_rank=1)
    monkeypatch.setattr(bootstrap, "get_parallel", lambda: ranks)
    cpu_shim.define_ops()
    address = "tcp://127.0.0.1:2345"
    with mock.patch.dict(os.environ):
        bootstrap._init_cpu_threads_env(local_omp_cpuid="0,1", dist_init_method=address)
        assert os.environ["LOCAL_SIZE"] == "2"
