"""What tests of the documented functions are repeated over: tables of the fields of a case."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from itertools import product as every_combination
from typing import Any

import pytest
import torch

from mlakit.model.geometry import RowShape
from tests.compat.modular.inputs import MASKS, PAGES_AND_HEADS, Step, window_of
from tests.pairs import covering

Fields = dict[str, Any]

# forms of caches with scales, as fields of a case
SCALED = {
    "rope-aware": {"has_token_scales": True},
    "row": {"scale_columns": 576},
    "group32": {"scale_columns": 32},
    "group64": {"scale_columns": 64},
    "group128": {"scale_columns": 128},
}
FP8_ROWS = [fields for name, fields in SCALED.items() if name != "rope-aware"]
INTEGERS = [torch.int32, torch.int64, torch.uint32]
NOTHING_TO_DO = [{"step": Step((), ())}, {"step": Step((5, 0, 17), (0, 0, 0))}]
WINDOWS = {kind: [1, 6, 37] if window_of(kind, 1) else [0] for kind in MASKS}
integer_types = pytest.mark.parametrize("integer_type", INTEGERS, ids=str)
windowed_masks = pytest.mark.parametrize(
    ("mask", "window"), [(kind, w) for kind, windows in WINDOWS.items() for w in windows]
)


def table(**columns: Sequence[Any]) -> list[Fields]:
    """One row for the values of all columns at one place."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


PAGES = [{"page_size": page_size, "heads": heads} for page_size, heads in PAGES_AND_HEADS]
POOLS = table(has_scale_pool=[False, True])


def with_fields(rows: Iterable[Fields], **fields: Any) -> list[Fields]:
    return [row | fields for row in rows]


def taking_turns(rows: Iterable[Fields], others: Sequence[Fields]) -> list[Fields]:
    """Rows, each with one of the others, which take turns.

    A kernel is compiled for each combination, and no code path depends on both.
    """
    return [row | other for row, other in zip(rows, cycle(others), strict=False)]


def product(*tables: Sequence[Fields]) -> list[Fields]:
    """Every combination of a row of each table."""
    return [_joined(rows) for rows in every_combination(*tables)]


def pairs(*tables: Sequence[Fields]) -> list[Fields]:
    """Combinations of a row of each table in which every pair of rows is once."""
    return [
        _joined(each[place] for each, place in zip(tables, places, strict=True))
        for places in covering([len(each) for each in tables])
    ]


def under_masks(*tables: Sequence[Fields]) -> list[Fields]:
    """`pairs` with the kinds of masks, each with every window: a kernel takes all windows."""
    return [
        row | {"window": window}
        for row in pairs(table(mask=list(MASKS)), *tables)
        for window in WINDOWS[row["mask"]]
    ]


def cases(**groups: Sequence[Fields]) -> pytest.MarkDecorator:
    """Parametrise a test by `fields` of a case, in groups that say what they are about."""
    return pytest.mark.parametrize(
        "fields",
        [
            pytest.param(row, id="-".join([group, *_shown(row)]))
            for group, rows in groups.items()
            for row in rows
        ],
    )


def _joined(rows: Iterable[Fields]) -> Fields:
    return {name: value for row in rows for name, value in row.items()}


def _shown(row: Fields) -> list[str]:
    """The values that tell a case from others, by name where they are numbers."""
    shown = []
    for name, value in row.items():
        if isinstance(value, int):
            shown.append(f"{name}={value}")
        elif isinstance(value, RowShape):
            shown.append(f"{value.kv_lora_rank}+{value.qk_rope_head_dim}")
        elif isinstance(value, str | torch.dtype):
            shown.append(str(value).removeprefix("torch."))
    return shown
