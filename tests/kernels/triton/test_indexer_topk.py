"""Each way in which the Triton kernel finds the k best, whatever the shape would have chosen."""

from __future__ import annotations

import pytest

from mlakit.kernels.triton import indexer_topk
from mlakit.kernels.triton.configs import TopkConfig, pick_topk_config
from mlakit.workloads import IndexerTopkCase

WAYS = {
    "whole": (TopkConfig(1, 512, "whole", 3), 70),
    "whole, in parts": (TopkConfig(2, 512, "whole", 3), 70),
    "narrow": (TopkConfig(1, 64, "narrow", 3), 20),
    "narrow, in parts": (TopkConfig(3, 64, "narrow", 3), 20),
    "narrow, half a block": (TopkConfig(1, 64, "narrow", 3), 32),
    "reread": (TopkConfig(1, 64, "reread", 3), 70),
    "reread, in parts": (TopkConfig(2, 64, "reread", 3), 70),
}
LOGITS = {
    "distinct": {},
    "three values": {"levels": 3, "specials": 0.2, "with_ends": True},
    "mostly special": {"levels": 50, "specials": 0.9, "with_starts": True, "with_ends": True},
}


@pytest.mark.interpreted
@pytest.mark.parametrize("logits", LOGITS.values(), ids=LOGITS.keys())
@pytest.mark.parametrize(("config", "k"), WAYS.values(), ids=WAYS.keys())
def test_every_way(config, k, logits, place, monkeypatch):
    if place.on_cpu_backend:
        pytest.skip("has one way")
    monkeypatch.setattr(indexer_topk, "pick_topk_config", lambda **problem: config)
    case = IndexerTopkCase(num_tokens=3, num_columns=200, k=k, **logits)
    trial = case.trial(place.device)
    trial.check(trial.call(place.backend))


@pytest.mark.parametrize(
    ("rows", "columns", "k", "way"),
    [
        (1, 4096, 2048, "whole"),
        (1, 131072, 2048, "whole"),
        (4096, 16384, 2048, "whole"),
        (4096, 131072, 2048, "narrow"),
        (4096, 131072, 8192, "narrow"),
        (4096, 131072, 8193, "reread"),
    ],
)
def test_the_way_of_a_shape(rows, columns, k, way):
    config = pick_topk_config(rows=rows, columns=columns, k=k, num_sms=132)
    assert config.method == way
    assert config.splits == 1 or rows * config.splits <= 132


def test_scratch_memory_does_not_grow_with_rows():
    config = pick_topk_config(rows=10**6, columns=131072, k=2048, num_sms=132)
    assert config.splits == 1
    assert config.programs(10**6) * config.block * 8 < 2**26
