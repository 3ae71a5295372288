"""Wrong calls of the public ops: each is refused in one sentence, and nothing is written."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from mlakit import ops
from mlakit.dispatch import checks
from mlakit.dispatch.checks import Dims
from mlakit.model import masks
from mlakit.ops._checks import check_query_starts
from mlakit.tools.testing import NEVER_A_PAGE, assert_same_bits, assert_unchanged, snapshot
from tests.ops.cases import CALLS, PAGE_SIZE, append_call, decode_call, int32, strided
from tests.ops.wrong_calls import WRONG
from tests.spoiling import changed, rows

ROWS = [(call, wrong) for call, table in WRONG.items() for wrong in rows(table)]


@pytest.mark.parametrize(("name", "wrong"), ROWS, ids=str)
def test_a_wrong_call_is_refused_and_writes_nothing(name, wrong):
    call = CALLS[name]()
    given = dict(zip(call.results, call.empty_results(strided), strict=True))
    call = call.but(**given)
    call = call.but(**wrong.of(call.arguments))
    tensors = {name: tensor for name, tensor in call.tensors() if tensor.device.type != "meta"}
    before = snapshot(**{**given, **tensors})
    with pytest.raises(wrong.error) as refusal:
        call.run()
    wrong.assert_is(refusal.value, call.function.__name__)
    assert_unchanged(before)


@pytest.mark.slow
def test_every_op_is_called_wrongly():
    counts = Counter(CALLS[name]().function.__name__ for name, _ in ROWS)
    functions = [getattr(ops, name) for name in ops.__all__]
    assert set(counts) == {f.__name__ for f in functions if not isinstance(f, type)}
    assert min(counts.values()) >= 5
    assert all(re.fullmatch(r"\S.* must \S.*, got .+", wrong.message) for _, wrong in ROWS)


def test_the_registered_op_says_the_same():
    call = decode_call()
    op, flat = call.but(kv_lens=changed(call.arguments["kv_lens"], 2, -1)).packed()
    with pytest.raises(
        ValueError, match=r"^mla_decode: kv_lens\[2\] must not be negative, got -1$"
    ):
        op.functional(*flat)


@pytest.mark.slow
@pytest.mark.parametrize("unused", [-1, -(2**31), NEVER_A_PAGE])
def test_page_table_entries_past_the_last_page_are_not_read(unused):
    """Nor are the pages of a request without queries, nor those before a window."""
    for make, request in ((decode_call, 1), (append_call, 1)):
        call = make()
        table = call.arguments["page_table"].clone()
        table[table == NEVER_A_PAGE] = unused
        table[request] = unused
        for result, want in zip(call.run(page_table=table), make().run(), strict=True):
            assert_same_bits("result", result, want)
    mask = masks.sliding_window_causal(2)
    want = decode_call(mask=mask).run()
    call = decode_call(mask=mask)
    table = call.arguments["page_table"].clone()
    first_seen = 9 - 3 - 2 + 1  # of request 2: nine tokens, three of them queries
    assert first_seen // PAGE_SIZE == 1
    table[2, 0] = unused
    for result, expected in zip(call.run(page_table=table), want, strict=True):
        assert_same_bits("result", result, expected)


def test_queries_of_no_request_are_refused_where_lengths_are_not_read(monkeypatch):
    monkeypatch.setattr(checks, "values_visible", lambda tensor: False)
    starts = int32([0])
    wanted = "op: q_starts must have a request for 5 query tokens, got none"
    with pytest.raises(ValueError, match=wanted):
        check_query_starts(Dims("op"), starts, 5, 0)
    assert check_query_starts(Dims("op"), starts, 0, 0) is starts
