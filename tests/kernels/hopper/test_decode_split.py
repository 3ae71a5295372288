"""Hopper decode kernels over rows whose rotated columns are a tensor of their own."""

from __future__ import annotations

import pytest
import torch

from mlakit import PagedLatentCache, RowShape, mla_decode
from mlakit.cache import UNSHARDED
from mlakit.dispatch import selection
from mlakit.dispatch.specs import Problem, Use, pretending
from mlakit.kernels.arguments import DecodePlanArguments
from mlakit.model.masks import CAUSAL
from mlakit.ops.decode import decode_problem
from mlakit.ops.decode_plan import plan_mla_decode
from mlakit.tools.testing import assert_same_bits
from mlakit.tools.workloads import DecodeCase
from tests.kernels.hopper.decode_cases import ROW
from tests.pairs import pairwise

KINDS = {
    "bf16": ("bf16_split", "bf16"),
    "fp16": ("fp16_split", "fp16"),
    "fp8": ("fp8_split", "bf16"),
    "fp8 e4m3 q": ("fp8_split", "e4m3"),
}
SHORT = {"kv_lens": (130, 65, 0), "q_lens": (1, 1, 1)}
LONG = {"kv_lens": (2000, 64, 700), "q_lens": (1, 3, 2)}


def kernel_for(format: str, dtype: str, heads: int) -> str:
    """The kernel that decodes such rows, with much work where there are many heads."""
    if format != "fp8_split":
        return "small_m_bf16" if heads <= 32 else "m64_bf16"
    if heads <= 32:
        return "small_m_fp8_kv"
    return "m64_fp8_qk" if dtype == "e4m3" else "m64_fp8_kv"


@pytest.mark.gpu
@pairwise(kind=KINDS, heads=[5, 16, 32, 64], page_size=[16, 32, 64, 128], lengths=[SHORT, LONG])
def test_rows_in_two_tensors(kind, heads, page_size, lengths):
    format, dtype = kind
    scaled = {"tensor_scale": 0.3} if format == "fp8_split" else {}
    case = DecodeCase(
        **ROW,
        **lengths,
        **scaled,
        format=format,
        dtype=dtype,
        heads=heads,
        page_size=page_size,
        num_layers=2,
        sink="finite",
    )
    case.run("cuda", f"hopper:{kernel_for(format, dtype, heads)}")


@pytest.mark.gpu
@pairwise(page_size=[1, 8, 24, 96, 192], num_layers=[1, 2], lengths=[SHORT, LONG])
def test_m64_fp8_kv_with_any_pages(page_size, num_layers, lengths):
    """It loads rotated columns itself, row by row."""
    case = DecodeCase(
        **ROW,
        **lengths,
        format="fp8_split",
        tensor_scale=0.3,
        heads=64,
        page_size=page_size,
        num_layers=num_layers,
    )
    case.run("cuda", "hopper:m64_fp8_kv")


def with_gaps(dtype: torch.dtype) -> PagedLatentCache:
    """A split pool with NaNs between rows, more of them in the rotated columns."""
    ckv, kpe = (
        torch.full((4, 64, columns), torch.nan, device="cuda").to(dtype) for columns in (528, 112)
    )
    return PagedLatentCache.wrap_split(ckv[..., :512], kpe[..., :64])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("has_gaps", [False, True])
