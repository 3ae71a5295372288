"""`mlakit bench cpu --busy N`: what it starts, when that runs, and what it says."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from time import sleep

import pytest
import torch
from typer.testing import CliRunner

from mlakit.tools import cli
from mlakit.tools.bench import busy, command, steps, suite
from mlakit.tools.bench.busy import Beside, BusyProcesses, BusyTimer, Quiet, Step, busy_processes

proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


def state(pid: int) -> str:
    """R running, S sleeping, T stopped, Z ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.slow
@proc
def test_busy_processes_use_the_cpu_only_while_resumed():
    with busy_processes(2) as processes:
        assert len(processes.pids) == 2
        assert {state(pid) for pid in processes.pids} == {"T"}
        before = [cpu_ticks(pid) for pid in processes.pids]
        processes.resume()
        for _ in range(200):  # on a loaded machine they too must wait
            sleep(0.05)
            if all(
                cpu_ticks(pid) > start for pid, start in zip(processes.pids, before, strict=True)
            ):
                break
        else:
            pytest.fail("a resumed process did not run")
        processes.stop()
        stopped = [cpu_ticks(pid) for pid in processes.pids]
        sleep(0.2)
        assert [cpu_ticks(pid) for pid in processes.pids] == stopped
    for pid in processes.pids:
        assert not Path(f"/proc/{pid}").exists()


@proc
def test_busy_processes_inherit_the_cpus_they_may_use():
    with busy_processes(1) as processes:
        assert os.sched_getaffinity(processes.pids[0]) == os.sched_getaffinity(0)


def test_a_round_measures_with_busy_processes_and_without():
    seen: list[bool] = []
    resumed: list[bool] = []

    class Recorded(BusyProcesses):
        def __init__(self) -> None: ...

        def stop(self) -> None:
            resumed.clear()

        def resume(self) -> None:
            resumed.append(True)

    def call() -> None:
        seen.append(bool(resumed))

    timer = BusyTimer(Recorded(), 0.0)
    for each, is_loaded in ((call, True), (Quiet(call), False)) * 2:
        assert timer(each) > 0
        assert seen.pop() is is_loaded
        assert not resumed


@pytest.mark.parametrize(("loaded_s", "is_met"), [(0.5, False), (0.2, True)])
def test_the_speedup_is_quiet_over_busy_and_has_the_target(loaded_s, is_met, monkeypatch):
    workload = Beside(busy.WORKLOADS[0].small)
    seconds = {"mlakit": [loaded_s] * 3, "quiet": [0.1] * 3}
    monkeypatch.setattr(
        suite, "time_interleaved", lambda calls, **_: {n: seconds[n] for n in calls}
    )
    loaded, quiet = suite.run("cpu", [workload], command="").rows
    assert loaded.implementation == "mlakit"
    assert (loaded.speedup, loaded.min_speedup) == (None, None)
    assert quiet.speedup.p50 == pytest.approx(0.1 / loaded_s)
    assert (quiet.min_speedup, quiet.met) == (1 / 3, is_met)


@pytest.mark.slow
@pytest.mark.parametrize("workload", busy.WORKLOADS, ids=lambda each: each.name)
def test_a_wrong_step_is_not_timed(workload, monkeypatch, capsys):
    small = workload.small
    if not isinstance(small, Step):
        return
    right = steps.mla_step
    monkeypatch.setattr(steps, "mla_step", lambda *args, **given: right(*args, **given) * 1.1)
    assert busy.run([small], 1, command="", quick=True) is None
    assert f"{small.name} is wrong" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_prints_both_times_and_the_speedup(tmp_path):
    before = torch.get_num_threads()
    file = tmp_path / "busy.json"
    arguments = ["bench", "cpu", "--busy", "1", "--quick", "--json", str(file)]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert "next to 1 busy process; quiet: mlakit while they are stopped" in " ".join(
        result.output.split()
    )
    report = json.loads(file.read_text())
    names = {each.small.name for each in busy.WORKLOADS}
    for name in names:
        assert re.search(rf"{re.escape(name)} +mlakit", result.output)
    assert result.output.count(" quiet ") >= len(names)
    assert len(report["rows"]) == 2 * len(names)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("suites", [("decode",), ("cpu", "decode")])
def test_busy_works_with_the_suite_cpu_only(suites):
    with pytest.raises(ValueError, match=r"^--busy works with suite cpu only, not with "):
        command.workloads_of(command.Settings(suites, "", busy=1))
