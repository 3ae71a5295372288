"""Serves the same requests with mlakit and with an engine's own attention backends, and compares.

    python scripts/engines/compare.py run OUT                          every scenario
    python scripts/engines/compare.py run OUT --only 'tokens*,speed'   scenarios by their names
    python scripts/engines/compare.py report OUT                       tables of what is there

`run` needs vLLM, or SGLang for scenarios with its name, and one GPU. It writes small checkpoints
with random weights to OUT/models, starts a process for each scenario, model and backend, and leaves
its result and its log in OUT. Tasks whose result is there are not run again, so that a run that was
cut off is continued. With `--jobs 4` four processes share the GPU where tokens are compared; where
times are, one process is measured while the next one imports.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from logs import telling
from rich.console import Console
from rich.progress import track
from rich.table import Table

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CONSOLE = Console()
DENSE = ("MLAKIT", "FLASHMLA", "FLASH_ATTN_MLA", "TRITON_MLA")
FP8_DENSE = ("MLAKIT", "FLASHMLA", "TRITON_MLA")  # FLASH_ATTN_MLA takes no such cache
SPEED_DENSE, SPEED_FP8 = ("MLAKIT", "FLASHMLA", "FLASH_ATTN_MLA"), ("MLAKIT", "FLASHMLA")
SGLANG_DENSE, SGLANG_SPARSE = ("fa3", "flashmla", "mlakit"), ("dsa", "mlakit")
SPARSE = ("MLAKIT_SPARSE", "FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE")
FP8_ROWS = ("MLAKIT_SPARSE", "FLASHMLA_SPARSE")
RAGGED = [5, 17, 90, 300, 1500, 3000, 64, 65]
TOKENS = {"kind": "tokens", "seed": 1, "lengths": RAGGED, "new": 48, "logprobs": 20}
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
BATCHES, CONTEXTS = (1, 16, 64, 128), (1024, 8192, 32_768)
MOST_TOKENS = 2**20
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # tokens are greedy
    "VLLM_DEEP_GEMM_WARMUP": "skip",  # minutes of compilation, of kernels that no scenario reaches
    "HF_HUB_OFFLINE": "1",
    "VLLM_PLUGINS": "mlakit",
    "SGLANG_PLUGINS": "mlakit",
}
COMMON: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "disable_log_stats": True,
    "max_model_len": 4096,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 8192,
    "enable_prefix_caching": False,
    "block_size": 64,
    # with a number of bytes nothing is measured at the start, where other processes come and go
    "kv_cache_memory_bytes": 2 << 30,
    "gpu_memory_utilization": 0.05,
    "compilation_config": {**GRAPHS, "cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
}
SGLANG: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "page_size": 64,
    "context_length": 33_280,
    "max_running_requests": 128,
    "cuda_graph_max_bs": 128,
    "mem_fraction_static": 0.8,
    "log_level": "warning",
}
SPEED = {
    "max_model_len": 33_280,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 16_384,
    "kv_cache_memory_bytes": 16 << 30,
    "compilation_config": {**GRAPHS, "cudagraph_capture_sizes": list(BATCHES)},
}
SOAK = {
    **SPEED,
    # chunks of a prompt would depend on the other requests
    "enable_chunked_prefill": False,
    "max_num_batched_tokens": 40_960,
}
FIRST_TOKENS = [{"kind": "first_token", "length": n, "repeats": 3} for n in CONTEXTS[1:]]


# a process group of its own, with which all ends that a process has started
GROUP: dict[str, Any] = (
    {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
)


def is_ours(backend: str) -> bool:
    return backend.lower().startswith("mlakit")


@dataclass(frozen=True)
class Scenario:
    models: tuple[str, ...]
    backends: tuple[str, ...]
    tasks: list[dict[str, Any]] = field(default_factory=lambda: [TOKENS])
    engine: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    program: str = "vllm_job.py"

    def arguments(self, backend: str) -> dict[str, Any]:
        """Return the engine's arguments with one of its backends."""
        if self.program == "sglang_job.py":
            return SGLANG | self.engine | {"attention_backend": backend}
        attention = {"backend": backend}
        if is_ours(backend):
            attention["mla_prefill_backend"] = "MLAKIT"
        return COMMON | {"attention_config": attention} | self.engine

    @property
    def is_alone(self) -> bool:
        """Does another process beside it change what it measures?"""
        return any(task["kind"] != "tokens" for task in self.tasks)


