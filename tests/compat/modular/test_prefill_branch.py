"""`mla_prefill_branch_fp8` and the plan it follows.

The cases plant NaN and garbage wherever nothing may be looked at, and their `check` compares
outputs with float64 oracles, row by row, and asserts that not one other bit was written.
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
from tests.compat.modular.parameters import NO_REQUESTS, NO_TOKENS, integer_types, windowed_masks

pytestmark = pytest.mark.usefixtures("place")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page_size", "heads", "d_n", "d_v"),
    [
        (1, 20, 128, 128),
        (7, 128, 16, 8),
        (16, 3, 128, 128),
        (48, 1, 128, 128),
        (64, 7, 128, 64),
        (128, 16, 128, 128),
    ],
)
@pytest.mark.hopper_too
def test_prefill_branch_matches_the_oracle(page_size, heads, d_n, d_v):
    case = PrefillCase(seed=heads, page_size=page_size, heads=heads, d_n=d_n, d_v=d_v)
    returned = case.run()
    assert returned.data_ptr() == case.output.view.data_ptr()
    case.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "cache", "freqs", "gamma"),
    [
        (BF16, BF16, BF16, BF16),
        (BF16, E4M3, BF16, F32),
        (F16, F16, F32, F32),
        (F16, E4M3, F16, BF16),
        (F32, F32, F32, BF16),
        (F32, E4M3, BF16, F32),
    ],
    ids=str,
)
@pytest.mark.hopper_too
def test_prefill_branch_in_every_type(dtype, cache, freqs, gamma):
    case = PrefillCase(dtype=dtype, cache_dtype=cache, freqs_dtype=freqs, gamma_dtype=gamma)
    case.run()
    case.check()


@pytest.mark.slow
@windowed_masks
@pytest.mark.parametrize("skips_hidden", [False, True], ids=["whole-buffer", "visible-buffer"])
def test_prefill_branch_under_every_mask(mask, window, skips_hidden):
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
    )
    case.run()
    case.check()


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal", "sliding_window_causal", "chunked_causal"])
@pytest.mark.parametrize("heads", [3, 8, 20])
def test_prefill_branch_with_alibi(heads, mask):
    case = PrefillCase(
        heads=heads,
        mask=mask,
        window=window_of(mask, 6),
        score_mod="alibi",
        d_n=32,
        d_v=16,
        row=SMALL_ROW,
        dtype=F32,
    )
    case.run()
    case.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "d_n", "d_v", "row", "heads"),
    [
        (64, 192, 256, ROW, 3),
        (64, 128, 128, ROW, 1),
        (64, 40, 24, RowShape(96, 32), 7),
        (128, 128, 128, RowShape(160, 64), 3),
        (128, 16, 16, RowShape(96, 32), 5),
        (64, 24, 16, RowShape(70, 2), 3),
        (128, 1, 3, RowShape(64, 0), 2),
    ],
    ids=str,
)
@pytest.mark.hopper_too
def test_prefill_branch_at_every_granularity(group, d_n, d_v, row, heads):
    case = PrefillCase(group=group, d_n=d_n, d_v=d_v, row=row, heads=heads)
    case.run()
    case.check()


@pytest.mark.slow
def test_prefill_branch_bounds_the_scale_of_large_latents():
    case = PrefillCase(std=900.0, scale=1e-4, d_n=32, d_v=32)
    case.run()
    cached = torch.cat([rows for rows, _, _ in case.quantised_rows()])
    assert float(cached[:, :512].abs().max()) > 1200
    case.check()


@pytest.mark.slow
@integer_types
def test_prefill_branch_takes_every_integer_type(integer_type):
    case = PrefillCase(integers=integer_type, d_n=16, d_v=16, row=SMALL_ROW, layer=2)
    case.run()
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


def test_prefill_branch_without_a_buffer_changes_nothing():
    case = PrefillCase(d_n=16, d_v=16, row=SMALL_ROW)
    nothing = torch.zeros(len(case.step.new) + 1, dtype=torch.int32)
    case.run((nothing, nothing, 0))
    case.assert_untouched()


@pytest.mark.parametrize("step", [NO_REQUESTS, NO_TOKENS], ids=["no-requests", "no-tokens"])
def test_prefill_branch_of_nothing_writes_nothing(step):
    case = PrefillCase(step=step, d_n=16, d_v=16, row=SMALL_ROW)
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


@pytest.mark.slow
@pytest.mark.on_cpu
@pytest.mark.usefixtures("_lengths_on_a_gpu")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("skips_hidden", [False, True], ids=["whole-buffer", "visible-buffer"])
def test_prefill_branch_where_lengths_may_not_be_read(mask, skips_hidden):
    case = PrefillCase(
        mask=mask,
        window=window_of(mask, 6),
        d_n=16,
        d_v=24,
        row=SMALL_ROW,
        dtype=F32,
        page_size=7,
        step=Step((40, 0, 11, 24, 6), (1, 3, 0, 14, 9)),
        skips_hidden=skips_hidden,
    )
    case.run()
    case.check()


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
