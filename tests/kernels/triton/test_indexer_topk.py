"""Each way in which the Triton kernel finds the k best, whatever the shape would have chosen."""

from __future__ import annotations

import pytest
import torch

from mlakit import ops
from mlakit.kernels.triton import indexer_topk
from mlakit.kernels.triton.configs import TopkConfig, pick_topk_config
from mlakit.tools.testing import assert_same_bits
from mlakit.tools.workloads import IndexerSelectCase, IndexerTopkCase

pytestmark = pytest.mark.usefixtures("no_replay")

WAYS = {
    "whole": (TopkConfig(1, 512, "whole", 0, 512, 0, 1), 70),
    "whole, stored in steps": (TopkConfig(1, 512, "whole", 0, 64, 0, 4), 70),
    "narrow": (TopkConfig(1, 64, "narrow", 3, 32, 32, 4), 20),
    "narrow, half a block": (TopkConfig(1, 64, "narrow", 3, 16, 32, 4), 32),
    "narrow, rows that take turns": (TopkConfig(1, 128, "narrow", 1, 32, 64, 1), 40),
    "narrow, in splits": (TopkConfig(3, 64, "narrow", 3, 32, 32, 4), 20),
    "narrow, in splits of half a block": (TopkConfig(4, 64, "narrow", 3, 16, 64, 4), 32),
    "reread": (TopkConfig(1, 64, "reread", 0, 32, 0, 4), 70),
}
LOGITS = {
    "distinct": {},
    "three values": {"levels": 3, "specials": 0.2, "with_ends": True},
    "mostly special": {"levels": 50, "specials": 0.9, "with_starts": True, "with_ends": True},
}


# as "three values", with more of them
REPEATED = ("mostly special",)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "logits",
    [
        pytest.param(each, id=name, marks=[pytest.mark.thorough] if name in REPEATED else [])
        for name, each in LOGITS.items()
    ],
)
@pytest.mark.parametrize(("config", "k"), WAYS.values(), ids=WAYS.keys())
def test_every_way(config, k, logits, place, monkeypatch):
    if place.on_cpu_backend:
        pytest.skip("has one way")
    monkeypatch.setattr(indexer_topk, "pick_topk_config", lambda **problem: config)
    case = IndexerTopkCase(num_tokens=3, num_columns=200, k=k, **logits)
    trial = case.trial(place.device)
    trial.check(trial.call(place.backend))


# `test_every_way` has the methods, too; here one with splits and one without are enough
METHODS = ("whole", "narrow, in splits")


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("config", "k"),
    [
        pytest.param(*each, id=name, marks=[] if name in METHODS else [pytest.mark.thorough])
        for name, each in WAYS.items()
    ],
)
def test_every_way_of_selecting(config, k, place, monkeypatch):
    if place.on_cpu_backend:
        pytest.skip("has one way")
    monkeypatch.setattr(indexer_topk, "pick_topk_config", lambda **problem: config)
    case = IndexerSelectCase(
        kv_lens=(200, 0, 90), q_lens=(2, 1, 3), k=k, block_tokens=4, specials=0.3, flat_table=True
    )
    trial = case.trial(place.device)
    trial.check(trial.call(place.backend))


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("splits", "warps", "bounds"),
    [
        pytest.param(
            *shape,
            bounds,
            # each shape and each bound once, and all of them together
            marks=[] if i == j or (i, j) == (2, 1) else [pytest.mark.thorough],
        )
        for i, shape in enumerate([(1, 1), (1, 2), (3, 1)])
        for j, bounds in enumerate([{}, {"with_ends": True}, {"with_starts": True}])
    ],
    ids=str,
)
def test_a_list_has_several_strides_of_columns(splits, warps, bounds, place, monkeypatch):
    if place.on_cpu_backend:
        pytest.skip("has no lists")
    config = TopkConfig(splits, 512, "narrow", 2, 64, 256, warps)
    monkeypatch.setattr(indexer_topk, "pick_topk_config", lambda **problem: config)
    case = IndexerTopkCase(num_tokens=3, num_columns=2301, k=100, padded=True, **bounds)
    trial = case.trial(place.device)
    trial.check(trial.call(place.backend))


