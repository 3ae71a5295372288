"""The record of random launches: how many, of which kernel, commit and Triton, and where.

`mlakit check --launches N --record FILE` adds a run to it. Records of one kernel, commit, version
of Triton and device become one: their seeds and counts are added up. Runs of the emulator have the
device "emulator", so that their counts stay apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from mlakit.tools.bench import environment
from mlakit.tools.check import Outcome

EMULATOR = "emulator"
COMMIT_FILE = Path(__file__).parents[2] / ".gpu-commit"  # where there is no git: `make gpu-commit`
KEY = ("op", "backend", "kernel", "commit", "triton", "device", "note")


@dataclass(frozen=True)
class LaunchRecord:
    """Launches of one kernel.

    kernel  its name among the backend's kernels of the op; "" for the only one, or for all
    wrong   launches of which a result is wrong; `note` says of what
    device  the GPU, "cpu" or "emulator"
    """

    op: str
    backend: str
    kernel: str
    seeds: tuple[int, ...]
    launches: int
    wrong: int
    commit: str
    triton: str
    device: str
    note: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """Return what records that become one have in common."""
        return tuple(getattr(self, name) for name in KEY)


def read(path: Path) -> list[LaunchRecord]:
    """Return the records of a file. Raises ValueError, naming the file, for other contents."""
    try:
        found = [_parsed(each) for each in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} must hold records of launches: {error}") from error
    return found


def _parsed(given: dict[str, object]) -> LaunchRecord:
    names = [each.name for each in fields(LaunchRecord)]
    if set(given) != set(names):
        different = sorted(set(given) ^ set(names))
        raise ValueError(f"a record must have {', '.join(names)}; different: {different}")
    for name in ("launches", "wrong"):
        if type(given[name]) is not int or given[name] < 0:  # type: ignore[operator]
            raise ValueError(f"{name} must be a count, got {given[name]!r}")
    seeds = given["seeds"]
    if not isinstance(seeds, list) or not all(type(each) is int for each in seeds):
        raise ValueError(f"seeds must be a list of integers, got {seeds!r}")
    texts = [name for name in KEY if not isinstance(given[name], str)]
    if texts:
        raise ValueError(f"{texts[0]} must be a text, got {given[texts[0]]!r}")
    return LaunchRecord(**{**given, "seeds": tuple(seeds)})  # type: ignore[arg-type]


def merged(records: Iterable[LaunchRecord]) -> list[LaunchRecord]:
    """Return one record for each key, in the order of their first ones."""
    found: dict[tuple[str, ...], LaunchRecord] = {}
    for each in records:
        known = found.get(each.key)
        if known is not None:
            each = replace(
                each,
                seeds=tuple(dict.fromkeys((*known.seeds, *each.seeds))),
                launches=known.launches + each.launches,
                wrong=known.wrong + each.wrong,
            )
        found[each.key] = each
    return list(found.values())


def write(path: Path, records: Sequence[LaunchRecord]) -> None:
    """Write a record per line."""
    lines = [" " + json.dumps({**asdict(each), "seeds": list(each.seeds)}) for each in records]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def of_run(outcome: Outcome) -> list[LaunchRecord]:
    """Return the records of a run of launches, one per kernel that ran."""
    facts, settings = environment.describe(), outcome.settings
    device = str(facts.get("gpu", "")) if settings.torch_device == "cuda" else "cpu"
    commit = str(facts["commit"] or "")
    if not commit and COMMIT_FILE.is_file():
        commit = COMMIT_FILE.read_text(encoding="utf-8").split()[0]
    counts = {each: (count, 0) for each, count in outcome.kernels.items()}
    failure = outcome.failure
    if failure is not None:
        wrong = (failure.op, failure.backend, failure.kernel)
        counts[wrong] = (counts.get(wrong, (0, 0))[0] + 1, 1)
    return [
        LaunchRecord(
            *each,
            seeds=(settings.seed,),
            launches=launches,
            wrong=num_wrong,
            commit=commit,
            triton=str(facts["triton"] or ""),
            device=device,
            note=f"{settings.calls} calls each" if settings.calls else "",
        )
        for each, (launches, num_wrong) in counts.items()
    ]


def add_run(path: Path, outcome: Outcome) -> None:
    """Add a run to a file, which need not exist."""
    known = read(path) if path.exists() else []
    write(path, merged([*known, *of_run(outcome)]))
