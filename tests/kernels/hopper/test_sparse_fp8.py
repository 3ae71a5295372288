"""Hopper's sparse kernels of FP8 rows, and what bf16 has in common with them, against the oracle.

Half of the rows of every cache are NaN. Lists repeat rows, have invalid ids and, past their length,
ids of poisoned rows.
"""

from __future__ import annotations

import pytest
import torch

from mlakit import PagedLatentCache, reference, sparse_mla
from mlakit.dispatch import selection
from mlakit.dispatch.specs import Problem
from mlakit.model.geometry import RowShape
from mlakit.ops import ExtraRows
from mlakit.plan import EvenSplit
from mlakit.tools.testing import assert_matches, assert_same_bits, poison
from mlakit.tools.workloads import SparseCase
from mlakit.tools.workloads.case import assert_logits_match
from mlakit.tools.workloads.fp16_rows import rounded_rows, rounds_rows
from tests.pairs import pairwise

KERNEL = "hopper:m64_fp8_kv"
SMALL_M = "hopper:small_m_fp8_kv"
FORMATS = ("fp8_block128", "fp8_block64", "fp8_token", "fp8")
SMALL_M_FORMATS = ("fp8_block128", "fp8_token")
BOTH_KERNELS = pytest.mark.parametrize("kernel", [KERNEL, SMALL_M], ids=["m64", "small_m"])
KERNELS_AND_FORMATS = {
    **{f"m64-{each}": (KERNEL, each) for each in FORMATS},
    **{f"small_m-{each}": (SMALL_M, each) for each in SMALL_M_FORMATS},
}
EVERY_FORMAT = pytest.mark.parametrize(
    ("kernel", "format"), KERNELS_AND_FORMATS.values(), ids=KERNELS_AND_FORMATS.keys()
)
WITH_BF16 = {"m64-bf16": ("hopper:m64_bf16", "bf16"), **KERNELS_AND_FORMATS}
EVERY_KERNEL = pytest.mark.parametrize(("kernel", "format"), WITH_BF16.values(), ids=WITH_BF16)
ROWS = dict.fromkeys(("bf16", *FORMATS), RowShape(512, 64, 512))
ROWS["fp8_block64"] = RowShape(448, 64, 512)


def run(kernel: str, format: str, **fields: object) -> None:
    """A case with pages of 64 rows, 64 heads and lists of 200 entries."""
    row = ROWS[format]
    given = {
        "kv_lora_rank": row.kv_lora_rank,
        "qk_rope_head_dim": row.qk_rope_head_dim,
        "v_width": row.v_width,
        "page_size": 64,
        "num_pages": 6,
        "heads": 64,
        "topk": 200,
        **fields,
    }
    SparseCase(format=format, **given).run("cuda", kernel)


@pytest.mark.gpu
@EVERY_FORMAT
@pytest.mark.parametrize("heads", [1, 33, 64, 65, 200])
def test_heads(heads, kernel, format):
    run(kernel, format, heads=heads, num_tokens=3, topk=150, sink="finite")


NO_ROPE = {"kv_lora_rank": 512, "qk_rope_head_dim": 0, "v_width": 0}
NO_ROPE_KERNELS = {
    name: each for name, each in KERNELS_AND_FORMATS.items() if each[1] != "fp8_block64"
}


