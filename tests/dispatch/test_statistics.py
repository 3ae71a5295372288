"""`mlakit.stats()` and `MLAKIT_LOG`: which kernels run, why, and what is compiled."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import mlakit
from mlakit.dispatch import log, private, selection
from mlakit.dispatch.statistics import Stats
from mlakit.launch_cache import OpStats
from mlakit.tools.support import problem_of
from tests.paths import ROOT


@pytest.fixture
def nothing_chosen(monkeypatch):
    monkeypatch.setattr(selection, "_CHOSEN", {})
    selection._select.cache_clear()
    yield
    selection._select.cache_clear()


@pytest.mark.usefixtures("nothing_chosen")
def test_kernels_are_counted_with_their_reasons():
    mlakit.quantize_fp8(torch.ones(4, 128), 128)
    portable = problem_of("mla_decode", 80)
    for problem in (portable, problem_of("mla_decode", 90)):
        selection.select("mla_decode", problem)
    found = mlakit.stats()
    assert found.kernels["quantize_fp8"]["cpu"].why_not == {}
    assert {name.partition(":")[0] for name in found.kernels["mla_decode"]} == {"triton", "hopper"}
    assert list(found.fallbacks) == ["mla_decode"]
    choice = found.fallbacks["mla_decode"]["triton"]
    assert choice.problem == portable
    reasons = selection.explain_kernels("mla_decode", portable)
    faster = {name: why for name, why in reasons.items() if ":" in name}
    assert choice.why_not == faster
    assert len(faster) > 3
    assert f"mla_decode runs triton for {portable}; not blackwell:" in str(found)


def test_a_report_has_calls_and_compilations():
    calls = {"mla_decode": OpStats(3, 2, Counter({"a CUDA graph is being captured": 4}))}
    shown = str(Stats({}, calls, Counter({"kernel": 2}), Counter()))
    assert shown.splitlines() == [
        "mla_decode: 3 calls replayed, 2 recorded, 4 in full: a CUDA graph is being captured",
        "kernels compiled: 2 kernel",
    ]


PROGRAM = """
import torch, mlakit
for _ in range(3):
    mlakit.quantize_fp8(torch.ones(4, 128), 128)
mlakit.quantize_fp8(torch.ones(4, 128).bfloat16(), 128)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("wanted", "lines"), [("1", 2), ("0", 0)])
def test_the_log_has_a_line_for_each_new_problem(wanted, lines):
    environment = {**os.environ, "MLAKIT_LOG": wanted, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found = [line for line in done.stderr.splitlines() if line.startswith("mlakit: ")]
    assert len(found) == lines
    assert all(line.startswith("mlakit: quantize_fp8 runs cpu for cpu, ") for line in found)


def test_a_compilation_is_logged(monkeypatch, caplog):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    monkeypatch.setattr(private, "KERNEL_COUNTS", private.KernelCounts())
    private.count_compilations()
    kernel = SimpleNamespace(fn=SimpleNamespace(__module__="mlakit.kernels.x"), name="a_kernel")
    times = SimpleNamespace(total=2_500_000)
    with caplog.at_level(logging.INFO, "mlakit"):
        for is_known in (False, True):
            triton.knobs.compilation.listener(src=kernel, cache_hit=is_known, times=times)
    assert caplog.messages == ["compiled a_kernel in 2.5 s"]
    found = mlakit.stats()
    assert found.compiled == found.loaded == Counter(a_kernel=1)


def test_a_program_with_its_own_handlers_gets_the_lines(caplog):
    assert not log.is_on()
    with caplog.at_level(logging.INFO, "mlakit"):
        assert log.is_on()
