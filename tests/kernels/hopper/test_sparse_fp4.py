"""Hopper's sparse kernel of four-bit rows and few heads (small_m_fp4_kv), against the oracle.

Half of the rows of every cache are NaN. Lists repeat rows, have invalid ids and, past their length,
ids of poisoned rows.
"""

from __future__ import annotations

import pytest
import torch

from mlakit import PagedLatentCache, sparse_mla
from mlakit.dispatch import selection
from mlakit.dispatch.specs import Problem, Use
from mlakit.kernels.hopper.decode.configs import D_C, D_R, OTHER_SMEM_BYTES, SMEM_BYTES
from mlakit.kernels.hopper.sparse.configs import small_m_fp4_kv_config
from mlakit.model.geometry import RowShape
from tests.kernels.hopper import sparse_cases
from tests.pairs import pairwise

FORMAT = "mxfp4_block32"
KERNEL = "hopper:small_m_fp4_kv"
TILES = (8, 16, 32)  # heads


def problem(**fields: object) -> Problem:
    given = {"dtype": "torch.bfloat16", "format": FORMAT, "heads": 16, "page_size": 64}
    return Problem("cuda", 90, **{**given, "row": RowShape(512, 64), **fields})


def run(**fields: object) -> None:
    sparse_cases.run(KERNEL, **{"format": FORMAT, "heads": 16, "topk": 150, **fields})


@pytest.mark.parametrize(
    "fields", [{}, {"heads": 1}, {"heads": 130}, {"page_size": 7}, {"uses": (Use.Q_ROPE,)}], ids=str
)
def test_what_the_kernel_takes(fields):
    assert selection.select("sparse_mla", problem(**fields), "hopper").name == KERNEL


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"format": "bf16"}, f"needs rows of {FORMAT}, got bf16"),
        (
            {"dtype": "torch.float16"},
            f"needs queries of torch.bfloat16 with rows of {FORMAT}, got torch.float16",
        ),
        (
            {"row": RowShape(448, 64, v_width=512)},
            f"needs 512 + 64 columns in rows of {FORMAT}, got 448 + 64",
        ),
        (
            {"row": RowShape(512, 0)},
            f"needs 512 + 64 columns in rows of {FORMAT}, got 512 + 0",
        ),
        ({"uses": (Use.Q_SCALE,)}, Use.Q_SCALE.refusal),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_left_to_the_portable_kernel(fields, reason):
    (spec,) = (spec for spec in selection.specs("sparse_mla") if spec.name == KERNEL)
    assert spec.why_not(problem(**fields)) == reason


def test_auto_takes_only_tiles_that_a_check_has_proved():
    (spec,) = (spec for spec in selection.specs("sparse_mla") if spec.name == KERNEL)
    assert spec.variant is not None
    assert [spec.variant(problem(heads=heads)) for heads in (1, 16, 17, 128)] == [
        f"{FORMAT}, {rows} heads" for rows in (8, 16, 32, 32)
    ]
    assert selection.select("sparse_mla", problem()).backend == "triton"
    reasons = selection.explain_kernels("sparse_mla", problem())
    assert str(reasons[KERNEL]).startswith("has not been checked on this machine")
    assert spec.why_slower is not None
    assert spec.why_slower(problem()) is None
    assert spec.why_slower(problem(heads=33)) == "is for up to 32 heads, got 33"


@pytest.mark.parametrize("heads", TILES)
def test_stages_fit_beside_the_queries(heads):
    config = small_m_fp4_kv_config(heads)
    raw = 64 * (D_C // 2 + 16 + 2 * D_R + 4)  # codes, scales, rotated columns, what is valid
    used = config.STAGES * 64 * D_C + config.RAW_STAGES * raw + heads * 2 * (D_C + D_R + 64)
    assert used < SMEM_BYTES < used + OTHER_SMEM_BYTES + 64 * D_C
    assert (config.HEADS, config.STAGES >= 2) == (heads, True)
    others = 2 * config.DEQUANT_REGISTERS + config.GATHER_REGISTERS
    assert others < 4 * config.MAX_REGISTERS == 512


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 7, 9, 17, 31, 33, 70])
def test_heads(heads):
    run(heads=heads, num_tokens=3, sink="finite")