@pytest.mark.gpu
@pairwise(
    kernel=NO_ROPE_KERNELS,
    heads=[1, 20, 64, 65],
    page_size=[1, 61, 64],
    with_extra={"one cache": False, "two caches": True},
)
def test_rows_without_rope_columns(kernel, heads, page_size, with_extra):
    """GLM-5.3-Flash has 528 bytes in rows of fp8_block128."""
    extra = {"extra_format": kernel[1], "extra_topk": 70} if with_extra else {}
    pages = {"page_size": page_size, "num_pages": max(300 // page_size, 3)}
    run(*kernel, **NO_ROPE, heads=heads, num_tokens=3, topk=150, sink="mixed", **pages, **extra)


@pytest.mark.gpu
@pairwise(
    topk=[1, 63, 64, 65, 128, 129, 1000, 2048],
    kernel=KERNELS_AND_FORMATS,
    with_lens={"lens": True, "whole": False},
)
def test_list_lengths(topk, kernel, with_lens):
    run(*kernel, topk=topk, with_lens=with_lens, num_tokens=4)


@pytest.mark.gpu
@pairwise(
    num_splits=[1, 2, 7, 32],
    kernel=KERNELS_AND_FORMATS,
    with_extra={"one cache": False, "two caches": True},
)
def test_splits(num_splits, kernel, with_extra):
    extra = {"extra_format": kernel[1], "extra_topk": 130} if with_extra else {}
    run(*kernel, num_splits=num_splits, topk=900, heads=70, sink="mixed", **extra)


@pytest.mark.gpu
@EVERY_FORMAT
@pytest.mark.parametrize("num_tokens", [0, 1, 133, 400])
def test_more_tiles_than_ctas(num_tokens, kernel, format):
    """Tiles of a CTA have odd and even numbers of blocks, some none."""
    run(kernel, format, num_tokens=num_tokens, heads=65, topk=300, num_splits=1)


@pytest.mark.gpu
@pairwise(
    kernel=KERNELS_AND_FORMATS,
    page_size=[1, 16, 61],
    padded={"packed": False, "padded": True},
)
def test_pages(kernel, page_size, padded):
    """With padded strides there are gaps between rows and between pages."""
    num_pages = max(600 // page_size, 3)
    run(*kernel, page_size=page_size, num_pages=num_pages, num_layers=3, padded=padded)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "format", "extra_page_size", "padded"),
    [
        *(
            (kernel, "fp8_block128", *cache)
            for kernel in (KERNEL, SMALL_M)
            for cache in ((64, False), (16, True), (3, True), (1, False))
        ),
        *(
            (kernel, format, *cache)
            for kernel, format in KERNELS_AND_FORMATS.values()
            if format != "fp8_block128"
            for cache in ((64, False), (3, True))
        ),
    ],
)
def test_second_cache(kernel, format, extra_page_size, padded):
    run(
        kernel,
        format,
        extra_format=format,
        extra_page_size=extra_page_size,
        extra_topk=130,
        num_layers=2,
        padded=padded,
        num_pages=12,
        num_tokens=9,
        sink="finite",
        tensor_scale=0.3,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("on_device", [False, True], ids=["float", "tensor"])
def test_tensor_scales(on_device, dtype):
    run(
        KERNEL,
        "fp8",
        dtype=dtype,
        tensor_scale=0.01,
        tensor_scale_on_device=on_device,
        num_tokens=4,
    )


@pytest.mark.gpu
def test_fp16_queries_of_rows_that_are_all_values():
    run(KERNEL, "fp8_block64", dtype="fp16", num_tokens=4)


@pytest.mark.gpu
@EVERY_FORMAT
@pytest.mark.parametrize("power_of_two", [False, True])
def test_scales_of_rows(power_of_two, kernel, format):
    run(kernel, format, power_of_two=power_of_two, num_tokens=4, sharpness=6.0)


@pytest.mark.gpu
@EVERY_FORMAT
@pytest.mark.parametrize("sharpness", [-2.0, 0.0, 0.01, 30.0])
def test_softmax_scales(sharpness, kernel, format):
    run(kernel, format, sharpness=sharpness)


@pytest.mark.gpu
@EVERY_FORMAT
def test_wide_indices_and_given_results(kernel, format):
    more = {"extra_format": format, "extra_topk": 70}
    run(kernel, format, wide_indices=True, given_results=True, padded=True, num_tokens=6, **more)


@pytest.mark.gpu
@EVERY_FORMAT
@pytest.mark.parametrize("seed", range(3))
def test_random_lists(seed, kernel, format):
    run(kernel, format, seed=seed, num_tokens=50, topk=100 + 37 * seed, heads=16 + 13 * seed)


def empty_cache(format: str, num_rows: int) -> PagedLatentCache:
    """A cache whose bytes are all NaN."""
    cache = PagedLatentCache.allocate(
        ROWS[format], format, num_pages=-(-num_rows // 64), page_size=64, device="cuda"
    )
    for stored in (cache.payload, cache.scales):
        if stored is not None:
            stored.view(torch.uint8).fill_(0xFF)
    return cache


def written_cache(format: str, rows: torch.Tensor) -> tuple[PagedLatentCache, torch.Tensor]:
    """A cache with these rows, and what it holds in float64."""
    cache = empty_cache(format, len(rows))
    slots = torch.arange(len(rows), device="cuda")
    cache.layer(0).write(slots, rows.cuda())
    return cache, cache.layer(0).read(slots, torch.float64)


def scales_of(stored: torch.Tensor) -> torch.Tensor:
    """The scales of written rows of fp8_block128: the largest value of a group is 448 of them."""
    return stored[:, :512].unflatten(-1, (4, 128)).abs().amax(-1) / 448


def check(
    kernel: str,
    format: str,
    q: torch.Tensor,
    stored: torch.Tensor,
    rows: torch.Tensor,
    results: tuple,
    scale: float = 0.05,
) -> None:
    arguments = (q.cpu(), stored.cpu(), rows.cpu())
    rounded = arguments
    if rounds_rows(q.device, kernel, format=format, heads=q.shape[1]):
        rounded = (arguments[0], rounded_rows(arguments[1], scales_of(stored.cpu())), arguments[2])
    exact, naive = (
        reference.sparse_mla(*each, softmax_scale=scale, v_width=512, dtype=dtype)
        for each, dtype in ((arguments, torch.float64), (rounded, torch.float32))
    )
    assert_matches("out", results[0].cpu(), exact[0], naive[0])
    largest = arguments[0].double().norm(dim=-1) * arguments[1].norm(dim=-1).amax() * scale
    for i, name in ((1, "lse"), (2, "max_logits")):
        assert_logits_match(name, results[i].cpu(), exact[i], naive[i], largest)


def magnitudes(format: str, sizes: list[float]) -> torch.Tensor:
    """512 rows whose latent columns have these magnitudes, one after the other."""
    own = torch.Generator().manual_seed(0)
    width = ROWS[format].width
    rows = torch.randn(512, width, generator=own)
    rows *= torch.tensor(sizes).repeat(512 // len(sizes) + 1)[:512, None]
    rows[:, -64:] = torch.randn(512, 64, generator=own)
    return rows


@pytest.mark.gpu
@pairwise(
    # without those of one scale for all rows
    kernel={name: each for name, each in KERNELS_AND_FORMATS.items() if each[1] != "fp8"},
    sizes={
        "1": [1.0],
        "1e6": [1e6],
        "1e-6": [1e-6],
        "1e-12": [1e-12],
        "1-and-1e5": [1.0, 1e5],
        "1e-3-to-1e3": [1e-3, 1e3, 1.0],
    },
    num_splits=[1, 4],
)
def test_rows_and_queries_of_any_magnitude(kernel, sizes, num_splits):
    """float16 has a small range: rows and queries are scaled into it before the product."""
    kernel, format = kernel
    if format == "fp8_block64" and max(sizes) < 1e-3:
        pytest.skip("rotated columns are values: they and far smaller latent ones share a range")
    cache, stored = written_cache(format, magnitudes(format, sizes))
    own = torch.Generator().manual_seed(1)
    q = torch.randn(2, 64, stored.shape[1], generator=own)
    q *= 2.0 ** torch.arange(-60, 20, 5).repeat(4)[:, None]
    q[..., :-64] /= stored[:, :-64].abs().max().item()
    q = q.bfloat16().cuda()
    rows = torch.randint(0, 512, (2, 512), generator=own).int().cuda()
    out, lse, _ = sparse_mla(
        q, cache, rows, softmax_scale=0.1, plan=EvenSplit(num_splits), backend=kernel
    )
    for token in range(2):
        listed = stored[rows[token].long()]
        scores = q[token].double() @ listed.T * 0.1
        want = scores.softmax(-1) @ listed[:, :512]
        want_lse = scores.logsumexp(-1)
        tolerance = 1e-4 + 1e-4 * want_lse.abs()
        if rounds_rows(q.device, kernel, format=format, heads=64):
            # half of a unit in float16's last place, of every product
            tolerance += 2.0**-12 * (q[token].double().abs() @ listed.T.abs() * 0.1).amax(-1)
        assert ((lse[token] - want_lse).abs() <= tolerance).all()
        error = (out[token].double() - want).abs().amax(-1)
        assert (error <= 2.0**-7 * want.abs().amax(-1)).all(), error / want.abs().amax(-1)


@pytest.mark.gpu
@EVERY_FORMAT
def test_rows_of_neighbouring_scales(kernel, format):
    """One large weight, then many small ones: no row may vanish beside one of twice its scale."""
    if format == "fp8":
        pytest.skip("one scale for all rows")
    own = torch.Generator().manual_seed(0)
    width = ROWS[format].width
    values = torch.randn(2048, width, generator=own) + 1.0
    values[:1024] /= 2
    # scores differ by 0.1 or so, but for that of the last row: it has 0.7 of the weight
    last = values[-1] - values[-1].mean()
    queries = torch.randn(2, 64, width, generator=own) / width**0.5
    queries += 85.0 * last / last.square().sum() - queries.mean(-1, keepdim=True)
    # the large weight and the large scales first, in one split: all probabilities are relative to
    # them
    rows = torch.arange(2048, dtype=torch.int32, device="cuda").flip(0).expand(2, -1)
    for exponent in range(-20, 10):
        size = 2.0**exponent * 448 / 3.7  # of rows whose scale is about 2**exponent
        cache, stored = written_cache(format, values * size)
        q = (queries / size).bfloat16().cuda()
        results = sparse_mla(q, cache, rows, softmax_scale=0.1, plan=EvenSplit(1), backend=kernel)
        check(kernel, format, q, stored, rows, results, 0.1)


@pytest.mark.gpu
@BOTH_KERNELS
def test_scales_are_not_rounded_to_16_bits(kernel):
    """A list of one row with one value: lse is 448 times its scale."""
    values = torch.full((64, 576), 0.0)
    values[:, 0] = 1.0 + torch.arange(64) / 4097.0
    cache, stored = written_cache("fp8_block128", values)
    q = torch.zeros(1, 64, 576, device="cuda", dtype=torch.bfloat16)
    q[..., 0] = 1.0
    rows = torch.arange(64, device="cuda", dtype=torch.int32)[:, None]
    q = q.expand(64, -1, -1).contiguous()
    _, lse, _ = sparse_mla(q, cache, rows, softmax_scale=1.0, backend=kernel)
    want = stored[:, 0]
    if kernel == KERNEL:
        want = rounded_rows(stored.cpu(), scales_of(stored.cpu()))[:, 0].cuda()
    assert torch.allclose(lse[:, 0].double(), want, rtol=2.0**-21, atol=0)
    assert torch.allclose(want, stored[:, 0], rtol=2.0**-11, atol=0)


@pytest.mark.gpu
@EVERY_FORMAT
@pytest.mark.parametrize("column", [0, 200, 447])
def test_nan_in_a_listed_row_reaches_its_token_only(column, kernel, format):
    cache, _ = written_cache(format, magnitudes(format, [1.0]))
    cache.payload.view(torch.uint8)[0, 7, 63, column] = 0xFF
    q = torch.ones(2, 64, ROWS[format].width, dtype=torch.bfloat16, device="cuda")
    rows = torch.arange(512, dtype=torch.int32, device="cuda").repeat(2, 1)
    rows[1, 511] = 0
    out, lse, max_logits = sparse_mla(q, cache, rows, softmax_scale=0.1, backend=kernel)
    for result in (out, lse, max_logits):
        assert result[0].isnan().all()
        assert result[1].isfinite().all()


@pytest.mark.gpu
@BOTH_KERNELS
@pytest.mark.parametrize("group", range(4))
@pytest.mark.parametrize("byte", [0xFF, 0x7F], ids=["nan", "large"])
def test_nan_scale_of_a_listed_row_reaches_its_token_only(byte, group, kernel):
    """0x7F7F7F7F is 3.4e38: products with it overflow."""
    cache, _ = written_cache("fp8_block128", magnitudes("fp8_block128", [1.0]))
    at = 512 + 4 * group
    cache.payload.view(torch.uint8)[0, 7, 63, at : at + 4] = byte
    q = torch.ones(2, 64, 576, dtype=torch.bfloat16, device="cuda")
    rows = torch.arange(512, dtype=torch.int32, device="cuda").repeat(2, 1)
    rows[1, 511] = 0
    out, lse, max_logits = sparse_mla(q, cache, rows, softmax_scale=0.1, backend=kernel)
    for result in (out, lse, max_logits):
        assert byte != 0xFF or result[0].isnan().all()
        assert result[1].isfinite().all()


@pytest.mark.gpu
@pairwise(kernel=WITH_BF16, first_valid=[1, 64, 300, 512], num_splits=[1, 3])
def test_lists_with_invalid_blocks(kernel, first_valid, num_splits):
    kernel, format = kernel
    cache, stored = written_cache(format, magnitudes(format, [1.0])[:256])
    rows = torch.randint(0, 256, (5, 512), device="cuda", dtype=torch.int32)
    rows[:2, :first_valid] = -1
    rows[2, first_valid:] = -1
    rows[3] = 2**31 - 1
    q = torch.randn(5, 64, stored.shape[1], device="cuda").bfloat16()
    results = sparse_mla(
        q, cache, rows, softmax_scale=0.05, plan=EvenSplit(num_splits), backend=kernel
    )
    check(kernel, format, q, stored, rows, results)


@pytest.mark.gpu
@EVERY_FORMAT
@pytest.mark.parametrize("size", [1.0, 1e6])
def test_one_entry_of_a_block_counts(size, kernel, format):
    """Any of 64, after a block in which none counts: what scales a block is found in every lane."""
    if format == "fp8":
        size = min(size, 50.0)  # without a scale of its own e4m3 ends at 448
    cache, stored = written_cache(format, magnitudes(format, [size])[:64])
    rows = torch.full((64, 128), -1, device="cuda", dtype=torch.int32)
    each = torch.arange(64, device="cuda")
    rows[each, 64 + each] = each.int()
    q = torch.randn(64, 16, stored.shape[1], device="cuda").bfloat16()
    results = sparse_mla(q, cache, rows, softmax_scale=0.05 / size, backend=kernel)
    check(kernel, format, q, stored, rows, results, scale=0.05 / size)


@pytest.mark.gpu
@EVERY_KERNEL
def test_infinite_queries_over_invalid_entries(kernel, format):
    """0 · inf is NaN: the scores of invalid entries must not be computed with."""
    cache, _ = written_cache(format, magnitudes(format, [1.0])[:128])
    q = torch.randn(2, 64, ROWS[format].width, device="cuda").bfloat16()
    q[0, 0, 3], q[1, 1, 5] = torch.inf, torch.nan
    rows = torch.full((2, 128), -1, device="cuda", dtype=torch.int32)
    out, lse, max_logits = sparse_mla(q, cache, rows, softmax_scale=0.05, backend=kernel)
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert (max_logits == -torch.inf).all()
    rows[:, 70] = 5
    out, lse, _ = sparse_mla(q, cache, rows, softmax_scale=0.05, backend=kernel)
    others = torch.ones(2, 64, dtype=torch.bool, device="cuda")
    others[0, 0] = others[1, 1] = False
    assert out[others].isfinite().all()
    assert lse[others].isfinite().all()
    assert lse[1, 1].isnan()


@pytest.mark.gpu
@EVERY_FORMAT
def test_millions_of_rows(kernel, format):
    """Addresses past 2**31 bytes, and past 2**31 words."""
    num_rows = 14 * 2**20
    cache = empty_cache(format, num_rows)
    slots = torch.randperm(num_rows, device="cuda")[:512]
    slots[0] = num_rows - 1
    cache.layer(0).write(slots, magnitudes(format, [1.0]).cuda())
    q = torch.randn(3, 64, ROWS[format].width, device="cuda").bfloat16()
    place = torch.randint(0, 512, (3, 256), device="cuda")
    place[:, 0] = 0
    results = sparse_mla(q, cache, slots[place].int(), softmax_scale=0.05, backend=kernel)
    check(kernel, format, q, cache.layer(0).read(slots, torch.float64), place.int(), results)


@pytest.mark.gpu
@EVERY_KERNEL
@pytest.mark.parametrize("num_tokens", [2, 300])
def test_graphs_replay_with_other_lists(num_tokens, kernel, format):
    """With 2 tokens lists are split."""
    cache, stored = written_cache(format, magnitudes(format, [1.0]))
    q = torch.randn(num_tokens, 128, stored.shape[1], device="cuda").bfloat16()
    integers = {"device": "cuda", "dtype": torch.int32}
    lists = [torch.randint(-20, 520, (num_tokens, 700), **integers) for _ in range(2)]
    lens = [torch.randint(0, 701, (num_tokens,), **integers) for _ in range(2)]
    rows, topk_lens = lists[0].clone(), lens[0].clone()

    def call():
        return sparse_mla(q, cache, rows, topk_lens=topk_lens, softmax_scale=0.05, backend=kernel)

    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    for i in (1, 0):
        rows.copy_(lists[i])
        topk_lens.copy_(lens[i])
        for result in results:
            poison(result)
        graph.replay()
        cut = torch.where(torch.arange(700, device="cuda") < topk_lens[:, None], rows, -1)
        own = slice(0, 2)
        check(kernel, format, q[own], stored, cut[own], tuple(result[own] for result in results))


@pytest.mark.gpu
@EVERY_FORMAT
def test_replayed_launches_give_the_same_bits(kernel, format):
    cache, _ = written_cache(format, magnitudes(format, [1.0]))
    extra, _ = written_cache(format, magnitudes(format, [1.0])[:64])
    q = torch.randn(9, 16, ROWS[format].width, device="cuda").bfloat16()
    rows = torch.randint(-20, 520, (9, 300), device="cuda", dtype=torch.int32)
    more = ExtraRows(extra, rows[:, :70] % 64)
    results = [
        sparse_mla(q, cache, rows, extra=more, softmax_scale=0.05, backend=kernel) for _ in range(4)
    ]
    for other in results[1:]:
        for name, got, want in zip(("out", "lse", "max_logits"), other, results[0], strict=True):
            assert_same_bits(name, got, want)


def problem(format: str, dtype: str = "torch.bfloat16", **fields: object) -> Problem:
    given = {"heads": 64, "page_size": 64, "row": ROWS[format], **fields}
    return Problem("cuda", arch=90, format=format, dtype=dtype, **given)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("heads", "tokens", "small_m_formats"),
    [
        (1, 1, SMALL_M_FORMATS),
        (32, 4000, SMALL_M_FORMATS),
        (33, 1, ()),
        # tiles of 32 heads would fill the 132 SMs once
        (64, 66, ()),
        (128, 33, ()),
        (128, 128, ()),
    ],
)
def test_kernel_by_heads_and_tokens(heads, tokens, small_m_formats, format):
    given = problem(format, heads=heads, num_tokens=tokens, num_sms=132)
    want = SMALL_M if format in small_m_formats else KERNEL
    assert selection.select("sparse_mla", given).name == want


@pytest.mark.parametrize("format", ["fp8_block128", "fp8_token", "fp8"])
def test_kernel_of_rows_without_rope_columns(format):
    given = problem(format, row=RowShape(512, 0))
    assert selection.select("sparse_mla", given).name == KERNEL


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            problem("fp8_block128", "torch.float16"),
            "needs queries of torch.bfloat16 with rows of fp8_block128, got torch.float16",
        ),
        (
            problem("fp8_token", "torch.float8_e4m3fn"),
            "needs queries of torch.bfloat16 with rows of fp8_token, got torch.float8_e4m3fn",
        ),
        (
            problem("fp8_block64", row=RowShape(512, 64)),
            "needs 448 + 64 columns in rows of fp8_block64, got 512 + 64",
        ),
        (
            problem("fp8", row=RowShape(448, 64, 512)),
            "needs 512 + 64 or 512 + 0 columns in rows of fp8, got 448 + 64",
        ),
    ],
    ids=["fp16-q", "e4m3-q", "block64-576", "fp8-512"],
)
def test_reasons(given, reason):
    assert selection.explain_kernels("sparse_mla", given)[KERNEL] == reason
    assert selection.select("sparse_mla", given).backend == "triton"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "format"),
    [
        (KERNEL, "fp8"),
        *((each, format) for each in (KERNEL, SMALL_M) for format in SMALL_M_FORMATS),
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 5, 150])
def test_rotated_queries_apart(num_tokens, kernel, format):
    """Also with tails of their own, and rows of q_rope at other distances than those of q."""
    given = {"heads": 70, "num_tokens": num_tokens, "num_pages": 30, "padded": num_tokens == 5}
    run(kernel, format, q_rope_dtype="bf16", **given)
