"""`mlakit emulate`: what it prints of a run, and where there is no emulator."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from mlakit.tools import cli
from mlakit.tools.compile.configurations import BLACKWELL, HOPPER
from mlakit.tools.emulator import command, record
from mlakit.tools.emulator.frontend import Launch
from mlakit.tools.emulator.harness import Outcome, Step

NAME = "hopper-indexer-h32-q1"
LAUNCH = Launch("indexer_logits_kernel", ctas=2, steps=70, lowering_s=1.0, run_s=0.1)
STEPS = tuple(Step("default" if i % 2 else "TMA loads", f"kernel.py:{i}") for i in range(10))
RACE = {"kind": "Race", "message": "write of keys[0]\n  in default at kernel.py:9"}


def invoke(monkeypatch: pytest.MonkeyPatch, *arguments: str, **outcome: Any) -> tuple[int, str]:
    """Run the command; its runs have this outcome."""

    def emulate(name: str, seed: int, *, is_traced: bool) -> Outcome:
        trace = STEPS if is_traced else ()
        return Outcome(name, seed, launches=(LAUNCH,), trace=trace, seconds=0.5, **outcome)

    monkeypatch.setattr(command, "emulate", emulate)
    result = CliRunner().invoke(cli.app, ["emulate", *arguments])
    return result.exit_code, result.output


def test_a_run_without_a_fault(monkeypatch):
    code, output = invoke(monkeypatch, NAME, "--seed", "3")
    assert code == 0
    assert f"{NAME}, seed 3: ok, 0.5 s" in output
    assert "ran indexer_logits_kernel (2 CTAs, 70 steps)" in output
    assert "steps that led" not in output


def test_a_fault_has_its_place_and_the_exit_status_1(monkeypatch):
    code, output = invoke(monkeypatch, NAME, **RACE)
    assert code == 1
    assert f"{NAME}, seed 0: Race" in output
    assert "write of keys[0]" in output
    assert "in default at kernel.py:9" in output


def test_a_trace_shows_who_did_what_in_order(monkeypatch):
    code, output = invoke(monkeypatch, NAME, "--trace", "--steps", "4", **RACE)
    assert code == 1
    assert "(6 steps before these are not shown)" in output
    lines = [line.split() for line in output.splitlines() if "kernel.py:" in line][1:]
    assert lines == [
        ["7", "TMA", "loads", "kernel.py:6"],
        ["8", "default", "kernel.py:7"],
        ["9", "TMA", "loads", "kernel.py:8"],
        ["10", "default", "kernel.py:9"],
    ]


def test_a_part_of_a_name_runs_several_with_several_seeds(monkeypatch):
    code, output = invoke(monkeypatch, "indexer-single", "--seeds", "2")
    assert code == 0
    count = 2 * sum("indexer-single" in name for name in HOPPER)
    assert f"{count} runs, all passed" in output
    code, output = invoke(monkeypatch, "indexer-single", **RACE)
    assert (code, "6 runs, 6 of them failed" in output) == (1, True)


def test_a_record_of_the_runs_is_written(monkeypatch, tmp_path):
    file = tmp_path / "emulated.json"
    code, _ = invoke(monkeypatch, "indexer-single", "--seeds", "2", "--json", str(file), **RACE)
    recorded = record.read(file)
    assert (code, recorded.seeds, len(recorded.faults)) == (1, (0, 1), 12)


def test_the_list_has_every_configuration(monkeypatch):
    code, output = invoke(monkeypatch, "--list")
    assert code == 0
    assert [line.split()[0] for line in output.splitlines()] == list(HOPPER | BLACKWELL)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "NAME must be a configuration, as --list shows them, got nothing"),
        (("encode",), "NAME must be a configuration, as --list shows them, got 'encode'"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(arguments, said, monkeypatch):
    code, output = invoke(monkeypatch, *arguments)
    assert code == 2
    assert said in " ".join(output.replace("│", " ").split())


def test_a_wheel_says_where_the_emulator_is(monkeypatch):
    for module in [name for name in sys.modules if name.startswith("mlakit.tools")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "mlakit.tools", None)
    result = CliRunner().invoke(cli.app, ["emulate", NAME])
    assert result.exit_code == 1
    assert "the emulator is in the source tree of mlakit only, not in its wheel" in result.output
