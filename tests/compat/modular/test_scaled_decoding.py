"""`flare_mla_decoding` over rows of e4m3 with one scale per row or per group of columns.

The cases plant NaN and garbage wherever nothing may be looked at, in scales too, and their `check`
compares outputs with float64 oracles, row by row.
"""

from __future__ import annotations

import pytest
import torch

from mlakit.geometry import RowShape
from tests.compat.modular.attention_cases import DecodeCase
from tests.compat.modular.inputs import (
    BF16,
    E4M3,
    F16,
    F32,
    NOTHING,
    PAGES_AND_HEADS,
    SMALL_ROW,
    Step,
)
from tests.compat.modular.parameters import (
    ALL_FP8_ROWS,
    NO_REQUESTS,
    NO_TOKENS,
    SCALED,
    all_fp8_rows,
    integer_types,
    windowed_masks_and,
)
from tests.kernel_launchers import replace_launcher
from tests.pairs import pairwise

pytestmark = pytest.mark.usefixtures("place")
SMALL_STEP = Step((17, 0, 5), (1, 2, 0))


@pairwise(
    page_and_heads=PAGES_AND_HEADS,
    scaled=["row", "group64"],
    has_scale_pool={"same-pages": False, "own-pages": True},
)
def test_scaled_decoding_matches_the_oracle(page_and_heads, scaled, has_scale_pool):
    page_size, heads = page_and_heads
    case = DecodeCase(
        seed=heads,
        page_size=page_size,
        heads=heads,
        has_scale_pool=has_scale_pool,
        **SCALED[scaled],
    )
    returned = case.run()
    assert returned.data_ptr() == case.output.view.data_ptr()
    case.check()


@pairwise(
    scaled=ALL_FP8_ROWS,
    dtype=[BF16, F16, F32, E4M3],
    is_ragged={"ragged": True, "padded": False},
    has_scale_pool={"same-pages": False, "own-pages": True},
)
@pytest.mark.interpreted
def test_scaled_decoding_in_every_type(scaled, dtype, is_ragged, has_scale_pool):
    given = {"is_ragged": is_ragged, "has_scale_pool": has_scale_pool, **SCALED[scaled]}
    case = DecodeCase(dtype=dtype, step=SMALL_STEP, **given)
    case.run()
    case.check()


@windowed_masks_and(scaled=["row", "group64"], is_ragged=[True, False])
def test_scaled_decoding_under_every_mask(mask, window, scaled, is_ragged):
    case = DecodeCase(
        mask=mask,
        window=window,
        is_ragged=is_ragged,
        has_scale_pool=True,
        page_size=7,
        **SCALED[scaled],
    )
    case.run(num_partitions=2)
    case.check()


@pytest.mark.parametrize(
    ("row", "scale_columns"),
    [
        (SMALL_ROW, 128),
        (SMALL_ROW, 32),
        (RowShape(512, 0), 64),
        (RowShape(256, 64), 320),
        (RowShape(128, 96), 64),
        (RowShape(1024, 64), 128),
    ],
    ids=str,
)
@pytest.mark.interpreted
def test_scaled_decoding_takes_other_row_shapes(row, scale_columns):
    case = DecodeCase(row=row, scale_columns=scale_columns, step=SMALL_STEP)
    case.run()
    case.check()


@integer_types
def test_scaled_decoding_takes_every_integer_type(integer_type):
    case = DecodeCase(integers=integer_type, has_scale_pool=True, scale_columns=32)
    case.run()
    case.check()


@pytest.mark.parametrize("step", [NO_REQUESTS, NO_TOKENS], ids=["no-requests", "no-tokens"])
def test_scaled_decoding_of_nothing_writes_nothing(step):
    case = DecodeCase(step=step, scale_columns=64, has_scale_pool=True)
    case.run()
    case.output.assert_only_written("output", NOTHING)


@all_fp8_rows
@pytest.mark.interpreted
def test_a_nan_scale_reaches_only_queries_that_attend_to_its_row(scaled):
    case = DecodeCase(step=Step((20, 3), (3, 2)), **SCALED[scaled])
    pages, slot = case.paged.pages, case.paged.slots[0][-1]
    pages.scales.view[pages.at(slot)] = torch.nan
    case.paged.rows[0][-1] = torch.nan
    pages.remember()
    case.run()
    assert case.output.view.isnan().all(-1).all(-1).tolist() == [False, False, True, False, False]
    case.check()


@pytest.mark.on_cpu
@all_fp8_rows
def test_scaled_decoding_reads_the_rows_in_place(scaled, monkeypatch):
    case = DecodeCase(**SCALED[scaled])
    storages = []

    def spy(launch):
        def launched(arguments, *results):
            pools = (arguments.layer.payload, arguments.layer.scales)
            storages.extend(pool.untyped_storage().data_ptr() for pool in pools)
            launch(arguments, *results)

        return launched

    replace_launcher(monkeypatch, "mla_decode", spy)
    case.run()
    pools = (case.paged.pages.blocks, case.paged.pages.scales)
    assert storages == [pool.base.untyped_storage().data_ptr() for pool in pools]
