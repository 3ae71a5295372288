"""Every public op writes into the tensors it is given, and into nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mlakit.tools.testing import assert_same_bits, assert_unchanged, poison, snapshot
from tests.ops.cases import CALLS, E4M3, append_call, strided
from tests.ops.every_op import assert_same_results, every_call, interpreted, interpreted_once


@interpreted_once
@every_call
def test_results_are_written_into_given_tensors(name, place):
    want = CALLS[name]().on(place.device).run()
    call = CALLS[name]().on(place.device)
    given = call.empty_results(strided)
    results = call.run(**dict(zip(call.results, given, strict=True)))
    for result, tensor in zip(results, given, strict=True):
        assert result is tensor
    assert_same_results(given, want)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decode", "prefill", "sparse-extra", "merge", "quantize"])
def test_one_result_alone_may_be_given(name, place):
    want = CALLS[name]().on(place.device).run()
    for i, keyword in enumerate(CALLS[name]().results):
        call = CALLS[name]().on(place.device)
        given = call.empty_results(strided)[i]
        results = call.run(**{keyword: given})
        assert results[i] is given
        assert_same_results(results, want)


@interpreted
@every_call
def test_nothing_around_a_given_tensor_is_written(name, place):
    call = CALLS[name]().on(place.device)
    rooms = [poison(like.new_empty(*(n + 2 for n in like.shape))) for like in call.empty_results()]
    inner = [room[(slice(1, -1),) * room.ndim] for room in rooms]
    before = [room.clone() for room in rooms]
    call.run(**dict(zip(call.results, inner, strict=True)))
    for room, old, written in zip(rooms, before, inner, strict=True):
        old[(slice(1, -1),) * room.ndim].copy_(written)
        assert_same_bits("the tensor around a result", room, old)


@every_call
def test_a_tensor_whose_rows_share_memory_is_not_written(name, place):
    """Its rows would hold a mix of the results."""
    call = CALLS[name]().on(place.device)
    for keyword, result in zip(call.results, call.empty_results(), strict=True):
        assert result.shape[-1] > 1
        room = poison(result.new_empty(sum(result.shape)))
        before = snapshot(room=room)
        out = room.as_strided(result.shape, (1,) * result.ndim)
        message = f"^{call.function.__name__}: {keyword} must be writable, got .* share memory$"
        with pytest.raises(ValueError, match=message):
            call.run(**{keyword: out})
        assert_unchanged(before)


@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith("append")])
def test_a_cache_whose_rows_share_memory_is_not_written(name, place):
    call = CALLS[name]().on(place.device)
    cache = call.arguments["cache"]
    layers, pages, page_size, columns = cache.payload.shape
    before = snapshot(payload=cache.payload)
    strides = (cache.payload.stride(0), columns, columns, 1)
    rows = cache.payload.as_strided((layers, pages, page_size, columns), strides)
    message = f"^{call.function.__name__}: the payload of cache must be writable, .* share memory$"
    with pytest.raises(ValueError, match=message):
        call.run(cache=replace(cache, payload=rows))
    assert_unchanged(before)


@interpreted
def test_queries_may_be_rotated_in_place_or_to_e4m3(place):
    want = append_call().on(place.device).run()[0]
    call = append_call().on(place.device)
    result = call.run(q_rope_out=call.arguments["q_rope"])[0]
    assert result is call.arguments["q_rope"]
    assert_same_bits("rotated in place", result, want)
    saturated = torch.empty_like(want, dtype=E4M3)
    append_call().on(place.device).run(q_rope_out=saturated)
    assert_same_bits("e4m3", saturated, want.clamp(-448, 448).to(E4M3))


@interpreted_once
@every_call
def test_inputs_are_not_written(name, place):
    call = CALLS[name]().on(place.device)
    writes = name.startswith(("append", "compress"))
    written = ("cache.", "state_cache.") if writes else "nothing"
    before = snapshot(
        **{each: tensor for each, tensor in call.tensors() if not each.startswith(written)}
    )
    call.run()
    assert_unchanged(before)
