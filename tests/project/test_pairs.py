"""Combinations of parameters that have every pair of values."""

from __future__ import annotations

from itertools import combinations, product
from math import prod

import pytest

from tests.pairs import covering, pairwise, with_every_pair


def pairs_of(chosen):
    return set(combinations(enumerate(chosen), 2))


@pytest.mark.parametrize(
    ("sizes", "most"),
    [
        ((3,), 3),
        ((2, 5), 10),
        ((5, 8, 5), 44),
        ((6, 5, 2), 30),
        ((4, 3, 2, 2, 3), 16),
        ((11, 4, 3), 44),
        ((2,) * 10, 12),
        ((1, 1, 4), 4),
    ],
)
def test_every_pair_is_in_few_combinations(sizes, most):
    chosen = list(covering(sizes))
    everything = set().union(*(pairs_of(each) for each in product(*map(range, sizes))))
    assert set().union(*(pairs_of(each) for each in chosen)) == everything
    assert len(set(chosen)) == len(chosen) <= most <= prod(sizes)
    assert {each[-1] for each in chosen} == set(range(sizes[-1]))
    assert chosen == list(covering(sizes))


def test_every_pair_of_a_list_is_in_few_of_its_cases():
    """A list without the combinations in which the first two values are equal."""
    cases = [each for each in product(range(6), range(6), range(3), "ab") if each[0] != each[1]]
    chosen = with_every_pair(cases, lambda case: case)
    assert set().union(*map(pairs_of, chosen)) == set().union(*map(pairs_of, cases))
    assert len(chosen) <= 40 < len(cases) == 180
    assert chosen == sorted(set(chosen), key=cases.index)
    assert with_every_pair([], lambda case: case) == []


def test_parameters_have_readable_ids():
    mark = pairwise(heads=[8, 16], fields={"wide": {"wide": True}, "plain": {}}, kind=[int])
    names, params = mark.args
    assert names == ("heads", "fields", "kind")
    assert [each.id for each in params] == [
        "8-wide-int",
        "8-plain-int",
        "16-wide-int",
        "16-plain-int",
    ]
    assert params[1].values == (8, {}, int)
