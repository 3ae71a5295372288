"""Runs a part of the GPU tests (`--part`) and records it (`--record`): the hooks of pytest.

A run writes a line for each test into the folder of `--record` as soon as the test is over, so a
run that is cut off loses nothing: with `--resume` a later one continues it.
"""

from __future__ import annotations

import json
import platform
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import gpu_parts, gpu_record

SAY = "terminal"  # the property of a test whose value is printed after all tests
MOST_NOTED = 4000  # characters of a failure in a log
_PART = "part of the GPU tests"
_DONE = "tests with results"
_END = "when no further test begins"
_SESSION = pytest.StashKey["Session"]()
# the outcomes of a phase, from the worst on
_OUTCOMES = ("failed", "skipped", "passed")
# options that leave out tests of a part
_NARROWING = ("keyword", "deselect", "ignore", "ignore_glob", "lf", "quick", "measure_slow")


class Line(NamedTuple):
    """A line of a log: a test that is over."""

    test: str
    outcome: str
    seconds: float
    note: str  # why it failed or was skipped
    at: float  # seconds since the run began, without those that it resumes


class Log:
    """What a run of a part leaves in a folder: what it is of, and a line for each test."""

    def __init__(self, path: Path, of: gpu_record.Origin) -> None:
        self._path, self._of = path, of

    def begin(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(asdict(self._of)) + "\n", encoding="utf-8")

    def resume(self) -> list[Line]:
        """Return the lines of a run that was cut off, or begin where there is none."""
        said = list(gpu_record.whole_lines(self._path)) if self._path.exists() else []
        if not said:
            self.begin()
            return []
        head, *lines = said
        before = gpu_record.Origin(**head)
        if before.sources != self._of.sources:
            raise pytest.UsageError(
                f"--resume: {self._path} is of other sources, those of {before.commit}"
            )
        # without half of a line at the end
        whole = self._path.with_suffix(".whole")
        whole.write_text("".join(json.dumps(each) + "\n" for each in said), encoding="utf-8")
        whole.replace(self._path)
        return [Line(*line) for line in lines]

    def add(self, line: Line) -> None:
        with self._path.open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")


