"""Unusual but legal calls of the documented functions: they write what the plain call writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from mlakit.compat.modular import (
    ChunkedCausalMask,
    ChunkedMask,
    MLAConfig,
    SlidingWindowCausalMask,
    mla_prefill_plan,
)
from mlakit.tools.testing import assert_same_bits
from tests.compat.modular.calls import (
    CACHED,
    HEADS,
    INT_MAX,
    LAYER,
    NEW,
    PAGE,
    PAGED,
    PAGES,
    TOKENS,
    UNUSED_ENTRIES,
    WIDTH,
    WRITERS,
    Call,
    Make,
    contiguous_decode,
    fused,
    int32,
    int64,
    name_of,
    padded_decode,
    padded_rope_aware_decode,
    prefill,
    ragged_decode,
    rope_aware_decode,
    row_offsets,
    sparse,
    spoil,
)
from tests.compat.modular.scaled_calls import (
    SCALED_PAGED,
    SCALED_WRITERS,
    group_decode,
    group_prefill,
    rope_aware_prefill,
)
from tests.spoiling import Edit, shortened


def written_by(call: Call) -> dict[str, Tensor]:
    """What the call wrote, by name."""
    before = {name: tensor.clone() for name, tensor in call.storages().items()}
    call()
    after = call.storages()
    return {name: after[name] for name in after if not torch.equal(after[name], before[name])}


def assert_writes_the_same(odd: Call, plain: Call) -> None:
    actual, expected = written_by(odd), written_by(plain)
    assert actual.keys() == expected.keys() != set()
    for name, tensor in expected.items():
        assert_same_bits(name, actual[name], tensor)


@pytest.mark.parametrize("garbage", [-INT_MAX - 1, -1, PAGES, INT_MAX])
@pytest.mark.parametrize("make", [*PAGED, *SCALED_PAGED], ids=name_of)
def test_unused_entries_of_the_page_table_may_be_anything(make, garbage):
    odd = make()
    for entry in UNUSED_ENTRIES:
        odd.cache["lookup_table"][entry] = garbage
    assert_writes_the_same(odd, make())


@pytest.mark.parametrize("make", [*PAGED, *SCALED_PAGED], ids=name_of)
def test_the_page_table_may_be_wider_than_needed(make):
    odd = make()
    table = odd.cache["lookup_table"]
    odd.rebuild_cache(lookup_table=torch.cat([table, torch.full_like(table, -7)], 1))
    assert_writes_the_same(odd, make())


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint32], ids=str)
@pytest.mark.parametrize("make", [*WRITERS, *SCALED_WRITERS], ids=name_of)
def test_integers_may_come_in_other_types(make, dtype):
    odd = make()
    for name, value in odd.arguments.items():
        if isinstance(value, Tensor) and value.dtype == torch.int32:
            odd.arguments[name] = value.to(dtype)
    if odd.cache:
        odd.rebuild_cache(
            lookup_table=odd.cache["lookup_table"].to(dtype),
            cache_lengths=odd.cache["cache_lengths"].to(dtype),
        )
    assert_writes_the_same(odd, make())


@pytest.mark.parametrize("make", [*PAGED, *SCALED_PAGED], ids=name_of)
def test_a_request_without_new_tokens_needs_no_pages(make):
    odd = make()
    odd.cache["cache_lengths"][1] = 2 * PAGE  # its table names no page at all
    assert_writes_the_same(odd, make())


WINDOW = {"mask_str": "sliding_window_causal", "local_window_size": 2}


@pytest.mark.parametrize(
    ("make", "window"),
    [
        (prefill, WINDOW),
        (rope_aware_prefill, WINDOW),
        (group_prefill, WINDOW),
        (group_decode, {"mask_functor": SlidingWindowCausalMask(2)}),
        (ragged_decode, {"mask_functor": SlidingWindowCausalMask(2)}),
        (padded_decode, {"mask_functor": ChunkedMask(4)}),
        (rope_aware_decode, {"mask_functor": SlidingWindowCausalMask(2)}),
        (padded_rope_aware_decode, {"mask_functor": ChunkedCausalMask(4)}),
    ],
    ids=name_of,
)
def test_pages_before_the_window_may_be_gone(make, window):
    odd, plain = spoil(make(), window), spoil(make(), window)
    odd.cache["lookup_table"][0, 0] = INT_MAX
    assert_writes_the_same(odd, plain)


def test_a_buffer_may_skip_what_the_window_hides():
    odd = spoil(prefill(), WINDOW | {"cache_offsets": int32(4, 0, 2)})
    odd.arguments |= {"buffer_row_offsets": int32(0, 3, 3, 5), "buffer_length": 5}
    assert_writes_the_same(odd, spoil(prefill(), WINDOW))


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (prefill, {"cache_offsets": shortened(0)}),
        (prefill, {"buffer_length": torch.tensor(12, dtype=torch.int32)}),
        (prefill, {"buffer_length": 1000}),
        (prefill, {"layer_idx": np.int64(LAYER), "target": "cpu"}),
        (fused, {"epsilon": 0}),
        (ragged_decode, {"q_max_seq_len": 100, "kv_input_row_offsets": row_offsets()}),
        (ragged_decode, {"num_partitions": 50}),
        (ragged_decode, {"scalar_args_buf": int64(3, 8, 9)}),
        (ragged_decode, {"config": MLAConfig(HEADS, WIDTH)}),
        (rope_aware_decode, {"config": MLAConfig(HEADS, WIDTH)}),
        (contiguous_decode, {"scalar_args_buf": int64(2, 2, 3)}),
        (sparse, {"indices": Edit(lambda t: t.view(TOKENS, 4))}),
        (sparse, {"attn_sink": None}),
    ],
    ids=lambda value: name_of(value) if callable(value) else "-".join(value),
)
def test_unusual_but_legal_arguments_pass(make, changes):
    assert written_by(spoil(make(), changes)).keys() == written_by(make()).keys()


def no_tokens(make: Make, requests: int) -> Call:
    """The call for `requests` requests, none of which has a new token."""
    call = make()
    call.rebuild_cache(
        lookup_table=torch.full((requests, 2), INT_MAX, dtype=torch.int32),
        cache_lengths=int32(*CACHED[:requests]),
    )
    offsets = torch.zeros(requests + 1, dtype=torch.int32)
    is_padded = make in (padded_decode, padded_rope_aware_decode)
    counts_tokens = ("q_rope_output", "q_rope", "kv", "kv_input", "output", "q", "q_scale")
    for name, value in call.arguments.items():
        if name in counts_tokens:
            call.arguments[name] = value[: requests if is_padded else 0]
        elif name.endswith("offsets") or name == "valid_length":
            call.arguments[name] = offsets
    if is_padded:
        call.arguments["valid_length"] = offsets[:-1]
        if "q_scale" in call.arguments:
            call.arguments["q_scale"] = torch.ones(requests * max(NEW))
    return call


@pytest.mark.parametrize("requests", [0, 3])
@pytest.mark.parametrize("make", [*PAGED, *SCALED_PAGED], ids=name_of)
def test_no_tokens_write_nothing(make, requests):
    assert written_by(no_tokens(make, requests)) == {}


def test_no_rows_that_count_give_zeros():
    call = spoil(sparse(), {"topk_lengths": int32(0, 0, 0)})
    assert not call().any()


def test_a_plan_of_no_requests_is_zeros():
    starts, offsets, lengths = mla_prefill_plan(int32(0), int32(), 8, page_size=PAGE, max_chunks=2)
    assert (starts.shape, offsets.shape) == ((2, 1), (2, 1))
    assert not any(tensor.any() for tensor in (starts, offsets, lengths))
