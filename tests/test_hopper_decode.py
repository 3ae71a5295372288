"""The Gluon decode kernels: what they take, held to the oracle on poisoned caches."""

from __future__ import annotations

from math import log
from random import Random
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch

from mlakit import PagedLatentCache, dispatch, mla_decode, reference
from mlakit.checks import UnsupportedError
from mlakit.geometry import RowShape
from mlakit.specs import Problem, pretending
from mlakit.testing import assert_matches
from mlakit.workloads import DecodeCase

if TYPE_CHECKING:
    from mlakit.kernels.hopper.decode import Variant

ROW = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
LENGTHS = {
    "one token": ((1,), (1,)),
    "a block less one, a block, a block and one": ((63, 64, 65), (1, 1, 1)),
    "pairs of blocks": ((127, 128, 129, 300), (1, 1, 1, 1)),
    "nothing cached": ((0, 0), (1, 1)),
    "some empty": ((0, 200, 0, 1), (1, 1, 1, 1)),
    "long": ((5000, 3), (1, 1)),
    "queries see different ends": ((130, 64, 2), (3, 2, 2)),
    "more queries than keys": ((130, 64, 5), (3, 1, 5)),
    "ragged queries, none of one": ((300, 70, 129), (5, 0, 1)),
    "a request of many queries": ((700, 90), (40, 1)),
    "rings of copies that come round many times": ((4097, 1, 2880, 0, 191), (1, 2, 1, 1, 3)),
}
# with one worker all of them are of one program: units with no block, an odd number, an even one
MANY_UNITS = {"kv_lens": (1, 0, 65, 64, 200, 0, 130, 3, 700, 1), "num_workers": 1, "tile": 64}
FP8 = ("fp8", "fp8_token", "fp8_block128")
HALF_AND_FP8 = ("bf16", *FP8)
FEW_FP8_HEADS = pytest.mark.parametrize("heads", [8, 16, 32])
FP8_HEADS = pytest.mark.parametrize("heads", [8, 16, 32, 128])
FP8_FORMATS = pytest.mark.parametrize("format", FP8)
SMALL_PAGES = pytest.mark.parametrize("page_size", [8, 16, 32])
# one of the kernel for few heads, one of the other
KERNELS = pytest.mark.parametrize("heads", [16, 64], ids=["few", "many"])


def run(*, is_little: bool = False, **fields: object) -> None:
    """More than 32 heads go to the kernel for many unless that `is_little` to do."""
    case = DecodeCase(**{**ROW, "page_size": 64, "heads": 16, **fields})
    trial = case.trial("cuda")
    with mock.patch("mlakit.kernels.hopper.decode.FEW_BLOCKS", 1e9 if is_little else 0):
        trial.check(trial.call("hopper"))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [33, 64, 128])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_many_heads_with_little_to_do(lengths, heads):
    kv_lens, q_lens = LENGTHS[lengths]
    run(kv_lens=kv_lens, q_lens=q_lens, heads=heads, is_little=True)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 16, 32, 128])
@pytest.mark.parametrize(("kv_lens", "q_lens"), LENGTHS.values(), ids=LENGTHS.keys())
def test_lengths(kv_lens, q_lens, heads):
    run(kv_lens=kv_lens, q_lens=q_lens, heads=heads)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 7, 8, 9, 16, 17, 20, 31, 32, 33, 64, 65, 96, 200])
def test_heads(heads):
    run(kv_lens=(300, 64, 1), q_lens=(2, 1, 1), heads=heads, sink="finite")


@pytest.mark.gpu
@KERNELS
@pytest.mark.parametrize("page_size", [64, 128, 192, 1024])
def test_pages(page_size, heads):
    run(kv_lens=(1500, 130, 1), q_lens=(1, 2, 1), page_size=page_size, heads=heads)


