"""Schedules are functions of lengths: every key once, loads even, nothing read from elsewhere."""

from __future__ import annotations

from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlakit.plan import (
    DecodePlan,
    PrefillPlan,
    WorkItem,
    plan_decode,
    plan_prefill,
)
from mlakit.plan.split_heuristic import equal_key_ranges

properties = settings(max_examples=150, deadline=None)

lengths = st.lists(st.integers(0, 700), max_size=12)
ctas = st.integers(1, 40)
tiles = st.integers(1, 80)


def loads(plan: DecodePlan) -> list[int]:
    """Tiles of each CTA."""
    return [
        sum(
            -(-(item.last_key - item.first_key) // plan.tile)
            for item in plan.items[plan.cta_starts[c] : plan.cta_starts[c + 1]]
        )
        for c in range(plan.num_ctas)
    ]


def ranges_of(plan: DecodePlan, request: int) -> list[tuple[int, int]]:
    return [(item.first_key, item.last_key) for item in plan.items if item.request == request]


def total_tiles(plan: DecodePlan) -> int:
    return sum(-(-kv_len // plan.tile) for kv_len in plan.kv_lens)


def assert_well_formed(plan: DecodePlan) -> None:
    for request, kv_len in enumerate(plan.kv_lens):
        keys = [k for first, last in ranges_of(plan, request) for k in range(first, last)]
        assert keys == list(range(kv_len))
    assert all(item.first_key < item.last_key for item in plan.items)
    assert all(item.first_key % plan.tile == 0 for item in plan.items)
    assert list(plan.items) == sorted(plan.items)
    assert len(plan.cta_starts) == plan.num_ctas + 1
    assert plan.cta_starts[0] == 0
    assert plan.cta_starts[-1] == len(plan.items)
    for cta in range(plan.num_ctas):
        own = plan.items[plan.cta_starts[cta] : plan.cta_starts[cta + 1]]
        assert all(item.cta == cta for item in own)
    empty = tuple(b for b, kv_len in enumerate(plan.kv_lens) if kv_len == 0)
    assert plan.empty_requests == empty


def assert_slots_belong_to_split_requests(plan: DecodePlan) -> None:
    assert len(plan.partial_starts) == len(plan.kv_lens) + 1
    assert plan.partial_starts[0] == 0
    for request in range(len(plan.kv_lens)):
        slots = [item.partial_slot for item in plan.items if item.request == request]
        first, last = plan.partial_starts[request : request + 2]
        if len(slots) > 1:
            assert slots == list(range(first, last))
        else:
            assert slots in ([], [-1])
            assert first == last
    assert plan.num_partials == plan.partial_starts[-1]


@pytest.mark.slow
@properties
@given(lengths, ctas, tiles)
def test_decode_plan_covers_every_key_once(kv_lens, num_ctas, tile):
    plan = plan_decode(kv_lens, num_ctas=num_ctas, tile=tile)
    assert_well_formed(plan)
    assert_slots_belong_to_split_requests(plan)


def even_load(plan: DecodePlan) -> int:
    """Largest load of a CTA if every request had one split for each of its CTAs."""
    tiles = [ceil(kv_len / plan.tile) for kv_len in plan.kv_lens if kv_len]
    splits = max(plan.num_ctas // len(tiles), 1)
    return ceil(max(tiles) / splits) * ceil(len(tiles) / plan.num_ctas)


@pytest.mark.slow
@properties
@given(lengths, ctas, tiles)
def test_decode_plan_loads_are_balanced_or_even_within_a_tenth(kv_lens, num_ctas, tile):
    plan = plan_decode(kv_lens, num_ctas=num_ctas, tile=tile)
    total = total_tiles(plan)
    share = ceil(total / num_ctas)
    assert sum(loads(plan)) == total
    if total and 10 * even_load(plan) <= 11 * share:
        assert max(loads(plan)) <= even_load(plan)
        assert_no_cta_shares_a_split_request(plan)
    else:
        assert max(loads(plan)) == share
        assert min(loads(plan)) == total // num_ctas


def assert_no_cta_shares_a_split_request(plan: DecodePlan) -> None:
    for cta in range(plan.num_ctas):
        own = plan.items[plan.cta_starts[cta] : plan.cta_starts[cta + 1]]
        assert len(own) <= 1 or all(item.partial_slot == -1 for item in own)


@pytest.mark.slow
@properties
@given(st.integers(1, 700), st.integers(1, 40), ctas, tiles)
def test_decode_plan_never_exceeds_the_share_of_equal_requests(kv_len, batch, num_ctas, tile):
    plan = plan_decode([kv_len] * batch, num_ctas=num_ctas, tile=tile)
    assert 10 * max(loads(plan)) <= 11 * ceil(total_tiles(plan) / num_ctas)
    if num_ctas % batch == 0 or batch % num_ctas == 0:
        cuts = ranges_of(plan, 0)
        assert all(ranges_of(plan, request) == cuts for request in range(batch))
        sizes = [ceil((last - first) / tile) for first, last in cuts]
        assert max(sizes) - min(sizes) <= 1


def test_decode_plan_leaves_equal_requests_whole():
    plan = plan_decode([1280] * 128, num_ctas=132)
    assert [(item.cta, item.request) for item in plan.items] == [(b, b) for b in range(128)]
    assert plan.num_partials == 0


def test_decode_plan_cuts_equal_requests_alike():
    plan = plan_decode([4096] * 32, num_ctas=264)
    assert [item[:4] for item in plan.items] == [
        (cta, cta // 8, cta % 8 * 512, cta % 8 * 512 + 512) for cta in range(256)
    ]


@pytest.mark.slow
@properties
@given(lengths, ctas, tiles)
def test_decode_plan_scratch_is_bounded_by_two_slots_a_cta(kv_lens, num_ctas, tile):
    plan = plan_decode(kv_lens, num_ctas=num_ctas, tile=tile)
    for cta in range(num_ctas):
        own = plan.items[plan.cta_starts[cta] : plan.cta_starts[cta + 1]]
        assert sum(item.partial_slot >= 0 for item in own) <= 2
    assert len(plan.items) <= num_ctas + max(len(kv_lens) - 1, 0)


@pytest.mark.slow
@properties
@given(lengths, ctas, st.integers(1, 32), st.integers(1, 6))
def test_fixed_split_depends_on_the_own_length_only(kv_lens, num_ctas, tile, split_tiles):
    split = tile * split_tiles
    plan = plan_decode(kv_lens, num_ctas=num_ctas, tile=tile, fixed_split=split)
    assert_well_formed(plan)
    assert_slots_belong_to_split_requests(plan)
    for request, kv_len in enumerate(kv_lens):
        own = [(k, min(k + split, kv_len)) for k in range(0, kv_len, split)]
        alone = plan_decode([kv_len], num_ctas=1, tile=tile, fixed_split=split)
        assert ranges_of(plan, request) == ranges_of(alone, 0) == own


@pytest.mark.slow
@properties
@given(lengths, ctas, st.integers(1, 32), st.integers(1, 6))
def test_fixed_split_loads_are_within_one_split_of_the_even_share(
    kv_lens, num_ctas, tile, split_tiles
):
    plan = plan_decode(kv_lens, num_ctas=num_ctas, tile=tile, fixed_split=tile * split_tiles)
    even = total_tiles(plan) / num_ctas
    assert all(abs(load - even) < split_tiles for load in loads(plan))


@pytest.mark.slow
@properties
@given(lengths, ctas)
def test_decode_plan_is_deterministic(kv_lens, num_ctas):
    plan = plan_decode(kv_lens, num_ctas=num_ctas)
    again = plan_decode(tuple(kv_lens), num_ctas=num_ctas)
    assert plan == again
    assert hash(plan) == hash(again)


def test_decode_plan_example():
    plan = plan_decode([200, 0, 64, 10], num_ctas=3, tile=64)
    assert plan.items == (
        WorkItem(cta=0, request=0, first_key=0, last_key=128, partial_slot=0),
        WorkItem(cta=1, request=0, first_key=128, last_key=200, partial_slot=1),
        WorkItem(cta=2, request=2, first_key=0, last_key=64, partial_slot=-1),
        WorkItem(cta=2, request=3, first_key=0, last_key=10, partial_slot=-1),
    )
    assert plan.cta_starts == (0, 1, 2, 4)
    assert plan.partial_starts == (0, 2, 2, 2, 2)
    assert plan.empty_requests == (1,)
    assert plan.num_partials == 2


def test_fixed_split_example():
    plan = plan_decode([200, 0, 64], num_ctas=2, tile=64, fixed_split=128)
    assert plan.items == (
        WorkItem(cta=0, request=0, first_key=0, last_key=128, partial_slot=0),
        WorkItem(cta=0, request=0, first_key=128, last_key=200, partial_slot=1),
        WorkItem(cta=1, request=2, first_key=0, last_key=64, partial_slot=-1),
    )
    assert plan.cta_starts == (0, 2, 3)
    assert plan.partial_starts == (0, 2, 2, 2)


def test_decode_plan_is_copied_to_a_device_once():
    plan = plan_decode([5, 0, 9], num_ctas=2, tile=2)
    assert plan.tensors() is plan.tensors("cpu") is plan.tensors(torch.device("cpu"))
    exact = torch.device("cpu", 0)
    assert plan.tensors(exact) is plan.tensors(exact)
    assert plan == plan_decode([5, 0, 9], num_ctas=2, tile=2)


def test_decode_plan_tensors_hold_the_plan():
    plan = plan_decode([200, 0, 64, 10], num_ctas=3)
    tensors = plan.tensors("cpu")
    assert all(tensor.dtype == torch.int32 for tensor in tensors[:4])
    assert (tensors.tile, tensors.max_partials) == (64, plan.num_partials)
    assert tensors.host_items() == [item[1:] for item in plan.items]
    assert tensors.items.tolist() == [list(item[1:]) for item in plan.items]
    assert tensors.cta_starts.tolist() == list(plan.cta_starts)
    assert tensors.partial_starts.tolist() == list(plan.partial_starts)
    assert tensors.empty_requests.tolist() == list(plan.empty_requests)


@pytest.mark.parametrize("kv_lens", [[], [0], [0, 0, 0]], ids=str)
def test_decode_plan_without_keys_has_no_items(kv_lens):
    plan = plan_decode(kv_lens, num_ctas=4)
    assert plan.items == ()
    assert plan.cta_starts == (0, 0, 0, 0, 0)
    assert plan.empty_requests == tuple(range(len(kv_lens)))
    assert plan.tensors().items.shape == (0, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_ctas": 0}, "num_ctas must be at least 1, got 0"),
        ({"num_ctas": 1, "tile": 0}, "tile must be at least 1, got 0"),
        (
            {"num_ctas": 1, "fixed_split": 96},
            "fixed_split must be a multiple of tile, 64, got 96",
        ),
        ({"num_ctas": 1, "fixed_split": 0}, "fixed_split must be at least 1, got 0"),
    ],
    ids=str,
)
def test_plan_decode_refuses_sizes(arguments, message):
    with pytest.raises(ValueError, match=f"^plan_decode: {message}$"):
        plan_decode([5], **arguments)


def test_plan_decode_refuses_lengths_that_are_none():
    with pytest.raises(ValueError, match=r"^plan_decode: kv_lens\[1\] must be at least 0, got -2$"):
        plan_decode([3, -2], num_ctas=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_lens": [3.5]}, r"kv_lens\[0\] must be an integer, got float"),
        ({"kv_lens": None}, "kv_lens must be a sequence of integers, got NoneType"),
        ({"num_ctas": "4"}, "num_ctas must be an integer, got str"),
        ({"num_ctas": 4.5}, "num_ctas must be an integer, got float"),
        ({"tile": 64.0}, "tile must be an integer, got float"),
        ({"fixed_split": 64.0}, "fixed_split must be an integer, got float"),
    ],
    ids=str,
)
def test_plan_decode_refuses_what_is_no_integer(arguments, message):
    with pytest.raises(TypeError, match=f"^plan_decode: {message}$"):
        plan_decode(**{"kv_lens": [5], "num_ctas": 4, **arguments})


@pytest.mark.slow
@properties
@given(st.integers(0, 3000), st.integers(1, 80), st.integers(1, 200))
def test_equal_splits_cover_every_key_once_in_whole_pages(kv_len, num_splits, granularity):
    ranges = equal_key_ranges(kv_len, num_splits, granularity)
    assert len(ranges) == num_splits
    assert [k for first, last in ranges for k in range(first, last)] == list(range(kv_len))
    pages = ceil(kv_len / granularity)
    per = ceil(pages / num_splits) * granularity
    for first, last in ranges:
        if first == last:
            assert (first, last) == (kv_len, kv_len)
        else:
            assert first % granularity == 0
            assert last - first == per or last == kv_len


def test_equal_split_examples():
    assert equal_key_ranges(300, 2, 128) == [(0, 256), (256, 300)]
    # 3 blocks in 5 splits: one block each, then empty splits
    assert equal_key_ranges(300, 5, 128) == [
        (0, 128),
        (128, 256),
        (256, 300),
        (300, 300),
        (300, 300),
    ]
    # 5 blocks in 4 splits: ceil gives two blocks each, and the last split none
    assert equal_key_ranges(5, 4, 1) == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert equal_key_ranges(0, 2, 64) == [(0, 0), (0, 0)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 1, 1), "kv_len must not be negative, got -1"),
        ((1, 0, 1), "num_splits must be at least 1, got 0"),
        ((1, 1, 0), "granularity must be at least 1, got 0"),
    ],
    ids=str,
)
def test_equal_key_ranges_refuses_sizes(arguments, message):
    with pytest.raises(ValueError, match=f"^equal_key_ranges: {message}$"):
        equal_key_ranges(*arguments)


