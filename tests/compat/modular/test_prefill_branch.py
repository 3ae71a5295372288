"""`mla_prefill_branch_fp8`, over caches of every kind, and the plan it follows.

The cases plant NaN and garbage wherever nothing may be looked at, in scales too, and their `check`
compares outputs with float64 oracles, row by row, and asserts that not one other bit was written.
"""

from __future__ import annotations

import pytest
import torch

from mlakit.compat.modular import arguments, prefill
from mlakit.dispatch import checks, knobs
from mlakit.model.geometry import RowShape
from mlakit.tools.testing import assert_matches
from tests.compat.modular.attention_cases import PrefillCase
from tests.compat.modular.inputs import (
    BF16,
    E4M3,
    F16,
    F32,
    MASKS,
    ROW,
    SMALL_ROW,
    Step,
    integers,
    modular,
    window_of,
)
from tests.compat.modular.parameters import (
    INTEGERS,
    NOTHING_TO_DO,
    POOLS,
    SCALED,
    cases,
    integer_types,
    pairs,
    product,
    table,
    under_masks,
    with_fields,
)

pytestmark = pytest.mark.usefixtures("place")


SMALL_STEP = Step((17, 0, 5, 16), (1, 3, 0, 2))
SMALL = {"d_n": 16, "d_v": 24, "row": SMALL_ROW}
MASKED = SMALL | {"dtype": F32, "page_size": 7, "step": Step((40, 0, 11, 24, 6), (1, 3, 0, 14, 9))}
# of rows of 96 + 32 columns
SMALL_SCALED = [{"has_token_scales": True}, {"scale_columns": 128}, {"scale_columns": 32}]
SKIPS = table(skips_hidden=[False, True])


def assert_matches_oracle(fields):
    case = PrefillCase(**fields)
    returned = case.run()
    assert returned.data_ptr() == case.output.view.data_ptr()
    case.check()


@pytest.mark.slow
@cases(
    pages=[
        {"page_size": page_size, "heads": heads, "d_n": d_n, "d_v": d_v, "seed": heads}
        for page_size, heads, d_n, d_v in (
            (1, 20, 128, 128),
            (7, 128, 16, 8),
            (16, 3, 128, 128),
            (48, 1, 128, 128),
            (64, 7, 128, 64),
            (128, 16, 128, 128),
        )
    ],
    types=table(
        dtype=[BF16, BF16, F16, F16, F32, F32],
        cache_dtype=[BF16, E4M3, F16, E4M3, F32, E4M3],
        freqs_dtype=[BF16, BF16, F32, F16, F32, BF16],
        gamma_dtype=[BF16, F32, F32, BF16, BF16, F32],
    ),
    groups=[
        {"group": group, "d_n": d_n, "d_v": d_v, "row": row, "heads": heads}
        for group, d_n, d_v, row, heads in (
            (64, 192, 256, ROW, 3),
            (64, 128, 128, ROW, 1),
            (64, 40, 24, RowShape(96, 32), 7),
            (128, 128, 128, RowShape(160, 64), 3),
            (128, 16, 16, RowShape(96, 32), 5),
            (64, 24, 16, RowShape(70, 2), 3),
            (128, 1, 3, RowShape(64, 0), 2),
        )
    ],
    scaled_pages=[
        row | {"seed": row["heads"]}
        for row in pairs(
            table(page_size=[1, 16, 64], heads=[3, 2, 7]), list(SCALED.values()), POOLS
        )
    ],
    scaled_types=with_fields(
        product(
            list(SCALED.values()),
            table(
                dtype=[BF16, F16, F32], freqs_dtype=[BF16, F16, F32], gamma_dtype=[F32, BF16, F32]
            ),
        ),
        step=SMALL_STEP,
    ),
)
@pytest.mark.hopper_too
def test_prefill_branch_matches_the_oracle(fields):
    assert_matches_oracle(fields)


@pytest.mark.slow
@cases(
    masks=with_fields(under_masks(SKIPS), **MASKED),
    scaled_masks=with_fields(under_masks(SMALL_SCALED, SKIPS), **MASKED, has_scale_pool=True),
    alibi=[
        SMALL
        | {"d_n": 32, "dtype": F32, "score_mod": "alibi", "mask": mask}
        | {"heads": heads, "window": window_of(mask, 6)}
        for mask in ("causal", "sliding_window_causal", "chunked_causal")
        for heads in (3, 8, 20)
    ],
    integers=with_fields(table(integers=INTEGERS), **SMALL, layer=2),
    scaled_integers=with_fields(
        table(integers=INTEGERS),
        **SMALL,
        layer=2,
        step=SMALL_STEP,
        has_scale_pool=True,
        scale_columns=32,
    ),
    scaled_rows=with_fields(
        table(
            row=[RowShape(64, 0), RowShape(70, 2), RowShape(128, 96)], scale_columns=[32, 72, 64]
        ),
        d_n=16,
        d_v=16,
        step=SMALL_STEP,
    ),
)
def test_portable_prefill_branch_matches_the_oracle(fields):
    assert_matches_oracle(fields)


