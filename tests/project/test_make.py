"""What `make test`, `make test-all` and CI run, and which tests are collected without a GPU."""

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


def rules(makefile: str) -> dict[str, tuple[list[str], str]]:
    """(prerequisites, commands) by target."""
    joined = makefile.replace("\\\n", " ")
    found = re.findall(r"^([\w-]+):(?!=)(.*)\n((?:\t.*\n?)*)", joined, flags=re.MULTILINE)
    return {target: (needs.split(), commands) for target, needs, commands in found}


MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
RULES = rules(MAKEFILE)


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
    compiling = [line for line in commands.splitlines() if "mlakit support --compile" in line]
    # all portable kernels with the newest, all of Hopper with the oldest: test_samples.py
    assert [line.split() for line in compiling] == [
        ["$(BIN)/mlakit", "support", "--compile", "--sample", "hopper"],
        ["$(OLDEST)/bin/python", "-m", "mlakit", "support", "--compile", "--sample", "portable"],
    ]
    assert "$(OLDEST)/bin/python -m pytest" in commands


def test_make_compile_all_leaves_nothing_out():
    whole = [line.split()[-2:] for line in commands_of("compile-all").splitlines()]
    assert whole == [["support", "--compile"]] * 2


def test_make_test_all_runs_the_thorough_tests_that_make_test_leaves_out():
    assert "--thorough" not in commands_of("test")
    assert "pytest $(PYTEST_JOBS) --thorough -m thorough\n" in commands_of("test-all")
    # these run nothing else with their versions
    for target in ("oldest", "oldest-torch", "transformers-versions"):
        (run,) = [line for line in commands_of(target).splitlines() if " pytest " in line]
        assert " --thorough" in run


def test_make_test_all_runs_hoppers_kernels_in_the_emulator_with_both_versions_of_triton():
    newest, oldest = [line.split() for line in commands_of("emulate").splitlines()]
    assert {"$(BIN)/pytest", "--emulate", "emulated"} <= set(newest)
    assert newest[-1] == oldest[-1] == "tests/tools/emulator"
    assert oldest[0] == "$(OLDEST)/bin/python"
    assert commands_of("emulate") in commands_of("test-all")
    assert "--emulate" not in commands_of("test")


def test_make_mutants_runs_every_mutant_in_the_emulator():
    _, emulated = commands_of("mutants").splitlines()
    assert "--emulate -m emulated" in emulated
    assert "every_mutant" not in emulated


def test_make_test_all_runs_patched_models_with_the_oldest_and_the_newest_transformers():
    """The ends of the range that patch() takes without a warning."""
    (versions,) = re.findall(r"^TRANSFORMERS := (.*)$", MAKEFILE, flags=re.MULTILINE)
    ends = [tuple(int(part) for part in each.split(".")[:2]) for each in versions.split()]
    assert ends == [checks.OLDEST, checks.NEWEST_TESTED]
    commands = commands_of("transformers-versions")
    assert (
        "/bin/python -m pytest $(PYTEST_JOBS) --thorough tests/integrations/test_*.py;" in commands
    )
    assert "set -e" in commands  # a failure with the first version is not lost
    assert commands in commands_of("test-all")
    assert "TRANSFORMERS" not in commands_of("test")


def test_every_version_of_transformers_has_an_environment_of_its_own():
    """pip installs a version there, and what it needs; the rest is that of the other tests."""
    made = subprocess.run(
        ["make", "-n", "-B", "-C", str(ROOT), "transformers-versions"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    for version in ("5.15.0", "5.22.2"):
        folder = f".venv-transformers-{version}"
        assert f"-m venv {folder}\n" in made.stdout
        assert f'{folder}/bin/python -m pip install "transformers=={version}"\n' in made.stdout
        assert f".replace('{folder}', '.venv')" in made.stdout
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert "/.venv-*" in ignored


def test_make_quick_checks_what_make_test_checks_and_leaves_out_slow_tests():
    assert commands_of("quick").startswith(commands_of("lint") + commands_of("types"))
    assert commands_of("quick").endswith(commands_of("unit").replace("\n", ' -m "not slow"\n'))
    assert "not slow" not in commands_of("test")


def dry_run(*arguments: str) -> str:
    command = ["make", "-n", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_make_test_gpu_runs_a_part_with_the_python_of_the_machine_and_installs_nothing():
    made = dry_run("test-gpu", "PART=2/4", "PYTHON=python3", "RECORD=left", "COMMIT=abc")
    assert "for part in 2/4;" in made
    assert re.search(r"^ *python3 -m pytest -m gpu --part=\$part -n 14 ", made, flags=re.MULTILINE)
    assert "--record=left --commit=abc" in made
    for option in ("--resume", "--stop-after", "--thorough"):
        assert option not in made
    assert "pip" not in made
    assert "venv" not in made


def test_make_test_gpu_alone_runs_all_parts_and_workers_that_can_be_replaced():
    made = dry_run("test-gpu", "GPU_PARTS=3", "RECORD=left")
    assert "for part in 1/3 2/3 3/3;" in made
    assert "--commit" not in made
    assert f"-n {gpu_parts.WORKERS} --dist worksteal" in made


def test_make_test_gpu_can_resume_stop_in_time_and_be_thorough():
    made = dry_run("test-gpu", "RESUME=1", "LIMIT=540", "THOROUGH=1")
    assert "--resume --stop-after=540 --thorough" in made


def test_a_part_of_the_gpu_tests_takes_less_than_six_minutes_as_measured():
    (parts,) = re.findall(r"^GPU_PARTS \?= (\d+)$", MAKEFILE, flags=re.MULTILINE)
    seconds = sum(measured.seconds for measured in gpu_parts.read_times().values())
    assert seconds / int(parts) / gpu_parts.WORKERS < 6 * 60


def test_ci_runs_make_test_and_then_make_test_all():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    goals = re.findall(r"^make (.*)$", script, flags=re.MULTILINE)
    assert " ".join(goals).split() == ["test", "test-all"]


def test_the_rules_of_a_makefile_are_read():
    read = rules("A := b\nall: one two\n\nall-day: all\n\techo x \\\n\t  y\none: $(A)\n\techo 1\n")
    assert read["all"] == (["one", "two"], "")
    assert commands_of("all-day", read).split() == ["echo", "1", "echo", "x", "y"]


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
