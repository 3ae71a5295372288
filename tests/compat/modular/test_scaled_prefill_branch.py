"""`mla_prefill_branch_fp8` over caches with scales, rope-aware rows and rows of e4m3 only.

The cases plant NaN and garbage wherever nothing may be looked at, in scales too, and their `check`
compares outputs, new rows and new scales with float64 oracles.
"""

from __future__ import annotations

import pytest
import torch

from mlakit.compat.modular import arguments, prefill
from mlakit.dispatch import checks
from mlakit.model.geometry import RowShape
from tests.compat.modular.attention_cases import PrefillCase
from tests.compat.modular.inputs import (
    BF16,
    F16,
    F32,
    MASKS,
    SMALL_ROW,
    Step,
    window_of,
)
from tests.compat.modular.parameters import (
    NO_REQUESTS,
    NO_TOKENS,
    SCALED,
    integer_types,
    scale_pools,
    scaled_rows,
    windowed_masks_and,
)
from tests.pairs import pairwise

pytestmark = pytest.mark.usefixtures("place")
SMALL_STEP = Step((17, 0, 5, 16), (1, 3, 0, 2))
SMALL = {"d_n": 16, "d_v": 24, "row": SMALL_ROW, "step": SMALL_STEP}
# of rows of 96 + 32 columns
SMALL_SCALED = {
    "rope-aware": {"has_token_scales": True},
    "row": {"scale_columns": 128},
    "group32": {"scale_columns": 32},
}
small_scaled_rows = pytest.mark.parametrize("scaled", SMALL_SCALED)


@pytest.mark.slow
@pairwise(
    page_and_heads=[(1, 3), (16, 2), (64, 7)],
    scaled=list(SCALED),
    has_scale_pool={"same-pages": False, "own-pages": True},
)
@pytest.mark.hopper_too
def test_scaled_prefill_branch_matches_the_oracle(page_and_heads, scaled, has_scale_pool):
    page_size, heads = page_and_heads
    case = PrefillCase(
        seed=heads,
        page_size=page_size,
        heads=heads,
        has_scale_pool=has_scale_pool,
        **SCALED[scaled],
    )
    returned = case.run()
    assert returned.data_ptr() == case.output.view.data_ptr()
    case.check()


@small_scaled_rows
@scale_pools
@pytest.mark.interpreted
def test_scaled_prefill_branch_over_small_rows(scaled, has_scale_pool):
    case = PrefillCase(has_scale_pool=has_scale_pool, **SMALL, **SMALL_SCALED[scaled])
    case.run()
    case.check()


@pytest.mark.slow
@scaled_rows
@pytest.mark.parametrize(
    ("dtype", "freqs", "gamma"), [(BF16, BF16, F32), (F16, F16, BF16), (F32, F32, F32)], ids=str
)
@pytest.mark.hopper_too
def test_scaled_prefill_branch_in_every_type(scaled, dtype, freqs, gamma):
    case = PrefillCase(
        dtype=dtype, freqs_dtype=freqs, gamma_dtype=gamma, step=SMALL_STEP, **SCALED[scaled]
    )
    case.run()
    case.check()


@windowed_masks_and(scaled=list(SMALL_SCALED), skips_hidden=[False, True])
def test_scaled_prefill_branch_under_every_mask(mask, window, scaled, skips_hidden):
    case = PrefillCase(
        mask=mask,
        window=window,
        d_n=16,
        d_v=24,
        row=SMALL_ROW,
        dtype=F32,
        page_size=7,
        step=Step((40, 0, 11, 24, 6), (1, 3, 0, 14, 9)),
        skips_hidden=skips_hidden,
        has_scale_pool=True,
        **SMALL_SCALED[scaled],
    )
    case.run()
    case.check()


@pytest.mark.parametrize(
    ("row", "scale_columns"),
    [(RowShape(64, 0), 32), (RowShape(70, 2), 72), (RowShape(128, 96), 64)],
    ids=str,
)
def test_scaled_prefill_branch_takes_other_row_shapes(row, scale_columns):
    case = PrefillCase(row=row, scale_columns=scale_columns, d_n=16, d_v=16, step=SMALL_STEP)
    case.run()
    case.check()


@integer_types
def test_scaled_prefill_branch_takes_every_integer_type(integer_type):
    case = PrefillCase(
        integers=integer_type, layer=2, has_scale_pool=True, scale_columns=32, **SMALL
    )
    case.run()
    case.check()


@small_scaled_rows
def test_scaled_prefill_branch_without_a_buffer_changes_nothing(scaled):
    case = PrefillCase(has_scale_pool=True, **SMALL, **SMALL_SCALED[scaled])
    nothing = torch.zeros(len(case.step.new) + 1, dtype=torch.int32)
    case.run((nothing, nothing, 0))
    case.assert_untouched()


@small_scaled_rows
@pytest.mark.parametrize("step", [NO_REQUESTS, NO_TOKENS], ids=["no-requests", "no-tokens"])
def test_scaled_prefill_branch_of_nothing_writes_nothing(step, scaled):
    case = PrefillCase(
        step=step, d_n=16, d_v=16, row=SMALL_ROW, has_scale_pool=True, **SMALL_SCALED[scaled]
    )
    case.run()
    case.assert_untouched()


@pytest.fixture
def _lengths_on_a_gpu(monkeypatch):
    """As if the lengths could not be read without waiting."""
    for module in (checks, arguments, prefill):
        monkeypatch.setattr(module, "values_visible", lambda tensor: False)


@pytest.mark.on_cpu
@pytest.mark.usefixtures("_lengths_on_a_gpu")
@pytest.mark.parametrize("mask", MASKS)
@small_scaled_rows
def test_scaled_prefill_branch_where_lengths_may_not_be_read(mask, scaled):
    case = PrefillCase(
        mask=mask,
        window=window_of(mask, 6),
        d_n=16,
        d_v=24,
        row=SMALL_ROW,
        dtype=F32,
        page_size=7,
        step=Step((40, 0, 11, 24, 6), (1, 3, 0, 14, 9)),
        has_scale_pool=True,
        **SMALL_SCALED[scaled],
    )
    case.run()
    case.check()
