"""The batched references equal the references that loop over queries, on random cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mlakit import reference
from mlakit.reference import batched
from mlakit.tools.workloads import (
    BatchedCase,
    DecodeCase,
    IndexerLogitsCase,
    IndexerSelectCase,
    IndexerTopkCase,
    PrefillCase,
    SparseCase,
)
from mlakit.tools.workloads.fp8_scores import FORMATS as FP8_FORMATS
from mlakit.tools.workloads.random_cases import CACHED, SeededDraw, random_case

pytestmark = pytest.mark.slow

KINDS = (
    DecodeCase,
    PrefillCase,
    SparseCase,
    IndexerLogitsCase,
    IndexerTopkCase,
    IndexerSelectCase,
)
CASES = 30


def compare_with_the_loop(monkeypatch: pytest.MonkeyPatch, op: str) -> list[int]:
    """Compare both references at each call of the one that loops; returns a list of all calls."""
    loop, together, calls = getattr(reference, op), getattr(batched, op), []

    def both(*arguments: Any, **options: Any) -> Any:
        wanted, got = loop(*arguments, **options), together(*arguments, **options)
        assert [each.dtype for each in _tuple(got)] == [each.dtype for each in _tuple(wanted)]
        exactly = options | ({"dtype": torch.float64} if "dtype" in options else {})
        got, want = (_tuple(each(*arguments, **exactly)) for each in (together, loop))
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, equal_nan=True)
        calls.append(len(got[0]))
        return wanted

    monkeypatch.setattr(reference, op, both)
    return calls


def _tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize("kind", KINDS)
def test_both_references_give_the_same(kind, monkeypatch):
    calls = compare_with_the_loop(monkeypatch, kind.op)
    for seed in range(CASES):
        random_case(SeededDraw(f"{kind.op} {seed}"), kind).run("cpu", "cpu")
    assert len(calls) >= CASES
    assert max(calls) > 10


def test_both_references_of_decode_take_products(monkeypatch):
    monkeypatch.setattr(DecodeCase, "uses_fp8_qk", lambda *_: True)
    calls = compare_with_the_loop(monkeypatch, "mla_decode")
    for seed in range(10):
        case = CACHED[DecodeCase](SeededDraw(seed), FP8_FORMATS[seed % 2])
        replace(case, dtype="e4m3", q_rope_dtype="").run("cpu", "cpu")
    assert len(calls) >= 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_case_passes_with_the_batched_oracle(kind, monkeypatch):
    monkeypatch.delattr(reference, kind.op)
    for seed in range(CASES):
        case = random_case(SeededDraw(f"{kind.op} {seed}"), kind)
        assert isinstance(case, BatchedCase)
        replace(case, oracle="batched", calls=seed % 3).run("cpu", "cpu")