@pytest.mark.interpreted
@pytest.mark.parametrize("splits", [1, 3])
def test_a_long_row_has_a_larger_sample(splits, place, monkeypatch):
    if place.on_cpu_backend:
        pytest.skip("takes no sample")
    # 48 and 0 to 48 times 64 columns: registers hold the highest of four at most
    config = TopkConfig(splits, 512, "narrow", 2, 64, 64, 1)
    monkeypatch.setattr(indexer_topk, "pick_topk_config", lambda **problem: config)
    for ends in (False, True):
        case = IndexerTopkCase(num_tokens=3, num_columns=48 * 64, k=60, with_ends=ends)
        trial = case.trial(place.device)
        trial.check(trial.call(place.backend))


# what misleads a sample: its floor is then too high or too low
MISLEADING = {
    "best where the sample is not": lambda column: torch.where(column % 8 < 4, 0.0, 1.0 + column),
    "best where the sample is": lambda column: torch.where(column % 8 < 4, 1.0 + column, 0.0),
    "ascending": lambda column: column.float(),
    "descending": lambda column: -column.float(),
    "equal": lambda column: 0.0 * column,
    "not a number": lambda column: torch.nan * column,
    "nothing": lambda column: torch.full_like(column, -torch.inf, dtype=torch.float32),
    "two values": lambda column: (column % 50 == 3).float(),
    "best in one list": lambda column: torch.where(column // 64 == 2, 1.0 + column, -1.0 * column),
}


@pytest.mark.interpreted
@pytest.mark.parametrize("make", MISLEADING.values(), ids=MISLEADING.keys())
# `test_every_way` has splits, too
@pytest.mark.parametrize("splits", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_a_sample_may_mislead(make, splits, place, monkeypatch):
    if place.on_cpu_backend:
        pytest.skip("takes no sample")
    # a sample of 32 of 256 columns: every eighth group of four
    config = TopkConfig(splits, 64, "narrow", 2, 32, 32, 4)
    monkeypatch.setattr(indexer_topk, "pick_topk_config", lambda **problem: config)
    logits = make(torch.arange(256)).float().expand(2, 256).contiguous()
    want = indexer_topk_on_cpu(logits, 20)
    got = indexer_topk_there(logits, 20, place)
    assert_same_bits("columns", got.cpu(), want)


def indexer_topk_on_cpu(logits, k):
    return ops.indexer_topk(logits, k, backend="cpu")


def indexer_topk_there(logits, k, place):
    return ops.indexer_topk(logits.to(place.device), k, backend=place.backend)


@pytest.mark.parametrize(
    ("rows", "columns", "k", "way"),
    [
        (1, 4096, 2048, "whole"),
        (1, 131072, 2048, "narrow"),
        (4096, 8192, 2048, "whole"),
        (4096, 16384, 5000, "whole"),
        (4096, 16384, 2048, "narrow"),
        (4096, 131072, 2048, "narrow"),
        (4096, 131072, 8192, "narrow"),
        (4096, 131072, 8193, "reread"),
    ],
)
def test_the_way_of_a_shape(rows, columns, k, way):
    config = pick_topk_config(rows=rows, columns=columns, k=k, num_sms=132)
    assert config.method == way
    assert config.splits == 1 or rows * config.splits <= 2 * 132


@pytest.mark.parametrize("k", [1, 100, 512, 2048, 5000, 8192])
@pytest.mark.parametrize("columns", [5000, 20000, 131072, 10**6])
def test_a_buffer_has_room_for_a_step_beside_the_best(columns, k):
    config = pick_topk_config(rows=7, columns=columns, k=k, num_sms=132)
    if config.method == "narrow":
        assert k <= config.block // 2
        assert config.step <= config.block // 2
        # four standard deviations above the k-th best of a sample are few enough candidates
        sample = config.sample * min(max(columns // (12 * config.sample), 1), 32)
        expected = sample * k / columns
        candidates = (expected + 4 * expected**0.5 + 4) * 17 / 16 * columns / sample
        # more is slower but correct
        assert candidates <= config.block // 2 or k > 4096


def test_few_rows_fill_the_gpu():
    for rows in (1, 4, 30):
        config = pick_topk_config(rows=rows, columns=131072, k=2048, num_sms=132)
        assert rows * config.splits >= min(32 * rows, 120)


def test_scratch_memory_does_not_grow_with_rows():
    config = pick_topk_config(rows=10**6, columns=131072, k=2048, num_sms=132)
    assert config.splits == 1
    lists = config.num_warps * (config.block // 2 + 512)
    assert config.programs(10**6) * lists * 8 < 2**27
