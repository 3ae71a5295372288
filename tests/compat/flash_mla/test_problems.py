"""The drop-in for FlashMLA passes FlashMLA's own test problems."""

from __future__ import annotations

import pytest
import torch

from mlakit.tools.testing import assert_matches
from tests.compat.flash_mla.dense_cases import (
    HEADS,
    SERVING_DENSE,
    dense_cases,
    dense_pairs,
)
from tests.compat.flash_mla.inputs import DENSE_OUT, assert_close
from tests.compat.flash_mla.running import (
    FEW,
    KINDS,
    check,
    check_all,
    check_all_by_heads,
    run_sparse,
)
from tests.compat.flash_mla.sparse_cases import (
    LONG_PREFILL,
    PREFILL_WIDTHS,
    SERVING_PREFILL,
    SERVING_SPARSE,
    SMALL,
    SPARSE_GROUPS,
    SPARSE_HEADS,
    Scope,
    SparseCase,
    prefill_cases,
    prefill_pairs,
    sparse_pairs,
)
from tests.compat.flash_mla.varlen_cases import VARLEN_CASES


@pytest.mark.parametrize("case", FEW, ids=str)
def test_some_of_its_problems_and_others(case, device):
    run, rules = KINDS[type(case)]
    problem = case.make(device)
    got = run(problem)
    check(problem, got)
    naive, exact = problem.answer(torch.float32), problem.answer()
    for (name, _), actual, want, plain in zip(rules, got, exact, naive, strict=True):
        assert_matches(name, actual, want, plain)


def test_the_first_heads_are_a_problem_of_their_own(device):
    case = SparseCase(3, 2, SMALL, Scope(30, 33, 2), h_q=6, d=512)
    check_all_by_heads(iter([case]), device, (2, 5, 6))
    problem = case.make(device)
    whole, part = problem.answer(), problem.of_heads(5).answer()
    torch.testing.assert_close(part[0], whole[0][:, :, :5], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(part[1], whole[1][:, :5], rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_a_row_that_is_listed_twice_counts_twice(device):
    case = SparseCase(3, 2, SMALL, Scope(30, 33, 2), h_q=4, d=512, varlen=False)
    once, again = case.make(device), case.make(device)
    for source in (again.main, again.extra):
        source.indices[..., 1:4] = source.indices[..., :1]
    check(again, run_sparse(again))
    assert not torch.allclose(again.answer()[0], once.answer()[0], atol=1e-3)


PARTS = 8  # of a list of problems: each test has every eighth of them
EACH_PART = pytest.mark.parametrize("part", range(PARTS))


@pytest.mark.gpu
@pytest.mark.large
@EACH_PART
def test_dense_problems_with_every_pair_of_features(part, device):
    check_all(dense_pairs()[part::PARTS], device)


@pytest.mark.gpu
@pytest.mark.large
@EACH_PART
def test_sparse_decode_problems_with_every_pair_of_features(part, device):
    check_all_by_heads(sparse_pairs()[part::PARTS], device, SPARSE_HEADS)


@pytest.mark.gpu
@pytest.mark.large
@EACH_PART
def test_sparse_prefill_problems_with_every_pair_of_features(part, device):
    check_all(prefill_pairs()[part::PARTS], device)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.exhaustive
@pytest.mark.parametrize(("h_q", "h_kv"), HEADS)
def test_all_of_its_dense_problems(h_q, h_kv, device):
    check_all(dense_cases(h_q, h_kv), device)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.exhaustive
@pytest.mark.parametrize("group", SPARSE_GROUPS, ids=str)
def test_all_of_its_sparse_decode_problems(group, device):
    check_all_by_heads(group.cases(), device, SPARSE_HEADS)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.exhaustive
@pytest.mark.parametrize(("d", "h_q"), PREFILL_WIDTHS)
def test_all_of_its_sparse_prefill_problems(d, h_q, device):
    check_all(prefill_cases(d, h_q), device)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("case", VARLEN_CASES, ids=str)
def test_all_of_its_varlen_problems(case, device):
    check_all([case], device)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "listed",
    [
        pytest.param(SERVING_DENSE, marks=pytest.mark.large, id="dense"),
        # the oracle takes 89 GiB
        pytest.param(SERVING_SPARSE, marks=pytest.mark.large(turns=3), id="sparse"),
        pytest.param(SERVING_PREFILL, marks=pytest.mark.large, id="prefill"),
    ],
)
def test_the_problems_it_measures_speed_on(listed, device):
    check_all(listed, device)


@pytest.mark.gpu
@pytest.mark.large
def test_more_queries_than_a_grid_axis_has(device):
    check_all([LONG_PREFILL], device)


def test_the_lists_are_as_long_as_flash_mlas():
    assert len(HEADS) == 16
    assert sum(1 for heads in HEADS for _ in dense_cases(*heads)) == 16 * 146
    sparse = [case for group in SPARSE_GROUPS for case in group.cases()]
    assert len(set(sparse)) == len(sparse) == 120 + 120 + 90 + 624 + 3 * 468
    assert SPARSE_HEADS == (64, 128)
    assert sum(1 for width in PREFILL_WIDTHS for _ in prefill_cases(*width)) == 4 * 94
    assert len(SERVING_SPARSE) == 4 + 24 + 4


@pytest.mark.parametrize("spoil", [0.0, torch.nan, torch.inf])
def test_the_rule_of_comparison_sees_one_wrong_number(spoil):
    want = torch.linspace(-1, 1, 1000).view(10, 100)
    assert_close("same", want.bfloat16(), want, DENSE_OUT)
    wrong = want.clone()
    wrong[3, 0] = spoil
    with pytest.raises(AssertionError):
        assert_close("wrong", wrong, want, DENSE_OUT)
    with pytest.raises(AssertionError, match="cosine"):
        assert_close("all a little", want * 1.01, want, DENSE_OUT)
