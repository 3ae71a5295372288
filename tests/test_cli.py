"""The command line: what it prints, what it calls, how it ends."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
from typer.testing import CliRunner

import mlakit
from mlakit import cli


def test_version():
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"mlakit {mlakit.__version__}\n")


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], []], ids=str)
def test_help_names_the_commands_and_gives_an_example(arguments):
    output = CliRunner().invoke(cli.app, arguments).output
    assert "demo" in output
    assert "Example: mlakit demo" in output


def test_demo_runs_the_demo(monkeypatch):
    calls = []
    stand_in = types.ModuleType("mlakit.demo")
    stand_in.run = lambda: calls.append("ran")
    monkeypatch.setitem(sys.modules, "mlakit.demo", stand_in)
    result = CliRunner().invoke(cli.app, ["demo"])
    assert result.exit_code == 0, result.output
    assert calls == ["ran"]


def test_an_unknown_command_is_a_usage_error():
    assert CliRunner().invoke(cli.app, ["dmeo"]).exit_code == 2


def test_python_dash_m_is_the_command():
    command = [sys.executable, "-m", "mlakit", "--version"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output == f"mlakit {mlakit.__version__}\n"
