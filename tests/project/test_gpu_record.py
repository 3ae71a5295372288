"""The record of the GPU tests is complete, names no failure, and is of the commit that it names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests import gpu_parts, gpu_record, gpu_session
from tests.gpu_record import NotRecordableError, Run
from tests.paths import ROOT

RUN = Run(
    triton="3.6.0",
    part=1,
    parts=2,
    deal="d",
    commit="c",
    sources="s",
    gpu="NVIDIA H200",
    torch="2.11.0",
    python="3.12.3",
    date="2026-11-18",
    seconds=400,
    passed=900,
    failed=[],
    skipped={"needs a CUDA device": 3},
)
COMPLETE = [
    replace(RUN, triton=triton, part=part) for triton in gpu_record.TRITONS for part in (1, 2)
]


@pytest.mark.skipif(not gpu_record.RECORD.exists(), reason="no GPU run is recorded yet")
def test_the_gpu_tests_passed_in_all_parts_with_both_tritons(record_property):
    assert gpu_record.RECORD.exists(), "`make test-gpu` on a machine with a GPU writes the record"
    runs = gpu_record.read()
    assert gpu_record.complaints(runs) == []
    for run in runs:
        known = gpu_record.digest_of_commit(run.commit)
        assert known in (None, run.sources), f"{run} is not of the sources of {run.commit}"
    record_property(gpu_session.SAY, gpu_record.changed_since(runs))


def test_a_complete_record_without_failures_passes():
    assert gpu_record.complaints(COMPLETE) == []


@pytest.mark.parametrize(
    ("runs", "complaint"),
    [
        ([], "no part was run with Triton 3.6.0"),
        (COMPLETE[:2], "no part was run with Triton 3.9.0"),
        (COMPLETE[1:], "part 1/2 with Triton 3.6.0 is missing"),
        (COMPLETE[:3], "part 2/2 with Triton 3.9.0 is missing"),
        (
            [*COMPLETE[:3], replace(COMPLETE[3], failed=["a.py::test[1]"])],
            "part 2/2 with Triton 3.9.0: a.py::test[1] failed",
        ),
        (
            [*COMPLETE[:3], replace(COMPLETE[3], deal="e")],
            "the parts with Triton 3.9.0 do not come from the same list of tests",
        ),
    ],
)
def test_a_record_that_lacks_something_is_seen(runs, complaint):
    assert complaint in gpu_record.complaints(runs)


def test_a_run_takes_the_place_of_the_same_part(tmp_path):
    path = tmp_path / "new" / "gpu-tests.json"
    gpu_record.add(COMPLETE[::-1], path)
    assert gpu_record.read(path) == COMPLETE
    later = replace(COMPLETE[2], passed=901)
    gpu_record.add([later], path)
    assert gpu_record.read(path) == [*COMPLETE[:2], later, COMPLETE[3]]


def test_runs_of_other_parts_than_before_do_not_mix(tmp_path):
    path = tmp_path / "gpu-tests.json"
    third = replace(RUN, part=3, parts=3)
    gpu_record.add([*COMPLETE, third], path)
    assert gpu_record.read(path) == [third, *COMPLETE[2:]]


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A repository with one commit of a kernel and of a test."""
    folder = tmp_path / "checkout"
    for name in ("mlakit/kernels/decode.py", "mlakit/tools/cli.py", "tests/test_decode.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# {name}\n")
    git(tmp_path, "init", "-q", str(folder))
    (folder / ".gitignore").write_text(".gpu-commit\n__pycache__\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def test_a_clean_checkout_is_recordable(checkout):
    commit = gpu_record.head(checkout)
    assert gpu_record.recordable_commit(root=checkout) == commit
    (checkout / "mlakit/__pycache__").mkdir()
    (checkout / "mlakit/__pycache__/cli.pyc").write_text("compiled")
    (checkout / "notes.md").write_text("no source")
    assert gpu_record.recordable_commit(root=checkout) == commit
    assert gpu_record.digest_of_commit(commit, checkout) == gpu_record.digest_of_files(checkout)


def change(checkout: Path) -> None:
    (checkout / "mlakit/tools/cli.py").write_text("# another\n")


def add_file(checkout: Path) -> None:
    (checkout / "tests/test_new.py").write_text("")


def remove(checkout: Path) -> None:
    (checkout / "mlakit/tools/cli.py").unlink()


def rename(checkout: Path) -> None:
    (checkout / "mlakit/tools/cli.py").rename(checkout / "mlakit/clu.py")


@pytest.mark.parametrize("meddle", [change, add_file, remove, rename])
def test_other_sources_than_the_commits_are_not_recordable(checkout, meddle):
    gpu_record.note_commit(checkout)
    commit = gpu_record.head(checkout)
    meddle(checkout)
    with pytest.raises(NotRecordableError, match=r"are not those of \.gpu-commit"):
        gpu_record.recordable_commit(root=checkout)
    with pytest.raises(NotRecordableError, match=r"changes that .* does not have"):
        gpu_record.recordable_commit(commit, checkout)
    with pytest.raises(NotRecordableError, match="commit them"):
        gpu_record.note_commit(checkout)
    (checkout / ".gpu-commit").unlink()
    with pytest.raises(NotRecordableError, match=r"changes that .* does not have"):
        gpu_record.recordable_commit(root=checkout)


def test_a_copy_without_git_takes_the_commit_from_the_file_or_from_its_caller(checkout):
    commit = gpu_record.head(checkout)
    (checkout / ".git").rename(checkout.parent / "git")
    (checkout / ".git").write_text("gitdir: /nowhere\n")  # as in a copy of a worktree
    with pytest.raises(NotRecordableError, match="neither git nor"):
        gpu_record.recordable_commit(root=checkout)
    assert gpu_record.recordable_commit("given", checkout) == "given"
    (checkout / ".gpu-commit").write_text(f"{commit}\n{gpu_record.digest_of_files(checkout)}\n")
    assert gpu_record.recordable_commit(root=checkout) == commit
    with pytest.raises(NotRecordableError, match="git checkout"):
        gpu_record.note_commit(checkout)


def test_the_folders_that_changed_since_are_named(checkout):
    runs = [replace(RUN, commit=gpu_record.head(checkout))]
    assert "no kernel and nothing above it changed since" in gpu_record.changed_since(
        runs, checkout
    )
    (checkout / "mlakit/tools/cli.py").write_text("# not on the GPU\n")
    (checkout / "mlakit/kernels/decode.py").write_text("# faster\n")
    assert gpu_record.changed_since(runs, checkout).endswith("changed since: mlakit/kernels")
    unknown = [replace(RUN, commit="0" * 40)]
    assert "git cannot say what changed since 0000000000" in gpu_record.changed_since(
        unknown, checkout
    )


def test_runs_from_elsewhere_are_added_with_their_times(tmp_path):
    commit = gpu_record.head()
    if commit is None:
        pytest.skip("this is not a git checkout")
    run = replace(RUN, commit=commit, sources=gpu_record.digest_of_commit(commit))
    record, times, folder = tmp_path / "record.json", tmp_path / "times.json", tmp_path / "from"
    gpu_record.add([run], folder / "gpu-tests.json")
    lines = [
        {"triton": "3.6.0"},
        ["a.py::x[1]", "passed", 2.0, "", 2.0],
        ["a.py::x[2]", "passed", 1.0, "", 3.0],
        ["a.py::x[3]", "skipped", 0.0, "not on this GPU", 3.0],
        ["a.py::y", "failed", 9, "why", 12.0],
        ["b.py", "skipped", 0.0, "not here", 12.0],
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines) + '["a.py::cut o'
    (folder / "gpu-tests-1of2-3.6.0.jsonl").write_text(content)
    (folder / "gpu-tests-1of2-3.9.0.jsonl").write_text('{}\n["a.py::x[1]", "passed", 4.0, "", 4]\n')
    known = "tests/project/test_gpu_record.py::test_runs_from_elsewhere_are_added_with_their_times"
    gone = ("tests/project/test_gpu_record.py::test_gone", "tests/ops/test_gone.py::test_here")
    gpu_parts.write_times(times, dict.fromkeys((known, *gone), gpu_parts.Measured(1.0, 1)))
    assert gpu_record.merge([folder], record, times) == "1 runs added, 1 functions measured"
    assert gpu_record.read(record) == [run]
    assert gpu_parts.read_times(times) == {known: (1.0, 1), "a.py::x": (4.0, 3)}, "a mean of both"
    gpu_record.add([replace(run, sources="of other code")], folder / "gpu-tests.json")
    with pytest.raises(NotRecordableError, match="is not of the sources of"):
        gpu_record.merge([folder], record, times)


CONFTEST = """
from pathlib import Path
from tests import gpu_record, gpu_session, gpu_workers

gpu_workers.synchronise = lambda: None
gpu_session._triton = lambda: "3.9.0"
gpu_session._gpu = lambda: ("a GPU", "2.11.0")
gpu_record.RECORD = Path("docs/data/gpu-tests.json").absolute()
gpu_record.ROOT = Path().absolute()
pytest_addoption = gpu_session.add_options

def pytest_configure(config):
    config.pluginmanager.register(gpu_session)
    config.pluginmanager.register(gpu_workers)
"""
TESTS = """
import os
import pytest

pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("case", range(9))
def test_of_a_kernel(case):
    if case == 2:
        pytest.skip("not on this GPU")
    if case == 3:
        os._exit(1)
    assert case != 5

def test_on_another_gpu():
    pytest.skip("not on this GPU")

def test_that_has_something_to_say(record_property):
    record_property("terminal", "said after all tests")
"""


@pytest.fixture
def suite(checkout) -> Path:
    """A checkout whose commit has a GPU test that fails, and one that ends its worker."""
    (checkout / "pytest.ini").write_text("[pytest]\nmarkers = gpu\ntestpaths = tests\n")
    (checkout / "conftest.py").write_text(CONFTEST)
    (checkout / "tests/test_decode.py").write_text(TESTS)
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "tests")
    return checkout