@pytest.mark.gpu
@pairwise(
    topk=[1, 63, 64, 65, 129, 1000],
    heads=TILES,
    with_lens={"lens": True, "whole": False},
)
def test_list_lengths(topk, heads, with_lens):
    run(topk=topk, heads=heads, with_lens=with_lens, num_tokens=4)


@pytest.mark.gpu
def test_lists_without_entries():
    run(topk=0, num_tokens=3, sink="mixed")


@pytest.mark.gpu
@pairwise(
    num_splits=[1, 2, 7],
    heads=TILES,
    with_extra={"one cache": False, "two caches": True},
)
def test_splits(num_splits, heads, with_extra):
    extra = {"extra_format": FORMAT, "extra_topk": 130} if with_extra else {}
    run(num_splits=num_splits, topk=600, heads=heads, sink="mixed", **extra)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [0, 1, 133, 400])
def test_more_tiles_than_ctas(num_tokens):
    """Tiles of a CTA have odd and even numbers of blocks, some none."""
    run(num_tokens=num_tokens, heads=20, topk=300, num_splits=1)


@pytest.mark.gpu
@pairwise(
    page_size=[1, 16, 61],
    heads=TILES,
    padded={"packed": False, "padded": True},
)
def test_pages(page_size, heads, padded):
    """With padded strides there are gaps between rows and between pages."""
    num_pages = max(600 // page_size, 3)
    run(page_size=page_size, num_pages=num_pages, num_layers=3, padded=padded, heads=heads)


@pytest.mark.gpu
@pytest.mark.parametrize(("extra_page_size", "padded"), [(64, False), (16, True), (1, False)])
def test_second_cache(extra_page_size, padded):
    extra = {"extra_format": FORMAT, "extra_topk": 70, "extra_page_size": extra_page_size}
    run(heads=20, padded=padded, sink="mixed", **extra)


@pytest.mark.gpu
@pairwise(
    fields=[
        {"given_results": True},
        {"wide_indices": True},
        {"sharpness": -2.0},
        {"sharpness": 30.0},
        {"q_rope_dtype": "bf16"},
        {"q_rope_dtype": "bf16", "padded": True},
    ],
    heads=[16, 32],
)
def test_forms_of_arguments(fields, heads):
    run(heads=heads, num_tokens=3, **fields)


def attend(pages: torch.Tensor, rows: list[list[int]]) -> tuple[PagedLatentCache, torch.Tensor]:
    """The results of queries of zeros: the means of the listed rows."""
    cache = PagedLatentCache.wrap(pages.cuda(), RowShape(512, 64), format=FORMAT)
    q = torch.zeros(len(rows), 16, 576, dtype=torch.bfloat16, device="cuda")
    lists = torch.tensor(rows, dtype=torch.int32, device="cuda")
    out, _, _ = sparse_mla(q, cache, lists, softmax_scale=0.1, backend=KERNEL)
    return cache, out


@pytest.mark.gpu
@pytest.mark.parametrize("exponent", [0, 1, 60, 127, 128, 129, 200, 250])
def test_every_code_times_scales_of_any_size_is_exact(exponent):
    """A list of one row: the result is that row, as the codec decodes it."""
    generator = torch.Generator().manual_seed(exponent)
    pages = torch.randint(0, 256, (2, 64, 400), dtype=torch.uint8, generator=generator)
    pages[..., 256:272] = exponent
    pages[..., 256:272:5] = 127  # other scales in the same row
    pages[..., 272:] = 0
    cache, out = attend(pages, [[64, -1], [-1, 7], [128, 127]])
    slots = torch.tensor([64, 7, 127], device="cuda")
    rows = cache.layer(0).read(slots, torch.float64)
    assert torch.equal(out.double(), rows[:, None, :512].expand(3, 16, 512))


@pytest.mark.gpu
def test_a_scale_of_nan_is_nan_in_all_of_its_columns():
    pages = torch.randint(0, 256, (1, 64, 400), dtype=torch.uint8)
    pages[..., 256:272] = 127
    pages[..., 272:] = 0
    pages[0, 3, 256 + 5] = 255
    _, out = attend(pages, [[2, 4, -1], [2, 3, -1]])
    assert not bool(out[0].isnan().any())  # row 3 is not in its list
    assert bool(out[1].isnan()[:, 160:192].all())