class Session:
    """Collects, in the process that starts the workers, what they report."""

    def __init__(self, origin: gpu_record.Origin | None = None, log: Log | None = None) -> None:
        self.started = time.monotonic()
        self.origin = origin
        self.deal = ""
        self.tests: list[str] = []  # of the part, those with results of earlier runs too
        self.resumed: frozenset[str] = frozenset()
        self.outcomes: dict[str, str] = {}
        self._notes: dict[str, str] = {}
        self._seconds: Counter[str] = Counter()
        self._seconds_before = 0.0
        self._log = log

    @property
    def seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self.started

    def resume(self, lines: list[Line]) -> None:
        """Take in the results of runs of the part that were cut off."""
        last = 0.0
        for line in lines:
            self._take(line.test, line.outcome, line.note)
            if line.at < last:  # another run began
                self._seconds_before += last
            last = line.at
        self._seconds_before += last
        self.resumed = frozenset(self.outcomes)

    def add(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Take in the report of one phase of a test."""
        test = report.nodeid
        if test in self.resumed:  # a file that is skipped whole is so in every run
            return
        self._take(test, report.outcome, _note(report))
        self._seconds[test] += getattr(report, "duration", 0.0)
        if report.when not in ("setup", "call") and self._log is not None:
            at = time.monotonic() - self.started
            outcome, seconds = self.outcomes[test], round(self._seconds[test], 3)
            self._log.add(Line(test, outcome, seconds, self._notes.get(test, ""), round(at, 1)))

    def _take(self, test: str, outcome: str, note: str) -> None:
        """Keep the worst outcome of the phases, and why."""
        before = self.outcomes.get(test, "passed")
        self.outcomes[test] = min(before, outcome, key=_OUTCOMES.index)
        if self.outcomes[test] == outcome != "passed":
            self._notes[test] = note

    def run(self) -> gpu_record.Run:
        """Return the record of the part; NotRecordableError if a test of it has no result."""
        assert self.origin is not None
        if not self.tests:
            raise gpu_record.NotRecordableError("no worker came to its end: --resume runs the rest")
        missing = sum(test not in self.outcomes for test in self.tests)
        if missing:
            raise gpu_record.NotRecordableError(
                f"{missing} of {len(self.tests)} tests have no result: --resume runs them"
            )
        counts = Counter(self.outcomes.values())
        failed = [test for test, each in self.outcomes.items() if each == "failed"]
        skipped = Counter(
            self._notes[test] for test, each in self.outcomes.items() if each == "skipped"
        )
        return gpu_record.Run(
            **asdict(self.origin),
            deal=self.deal,
            seconds=round(self.seconds),
            passed=counts["passed"],
            failed=sorted(failed),
            skipped=dict(sorted(skipped.items())),
        )


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
    group.addoption(
        "--resume",
        action="store_true",
        help="run only tests of the part that have no result in the folder of --record",
    )
    group.addoption(
        "--stop-after",
        type=float,
        metavar="SECONDS",
        help="begin no test later than this, and say what failed so far",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_SESSION] = Session()
    if hasattr(config, "workerinput"):
        return
    folder = config.getoption("--record")
    if folder is None:
        if config.getoption("--resume"):
            raise pytest.UsageError("--resume needs --record")
        return
    _refuse_part_of_a_part(config)
    origin = _origin(config)
    log = Log(folder / f"gpu-tests-{origin.part}of{origin.parts}-{origin.triton}.jsonl", origin)
    config.stash[_SESSION] = Session(origin, log)
    if config.getoption("--resume"):
        config.stash[_SESSION].resume(log.resume())
    else:
        log.begin()


def _refuse_part_of_a_part(config: pytest.Config) -> None:
    """Refuse to record a run that chooses among the tests."""
    if config.getoption("--part") is None or config.option.markexpr.strip() != "gpu":
        raise pytest.UsageError("--record needs -m gpu and --part")
    chosen = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    narrowed = [name for name in _NARROWING if config.getoption(name, None)]
    if chosen or narrowed:
        raise pytest.UsageError("--record takes no paths or options that choose among the tests")


def _origin(config: pytest.Config) -> gpu_record.Origin:
    """Return what the run is of; refuse sources that no commit has before a test is run."""
    part = config.getoption("--part")
    try:
        commit = gpu_record.recordable_commit(config.getoption("--commit"), config.rootpath)
    except gpu_record.NotRecordableError as error:
        raise pytest.UsageError(f"--record: {error}") from error
    gpu, torch_version = _gpu()
    return gpu_record.Origin(
        triton=_triton(),
        part=part.number,
        parts=part.count,
        commit=commit,
        sources=gpu_record.digest_of_files(config.rootpath),
        gpu=gpu,
        torch=torch_version,
        python=platform.python_version(),
        date=datetime.now(timezone.utc).date().isoformat(),
    )


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker what is done: one that replaces another must collect the same tests."""
    node.workerinput[_DONE] = _done(node.config)
    node.workerinput[_END] = _end(node.config)


def _done(config: pytest.Config) -> list[str]:
    """Return the tests that have results of an earlier run."""
    if hasattr(config, "workerinput"):
        return list(config.workerinput[_DONE])
    return sorted(config.stash[_SESSION].resumed)


def _end(config: pytest.Config) -> float | None:
    """Return the time after which no test begins."""
    if hasattr(config, "workerinput"):
        end: float | None = config.workerinput[_END]
        return end
    seconds = config.getoption("--stop-after")
    return None if seconds is None else config.stash[_SESSION].started + seconds


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    done = yield
    end = _end(item.config)
    if end is not None and time.monotonic() > end:
        item.session.shouldstop = "the time of --stop-after is over"
    return done


@pytest.hookimpl(trylast=True)  # -m and -k have chosen before
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--part")
    if part is None:
        return
    named = {item.nodeid: item for item in items}
    large, long = (
        {test for test, item in named.items() if item.get_closest_marker(mark)}
        for mark in ("large", "long")
    )
    seconds = gpu_parts.expected_seconds(gpu_parts.read_times(), long)
    dealt = gpu_parts.deal(list(named), seconds, part.count, large)
    own = [test for test, number in dealt.items() if number == part.number]
    left = set(own).difference(_done(config))
    config.hook.pytest_deselected(items=[named[test] for test in named if test not in left])
    tests = [test for test in own if test in left]
    ordered = gpu_parts.arrange(tests, seconds, large, _workers(config))
    items[:] = [named[test] for test in ordered]
    dealt_as = (gpu_parts.digest_of_deal(dealt), own)
    if hasattr(config, "workeroutput"):
        config.workeroutput[_PART] = dealt_as
    else:
        config.stash[_SESSION].deal, config.stash[_SESSION].tests = dealt_as


def _workers(config: pytest.Config) -> int:
    return int(getattr(config, "workerinput", {}).get("workercount", 1))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    output = getattr(node, "workeroutput", None) or {}  # a worker that crashed has none
    if _PART in output:
        session = node.config.stash[_SESSION]
        session.deal, session.tests = output[_PART]


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
    if config.stash[_SESSION].origin is not None:
        config.pluginmanager.register(Reports(config.stash[_SESSION]))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for report in terminalreporter.stats.get("passed", []):
        for name, said in report.user_properties:
            if name == SAY:
                terminalreporter.write_line(str(said))
    session = config.stash[_SESSION]
    if session.origin is None:
        return
    try:
        run = session.run()
    except gpu_record.NotRecordableError as error:
        terminalreporter.write_line(f"not recorded: {error}")
        return
    folder = config.getoption("--record")
    for path in (config.rootpath / gpu_record.NAME, folder / gpu_record.NAME.name):
        gpu_record.add([run], path)
    terminalreporter.write_line(f"recorded in {gpu_record.NAME.name}: {run}")


def _note(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return why a test was skipped, or the end of what it failed with."""
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        why = str(report.longrepr[2]).removeprefix("Skipped: ")
        return why.replace(str(Path.home()), "~")
    return report.longreprtext[-MOST_NOTED:]


def _gpu() -> tuple[str, str]:
    """Return the name of the GPU, and the version of torch."""
    import torch  # a run without --record needs none

    return torch.cuda.get_device_name(), str(torch.__version__)


def _triton() -> str:
    import triton  # a run without --record needs none

    return str(triton.__version__)