def _speed_tasks(steps: int = 24) -> list[dict[str, Any]]:
    pairs = [(b, c) for c in CONTEXTS for b in BATCHES if b * c <= MOST_TOKENS]
    return [
        {"kind": "speed", "batch": batch, "context": context, "steps": steps}
        for batch, context in pairs
    ]


# 71 blocks and the empty one: the longest prompt fits, all of them do not
CHUNKS = {
    "max_num_batched_tokens": 512,
    "enable_prefix_caching": True,
    "num_gpu_blocks_override": 72,
}
DRAFTS = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    },
    # a request has four tokens
    "compilation_config": {**GRAPHS, "cudagraph_capture_sizes": [4, 8, 16, 32, 64]},
}
COMPILED = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}}
LATE = {**TOKENS, "every": 3}
BOTH, BOTH_SPARSE = ("v3-h16", "v3-h128"), ("v3.2-h16", "v3.2-h128")
FP8, FP8_PACKED = {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_ds_mla"}
MEASURED = [*_speed_tasks(), *FIRST_TOKENS]
# the first ones are short, and say most about whether the backends work
SCENARIOS = {
    "tokens": Scenario(BOTH, DENSE),
    "tokens-sparse": Scenario(BOTH_SPARSE, SPARSE),
    "tokens-fp8": Scenario(BOTH, FP8_DENSE, engine=FP8),
    "tokens-sparse-fp8": Scenario(BOTH_SPARSE, FP8_ROWS, engine=FP8_PACKED),
    "tokens-drafts": Scenario(("v3-h16",), DENSE, [LATE], DRAFTS),
    "tokens-chunks-prefixes-preemption": Scenario(("v3-h16",), DENSE, [LATE, LATE], CHUNKS),
    "tokens-sparse-drafts": Scenario(("v3.2-h128",), SPARSE, [LATE], DRAFTS),
    "tokens-experts": Scenario(("v3-h16-experts",), DENSE),
    # CUTLASS's kernels in the place of those that DeepGEMM compiles for every shape
    "tokens-fp8-weights": Scenario(
        ("v3-h16-fp8-weights",), DENSE, environment={"VLLM_USE_DEEP_GEMM": "0"}
    ),
    # the requests of "tokens", through a server and its processes
    "tokens-http": Scenario(("v3-h16",), ("MLAKIT",), program="vllm_http_job.py"),
    "tokens-compiled": Scenario(("v3-h16",), ("MLAKIT", "FLASHMLA"), [LATE], COMPILED),
    "speed": Scenario(BOTH, SPEED_DENSE, MEASURED, SPEED),
    "speed-sparse": Scenario(BOTH_SPARSE, SPARSE, MEASURED, SPEED),
    "speed-fp8": Scenario(BOTH, SPEED_FP8, _speed_tasks(), SPEED | FP8),
    "speed-sparse-fp8": Scenario(BOTH_SPARSE, FP8_ROWS, _speed_tasks(), SPEED | FP8_PACKED),
    "soak": Scenario(
        ("v3-h16",),
        ("MLAKIT",),
        [
            {
                "kind": "soak",
                "seconds": 300,
                "alone_seconds": 90,
                "longest": 32_768,
                "new": 64,
                "cancelled": 0.1,
                "per_second": 8,
            }
        ],
        SOAK,
        {"VLLM_BATCH_INVARIANT": "1"},
    ),
    "sglang": Scenario(BOTH, SGLANG_DENSE, [TOKENS, *_speed_tasks()], program="sglang_job.py"),
    "sglang-sparse": Scenario(
        BOTH_SPARSE,
        SGLANG_SPARSE,
        [TOKENS, *_speed_tasks()],
        {"kv_cache_dtype": "fp8_e4m3"},
        program="sglang_job.py",
    ),
}


@dataclass(frozen=True)
class Job:
    name: str
    model: str
    backend: str
    scenario: Scenario

    @property
    def stem(self) -> str:
        return f"{self.name}.{self.model}.{self.backend}"


def jobs(
    only: str = "*", backends: list[str] | None = None, models: list[str] | None = None
) -> Iterator[Job]:
    """Yield the jobs of scenarios whose name matches one of the patterns in `only`."""
    for name, scenario in SCENARIOS.items():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in only.split(",")):
            for model in scenario.models:
                for backend in scenario.backends:
                    is_asked = not backends or backend in backends
                    if is_asked and (not models or model in models):
                        yield Job(name, model, backend, scenario)


