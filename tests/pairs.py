"""Which combinations of values are tested where all of them would be too many.

Most mistakes need one value or two at a time: `pairwise` has every pair of values of two axes in
some combination, which for axes of 8, 5 and 5 values takes 40 combinations instead of 200.
`with_every_pair` chooses as many from a list that has some of the combinations only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
Pair = tuple[tuple[int, int], tuple[int, int]]  # (axis, value) twice, by position


def pairwise(**axes: Sequence[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrise a test by combinations of one value of each axis that have every pair of values.

    axes  name=values of each parameter, or name={id: value}
    """
    values = [list(each.values() if isinstance(each, Mapping) else each) for each in axes.values()]
    ids = [list(each) if isinstance(each, Mapping) else None for each in axes.values()]
    return pytest.mark.parametrize(
        tuple(axes),
        [
            pytest.param(
                *(values[axis][place] for axis, place in enumerate(chosen)),
                id="-".join(
                    _id_of(values[axis][place]) if names is None else str(names[place])
                    for axis, (place, names) in enumerate(zip(chosen, ids, strict=True))
                ),
            )
            for chosen in covering([len(each) for each in values])
        ],
    )


def covering(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield places of values, one of each axis, until every pair of places was in one of them.

    Each combination takes the first pair that is missing and, on the other axes, the places that
    have most missing pairs with those chosen. It is the same in every run.
    """
    missing: dict[Pair, None] = {
        ((i, a), (j, b)): None
        for i, j in combinations(range(len(sizes)), 2)
        for a in range(sizes[i])
        for b in range(sizes[j])
    }
    if len(sizes) == 1:
        yield from ((place,) for place in range(sizes[0]))
    uses = [[0] * size for size in sizes]
    while missing:
        chosen = dict(next(iter(missing)))
        for axis in sorted(set(range(len(sizes))) - set(chosen), key=lambda axis: -sizes[axis]):
            chosen[axis] = max(
                range(sizes[axis]),
                key=lambda place: (_gain(missing, chosen, axis, place), -uses[axis][place]),
            )
        for pair in combinations(sorted(chosen.items()), 2):
            missing.pop(pair, None)
        for axis, place in chosen.items():
            uses[axis][place] += 1
        yield tuple(place for _, place in sorted(chosen.items()))


def with_every_pair(cases: Sequence[T], values_of: Callable[[T], tuple[Hashable, ...]]) -> list[T]:
    """Return cases that have every pair of values that any case has, in the order of the list.

    values_of  gives the values of a case, one of each axis
    """
    pairs = [set(combinations(enumerate(values_of(case)), 2)) for case in cases]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        most = max(len(own & missing) for own in pairs)
        for place, own in enumerate(pairs):
            if len(own & missing) == most:
                chosen.append(place)
                missing -= own
    return [cases[place] for place in sorted(chosen)]


def _gain(missing: Mapping[Pair, None], chosen: Mapping[int, int], axis: int, place: int) -> int:
    """How many missing pairs `place` on `axis` makes with the places that are chosen."""
    own = (axis, place)
    return sum(
        (own, other) in missing if own < other else (other, own) in missing
        for other in chosen.items()
    )


def _id_of(value: object) -> str:
    return str(getattr(value, "__name__", value))
