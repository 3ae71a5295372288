"""What only a GPU can show: graphs replayed with new lengths, addresses beyond 2**31, no sync."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit import ops
from mlakit.cache import PagedLatentCache
from mlakit.model.geometry import RowShape
from mlakit.model.masks import NULL
from mlakit.tools.testing import assert_same_bits, poison
from tests.ops.cases import CALLS, Call

pytestmark = pytest.mark.gpu

ROW = RowShape(512, 64)
KEYS = RowShape(128, 0)
PAGE_SIZE = 64
BEYOND = 2**31  # elements
# a plan made on the host is for the lengths it was made from
CAPTURED = [name for name in CALLS if not name.endswith("plan")]


def results_of(call: Call, **others: Any) -> tuple[Tensor, ...]:
    return tuple(result.clone() for result in call.run(**others))


def written_by(call: Call) -> list[Tensor]:
    """What a call leaves in its cache."""
    cache = call.arguments.get("cache")
    return [] if cache is None else [cache.payload.clone()]


def assert_all_same(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for i, (mine, other) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(f"result {i}", mine.cpu(), other.cpu())


@pytest.mark.parametrize("name", CALLS)
def test_the_bits_of_two_runs_are_equal(name):
    runs = []
    for _ in range(2):
        call = CALLS[name]().on("cuda")
        runs.append([*results_of(call), *written_by(call)])
    assert_all_same(*runs)


@pytest.mark.parametrize("name", CALLS)
def test_no_call_waits_for_the_gpu(name):
    call = CALLS[name]().on("cuda")
    call.run()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(call: Call) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    call.run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call.run()
    return graph, results


@pytest.mark.parametrize("name", CAPTURED)
def test_a_graph_replays_what_it_captured(name):
    want = results_of(CALLS[name]().on("cuda"))
    graph, results = captured(CALLS[name]().on("cuda"))
    for result in results:
        poison(result)
    graph.replay()
    assert_all_same(results, want)


LENGTHS = ("kv_lens", "q_starts", "kv_starts", "topk_lens", "row_starts", "row_ends")


@dataclass(frozen=True)
class Replay:
    """A call captured with some lengths and replayed with others."""

    name: str
    changed: dict[str, Sequence[int]]

    def __str__(self) -> str:
        return f"{self.name}-{'-'.join(self.changed)}"


REPLAYS = [
    Replay("decode", {"kv_lens": (3, 6, 4, 0, 2), "q_starts": (0, 1, 1, 5, 5, 7)}),
    Replay("decode-block128-split", {"kv_lens": (5, 1, 3, 1, 1), "q_starts": (0, 2, 3, 6, 7, 7)}),
    Replay("decode-apart-e4m3", {"kv_lens": (2, 0, 9, 1, 4)}),
    Replay("append", {"kv_lens": (5, 6, 7, 0, 1), "q_starts": (0, 3, 4, 7, 7, 7)}),
    Replay(
        "append-slots", {"slots": (-1, 3, 8, 40, 1, -1, 2), "positions": (-9, 3, 8, 0, 1, 4, 2)}
    ),
    Replay("prefill", {"q_starts": (0, 0, 4, 4, 5, 7), "kv_starts": (0, 3, 9, 10, 14, 20)}),
    Replay("sparse-extra", {"topk_lens": (0, 7, 3, 1, 7, 7, 2)}),
    Replay("logits", {"kv_lens": (5, 2, 7, 1, 4), "q_starts": (0, 1, 3, 6, 7, 7)}),
    Replay("select", {"kv_lens": (5, 2, 7, 1, 4), "q_starts": (0, 1, 3, 6, 7, 7)}),
    Replay("topk-ranges", {"row_ends": (1, 5, 11, 2, 11, 9, 6)}),
]


@pytest.mark.parametrize("replay", REPLAYS, ids=str)
def test_a_graph_takes_new_lengths(replay):
    others = {
        name: torch.tensor(values, dtype=torch.int32, device="cuda")
        for name, values in replay.changed.items()
    }
    fresh = CALLS[replay.name]().on("cuda")
    columns = {"max_kv_len": 9} if fresh.function is ops.indexer_logits else {}
    eager = fresh.but(**others, **columns)
    want = [*results_of(eager), *written_by(eager)]

    call = CALLS[replay.name]().on("cuda").but(**columns)
    cache = call.arguments.get("cache")
    before = None if cache is None else cache.payload.clone()
    graph, results = captured(call)
    if before is not None:
        cache.payload.copy_(before)  # what capturing appended
    for name, values in others.items():
        call.arguments[name].copy_(values)
    graph.replay()
    assert_all_same([*results, *written_by(call)], want)


# --- memory beyond what 32 bits address ---------------------------------------------------------


def far_and_near(
    row: RowShape, format: str, num_rows: int
) -> tuple[PagedLatentCache, PagedLatentCache, Tensor]:
    """(a huge pool, a small one, slots): the same rows at the end of the one and in the other."""
    width = row.width
    pages = BEYOND // (width * PAGE_SIZE) + 2 * -(-num_rows // PAGE_SIZE)
    far = PagedLatentCache.allocate(
        row, format, num_pages=pages, page_size=PAGE_SIZE, device="cuda"
    )
    near_pages = -(-num_rows // PAGE_SIZE)
    near = PagedLatentCache.allocate(
        row, format, num_pages=near_pages, page_size=PAGE_SIZE, device="cuda"
    )
    first = (pages - near_pages) * PAGE_SIZE
    assert first * width > BEYOND
    slots = torch.arange(num_rows, device="cuda")
    rows = torch.randn(num_rows, width, device="cuda")
    near.layer(0).write(slots, rows)
    far.layer(0).write(slots + first, rows)
    return far, near, slots + first


def page_tables(far_slots: Tensor) -> tuple[Tensor, Tensor]:
    pages = far_slots[::PAGE_SIZE] // PAGE_SIZE
    near = torch.arange(len(pages), device="cuda")
    return pages.int()[None], near.int()[None]


@pytest.mark.parametrize("format", ["bf16", "fp8_block128"])
def test_decode_beyond_2_to_31(format):
    far, near, slots = far_and_near(ROW, format, 300)
    q = torch.randn(1, 16, ROW.width, device="cuda").bfloat16()
    kv_lens = torch.tensor([300], dtype=torch.int32, device="cuda")
    got, want = (
        ops.mla_decode(q, cache, table, kv_lens, softmax_scale=0.1)
        for cache, table in zip((far, near), page_tables(slots), strict=True)
    )
    assert_all_same(got, want)


@pytest.mark.parametrize("format", ["bf16", "fp8_block128"])
def test_sparse_beyond_2_to_31(format):
    far, near, slots = far_and_near(ROW, format, 300)
    q = torch.randn(3, 16, ROW.width, device="cuda").bfloat16()
    chosen = torch.randint(300, (3, 128), device="cuda")
    near_rows, far_rows = chosen.int(), slots[chosen].int()
    got, want = (
        ops.sparse_mla(q, cache, rows, softmax_scale=0.1)
        for cache, rows in ((far, far_rows), (near, near_rows))
    )
    assert_all_same(got, want)


def test_append_beyond_2_to_31():
    far, near, slots = far_and_near(ROW, "bf16", 128)
    inputs = [torch.randn(shape, device="cuda").bfloat16() for shape in ((70, 4, 64), (70, 576))]
    tables = (torch.randn(100, 64, device="cuda"), torch.ones(512, device="cuda"))
    lens = torch.tensor([75], dtype=torch.int32, device="cuda")
    starts = torch.tensor([0, 70], dtype=torch.int32, device="cuda")
    for cache, table in zip((far, near), page_tables(slots), strict=True):
        ops.norm_rope_quant_append(*inputs, *tables, cache, table, lens, starts, epsilon=1e-6)
    own = slots // PAGE_SIZE, slots % PAGE_SIZE
    assert_same_bits("rows", far.payload[0][own], near.payload[0].flatten(0, 1))
    far.payload.zero_()
    positions = torch.arange(5, 75, device="cuda")
    given = {"slots": slots[5:75], "positions": positions, "epsilon": 1e-6}
    ops.norm_rope_quant_append(*inputs, *tables, far, **given)
    written = slice(5, 75)
    assert_same_bits(
        "rows of slots", far.payload[0][own][written], near.payload[0].flatten(0, 1)[written]
    )


def test_indexer_beyond_2_to_31():
    far, near, slots = far_and_near(KEYS, "fp8_token", 300)
    q = torch.randn(1, 8, 128, device="cuda").bfloat16()
    weights = torch.randn(1, 8, device="cuda")
    kv_lens = torch.tensor([300], dtype=torch.int32, device="cuda")
    got, want = (
        ops.indexer_logits(q, weights, cache, table, kv_lens, max_kv_len=300)
        for cache, table in zip((far, near), page_tables(slots), strict=True)
    )
    assert_same_bits("logits", got, want)


def last_rows_match(run: Callable[[slice], Tensor], rows: int, last: int) -> None:
    """The last rows of a huge problem, and the same rows as a problem of their own."""
    whole = run(slice(0, rows))
    assert whole.numel() > BEYOND
    assert_same_bits("last rows", whole[-last:], run(slice(rows - last, rows)))


def test_prefill_beyond_2_to_31():
    requests, each, heads = 1100, 64, 256
    tokens = requests * each
    q, k_nope, v = (
        torch.randn(tokens, heads, width, device="cuda", dtype=torch.bfloat16)
        for width in (192, 128, 128)
    )
    k_rope = torch.randn(tokens, 64, device="cuda", dtype=torch.bfloat16)

    def run(rows: slice) -> Tensor:
        starts = torch.arange(0, rows.stop - rows.start + 1, each, dtype=torch.int32)
        parts = (tensor[rows] for tensor in (q, k_nope, k_rope, v))
        return ops.mla_prefill(*parts, starts.cuda(), starts.cuda(), softmax_scale=0.1, mask=NULL)[
            0
        ]

    last_rows_match(run, tokens, each)


def test_quantize_beyond_2_to_31():
    x = torch.randn(2**19 + 128, 4096, device="cuda", dtype=torch.bfloat16)
    last_rows_match(lambda rows: ops.quantize_fp8(x[rows], 128)[0].view(torch.uint8), len(x), 128)


def test_merge_beyond_2_to_31():
    parts = [torch.randn(2**16 + 64, 64, 512, device="cuda", dtype=torch.bfloat16) for _ in "ab"]
    lses = [torch.randn(2**16 + 64, 64, device="cuda") for _ in "ab"]

    def run(rows: slice) -> Tensor:
        return ops.merge_states([part[rows] for part in parts], [lse[rows] for lse in lses])[0]

    last_rows_match(run, len(lses[0]), 64)


def test_topk_beyond_2_to_31():
    logits = torch.randn(2**15 + 8, 2**16, device="cuda")
    assert logits.numel() > BEYOND
    got = ops.indexer_topk(logits, 64)[-8:]
    assert_same_bits("last rows", got, ops.indexer_topk(logits[-8:], 64))
