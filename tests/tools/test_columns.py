"""Tables of every width: whole columns are dropped, digits never."""

from __future__ import annotations

import re
from io import StringIO

import pytest
from rich.console import Console

from mlakit.tools.bench.tables import digits, table, times_of
from mlakit.tools.columns import Column, counted, fitting_table
from tests.tools.bench.fakes import row

LONG = "decode-fp8_block128-b128-h128-q2-8192"  # among the longest names there are
IMPLEMENTATIONS = ("mlakit", "mlakit, graph replay", "planned in the call", "flash_mla")


def spread(value: float):
    return row("", "", value).us


ROWS = [
    row(
        workload,
        implementation,
        12345.0 + 10 * i,
        roofline=0.987,
        **(
            {}
            if i == 0
            else {"speedup": spread(1.12 + i / 100), "min_speedup": 1.18, "met": i == 3}
        ),
    )
    for workload in (LONG, "decode-bf16-b4-h16-1024")
    for i, implementation in enumerate(IMPLEMENTATIONS)
]


def shown(table: object, width: int) -> list[str]:
    console = Console(width=width, file=StringIO())
    console.print(table)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    return lines


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 150, 200])
def test_every_time_and_speedup_is_whole_at_every_width(width):
    lines = shown(table(ROWS, "us", width), width)
    assert "…" not in "".join(lines)
    for each in ROWS:
        found = [line for line in lines if digits(each.us.p50) in line.split()]
        assert found, each
        if each.speedup is not None:
            assert any(times_of(each.speedup.p50) in line.split() for line in found)


def test_hidden_columns_are_named_and_the_width_that_shows_them():
    columns = (Column("name", is_number=False), Column("bytes", 1), Column("tokens that fit", 2))
    rows = [("a" * 10, "123456", "7")]
    (said,) = re.findall(
        r"columns hidden at this width: tokens that fit \(COLUMNS=(\d+) shows them\)",
        " ".join(" ".join(shown(fitting_table(columns, rows, 30), 30)).split()),
    )
    for width in (int(said) - 1, int(said)):
        text = "\n".join(shown(fitting_table(columns, rows, width), width))
        assert ("hidden" in text) == (width < int(said))


def test_one_thing_is_not_plural():
    assert [counted(n, "call") for n in (0, 1, 2)] == ["0 calls", "1 call", "2 calls"]


def test_a_table_too_wide_for_its_own_names_folds_them_and_no_number():
    columns = (Column("name", is_number=False), Column("what", is_number=False), Column("number"))
    rows = [("a" * 30, "b" * 30, "123456"), ("a" * 30, "c", "7"), ("d", "e", "[8]")]
    for width in (24, 40):
        text = "".join(lines := shown(fitting_table(columns, rows, width), width))
        assert (text.count("a"), text.count("b")) == (30 + 2, 30 + 1)  # and those of the headings
        assert any("123456" in line.split() for line in lines)
        assert any(line.split() == ["d", "e", "[8]"] for line in lines)  # no markup
