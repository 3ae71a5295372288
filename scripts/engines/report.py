"""What the results of compare.py say: tokens beside those of other backends, and times.

Times are written as reports of `mlakit bench`, from which the pages have their tables.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import combinations, groupby
from math import inf
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table

from mlakit.tools.bench.charts import save_charts
from mlakit.tools.bench.measure import Spread
from mlakit.tools.bench.report import MLAKIT, Report, Row

CONSOLE = Console(width=None if sys.stdout.isatty() else 120)
# results by scenario and model, then by backend
Results: TypeAlias = dict[tuple[str, str], dict[str, dict[str, Any]]]


def is_ours(backend: str) -> bool:
    return backend.lower().startswith("mlakit")


@dataclass(frozen=True)
class Difference:
    """Two runs of the same requests.

    equal           requests with the same tokens
    mean, largest   differences of a token's logarithm of probability, up to and with the first
                    position at which the tokens of a request differ: until then both saw the same
                    tokens
    """

    requests: int
    equal: int
    mean: float
    largest: float

    def cells(self) -> list[str]:
        return [f"{self.equal} of {self.requests}", f"{self.mean:.4f}", f"{self.largest:.3f}"]


def difference(one: dict[str, Any], other: dict[str, Any]) -> Difference:
    equal, found = 0, []
    for request, (mine, theirs) in enumerate(zip(one["tokens"], other["tokens"], strict=True)):
        equal += mine == theirs
        same = next(
            (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), len(mine) - 1
        )
        for position in range(same + 1):
            a, b = one["logprobs"][request][position], other["logprobs"][request][position]
            found += [abs(a[token] - b[token]) for token in a.keys() & b.keys()]
    return Difference(len(one["tokens"]), equal, fmean(found), max(found))


@dataclass(frozen=True)
class Compared:
    """Our tokens beside those of another backend.

    others  the largest difference, by its mean, of two runs without us: of two other backends, or
            of one whose requests arrive otherwise; None without such runs
    """

    scenario: str
    model: str
    backend: str
    found: Difference
    others: Difference | None

    @property
    def is_missed(self) -> bool:
        """Ours may differ from another backend about as much as the others differ without us."""
        if self.found.equal == self.found.requests:
            return False
        return self.others is None or self.found.mean > MEAN_LIMIT * self.others.mean


def compared(found: Results) -> Iterator[Compared]:
    """Yield our tokens beside those of every other backend, for each set of requests."""
    for (scenario, model), by_backend in found.items():
        runs = {
            backend: [task for task in each["tasks"] if task["task"]["kind"] == "tokens"]
            for backend, each in by_backend.items()
        }
        ours = [runs.pop(backend) for backend in by_backend if is_ours(backend)]
        for index, mine in enumerate(ours[0] if ours else ()):
            others = largest_difference(runs, index)
            for backend, tasks in runs.items():
                if index < len(tasks):
                    near = difference(mine, tasks[index])
                    yield Compared(scenario, model, backend, near, others)


def largest_difference(runs: dict[str, list[dict[str, Any]]], index: int) -> Difference | None:
    """Return the largest difference of two runs of the requests of one task."""
    same_task = [tasks[index] for tasks in runs.values() if index < len(tasks)]
    pairs = [*combinations(same_task, 2)]
    for tasks in runs.values():
        pairs += [
            pair
            for pair in combinations(tasks, 2)
            if all(task["task"]["lengths"] == same_task[0]["task"]["lengths"] for task in pair)
        ]
    return max((difference(*pair) for pair in pairs), key=lambda each: each.mean, default=None)


def pooled(runs: list[Results]) -> Results:
    """Return several runs as the first, whose decode steps are those of all of their processes.

    Steps of one process are alike, and those of another process of the same backend are not: only
    several processes show how much.
    """
    first, *others = runs
    for key, by_backend in first.items():
        for backend, result in by_backend.items():
            for other in others:
                tasks = other.get(key, {}).get(backend, {}).get("tasks", ())
                for mine, its in zip(result["tasks"], tasks, strict=False):
                    if mine["task"]["kind"] == "speed":
                        mine["all_ms"] += its["all_ms"]
                        for op, us in mine.get("host_us", {}).items():
                            us += its.get("host_us", {}).get(op, [])
    return first


def own_kernels() -> re.Pattern[str]:
    """Match the names of mlakit's kernels."""
    import mlakit

    folder = Path(mlakit.__file__).parent / "kernels"
    names = {
        name
        for path in folder.rglob("*.py")
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }
    return re.compile(rf"^({'|'.join(sorted(names))})$")


