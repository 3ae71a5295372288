"""Hopper's sparse kernels over rows whose rotated columns are a tensor of their own."""

from __future__ import annotations

import pytest
import torch

from mlakit import PagedLatentCache, RowShape, sparse_mla
from mlakit.dispatch import selection
from mlakit.dispatch.specs import Problem, Use, pretending
from mlakit.tools.testing import assert_same_bits
from tests.kernels.hopper.sparse_cases import run
from tests.pairs import pairwise

KINDS = {
    "bf16": ("bf16_split", "bf16", "m64_bf16"),
    "fp16": ("fp16_split", "fp16", "m64_bf16"),
    "fp8": ("fp8_split", "bf16", "m64_fp8_kv"),
    "fp8 fp16 q": ("fp8_split", "fp16", "m64_fp8_kv"),
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@pytest.mark.gpu
@pairwise(
    kind=KINDS,
    heads=[5, 64, 130],
    page_size=[1, 7, 64],
    padded=[False, True],
    num_layers=[1, 2],
)
def test_rows_in_two_tensors(kind, heads, page_size, padded, num_layers):
    """Half of the rows of the cache are NaN; a padded one has gaps of two widths."""
    format, dtype, kernel = kind
    run(
        f"hopper:{kernel}",
        format=format,
        dtype=dtype,
        tensor_scale=0.3 if kernel == "m64_fp8_kv" else 1.0,
        heads=heads,
        page_size=page_size,
        num_pages=6 if page_size > 1 else 150,
        padded=padded,
        num_layers=num_layers,
        sink="mixed",
    )


@pytest.mark.gpu
@EVERY_KIND
def test_results_are_those_of_joined_rows_bit_by_bit(kind):
    format, dtype, kernel = kind
    own = torch.Generator().manual_seed(0)
    values = torch.randn(256, 576, generator=own).cuda()
    q = torch.randn(3, 64, 576, generator=own).cuda()
    q = q.to({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
    lists = torch.randint(-1, 256, (3, 200), generator=own).int().cuda()
    results = []
    for name in (format, format.removesuffix("_split")):
        pool = PagedLatentCache.allocate(
            RowShape(512, 64), name, num_pages=4, page_size=64, device="cuda"
        )
        pool.layer(0).write(torch.arange(256).cuda(), values)
        results.append(sparse_mla(q, pool, lists, softmax_scale=0.1, backend=f"hopper:{kernel}"))
    for name, *each in zip(("out", "lse", "max_logits"), *results, strict=True):
        assert_same_bits(name, *each)


def problem(**fields: object) -> Problem:
    given = {"dtype": "torch.bfloat16", "format": "bf16_split", "heads": 64, "page_size": 64}
    return Problem("cuda", 90, **{**given, "row": RowShape(512, 64), **fields})


@EVERY_KIND
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("page_size", [1, 24, 64])
def test_the_kernel_that_takes_them(kind, heads, page_size):
    format, dtype, kernel = kind
    name = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[dtype]
    call = problem(format=format, dtype=name, heads=heads, page_size=page_size)
    assert selection.select("sparse_mla", call).name == f"hopper:{kernel}"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        # a tile of 64 rotated columns would end in other memory
        (
            {"row": RowShape(520, 56, 512)},
            "needs 512 + 64 or 512 + 0 columns in rows of bf16_split, got 520 + 56",
        ),
        ({"uses": (Use.SPLIT_EXTRA,)}, "takes no split extra cache"),
        (
            {"format": "fp16_split"},
            "needs queries of torch.float16 with rows of fp16_split, got torch.bfloat16",
        ),
    ],
    ids=["columns", "extra", "dtype"],
)
def test_reasons(fields, reason):
    assert selection.explain_kernels("sparse_mla", problem(**fields))["hopper:m64_bf16"] == reason


def test_unaligned_rope_columns_are_refused():
    ckv = torch.zeros(4, 64, 512, dtype=torch.bfloat16)
    kpe = torch.zeros(4, 64, 68, dtype=torch.bfloat16)[..., 4:]
    cache, rows = PagedLatentCache.wrap_split(ckv, kpe), torch.zeros(1, 8).int()
    q = torch.zeros(1, 64, 576, dtype=torch.bfloat16)
    with pretending(90, 132), pytest.raises(NotImplementedError, match="unaligned rows of the"):
        sparse_mla(q, cache, rows, softmax_scale=0.1, backend="hopper")
