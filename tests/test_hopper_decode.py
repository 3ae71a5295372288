"""The Gluon decode kernels: what they take, held to the oracle on poisoned caches."""

from __future__ import annotations

from random import Random
from unittest import mock

import pytest
import torch

from mlakit import PagedLatentCache, dispatch
from mlakit.checks import UnsupportedError
from mlakit.geometry import RowShape
from mlakit.specs import Problem, pretending
from mlakit.workloads import DecodeCase

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


@pytest.mark.parametrize(
    ("heads", "rows"),
    [(1, 8), (7, 8), (8, 8), (9, 16), (16, 16), (17, 32), (31, 32), (32, 32), (33, 64), (200, 64)],
)
def test_few_heads_are_not_padded_to_many(heads, rows):
    from mlakit.kernels.hopper.decode import variant_for
    from mlakit.kernels.hopper.decode_few_kernel import mla_decode_few_kernel

    layer = PagedLatentCache.allocate(RowShape(512, 64), num_pages=1, page_size=64).layer(0)
    variant = variant_for(layer, torch.empty(1, 1 << 20, dtype=torch.int32), heads, num_tokens=1)
    assert variant.rows == rows
    assert (variant.kernel is mla_decode_few_kernel) == (heads <= 32)
    little = variant_for(layer, torch.empty(1, 2, dtype=torch.int32), heads, num_tokens=1)
    assert little.rows == min(rows, 32)


def problem(**fields: object) -> Problem:
    row = DecodeCase(**ROW).row
    given = {"dtype": "torch.bfloat16", "format": "bf16", "heads": 16, "page_size": 64, "row": row}
    return Problem("cuda", 90, **{**given, "mask": "causal", **fields})


def test_it_is_the_first_choice():
    assert dispatch.select("mla_decode", problem()).backend == "hopper"


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
        ({"row": DecodeCase().row}, "needs rows of 576/512, got 40/32"),
        ({"page_size": 16}, "needs pages of a multiple of 64 rows, got 16"),
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


@pytest.mark.parametrize("q_rope_dtype", ["fp16", "fp32", "e4m3"])
def test_a_rope_part_of_another_dtype_is_left_to_the_portable_kernel(q_rope_dtype):
    trial = DecodeCase(**ROW, page_size=64, q_rope_dtype=q_rope_dtype).trial("cpu")
    with pretending(90), pytest.raises(UnsupportedError, match="takes no q_rope of another dtype"):
        trial.call("hopper")
