"""A worker whose CUDA context died is replaced, and only the test that killed it has failed."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.paths import ROOT

PLUGINS = ("-p", "xdist.plugin")  # others take a second to start
CONFTEST = """
from tests import gpu_workers

context = {"error": None}

def synchronise():
    if context["error"]:
        raise RuntimeError(context["error"])

gpu_workers.synchronise = synchronise

def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.pluginmanager.register(gpu_workers)
"""

TESTS = """
import os, signal, time
import pytest
from conftest import context

pytestmark = pytest.mark.gpu

@pytest.fixture
def killed_at_the_end():
    yield
    context["error"] = "illegal access in teardown"

@pytest.mark.parametrize("case", range(CASES))
def test_of_a_kernel(case, request):
    assert context["error"] is None, "the context of an earlier test"
    if case == DIES:
        context["error"] = "CUDA error: an illegal memory access was encountered"
    elif case == FAILS_AND_DIES:
        context["error"] = "CUDA error: device-side assert triggered"
        raise AssertionError("a wrong result")
    elif case == ABORTS:
        os.kill(os.getpid(), signal.SIGABRT)
    elif case == EXITS:
        os._exit(0)
    elif case == DIES_AFTERWARDS:
        request.getfixturevalue("killed_at_the_end")
    elif case == HANGS:
        time.sleep(60)
    elif case == FAILS:
        raise AssertionError("a wrong result, of a context that lives")
"""


def run(folder: Path, cases: int, *options: str, **special: int) -> subprocess.CompletedProcess:
    """Run `cases` tests in `folder`, of which those in `special` misbehave."""
    kinds = ("DIES", "FAILS_AND_DIES", "ABORTS", "EXITS", "DIES_AFTERWARDS", "HANGS", "FAILS")
    numbers = {kind: special.get(kind.lower(), -1) for kind in kinds}
    head = "".join(f"{kind} = {number}\n" for kind, number in numbers.items())
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_kernels.py").write_text(f"{head}CASES = {cases}\n{TESTS}")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *PLUGINS, "--junit-xml", "results.xml", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def results(folder: Path) -> dict[str, list[str]]:
    """Return the messages of failures by test, of every test that was run."""
    cases = ElementTree.parse(folder / "results.xml").iter("testcase")
    found: dict[str, list[str]] = {}
    for case in cases:
        bad = [*case.iter("failure"), *case.iter("error")]
        found.setdefault(case.attrib["name"], []).extend(each.attrib["message"] for each in bad)
    return found


@pytest.mark.slow
def test_exactly_the_tests_that_kill_their_process_have_failed(tmp_path):
    guilty = {
        "dies": 3,
        "fails_and_dies": 4,
        "fails": 8,
        "aborts": 11,
        "exits": 12,
        "dies_afterwards": 21,
    }
    done = run(tmp_path, 24, "-n2", "--dist", "worksteal", "--max-worker-restart=9", **guilty)
    found = results(tmp_path)
    assert set(found) == {f"test_of_a_kernel[{case}]" for case in range(24)}, done.stdout
    failed = {name: messages for name, messages in found.items() if messages}
    assert set(failed) == {f"test_of_a_kernel[{case}]" for case in guilty.values()}
    assert "illegal memory access" in failed["test_of_a_kernel[3]"][0]
    assert "device-side assert" in failed["test_of_a_kernel[4]"][0]
    for case in (11, 12, 21):
        assert "crashed while running" in failed[f"test_of_a_kernel[{case}]"][0]
    # the call passed of the test whose teardown killed the context
    assert "6 failed, 19 passed" in done.stdout
    assert done.stdout.count("node down: Not properly terminated") == 5


@pytest.mark.slow
def test_a_kernel_that_hangs_ends_its_worker(tmp_path):
    (tmp_path / "impatient.py").write_text(
        "from tests import gpu_workers\ngpu_workers.PATIENCE = 1\n"
    )
    done = run(tmp_path, 6, "-n1", "-p", "impatient", "--dist", "worksteal", hangs=2)
    assert "1 failed, 5 passed" in done.stdout
    assert results(tmp_path)["test_of_a_kernel[2]"]
    assert "Timeout" in done.stderr, "the traceback says where it hangs"


@pytest.mark.slow
def test_without_workers_the_run_stops_at_a_dead_context(tmp_path):
    done = run(tmp_path, 6, "-n0", dies=2)
    assert "died in test_kernels.py::test_of_a_kernel[2]" in done.stdout + done.stderr
    assert "1 failed, 2 passed" in done.stdout
