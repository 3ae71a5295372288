"""Every public op on batches: order, one request alone, no tokens or heads, the same bits twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit import ops
from mlakit.tools.testing import assert_same_bits, assert_unchanged, snapshot
from tests.conftest import Place
from tests.ops.cases import CALLS, KV_LENS, Q_LENS, TOKENS, Call
from tests.ops.every_op import (
    assert_same_results,
    assert_same_state,
    every_call,
    interpreted,
    interpreted_once,
    results_at,
)
from tests.ops.part_of_batch import of_requests, tokens_of

# a plan that balances the batch depends on it by design, a product of all rows at once may
INDEPENDENT = [
    name
    for name in CALLS
    if name not in ("decode-fp8-plan", "quantize-batch", "matmul") and "scaled-mm" not in name
]
# results by head; the others with heads append rows or add up over heads
BY_HEAD = [name for name in CALLS if name.startswith(("decode", "prefill", "sparse", "merge"))]
OTHERS_WITH_HEADS = [
    name
    for name in CALLS
    if name.startswith(("append", "logits", "select")) and "append-rows" not in name
]


def batch_of(call: Call) -> int:
    """How many requests a call has, be they ragged or a token each."""
    if {"kv_lens", "kv_starts", "page_table"} & set(call.arguments):
        return len(KV_LENS)
    return len(call.arguments["x"]) if "x" in call.arguments else TOKENS


def rows_of(call: Call, requests: Sequence[int]) -> Tensor:
    """Where the results of some requests stand in the results of all."""
    if call.arguments.get("q_starts") is None:
        return torch.tensor(requests, dtype=torch.int64)
    return tokens_of(Q_LENS, requests)


def take(call: Call, results: Sequence[Tensor], rows: Tensor) -> list[Tensor]:
    """Rows of every result; the scales of quantised rows stand in columns."""
    if call.function is ops.quantize_fp8:
        q, scales = results
        return [q[rows], scales[:, rows]]
    return [result[rows] for result in results]


def independent(call: Call, place: Place) -> Call:
    """Without a plan a GPU kernel may split the keys of a batch among its CTAs, unless it is
    asked not to."""
    if call.function is ops.mla_decode and not place.on_cpu_backend:
        return call.but(deterministic=True)
    return call


@interpreted_once
@pytest.mark.parametrize("name", INDEPENDENT)
def test_the_order_of_a_batch_does_not_matter(name, place):
    call = independent(CALLS[name](), place)
    order = list(range(batch_of(call)))[::-1]
    there = call.on(place.device)
    permuted = of_requests(independent(CALLS[name](), place), order).on(place.device)
    want = take(call, [each.cpu() for each in there.run()], rows_of(call, order))
    tokens = torch.arange(len(want[0]) if want else 0)
    got = take(call, [each.cpu() for each in permuted.run()], tokens)
    assert_same_results(got, want)
    if name.startswith(("append", "compress")):
        for cache in {"cache", "state_cache"} & set(call.arguments):
            assert_same_bits(
                cache, permuted.arguments[cache].payload, there.arguments[cache].payload
            )


@pytest.mark.slow
@pytest.mark.interpreted(name=("decode", "prefill", "sparse-extra"))
@pytest.mark.parametrize("name", INDEPENDENT)
def test_a_request_does_not_know_what_else_is_in_the_batch(name, place):
    call = independent(CALLS[name](), place)
    results = results_at(place, call)
    for request in range(batch_of(call)):
        rows = rows_of(call, [request])
        alone = of_requests(independent(CALLS[name](), place), [request])
        got = take(call, results_at(place, alone), torch.arange(len(rows)))
        assert_same_results(got, take(call, results, rows))


@interpreted_once
@every_call
def test_twice_the_same_bits(name, place):
    first, second = (CALLS[name]().on(place.device) for _ in range(2))
    assert_same_results(first.run(), second.run())
    assert_same_state(first, second)


@interpreted
@pytest.mark.parametrize("name", ["decode", "append", "prefill", "logits"])
@pytest.mark.parametrize("requests", [[1], []], ids=["no queries", "no requests"])
def test_a_batch_without_tokens(name, requests, place):
    call = of_requests(CALLS[name](), requests).on(place.device)
    before = snapshot(**dict(call.tensors()))
    for result in call.run():
        assert result.shape[0] == 0
    assert_unchanged(before)


@interpreted
@pytest.mark.parametrize("name", ["sparse", "topk", "merge", "quantize"])
def test_no_tokens(name, place):
    call = of_requests(CALLS[name](), []).on(place.device)
    results = call.run()
    assert results[0].shape[0] == 0
    assert len(results) == len(call.results)


def without_heads(call: Call) -> Call:
    """The call with none of its heads."""

    def cut(name: str, value: Any) -> Any:
        if name in ("outs", "lses"):
            return [each[:, :0] for each in value]
        if name in ("sink", "alibi_slopes"):
            return value[:0]
        by_head = name in ("q", "q_rope", "k_nope", "v", "weights", "v_scale", "q_scale")
        return value[:, :0] if by_head and value.ndim > 1 else value

    return call.but(**{name: cut(name, value) for name, value in call.arguments.items()})


@interpreted_once
@pytest.mark.parametrize("name", BY_HEAD)
def test_no_heads(name, place: Place):
    for result in without_heads(CALLS[name]()).on(place.device).run():
        assert result.shape[1] == 0


@interpreted_once
@pytest.mark.parametrize("name", OTHERS_WITH_HEADS)
def test_no_heads_beside_keys(name, place: Place):
    """Rows are appended as with heads; the sum over no index heads is 0."""
    call, other = (CALLS[name]().on(place.device) for _ in range(2))
    if "weights" not in call.arguments:
        assert without_heads(call).run()[0].shape[1] == 0
        other.run()
        assert_same_state(call, other)
        return
    other.arguments["weights"].zero_()
    assert_same_results(without_heads(call).run(), other.run())
