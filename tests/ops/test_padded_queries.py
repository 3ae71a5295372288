"""Rows after the last request are padding: NaN there changes no result and nothing is written.

Engines round the rows of a step up to the size of a CUDA graph.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mlakit import (
    PagedLatentCache,
    RowShape,
    decode_branch,
    mla_decode,
    mla_prefill,
    mla_step,
    plan_decode,
    plan_mla_decode,
    plan_step,
    prefill_branch,
)
from mlakit.tools.testing import assert_same_bits, poison
from tests.ops.cases import CALLS, Call, decode_call, int32
from tests.ops.every_op import assert_same_state, interpreted
from tests.steps.step_oracles import Step

PADDING = 3
# the arguments with a row for each query token
ROWS = {
    "mla_decode": ("q", "q_rope", "q_scale"),
    "mla_prefill": ("q", "q_scale"),
    "norm_rope_quant_append": ("q_rope", "kv", "positions"),
}
PADDED = [
    name
    for name, make in CALLS.items()
    if make().function.__name__ in ROWS and make().arguments.get("q_starts") is not None
]


def padded(tensor, rows=PADDING):
    """With rows of NaN, or of positions far outside, after its own."""
    longer = tensor.new_empty(len(tensor) + rows, *tensor.shape[1:])
    poison(longer)
    bits = (lambda t: t.view(torch.uint8)) if tensor.dtype.itemsize == 1 else (lambda t: t)
    bits(longer[: len(tensor)]).copy_(bits(tensor))
    return longer


def with_padding(call: Call) -> Call:
    names = [n for n in ROWS[call.function.__name__] if call.arguments.get(n) is not None]
    return call.but(**{name: padded(call.arguments[name]) for name in names})


def test_calls_of_every_form_are_padded():
    assert {CALLS[name]().function.__name__ for name in PADDED} == set(ROWS)
    assert len(PADDED) >= 10


@interpreted
@pytest.mark.parametrize("name", PADDED)
def test_padding_changes_nothing_and_is_not_written(name, place):
    call = CALLS[name]().on(place.device)
    longer = with_padding(CALLS[name]()).on(place.device)
    given = {
        result: poison(tensor.to(place.device))
        for result, tensor in zip(longer.results, longer.empty_results(), strict=True)
    }
    before = {result: tensor.clone() for result, tensor in given.items()}
    want, got = call.run(), longer.run(**given)
    tokens = len(want[0])
    for (result, old), mine, own in zip(before.items(), got, want, strict=True):
        assert_same_bits(f"{result} of queries", mine[:tokens], own)
        assert_same_bits(f"{result} of padding", mine[tokens:], old[tokens:])
    of_rows = dict.fromkeys(ROWS[call.function.__name__])
    assert_same_state(longer.but(**of_rows), call.but(**of_rows))


@interpreted
def test_requests_without_keys_and_a_plan_leave_padding_alone(place):
    """No item of the plan writes the rows of such a request: they are cleared first."""
    lens = [5, 0, 9, 1, 0]
    call = decode_call(kv_lens=int32(lens), plan=plan_decode(lens, num_ctas=3, tile=2))
    q_starts = int32([0, 2, 3, 5, 6, 7])
    longer = with_padding(call).but(q_starts=q_starts).on(place.device)
    given = [poison(tensor.to(place.device)) for tensor in longer.empty_results()]
    before = [tensor.clone() for tensor in given]
    longer.run(out=given[0], lse=given[1])
    for tensor, old in zip(given, before, strict=True):
        assert_same_bits("padding", tensor[7:], old[7:])
        assert not tensor[:7].isnan().any()
    assert (given[0][[2, 6]] == 0).all()
    assert (given[1][[2, 6]] == -torch.inf).all()


@interpreted
def test_plans_of_padded_batches(place):
    call = with_padding(decode_call()).on(place.device)
    a = call.arguments
    plan = plan_mla_decode(
        a["cache"],
        a["page_table"],
        a["kv_lens"],
        heads=a["q"].shape[1],
        num_tokens=len(a["q"]),
        q_starts=a["q_starts"],
    )
    want = decode_call().on(place.device).run()
    for got, own in zip(call.run(plan=plan), want, strict=True):
        torch.testing.assert_close(got[: len(own)], own, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("branch", ["decode", "prefill", "step", "mixed step"])
@pytest.mark.parametrize("format", ["bf16", "fp8_token"])
def test_branches_ignore_padding(format, branch):
    lengths = {"kv_lens": (9, 4, 12), "q_lens": (3, 1, 2)}
    plan = plan_step(*lengths.values(), decode_threshold=2)
    call = {
        "decode": decode_branch,
        "prefill": prefill_branch,
        "step": partial(mla_step, decode_threshold=8),
        "mixed step": partial(mla_step, plan=plan),
    }[branch]
    results, pools = [], []
    for pad in (lambda rows: rows, padded):
        step = Step(format=format, **lengths)
        batch = step.batch()
        results.append(call(pad(step.q.clone()), pad(step.kv), step.weights, batch))
        pools.append(batch.cache.payload)
    want, got = results
    assert len(got) == len(want) + PADDING
    assert_same_bits("out", got[: len(want)], want)
    assert_same_bits("cache", *pools)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["bf16", "fp8", "fp8_token", "fp8_block128"])
@pytest.mark.parametrize("heads", [16, 128])
def test_padding_at_the_widths_of_a_model(heads, format):
    """Whatever kernel `auto` selects: as many queries per request on average, so the same plan."""
    generator = torch.Generator("cuda").manual_seed(0)
    cache = PagedLatentCache.allocate(
        RowShape(512, 64), format, num_pages=20, page_size=64, device="cuda"
    )
    rows = torch.randn(20 * 64, 576, generator=generator, device="cuda")
    cache.layer(0).write(torch.arange(20 * 64, device="cuda"), rows)
    table = torch.arange(20, dtype=torch.int32, device="cuda").view(2, 10)
    kv_lens, q_starts = (int32(values).cuda() for values in ([600, 77], [0, 2, 3]))
    q = torch.randn(3, heads, 576, generator=generator, device="cuda").bfloat16()
    options = {"softmax_scale": 0.1, "q_starts": q_starts}
    want = mla_decode(q, cache, table, kv_lens, **options)
    longer = padded(q, 1)
    given = [poison(torch.empty_like(padded(each, 1))) for each in want]
    before = [each.clone() for each in given]
    mla_decode(longer, cache, table, kv_lens, **options, out=given[0], lse=given[1])
    for own, got, old in zip(want, given, before, strict=True):
        assert_same_bits("queries", got[:3], own)
        assert_same_bits("padding", got[3:], old[3:])


@pytest.mark.gpu
@pytest.mark.parametrize("kv_lens", [(200, 40), (0, 0)], ids=["keys", "no keys"])
def test_padding_of_a_prompt(kv_lens):
    """Whatever kernel `auto` selects."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    q, keys = normal(170, 16, 192), sum(kv_lens)
    given_keys = normal(keys, 16, 128), normal(keys, 64), normal(keys, 16, 128)
    starts = [int32([0, *torch.tensor(n).cumsum(0).tolist()]).cuda() for n in ((130, 40), kv_lens)]
    want = mla_prefill(q, *given_keys, *starts, softmax_scale=0.1)
    given = [poison(torch.empty_like(padded(each))) for each in want]
    before = [each.clone() for each in given]
    mla_prefill(padded(q), *given_keys, *starts, softmax_scale=0.1, out=given[0], lse=given[1])
    for own, got, old in zip(want, given, before, strict=True):
        assert_same_bits("queries", got[:170], own)
        assert_same_bits("padding", got[170:], old[170:])
