"""A failure of a random problem says how to run that problem again."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from mlakit.dispatch import selection
from mlakit.dispatch.checks import UnsupportedError
from mlakit.tools.workloads import CASES, AppendCase, Case, DecodeCase, MergeCase
from tests.kernel_launchers import by_name, replace_launcher
from tests.ops.mutations.changes import keyless
from tests.ops.random_cases import any_case


def case_of(line: str) -> Case:
    """The case that a reproduction line runs."""
    python, option, code = shlex.split(line)
    assert (python, option) == ("python", "-c")
    imports, expression = code.split("; ")
    scope: dict[str, Any] = {}
    exec(imports, scope)
    constructor, _, arguments = expression.rpartition(".run(")
    assert arguments.endswith(")")
    case = eval(constructor, scope)
    assert isinstance(case, Case)
    return case


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_reproduction_line_is_the_case(case):
    @settings(
        deadline=None, derandomize=True, max_examples=25, suppress_health_check=list(HealthCheck)
    )
    @given(any_case(case))
    def explore(drawn: Case) -> None:
        assert case_of(drawn.reproduction()) == drawn
        assert case_of(drawn.reproduction("cuda", "triton")) == drawn

    explore()


def test_the_reproduction_line_names_device_and_backend():
    assert MergeCase(seed=3).reproduction("cuda", "triton") == (
        'python -c "from mlakit.tools.workloads import MergeCase; '
        "MergeCase(seed=3).run(device='cuda', backend='triton')\""
    )


@pytest.mark.slow
def test_the_reproduction_line_runs(monkeypatch):
    case = DecodeCase(format="fp8_block64", kv_lens=(17, 0, 40), sink="mixed", seed=7, world=2)
    replace_launcher(monkeypatch, "mla_decode", by_name(keyless), backend="cpu")
    with pytest.raises(AssertionError) as failure:
        case.run(backend="cpu")
    line = str(failure.value).splitlines()[0]
    assert case_of(line) == case
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        line,
        shell=True,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr  # nothing is wrong with the kernel over there


def test_an_exception_of_the_op_carries_the_reproduction_line():
    case = AppendCase(format="fp8_token", kv_lora_rank=7)
    with pytest.raises(AssertionError, match=r"^python -c .*\nValueError: fp8_token"):
        case.run()


def test_a_refusal_stays_a_refusal(monkeypatch):
    def refuse(*_: object) -> None:
        raise UnsupportedError("no kernel")

    monkeypatch.setattr(selection, "select", refuse)
    with pytest.raises(UnsupportedError, match=r"^no kernel$"):
        MergeCase().run()
