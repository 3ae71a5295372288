"""The names that seams.py takes from SGLang, as modules with the same paths and conventions.

Written from SGLang 0.5.23. `test_backend.py`, `test_sparse.py` and `test_drafts.py`
drive the backends with it, and `test_installed.py` compares it with SGLang where that is installed.
"""

from __future__ import annotations

import importlib.metadata
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mlakit import RowShape
from mlakit.integrations.sglang import seams
from mlakit.tools.testing import poison

BACKEND_MODULES = tuple(f"mlakit.integrations.sglang.{name}" for name in ("backend", "sparse"))


class ForwardMode(Enum):
    EXTEND = 1
    DECODE = 2
    IDLE = 4
    TARGET_VERIFY = 5
    DRAFT_EXTEND_V2 = 6

    def is_decode_or_idle(self) -> bool:
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_target_verify(self) -> bool:
        return self is ForwardMode.TARGET_VERIFY

    def is_draft_extend_v2(self) -> bool:
        return self is ForwardMode.DRAFT_EXTEND_V2

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE


class DraftBackendFactory:
    """Its own backends are markers."""

    def __init__(self, draft_model_runner, topk, speculative_num_steps, backend="mlakit"):
        self.draft_model_runner = draft_model_runner
        self.topk, self.speculative_num_steps = topk, speculative_num_steps
        self.draft_attn_backend = backend

    def _create_backend(self, backend_name, backend_map, error_template):
        if self.draft_attn_backend not in backend_map:
            raise ValueError(error_template.format(backend_type=self.draft_attn_backend))
        self.name, backend = backend_map[self.draft_attn_backend]()
        return backend

    def _create_fa3_decode_backend(self):
        return "fa3", "decode"

    def _create_fa3_prefill_backend(self):
        return "fa3", "prefill"

    def create_decode_backend(self):
        if self.speculative_num_steps <= 1:
            return None
        own = {"fa3": self._create_fa3_decode_backend}
        return self._create_backend("decode_attention_backend", own, "no {backend_type}")

    def create_draft_extend_backend(self):
        own = {"fa3": self._create_fa3_prefill_backend}
        return self._create_backend("prefill_attention_backend", own, "no {backend_type}")


class AttnForwardMethod(Enum):
    MLA = 1
    MHA_ONE_SHOT = 2
    MHA_CHUNKED_KV = 3


class AttentionBackend:
    """Its `forward` chooses as SGLang's does."""

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **named):
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        forward = self.forward_decode if mode.is_decode() else self.forward_extend
        return forward(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **named)


class AttentionBackendRegistry:
    _handlers: dict[str, Any] = {}  # noqa: RUF012  # a class attribute in SGLang, too

    @classmethod
    def register(cls, name, handler):
        cls._handlers[name] = handler

    @classmethod
    def get_handler(cls, name):
        return cls._handlers[name]


class Indexer:
    """Its own top-k is a marker."""

    def __init__(self, index_topk: int) -> None:
        self.index_topk = index_topk

    @staticmethod
    def _get_index_k_read_buffer(pool, layer_id):
        return pool.index_keys[layer_id]

    def _get_topk_paged(self, forward_batch, layer_id, q_fp8, weights, metadata):
        return "paged"

    def _get_topk_ragged(
        self,
        enable_dual_stream,
        forward_batch,
        layer_id,
        q_fp8,
        weights,
        metadata,
        topk_result=None,
    ):
        return "ragged"


class KVWriteLoc(NamedTuple):
    loc: Tensor

    @classmethod
    def for_batch(cls, forward_batch):
        return cls(forward_batch.out_cache_loc)


class Settings(NamedTuple):
    """What a server was started with."""

    attn_dcp_size: int = 1
    attn_tp_size: int = 8
    speculative_num_draft_tokens: int | None = None
    speculative_eagle_topk: int | None = None
    prefill_cp: bool = False


