"""Runs a part of the GPU tests (`--part`) and records it (`--record`): the hooks of pytest."""

from __future__ import annotations

import json
import platform
import time
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from tests import gpu_parts, gpu_record

SAY = "terminal"  # the property of a test whose value is printed after all tests
_DEAL = "deal"
_SESSION = pytest.StashKey["Session"]()
# the outcomes of a phase, from the worst on
_OUTCOMES = ("failed", "skipped", "passed")
# options that leave out tests of a part
_NARROWING = ("keyword", "deselect", "ignore", "ignore_glob", "lf", "quick", "measure_slow")


class Session:
    """Collects, in the process that starts the workers, what they report."""

    def __init__(self, log: Path | None) -> None:
        self.started = time.monotonic()
        self.deal = ""
        self.collected: list[str] = []
        self.outcomes: dict[str, str] = {}
        self.reasons: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()
        self._log = log

    def add(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Take in the report of one phase of a test; the worst of them is the test's outcome."""
        before = self.outcomes.get(report.nodeid, "passed")
        self.outcomes[report.nodeid] = min(before, report.outcome, key=_OUTCOMES.index)
        self._seconds[report.nodeid] += getattr(report, "duration", 0.0)
        if report.outcome == "skipped":
            self.reasons[_reason(report)] += 1
        if report.when not in ("setup", "call") and self._log is not None:
            line = [report.nodeid, self.outcomes[report.nodeid], self._seconds[report.nodeid]]
            with self._log.open("a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")


def add_options(parser: pytest.Parser) -> None:
    # pytest reads the command line once before it knows these: without the = a folder that exists
    # would be taken for the tests
    group = parser.getgroup("GPU tests", "give their values with =")
    group.addoption(
        "--part",
        type=gpu_parts.parse_part,
        help="run only this part of the tests, such as --part=1/4, by the times measured",
    )
    group.addoption("--record", type=Path, metavar="FOLDER", help="record the part here as well")
    group.addoption("--commit", help="the commit that the sources are, where git cannot tell")


def pytest_configure(config: pytest.Config) -> None:
    folder, part = config.getoption("--record"), config.getoption("--part")
    log = None
    if folder is not None and not hasattr(config, "workerinput"):
        if part is None or config.option.markexpr.strip() != "gpu":
            raise pytest.UsageError("--record needs -m gpu and --part")
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"gpu-tests-{part.number}of{part.count}-{_triton()}.jsonl"
        log.write_text("", encoding="utf-8")
    config.stash[_SESSION] = Session(log)


@pytest.hookimpl(trylast=True)  # -m and -k have chosen before
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--part")
    if part is None:
        return
    named = {item.nodeid: item for item in items}
    large = {test for test, item in named.items() if item.get_closest_marker("large")}
    dealt = gpu_parts.deal(list(named), gpu_parts.read_times(), part.count, large)
    own = [test for test, number in dealt.items() if number == part.number]
    config.hook.pytest_deselected(items=[named[test] for test in named if test not in set(own)])
    items[:] = [named[test] for test in gpu_parts.arrange(own, large, _workers(config))]
    config.stash[_SESSION].deal = gpu_parts.digest_of_deal(dealt)
    if hasattr(config, "workeroutput"):
        config.workeroutput[_DEAL] = config.stash[_SESSION].deal


def _workers(config: pytest.Config) -> int:
    return int(getattr(config, "workerinput", {}).get("workercount", 1))


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[_SESSION].collected = [item.nodeid for item in session.items]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    node.config.stash[_SESSION].collected = list(ids)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    output = getattr(node, "workeroutput", None) or {}  # a worker that crashed has none
    session = node.config.stash[_SESSION]
    session.deal = output.get(_DEAL, session.deal)


class Reports:
    """The hooks that get no config; they are registered with the session that they fill."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._session.add(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:  # a file that cannot be read, or that is skipped whole
            self._session.add(report)


def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    if config.getoption("--record") is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Reports(config.stash[_SESSION]))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for report in terminalreporter.stats.get("passed", []):
        for name, said in report.user_properties:
            if name == SAY:
                terminalreporter.write_line(str(said))
    folder = config.getoption("--record")
    if folder is None:
        return
    try:
        run = _run(config)
    except gpu_record.NotRecordableError as error:
        terminalreporter.write_line(f"not recorded: {error}")
        return
    for path in (config.rootpath / gpu_record.NAME, folder / gpu_record.NAME.name):
        gpu_record.add([run], path)
    terminalreporter.write_line(f"recorded in {gpu_record.NAME.name}: {run}")


def _run(config: pytest.Config) -> gpu_record.Run:
    session, part = config.stash[_SESSION], config.getoption("--part")
    _refuse_part_of_a_part(config, session)
    commit = gpu_record.recordable_commit(config.getoption("--commit"), config.rootpath)
    gpu, torch_version = _gpu()
    outcomes = Counter(session.outcomes.values())
    return gpu_record.Run(
        triton=_triton(),
        part=part.number,
        parts=part.count,
        deal=session.deal,
        commit=commit,
        sources=gpu_record.digest_of_files(config.rootpath),
        gpu=gpu,
        torch=torch_version,
        python=platform.python_version(),
        date=datetime.now(timezone.utc).date().isoformat(),
        seconds=round(time.monotonic() - session.started),
        passed=outcomes["passed"],
        failed=sorted(test for test, each in session.outcomes.items() if each == "failed"),
        skipped=dict(sorted(session.reasons.items())),
    )


def _refuse_part_of_a_part(config: pytest.Config, session: Session) -> None:
    """Refuse a run that chose among the tests, or that did not get to all of them."""
    chosen = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    narrowed = [name for name in _NARROWING if config.getoption(name, None)]
    if chosen or narrowed:
        raise gpu_record.NotRecordableError("paths or options chose among the tests")
    unseen = [test for test in session.collected if test not in session.outcomes]
    if unseen or not session.deal:
        raise gpu_record.NotRecordableError(
            f"{len(unseen)} of {len(session.collected)} tests have no result"
        )


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped: ")


def _gpu() -> tuple[str, str]:
    """Return the name of the GPU, and the version of torch."""
    import torch  # a run without --record needs none

    return torch.cuda.get_device_name(), str(torch.__version__)


def _triton() -> str:
    import triton  # a run without --record needs none

    return str(triton.__version__)
