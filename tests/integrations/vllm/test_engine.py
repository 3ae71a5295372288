"""vLLM's engine on a CPU with mlakit as its attention: tokens are those of transformers.

Every engine starts in a process of its own and takes half a minute, so that each serves all that
its arguments allow: requests that arrive late, prompts in chunks, cached prefixes, preemption.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.vllm import engine, models

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` installs it")

CHUNKS: dict[str, Any] = {
    "max_num_batched_tokens": 32,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
}
# the ops that gather sharded or FP8 rows for chunks of prefill are compiled for CUDA only
WHOLE: dict[str, Any] = {"max_num_batched_tokens": 320, "enable_prefix_caching": False}
DRAFTS: dict[str, Any] = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    }
}
TP: dict[str, Any] = {"tensor_parallel_size": 2}
DCP: dict[str, Any] = {**TP, "decode_context_parallel_size": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return models.transformers_tokens(model, models.prompts())


def test_late_requests_chunks_prefixes_and_preemption(model, expected, tmp_path):
    prompts = models.prompts()
    served = engine.serve(tmp_path, model, prompts, every=3, num_gpu_blocks_override=16, **CHUNKS)
    assert served["tokens"] == expected
    assert served["cached"][3] == 64  # its first 70 tokens are those of another prompt
    assert served["preemptions"] > 0
    assert set(served["calls"]) == {"update_cache", "prefill", "prefill-chunk", "decode"}


def test_drafts(model, expected, tmp_path):
    served = engine.serve(tmp_path, model, models.prompts(), every=3, **CHUNKS, **DRAFTS)
    assert served["tokens"] == expected
    assert {"decode-drafts", "prefill-chunk"} <= set(served["calls"])


def test_layers_of_transformers(model, expected, tmp_path):
    served = engine.serve(
        tmp_path, model, models.prompts(), every=3, model_impl="transformers", **CHUNKS
    )
    assert served["tokens"] == expected
    assert {"prefill-chunk", "decode"} <= set(served["calls"])


@pytest.mark.parametrize("drafts", [{}, DRAFTS], ids=["alone", "drafts"])
def test_tensor_parallel(drafts, model, expected, tmp_path):
    served = engine.serve(tmp_path, model, models.prompts(), every=3, **CHUNKS, **TP, **drafts)
    assert served["tokens"] == expected
    assert served["calls"]["decode-drafts" if drafts else "decode"] == 2  # processes


@pytest.mark.parametrize(
    ("drafts", "interleave"), [({}, 1), (DRAFTS, 16)], ids=["alone", "drafts-interleave16"]
)
def test_tensor_and_decode_context_parallel(drafts, interleave, model, expected, tmp_path):
    served = engine.serve(
        tmp_path,
        model,
        models.prompts(),
        every=3,
        cp_kv_cache_interleave_size=interleave,
        **WHOLE,
        **DCP,
        **drafts,
    )
    assert served["tokens"] == expected
    # with drafts a rank needs the positions of its keys, without them their number
    assert served["calls"]["decode-drafts-shard" if drafts else "decode"] == 2


@pytest.mark.parametrize("cache", ["fp8", "fp8_ds_mla"])
def test_fp8_caches_give_the_tokens_of_an_oracle_over_the_same_cache(cache, model, tmp_path):
    prompts = models.prompts()
    arguments = {"kv_cache_dtype": cache, "every": 3, **WHOLE}
    served = engine.serve(tmp_path / "mlakit", model, prompts, **arguments)
    oracle = engine.serve(tmp_path / "oracle", model, prompts, oracle=True, **arguments)
    assert served["tokens"] == oracle["tokens"]
    assert "decode" in served["calls"]
    assert "decode" not in oracle["calls"]
