"""Which decodes Hopper's kernels take, and which of them takes what."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch
from hopper_decode_cases import (
    FEW_FP8_HEADS,
    FP8_FORMATS,
    HALF_AND_FP8,
    ROW,
)

from mlakit import PagedLatentCache, dispatch, mla_decode
from mlakit.checks import UnsupportedError
from mlakit.geometry import RowShape
from mlakit.plan import EvenSplit, plan_decode
from mlakit.specs import Problem, pretending
from mlakit.workloads import DecodeCase

if TYPE_CHECKING:
    from mlakit.kernels.hopper.decode import Variant


@pytest.mark.parametrize("requests", [0, 2])
def test_without_queries_no_kernel_is_started(requests):
    from mlakit.kernels.triton.launch import SHARED_BYTES, Target, compiling

    cache = PagedLatentCache.allocate(RowShape(512, 64), num_pages=1, page_size=64)
    table, lens = torch.zeros(requests, 1).int(), torch.full((requests,), 3).int()
    starts = torch.zeros(requests + 1).int()
    q = torch.empty(0, 16, 576, dtype=torch.bfloat16)
    with compiling(Target(90, 132, SHARED_BYTES[90])) as compilation:
        out, lse = mla_decode(
            q, cache, table, lens, q_starts=starts, softmax_scale=0.1, backend="hopper"
        )
    assert (out.shape, lse.shape) == ((0, 16, 512), (0, 16))
    assert compilation.kernels == []


def variant_of(
    heads: int,
    format: str = "bf16",
    *,
    page_size: int = 64,
    pages: int = 1 << 20,
    q_dtype: torch.dtype = torch.bfloat16,
) -> Variant:
    """What a query token is given over a request that may have so many pages."""
    from mlakit.kernels.hopper.decode import variant_for

    row = RowShape(512, 64)
    layer = PagedLatentCache.allocate(row, format, num_pages=1, page_size=page_size).layer(0)
    table = torch.empty(1, pages, dtype=torch.int32)
    return variant_for(layer, table, heads, num_tokens=1, q_dtype=q_dtype)


@pytest.mark.parametrize(
    ("heads", "rows"),
    [(1, 8), (7, 8), (8, 8), (9, 16), (16, 16), (17, 32), (31, 32), (32, 32), (33, 64), (200, 64)],
)
def test_few_heads_are_not_padded_to_many(heads, rows):
    from mlakit.kernels.hopper.decode_few_kernel import mla_decode_few_kernel

    variant = variant_of(heads)
    assert variant.rows == rows
    assert (variant.kernel is mla_decode_few_kernel) == (heads <= 32)
    assert variant_of(heads, pages=2).rows == min(rows, 32)


@pytest.mark.parametrize("format", ["bf16", "fp8_token"])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("page_size", [1, 4, 8, 16, 24, 32, 64, 96, 192])
def test_rows_come_one_by_one_where_boxes_cannot_be(page_size, heads, format):
    from mlakit.kernels.hopper.decode import _pool_arguments

    row = RowShape(512, 64)
    layer = PagedLatentCache.allocate(row, format, num_pages=2, page_size=page_size).layer(0)
    variant = variant_of(heads, format, page_size=page_size)
    options = _pool_arguments(layer, variant, 0).options
    # of the smallest boxes there would be too many for the kernel for many heads
    have_boxes = page_size % 64 == 0 or page_size in (16, 32) or (
        page_size == 8 and (heads, format) != (128, "bf16")
    )  # fmt: skip
    assert (options["words"] is None) == have_boxes
    if not have_boxes:
        assert options["row_quads"] * 16 == {"bf16": 1152, "fp8_token": 640}[format]


@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("format", "heads", "rows"),
    [
        ("fp8", 32, 32), ("fp8", 33, 64), ("fp8_token", 128, 64),
        # its four scales a row are applied exactly for few heads only
        ("fp8_block128", 128, 32),
    ],
)  # fmt: skip
def test_many_heads_over_fp8_have_kernels_of_their_own(format, heads, rows, q_dtype):
    from mlakit.kernels.hopper.decode_e4m3_kernel import mla_decode_e4m3_kernel
    from mlakit.kernels.hopper.decode_fp8_kernel import mla_decode_fp8_kernel

    variant = variant_of(heads, format, q_dtype=q_dtype)
    many = mla_decode_fp8_kernel if q_dtype == torch.bfloat16 else mla_decode_e4m3_kernel
    assert (variant.rows, variant.kernel is many) == (rows, rows == 64)
    assert variant_of(heads, format, q_dtype=q_dtype, pages=2).rows == 32


def variant_in_call(**given: object) -> Variant:
    """What a call with little to do chooses, of 128 heads over one page."""
    from mlakit.kernels.hopper import decode
    from mlakit.kernels.triton.launch import SHARED_BYTES, Target, compiling

    cache = PagedLatentCache.allocate(RowShape(512, 64), num_pages=1, page_size=64)
    q = torch.empty(1, 128, 576, dtype=torch.bfloat16)
    table, lens = torch.zeros(1, 1).int(), torch.full((1,), 64).int()
    chosen = []

    def choose(*args: object, **more: object) -> Variant:
        chosen.append(variant_for(*args, **more))
        raise InterruptedError  # before anything is launched

    variant_for = decode.variant_for
    with (
        mock.patch.object(decode, "variant_for", choose),
        compiling(Target(90, 132, SHARED_BYTES[90])),
        pytest.raises(InterruptedError),
    ):
        mla_decode(q, cache, table, lens, softmax_scale=0.1, backend="hopper", **given)
    return chosen[0]


@pytest.mark.parametrize(
    "given",
    [
        {"deterministic": True},
        {"plan": EvenSplit(2)},
        {"plan": plan_decode([64], num_workers=1, fixed_split=64)},
    ],
    ids=["deterministic", "even split", "fixed split"],
)
def test_a_request_that_is_not_to_depend_on_the_batch_has_one_kernel(given):
    """Alone there is little to do, in a batch much."""
    assert variant_in_call().rows == 32
    assert variant_in_call(**given) == variant_of(128)


@FP8_FORMATS
@FEW_FP8_HEADS
@pytest.mark.parametrize("copied_columns", [0, 512, 576], ids=["halves", "bf16 rope", "e4m3"])
def test_rings_of_bytes_fill_what_the_queries_leave(copied_columns, heads, format):
    """Shared memory as compiled is checked by `support --compile`; here, that none is wasted."""
    from mlakit.kernels.hopper.decode import _fp8_places

    copies = 4 if format == "fp8_block128" else 1
    rope_bytes = 64 * (64 if format == "fp8" else 128)
    places = _fp8_places(heads, copies, rope_bytes, heads * copied_columns)
    boxes = places["BOXES"] * places["PLACES"]
    assert boxes >= 12  # with two scorers the ring must have room for two blocks
    assert 4 * (places["ROPE_PLACES"] - 1) < boxes <= 4 * places["ROPE_PLACES"]
    taken = boxes * 8192 + places["ROPE_PLACES"] * rope_bytes
    taken += heads * (576 * 2 + copied_columns) + copies * heads * 64 * 2 * 2
    assert 4000 < 232_448 - taken < 4500 + places["BOXES"] * 8192 + rope_bytes


@FP8_FORMATS
@FEW_FP8_HEADS
@pytest.mark.parametrize("one_by_one", [False, True], ids=["boxes", "rows"])
def test_registers_of_warps_are_no_more_than_there_are(one_by_one, heads, format):
    """Spills as compiled are checked by `support --compile`; here, that the adder has a share."""
    from mlakit.kernels.hopper.decode import _fp8_warps

    warps = _fp8_warps(heads, format, one_by_one=one_by_one)
    adders, adder, scorer, producer = (
        warps[name]
        for name in ("ADDERS", "ADDER_REGISTERS", "SCORER_REGISTERS", "PRODUCER_REGISTERS")
    )
    groups = adders + 3  # of four warps: two scorers and a producer
    assert warps["maxnreg"] * groups * 128 <= 65_536
    first_adder = warps["maxnreg"] * groups - (adders - 1) * adder - 2 * scorer - producer
    least = min(first_adder, adder) if adders > 1 else first_adder
    # its sums, and values as words and as halves
    assert 4 * heads // adders + 80 <= least <= first_adder <= 256
    assert all(registers % 8 == 0 for registers in (scorer, producer, adder, first_adder))


@pytest.mark.parametrize("rope_bytes", [64 * 64, 64 * 64 * 2], ids=["e4m3", "bf16"])
def test_four_blocks_of_e4m3_are_on_their_way_to_many_heads(rope_bytes):
    from mlakit.kernels.hopper.decode import _e4m3_places

    assert _e4m3_places(copied_bytes=64 * 576, rope_bytes=rope_bytes) == 4


@pytest.mark.parametrize("name", ["E4M3_WARPS", "E4M3_COPYING_WARPS"])
def test_registers_of_warps_for_e4m3_are_no_more_than_there_are(name):
    from mlakit.kernels.hopper import decode

    warps = getattr(decode, name)
    second_adder, scorer, producer = (
        warps[f"{role}_REGISTERS"] for role in ("ADDER", "SCORER", "PRODUCER")
    )
    # of the threads of four warpgroups
    first_adder = 4 * warps["maxnreg"] - second_adder - scorer - producer
    assert second_adder <= first_adder <= 256
    assert 4 * warps["maxnreg"] * 128 <= 65_536
    assert all(registers % 8 == 0 for registers in (second_adder, scorer, producer))


def problem(**fields: object) -> Problem:
    row = DecodeCase(**ROW).row
    given = {"dtype": "torch.bfloat16", "format": "bf16", "heads": 16, "page_size": 64, "row": row}
    return Problem("cuda", 90, **{**given, "mask": "causal", **fields})


@pytest.mark.parametrize("page_size", [1, 4, 8, 16, 24, 32, 64, 96, 192])
@pytest.mark.parametrize("format", HALF_AND_FP8)
def test_it_is_the_first_choice(format, page_size):
    asked = problem(page_size=page_size, format=format)
    assert dispatch.select("mla_decode", asked).backend == "hopper"


@FP8_FORMATS
def test_it_is_the_first_choice_for_few_heads_over_fp8(format):
    assert dispatch.select("mla_decode", problem(format=format, heads=32)).backend == "hopper"


@FP8_FORMATS
@pytest.mark.parametrize("uses", [(), ("q_scale",)], ids=["plain", "scaled"])
def test_it_is_the_first_choice_for_e4m3_queries_over_fp8(uses, format):
    asked = problem(format=format, dtype="torch.float8_e4m3fn", heads=128, uses=uses)
    assert dispatch.select("mla_decode", asked).backend == "hopper"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"format": "fp32"},
            "needs rows of bf16 or fp16 or fp8 or fp8_token or fp8_block128, got fp32",
        ),
        (
            {"dtype": "torch.float16"},
            "needs queries of torch.bfloat16 with rows of bf16, got torch.float16",
        ),
        (
            {"dtype": "torch.float8_e4m3fn"},
            "needs queries of torch.bfloat16 with rows of bf16, got torch.float8_e4m3fn",
        ),
        (
            {"format": "fp8_token", "dtype": "torch.float16"},
            "needs queries of torch.bfloat16 or torch.float8_e4m3fn with rows of fp8_token, "
            "got torch.float16",
        ),
        ({"format": "fp8", "uses": ("q_scale",)}, "takes no q_scale"),
        (
            {
                "format": "fp8_token",
                "dtype": "torch.float8_e4m3fn",
                "uses": ("q_scale", "loose rows of q"),
            },
            "takes no loose rows of q",
        ),
        ({"row": DecodeCase().row}, "needs rows of 576/512, got 40/32"),
        ({"mask": "chunked"}, "needs a mask of causal or null, got chunked"),
        ({"uses": ("kv_shard",)}, "takes no kv_shard"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_it_leaves_to_the_portable_kernel(fields, reason):
    asked = problem(**fields)
    assert dispatch.explain("mla_decode", asked)["hopper"] == reason
    assert dispatch.select("mla_decode", asked).backend == "triton"


def test_it_wants_a_hopper():
    for where, got in ((("cuda", 100), "sm_100"), (("cpu", 0), "cpu")):
        asked = Problem(*where, dtype="torch.bfloat16", format="bf16")
        assert dispatch.explain("mla_decode", asked)["hopper"] == f"needs sm_90, got {got}"


def test_rows_that_boxes_cannot_be_copied_from_are_said_to_be_loose():
    from mlakit.ops.decode import _lie_evenly

    rows = torch.zeros(4, 6, 64, dtype=torch.bfloat16)
    assert _lie_evenly(rows)
    assert _lie_evenly(rows[:, ::2])
    assert _lie_evenly(rows[::2])
    assert not _lie_evenly(rows.flatten()[1:-63].view(-1, 64)[:6].view(2, 3, 64))
    assert not _lie_evenly(rows.as_strided((2, 3, 8), (100, 12, 1)))
    assert not _lie_evenly(rows.as_strided((2, 3, 8), (40, 16, 1)))
    assert not _lie_evenly(rows[:, :1].expand(4, 6, 64))


def test_of_pages_of_one_row_only_those_have_a_distance():
    from mlakit.kernels.hopper.decode import _as_rows
    from mlakit.ops.decode import _lie_evenly

    pool = torch.arange(4 * 72.0).to(torch.bfloat16).view(4, 72)[:, :64]
    pages = pool.unsqueeze(1)
    assert pages.stride(1) == 64  # at which there is no row
    assert _lie_evenly(pages)
    rows, apart = _as_rows(pages)
    assert apart == 1
    assert torch.equal(rows, pool)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        *(
            ({"q_rope_dtype": other}, "q_rope of another dtype")
            for other in ("fp16", "fp32", "e4m3")
        ),
        ({"dtype": "e4m3", "format": "fp8", "q_rope_dtype": "bf16"}, "bf16 q_rope of e4m3 q"),
        (
            {"dtype": "e4m3", "format": "fp8_token", "q_rope_dtype": "fp16"},
            "q_rope of another dtype",
        ),
        ({"format": "fp8_token", "q_scaled": True}, "q_scale"),
    ],
    ids=str,
)
def test_parts_of_queries_that_are_left_to_the_portable_kernel(fields, words):
    trial = DecodeCase(**ROW, page_size=64, **fields).trial("cpu")
    with pretending(90), pytest.raises(UnsupportedError, match=f"takes no {words}"):
        trial.call("hopper")