# logprobs of ours and of another backend, over those of two of the others: the mean says more than
# the largest one, which is of one token among thousands
MEAN_LIMIT = 1.15
ATTENTION_OP, STEP_OP, FIRST_TOKEN_OP = "attention", "step", "first_token"
HOST_OPS = ("metadata", "replay")  # parts of a step on the host, which explain it
# the most that ours may take, of the best other backend's time, and of the memory before a soak
LIMITS = {ATTENTION_OP: 1.0, STEP_OP: 1.01, FIRST_TOKEN_OP: 1.0} | dict.fromkeys(HOST_OPS, inf)
MANY_HEADS_LIMIT = 0.97
MEMORY_LIMIT = 1.01
# of the engine's own backends: attention, its metadata on the device, cache, indexer, selection
ATTENTION = re.compile(
    r"flash|mla|fmha|attn|_fwd_(grouped_)?kernel_stage|indexer|mqa_logits|top_?k_per_row|topk"
    r"|global_index|cp_gather|concat_and_cache",
    re.IGNORECASE,
)


def attention_us(kernels: dict[str, Any], own: re.Pattern[str]) -> float:
    """Microseconds of a step in which a kernel of attention runs.

    A kernel that is launched before the one ahead of it has ended waits for it: their times
    overlap.
    """
    chosen = {
        number
        for number, name in enumerate(kernels["names"])
        if own.match(name) or ATTENTION.search(name)
    }
    total, end = 0.0, float("-inf")
    for number, start, us in sorted(kernels["runs"], key=itemgetter(1)):
        if number in chosen:
            total += max(start + us - max(start, end), 0.0)
            end = max(end, start + us)
    steps: int = kernels["steps"]
    return total / steps


@dataclass(frozen=True)
class Times:
    """Microseconds of one thing by backend: a step, the attention in it, or a first token.

    workload  the model, the batch and the tokens of each request
    """

    scenario: str
    op: str
    workload: str
    rounds: int
    us: dict[str, Spread]

    @property
    def ours(self) -> str:
        return next(backend for backend in self.us if is_ours(backend))

    @property
    def best(self) -> str:
        others = (backend for backend in self.us if backend != self.ours)
        return min(others, key=lambda backend: self.us[backend].p50)

    @property
    def ratio(self) -> float:
        """Our time over the best other one."""
        return self.us[self.ours].p50 / self.us[self.best].p50

    @property
    def limit(self) -> float:
        if self.op != ATTENTION_OP:
            return LIMITS[self.op]
        return MANY_HEADS_LIMIT if "h128" in self.workload else LIMITS[self.op]

    def rows(self) -> Iterator[Row]:
        """Yield the rows of `mlakit bench` that say the same."""
        ours = self.us[self.ours].p50
        for backend, us in self.us.items():
            is_other = backend != self.ours
            speedup = Spread(*(each / ours for each in (us.p20, us.p50, us.p80)))
            yield Row(
                workload=f"{self.op}-{self.workload}",
                op=self.op,
                implementation=backend if is_other else MLAKIT,
                rounds=self.rounds,
                us=us,
                flops=0,
                bytes=0,
                speedup=speedup if is_other else None,
                min_speedup=None,
            )


def times_of(found: Results) -> Iterator[Times]:
    """Yield the times of ours beside those of other backends."""
    own = own_kernels()
    for (scenario, model), by_backend in found.items():
        made: dict[tuple[str, str], dict[str, tuple[int, Spread]]] = {}
        for backend, result in by_backend.items():
            for each in result["tasks"]:
                for op, workload, rounds, us in timed(each, own):
                    made.setdefault((op, f"{model}-{workload}"), {})[backend] = rounds, us
        for (op, workload), times in made.items():
            if any(map(is_ours, times)) and not all(map(is_ours, times)):
                rounds = min(rounds for rounds, _ in times.values())
                spreads = {backend: us for backend, (_, us) in times.items()}
                yield Times(scenario, op, workload, rounds, spreads)


def timed(result: dict[str, Any], own: re.Pattern[str]) -> Iterator[tuple[str, str, int, Spread]]:
    """Yield what is timed, the workload, how often, and the microseconds, of one task's result."""
    task = result["task"]
    if task["kind"] == "first_token":
        times = [1e3 * ms for ms in result["all_ms"][1:]]
        yield FIRST_TOKEN_OP, str(task["length"]), len(times), Spread.of(times)
    elif task["kind"] == "speed":
        workload = f"b{task['batch']}-{task['context']}"
        times = [1e3 * ms for ms in result.get("all_ms") or [result["step_ms"]]]
        yield STEP_OP, workload, len(times), Spread.of(times)
        for op in HOST_OPS:
            if any(us := result.get("host_us", {}).get(op, ())):
                yield op, workload, len(us), Spread.of(us)
        if result.get("kernels", {}).get("runs"):
            total = attention_us(result["kernels"], own)
            yield ATTENTION_OP, workload, 1, Spread(total, total, total)