def is_done(job: Job, out: Path) -> bool:
    """Is there a result of every task?"""
    path = out / f"{job.stem}.json"
    return path.exists() and len(read(path)["tasks"]) == len(job.scenario.tasks)


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def start(job: Job, out: Path, asked: argparse.Namespace, end: float) -> str | None:
    """Run a job in a process of its own; return what its log says of an error, None without one."""
    if time.monotonic() > end:
        return "not begun: no time is left"
    path = out / f"{job.stem}.job.json"
    path.write_text(
        json.dumps(
            {
                "name": job.stem,
                "model": str(out / "models" / job.model),
                "engine": job.scenario.arguments(job.backend) | json.loads(asked.engine),
                "tasks": job.scenario.tasks,
                "result": str(out / f"{job.stem}.json"),
                # the process of a measurement waits for its turn where others may be running
                "turn": str(out / "turn.lock") if job.scenario.is_alone else None,
            }
        )
    )
    limit = asked.limit * (2 if job.scenario.is_alone and asked.jobs > 1 else 1)
    log = out / f"{job.stem}.log"
    with log.open("w") as file:
        code = exit_status(
            [sys.executable, str(HERE / job.scenario.program), str(path)],
            limit,
            env=ENVIRONMENT | os.environ | job.scenario.environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    if code == 0:
        return None
    ended = f"no end within {limit} s" if code is None else f"exit status {code}"
    return "\n".join([*telling(log.read_text(errors="replace")), ended])


def exit_status(command: list[str], limit: int, **named: Any) -> int | None:
    """Return the exit status of a command; None if it is killed, with what it started, in time."""
    with subprocess.Popen(command, **GROUP, **named) as process:
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # an engine's processes may outlive the one that started them
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def run(out: Path, asked: argparse.Namespace) -> int:
    """Run what is asked for and not there; return the number of failures."""
    chosen = list(jobs(asked.only, asked.backend, asked.model))
    if not chosen:
        raise SystemExit(f"no scenario is {asked.only}; there are {', '.join(SCENARIOS)}")
    todo = [job for job in chosen if not is_done(job, out)]
    make_models({job.model for job in todo}, out / "models")
    end = time.monotonic() + asked.stop_after
    failed = 0
    for alone in (False, True):
        group = [job for job in todo if job.scenario.is_alone == alone]
        # beside a process that is measured, one may import
        workers = min(asked.jobs, 2) if alone else asked.jobs
        with ThreadPoolExecutor(workers) as pool:
            ended = pool.map(lambda job: start(job, out, asked, end), group)
            what = "measuring" if alone else "serving"
            for job, error in track(
                zip(group, ended, strict=True), what, total=len(group), console=CONSOLE
            ):
                if error is not None:
                    failed += 1
                    CONSOLE.print(f"[red]{job.stem} failed[/]")
                    CONSOLE.print(error, highlight=False, markup=False)
    return failed


def make_models(names: set[str], folder: Path) -> None:
    import torch
    from models import MODELS, save

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in track(sorted(names), "checkpoints", console=CONSOLE):
        if not (folder / name / "config.json").exists():
            save(MODELS[name], folder / name, device)


# --- what the results say --------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Two runs of the same requests.

    equal     requests with the same tokens
    logprob   the largest difference of a token's logarithm of probability, up to and with the first
              position at which the tokens of a request differ: until then both saw the same tokens
    """

    requests: int
    equal: int
    logprob: float


def difference(one: dict[str, Any], other: dict[str, Any]) -> Difference:
    equal, largest = 0, 0.0
    for request, (mine, theirs) in enumerate(zip(one["tokens"], other["tokens"], strict=True)):
        equal += mine == theirs
        same = next(
            (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), len(mine) - 1
        )
        for position in range(same + 1):
            a, b = one["logprobs"][request][position], other["logprobs"][request][position]
            largest = max([largest, *(abs(a[token] - b[token]) for token in a.keys() & b.keys())])
    return Difference(len(one["tokens"]), equal, largest)


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


# the most that ours may take, of the best other backend's time, and of the memory before a soak
STEP_LIMIT, FIRST_TOKEN_LIMIT, ATTENTION_LIMIT, MANY_HEADS_LIMIT = 1.01, 1.0, 1.0, 0.97
MEMORY_LIMIT = 1.01
# of the engine's own backends: attention, its metadata on the device, cache, indexer, selection
ATTENTION = re.compile(
    r"flash|mla|fmha|attn|_fwd_(grouped_)?kernel_stage|indexer|mqa_logits|top_?k_per_row|topk"
    r"|global_index|cp_gather|concat_and_cache",
    re.IGNORECASE,
)


def attention_us(kernels: dict[str, float], own: re.Pattern[str]) -> float:
    return sum(us for name, us in kernels.items() if own.match(name) or ATTENTION.search(name))


def results(out: Path) -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """Results by scenario and model, then by backend."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for job in jobs():
        path = out / f"{job.stem}.json"
        if path.exists():
            found.setdefault((job.name, job.model), {})[job.backend] = read(path)
    return found


def report(out: Path) -> int:
    """Print tables; return the number of comparisons that do not hold."""
    misses = 0
    own = own_kernels()
    for (name, model), by_backend in results(out).items():
        ours = [backend for backend in by_backend if is_ours(backend)]
        if not ours:
            continue
        for index, task in enumerate(by_backend[ours[0]]["tasks"]):
            tasks = {
                backend: each["tasks"][index]
                for backend, each in by_backend.items()
                if index < len(each["tasks"])
            }
            kind = task["task"]["kind"]
            if kind == "tokens" and len(tasks) > 1:
                misses += report_tokens(f"{name} {model}", tasks, ours[0])
            elif kind == "soak":
                misses += report_soak(f"{name} {model}", tasks[ours[0]])
    misses += report_http(out)
    misses += report_times(out, own)
    return misses


def report_http(out: Path) -> int:
    """A server has the tokens of the engine that runs in one process."""
    found = results(out)
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
    return bool(result["different_alone"]) + (result["compared_alone"] == 0) + is_grown


def report_tokens(title: str, tasks: dict[str, dict[str, Any]], ours: str) -> int:
    """Ours may differ from another backend by as much as two of the others do.

    Where there is one other, tokens must be the same.
    """
    others = [backend for backend in tasks if backend != ours]
    among = [
        difference(tasks[a], tasks[b]).logprob
        for i, a in enumerate(others)
        for b in others[i + 1 :]
    ]
    table = Table("backend", "same tokens", "largest difference of a logprob", title=title)
    misses = 0
    for backend in others:
        found = difference(tasks[ours], tasks[backend])
        is_near = bool(among) and found.logprob <= max(among)
        misses += found.equal < found.requests and not is_near
        table.add_row(backend, f"{found.equal} of {found.requests}", f"{found.logprob:.4f}")
    if among:
        table.add_row("the others among themselves", "", f"{max(among):.4f}")
    CONSOLE.print(table)
    return misses


def report_times(out: Path, own: re.Pattern[str]) -> int:
    misses = 0
    for (name, model), by_backend in results(out).items():
        rows = list(time_rows(by_backend, own))
        if not rows:
            continue
        table = Table(
            "what", "best other", "its step, ms", "ours", "ratio",
            "its attention, us", "ours", "ratio", "share of our step",
            title=f"{name} {model}",
        )  # fmt: skip
        attention_limit = MANY_HEADS_LIMIT if model.endswith("h128") else ATTENTION_LIMIT
        for row in rows:
            limit = STEP_LIMIT if row.attention else FIRST_TOKEN_LIMIT
            misses += row.step_ratio > limit or row.attention_ratio > attention_limit
            table.add_row(*row.cells())
        CONSOLE.print(table)
    return misses


@dataclass(frozen=True)
class TimeRow:
    what: str
    best: str
    step: float
    our_step: float
    attention: float
    our_attention: float

    @property
    def step_ratio(self) -> float:
        return self.our_step / self.step

    @property
    def attention_ratio(self) -> float:
        return self.our_attention / self.attention if self.attention else 0.0

    def cells(self) -> list[str]:
        made = [self.what, self.best, f"{self.step:.2f}", f"{self.our_step:.2f}"]
        made.append(f"{self.step_ratio:.3f}")
        if not self.attention:
            return [*made, "", "", "", ""]
        share = self.our_attention / 1e3 / self.our_step
        return [
            *made, f"{self.attention:.0f}", f"{self.our_attention:.0f}",
            f"{self.attention_ratio:.3f}", f"{share:.0%}",
        ]  # fmt: skip


def time_rows(by_backend: dict[str, Any], own: re.Pattern[str]) -> Iterator[TimeRow]:
    """Compare with the best other backend: of attention's time, and of the step's."""
    timed: dict[str, dict[str, tuple[float, float]]] = {}
    for backend, result in by_backend.items():
        for each in result["tasks"]:
            task = each["task"]
            if task["kind"] == "speed":
                what = f"b {task['batch']}, {task['context']} tokens"
                us = attention_us(each["kernels_us"], own)
                timed.setdefault(what, {})[backend] = each["step_ms"], us
            elif task["kind"] == "first_token":
                what = f"first token of {task['length']}"
                timed.setdefault(what, {})[backend] = each["first_token_ms"], 0.0
    for what, times in timed.items():
        ours = [backend for backend in times if is_ours(backend)]
        others = {backend: each for backend, each in times.items() if backend not in ours}
        if ours and others:
            best = min(others, key=lambda backend: others[backend][1] or others[backend][0])
            yield TimeRow(
                what,
                best,
                min(step for step, _ in others.values()),
                times[ours[0]][0],
                others[best][1],
                times[ours[0]][1],
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="serve with every backend")
    runner.add_argument("out", type=Path)
    runner.add_argument("--only", default="*", help="names of scenarios, or patterns, with commas")
    runner.add_argument("--backend", action="append", help="only this one; may be repeated")
    runner.add_argument("--model", action="append", help="only this one; may be repeated")
    runner.add_argument("--jobs", type=int, default=1, help="processes at once")
    runner.add_argument(
        "--stop-after", type=float, default=float("inf"), help="seconds until no process is begun"
    )
    runner.add_argument("--limit", type=int, default=600, help="seconds for one process")
    runner.add_argument("--engine", default="{}", help="more engine arguments, as JSON")
    reporter = commands.add_parser("report", help="tables of the results that are there")
    reporter.add_argument("out", type=Path)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    failures = run(asked.out, asked) if asked.command == "run" else report(asked.out)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
