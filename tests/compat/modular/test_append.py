"""The documented functions that rotate, normalise and append, kernel and operation.

The cases plant NaN and garbage wherever nothing may be looked at, and their `check` compares
outputs with float64 oracles, row by row, and asserts that not one other bit was written.
"""

from __future__ import annotations

import pytest
import torch

from mlakit.model.geometry import RowShape
from mlakit.tools.testing import assert_same_bits
from tests.compat.modular.append_cases import RopeCase
from tests.compat.modular.inputs import BF16, E4M3, F16, F32, NOTHING, SMALL_ROW
from tests.compat.modular.parameters import (
    FP8_ROWS,
    INTEGERS,
    NOTHING_TO_DO,
    PAGES,
    POOLS,
    SCALED,
    cases,
    product,
    table,
    with_fields,
)

pytestmark = pytest.mark.usefixtures("place")


OTHER_ROWS = [SMALL_ROW, RowShape(33, 2), RowShape(64, 0), RowShape(1024, 64)]


@pytest.mark.slow
@cases(
    pages=[row | {"seed": row["page_size"]} for row in PAGES],
    types=table(
        dtype=[BF16, BF16, BF16, BF16, F16, F16, F32, F32, F32],
        freqs_dtype=[BF16, F32, BF16, F32, F32, F16, F32, BF16, BF16],
        gamma_dtype=[BF16, F32, F32, BF16, F32, BF16, F32, BF16, F32],
        cache_dtype=[BF16, BF16, E4M3, F32, F16, E4M3, F32, E4M3, BF16],
    ),
    outputs=with_fields(
        product(
            table(output=["alias", "slice", "slice", "own"], out_dtype=[None, None, E4M3, E4M3]),
            table(cache_dtype=[BF16, E4M3]),
        ),
        heads=7,
    ),
    rows=with_fields(product(table(row=OTHER_ROWS), table(cache_dtype=[BF16, E4M3])), page_size=7),
    integers=with_fields(table(integers=INTEGERS), page_size=7),
    scaled_types=product(
        list(SCALED.values()),
        table(dtype=[BF16, F16, F32], freqs_dtype=[BF16, F32, F32], gamma_dtype=[BF16, BF16, F32]),
    ),
    scaled_integers=with_fields(
        table(integers=INTEGERS), page_size=7, scale_columns=64, has_scale_pool=True
    ),
)
def test_rope_norm_matches_the_oracle(fields):
    case = RopeCase(**fields)
    returned = case.run()
    assert returned.data_ptr() == case.q_rope_output.data_ptr()
    case.check()


@pytest.mark.slow
@cases(
    plain=[row | {"seed": row["heads"], "cache_dtype": E4M3, "layer": 2} for row in PAGES],
    scaled=with_fields(
        product([SCALED[name] for name in ("rope-aware", "row", "group64")], PAGES), layer=2
    ),
)
def test_rope_norm_kernel_matches_the_oracle(fields):
    case = RopeCase(**fields)
    returned = case.run_kernel()
    assert returned.data_ptr() == case.q_rope_output.data_ptr()
    case.check()


@cases(
    forms=with_fields(product(list(SCALED.values()), POOLS), gamma_dtype=F32),
    rows=with_fields(
        table(
            row=[
                *(SMALL_ROW, SMALL_ROW, RowShape(64, 0)),
                *(RowShape(33, 2), RowShape(128, 96), RowShape(256, 16)),
            ],
            scale_columns=[128, 32, 32, 35, 64, 128],
        ),
        page_size=7,
    ),
)
@pytest.mark.interpreted
def test_rope_norm_writes_rows_with_scales(fields):
    case = RopeCase(**fields)
    case.run()
    case.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "kv"), [(BF16, F32), (F16, BF16), (F32, BF16), (BF16, F16)], ids=str
)
def test_rotated_keys_pass_through_the_types_of_the_latents_and_the_queries(dtype, kv):
    case = RopeCase(dtype=dtype, kv_dtype=kv, cache_dtype=F32)
    case.run()
    case.check()
    rotated = case.paged.pages.stored(case.paged.new_slots)[:, 512:]
    for passed in (kv, dtype):
        assert torch.equal(rotated.to(passed).float(), rotated)


@pytest.mark.slow
@pytest.mark.parametrize("output", ["own", "slice"])
def test_rope_norm_saturates_float8(output):
    case = RopeCase(std=400.0, cache_dtype=E4M3, out_dtype=E4M3, output=output)
    case.gamma *= 300
    case.run()
    case.check()
    assert int((case.q_rope_output.float().abs() == 448).sum()) > 100
    stored = case.paged.pages.stored(case.paged.new_slots).float().abs()
    assert int((stored[:, :512] == 448).sum()) > 100
    assert int((stored[:, 512:] == 448).sum()) > 100


@pytest.mark.slow
def test_rope_norm_asks_a_function_for_the_latents():
    case = RopeCase(heads=1)
    asked = []

    def kv_input(rows, columns):
        asked.append((rows, columns))
        return case.kv.view[rows[:, None], columns]

    case.run(kv_input)
    case.check()
    for rows, columns in asked:
        assert rows.dtype == columns.dtype == torch.int64
        assert rows.ndim == columns.ndim == 1


@pytest.mark.parametrize("launch", [{"block_size": 32, "n_rope_blocks": 3}, {"n_rms_blocks": 4}])
def test_rope_norm_launch_shape_changes_nothing(launch):
    usual, other = RopeCase(), RopeCase()
    usual.run_kernel()
    other.run_kernel(**launch)
    assert_same_bits("q_rope_output", other.buffer.base, usual.buffer.base)
    assert_same_bits("blocks", other.paged.pages.blocks.base, usual.paged.pages.blocks.base)


@pytest.mark.slow
def test_rope_norm_run_again_leaves_the_same_cache():
    case = RopeCase(cache_dtype=E4M3)
    case.run()
    case.run()
    case.check()


@cases(steps=NOTHING_TO_DO)
def test_rope_norm_of_nothing_writes_nothing(fields):
    for run in (RopeCase.run, RopeCase.run_kernel):
        case = RopeCase(**fields)
        run(case)
        case.buffer.assert_only_written("q_rope_output", NOTHING)
        case.paged.pages.assert_only_written(case.paged.new_slots)


@cases(rows=FP8_ROWS)
def test_rope_norm_scales_do_not_saturate(fields):
    """Rotated keys that are far larger than the latents, and latents above 448."""
    case = RopeCase(std=3000.0, gamma_dtype=F32, **fields)
    case.gamma *= 300
    case.run()
    case.check()
    rows = case.paged.pages.meaning(case.paged.new_slots, case.paged.new_scale_slots).abs()
    assert float(rows[:, :512].max()) > 900
    assert float(rows[:, 512:].max()) > 4000