def around_pages(page_size: int) -> dict[str, tuple[int, ...]]:
    """Lengths that end at, before and just after a page's end, and those of a block."""
    ends = (page_size, 64 - page_size, 64, 64 + page_size, 640)
    lengths = (0, 1, *(end + more for end in ends for more in (-1, 0, 1)))
    return {"kv_lens": lengths, "q_lens": (1,) * len(lengths), "page_size": page_size}


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 16, 32, 128])
@SMALL_PAGES
def test_small_pages(page_size, heads):
    """What lies past a length is NaN, and entries past the last page are none of a page."""
    run(heads=heads, **around_pages(page_size))


@pytest.mark.gpu
@FP8_FORMATS
@FP8_HEADS
@SMALL_PAGES
def test_small_pages_of_fp8(page_size, heads, format):
    run(heads=heads, format=format, tensor_scale=0.05, **around_pages(page_size))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "format"), [(64, "bf16"), *((16, each) for each in HALF_AND_FP8)]
)
@SMALL_PAGES
@pytest.mark.parametrize(
    "fields",
    [
        {"num_layers": 2},
        {"wide_indices": True},
        {"mask": "null", "sink": "mixed", "sharpness": -2.0},
        {"num_workers": 3, "tile": 16},
        {"kv_lens": (5000, 3, 4097), "q_lens": (1, 2, 1)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_small_pages_with_other_arguments(fields, page_size, heads, format):
    """Queries of a request see different ends, some of them before the last page."""
    given = {"kv_lens": (400, 65, 9, 0), "q_lens": (20, 1, 9, 1), **fields}
    run(page_size=page_size, heads=heads, format=format, **given)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "format"), [(64, "bf16"), (16, "bf16"), (16, "fp8_block128")])
@SMALL_PAGES
@pytest.mark.parametrize("seed", range(5))
def test_small_pages_in_random_batches(seed, page_size, heads, format):
    draw = Random(seed)
    q_lens = tuple(draw.choice([1, 1, 1, 0, 2, 4]) for _ in range(draw.choice([1, 7, 150])))
    kv_lens = tuple(max(q, draw.randrange(2000)) for q in q_lens)
    batch = {"kv_lens": kv_lens, "q_lens": q_lens}
    run(seed=seed, page_size=page_size, heads=heads, format=format, **batch)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("mask", ["causal", "null"])
def test_dtypes_and_masks(dtype, mask, heads):
    run(kv_lens=(500, 65), q_lens=(3, 2), dtype=dtype, format=dtype, mask=mask, heads=heads)


@pytest.mark.gpu
@KERNELS
@pytest.mark.parametrize("sharpness", [-2.0, 0.0, 0.01, 30.0])
def test_scales(sharpness, heads):
    run(kv_lens=(500, 65), q_lens=(1, 2), sharpness=sharpness, heads=heads)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [5, 16, 31, 70])
@pytest.mark.parametrize("sink", ["finite", "mixed"])
def test_sinks(sink, heads):
    run(kv_lens=(4000, 65, 0), q_lens=(1, 2, 1), sink=sink, heads=heads)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [7, 16, 32, 64])
