"""`flare_mla_decoding`, over pages and over a contiguous cache.

The cases plant NaN and garbage wherever nothing may be looked at, and their `check` compares
outputs with float64 oracles, row by row, and asserts that not one other bit was written.
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
    PAGES_AND_HEADS,
    SMALL_ROW,
    Step,
    integers,
    modular,
)
from tests.compat.modular.parameters import (
    NO_REQUESTS,
    NO_TOKENS,
    integer_types,
    taking_turns,
    windowed_masks,
)
from tests.kernel_launchers import replace_launcher

pytestmark = pytest.mark.usefixtures("place")


@pytest.mark.slow
@taking_turns(("page_size", "heads"), PAGES_AND_HEADS, is_ragged=[True, False])
def test_decoding_matches_the_oracle(page_size, heads, is_ragged):
    case = DecodeCase(seed=page_size, page_size=page_size, heads=heads, is_ragged=is_ragged)
    returned = case.run()
    assert returned.data_ptr() == case.output.view.data_ptr()
    case.check()


@pytest.mark.slow
@taking_turns(
    ("dtype", "cache"),
    [(F16, F16), (F32, F32), (BF16, E4M3), (F16, E4M3), (F32, E4M3), (E4M3, E4M3), (E4M3, BF16)],
    is_ragged=[True, False],
)
def test_decoding_in_every_type(dtype, cache, is_ragged):
    case = DecodeCase(dtype=dtype, cache_dtype=cache, is_ragged=is_ragged, page_size=48)
    case.run()
    case.check()


@pytest.mark.slow
@windowed_masks
@pytest.mark.parametrize("is_ragged", [True, False], ids=["ragged", "padded"])
def test_decoding_under_every_mask(mask, window, is_ragged):
    case = DecodeCase(mask=mask, window=window, is_ragged=is_ragged, dtype=F32, cache_dtype=F32)
    case.run(num_partitions=2)
    case.check()


@pytest.mark.slow
@taking_turns(("page_size", "heads"), PAGES_AND_HEADS, has_scale_pool=[False, True])
def test_rope_aware_decoding_matches_the_oracle(page_size, heads, has_scale_pool):
    case = DecodeCase(
        seed=heads,
        page_size=page_size,
        heads=heads,
        dtype=E4M3,
        has_token_scales=True,
        has_scale_pool=has_scale_pool,
        has_q_scale=heads != 3,
    )
    case.run()
    case.check()


@pytest.mark.slow
@windowed_masks
@pytest.mark.parametrize("is_ragged", [True, False], ids=["ragged", "padded"])
def test_rope_aware_decoding_under_every_mask(mask, window, is_ragged):
    case = DecodeCase(
        mask=mask,
        window=window,
        is_ragged=is_ragged,
        dtype=E4M3,
        has_token_scales=True,
        has_scale_pool=True,
        page_size=7,
    )
    case.run()
    case.check()


def test_a_page_that_left_the_window_may_belong_to_another_request():
    """Its old entry in the lookup table is stale, not read, and moves no scales."""
    case = DecodeCase(
        mask="sliding_window_causal",
        window=3,
        page_size=4,
        step=Step((13, 9), (1, 1)),
        dtype=E4M3,
        has_token_scales=True,
        has_scale_pool=True,
    )
    table = case.paged.table
    table[0, 0] = table[1, 2]
    case.paged.scales_table[0, 0] = 0
    case.run()
    case.check()


@pytest.mark.slow
@integer_types
@pytest.mark.parametrize("has_token_scales", [False, True], ids=["bf16", "rope-aware"])
@pytest.mark.parametrize("is_ragged", [True, False], ids=["ragged", "padded"])
def test_decoding_takes_every_integer_type(integer_type, has_token_scales, is_ragged):
    case = DecodeCase(
        integers=integer_type,
        is_ragged=is_ragged,
        dtype=E4M3 if has_token_scales else BF16,
        has_token_scales=has_token_scales,
        has_scale_pool=has_token_scales,
    )
    case.run()
    case.check()


@pytest.mark.parametrize("row", [SMALL_ROW, RowShape(256, 64), RowShape(512, 0)], ids=str)
@pytest.mark.parametrize("has_token_scales", [False, True], ids=["bf16", "rope-aware"])
def test_decoding_takes_other_row_shapes(row, has_token_scales):
    dtype = E4M3 if has_token_scales else BF16
    case = DecodeCase(row=row, dtype=dtype, has_token_scales=has_token_scales)
    case.run()
    case.check()


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", [E4M3, BF16], ids=str)
def test_decoding_takes_a_wide_latent(cache_dtype):
    case = DecodeCase(row=RowShape(1024, 64), cache_dtype=cache_dtype)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_partitions", "buffer", "parts"),
    [(None, None, 1), (None, (5, 4, 9), 9), (3, None, 3), (3, (5, 4, 9), 3)],
)
def test_decoding_is_split_as_asked(num_partitions, buffer, parts, monkeypatch):
    asked = []

    def spy(launch):
        def launched(arguments, *results):
            asked.append(arguments.splits.num_splits)
            launch(arguments, *results)

        return launched

    replace_launcher(monkeypatch, "mla_decode", spy)
    scalars = None if buffer is None else torch.tensor(buffer)
    DecodeCase().run(scalars, num_partitions=num_partitions)
    assert asked == [parts]


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


@pytest.mark.parametrize("is_ragged", [True, False], ids=["ragged", "padded"])
@pytest.mark.parametrize("has_token_scales", [False, True], ids=["bf16", "rope-aware"])
@pytest.mark.parametrize("step", [NO_REQUESTS, NO_TOKENS], ids=["no-requests", "no-tokens"])
def test_decoding_of_nothing_writes_nothing(step, is_ragged, has_token_scales):
    case = DecodeCase(
        step=step,
        is_ragged=is_ragged,
        dtype=E4M3 if has_token_scales else BF16,
        has_token_scales=has_token_scales,
        has_scale_pool=has_token_scales,
    )
    case.run()
    case.output.assert_only_written("output", NOTHING)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [7, 64, 700])
@pytest.mark.parametrize(("mask", "window"), [("causal", 0), ("sliding_window_causal", 600)])
def test_decoding_of_long_contexts(page_size, mask, window):
    step = Step((1300, 0, 699), (2, 1, 1))
    case = DecodeCase(page_size=page_size, mask=mask, window=window, step=step, heads=2)
    case.run()
    case.check()


@pytest.mark.slow
def test_decoding_of_many_queries_and_heads():
    case = DecodeCase(heads=128, step=Step((30, 5), (18, 1)))
    case.run()
    case.check()


@pytest.mark.slow
def test_decoding_in_a_small_workspace():
    case = DecodeCase(heads=128, step=Step((400, 170), (2, 1)), dtype=F32, cache_dtype=F32)
    with knobs.override(workspace_mib=1):  # fewer than 200 keys of 128 heads
        case.run()
    case.check()


@pytest.mark.slow
@pytest.mark.interpreted
def test_decoding_nan_row_reaches_only_queries_that_attend_to_it():
    case = DecodeCase(step=Step((40, 20), (3, 2)))
    for request in (0, 1):
        pages, slot = case.paged.pages, case.paged.slots[request][-1]
        pages.blocks.view[slot // 16, 0, case.layer, slot % 16, 0, 5] = torch.nan
        case.paged.rows[request][-1, 5] = torch.nan
    pages.remember()
    case.run()
    bad = case.output.view.isnan().all(-1).all(-1)
    assert bad.tolist() == [False, False, True, False, True]
    case.check()


def test_requests_may_share_pages():
    case = DecodeCase(step=Step((34, 34), (1, 1)), page_size=16, mask="null")
    case.paged.table[1, :2] = case.paged.table[0, :2]
    case.paged.rows[1][:32] = case.paged.rows[0][:32]
    case.run()
    case.check()


# flare_mla_decoding, contiguous


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
