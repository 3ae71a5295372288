"""What a layer of vLLM keeps of its arguments, with a class in the place of vLLM's."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from mlakit import PagedLatentCache, RowShape, UnsupportedError
from mlakit.integrations import announce
from mlakit.integrations.vllm.cached_layer import CachedLayer


class Common:
    """Takes the constructor's arguments as vLLM's classes do; keeps no kv_cache_dtype."""

    def __init__(self, *arguments: Any, kv_lora_rank: int, qk_rope_head_dim: int) -> None:
        self.arguments = arguments
        self.kv_lora_rank, self.qk_rope_head_dim = kv_lora_rank, qk_rope_head_dim


class Layer(CachedLayer, Common):
    backend = "NAME"


WIDTHS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


def test_a_layer_hands_on_its_arguments_and_keeps_the_cache_dtype():
    layer = Layer(16, 576, 0.1, 1, None, None, "fp8", None, "decoder", None, **WIDTHS)
    assert layer.arguments == (16, 576, 0.1, 1, None, None, "fp8", None, "decoder", None)
    assert layer.kv_cache_dtype == "fp8"
    assert layer.pools.row == RowShape(512, 64)


@pytest.mark.parametrize("feature", ["alibi_slopes", "sliding_window", "logits_soft_cap"])
def test_a_layer_refuses_what_the_ops_do_not_compute(feature):
    features = dict.fromkeys(("alibi_slopes", "sliding_window", "logits_soft_cap"))
    features[feature] = 4
    with pytest.raises(UnsupportedError, match=f"^NAME: {feature} is not supported, got 4"):
        Layer(16, 576, 0.1, 1, kv_cache_dtype="auto", **features, **WIDTHS)


def test_a_backend_says_once_what_serves_it(caplog, monkeypatch):
    monkeypatch.setattr(announce, "_ANNOUNCED", set())
    monkeypatch.setattr(announce.selection, "chosen", lambda op: (f"cpu of {op}",))
    pool = PagedLatentCache.allocate(RowShape(512, 64), "fp8_block128", num_pages=1, page_size=64)
    layer = Layer(16, 576, 0.1, 1, None, None, "fp8", None, **WIDTHS)
    with caplog.at_level(logging.INFO, logger="vllm.mlakit"):
        layer.announce("mla_decode", pool)
        layer.announce("mla_decode", pool)
    assert caplog.messages == [
        "NAME: mla_decode by cpu of mla_decode over rows of fp8_block128, 656 bytes a token, "
        "64 tokens a page"
    ]