@pytest.mark.parametrize("tile", [16, 64, 128])
@pytest.mark.parametrize("num_workers", [1, 3, 50])
def test_plans(tile, num_workers, heads):
    run(
        kv_lens=(900, 65, 0, 130),
        q_lens=(1, 2, 1, 1),
        tile=tile,
        num_workers=num_workers,
        heads=heads,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_fixed_splits_do_not_depend_on_the_batch(heads):
    """The case asks for the same bits of a request alone."""
    run(
        kv_lens=(900, 65, 0, 130, 700),
        q_lens=(1, 2, 1, 1, 9),
        heads=heads,
        num_workers=5,
        tile=64,
        fixed_split=256,
    )


@pytest.mark.gpu
@KERNELS
@pytest.mark.parametrize("fields", [{"deterministic": True}, {"num_splits": 5}], ids=str)
def test_requests_that_are_cut_on_their_own_account(fields, heads):
    run(
        kv_lens=(5000, 65, 0, 2048, 2049, 2112),
        q_lens=(1,) * 6,
        implicit_starts=True,
        heads=heads,
        **fields,
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "fields",
    [
        {"num_layers": 2},
        {"wide_indices": True},
        {"implicit_starts": True, "q_lens": (1, 1)},
        {"q_rope_dtype": "bf16"},
        {"given_results": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
@KERNELS
def test_forms_of_arguments(fields, heads):
    run(**{"kv_lens": (400, 65), "q_lens": (2, 1), "heads": heads, **fields})


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(40))
def test_random_batches(seed):
    draw = Random(seed)
    batch = draw.choice([1, 2, 7, 40, 150])
    most = 200_000 // batch // draw.choice([1, 4])
    q_lens = tuple(draw.choice([1, 1, 1, 0, 2, 4]) for _ in range(batch))
    kv_lens = tuple(max(q, draw.randrange(min(most, 9000))) for q in q_lens)
    run(
        seed=seed,
        kv_lens=kv_lens,
        q_lens=q_lens,
        heads=draw.choice([1, 8, 16, 32, 64, 128]),
        sink=draw.choice(["", "finite"]),
    )


@pytest.mark.gpu
@FP8_FORMATS
@FP8_HEADS
@pytest.mark.parametrize(("kv_lens", "q_lens"), LENGTHS.values(), ids=LENGTHS.keys())
def test_fp8_lengths(kv_lens, q_lens, heads, format):
    run(kv_lens=kv_lens, q_lens=q_lens, heads=heads, format=format, tensor_scale=0.05)


@pytest.mark.gpu
@FP8_FORMATS
@pytest.mark.parametrize("heads", [1, 7, 9, 17, 31, 33, 64, 100])
def test_fp8_heads(heads, format):
    run(kv_lens=(300, 64, 1), q_lens=(2, 1, 1), heads=heads, format=format, sink="finite")


@pytest.mark.gpu
@FP8_FORMATS
@KERNELS
@pytest.mark.parametrize("page_size", [64, 192, 1024])
def test_fp8_pages(page_size, heads, format):
    run(
        heads=heads,
        kv_lens=(1500, 130, 1),
        q_lens=(1, 2, 1),
        page_size=page_size,
        format=format,
        num_layers=2,
    )


@pytest.mark.gpu
@FP8_HEADS
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("on_device", [False, True], ids=["float", "tensor"])
def test_fp8_tensor_scales(dtype, on_device, heads):
    run(
        kv_lens=(500, 65),
        q_lens=(3, 2),
        dtype=dtype,
        format="fp8",
        heads=heads,
        tensor_scale=0.01,
        tensor_scale_on_device=on_device,
    )


@pytest.mark.gpu
@FP8_FORMATS
@FP8_HEADS
@pytest.mark.parametrize("sharpness", [-2.0, 0.0, 0.01, 30.0])
def test_fp8_scales_of_scores(sharpness, heads, format):
    run(
        kv_lens=(500, 65),
        q_lens=(1, 2),
        sharpness=sharpness,
        heads=heads,
        format=format,
        mask="null",
        sink="mixed",
    )


@pytest.mark.gpu
@FP8_FORMATS
@FP8_HEADS
@pytest.mark.parametrize(("tile", "num_workers"), [(16, 3), (64, 1), (64, 50), (128, 3)])
def test_fp8_plans(tile, num_workers, heads, format):
    run(
        kv_lens=(900, 65, 0, 130),
        q_lens=(1, 2, 1, 1),
        tile=tile,
        num_workers=num_workers,
        heads=heads,
        format=format,
    )


@pytest.mark.gpu
@FP8_FORMATS
@FP8_HEADS
def test_fp8_turns_go_on_from_unit_to_unit(heads, format):
    """Two scorers share the blocks."""
    run(**MANY_UNITS, q_lens=(1,) * 10, heads=heads, format=format)


@pytest.mark.gpu
@FP8_FORMATS
@pytest.mark.parametrize("seed", range(20))
def test_fp8_random_batches(seed, format):
    draw = Random(seed)
    batch = draw.choice([1, 2, 7, 40, 150])
    q_lens = tuple(draw.choice([1, 1, 1, 0, 2, 4]) for _ in range(batch))
    most = min(100_000 // batch, 9000)
    kv_lens = tuple(max(q, draw.randrange(most)) for q in q_lens)
    run(
        seed=seed,
        kv_lens=kv_lens,
        q_lens=q_lens,
        format=format,
        heads=draw.choice([1, 8, 16, 32, 64, 128]),
        sink=draw.choice(["", "finite"]),
    )


def with_sizes(format: str, sizes: list[float]) -> tuple[PagedLatentCache, torch.Tensor]:
    """A cache of one request, its rows of these sizes in turn, and what was written."""
    cache = PagedLatentCache.allocate(
        DecodeCase(**ROW).row, format, num_pages=8, page_size=64, device="cuda"
    )
    own = torch.Generator().manual_seed(0)
    rows = torch.randn(512, 576, generator=own)
    rows *= torch.tensor(sizes).repeat(512 // len(sizes) + 1)[:512, None]
    rows[:, 512:] = torch.randn(512, 64, generator=own)
    layer = cache.layer(0)
    layer.write(torch.arange(512, device="cuda"), rows.cuda())
    return cache, layer.read(torch.arange(512, device="cuda")).double()


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 32, 128])
@pytest.mark.parametrize("format", ["bf16", "fp16", *FP8])
@pytest.mark.parametrize("step", [0.4, 3.0, 7.9, 8.1, 40.0])
def test_scores_that_rise_and_fall_from_block_to_block(step, format, heads):
    """By so many powers of two: a peak stays what it was until a score is far above it."""
    row, dtype = DecodeCase(**ROW).row, torch.float16 if format == "fp16" else torch.bfloat16
    cache = PagedLatentCache.allocate(row, format, num_pages=10, page_size=64, device="cuda")
    own = torch.Generator().manual_seed(0)
    rows = torch.randn(640, 576, generator=own) / 4
    rows[:, 0] = step * log(2) * (torch.arange(640) // 64)
    slots = torch.arange(640, device="cuda")
    cache.layer(0).write(slots, rows.cuda())
    stored = cache.layer(0).read(slots).double().cpu()
    q = torch.randn(2, heads, 576, generator=own) / 16
    q[:, 0::2, 0], q[:, 1::2, 0] = 1.0, -1.0
    q = q.to(dtype)
    pages = torch.arange(10, dtype=torch.int32, device="cuda").expand(2, 10)
    lens = torch.tensor([640, 577], dtype=torch.int32, device="cuda")
    with mock.patch("mlakit.kernels.hopper.decode.FEW_BLOCKS", 0):
        given = {"softmax_scale": 1.0, "backend": "hopper"}
        results = mla_decode(q.cuda(), cache, pages, lens, **given)
    exact, naive = (
        reference.mla_decode(
            q, [stored, stored[:577]], (1, 1), softmax_scale=1.0, v_width=512, dtype=dtype
        )
        for dtype in (torch.float64, torch.float32)
    )
    for name, *each in zip(("out", "lse"), results, exact, naive, strict=True):
        assert_matches(name, each[0].cpu(), *each[1:])


@pytest.mark.gpu
@KERNELS
@pytest.mark.parametrize("format", ["fp8_token", "fp8_block128"])
@pytest.mark.parametrize(
    "sizes", [[1.0], [1e-6, 1e3, 1.0], [1e12], [1e-12], [1e-3] * 400 + [1e6] + [1e-3] * 111]
)
def test_fp8_rows_of_any_size(sizes, format, heads):
    """Halves have little range; what rows are multiplied with must be brought to it."""
    cache, rows = with_sizes(format, sizes)
    own = torch.Generator().manual_seed(1)
    # not beyond: where scores reach 2**30, float32 no longer tells how far one is from the largest
    q = torch.randn(1, heads, 576, generator=own)
    q *= 2.0 ** torch.arange(-60, 20, 5).repeat(heads // 16)[:, None]
    q[..., :512] /= rows[:, :512].abs().max().item()
    q = q.bfloat16().cuda()
    table = torch.arange(8, dtype=torch.int32, device="cuda")[None]
    lens = torch.tensor([512], dtype=torch.int32, device="cuda")
    with mock.patch("mlakit.kernels.hopper.decode.FEW_BLOCKS", 0):
        got, lse = mla_decode(q, cache, table, lens, softmax_scale=0.1, backend="hopper")
    scores = q[0].double() @ rows.T * 0.1
    want = scores.softmax(-1) @ rows[:, :512]
    assert torch.allclose(lse[0].double(), scores.logsumexp(-1), rtol=1e-4, atol=1e-4)
    error = (got[0].double() - want).abs().amax(-1)
    assert (error <= 2.0**-7 * want.abs().amax(-1)).all(), error / want.abs().amax(-1)


@pytest.mark.gpu
@FP8_FORMATS
@KERNELS
@pytest.mark.parametrize("column", [0, 200, 511])
def test_fp8_nan_that_is_seen_is_seen(column, heads, format):
    cache, _ = with_sizes(format, [1.0])
    cache.payload.view(torch.uint8)[0, 7, 63, column] = 0xFF
    q = torch.ones(2, heads, 576, dtype=torch.bfloat16, device="cuda")
    table = torch.arange(8, dtype=torch.int32, device="cuda").expand(2, 8)
    lens = torch.tensor([512, 511], dtype=torch.int32, device="cuda")
    with mock.patch("mlakit.kernels.hopper.decode.FEW_BLOCKS", 0):
        out, lse = mla_decode(q, cache, table, lens, softmax_scale=0.1, backend="hopper")
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert out[1].isfinite().all()


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


@pytest.mark.parametrize(("page_size", "rows"), [(8, 32), (16, 64), (32, 64), (64, 64)])
def test_the_kernel_for_many_heads_leaves_the_smallest_pages_to_the_other(page_size, rows):
    assert variant_of(128, page_size=page_size).rows == rows


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
def test_registers_of_warps_are_no_more_than_there_are(heads, format):
    """Spills as compiled are checked by `support --compile`; here, that the adder has a share."""
    from mlakit.kernels.hopper.decode import _fp8_warps

    warps = _fp8_warps(heads, format)
    scorers, scorer, producer = (
        warps[name] for name in ("SCORERS", "SCORER_REGISTERS", "PRODUCER_REGISTERS")
    )
    groups = scorers + 2  # of four warps
    assert warps["maxnreg"] * groups * 128 <= 65_536
    adder = warps["maxnreg"] * groups - scorers * scorer - producer
    assert 4 * heads + 80 < adder <= 256  # its sums, and values as words and as halves
    assert all(registers % 8 == 0 for registers in (scorer, producer, adder))


def problem(**fields: object) -> Problem:
    row = DecodeCase(**ROW).row
    given = {"dtype": "torch.bfloat16", "format": "bf16", "heads": 16, "page_size": 64, "row": row}
    return Problem("cuda", 90, **{**given, "mask": "causal", **fields})


@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 192])
def test_it_is_the_first_choice(page_size):
    assert dispatch.select("mla_decode", problem(page_size=page_size)).backend == "hopper"


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
        ({"page_size": 24}, "needs pages of 8, 16, 32 or a multiple of 64 rows, got 24"),
        ({"page_size": 4}, "needs pages of 8, 16, 32 or a multiple of 64 rows, got 4"),
        ({"page_size": 96}, "needs pages of 8, 16, 32 or a multiple of 64 rows, got 96"),
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
