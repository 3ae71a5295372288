"""`make test`, `make test-all` and CI run what they should; GPU tests are left out without one."""

from __future__ import annotations

import re
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mlakit.integrations.transformers import checks
from tests import conftest, gpu_parts, slow_tests
from tests.paths import ROOT

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def test_models_are_patched_with_the_ends_of_the_range_of_transformers():
    (versions,) = re.findall(r"^TRANSFORMERS := (.*)$", MAKEFILE, flags=re.MULTILINE)
    ends = [tuple(int(part) for part in each.split(".")[:2]) for each in versions.split()]
    assert ends == [checks.OLDEST, checks.NEWEST_TESTED]


@pytest.mark.parametrize(
    "target", ["quick", "test", "test-all", "compile-all", "oldest-torch", "mutants"]
)
def test_a_target_can_be_made(target):
    command = ["make", "-n", "-C", str(ROOT), target]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_part_of_the_gpu_tests_takes_less_than_six_minutes_as_measured():
    (parts,) = re.findall(r"^GPU_PARTS \?= (\d+)$", MAKEFILE, flags=re.MULTILINE)
    seconds = sum(measured.seconds for measured in gpu_parts.read_times().values())
    assert seconds / int(parts) / gpu_parts.WORKERS < 6 * 60


def collect(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, *options: str
) -> tuple[list[str], list[str], str]:
    """(kept, deselected, summary) of three tests: one needs a GPU, one is slow."""

    def item(name: str, *marks: str) -> Any:
        return SimpleNamespace(
            name=name,
            nodeid=f"tests/ops/test_some.py::{name}[1]",
            get_closest_marker=lambda mark: mark if mark in marks else None,
        )

    items, deselected, lines = [item("host"), item("device", "gpu"), item("slow")], [], []
    hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    config = SimpleNamespace(
        hook=hook,
        stash=pytest.Stash(),
        option=SimpleNamespace(markexpr=""),
        getoption=lambda option: option in options,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    conftest.pytest_collection_modifyitems(config, items)
    conftest.pytest_terminal_summary(SimpleNamespace(write_line=lines.append), config)
    return [each.name for each in items], [each.name for each in deselected], "".join(lines)


def test_without_a_gpu_its_tests_are_left_out_and_counted(monkeypatch):
    kept, deselected, summary = collect(monkeypatch, has_gpu=False)
    assert (kept, deselected) == (["host", "slow"], ["device"])
    assert summary == "GPU tests left out: 1, torch sees no CUDA device"


def test_with_a_gpu_all_tests_are_run(monkeypatch):
    assert collect(monkeypatch, has_gpu=True) == (["host", "device", "slow"], [], "")


@pytest.mark.parametrize(
    ("marked", "has_gpu", "options", "kept"),
    [
        ("thorough", False, (), 0),
        ("thorough", False, ("--thorough",), 1),
        ("thorough", True, (), 1),
        ("exhaustive", False, (), 0),
        ("exhaustive", True, (), 0),
        ("exhaustive", True, ("--thorough",), 1),
    ],
)
def test_thorough_and_exhaustive_tests_need_the_option(monkeypatch, marked, has_gpu, options, kept):
    item = SimpleNamespace(get_closest_marker=lambda mark: mark if mark == marked else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    config = SimpleNamespace(
        hook=SimpleNamespace(pytest_deselected=lambda items: None),
        stash=pytest.Stash(),
        getoption=lambda option: option in options,
    )
    items = [item]
    slow_tests.leave_out_thorough(config, items)
    assert len(items) == kept
    assert config.stash.get(slow_tests.THOROUGH, 0) == 1 - kept


def test_few_tests_of_a_function_are_measured():
    items = [SimpleNamespace(nodeid=f"tests/ops/test_some.py::many[{i}]") for i in range(50)]
    config = SimpleNamespace(getoption=lambda option: option == "--measure-slow")
    slow_tests.select_measured(config, items)
    assert [each.nodeid[-4:] for each in items] == ["y[0]", "[10]", "[20]", "[30]", "[40]"]


def test_a_marker_is_wrong_by_the_mean_of_what_was_measured():
    measured = {
        "a.py::slow[0]": (0.01, {}),
        "a.py::slow[1]": (0.9, {}),
        "a.py::quick": (0.002, {"slow": 1}),
        "b.py::nearly_slow": (0.05, {}),
        "b.py::slow": (3.0, {"slow": 1}),
    }
    reports = [
        SimpleNamespace(
            nodeid=name,
            when="call",
            user_properties=[(slow_tests.SECONDS, seconds)],
            keywords=marks,
        )
        for name, (seconds, marks) in measured.items()
    ]
    assert list(slow_tests.wrong_markers(reports)) == [
        "a.py::quick is marked slow and takes 0.002 s",
        "a.py::slow is not marked slow and takes 0.455 s",
    ]


def test_no_test_here_waits_for_a_gpu_that_is_not_there(request):
    on_gpu = [each for each in request.session.items if each.get_closest_marker("gpu")]
    is_run = torch.cuda.is_available() or request.config.getoption("--emulate")
    assert is_run or not on_gpu


def test_asking_for_gpu_tests_without_a_gpu_is_a_usage_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = SimpleNamespace(option=SimpleNamespace(markexpr="gpu"), getoption=lambda option: False)
    with pytest.raises(pytest.UsageError, match="-m gpu needs a CUDA device"):
        conftest.pytest_configure(config)
