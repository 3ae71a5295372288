"""What `make test`, `make test-all` and CI run, and which tests are collected without a GPU."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import conftest
from tests.paths import ROOT


def rules(makefile: str) -> dict[str, tuple[list[str], str]]:
    """(prerequisites, commands) by target."""
    joined = makefile.replace("\\\n", " ")
    found = re.findall(r"^([\w-]+):(?!=)(.*)\n((?:\t.*\n?)*)", joined, flags=re.MULTILINE)
    return {target: (needs.split(), commands) for target, needs, commands in found}


RULES = rules((ROOT / "Makefile").read_text(encoding="utf-8"))


def commands_of(target: str, given: dict[str, tuple[list[str], str]] = RULES) -> str:
    """The commands of a target and of every target that it needs, in order."""
    needs, commands = given.get(target, ([], ""))
    return "".join(commands_of(each, given) for each in needs) + commands


def test_make_test_checks_and_runs_the_tests_and_compiles_no_list_of_kernels():
    commands = commands_of("test")
    for part in ("ruff format --check", "ruff check", "/mypy", "/pytest"):
        assert commands.count(part) == 1, part
    assert "--compile" not in commands
    assert "OLDEST" not in commands


def test_make_test_all_also_compiles_with_the_newest_and_the_oldest_triton():
    commands = commands_of("test-all")
    assert commands.startswith(commands_of("test"))
    assert commands.count("mlakit support --compile") == 2
    assert "$(OLDEST)/bin/python -m mlakit support --compile" in commands
    assert "$(OLDEST)/bin/python -m pytest" in commands


def test_ci_runs_make_test_and_then_make_test_all():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    goals = re.findall(r"^make (.*)$", script, flags=re.MULTILINE)
    assert " ".join(goals).split() == ["test", "test-all"]


def test_the_rules_of_a_makefile_are_read():
    read = rules("A := b\nall: one two\n\nall-day: all\n\techo x \\\n\t  y\none: $(A)\n\techo 1\n")
    assert read["all"] == (["one", "two"], "")
    assert commands_of("all-day", read).split() == ["echo", "1", "echo", "x", "y"]


def collect(monkeypatch: pytest.MonkeyPatch, has_gpu: bool) -> tuple[list[str], list[str], str]:
    """(kept, deselected, summary) of two tests of which one needs a GPU."""

    def item(name: str, *marks: str) -> Any:
        return SimpleNamespace(
            name=name, get_closest_marker=lambda mark: mark if mark in marks else None
        )

    items, deselected, lines = [item("host"), item("device", "gpu")], [], []
    hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    config = SimpleNamespace(hook=hook, stash=pytest.Stash())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    conftest.pytest_collection_modifyitems(config, items)
    conftest.pytest_terminal_summary(SimpleNamespace(write_line=lines.append), config)
    return [each.name for each in items], [each.name for each in deselected], "".join(lines)


def test_without_a_gpu_its_tests_are_left_out_and_counted(monkeypatch):
    kept, deselected, summary = collect(monkeypatch, has_gpu=False)
    assert (kept, deselected) == (["host"], ["device"])
    assert summary == "GPU tests left out: 1, torch sees no CUDA device"


def test_with_a_gpu_all_tests_are_run(monkeypatch):
    assert collect(monkeypatch, has_gpu=True) == (["host", "device"], [], "")


def test_no_test_here_waits_for_a_gpu_that_is_not_there(request):
    on_gpu = [each for each in request.session.items if each.get_closest_marker("gpu")]
    assert torch.cuda.is_available() or not on_gpu


def test_asking_for_gpu_tests_without_a_gpu_is_a_usage_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = SimpleNamespace(option=SimpleNamespace(markexpr="gpu"))
    with pytest.raises(pytest.UsageError, match="-m gpu needs a CUDA device"):
        conftest.pytest_configure(config)
