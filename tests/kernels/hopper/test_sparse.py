"""Hopper's sparse kernel of 16-bit rows, compared with the oracle on poisoned caches.

Half of the rows of every cache are NaN. Lists repeat rows, have invalid ids and, past their length,
ids of poisoned rows.
"""

from __future__ import annotations

import pytest
import torch

from mlakit import PagedLatentCache, reference, sparse_mla
from mlakit.model.geometry import RowShape
from mlakit.ops import ExtraRows
from mlakit.tools.testing import assert_matches, assert_same_bits
from mlakit.tools.workloads.case import assert_logits_match
from tests.kernels.hopper.sparse_cases import EVERY_ROW, KERNEL, ROWS, run
from tests.pairs import pairwise

pytestmark = pytest.mark.gpu


@EVERY_ROW
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_rows(row, dtype):
    run(**ROWS[row], dtype=dtype, format=dtype, num_tokens=7)


@pytest.mark.parametrize("heads", [1, 7, 8, 16, 20, 32, 33, 63, 64, 65, 96, 128, 200])
def test_heads(heads):
    run(heads=heads, num_tokens=3, topk=150, sink="finite")


@pytest.mark.parametrize("topk", [1, 63, 64, 65, 127, 128, 129, 192, 257, 1000, 2048])
@pytest.mark.parametrize("with_lens", [True, False])
def test_list_lengths(topk, with_lens):
    run(topk=topk, with_lens=with_lens, num_tokens=4)


def test_long_lists():
    run(topk=16384, num_tokens=2, num_pages=40, heads=16)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7, 32])
@pytest.mark.parametrize("with_extra", [False, True])
def test_splits(num_splits, with_extra):
    extra = {"extra_format": "bf16", "extra_topk": 130} if with_extra else {}
    run(num_splits=num_splits, topk=900, heads=70, sink="mixed", **extra)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 131, 132, 133, 400])
def test_more_tiles_than_ctas(num_tokens):
    """Tiles of a CTA have odd and even numbers of blocks, some none."""
    run(num_tokens=num_tokens, heads=65, topk=300, num_splits=1)


@pytest.mark.parametrize("with_lens", [False, True])
def test_last_tokens_in_a_launch_of_their_own(with_lens):
    run(num_tokens=135, topk=1100, with_lens=with_lens, sink="finite", num_pages=12, heads=9)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 61])
