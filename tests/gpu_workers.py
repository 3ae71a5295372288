"""Replaces a worker of xdist whose CUDA context died, and blames the test that killed it.

After an illegal access or a failed assertion on the device every further CUDA call of the process
fails. Each GPU test therefore ends with a synchronisation, which raises what the test's kernels did
wrong in that test. If the context is dead afterwards, the worker ends once the test is reported,
and xdist starts another.

A worker that ends is taken by xdist to have crashed in the first test that it did not report as
complete. The hook below runs before that report, so this is the test that killed the context, which
has failed already: `pytest_handlecrashitem` keeps it from being counted twice. Only the schedulers
`load` and `worksteal` are safe: the others run the test again, and crash again.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from typing import Any

import pytest

CONTEXT_DIED = 86  # exit status of a worker whose CUDA context is dead
# A kernel that hangs ends its worker after these seconds; tests marked `large` check long lists.
PATIENCE = 300
PATIENCE_LARGE = 540
_STDERR = pytest.StashKey[int]()


def synchronise() -> None:
    """Wait for the GPU, if this process uses one, and raise what its kernels did wrong."""
    import torch  # the tests of this file need none

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def context_error() -> str | None:
    """Return the error that every CUDA call now fails with, or None if the context works."""
    try:
        synchronise()
    except RuntimeError as error:
        return str(error)
    return None


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STDERR] = os.dup(2)  # later it is captured


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    finally:
        if _on_gpu(item):
            synchronise()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    is_worker = hasattr(item.config, "workerinput")
    if not _on_gpu(item):
        return (yield)
    if is_worker:
        seconds = PATIENCE_LARGE if item.get_closest_marker("large") else PATIENCE
        faulthandler.dump_traceback_later(seconds, exit=True, file=item.config.stash[_STDERR])
    try:
        done = yield
    finally:
        faulthandler.cancel_dump_traceback_later()
    error = context_error()
    if error is not None and is_worker:
        os._exit(CONTEXT_DIED)
    if error is not None:
        pytest.exit(f"the CUDA context died in {item.nodeid}; -n 1 runs the rest: {error}")
    return done


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport, sched: Any) -> None:
    """Count a test once that failed and then ended its worker."""
    reporter = sched.config.pluginmanager.get_plugin("terminalreporter")
    reported = (*reporter.stats.get("failed", ()), *reporter.stats.get("error", ()))
    if any(each.nodeid == crashitem for each in reported):
        report.outcome, report.when = "passed", "teardown"


def _on_gpu(item: pytest.Item) -> bool:
    return item.get_closest_marker("gpu") is not None
