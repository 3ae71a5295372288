"""Serves the same requests with mlakit and with an engine's own attention backends, and compares.

    python scripts/engines/compare.py run OUT                          every scenario
    python scripts/engines/compare.py run OUT --only 'tokens*,speed'   scenarios by their names
    python scripts/engines/compare.py report OUT                       tables of what is there
    python scripts/engines/compare.py report OUT OUT2 OUT3             with the steps of all runs

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
from report import Results, is_ours, pooled, report, save
from rich.console import Console
from rich.progress import track

HERE = Path(__file__).parent
COMMAND = "python scripts/engines/compare.py run OUT"
ROOT = HERE.parents[1]
CONSOLE = Console()
DENSE = ("MLAKIT", "FLASHMLA", "FLASH_ATTN_MLA", "TRITON_MLA")
FP8_DENSE = ("MLAKIT", "FLASHMLA", "TRITON_MLA")  # FLASH_ATTN_MLA takes no such cache
SPEED_DENSE, SPEED_FP8 = ("MLAKIT", "FLASHMLA", "FLASH_ATTN_MLA"), ("MLAKIT", "FLASHMLA")
SGLANG_DENSE, SGLANG_SPARSE = ("fa3", "flashmla", "mlakit"), ("dsa", "mlakit")
SGLANG_SHORT = ("mlakit", "triton", "fa3")  # flashmla takes its prefill from flashinfer
SPARSE = ("MLAKIT_SPARSE", "FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE")
FP8_ROWS = ("MLAKIT_SPARSE", "FLASHMLA_SPARSE")
RAGGED = [5, 17, 90, 300, 1500, 3000, 64, 65]
LONG = [2100, 2600, 3000, 3500, 4000, 2049, 900, 33]  # more than the indexer's 2048 keys
TOKENS = {"kind": "tokens", "seed": 1, "lengths": RAGGED, "new": 48, "logprobs": 20}
SPARSE_TOKENS = [TOKENS, {**TOKENS, "lengths": LONG}]
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
    "cuda_graph_max_bs_decode": 128,
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


def _speed_tasks(steps: int = 96, contexts: tuple[int, ...] = CONTEXTS) -> list[dict[str, Any]]:
    pairs = [(b, c) for c in contexts for b in BATCHES if b * c <= MOST_TOKENS]
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
    "tokens-sparse": Scenario(BOTH_SPARSE, SPARSE, SPARSE_TOKENS),
    "tokens-fp8": Scenario(BOTH, FP8_DENSE, engine=FP8),
    "tokens-sparse-fp8": Scenario(BOTH_SPARSE, FP8_ROWS, [TOKENS, LATE], FP8_PACKED),
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
    "tokens-compiled": Scenario(("v3-h16",), ("MLAKIT", "FLASHMLA"), [TOKENS, LATE], COMPILED),
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
    "sglang-short": Scenario(
        ("v3-h16",),
        SGLANG_SHORT,
        [TOKENS, *_speed_tasks(64, (8192,))],
        program="sglang_job.py",
    ),
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


def results(out: Path) -> Results:
    found: Results = {}
    for job in jobs():
        path = out / f"{job.stem}.json"
        if path.exists():
            found.setdefault((job.name, job.model), {})[job.backend] = read(path)
    return found


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
    reporter.add_argument(
        "out", type=Path, nargs="+", help="of runs; decode steps are those of all of them"
    )
    reporter.add_argument("--save", type=Path, help="write FILE-SCENARIO.json as mlakit bench does")
    asked = parser.parse_args()
    if asked.command == "run":
        asked.out.mkdir(parents=True, exist_ok=True)
        sys.exit(1 if run(asked.out, asked) else 0)
    found = pooled([results(out) for out in asked.out])
    if asked.save:
        save(found, asked.save, COMMAND)
    sys.exit(1 if report(found) else 0)


if __name__ == "__main__":
    main()
