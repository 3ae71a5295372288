"""Hopper decode kernels, compared with the oracle on poisoned caches."""

from __future__ import annotations

from math import log

import pytest
import torch

from mlakit import PagedLatentCache, mla_decode, reference
from mlakit.tools.testing import assert_matches
from mlakit.tools.workloads import DecodeCase
from mlakit.tools.workloads.fp16_rows import block_scales, rounded_rows, rounds_rows
from tests.kernels.hopper.decode_cases import (
    BATCHES,
    BF16_AND_FP8,
    FEW_PAGE_SIZES,
    FP8,
    HEADS,
    KERNELS,
    LENGTHS,
    PAGE_SIZES_NOT_OF_64,
    ROW,
    around_pages,
    kernel_for,
    random_batch,
    run,
)
from tests.pairs import pairwise


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [33, 128])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_small_m_bf16_with_more_than_32_heads(lengths, heads):
    kv_lens, q_lens = LENGTHS[lengths]
    run(kv_lens=kv_lens, q_lens=q_lens, heads=heads, m64=False)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "format", "more"),
    [
        (32, "bf16", {"num_ctas": 3, "tile": 64}),
        (8, "bf16", {"page_size": 1}),
        (16, "fp16", {"sink": "finite", "page_size": 8}),
        (40, "bf16_split", {}),
    ],
    ids=str,
)
def test_rows_of_256_latent_columns(heads, format, more):
    case = DecodeCase(
        kv_lora_rank=256,
        qk_rope_head_dim=64,
        kv_lens=(300, 64, 1, 0),
        q_lens=(2, 1, 1, 0),
        heads=heads,
        format=format,
        dtype=format.removesuffix("_split"),
        **{"page_size": 64, **more},
    )
    case.run("cuda", "hopper:small_m_bf16")


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEADS)
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
@pytest.mark.parametrize(
    ("page_size", "heads"),
    [
        *((page_size, (8, 32)[place % 2]) for place, page_size in enumerate(PAGE_SIZES_NOT_OF_64)),
        (16, 64),  # the smallest TMA tile of m64_bf16
    ],
)
def test_page_sizes_not_of_64(page_size, heads):
    """Rows past a length are NaN, and table entries past the last page name no page.

    The kernels for 16 and 64 heads are those of `test_page_sizes_not_of_64_with_other_arguments`.
    """
    run(heads=heads, **around_pages(page_size))


FIELDS_WITH_PAGES = {
    "num_layers": {"num_layers": 2},
    "wide_indices": {"wide_indices": True},
    "mask": {"mask": "null", "sink": "mixed", "sharpness": -2.0},
    "num_ctas": {"num_ctas": 3, "tile": 16},
    "long": {"kv_lens": (5000, 3, 4097), "q_lens": (1, 2, 1)},
}
HEADS_AND_FORMATS = {
    "m64": {"heads": 64, "format": "bf16"},
    **{f"small_m-{each}": {"heads": 16, "format": each} for each in BF16_AND_FP8},
}


@pytest.mark.gpu
@pairwise(page_size=FEW_PAGE_SIZES, kernel=HEADS_AND_FORMATS, fields=FIELDS_WITH_PAGES)
def test_page_sizes_not_of_64_with_other_arguments(page_size, kernel, fields):
    """The last key that a query sees differs by query and may be before the last page."""
    given = {"kv_lens": (400, 65, 9, 0), "q_lens": (20, 1, 9, 1), **fields}
    run(page_size=page_size, **kernel, **given)


@pytest.mark.gpu
@pairwise(page_size=FEW_PAGE_SIZES, heads=[16, 64], dtype=["bf16", "fp16"], batch=[1, 7, 150])
def test_page_sizes_not_of_64_in_random_batches(page_size, heads, dtype, batch):
    given = {"page_size": page_size, "heads": heads, "dtype": dtype, "format": dtype}
    run(seed=batch, **given, **random_batch(batch, longest=2000))


