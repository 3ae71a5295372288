"""The tile schedule of Hopper's prefill, made by Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

from mlakit.kernels.hopper.prefill.configs import BLOCK_Q, FP8_BLOCK_Q, L2_BYTES, MAX_INTERLEAVED
from mlakit.kernels.hopper.prefill.schedule import make_schedule, max_query_tiles
from mlakit.tools.workloads.paged import starts_of

KEY_BYTES = 512
BATCHES = {
    "one request": ((300,), (300,)),
    "no queries": ((0, 0), (5, 0)),
    "tiles of one query and of all": ((1, 128, 129, 256), (1, 128, 129, 256)),
    "equal lengths keep their order": ((128, 128, 128), (200, 200, 200)),
    "equal lengths of several tiles, others between": ((300, 9, 300) * 3, (300, 300, 300) * 3),
    "more equal lengths than fit L2": ((1500,) * 40, (1500,) * 40),
    "longest first, empty ones between": ((5, 0, 300, 0, 7), (90, 40, 700, 0, 1000)),
    "more queries than keys": ((140, 9), (90, 0)),
    "more requests than a chunk": ((3,) * 260, tuple(range(260))),
    "more tiles than a chunk": ((40_000,), (40_000,)),
}


def work_tiles(
    rows: torch.Tensor, num_tiles: int, heads: int, block_q: int = BLOCK_Q
) -> list[tuple[int, int, int]]:
    """(first query row, head, keys) of each work tile, in order, as `tiles.locate_tile` has it."""
    tiles = []
    for number in range(num_tiles):
        q_start, _, _, kv_len, first, query_tiles, group = rows[number // heads, :7].tolist()
        within = number - first * heads
        first_head = within // (query_tiles * group) * group
        within -= first_head * query_tiles
        in_group = min(heads - first_head, group)
        query_tile = query_tiles - 1 - within // in_group
        tiles.append((q_start + query_tile * block_q, first_head + within % in_group, kv_len))
    return tiles


@pytest.mark.slow
@pytest.mark.parametrize("block_q", [BLOCK_Q, FP8_BLOCK_Q])
@pytest.mark.parametrize(("heads", "dtype"), [(3, torch.int32), (128, torch.int64)], ids=str)
@pytest.mark.parametrize(("q_lens", "kv_lens"), BATCHES.values(), ids=BATCHES)
def test_every_work_tile_is_there_once_longest_requests_first(
    q_lens, kv_lens, heads, dtype, block_q, device
):
    q_starts, kv_starts = (
        torch.tensor(starts_of(lens), dtype=dtype, device=device) for lens in (q_lens, kv_lens)
    )
    rows, counters = make_schedule(
        q_starts, kv_starts, tokens=sum(q_lens), heads=heads, block_q=block_q, key_bytes=KEY_BYTES
    )
    taken, num_tiles = counters.tolist()
    assert taken == 0
    assert len(rows) == max_query_tiles(sum(q_lens), len(q_lens), block_q)
    assert num_tiles <= len(rows) * heads
    tiles = work_tiles(rows.cpu(), num_tiles, heads, block_q)
    want = {
        (start + query, head)
        for start, q_len in zip(starts_of(q_lens), q_lens, strict=False)
        for query in range(0, q_len, block_q)
        for head in range(heads)
    }
    assert len(tiles) == len(want)
    assert {tile[:2] for tile in tiles} == want
    keys = [tile[2] for tile in tiles]
    assert keys == sorted(keys, reverse=True)


@pytest.mark.parametrize(("heads", "kv_len"), [(128, 100_000), (20, 16384), (16, 4096), (7, 9)])
def test_a_group_of_heads_fits_l2_and_does_its_last_queries_first(heads, kv_len, device):
    starts = torch.tensor([0, 300], dtype=torch.int32, device=device)
    kv_starts = torch.tensor([0, kv_len], dtype=torch.int32, device=device)
    rows, counters = make_schedule(
        starts, kv_starts, tokens=300, heads=heads, block_q=BLOCK_Q, key_bytes=KEY_BYTES
    )
    group = int(rows[0, 6])
    assert 1 <= group <= heads
    assert group == 1 or group * kv_len * KEY_BYTES <= L2_BYTES
    tiles = work_tiles(rows.cpu(), int(counters[1]), heads)
    first_group = tiles[: group * 3]
    assert {head for _, head, _ in first_group} == set(range(group))
    assert [row for row, _, _ in first_group] == [256] * group + [128] * group + [0] * group


@pytest.mark.parametrize(("heads", "kv_len"), [(4, 1024), (8, 1536), (16, 2048)])
def test_equal_requests_that_fit_l2_do_their_last_queries_first(heads, kv_len, device):
    interleaved = min(L2_BYTES // KEY_BYTES // kv_len // heads, MAX_INTERLEAVED)
    sizes = (interleaved, interleaved, 1)
    starts = torch.arange(sum(sizes) + 1, dtype=torch.int32, device=device) * kv_len
    rows, counters = make_schedule(
        starts,
        starts,
        tokens=sum(sizes) * kv_len,
        heads=heads,
        block_q=BLOCK_Q,
        key_bytes=KEY_BYTES,
    )
    tiles = work_tiles(rows.cpu(), int(counters[1]), heads)
    last_first = range(kv_len - BLOCK_Q, -1, -BLOCK_Q)
    assert [row % kv_len for row, _, _ in tiles] == [
        query for size in sizes for query in last_first for _ in range(size * heads)
    ]
