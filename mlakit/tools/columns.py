"""Tables that fit the terminal: whole columns are dropped, digits never."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlakit.dispatch import knobs

WIDE = 150  # columns if the output is not a terminal


def counted(number: int, noun: str) -> str:
    """Return "1 call", "2 calls"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def wide_console() -> Console:
    """A console for tables: as wide as the terminal or COLUMNS, else `WIDE`."""
    has_width = Console().is_terminal or knobs.columns() is not None
    return Console(width=None if has_width else WIDE)


@dataclass(frozen=True)
class Column:
    """A column of a table.

    heading    may have several lines
    rank       0 is always shown; the highest ranks are dropped first where there is no room
    is_number  aligned right
    folds_at   the minimum width to which text may be folded; None: only if nothing else helps
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
) -> Table:
    """A table no wider than `width`. The caption names the dropped columns.

    grouped  equal values of the first column are shown once, with a line between groups
    """
    lines = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    highest = max(column.rank for column in columns)
    for rank in range(highest, -1, -1):
        shown = [i for i, column in enumerate(columns) if column.rank <= rank]
        table = _table(columns, lines, shown, grouped)
        if _width(table) <= width:
            break
    else:  # even the columns of rank 0 do not fit: text is folded
        for i, column in zip(shown, table.columns, strict=True):
            column.no_wrap, column.min_width = columns[i].is_number, None
    absent = dict.fromkeys(" ".join(each.heading.split()) for each in columns if each.rank > rank)
    notes = [caption] if caption else []
    if absent:
        needed = _width(_table(columns, lines, range(len(columns)), grouped))
        hidden = ", ".join(absent)
        notes.append(f"columns hidden at this width: {hidden} (COLUMNS={needed} shows them)")
    table.caption, table.caption_justify = "\n".join(notes) or None, "left"
    return table


def _width(table: Table) -> int:
    """Return the width that a table of this module needs at least."""
    return sum(each.min_width or 0 for each in table.columns) + 2 * len(table.columns) + 1


def _table(
    columns: Sequence[Column], lines: Sequence[Sequence[Text]], shown: Sequence[int], grouped: bool
) -> Table:
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for i in shown:
        column = columns[i]
        headings = map(cell_len, column.heading.splitlines())
        widest = max([*headings, *(line[i].cell_len for line in lines)])
        table.add_column(
            column.heading,
            justify="right" if column.is_number else "left",
            no_wrap=column.folds_at is None,
            overflow="fold",
            min_width=min(widest, column.folds_at or widest),
        )
    previous = None
    for line in lines:
        name = line[0].plain
        if grouped and previous not in (None, name):
            table.add_section()
        is_same = grouped and name == previous
        table.add_row(*(Text() if i == 0 and is_same else line[i] for i in shown))
        previous = name
    return table
