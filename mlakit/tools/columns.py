"""Tables that fit the terminal: whole columns are dropped, digits never."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from mlakit.dispatch import knobs

WIDE = 150  # columns if the output is not a terminal
BORDER, PADDING = 1, 1  # around and between the columns; after each cell


def wide_console() -> Console:
    """A console for tables: as wide as the terminal or COLUMNS, else `WIDE`."""
    has_width = Console().is_terminal or knobs.columns() is not None
    return Console(width=None if has_width else WIDE)


@dataclass(frozen=True)
class Column:
    """A column of a table.

    rank       0 is always shown; higher ranks are added in order while they fit
    is_number  aligned right
    folds_at   the minimum width to which text may be folded; None: never folded
    """

    heading: str
    rank: int = 0
    is_number: bool = True
    folds_at: int | None = None


def fitting_table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[str | Text]],
    width: int,
    *,
    caption: str = "",
    grouped: bool = True,
) -> RenderableType:
    """A table no wider than `width`.

    If even the columns of rank 0 do not fit, the values of the first column become lines above
    their group, and other text is folded. The caption names the dropped columns.

    grouped  equal values of the first column are shown once, with a line between groups
    """
    lines = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    shown = [i for i, column in enumerate(columns) if column.rank == 0]
    for rank in sorted({column.rank for column in columns}):
        more = sorted({*shown, *(i for i, column in enumerate(columns) if column.rank == rank)})
        if _width_of(columns, lines, more) <= width:
            shown = more
    absent = dict.fromkeys(each.heading for i, each in enumerate(columns) if i not in shown)
    notes = "; ".join(
        [caption] * bool(caption) + [f"no room for {', '.join(absent)}"] * bool(absent)
    )
    if _width_of(columns, lines, shown) <= width:
        table = _table(columns, lines, shown, grouped)
        table.caption, table.caption_justify = notes or None, "left"
        return table
    foldable = [each if each.is_number else replace(each, folds_at=1) for each in columns]
    groups: dict[str, list[list[Text]]] = {}
    for line in lines:
        groups.setdefault(line[0].plain, []).append(line)
    parts: list[RenderableType] = []
    for name, group in groups.items():
        parts += [Text(name), _table(foldable, group, shown[1:], grouped)]
    return Group(*parts, Text(notes))


def _width_of(
    columns: Sequence[Column], lines: Sequence[Sequence[Text]], shown: Sequence[int]
) -> int:
    total = BORDER
    for i in shown:
        widest = max([cell_len(columns[i].heading), *(line[i].cell_len for line in lines)])
        total += min(widest, columns[i].folds_at or widest) + PADDING + BORDER
    return total


def _table(
    columns: Sequence[Column],
    lines: Sequence[Sequence[Text]],
    shown: Sequence[int],
    grouped: bool,
) -> Table:
    table = Table(box=SIMPLE, padding=(0, PADDING, 0, 0))
    for column in (columns[i] for i in shown):
        table.add_column(
            column.heading,
            justify="right" if column.is_number else "left",
            no_wrap=column.folds_at is None,
            overflow="fold",
        )
    previous = None
    for line in lines:
        name = line[0].plain
        is_same = grouped and name == previous
        if grouped and previous not in (None, name):
            table.add_section()
        table.add_row(*(Text() if i == 0 and is_same else line[i] for i in shown))
        previous = name
    return table
