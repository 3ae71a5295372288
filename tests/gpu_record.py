"""The record of the GPU tests, docs/data/gpu-tests.json: what passed where, and of which commit.

`make test-gpu` writes it, a run for each part and each Triton, and only of code that a commit has:
a digest of the sources is compared with that of the commit. Where there is no git, on a copy of the
tree, the file that `make gpu-commit` left names both. `make gpu-record FROM=...` adds what runs on
another machine left in a folder, and what they measured.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

from tests import gpu_parts
from tests.paths import ROOT

NAME = Path("docs", "data", "gpu-tests.json")
RECORD = ROOT / NAME
COMMIT = ROOT / ".gpu-commit"
TRITONS = ("3.6.0", "3.9.0")
# what the results of the GPU tests depend on
SOURCES = ("mlakit", "tests", "examples", "pyproject.toml")
# changed after the recorded commit, these are worth another run
ON_THE_GPU = ("kernels", "launch_cache", "ops", "steps", "cache", "layer")


class NotRecordableError(Exception):
    """The run cannot be recorded; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a run of one part of the GPU tests is of; `sources` is a digest of the code."""

    triton: str
    part: int
    parts: int
    commit: str
    sources: str
    gpu: str
    torch: str
    python: str
    date: str


@dataclass(frozen=True, kw_only=True)
class Run(Origin):
    """The results of one part; `deal` is a digest of how tests were dealt out to parts."""

    deal: str
    seconds: int
    passed: int
    failed: list[str]
    skipped: dict[str, int]

    def __str__(self) -> str:
        return f"part {self.part}/{self.parts} with Triton {self.triton}"


def read(path: Path = RECORD) -> list[Run]:
    if not path.exists():
        return []
    return [Run(**run) for run in json.loads(path.read_text(encoding="utf-8"))]


def add(runs: Iterable[Run], path: Path = RECORD) -> None:
    """Put runs into the record.

    A run replaces that of the same part and Triton, and all runs of another number of parts.
    """
    kept = read(path)
    for run in runs:
        kept = [
            each
            for each in kept
            if each.triton != run.triton or (each.parts == run.parts and each.part != run.part)
        ]
        kept.append(run)
    kept.sort(key=lambda run: (run.triton, run.part))
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps([asdict(run) for run in kept], indent=1, ensure_ascii=False)
    path.write_text(content + "\n", encoding="utf-8")


def complaints(runs: Sequence[Run], tritons: Sequence[str] = TRITONS) -> list[str]:
    """Return what the record lacks, and the tests that failed."""
    found = []
    for triton in tritons:
        own = [run for run in runs if run.triton == triton]
        if not own:
            found.append(f"no part was run with Triton {triton}")
            continue
        missing = sorted(set(range(1, own[0].parts + 1)) - {run.part for run in own})
        found += [f"part {part}/{own[0].parts} with Triton {triton} is missing" for part in missing]
        if len({(run.parts, run.deal) for run in own}) > 1:
            found.append(f"the parts with Triton {triton} do not come from the same list of tests")
    return found + [f"{run}: {test} failed" for run in runs for test in run.failed]


def digest_of_files(root: Path = ROOT) -> str:
    """Return the digest of the sources as they lie in the folder."""
    files = (
        path
        for source in SOURCES
        for path in ((root / source).rglob("*") if (root / source).is_dir() else [root / source])
        if path.is_file() and "__pycache__" not in path.parts
    )
    return _digest({path.relative_to(root).as_posix(): _blob(path) for path in files})


def digest_of_commit(commit: str, root: Path = ROOT) -> str | None:
    """Return the digest of the sources of a commit, or None where git does not know it."""
    listed = _git(root, "ls-tree", "-r", "-z", commit, "--", *SOURCES)
    if listed is None:
        return None
    files = {}
    for line in filter(None, listed.split("\0")):
        entry, name = line.split("\t")
        files[name] = entry.split()[2]
    return _digest(files)


def head(root: Path = ROOT) -> str | None:
    return _git(root, "rev-parse", "HEAD")


def recordable_commit(given: str | None = None, root: Path = ROOT) -> str:
    """Return the commit whose sources lie in `root`: the one `given`, that of the file, or git's.

    Raises NotRecordableError if the sources are others, or if no commit is known.
    """
    sources = digest_of_files(root)
    noted = root / COMMIT.name
    if given is None and noted.exists():
        commit, expected = noted.read_text(encoding="utf-8").split()
        if expected != sources:
            raise NotRecordableError(f"the sources are not those of {COMMIT.name}: {commit}")
        return commit
    commit = given or head(root)
    if commit is None:
        raise NotRecordableError(
            f"there is neither git nor {COMMIT.name}: make gpu-commit makes it"
        )
    if digest_of_commit(commit, root) not in (None, sources):
        raise NotRecordableError(f"there are changes that {commit} does not have")
    return commit


def note_commit(root: Path = ROOT) -> str:
    """Write the file that names the commit where there is no git."""
    commit = head(root)
    if commit is None:
        raise NotRecordableError("make gpu-commit must be run in a git checkout")
    sources = digest_of_files(root)
    if digest_of_commit(commit, root) != sources:
        raise NotRecordableError(f"there are changes that {commit} does not have: commit them")
    (root / COMMIT.name).write_text(f"{commit}\n{sources}\n", encoding="utf-8")
    return f"{COMMIT.name}: {commit}"


def changed_since(runs: Sequence[Run], root: Path = ROOT) -> str:
    """Say which folders of GPU code differ from the recorded commits."""
    commits = sorted({run.commit for run in runs})
    folders = [f"mlakit/{name}" for name in ON_THE_GPU]
    changed: set[str] = set()
    for commit in commits:
        names = _git(root, "diff", "--name-only", commit, "--", *folders)
        if names is None:
            return f"GPU tests: git cannot say what changed since {commit[:10]}"
        changed.update("/".join(name.split("/")[:2]) for name in names.split())
    listed = ", ".join(commit[:10] for commit in commits)
    if not changed:
        return f"GPU tests: recorded of {listed}, no kernel and nothing above it changed since"
    return f"GPU tests: recorded of {listed}, changed since: {', '.join(sorted(changed))}"


def merge(folders: Sequence[Path], record: Path = RECORD, times: Path = gpu_parts.TIMES) -> str:
    """Add the runs, and the measured times, that runs elsewhere left in `folders`."""
    runs = [run for folder in folders for run in read(folder / RECORD.name)]
    for run in runs:
        if digest_of_commit(run.commit) != run.sources:
            raise NotRecordableError(f"{run} is not of the sources of {run.commit}")
    add(runs, record)
    seconds: dict[str, list[float]] = defaultdict(list)
    for folder in folders:
        for log in sorted(folder.glob("*.jsonl")):
            for test, each in _seconds_of(log):
                seconds[test].append(each)
    measured = gpu_parts.add_up((test, mean(each)) for test, each in seconds.items())
    before = gpu_parts.read_times(times).items()
    kept = {function: each for function, each in before if _exists(function)}
    gpu_parts.write_times(times, {**kept, **measured})
    return f"{len(runs)} runs added, {len(measured)} functions measured"


def whole_lines(log: Path) -> Iterator[Any]:
    """Yield what the lines of a log say; a run that was cut off ends in half a line."""
    with log.open(encoding="utf-8") as lines:
        yield from (json.loads(line) for line in lines if line.endswith("\n"))


def _seconds_of(log: Path) -> Iterator[tuple[str, float]]:
    """Yield each test that did not fail, and its seconds; the first line of a log names the run.

    Those that are skipped count: what a function's tests take together says how parts are dealt.
    """
    for test, outcome, seconds, *_ in islice(whole_lines(log), 1, None):
        if outcome != "failed" and "::" in test:
            yield test, seconds


def _exists(function: str, root: Path = ROOT) -> bool:
    """Whether a test function is still where it was measured."""
    file, _, name = function.partition("::")
    path = root / file
    return path.exists() and f"def {name}(" in path.read_text(encoding="utf-8")


def _digest(files: Mapping[str, str]) -> str:
    lines = "\n".join(f"{name} {blob}" for name, blob in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def _blob(path: Path) -> str:
    """Return git's name for the content of a file."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _git(root: Path, *arguments: str) -> str | None:
    """Return what git prints, or None where there is no git or it refuses."""
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("commit", help=f"write {COMMIT.name}")
    merging = commands.add_parser("merge", help="add what runs left in folders")
    merging.add_argument("folders", nargs="+", type=Path)
    given = parser.parse_args()
    try:
        said = note_commit() if given.command == "commit" else merge(given.folders)
    except NotRecordableError as error:
        sys.exit(str(error))
    sys.stdout.write(said + "\n")


if __name__ == "__main__":
    main()
