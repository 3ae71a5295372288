"""The command line: what it prints, what it calls, how it ends."""

from __future__ import annotations

import re
import subprocess
import sys
import types

import pytest
from typer.testing import CliRunner

import mlakit
from mlakit import cli
from mlakit.geometry import MLAGeometry


def test_version():
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"mlakit {mlakit.__version__}\n")


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], []], ids=str)
def test_help_names_the_commands_and_gives_an_example(arguments):
    output = CliRunner().invoke(cli.app, arguments).output
    assert "demo" in output
    assert "Example: mlakit demo" in output


@pytest.mark.parametrize(("passed", "exit_code"), [(True, 0), (False, 1)])
def test_demo_runs_the_demo(monkeypatch, passed, exit_code):
    calls = []
    stand_in = types.ModuleType("mlakit.demo")
    stand_in.make_settings = lambda geometry, **options: options
    stand_in.run = lambda *args, **kwargs: calls.append((args, kwargs)) or passed
    monkeypatch.setitem(sys.modules, "mlakit.demo", stand_in)
    arguments = ["--model", "kimi-k2", "--prompt", "9", "--device", "cpu", "--no-documented"]
    result = CliRunner().invoke(cli.app, ["demo", *arguments])
    assert result.exit_code == exit_code, result.output
    options = {"prompt": 9, "tokens": 8, "format": "fp8_block128", "device": "cpu", "seed": 0}
    expected = ("kimi-k2", MLAGeometry.preset("kimi-k2"), options)
    assert calls == [(expected, {"with_documented": False})]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("mlakit do", "doctor"),
        ("mlakit check --op mla_p", "mla_prefill"),
        ("mlakit explain sparse", "sparse_mla"),
    ],
)
def test_shells_complete_commands_and_values(words, found):
    number = str(len(words.split()) - 1)
    wanted = {"_MLAKIT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": number}
    result = CliRunner().invoke(cli.app, [], env=wanted, prog_name="mlakit")
    assert result.output.split() == [found]


def test_every_command_has_an_example():
    for command in cli.app.registered_commands:
        name = command.callback.__name__
        output = CliRunner().invoke(cli.app, [name, "--help"]).output
        assert re.search(rf"Examples?: mlakit {name}\b", output), name


def test_an_unknown_command_is_a_usage_error():
    assert CliRunner().invoke(cli.app, ["dmeo"]).exit_code == 2


def test_python_dash_m_is_the_command():
    command = [sys.executable, "-m", "mlakit", "--version"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output == f"mlakit {mlakit.__version__}\n"
