"""The portable indexer kernel: FP8 dots, and the request of a query tile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlakit.dispatch import knobs
from mlakit.dispatch.specs import pretending
from mlakit.formats import row_codec
from mlakit.kernels.triton.indexer_configs import has_fp8_dots
from mlakit.model.geometry import RowShape
from mlakit.tools.workloads import IndexerLogitsCase
from mlakit.tools.workloads.fp8_scores import uses_fp8_logits

E4M3 = "torch.float8_e4m3fn"


@pytest.mark.parametrize(
    ("q_dtype", "format", "row", "is_fp8"),
    [
        (E4M3, "fp8_token", (128, 0), True),
        (E4M3, "fp8", (128, 0), True),
        (E4M3, "fp8", (17, 0), True),
        (E4M3, "fp8", (16, 0), False),  # a dot of e4m3 needs 32 columns
        (E4M3, "fp8_token", (128, 64), False),  # rotated columns are bf16
        (E4M3, "fp8_block128", (128, 0), False),
        (E4M3, "bf16", (128, 0), False),
        ("torch.bfloat16", "fp8_token", (128, 0), False),
    ],
)
def test_which_dots_have_operands_of_e4m3(q_dtype, format, row, is_fp8):
    assert has_fp8_dots(q_dtype, row_codec(format, RowShape(*row))) == is_fp8


@pytest.mark.parametrize(
    ("dtype", "arch", "backend", "page_size", "is_fp8"),
    [
        ("e4m3", 90, "auto", 64, True),
        ("e4m3", 90, "hopper", 64, True),
        ("e4m3", 90, "triton", 64, True),
        ("e4m3", 90, "auto", 16, True),
        ("e4m3", 100, "auto", 64, False),
        ("e4m3", 80, "triton", 64, False),
        ("bf16", 90, "auto", 64, False),
        ("bf16", 90, "triton", 64, False),
    ],
)
def test_the_tolerance_is_that_of_the_kernel_that_runs(dtype, arch, backend, page_size, is_fp8):
    from mlakit.model.masks import CAUSAL
    from mlakit.tools.workloads.inputs import DTYPES, Inputs

    case = IndexerLogitsCase(
        kv_lora_rank=128, qk_rope_head_dim=0, format="fp8_token", page_size=page_size
    )
    pool = case.pool(Inputs("cpu", 0), "cache", 2)
    table = torch.zeros(1, 2, dtype=torch.int32)
    q = torch.zeros(1, 64, 128).to(DTYPES[dtype])
    with pretending(arch):
        got = uses_fp8_logits(q, pool.layer, table, CAUSAL, backend)
    assert got == is_fp8
    assert not uses_fp8_logits(q, pool.layer, table, CAUSAL, "cpu")


interpreted = pytest.mark.skipif(not knobs.interpreted(), reason="kernels are compiled here")
KEYS: dict[str, Any] = {"kv_lora_rank": 128, "qk_rope_head_dim": 0, "dtype": "e4m3"}
BATCHES = {
    "one query each": ((70, 3, 0, 130), (1, 1, 1, 1)),
    "as many queries each": ((70, 9, 30), (4, 4, 4)),
    "an odd number each": ((70, 9, 30), (3, 3, 3)),
    "some without queries": ((70, 9, 30, 8), (0, 1, 0, 3)),
    "a prompt among others": ((1, 140, 30), (1, 20, 1)),
}


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("format", ["fp8", "fp8_token"])
@pytest.mark.parametrize("batch", BATCHES)
def test_fp8_dots_in_the_interpreter(monkeypatch, batch, format):
    from mlakit.kernels.triton import indexer

    types: list[str] = []
    launch = indexer.launch

    def watch(kernel, grid, *args, **options):
        types.append(str(options["TRAITS"].ROW.DTYPE))
        launch(kernel, grid, *args, **options)

    monkeypatch.setattr(indexer, "launch", watch)
    kv_lens, q_lens = BATCHES[batch]
    case = IndexerLogitsCase(
        **KEYS, format=format, tensor_scale=0.5, heads=3, kv_lens=kv_lens, q_lens=q_lens
    )
    case.run("cpu", "triton")
    assert types == ["fp8e4nv"]


@interpreted
def test_16_bit_dots_where_there_are_none_of_fp8(monkeypatch):
    from mlakit.kernels import launch
    from mlakit.kernels.launch import Target

    monkeypatch.setattr(launch, "INTERPRETED", Target(80, 3, 166_912))
    launch._target_of.cache_clear()
    try:
        IndexerLogitsCase(**KEYS, format="fp8_token", heads=3).run("cpu", "triton")
    finally:
        launch._target_of.cache_clear()


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 192, 256])
@pytest.mark.parametrize(("mask", "window"), [("causal", 0), ("sliding_window_causal", 70)])
@pytest.mark.parametrize("dtype", ["e4m3", "bf16"])
def test_pages_smaller_and_larger_than_a_key_tile(page_size, mask, window, dtype):
    """Entries of pages that no query sees are garbage."""
    IndexerLogitsCase(
        **KEYS | {"dtype": dtype},
        format="fp8_token",
        heads=3,
        kv_lens=(300, 130, 0),
        q_lens=(2, 1, 1),
        page_size=page_size,
        mask=mask,
        window=window,
    ).run("cpu", "triton")
