"""Tables of every width: whole columns are dropped, digits never."""

from __future__ import annotations

import json
import re
from io import StringIO

import pytest
from rich.console import Console
from typer.testing import CliRunner

from mlakit.tools import cli
from mlakit.tools.bench.compare import compare, comparison_table
from mlakit.tools.bench.grid import WORKLOADS as GRID
from mlakit.tools.bench.heatmap import heat_maps, heat_table
from mlakit.tools.bench.tables import digits, table, times_of
from mlakit.tools.columns import WIDE, Column, fitting_table
from mlakit.tools.compile.compilation import Compiled, compile_table
from tests.tools.bench.fakes import report, row

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


def headings(lines: list[str]) -> list[str]:
    return next(line.split() for line in lines if "implementation" in line)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 150, 200])
def test_every_time_and_speedup_is_whole_at_every_width(width):
    lines = shown(table(ROWS, "us", width), width)
    assert "…" not in "".join(lines)
    for each in ROWS:
        found = [line for line in lines if digits(each.us.p50) in line.split()]
        assert found, each
        if each.speedup is not None:
            assert any(times_of(each.speedup.p50) in line.split() for line in found)


def test_eighty_columns_have_workload_implementation_time_and_speedup():
    lines = shown(table(ROWS, "us", 80), 80)
    assert any(LONG in line for line in lines)
    assert {"implementation", "us", "speedup"} <= set(headings(lines))
    short = [each for each in ROWS if each.workload != LONG]
    names = headings(shown(table(short, "us", 80), 80))
    assert names[:3] == ["workload", "implementation", "us"]
    assert {"speedup", "target"} <= set(names)


@pytest.mark.slow
def test_what_has_no_room_is_named_and_the_least_important_goes_first():
    short = [each for each in ROWS if each.workload != LONG]
    everything = ["us", "TFLOP/s", "GB/s", "rounds", "speedup", "p20", "p80", "target"]
    assert set(everything) <= set(headings(shown(table(short, "us", WIDE), WIDE)))
    said = " ".join(" ".join(shown(table(short, "us", 80), 80)).split())
    absent = said.partition("no room for ")[2]
    assert {"p20", "p80", "rounds"} <= set(re.findall(r"[\w/]+", absent))
    assert "target" not in absent


def test_a_table_too_wide_for_its_own_names_folds_them_and_no_number():
    columns = (Column("name", is_number=False), Column("what", is_number=False), Column("number"))
    rows = [("a" * 30, "b" * 30, "123456"), ("a" * 30, "c", "7"), ("d", "e", "[8]")]
    for width in (24, 40):
        text = "".join(lines := shown(fitting_table(columns, rows, width), width))
        assert (text.count("a"), text.count("b")) == (30 + 2, 30 + 1)  # and those of the headings
        assert any("123456" in line.split() for line in lines)
        assert any(line.split() == ["d", "e", "[8]"] for line in lines)  # no markup


def test_comparisons_fit_eighty_columns():
    now = [report(*ROWS)]
    lines = shown(comparison_table(compare(now, now), 80), 80)
    assert sum("within the spread" in line for line in lines) == len(ROWS)
    assert sum(digits(ROWS[1].speedup.p50) in line for line in lines) >= 2
    assert "…" not in "".join(lines)


@pytest.mark.slow
def test_maps_of_the_grid_fit_eighty_columns():
    rows = [row(each.name, "flash_mla", 10.0, speedup=spread(1.126)) for each in GRID]
    for heat in heat_maps(rows):
        lines = shown(heat_table(heat), 80)
        assert sum(line.count("1.13x") for line in lines) == len(heat.cells)


def test_compiled_kernels_fit_eighty_columns():
    kernels = [
        Compiled(
            "hopper-decode-h16-fp8_block128-e4m3-q-external-plan",
            90,
            "mla_decode_small_m_fp8_kv_kernel",
        ),
        Compiled("merge-2", 120, "merge_states_kernel", error="CompilationError: " + "why " * 30),
    ]
    for width in (60, 80, WIDE):
        lines = shown(compile_table(kernels, width), width)
        assert sum("sm_90" in line or "sm_120" in line for line in lines) == 2
        assert "why why" in " ".join(lines)
        assert "…" not in "".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "widest"), [("80", 80), (None, WIDE)])
def test_the_command_keeps_to_the_columns_it_is_given(tmp_path, monkeypatch, columns, widest):
    file = tmp_path / "stored.json"
    file.write_text(json.dumps(report(*ROWS).as_json()), "utf-8")
    monkeypatch.delenv("COLUMNS", raising=False)
    environment = {} if columns is None else {"COLUMNS": columns}
    result = CliRunner(env=environment).invoke(cli.app, ["bench", "--from", str(file)])
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= widest
    assert ("TFLOP/s" in result.output.partition("no room")[0]) == (columns is None)
