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
    NO_REQUESTS,
    NO_TOKENS,
    SCALED,
    all_fp8_rows,
    integer_types,
    pages_and_heads,
    scale_pools,
    scaled_rows,
)

pytestmark = pytest.mark.usefixtures("place")


@pytest.mark.slow
@pages_and_heads
def test_rope_norm_quantises_into_pages(page_size, heads):
    case = RopeCase(seed=page_size, page_size=page_size, heads=heads)
    returned = case.run()
    assert returned.data_ptr() == case.q_rope_output.data_ptr()
    case.check()


@pytest.mark.slow
@pages_and_heads
def test_rope_norm_kernel_quantises_into_pages(page_size, heads):
    case = RopeCase(seed=heads, page_size=page_size, heads=heads, cache_dtype=E4M3, layer=2)
    returned = case.run_kernel()
    assert returned.data_ptr() == case.q_rope_output.data_ptr()
    case.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "freqs", "gamma", "cache"),
    [
        (BF16, BF16, BF16, BF16),
        (BF16, F32, F32, BF16),
        (BF16, BF16, F32, E4M3),
        (BF16, F32, BF16, F32),
        (F16, F32, F32, F16),
        (F16, F16, BF16, E4M3),
        (F32, F32, F32, F32),
        (F32, BF16, BF16, E4M3),
        (F32, BF16, F32, BF16),
    ],
    ids=str,
)
def test_rope_norm_rounds_as_documented_in_every_type(dtype, freqs, gamma, cache):
    case = RopeCase(dtype=dtype, freqs_dtype=freqs, gamma_dtype=gamma, cache_dtype=cache)
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
@pytest.mark.parametrize("cache", [BF16, E4M3], ids=str)
@pytest.mark.parametrize(
    ("output", "out_dtype"),
    [("alias", None), ("slice", None), ("slice", E4M3), ("own", E4M3)],
    ids=str,
)
def test_rope_norm_writes_to_the_slots_that_it_is_given(output, out_dtype, cache):
    case = RopeCase(output=output, out_dtype=out_dtype, cache_dtype=cache, heads=7)
    case.run()
    case.check()


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
@pytest.mark.parametrize("cache", [BF16, E4M3], ids=str)
@pytest.mark.parametrize(
    "row", [SMALL_ROW, RowShape(33, 2), RowShape(64, 0), RowShape(1024, 64)], ids=str
)
def test_rope_norm_takes_other_row_shapes(row, cache):
    case = RopeCase(row=row, cache_dtype=cache, page_size=7)
    case.run()
    case.check()


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


@pytest.mark.slow
@integer_types
def test_rope_norm_takes_every_integer_type(integer_type):
    case = RopeCase(integers=integer_type, page_size=7)
    case.run()
    case.check()


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


@pytest.mark.parametrize("step", [NO_REQUESTS, NO_TOKENS], ids=["no-requests", "no-tokens"])
def test_rope_norm_of_nothing_writes_nothing(step):
    for run in (RopeCase.run, RopeCase.run_kernel):
        case = RopeCase(step=step)
        run(case)
        case.buffer.assert_only_written("q_rope_output", NOTHING)
        case.paged.pages.assert_only_written(case.paged.new_slots)


@scaled_rows
@scale_pools
@pytest.mark.interpreted
def test_rope_norm_writes_rows_with_scales(scaled, has_scale_pool):
    case = RopeCase(gamma_dtype=F32, has_scale_pool=has_scale_pool, **SCALED[scaled])
    case.run()
    case.check()


@pytest.mark.parametrize("scaled", ["rope-aware", "row", "group64"])
@pages_and_heads
def test_rope_norm_kernel_writes_rows_with_scales(scaled, page_size, heads):
    case = RopeCase(page_size=page_size, heads=heads, layer=2, **SCALED[scaled])
    case.run_kernel()
    case.check()


@scaled_rows
@pytest.mark.parametrize(
    ("dtype", "freqs", "gamma"), [(BF16, BF16, BF16), (F16, F32, BF16), (F32, F32, F32)], ids=str
)
def test_rope_norm_scales_rows_in_every_type(scaled, dtype, freqs, gamma):
    case = RopeCase(dtype=dtype, freqs_dtype=freqs, gamma_dtype=gamma, **SCALED[scaled])
    case.run()
    case.check()


@pytest.mark.parametrize(
    ("row", "scale_columns"),
    [
        (SMALL_ROW, 128),
        (SMALL_ROW, 32),
        (RowShape(64, 0), 32),
        (RowShape(33, 2), 35),
        (RowShape(128, 96), 64),
        (RowShape(256, 16), 128),
    ],
    ids=str,
)
@pytest.mark.interpreted
def test_rope_norm_scales_rows_of_other_shapes(row, scale_columns):
    case = RopeCase(row=row, scale_columns=scale_columns, page_size=7)
    case.run()
    case.check()


@all_fp8_rows
def test_rope_norm_scales_do_not_saturate(scaled):
    """Rotated keys that are far larger than the latents, and latents above 448."""
    case = RopeCase(std=3000.0, gamma_dtype=F32, **SCALED[scaled])
    case.gamma *= 300
    case.run()
    case.check()
    rows = case.paged.pages.meaning(case.paged.new_slots, case.paged.new_scale_slots).abs()
    assert float(rows[:, :512].max()) > 900
    assert float(rows[:, 512:].max()) > 4000


@integer_types
def test_rope_norm_finds_the_pages_of_scales_by_every_integer_type(integer_type):
    case = RopeCase(integers=integer_type, page_size=7, scale_columns=64, has_scale_pool=True)
    case.run()
    case.check()