def walk_the_line(
    num_rows: list[int], buffer_size: int, max_chunks: int
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """The prefill plan by moving one row at a time into the chunk that has room."""
    batch = len(num_rows)
    held = [[0] * batch for _ in range(max_chunks)]  # rows of request b in chunk c
    chunk, room = 0, buffer_size
    for request, count in enumerate(num_rows):
        for _ in range(count):
            if room == 0:
                chunk, room = chunk + 1, buffer_size
            held[chunk][request] += 1
            room -= 1
    row_offsets = [[sum(held[c][:b]) for b in range(batch + 1)] for c in range(max_chunks)]
    consumed = [
        [sum(held[earlier][b] for earlier in range(c)) for b in range(batch)] + [0]
        for c in range(max_chunks)
    ]
    lengths = [sum(held[c]) if c <= chunk else -1 for c in range(max_chunks)]
    return row_offsets, consumed, lengths


def starts_of(q_lens: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(q_lens, dtype=torch.int64).cumsum(0).tolist()]).to(dtype)


def as_lists(plan: PrefillPlan) -> tuple[list[list[int]], list[list[int]], list[int]]:
    for tensor in (plan.buffer_row_offsets, plan.cache_offsets, plan.buffer_lengths):
        assert tensor.dtype == torch.int32
    assert plan.buffer_lengths.device.type == "cpu"
    return (
        plan.buffer_row_offsets.tolist(),
        plan.cache_offsets.tolist(),
        plan.buffer_lengths.tolist(),
    )


