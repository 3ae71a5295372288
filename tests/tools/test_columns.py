"""Tables of every width: whole columns are dropped, digits never."""

from __future__ import annotations

import re
from io import StringIO

import pytest
from rich.console import Console
from typer.testing import CliRunner

from mlakit.tools import accuracy, cli
from mlakit.tools.accuracy import Accuracy
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


def test_a_quick_run_says_that_it_is_no_speed_and_has_no_empty_column():
    plain = [row("decode-bf16-b4-h16-1024", "mlakit", 12345.0)]
    for is_quick in (False, True):
        text = "\n".join(shown(table(plain, "us", 80, is_quick=is_quick), 80))
        assert ("not how fast it is" in " ".join(text.split())) == is_quick
        assert "target" not in text
    assert "target" in "\n".join(shown(table(ROWS, "us", 200), 200))


WHOLE = {
    "memory deepseek-v3.2 --gpu-memory 141 --tp 8": ["1,932,928", "K/V, no MLA", "mxfp4_block32"],
    "memory deepseek-v3 --gpu-memory 1000 --context 4k,32k,128k,512k,1m": ["4,997,120"],
    "plan deepseek-v3 --context 128k --requests 32": ["274.5", "requests", "fp8"],
    "plan deepseek-v3 --context 128k": ["--tensor-parallel-size"],
    "support": ["norm_rope_quant_append", "hopper"],
    "explain mla_decode --arch 90": ["hopper:small_m_fp4_kv", "triton"],
    "bench --from docs/data/h200-decode.json": ["decode-fp8_token-b128-h128-4096", "228"],
    "bench --from docs/data/h200-prefill-grid.json": ["1.11x"],
}


@pytest.mark.parametrize("command", WHOLE)
def test_commands_cut_no_name_and_no_number_at_80_columns(command):
    """A row of a table that is cut at the margin ends in an ellipsis, or in half of a number."""
    wide, narrow = (
        CliRunner(env={"COLUMNS": str(width)}).invoke(cli.app, command.split()).output
        for width in (400, 80)
    )
    assert max(map(len, narrow.splitlines())) <= 80
    assert "…" not in narrow
    if not command.startswith("explain"):  # whose reasons may be folded
        number = r"(?<![\w.,=])\d[\d.,]*\b"  # not after COLUMNS=
        assert set(re.findall(number, narrow)) <= set(re.findall(number, wide))
    for each in WHOLE[command]:
        assert each in narrow


def test_accuracy_shows_every_format_at_80_columns():
    formats = ("eager", "bf16", "fp8", "fp8_token", "fp8_block128", "mxfp4_block32")
    found = [Accuracy(each, 12.3456, (0.0123, 0.000456)) for each in formats]
    text = "\n".join(shown(accuracy.table(found, "text.txt", 80), 80))
    assert "…" not in text
    assert "hidden" not in text
    for each in (*formats, "1.23e-02", "4.56e-04", "perplexity"):
        assert each in text.split()
    narrow = " ".join(" ".join(shown(accuracy.table(found, "text.txt", 60), 60)).split())
    assert "columns hidden at this width: mxfp4_block32 (COLUMNS=73 shows them)" in narrow


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
