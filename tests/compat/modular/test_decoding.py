"""`flare_mla_decoding`, over pages and over a contiguous cache, with scales and without.

The cases plant NaN and garbage wherever nothing may be looked at, in scales too, and their `check`
compares outputs with float64 oracles, row by row, and asserts that not one other bit was written.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from mlakit.dispatch import knobs
from mlakit.model.geometry import RowShape
from mlakit.tools.testing import assert_same_bits
from tests.compat.modular.attention_cases import DecodeCase
from tests.compat.modular.contiguous_decoding import contiguous_decoding
from tests.compat.modular.inputs import (
    BF16,
    E4M3,
    F16,
    F32,
    NOTHING,
    SMALL_ROW,
    Step,
    integers,
    modular,
)
from tests.compat.modular.parameters import (
    FP8_ROWS,
    INTEGERS,
    NOTHING_TO_DO,
    PAGES,
    POOLS,
    SCALED,
    cases,
    pairs,
    product,
    table,
    taking_turns,
    under_masks,
    with_fields,
)
from tests.kernel_launchers import replace_launcher

pytestmark = pytest.mark.usefixtures("place")
SMALL_STEP = Step((17, 0, 5), (1, 2, 0))
RAGGED = table(is_ragged=[True, False])
ROPE_AWARE = {"dtype": E4M3, "has_token_scales": True}
ROPE_AWARE_POOL = ROPE_AWARE | {"has_scale_pool": True}
SEEDED_PAGES = [row | {"seed": row["heads"]} for row in PAGES]
SOME_FP8_ROWS = [SCALED["row"], SCALED["group64"]]


def assert_decodes(fields):
    """A field `num_partitions` is an argument of the call."""
    options = {name: fields[name] for name in ("num_partitions",) if name in fields}
    case = DecodeCase(**{name: fields[name] for name in fields if name not in options})
    returned = case.run(**options)
    assert returned.data_ptr() == case.output.view.data_ptr()
    case.check()


@pytest.mark.slow
@cases(
    pages=taking_turns(SEEDED_PAGES, RAGGED),
    types=with_fields(
        taking_turns(
            table(
                dtype=[F16, F32, BF16, F16, F32, E4M3, E4M3],
                cache_dtype=[F16, F32, E4M3, E4M3, E4M3, E4M3, BF16],
            ),
            RAGGED,
        ),
        page_size=48,
    ),
    masks=with_fields(under_masks(RAGGED), dtype=F32, cache_dtype=F32, num_partitions=2),
    integers=product(table(integers=INTEGERS), [{}, ROPE_AWARE_POOL], RAGGED),
    rows=product(table(row=[SMALL_ROW, RowShape(256, 64), RowShape(512, 0)]), [{}, ROPE_AWARE]),
    wide=with_fields(table(cache_dtype=[E4M3, BF16]), row=RowShape(1024, 64)),
    long=with_fields(
        product(
            table(page_size=[7, 64, 700]),
            table(mask=["causal", "sliding_window_causal"], window=[0, 600]),
        ),
        heads=2,
        step=Step((1300, 0, 699), (2, 1, 1)),
    ),
    queries=[{"heads": 128, "step": Step((30, 5), (18, 1))}],
)
def test_decoding_matches_the_oracle(fields):
    assert_decodes(fields)


@pytest.mark.slow
@cases(
    pages=taking_turns(
        [row | ROPE_AWARE | {"has_q_scale": row["heads"] != 3} for row in SEEDED_PAGES], POOLS
    ),
    masks=with_fields(under_masks(RAGGED), **ROPE_AWARE_POOL, page_size=7),
)
def test_rope_aware_decoding_matches_the_oracle(fields):
    assert_decodes(fields)


@pytest.mark.slow
@cases(
    pages=pairs(SEEDED_PAGES, SOME_FP8_ROWS, POOLS),
    masks=with_fields(
        under_masks(SOME_FP8_ROWS, RAGGED), has_scale_pool=True, page_size=7, num_partitions=2
    ),
    integers=with_fields(table(integers=INTEGERS), has_scale_pool=True, scale_columns=32),
)
def test_scaled_decoding_matches_the_oracle(fields):
    assert_decodes(fields)


@cases(
    types=with_fields(
        pairs(FP8_ROWS, table(dtype=[BF16, F16, F32, E4M3]), RAGGED, POOLS), step=SMALL_STEP
    ),
    rows=with_fields(
        table(
            row=[
                *(SMALL_ROW, SMALL_ROW, RowShape(512, 0), RowShape(256, 64)),
                *(RowShape(128, 96), RowShape(1024, 64)),
            ],
            scale_columns=[128, 32, 64, 320, 64, 128],
        ),
        step=SMALL_STEP,
    ),
)
@pytest.mark.interpreted
def test_scaled_decoding_of_small_steps(fields):
    assert_decodes(fields)


def test_a_page_that_left_the_window_may_belong_to_another_request():
    """Its old entry in the lookup table is stale, not read, and moves no scales."""
    case = DecodeCase(
        mask="sliding_window_causal",
        window=3,
        page_size=4,
        step=Step((13, 9), (1, 1)),
        **ROPE_AWARE_POOL,
    )
    table = case.paged.table
    table[0, 0] = table[1, 2]
    case.paged.scales_table[0, 0] = 0
    case.run()
    case.check()


@pytest.mark.slow
@pytest.mark.parametrize("parts", [2, 5, 74])
def test_decoding_in_splits_matches_the_oracle(parts):
    step = Step((300, 0, 64, 130, 63), (2, 3, 0, 1, 1))
    by_argument = DecodeCase(page_size=16, step=step)
    by_argument.run(torch.tensor([5, 3, 1]), num_partitions=parts, decoding_warp_split_k=True)
    by_argument.check()
    by_buffer = DecodeCase(page_size=16, step=step)
    by_buffer.run(torch.tensor([5, 3, parts]))
    by_buffer.check()
    assert_same_bits("output", by_buffer.output.base, by_argument.output.base)


@pytest.fixture
def launched(monkeypatch):
    """The arguments of each launch of `mla_decode`."""
    seen = []

    def spy(launch):
        def noted(arguments, *results):
            seen.append(arguments)
            launch(arguments, *results)

        return noted

    replace_launcher(monkeypatch, "mla_decode", spy)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_partitions", "buffer", "parts"),
    [(None, None, 1), (None, (5, 4, 9), 9), (3, None, 3), (3, (5, 4, 9), 3)],
)
def test_decoding_is_split_as_asked(num_partitions, buffer, parts, launched):
    scalars = None if buffer is None else torch.tensor(buffer)
    DecodeCase().run(scalars, num_partitions=num_partitions)
    assert [arguments.splits.num_splits for arguments in launched] == [parts]


def test_decoding_twice_gives_the_same_bits():
    case = DecodeCase(heads=20)
    case.run(num_partitions=3)
    first = case.output.base.clone()
    case.run(num_partitions=3)
    assert_same_bits("output", case.output.base, first)


def test_decoding_options_that_change_nothing():
    plain, dressed = DecodeCase(), DecodeCase()
    plain.run()
    dressed.run(
        config=modular.MLAConfig(num_heads=3, depth=576),
        q_max_seq_len=9,
        kv_input_row_offsets=integers([0, *accumulate(dressed.step.after)], torch.uint32),
        decoding_warp_split_k=True,
    )
    assert_same_bits("output", dressed.output.base, plain.output.base)


@cases(
    plain=product(NOTHING_TO_DO, [{}, ROPE_AWARE_POOL], RAGGED),
    scaled=with_fields(NOTHING_TO_DO, scale_columns=64, has_scale_pool=True),
)
def test_decoding_of_nothing_writes_nothing(fields):
    case = DecodeCase(**fields)
    case.run()
    case.output.assert_only_written("output", NOTHING)


@pytest.mark.slow
def test_decoding_in_a_small_workspace():
    case = DecodeCase(heads=128, step=Step((400, 170), (2, 1)), dtype=F32, cache_dtype=F32)
    with knobs.override(workspace_mib=1):  # fewer than 200 keys of 128 heads
        case.run()
    case.check()


@cases(
    plain=[{"step": Step((40, 20), (3, 2))}],
    scaled=with_fields(FP8_ROWS, step=Step((20, 3), (3, 2))),
)
@pytest.mark.interpreted
def test_nan_reaches_only_queries_that_attend_to_its_row(fields):
    """A NaN is in the last row of each request, or in its scale."""
    case = DecodeCase(**fields)
    pages = case.paged.pages
    for rows, slots in zip(case.paged.rows, case.paged.slots, strict=True):
        if case.scale_columns:
            pages.scales.view[pages.at(slots[-1])] = torch.nan
            rows[-1] = torch.nan
        else:
            pages.blocks.view[(*pages.at(slots[-1]), 5)] = torch.nan
            rows[-1, 5] = torch.nan
    pages.remember()
    case.run()
    bad = case.output.view.isnan().all(-1).all(-1)
    assert bad.tolist() == [False, False, True, False, True]
    case.check()


@pytest.mark.on_cpu
@cases(rows=FP8_ROWS)
def test_scaled_decoding_reads_the_rows_in_place(fields, launched):
    case = DecodeCase(**fields)
    case.run()
    (arguments,) = launched
    read = (arguments.layer.payload, arguments.layer.scales)
    given = (case.paged.pages.blocks.base, case.paged.pages.scales.base)
    for mine, theirs in zip(read, given, strict=True):
        assert mine.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr()


def test_requests_may_share_pages():
    case = DecodeCase(step=Step((34, 34), (1, 1)), page_size=16, mask="null")
    case.paged.table[1, :2] = case.paged.table[0, :2]
    case.paged.rows[1][:32] = case.paged.rows[0][:32]
    case.run()
    case.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "k_dtype", "batch", "q_len", "num_keys", "heads", "mask", "window"),
    [
        (BF16, BF16, 3, 1, 1, 1, "causal", 0),
        (BF16, BF16, 2, 4, 50, 20, "causal", 0),
        (BF16, BF16, 1, 5, 5, 3, "causal", 0),
        (F32, F32, 2, 3, 70, 7, "null", 0),
        (F16, F16, 2, 2, 129, 16, "sliding_window_causal", 9),
        (F32, F32, 2, 6, 40, 3, "sliding_window_noncausal", 2),
        (BF16, E4M3, 2, 4, 65, 128, "chunked", 16),
        (E4M3, E4M3, 3, 3, 33, 7, "chunked_causal", 8),
        (F32, E4M3, 1, 1, 300, 1, "causal", 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("parts", [None, 3])
def test_contiguous_decoding(
    dtype, k_dtype, batch, q_len, num_keys, heads, mask, window, parts, generator
):
    contiguous_decoding(
        generator, dtype, k_dtype, batch, q_len, num_keys, heads, mask, window, parts=parts
    )


@pytest.mark.parametrize(("batch", "q_len", "num_keys"), [(0, 2, 9), (2, 0, 9), (2, 0, 0)])
def test_contiguous_decoding_of_nothing(batch, q_len, num_keys):
    output = torch.zeros(batch, q_len, 3, 512, dtype=BF16)
    q = torch.zeros(batch, q_len, 3, 576, dtype=BF16)
    k = torch.zeros(batch, num_keys, 1, 576, dtype=BF16)
    assert modular.flare_mla_decoding(output, q, k, modular.CausalMask(), 0.1) is output