def version_is(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """Let importlib find a version of SGLang, or none."""

    def find(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", find)


def install(monkeypatch: pytest.MonkeyPatch, settings: Settings | None = None) -> dict[str, Any]:
    """Put the modules in place until the test ends; returns what they hold, by name."""
    settings = settings or Settings()
    pool = SimpleNamespace(current=None)
    choices, chunked, backends = ["triton", "fa3"], ["fa3"], {"fa3": None}

    def register_attention_backend(name):
        assert name not in backends, "registered twice"

        def decorate(factory):
            backends[name] = factory
            return factory

        return decorate

    handlers = type("AttentionBackendRegistry", (AttentionBackendRegistry,), {"_handlers": {}})
    handlers.register("fa3", lambda attention, batch: batch.rule)
    names: dict[str, Any] = {
        "ATTENTION_BACKENDS": backends,
        "ATTENTION_BACKEND_CHOICES": choices,
        "AttentionBackend": AttentionBackend,
        "AttentionBackendRegistry": handlers,
        "AttnForwardMethod": AttnForwardMethod,
        "BaseIndexerMetadata": type("BaseIndexerMetadata", (), {}),
        "CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS": chunked,
        "DraftBackendFactory": type("DraftBackendFactory", (DraftBackendFactory,), {}),
        "FORWARD_ABSORB_CORE_ATTENTION_BACKENDS": ["fa3"],
        "Indexer": type("Indexer", (Indexer,), {}),
        "KVWriteLoc": KVWriteLoc,
        "add_attention_backend_choices": choices.extend,
        "add_chunked_prefix_cache_attention_backend": chunked.append,
        "get_dsa_index_kpool": lambda config: getattr(config, "index_kpool", 1),
        "get_dsa_index_topk": lambda config: config.index_topk,
        "get_parallel": lambda: settings,
        "get_spec": lambda: settings,
        "get_token_to_kv_pool": lambda: pool.current,
        "named_draft_backends": None,
        "is_deepseek_dsa": lambda config: hasattr(config, "index_topk"),
        "is_dsa_enable_prefill_cp": lambda: settings.prefill_cp,
        "register_attention_backend": register_attention_backend,
    }
    assert names.keys() == seams.SEAMS.keys()
    version_is(monkeypatch, seams.RELEASES.run[-1])
    monkeypatch.setenv("MLAKIT_WARMUP", "0")  # the model is none that has a config
    for name, path in ((name, seam.module) for name, seam in seams.SEAMS.items()):
        if path not in sys.modules or not hasattr(sys.modules[path], "is_fake"):
            module = ModuleType(path)
            module.is_fake = True
            monkeypatch.setitem(sys.modules, path, module)
        setattr(sys.modules[path], name, names[name])
    for module in BACKEND_MODULES:  # their bases are those of this engine
        monkeypatch.delitem(sys.modules, module, raising=False)
    return {**names, "pool": pool}


class Pool:
    """MLATokenToKVPool: rows [slots + page, 1, width] of each layer, page 0 for padding."""

    def __init__(self, row: RowShape, dtype, width: int, slots: int, page: int, device) -> None:
        self.row = row
        stored = torch.uint8 if dtype.itemsize == 1 else dtype
        self.rows = [
            poison(torch.zeros(slots + page, 1, width, dtype=stored, device=device)).view(dtype)
            for _ in range(2)
        ]
        self.index_keys: dict[int, Tensor] = {}
        self.written: list[tuple[Any, ...]] = []

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.rows[layer_id]

    def set_mla_kv_buffer(self, layer, where, k, k_rope) -> None:
        self.set_kv_buffer(layer, where, torch.cat([k, k_rope], -1), k)

    def set_kv_buffer(self, layer, where, k, v) -> None:
        self.written.append((layer.layer_id, k.shape))
        rows = self.rows[layer.layer_id]
        rows[where.loc] = k.to(rows.dtype)


def layer_of(heads: int, row: RowShape, scaling: float, **fields: Any) -> SimpleNamespace:
    """RadixAttention over the cache."""
    made = SimpleNamespace(
        layer_id=1,
        tp_q_head_num=heads,
        tp_k_head_num=1,
        qk_head_dim=row.width,
        v_head_dim=row.kv_lora_rank,
        scaling=scaling,
        logit_cap=0.0,
        sliding_window_size=-1,
        is_cross_attention=False,
        k_scale_float=None,
    )
    vars(made).update(fields)
    return made