@pytest.mark.gpu
@pairwise(heads=[8, 16, 32, 64], dtype=["bf16", "fp16"], mask=["causal", "null"])
def test_dtypes_and_masks(heads, dtype, mask):
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
@pairwise(heads=[7, 16, 32, 64], tile=[16, 64, 128], num_ctas=[1, 3, 50])
def test_plans(heads, tile, num_ctas):
    run(
        kv_lens=(900, 65, 0, 130),
        q_lens=(1, 2, 1, 1),
        tile=tile,
        num_ctas=num_ctas,
        heads=heads,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_fixed_splits_do_not_depend_on_the_batch(heads):
    """The case checks that a request alone gives the same bits."""
    run(
        kv_lens=(900, 65, 0, 130, 700),
        q_lens=(1, 2, 1, 1, 9),
        heads=heads,
        num_ctas=5,
        tile=64,
        fixed_split=256,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("format", ["bf16", "fp8_token"])
def test_whether_a_request_is_split_does_not_depend_on_the_batch(heads, format):
    """Partials with room for all queries of the batch would take more than 64 MB."""
    run(
        kv_lens=(1400,) * 7,
        q_lens=(2, 4, 1, 4, 1, 1, 1),
        seed=1,  # of which the second request is also run alone
        format=format,
        heads=heads,
        num_ctas=11,
        tile=64,
        fixed_split=64,
    )


@pytest.mark.gpu
@KERNELS
@pytest.mark.parametrize("fields", [{"deterministic": True}, {"num_splits": 5}], ids=str)
def test_splits_that_do_not_depend_on_the_batch(fields, heads):
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
@pairwise(heads=[1, 16, 32, 64, 128], batch=BATCHES, sink=["", "finite"])
def test_random_batches(heads, batch, sink):
    run(seed=batch, heads=heads, sink=sink, **random_batch(batch))


@pytest.mark.gpu
@pairwise(step=[0.4, 3.0, 7.9, 8.1, 40.0], format=["bf16", "fp16", *FP8], heads=[16, 32, 128])
def test_scores_that_rise_and_fall_from_block_to_block(step, format, heads):
    """Scores step by powers of two: row_max is kept until a score exceeds it by a threshold."""
    row, dtype = DecodeCase(**ROW).row, torch.float16 if format == "fp16" else torch.bfloat16
    cache = PagedLatentCache.allocate(row, format, num_pages=10, page_size=64, device="cuda")
    own = torch.Generator().manual_seed(0)
    rows = torch.randn(640, 576, generator=own) / 4
    rows[:, 0] = step * log(2) * (torch.arange(640) // 64)
    slots = torch.arange(640, device="cuda")
    cache.layer(0).write(slots, rows.cuda())
    stored = cache.layer(0).read(slots, torch.float64).cpu()
    q = torch.randn(2, heads, 576, generator=own) / 16
    q[:, 0::2, 0], q[:, 1::2, 0] = 1.0, -1.0
    q = q.to(dtype)
    pages = torch.arange(10, dtype=torch.int32, device="cuda").expand(2, 10)
    lens = torch.tensor([640, 577], dtype=torch.int32, device="cuda")
    given = {"softmax_scale": 1.0, "backend": kernel_for(heads, format)}
    results = mla_decode(q.cuda(), cache, pages, lens, **given)
    naive_rows = stored
    if rounds_rows(slots.device, given["backend"], format=format, heads=heads):
        payload = cache.layer(0).payload.view(torch.uint8).flatten(0, 1)
        naive_rows = rounded_rows(stored, block_scales(payload).cpu())
    exact, naive = (
        reference.mla_decode(
            q, [each, each[:577]], (1, 1), softmax_scale=1.0, v_width=512, dtype=dtype
        )
        for each, dtype in ((stored, torch.float64), (naive_rows, torch.float32))
    )
    for name, *each in zip(("out", "lse"), results, exact, naive, strict=True):
        assert_matches(name, each[0].cpu(), *each[1:])
