"""SGLang's engine on a CPU with mlakit as its attention: tokens are those of transformers.

Every engine starts in a process of its own and takes a minute, so that each serves all that its
arguments allow. More prompts than `max_running_requests` make some arrive late.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.sglang import cpu_shim, engine
from tests.integrations.vllm import models

pytestmark = pytest.mark.skipif(
    not cpu_shim.is_installed(), reason="SGLang is not installed; `make test-sglang` installs it"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = models.save_model(tmp_path_factory.mktemp("model"))
    # SGLang reads fields that the configuration of transformers has no longer
    path = folder / "config.json"
    more = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    return folder


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return models.transformers_tokens(model, models.prompts())


def check(served: dict[str, Any], expected: list[list[int]]) -> None:
    """Both rounds; the second in the reverse order."""
    first, second = served["tokens"]
    assert first == expected
    assert second[::-1] == expected


def test_whole_prompts_and_cached_prefixes(model, expected, tmp_path):
    prompts = models.prompts()
    served = engine.serve(tmp_path, model, [prompts, prompts[::-1]], page_size=64)
    check(served, expected)
    assert served["cached"][1][3] == 64  # of the prompt of 90 tokens
    assert served["calls"] == {"prefill", "decode", "decode-several"}


def test_prompts_in_chunks(model, expected, tmp_path):
    prompts = models.prompts()
    served = engine.serve(
        tmp_path, model, [prompts, prompts[::-1]],
        page_size=16, chunked_prefill_size=32, expand_from=16,
    )  # fmt: skip
    check(served, expected)
    assert served["calls"] == {"prefill", "prefill-prefix", "decode"}


def test_two_ranks_and_pages_of_one_token(model, expected, tmp_path):
    prompts = models.prompts()
    served = engine.serve(tmp_path, model, [prompts, prompts[::-1]], page_size=1, tp_size=2)
    check(served, expected)
    assert served["calls"] == {"prefill", "decode", "decode-several"}
