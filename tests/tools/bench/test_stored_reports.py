"""`mlakit bench --from` and `--compare` of files that are no reports, or have wrong fields."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mlakit.tools import cli
from tests.tools.bench.fakes import around, report, row


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["bench", *map(str, arguments)])


def unfolded(output: str) -> str:
    """A text without spaces, and without the boxes and folds of a narrow terminal."""
    return re.sub(r"[│\s]+", "", output)


@pytest.fixture
def stored(tmp_path) -> Path:
    """A --json file of two rows."""
    file = tmp_path / "stored.json"
    rows = [
        row("a", "mlakit", 100.0, roofline=0.9),
        row("a", "flash_mla", 125.0, speedup=around(1.25), min_speedup=1.18, met=True),
    ]
    file.write_text(json.dumps(report(*rows).as_json()), encoding="utf-8")
    return file


def test_the_report_itself_is_read(stored, tmp_path):
    result = bench("--from", stored, "--compare", stored, "--plot", tmp_path / "charts")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "charts" / "decode-cold-bars.svg").is_file()


def altered(stored: Path, path: str, value: object) -> Path:
    """The report with another value at `path`, such as rows.0.p50_us."""
    content = json.loads(stored.read_text("utf-8"))
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
    place = content
    for part in parents:
        place = place[part]
    if value is MISSING:
        del place[last]
    else:
        place[last] = value
    file = stored.with_name("altered.json")
    file.write_text(json.dumps(content), "utf-8")
    return file


MISSING = object()
NUMBER, COUNT = "must be a number above 0", "must be an integer from 0 to"
NAME = "must be a name of letters, digits, spaces and + - _"


@pytest.mark.parametrize("option", ["--from", "--compare"])
@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("rows.0.p50_us", "x", f"rows[0].p50_us {NUMBER}, got 'x'"),
        ("rows.1.p50_us", 0, f"rows[1].p50_us {NUMBER}, got 0"),
        ("rows.0.p20_us", None, f"rows[0].p20_us {NUMBER}, got None"),
        ("rows.0.p80_us", float("nan"), f"rows[0].p80_us {NUMBER}, got nan"),
        ("rows.0.p80_us", 10**400, f"rows[0].p80_us {NUMBER}, got 1000"),
        ("rows.0.p80_us", MISSING, f"rows[0].p80_us {NUMBER}, got nothing"),
        ("rows.0.flops", "a", f"rows[0].flops {COUNT}"),
        ("rows.0.flops", 10**400, f"rows[0].flops {COUNT}"),
        ("rows.0.bytes", -1, f"rows[0].bytes {COUNT}"),
        ("rows.0.rounds", True, f"rows[0].rounds {COUNT}"),
        ("rows.0.workload", 7, "rows[0].workload must be a string, got 7"),
        ("rows.1.speedup_p50", [], f"rows[1].speedup_p50 {NUMBER}, got a list"),
        ("rows.1.min_speedup", "1", f"rows[1].min_speedup {NUMBER}, got '1'"),
        ("rows.1.met", 1, "rows[1].met must be true, false or null, got 1"),
        ("rows.0.roofline", {}, f"rows[0].roofline {NUMBER}, got an object"),
        ("rows.0", 5, "rows[0] must be an object, got 5"),
        ("rows", {}, "rows must be a list, got an object"),
        ("suite", 5, f"suite {NAME}, got 5"),
        ("suite", "../escaped/x", f"suite {NAME}, got '../escaped/x'"),
        ("suite", "a/b", f"suite {NAME}, got 'a/b'"),
        ("suite", "", f"suite {NAME}, got ''"),
        ("mode", ["cold"], f"mode {NAME}, got a list"),
        ("mode", "..", f"mode {NAME}, got '..'"),
        ("command", None, "command must be a string, got None"),
        ("environment", [], "environment must be an object, got a list"),
        ("left_out", 1, "left_out must be a list, got 1"),
        ("left_out.0.reason", 1, "left_out[0].reason must be a string, got 1"),
        ("ceilings", 3, "ceilings must be an object, got 3"),
        ("ceilings.read_gb_s", 0, f"ceilings.read_gb_s {NUMBER}, got 0"),
        ("memory", [{"weights": 1}], f"memory[0].cache {COUNT}"),
    ],
)
def test_a_report_with_a_wrong_field_is_refused(stored, tmp_path, option, path, value, said):
    file = altered(stored, path, value)
    charts = tmp_path / "deep" / "charts"
    charts.parent.mkdir()
    others = ["--plot", charts] if option == "--from" else ["--from", stored]
    result = bench(option, file, *others)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert unfolded(f"{option}: {file}: {said}") in unfolded(result.output)
    assert not charts.exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[" * 100_000, "is nested too deeply for a report"),
        ("[]", "has no report of mlakit bench"),
        ("[3]", "is no report of mlakit bench"),
        ("{}", "is no report of mlakit bench"),
    ],
    ids=["deep", "none", "number", "empty"],
)
def test_a_file_without_a_report_is_refused(tmp_path, content, said):
    file = tmp_path / "odd.json"
    file.write_text(content, "utf-8")
    result = bench("--from", file, "--json", tmp_path / "again.json")
    assert result.exit_code == 2, result.output
    assert unfolded(said) in unfolded(result.output)
    assert not (tmp_path / "again.json").exists()