@pytest.mark.slow
@properties
@given(
    st.lists(st.integers(0, 42), min_size=1, max_size=8),
    st.integers(1, 60),
    st.integers(1, 9),
    st.sampled_from([torch.int32, torch.int64, torch.uint32]),
    st.integers(0, 3),
)
def test_prefill_plan_is_the_walk_along_the_line(kv_lens, buffer_size, page_size, dtype, spare):
    rows = [-(-kv_len // page_size) * page_size for kv_len in kv_lens]
    max_chunks = max(-(-sum(rows) // buffer_size), 1) + spare
    plan = plan_prefill(
        torch.tensor(kv_lens).to(dtype),
        buffer_size,
        page_size=page_size,
        max_chunks=max_chunks,
    )
    assert as_lists(plan) == walk_the_line(rows, buffer_size, max_chunks)


def test_prefill_plan_example_of_the_documentation():
    plan = plan_prefill(torch.tensor([160, 200], dtype=torch.int32), 256, page_size=128)
    row_offsets, cache_offsets, buffer_lengths = as_lists(plan)
    assert row_offsets == [[0, 256, 256], [0, 0, 256]] + [[0, 0, 0]] * 14
    assert cache_offsets == [[0, 0, 0], [256, 0, 0]] + [[256, 256, 0]] * 14
    assert buffer_lengths == [256, 256] + [-1] * 14


def test_prefill_plan_of_no_requests_is_zero():
    none = torch.zeros(0, dtype=torch.int32)
    plan = plan_prefill(none, 64, page_size=16, max_chunks=3)
    assert as_lists(plan) == ([[0]] * 3, [[0]] * 3, [0, 0, 0])


def test_prefill_plan_of_empty_requests_has_one_empty_chunk():
    plan = plan_prefill(torch.tensor([0, 0]), 64, page_size=16, max_chunks=3)
    assert as_lists(plan) == ([[0, 0, 0]] * 3, [[0, 0, 0]] * 3, [0, -1, -1])


def test_prefill_plan_sums_past_int32():
    kv_lens = torch.full((6,), 2**30, dtype=torch.int32)
    plan = plan_prefill(kv_lens, 2**31 - 1, page_size=64, max_chunks=4)
    row_offsets, cache_offsets, buffer_lengths = as_lists(plan)
    size, row = 2**31 - 1, 2**30
    assert buffer_lengths == [size, size, size, 3]
    for c in range(4):
        assert row_offsets[c] == [min(max(b * row - c * size, 0), size) for b in range(7)]
        assert cache_offsets[c] == [min(max(c * size - b * row, 0), row) for b in range(6)] + [0]


def test_prefill_plan_needs_its_chunks():
    arguments = (torch.tensor([160, 200]), 100)
    plan_prefill(*arguments, page_size=128, max_chunks=6)
    message = (
        r"^mla_prefill_plan: max_chunks must be at least 6 "
        r"for 512 rows in whole pages and buffer_size 100, got 5$"
    )
    with pytest.raises(ValueError, match=message):
        plan_prefill(*arguments, page_size=128, max_chunks=5, op="mla_prefill_plan")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 64, 1), "buffer_size must be at least 1, got 0"),
        ((2**31, 64, 1), "buffer_size must not exceed 2147483647, got 2147483648"),
        ((64, 0, 1), "page_size must be at least 1, got 0"),
        ((64, 64, 0), "max_chunks must be at least 1, got 0"),
    ],
    ids=str,
)
def test_plan_prefill_refuses_sizes(sizes, message):
    buffer_size, page_size, max_chunks = sizes
    with pytest.raises(ValueError, match=f"^plan_prefill: {message}$"):
        plan_prefill(
            torch.tensor([1]),
            buffer_size,
            page_size=page_size,
            max_chunks=max_chunks,
        )


@pytest.mark.parametrize(
    ("kv_lens", "error", "message"),
    [
        ([1, 2], TypeError, "kv_lens must be a tensor, got list"),
        (torch.tensor([1.5]), TypeError, "kv_lens must be int32 or int64 or uint32, got float32"),
        (
            torch.ones(2, 2, dtype=torch.int32),
            ValueError,
            r"kv_lens must have axes \(batch\), got shape \(2, 2\)",
        ),
        (torch.tensor([3, -2]), ValueError, r"kv_lens\[1\] must not be negative, got -2"),
    ],
    ids=str,
)
def test_plan_prefill_refuses_lengths(kv_lens, error, message):
    with pytest.raises(error, match=f"^plan_prefill: {message}$"):
        plan_prefill(kv_lens, 64, page_size=16)


def test_plan_prefill_refuses_what_is_no_integer():
    with pytest.raises(TypeError, match=r"^plan_prefill: page_size must be an integer, got float$"):
        plan_prefill(torch.tensor([1]), 64, page_size=16.0)
