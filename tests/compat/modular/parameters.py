"""What tests of the documented functions are repeated over."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest
import torch

from tests.compat.modular.inputs import MASKS, PAGES_AND_HEADS, Step, window_of
from tests.pairs import covering

# forms of caches with scales, as fields of a case
SCALED = {
    "rope-aware": {"has_token_scales": True},
    "row": {"scale_columns": 576},
    "group32": {"scale_columns": 32},
    "group64": {"scale_columns": 64},
    "group128": {"scale_columns": 128},
}
INTEGERS = [torch.int32, torch.int64, torch.uint32]
NO_REQUESTS = Step((), ())
NO_TOKENS = Step((5, 0, 17), (0, 0, 0))

pages_and_heads = pytest.mark.parametrize(
    ("page_size", "heads"), PAGES_AND_HEADS, ids=lambda n: str(n)
)


def taking_turns(
    names: tuple[str, ...], rows: Sequence[tuple[Any, ...]], **others: Sequence[Any]
) -> pytest.MarkDecorator:
    """Parametrise by rows, each with one value of every other parameter, which take turns.

    A kernel is compiled for each combination, and no code path depends on both.
    """
    turns = zip(rows, *map(cycle, others.values()), strict=False)
    params = [(*row, *turn) for row, *turn in turns]
    return pytest.mark.parametrize((*names, *others), params, ids=str)


scale_pools = pytest.mark.parametrize(
    "has_scale_pool", [False, True], ids=["same-pages", "own-pages"]
)
scaled_rows = pytest.mark.parametrize("scaled", SCALED)
ALL_FP8_ROWS = [name for name in SCALED if name != "rope-aware"]
all_fp8_rows = pytest.mark.parametrize("scaled", ALL_FP8_ROWS)
integer_types = pytest.mark.parametrize("integer_type", INTEGERS, ids=str)
WINDOWS = {kind: [1, 6, 37] if window_of(kind, 1) else [0] for kind in MASKS}
windowed_masks = pytest.mark.parametrize(
    ("mask", "window"), [(kind, w) for kind, windows in WINDOWS.items() for w in windows]
)


def windowed_masks_and(**others: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrise by every pair of values, of which the kinds of masks are some, and by windows.

    A kernel is compiled for each kind of mask, and takes every window.
    """
    axes = [list(MASKS), *others.values()]
    chosen = [
        [axis[place] for axis, place in zip(axes, places, strict=True)]
        for places in covering([len(axis) for axis in axes])
    ]
    params = [(kind, w, *rest) for kind, *rest in chosen for w in WINDOWS[kind]]
    return pytest.mark.parametrize(("mask", "window", *others), params)