def recording(suite: Path, *options: str) -> subprocess.CompletedProcess:
    """Run part 1 of 1 of the suite."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist.plugin", "-m", "gpu", "-n1"]
    return subprocess.run(
        [*command, "--dist=worksteal", "--part=1/1", "--record=left", *options],
        cwd=suite,
        env={**os.environ, "PYTHONPATH": f"{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


LOG = "left/gpu-tests-1of1-3.9.0.jsonl"
CASES = [f"tests/test_decode.py::test_of_a_kernel[{case}]" for case in range(9)]


def logged(suite: Path) -> dict[str, list[object]]:
    """Return the lines of the log by test, each of which has one."""
    _, *lines = gpu_record.whole_lines(suite / LOG)
    assert len({line[0] for line in lines}) == len(lines)
    return {line[0]: line for line in lines}


def assert_recorded(suite: Path, said: str) -> Run:
    (run,) = gpu_record.read(suite / "docs/data/gpu-tests.json")
    assert gpu_record.read(suite / "left/gpu-tests.json") == [run]
    assert (run.passed, run.skipped) == (7, {"not on this GPU": 2})
    assert run.failed == [CASES[3], CASES[5]]
    assert (run.triton, run.part, run.parts) == ("3.9.0", 1, 1)
    assert (run.gpu, run.torch) == ("a GPU", "2.11.0")
    assert run.commit == gpu_record.head(suite)
    assert run.sources == gpu_record.digest_of_commit(run.commit, suite)
    assert "recorded in gpu-tests.json: part 1/1 with Triton 3.9.0" in said
    return run


@pytest.mark.slow
def test_a_run_records_failures_crashes_and_skips(suite):
    (suite / "left").mkdir()
    (suite / LOG).write_text("what an earlier run left")
    done = recording(suite)
    assert_recorded(suite, done.stdout)
    lines = logged(suite)
    assert len(lines) == 11
    outcomes = {test: (line[1], line[3]) for test, line in lines.items()}
    assert outcomes[CASES[2]] == ("skipped", "not on this GPU")
    assert "crashed while running" in outcomes[CASES[3]][1]
    assert "assert case != 5" in outcomes[CASES[5]][1]
    assert outcomes[CASES[6]] == ("passed", "")
    assert "\nsaid after all tests\n" in done.stdout


@pytest.mark.slow
def test_a_run_that_is_cut_off_is_resumed_and_recorded(suite):
    done = recording(suite, "--stop-after=0")
    assert "the time of --stop-after is over" in done.stdout
    assert "not recorded: 10 of 11 tests have no result: --resume runs them" in done.stdout
    before = logged(suite)
    assert len(before) == 1
    with (suite / LOG).open("a") as log:
        log.write('["tests/test_decode.py::test_of_a_ker')
    done = recording(suite, "--resume", "-n2")  # a worker that replaces another resumes, too
    run = assert_recorded(suite, done.stdout)
    after = logged(suite)
    assert len(after) == 11
    assert {test: after[test] for test in before} == before
    assert run.seconds >= int(max(line[4] for line in before.values()))
    done = recording(suite, "--resume")
    assert_recorded(suite, done.stdout)
    assert logged(suite) == after, "nothing is left to run"


@pytest.mark.slow
def test_results_of_other_sources_are_not_resumed(suite):
    recording(suite, "--stop-after=0")
    commit = gpu_record.head(suite)
    change(suite)
    git(suite, "commit", "-q", "-am", "another")
    done = recording(suite, "--resume")
    assert f"--resume: {LOG} is of other sources, those of {commit}" in done.stderr
    assert len(logged(suite)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("-m", "not gpu"), "--record needs -m gpu and --part"),
        (("-k", "kernel"), "--record takes no paths or options that choose among the tests"),
        (("tests/test_decode.py",), "--record takes no paths or options that choose"),
    ],
)
def test_only_a_whole_part_of_the_gpu_tests_is_recorded(suite, options, reason):
    done = recording(suite, *options)
    assert reason in done.stderr
    assert not (suite / "left").exists()


@pytest.mark.slow
def test_sources_that_are_not_those_of_the_commit_are_refused_before_a_test_is_run(suite):
    change(suite)
    done = recording(suite)
    assert f"--record: there are changes that {gpu_record.head(suite)} does not" in done.stderr
    assert "passed" not in done.stdout
    assert not (suite / "left").exists()