@cases(rows=with_fields(product(SMALL_SCALED, POOLS), **SMALL, step=SMALL_STEP))
@pytest.mark.interpreted
def test_scaled_prefill_branch_over_small_rows(fields):
    assert_matches_oracle(fields)


@pytest.mark.slow
def test_prefill_branch_bounds_the_scale_of_large_latents():
    case = PrefillCase(std=900.0, scale=1e-4, d_n=32, d_v=32)
    case.run()
    cached = torch.cat([rows for rows, _, _ in case.quantised_rows()])
    assert float(cached[:, :512].abs().max()) > 1200
    case.check()


@pytest.mark.slow
@pytest.mark.parametrize("spare", [0, 100])
@pytest.mark.parametrize("has_last_offset", [True, False], ids=["batch+1", "batch"])
def test_prefill_branch_follows_a_plan(spare, has_last_offset):
    case = PrefillCase(d_n=16, d_v=16, row=SMALL_ROW, page_size=7)
    rows = sum(-(-after // 7) * 7 for after in case.step.after) + spare
    buffer_row_offsets, cache_offsets, buffer_lengths = modular.mla_prefill_plan(
        case.paged.row_offsets, case.paged.cache_lengths, rows, page_size=7
    )
    entries = len(case.step.new) + has_last_offset
    case.run((buffer_row_offsets[0], cache_offsets[0, :entries], int(buffer_lengths[0])))
    case.check()


@cases(plain=[SMALL], scaled=with_fields(SMALL_SCALED, **SMALL, has_scale_pool=True))
def test_prefill_branch_without_a_buffer_changes_nothing(fields):
    case = PrefillCase(**fields)
    nothing = torch.zeros(len(case.step.new) + 1, dtype=torch.int32)
    case.run((nothing, nothing, 0))
    case.assert_untouched()


@cases(
    plain=with_fields(NOTHING_TO_DO, **SMALL),
    scaled=with_fields(product(NOTHING_TO_DO, SMALL_SCALED), **SMALL, has_scale_pool=True),
)
def test_prefill_branch_of_nothing_writes_nothing(fields):
    case = PrefillCase(**fields)
    case.run()
    case.assert_untouched()


def test_prefill_branch_with_too_small_a_buffer_says_so_and_changes_nothing():
    case = PrefillCase(d_n=16, d_v=16, row=SMALL_ROW)
    starts, offsets, length = case.buffer()
    starts[-1] -= case.page_size
    with (
        knobs.override(check_values=True),
        pytest.raises(ValueError, match="buffer_row_offsets of request 4"),
    ):
        case.run((starts, offsets, length))
    case.assert_untouched()


@pytest.mark.slow
def test_prefill_branch_in_a_small_workspace():
    step = Step((0, 90), (140, 7))  # more queries than one tile of them
    case = PrefillCase(heads=8, step=step, dtype=F32)
    with knobs.override(workspace_mib=1):  # fewer than 100 keys, one group of outputs
        case.run()
    case.check()


def test_prefill_branch_nan_row_reaches_only_queries_that_attend_to_it():
    case = PrefillCase(d_n=16, d_v=16, row=SMALL_ROW, step=Step((20, 3), (3, 2)))
    pages, slot = case.paged.pages, case.paged.slots[0][-1]
    pages.blocks.view[slot // 16, 0, case.layer, slot % 16, 0, 5] = torch.nan
    case.run()
    bad = case.output.view.isnan().all(-1).all(-1)
    assert bad.tolist() == [False, False, True, False, False]
    assert_matches("output", case.output.view, case.oracle(), case.oracle(F32))


@pytest.fixture
def _lengths_on_a_gpu(monkeypatch):
    """As if the lengths could not be read without waiting."""
    for module in (checks, arguments, prefill):
        monkeypatch.setattr(module, "values_visible", lambda tensor: False)


SOME_MASKS = [{"mask": mask, "window": window_of(mask, 6)} for mask in MASKS]


@pytest.mark.slow
@pytest.mark.on_cpu
@pytest.mark.usefixtures("_lengths_on_a_gpu")
@cases(
    plain=with_fields(product(SOME_MASKS, SKIPS), **MASKED),
    scaled=with_fields(product(SOME_MASKS, SMALL_SCALED), **MASKED, has_scale_pool=True),
)
def test_prefill_branch_where_lengths_may_not_be_read(fields):
    assert_matches_oracle(fields)


@integer_types
def test_prefill_plan_of_the_documented_example(integer_type):
    buffer_row_offsets, cache_offsets, buffer_lengths = modular.mla_prefill_plan(
        integers([0, 160, 360], integer_type), integers([0, 0], integer_type), 256, page_size=128
    )
    assert buffer_row_offsets.tolist() == [[0, 256, 256], [0, 0, 256], *[[0, 0, 0]] * 14]
    assert cache_offsets[:, :2].tolist() == [[0, 0], [256, 0], *[[256, 256]] * 14]
    assert buffer_lengths.tolist() == [256, 256, *[-1] * 14]
    for tensor in (buffer_row_offsets, cache_offsets, buffer_lengths):
        assert tensor.dtype == torch.int32