def test_results_are_those_of_joined_rows_bit_by_bit(kind, heads, has_gaps):
    format, dtype = kind
    row, own = RowShape(512, 64), torch.Generator().manual_seed(0)
    values, slots = torch.randn(256, 576, generator=own), torch.arange(256)
    q = torch.randn(2, heads, 576, generator=own)
    q = q.to({"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float8_e4m3fn))
    table = torch.tensor([[2, 0], [3, 1]]).int().cuda()
    lens = torch.tensor([100, 128]).int().cuda()
    results = []
    for name in (format, format.removesuffix("_split")):
        cache = PagedLatentCache.allocate(row, name, num_pages=4, page_size=64, device="cuda")
        if has_gaps and name == format:
            cache = with_gaps(cache.payload.dtype)
        cache.layer(0).write(slots.cuda(), values.cuda())
        backend = f"hopper:{kernel_for(format, dtype, heads)}"
        given = {"softmax_scale": 0.1, "backend": backend}
        results.append(mla_decode(q.cuda(), cache, table, lens, **given))
    for name, *each in zip(("out", "lse"), *results, strict=True):
        assert_same_bits(name, *each)


def problem(**fields: object) -> Problem:
    given = {"dtype": "torch.bfloat16", "format": "bf16_split", "heads": 16, "page_size": 64}
    return Problem("cuda", 90, **{**given, "mask": "causal", "row": RowShape(512, 64), **fields})


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("heads", [16, 64])
def test_the_kernel_that_takes_them(kind, heads):
    format, dtype = kind
    names = {"bf16": "bfloat16", "fp16": "float16", "e4m3": "float8_e4m3fn"}
    call = problem(format=format, dtype=f"torch.{names[dtype]}", heads=heads)
    assert selection.select("mla_decode", call).kernel == kernel_for(format, dtype, heads)


@pytest.mark.parametrize(
    ("heads", "page_size", "sizes"),
    [(16, 1, "8, 16, 32"), (16, 24, "8, 16, 32"), (64, 8, "16, 32"), (64, 96, "16, 32")],
)
def test_pages_that_need_a_gather_producer_are_refused(heads, page_size, sizes):
    """It finds rotated columns behind the latents of the same row."""
    kernel = "m64_bf16" if heads > 32 else "small_m_bf16"
    (spec,) = (each for each in selection.specs("mla_decode") if each.kernel == kernel)
    assert spec.why_not(problem(heads=heads, page_size=page_size)) == (
        f"needs pages of {sizes} or a multiple of 64 rows with bf16_split, got {page_size}"
    )
    fp8 = problem(heads=64, format="fp8_split", page_size=page_size)
    assert selection.select("mla_decode", fp8).kernel == "m64_fp8_kv"
    assert selection.select("mla_decode", problem(heads=64, page_size=page_size)).backend in (
        ("hopper",) if page_size == 8 else ("triton",)
    )


def steps_of(pages: int, rows: int) -> tuple[Use, ...]:
    """Uses of a cache whose latents have pages of so many rows, and its rotated columns others."""
    ckv = torch.zeros(4, pages, 512, dtype=torch.bfloat16)[:, :64]
    kpe = torch.zeros(4, rows, 72, dtype=torch.bfloat16)[:, :64, :64]
    layer = PagedLatentCache.wrap_split(ckv, kpe).layer(0)
    lens = torch.ones(1).int()
    with pretending(90):
        return decode_problem(
            DecodePlanArguments(
                layer=layer,
                page_table=torch.zeros(1, 1).int(),
                kv_lens=lens,
                q_starts=lens,
                shard=UNSHARDED,
                mask=CAUSAL,
                heads=16,
                num_tokens=1,
                dtype=torch.bfloat16,
            )
        ).uses


def test_rope_columns_at_other_steps_are_refused():
    assert steps_of(64, 64) == steps_of(70, 70) == ()
    assert steps_of(64, 66) == steps_of(70, 64) == (Use.OTHER_ROPE_STEPS,)
    refused = problem(uses=steps_of(64, 66))
    for spec in selection.specs("mla_decode"):
        if spec.backend == "hopper" and spec.kernel == "small_m_bf16":
            assert spec.why_not(refused) == "takes no rope columns at other steps"
    assert selection.select("mla_decode", refused).backend == "triton"


def test_unaligned_rope_columns_are_refused():
    ckv = torch.zeros(4, 64, 512, dtype=torch.bfloat16)
    kpe = torch.zeros(4, 64, 68, dtype=torch.bfloat16)[..., 4:]
    cache = PagedLatentCache.wrap_split(ckv, kpe)
    with pretending(90, 132), pytest.raises(NotImplementedError, match="unaligned rows of the"):
        plan_mla_decode(
            cache, torch.zeros(1, 1).int(), torch.ones(1).int(), heads=16, backend="hopper"
        )
