"""Which decode problems Blackwell's kernels take, and how they are launched: host logic, no GPU."""

from __future__ import annotations

import pytest
import torch

from mlakit import PagedLatentCache, mla_decode, plan_mla_decode
from mlakit.dispatch import selection
from mlakit.dispatch.specs import Problem, Use, pretending
from mlakit.kernels.blackwell import support
from mlakit.model.geometry import RowShape
from tests.kernels.blackwell.test_sparse_dispatch import Launched

ROW = RowShape(512, 64)
KERNEL = "blackwell:n64_bf16"


@pytest.fixture(autouse=True)
def triton(monkeypatch):
    """A Triton that can compile the kernels, whichever is installed."""
    monkeypatch.setattr(support, "version", lambda package: "3.9.0")


def problem(**fields: object) -> Problem:
    given = {"dtype": "torch.bfloat16", "format": "bf16", "heads": 128, "page_size": 64, "row": ROW}
    return Problem("cuda", **{"arch": 100, "mask": "causal", **given, **fields})


@pytest.mark.parametrize("page_size", [1, 3, 64, 96])
@pytest.mark.parametrize("format", ["bf16", "fp16", "bf16_split"])
def test_16_bit_rows_are_taken(format, page_size):
    name = "torch.float16" if format == "fp16" else "torch.bfloat16"
    given = problem(dtype=name, format=format, page_size=page_size)
    assert selection.select("mla_decode", given, "blackwell").name == KERNEL


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"arch": 90}, "needs sm_100 or sm_103, got sm_90"),
        (
            {"format": "fp8_token"},
            "needs rows of bf16, fp16, bf16_split or fp16_split, got fp8_token",
        ),
        (
            {"dtype": "torch.float16"},
            "needs queries of torch.bfloat16 with rows of bf16, got torch.float16",
        ),
        ({"row": RowShape(256, 64)}, "needs rows of 512 + 64 columns, got 256 + 64"),
        ({"row": RowShape(448, 64, v_width=512)}, "needs rows of 512 + 64 columns, got 448 + 64"),
        ({"row": None}, "needs rows of 512 + 64 columns, got none"),
        ({"mask": "sliding_window_causal"}, "needs a mask of null or causal"),
        ({"uses": (Use.FLAT_PAGE_TABLE,)}, "takes no flat page table"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reasons(fields, reason):
    (spec,) = (spec for spec in selection.specs("mla_decode") if spec.name == KERNEL)
    assert spec.why_not(problem(**fields)).startswith(reason)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"page_size": 1, "heads": 3}, None),
        ({"format": "bf16"}, "needs rows of fp8_block128, got bf16"),
        (
            {"dtype": "torch.float16"},
            "needs queries of torch.bfloat16 with rows of fp8_block128, got torch.float16",
        ),
        ({"row": RowShape(512, 0)}, "needs rows of 512 + 64 columns, got 512 + 0"),
        ({"uses": (Use.UNALIGNED_CACHE,)}, Use.UNALIGNED_CACHE.refusal),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fp8_rows(fields, reason):
    (spec,) = (s for s in selection.specs("mla_decode") if s.name == "blackwell:n64_fp8_kv")
    given = problem(**{"format": "fp8_block128", **fields})
    assert spec.why_not(given) == reason
    if reason is None:
        assert selection.select("mla_decode", given, "blackwell") is spec


def test_it_needs_a_proof():
    (spec,) = (spec for spec in selection.specs("mla_decode") if spec.name == KERNEL)
    assert spec.variant(problem()) == "bf16 576/512, causal, 64 heads"
    assert selection.select("mla_decode", problem()).backend == "triton"


@pytest.fixture
def launched(monkeypatch):
    pytest.importorskip("triton", minversion="3.9", reason="Blackwell's kernels need Triton 3.9")
    from mlakit.kernels import decode_merge, decode_plan
    from mlakit.kernels.hopper.decode import calls
    from mlakit.kernels.launch import SHARED_BYTES, Target

    launches = Launched()
    for module in (decode_merge, decode_plan, calls):
        monkeypatch.setattr(module, "launch", launches)
        if hasattr(module, "target"):
            sm_100 = Target(100, 148, SHARED_BYTES[100])
            monkeypatch.setattr(module, "target", lambda device, sm_100=sm_100: sm_100)
    with pretending(100, 148):
        yield launches


@pytest.mark.parametrize(
    ("heads", "rows", "head_tiles"), [(1, 16, 1), (17, 32, 1), (64, 64, 1), (65, 64, 2)]
)
def test_a_launch(launched, heads, rows, head_tiles):
    cache = PagedLatentCache.allocate(ROW, num_pages=3, page_size=24)
    q = torch.zeros(2, heads, 576, dtype=torch.bfloat16)
    table, lens = torch.zeros(2, 3).int(), torch.full((2,), 64).int()
    mla_decode(q, cache, table, lens, softmax_scale=0.1, backend="blackwell")
    (arguments,) = (each for kernel, _, each in launched if kernel.arg_names[0] == "q")
    assert arguments["CONFIG"].ROWS == arguments["TRAITS"].ROWS == rows
    assert arguments["schedule"].head_tiles == head_tiles
    assert list(arguments["q"].block_shape) == [rows, 128]
    for rows_of_cache in (arguments["kv"], arguments["kv_rope"]):
        assert list(rows_of_cache.block_shape) == [1, 64]
        assert list(rows_of_cache.shape) == [3 * 24, 576]


def test_fp8_rows_are_read_as_words(launched):
    cache = PagedLatentCache.allocate(ROW, "fp8_block128", num_pages=3, page_size=24)
    q = torch.zeros(2, 100, 576, dtype=torch.bfloat16)
    table, lens = torch.zeros(2, 3).int(), torch.full((2,), 64).int()
    mla_decode(q, cache, table, lens, softmax_scale=0.1, backend="blackwell")
    (arguments,) = (each for kernel, _, each in launched if kernel.arg_names[0] == "q")
    gather = arguments["gather"]
    assert (gather.words.dtype, tuple(gather.words.shape)) == (torch.int32, (3 * 24, 164))
    assert gather.row_chunks == 41
    assert arguments["CONFIG"].PRODUCER_REGISTERS == 176


def test_without_queries_no_kernel_is_started(launched):
    cache = PagedLatentCache.allocate(ROW, num_pages=3, page_size=64)
    q = torch.zeros(0, 4, 576, dtype=torch.bfloat16)
    table, lens = torch.zeros(0, 3).int(), torch.zeros(0).int()
    mla_decode(q, cache, table, lens, softmax_scale=0.1, backend="blackwell")
    assert launched == []


def test_a_plan_is_made_for_blocks_of_128_keys(launched):
    cache = PagedLatentCache.allocate(ROW, num_pages=3, page_size=64)
    table, lens = torch.zeros(2, 3).int(), torch.full((2,), 64).int()
    plan = plan_mla_decode(cache, table, lens, heads=16, backend="blackwell")
    assert plan.tile == 128
