"""Plans that a kernel makes on the device: every key once, equal shares, splits that pay."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlakit.cache import UNSHARDED
from mlakit.dispatch import knobs
from mlakit.kernels.decode_plan import OwnSplits, plan_decode
from mlakit.model.masks import CAUSAL
from mlakit.plan import DecodePlanTensors
from mlakit.plan import plan_decode as plan_on_host

pytestmark = pytest.mark.skipif(
    not knobs.interpreted() and not torch.cuda.is_available(), reason="needs a GPU or its stand-in"
)
HEADS, TILE = 4, 16


def random_batch(seed: int) -> tuple[list[int], list[int], int, int]:
    """(q_lens, kv_lens, workers, rows of a partial), with empty requests and idle ones."""
    draw = random.Random(seed)
    batch = draw.choice([1, 2, 5, 17, 40])
    q_lens = [draw.choice([1, 1, 1, 0, 2, 9]) for _ in range(batch)]
    kv_lens = [max(q, draw.choice([0, 1, 5, 64, 100, draw.randrange(1, 3000)])) for q in q_lens]
    return q_lens, kv_lens, draw.choice([1, 3, 7, 40]), draw.choice([4, 8, 64])


def make_plan(q_lens: list[int], kv_lens: list[int], **sizes: Any) -> DecodePlanTensors:
    device = "cpu" if knobs.interpreted() else "cuda"
    defaults = {"num_ctas": 3, "min_tiles": 2, "slot_rows": HEADS, "capacity": 4096}
    return plan_decode(
        torch.tensor([0, *accumulate(q_lens)], dtype=torch.int32, device=device),
        torch.tensor(kv_lens, dtype=torch.int32, device=device),
        shard=UNSHARDED,
        mask=CAUSAL,
        heads=HEADS,
        tile=TILE,
        **defaults | sizes,
    )


def worker_items(plan: DecodePlanTensors) -> list[list[list[int]]]:
    """(request, first tile, last tile, slot) of the items of each worker."""
    items = [
        [request, first // TILE, last // TILE, slot]
        for request, first, last, slot in plan.host_items()
    ]
    return [items[begin:end] for begin, end in pairwise(plan.cta_starts.tolist())]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_triton_plans_give_every_key_to_one_worker(seed):
    q_lens, kv_lens, num_ctas, slot_rows = random_batch(seed)
    plan = make_plan(
        q_lens,
        kv_lens,
        num_ctas=num_ctas,
        slot_rows=slot_rows,
        capacity=3000 if seed % 2 else 2**40,  # the arithmetic is wide where it must be
    )
    starts = plan.cta_starts.tolist()
    assert starts[0] == 0
    assert starts == sorted(starts)
    assert starts[-1] <= len(kv_lens) + num_ctas
    items = plan.host_items()
    slots = plan.partial_starts.tolist()
    assert slots[-1] <= 2 * num_ctas
    for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        own = [item[1:] for item in items if item[0] == request]
        if q_len == 0:
            assert own == []
            assert slots[request] == slots[request + 1]
            continue
        assert own[0][0] == 0
        assert kv_len <= own[-1][1] < kv_len + 2 * TILE
        assert all(before[1] == after[0] for before, after in pairwise(own))
        assert all(first < last for first, last, _ in own)
        expected = list(range(slots[request], slots[request + 1])) or [-1]
        assert [slot for _, _, slot in own] == expected
        if q_len * HEADS > slot_rows:
            assert len(own) == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_triton_plans_have_the_lengths_of_a_request_in_its_items(seed):
    q_lens, kv_lens, num_ctas, slot_rows = random_batch(seed)
    plan = make_plan(q_lens, kv_lens, num_ctas=num_ctas, slot_rows=slot_rows)
    lengths = list(zip(accumulate(q_lens, initial=0), q_lens, kv_lens, strict=False))
    requests = [request for request, *_ in plan.host_items()]
    assert set(requests) == {request for request, q_len in enumerate(q_lens) if q_len > 0}
    beside = plan.items[: len(requests), 4:7].tolist()
    assert beside == [list(lengths[request]) for request in requests]


@st.composite
def batches(draw: st.DrawFn) -> list[int]:
    """Lengths that are equal, nearly equal and unequal, so that plans are even and balanced."""
    longest, spread = draw(st.integers(1, 3000)), draw(st.sampled_from([0, 1, 16, 100, 2999]))
    lengths = st.integers(max(longest - spread, 1), longest)
    return draw(st.lists(lengths, min_size=1, max_size=draw(st.sampled_from([1, 3, 40, 140]))))


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(kv_lens=batches(), num_ctas=st.sampled_from([1, 2, 3, 7, 40, 132, 264]))
def test_triton_plans_are_those_of_the_host(kv_lens, num_ctas):
    """The host and the device version of the split heuristic agree."""
    batch = len(kv_lens)
    made = make_plan([1] * batch, kv_lens, num_ctas=num_ctas, min_tiles=1)
    expected = plan_on_host(kv_lens, num_ctas=num_ctas, tile=TILE)
    assert made.cta_starts.tolist() == list(expected.cta_starts)
    assert made.partial_starts.tolist() == list(expected.partial_starts)
    assert made.host_items() == [
        (item.request, item.first_key, -(-item.last_key // TILE) * TILE, item.partial_slot)
        for item in expected.items
    ]


@pytest.mark.slow
def test_triton_plans_make_no_split_smaller_than_is_worth_a_worker():
    plan = make_plan([1] * 4, [10 * TILE] * 4, num_ctas=32, min_tiles=3)
    cuts = [(0, 3), (3, 6), (6, 10)]
    assert [[item[1:3] for item in own] for own in worker_items(plan)] == [
        [list(cut)] for _ in range(4) for cut in cuts
    ] + [[]] * 20


@pytest.mark.slow
def test_triton_plans_are_even_but_for_a_request_without_room():
    plan = make_plan([1, 3, 1, 0, 1], [12 * TILE] * 5, num_ctas=8)
    assert worker_items(plan) == [
        [[0, 0, 6, 0]],
        [[0, 6, 12, 1]],
        [[1, 0, 12, -1]],
        [[2, 0, 6, 2]],
        [[2, 6, 12, 3]],
        [[4, 0, 6, 4]],
        [[4, 6, 12, 5]],
        [],
    ]


def test_triton_plans_without_queries_have_no_items():
    plan = make_plan([0, 0], [5, 100])
    assert plan.cta_starts.tolist() == [0, 0, 0, 0]
    assert plan.partial_starts.tolist() == [0, 0, 0]


def cut(tiles: int, width: int) -> list[range]:
    return [range(first, min(first + width, tiles)) for first in range(0, tiles, width)]


@pytest.mark.slow
@pytest.mark.parametrize("num_ctas", [1, 3, 40])
@pytest.mark.parametrize(
    ("own", "splits_of"),
    [
        (OwnSplits(4), lambda tiles: cut(tiles, 4)),
        (OwnSplits(0, 3), lambda tiles: cut(tiles, -(-tiles // 3))),
    ],
    ids=["tiles", "splits"],
)
def test_triton_plans_with_own_splits_depend_on_one_request_at_a_time(own, splits_of, num_ctas):
    q_lens, kv_lens = [1, 1, 0, 1, 1, 1], [1000, 0, 500, 64, 65, 1]
    plan = make_plan(q_lens, kv_lens, num_ctas=num_ctas, capacity=1024, own=own)
    items, slots = plan.host_items(), plan.partial_starts.tolist()
    assert plan.max_partials >= slots[-1]
    for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        made = [item[1:] for item in items if item[0] == request]
        splits = splits_of(max(-(-kv_len // TILE), 1)) if q_len else []
        assert [range(first // TILE, last // TILE) for first, last, _ in made] == splits
        is_split = len(splits) > 1
        assert [slot for _, _, slot in made] == (
            list(range(slots[request], slots[request + 1])) if is_split else [-1] * len(splits)
        )
    starts = plan.cta_starts.tolist()
    assert starts == sorted(starts)
    assert (starts[0], starts[-1]) == (0, len(items))
    assert max(last - first for first, last in pairwise(starts)) == -(-len(items) // num_ctas)


@pytest.mark.slow
def test_triton_plans_with_own_splits_have_room_for_every_table():
    plan = make_plan([1] * 5, [4096] * 5, capacity=4096, own=OwnSplits(4))
    assert int(plan.partial_starts[-1]) == 5 * 4096 // (4 * TILE) <= plan.max_partials
    assert make_plan([1], [16], capacity=16, own=OwnSplits(4)).max_partials == 0