def report(found: Results) -> int:
    """Print tables; return the number of comparisons that do not hold."""
    misses = report_tokens(list(compared(found)))
    for (name, model), by_backend in found.items():
        for backend, result in by_backend.items():
            for task in result["tasks"] if is_ours(backend) else ():
                if task["task"]["kind"] == "soak":
                    misses += report_soak(f"{name} {model}", task)
    return misses + report_http(found) + report_times(list(times_of(found)))


def report_http(found: Results) -> int:
    """A server has the tokens of the engine that runs in one process."""
    misses = 0
    for (name, model), by_backend in found.items():
        engine = found.get(("tokens", model), {})
        for backend, result in by_backend.items() if name == "tokens-http" else ():
            if backend in engine:
                served, alone = (each["tasks"][0]["tokens"] for each in (result, engine[backend]))
                equal = sum(a == b for a, b in zip(served, alone, strict=True))
                misses += equal < len(alone)
                CONSOLE.print(f"{name} {model} {backend}: {equal} of {len(alone)} as without HTTP")
    return misses


def report_soak(title: str, result: dict[str, Any]) -> int:
    """A request has the tokens that it has alone, and memory does not grow."""
    CONSOLE.print(title, {key: value for key, value in result.items() if key != "task"})
    is_grown = result["memory_after"] > MEMORY_LIMIT * result["memory_before"]
    misses: int = bool(result["different_alone"]) + (result["compared_alone"] == 0) + is_grown
    return misses


def report_tokens(rows: list[Compared]) -> int:
    columns = ("scenario", "model", "ours and", "same tokens", "logprobs, mean", "largest")
    table = Table(*columns, "others, mean", "largest", title="tokens")
    for row in rows:
        style = "red" if row.is_missed else None
        names = (row.scenario, row.model, row.backend)
        others = row.others.cells()[1:] if row.others else ()
        table.add_row(*names, *row.found.cells(), *others, style=style)
    if rows:
        CONSOLE.print(table)
    return sum(row.is_missed for row in rows)


def report_times(times: list[Times]) -> int:
    """Ours may take as long as the best of the others, with some margin for the whole step."""
    misses = 0
    for scenario, made in groupby(times, lambda each: each.scenario):
        group = list(made)
        steps = {each.workload: each.us[each.ours].p50 for each in group if each.op == STEP_OP}
        columns = ("workload", "best other", "its ms", "our ms", "ratio", "share of our step")
        table = Table(*columns, title=scenario)
        for each in group:
            best, ours = each.us[each.best].p50, each.us[each.ours].p50
            is_missed = each.ratio > each.limit
            misses += is_missed
            cells = [f"{best / 1e3:.3f}", f"{ours / 1e3:.3f}", f"{each.ratio:.3f}"]
            if each.op == ATTENTION_OP:
                cells.append(f"{ours / steps[each.workload]:.0%}")
            style = "red" if is_missed else None
            table.add_row(f"{each.op}-{each.workload}", each.best, *cells, style=style)
        CONSOLE.print(table)
    return misses


def save(found: Results, file: Path, command: str) -> None:
    """Write FILE-SCENARIO.json of times, as `mlakit bench` does, and FILE-tokens.json; beside
    them charts of attention's times."""
    environment: dict[str, object] = next(
        (
            each["environment"]
            for by_backend in found.values()
            for backend, each in by_backend.items()
            if is_ours(backend) and "environment" in each
        ),
        {},
    )
    reports = {
        scenario: Report(
            suite=scenario,
            command=command,
            environment=environment,
            rows=[row for each in group for row in each.rows()],
            left_out=(),
            mode="serve",
        )
        for scenario, group in groupby(times_of(found), lambda each: each.scenario)
    }
    for made in reports.values():
        attention = [row for row in made.rows if row.op == ATTENTION_OP]
        save_charts(replace(made, rows=attention, suite=f"engine-{made.suite}"), file.parent)
    files = {scenario: made.as_json() for scenario, made in reports.items()}
    files["tokens"] = {
        "command": command,
        "environment": environment,
        "rows": [asdict(row) for row in compared(found)],
    }
    for name, content in files.items():
        path = file.with_name(f"{file.stem}-{name}.json")
        path.write_text(json.dumps(content, indent=1) + "\n")
        CONSOLE.print(path)