@pytest.mark.parametrize("padded", [False, True])
def test_pages(page_size, padded):
    """With padded strides there are gaps between rows and between pages."""
    num_pages = max(600 // page_size, 3)
    run(page_size=page_size, num_pages=num_pages, num_layers=3, padded=padded)


@pytest.mark.parametrize(
    ("extra_page_size", "padded", "extra_topk"),
    [(64, 0, 1), (64, 0, 130), (16, 1, 64), (3, 1, 130), (1, 0, 1), (1, 0, 64)],
)
def test_second_cache(extra_page_size, padded, extra_topk):
    run(
        extra_format="bf16",
        extra_page_size=extra_page_size,
        extra_topk=extra_topk,
        num_layers=2,
        padded=bool(padded),
        num_pages=12,
        num_tokens=9,
        sink="finite",
    )


@pytest.mark.parametrize("sharpness", [-2.0, 0.0, 0.01, 30.0])
def test_scales(sharpness):
    run(sharpness=sharpness, heads=128)


@pytest.mark.parametrize("sink", ["finite", "mixed"])
def test_sinks(sink):
    run(sink=sink, heads=40, num_tokens=20)


def test_wide_indices():
    run(wide_indices=True, extra_format="bf16", extra_topk=70)


def test_given_results():
    run(given_results=True, num_tokens=6)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_padded_strides(num_splits):
    run(given_results=True, padded=True, num_tokens=6, heads=24, num_splits=num_splits)


@pytest.mark.parametrize("seed", range(10))
def test_random_lists(seed):
    run(seed=seed, num_tokens=50, topk=100 + 37 * seed, heads=16 + 13 * seed)


def written_cache(num_rows: int) -> tuple[PagedLatentCache, torch.Tensor]:
    cache = PagedLatentCache.allocate(
        RowShape(512, 64), "bf16", num_pages=-(-num_rows // 64), page_size=64, device="cuda"
    )
    slots = torch.arange(num_rows, device="cuda")
    cache.layer(0).write(slots, torch.randn(num_rows, 576, device="cuda"))
    return cache, cache.layer(0).read(slots).double()


def check(q: torch.Tensor, stored: torch.Tensor, rows: torch.Tensor, results: tuple) -> None:
    arguments = (q.cpu(), stored.cpu(), rows.cpu())
    exact, naive = (
        reference.sparse_mla(*arguments, softmax_scale=0.05, v_width=512, dtype=dtype)
        for dtype in (torch.float64, torch.float32)
    )
    assert_matches("out", results[0].cpu(), exact[0], naive[0])
    largest = arguments[0].double().norm(dim=-1) * arguments[1].norm(dim=-1).amax() * 0.05
    for i, name in ((1, "lse"), (2, "max_logits")):
        assert_logits_match(name, results[i].cpu(), exact[i], naive[i], largest)


def test_a_million_rows():
    """Addresses past 2**31 elements."""
    num_rows = 2**20
    cache = PagedLatentCache.allocate(
        RowShape(512, 64), "bf16", num_pages=4 * num_rows // 64, page_size=64, device="cuda"
    )
    cache.payload.fill_(torch.nan)
    slots = torch.randperm(4 * num_rows, device="cuda")[:512]
    slots[0] = 4 * num_rows - 1
    cache.layer(0).write(slots, torch.randn(512, 576, device="cuda"))
    q = torch.randn(3, 64, 576, device="cuda").bfloat16()
    place = torch.randint(0, 512, (3, 256), device="cuda")
    place[:, 0] = 0
    results = sparse_mla(q, cache, slots[place].int(), softmax_scale=0.05, backend=KERNEL)
    check(q, cache.layer(0).read(slots).double(), place.int(), results)


def test_many_heads_of_many_tokens():
    """Results past 2**31 elements."""
    cache, _ = written_cache(256)
    tokens = 2**31 // (128 * 512) + 40
    q = torch.randn(1, 128, 576, device="cuda").bfloat16().expand(tokens, -1, -1).contiguous()
    rows = torch.randint(0, 256, (1, 128), device="cuda", dtype=torch.int32).expand(tokens, -1)
    out, lse, _ = sparse_mla(q, cache, rows, softmax_scale=0.05, backend=KERNEL)
    for token in (1, tokens // 2, tokens - 1):
        assert_same_bits("out", out[token], out[0])
        assert_same_bits("lse", lse[token], lse[0])


@pytest.mark.parametrize("calls", [4])
def test_replayed_launches_give_the_same_bits(calls):
    cache, _ = written_cache(512)
    extra, _ = written_cache(64)
    q = torch.randn(9, 16, 576, device="cuda").bfloat16()
    rows = torch.randint(-20, 520, (9, 300), device="cuda", dtype=torch.int32)
    more = ExtraRows(extra, rows[:, :70] % 64)
    results = [
        sparse_mla(q, cache, rows, extra=more, softmax_scale=0.05, backend="hopper")
        for _ in range(calls)
    ]
    for other in results[1:]:
        for name, got, want in zip(("out", "lse", "max_logits"), other, results[0], strict=True):
            assert_same_bits(name, got, want)


@pairwise(num_tokens=[1, 5, 150], padded=[False, True], dtype=["bf16", "fp16"])
def test_rotated_queries_apart(num_tokens, padded, dtype):
    """Also with tails of their own, and rows of q_rope at other distances than those of q."""
    case = {"heads": 70, "num_tokens": num_tokens, "topk": 200, "num_pages": 30, "padded": padded}
    run(format=dtype, dtype=dtype, q_rope_dtype=dtype, **case)
