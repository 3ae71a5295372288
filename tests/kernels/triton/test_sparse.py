"""Which kernels `sparse_mla` asks a compiler for, and what they do at the edges of their tiles."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from mlakit.dispatch import knobs
from mlakit.formats import FORMATS
from mlakit.kernels.triton.configs import (
    SPARSE_SCRATCH_BYTES,
    RowTiles,
    pick_sparse_config,
    pick_sparse_splits,
)
from mlakit.tools.workloads import SparseCase

if not knobs.interpreted():
    pytest.skip("kernels are compiled here", allow_module_level=True)

import triton
import triton.language as tl

from mlakit.kernels.launch import SHARED_BYTES
from mlakit.kernels.triton import sparse
from mlakit.kernels.triton.sparse_kernel import SCANNED_ENTRIES, _without_invalid_end

NUM_SMS = 132


def constants(monkeypatch: pytest.MonkeyPatch, **sizes: Any) -> dict[str, Any]:
    """What the attention of a call is compiled for, which is right."""
    asked: list[dict[str, Any]] = []
    launch = sparse.launch

    def watch(kernel, grid, **options):
        each = {name: options[name] for name in ("num_warps", "num_stages")}
        asked.append(options["TRAITS"]._asdict() | each)
        launch(kernel, grid, **options)

    with monkeypatch.context() as patch:
        patch.setattr(sparse, "launch", watch)
        SparseCase(**sizes, num_pages=3, topk=20, extra_format="bf16", extra_topk=9).run(
            "cpu", "triton"
        )
    return asked[0]


# padded pools have gaps between pages


@pytest.mark.slow
def test_one_kernel_serves_all_unusual_pages(monkeypatch):
    odd = constants(monkeypatch, padded=True, page_size=7, extra_page_size=2)
    assert (odd["PAGE"], odd["EXTRA_PAGE"]) == (0, 0)
    assert constants(monkeypatch, padded=True, page_size=61, extra_page_size=576) == odd


@pytest.mark.slow
def test_usual_pages_are_constants(monkeypatch):
    asked = constants(monkeypatch, padded=True, page_size=64, extra_page_size=16)
    assert (asked["PAGE"], asked["EXTRA_PAGE"]) == (64, 16)


def test_one_kernel_serves_all_adjoining_pages(monkeypatch):
    adjoining = constants(monkeypatch, page_size=7, extra_page_size=2)
    assert (adjoining["PAGE"], adjoining["EXTRA_PAGE"]) == (1, 1)
    assert constants(monkeypatch, page_size=64, extra_page_size=16) == adjoining


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_one_of_several_layers(format, padded):
    row = {"kv_lora_rank": 192, "qk_rope_head_dim": 16}
    SparseCase(
        **row, format=format, dtype=_query(format), page_size=3, num_layers=3, padded=padded
    ).run("cpu", "triton")


def _query(format: str) -> str:
    return format if format in ("fp16", "fp32") else "bf16"


@pytest.mark.slow
@pytest.mark.parametrize("heads", [33, 64, 65, 128, 130])
@pytest.mark.parametrize("topk", [1, 64, 65, 130])
def test_edges_of_the_large_tile(heads, topk, monkeypatch):
    asked = constants(monkeypatch, heads=heads)
    assert (asked["BH"], asked["BN"], asked["IS_UNCHAINED"]) == (64, 64, True)
    SparseCase(heads=heads, topk=topk, num_tokens=3, sink="mixed", seed=topk).run("cpu", "triton")


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_large_tile_of_every_format(format):
    row = {"kv_lora_rank": 256, "qk_rope_head_dim": 32}
    SparseCase(
        **row, format=format, dtype=_query(format), heads=70, topk=150, num_tokens=2, num_pages=20
    ).run("cpu", "triton")


@pytest.mark.slow
@pytest.mark.parametrize("num_splits", [2, 3, 9])
def test_splits_that_leave_loops_empty(num_splits):
    """Tokens with fewer list tiles than splits, and splits that end in the first or second list."""
    SparseCase(
        heads=40,
        topk=200,
        num_tokens=6,
        num_pages=9,
        extra_format="fp8_token",
        extra_topk=70,
        num_splits=num_splits,
        seed=num_splits,
    ).run("cpu", "triton")


def padded_lists(valid: list[int], topk: int) -> torch.Tensor:
    """Lists whose only valid entry is number `valid` − 1; 0: none."""
    rows = torch.tensor([-1, 9, 1 << 30], dtype=torch.int32).repeat(len(valid), topk)[:, :topk]
    rows = rows.contiguous()
    for row, last in zip(rows, valid, strict=True):
        if last:
            row[last - 1] = 5
    return rows


@triton.jit
def trim_kernel(rows, lengths, length, num_slots, TOPK: tl.constexpr):
    token = tl.program_id(0)
    trimmed = _without_invalid_end(rows + token * TOPK, length, 1, num_slots)
    tl.store(lengths + token, trimmed)


@pytest.mark.slow
@pytest.mark.parametrize("length", [-3, 0, 1, 1023, 1024, 1025, 2049, 3000])
def test_invalid_entries_at_the_end_of_a_list_take_no_tile(length):
    assert SCANNED_ENTRIES.value == 1024
    valid = [0, 1, 2, 64, 1023, 1024, 1025, 1976, 1977, 2048, 2999, 3000]
    rows = padded_lists(valid, 3000)
    trimmed = torch.full((len(valid),), -1, dtype=torch.int32)
    trim_kernel[(len(valid),)](rows, trimmed, length, 9, TOPK=3000)
    assert trimmed.tolist() == [n if n <= length else 0 for n in valid]


@pytest.mark.slow
@pytest.mark.parametrize("with_lens", [False, True])
@pytest.mark.parametrize("heads", [4, 40])
def test_short_lists_that_are_padded(with_lens, heads, monkeypatch):
    """The whole op on lists with up to 2500 invalid entries at their end."""
    make_lists = SparseCase._lists

    def padded(self, *args):
        lists = make_lists(self, *args)
        for token, row in enumerate(lists.rows):
            row[(0, 1, 70, 1400, 2500)[token] :] = (-1, 1 << 30)[token % 2]
        return lists

    monkeypatch.setattr(SparseCase, "_lists", padded)
    SparseCase(heads=heads, topk=2500, num_pages=12, with_lens=with_lens).run("cpu", "triton")


@pytest.mark.parametrize("format", FORMATS)
def test_configurations_fit_shared_memory(format):
    widths = (448, 64, 512) if format == "fp8_block64" else (512, 64, 512)
    is_fp8 = format.startswith("fp8")
    tiles = RowTiles.of(*widths, widest=128 if is_fp8 else 1024)
    itemsize = 4 if format == "fp32" else 2
    for arch, shared_bytes in SHARED_BYTES.items():
        for heads, has_extra in product((1, 16, 17, 32, 33, 64, 128, 200), (False, True)):
            config = pick_sparse_config(
                tiles,
                heads=heads,
                itemsize=itemsize,
                is_fp8=is_fp8,
                has_extra=has_extra,
                arch=arch,
                shared_bytes=shared_bytes,
            )
            assert config.shared_bytes(tiles, itemsize) <= shared_bytes
            if arch == 90 and heads > 16 and format != "fp32":
                assert config.block_h == 64


def splits(head_tiles: int, *, list_tiles: int = 32, wanted: int | None = None) -> int:
    return pick_sparse_splits(
        wanted=wanted,
        rows=64 * head_tiles,
        head_tiles=head_tiles,
        list_tiles=list_tiles,
        num_sms=NUM_SMS,
        row_bytes=2056,
    )


def test_few_tokens_are_split_until_all_sms_work():
    for head_tiles in (1, 2, 8, 16, 33, 66):
        # a split has two list tiles at least
        assert head_tiles * splits(head_tiles) > NUM_SMS // 2 or splits(head_tiles) == 16


def test_a_second_wave_that_is_nearly_empty_is_shared():
    assert splits(NUM_SMS) == 1
    assert splits(NUM_SMS + 4) == 2
    assert splits(2 * NUM_SMS - 8) == 1


def test_many_tokens_are_not_split():
    for head_tiles in (256, 512, 1000, 4096, 8192):
        assert splits(head_tiles) == 1


def test_wanted_splits_have_tiles_and_memory():
    assert splits(4, wanted=5) == 5
    assert splits(4, wanted=50) == 32
    assert splits(4, list_tiles=0, wanted=5) == 1
    assert splits(4, list_tiles=0) == splits(4, list_tiles=1) == 1
    rows = 64 * 400
    assert 1 < splits(400, wanted=32) <= SPARSE_SCRATCH_BYTES // (rows * 2056)
