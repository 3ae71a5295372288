"""One vLLM engine in this process, the tasks of a job, and what they gave as JSON.

    python scripts/engines/vllm_job.py JOB.json

A job has the checkpoint's folder, the engine's arguments, the tasks and the path of the result.
Prompts are tokens, so that no tokenizer is needed. Each kind of task is a function below.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch

import mlakit

FIRST_TOKEN = 2  # smaller ones begin and end a text
WARM_STEPS = 4
HOST_STEPS = 48  # steps in which parts of the host's work are timed
PROFILED_STEPS = 4


def import_engine() -> None:
    """Import what an engine needs: seconds that need no GPU."""
    from vllm.model_executor.models import deepseek_v2
    from vllm.plugins import load_general_plugins
    from vllm.v1.engine import core
    from vllm.v1.worker import gpu_worker

    assert deepseek_v2, (core, gpu_worker)
    load_general_plugins()  # before an attention_config names a plugin's backend


def prompts(seed: int, lengths: Sequence[int], vocabulary: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(FIRST_TOKEN, vocabulary) for _ in range(length)] for length in lengths]


class Engine:
    """vLLM's engine, whose steps are driven from here."""

    def __init__(self, model: str, arguments: dict[str, Any]) -> None:
        from vllm import EngineArgs, LLMEngine
        from vllm.v1.core.sched.scheduler import Scheduler

        self.preemptions = 0
        preempt = Scheduler._preempt_request

        def counted(*given: Any, **named: Any) -> Any:
            self.preemptions += 1
            return preempt(*given, **named)

        Scheduler._preempt_request = counted
        start = time.perf_counter()
        self.engine = LLMEngine.from_engine_args(EngineArgs(model=model, **arguments))
        self.start_seconds = time.perf_counter() - start
        config = json.loads(Path(model, "config.json").read_text())
        self.vocabulary: int = config["vocab_size"]
        self.added = 0
        self.kernels_at_start = num_kernels()

    def add(self, prompt: Sequence[int], new: int, logprobs: int | None = None) -> str:
        """Add a request, and return its name."""
        from vllm import SamplingParams

        name = str(self.added)
        self.added += 1
        sampling = SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=logprobs
        )
        self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
        return name

    def step(self) -> list[Any]:
        outputs: list[Any] = self.engine.step()
        return outputs

    def finish(self) -> Iterator[Any]:
        """Step until no request is left; yield the outputs that are finished."""
        while self.engine.has_unfinished_requests():
            yield from (output for output in self.step() if output.finished)

    def abort(self, names: Sequence[str]) -> None:
        self.engine.abort_request(list(names))
        for _ in self.finish():
            pass


def tokens(engine: Engine, task: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens of prompts, and the logarithms of the likeliest tokens' probabilities.

    prompts   or: seed and lengths
    every     steps between the arrivals of two requests; 0: all arrive at once
    logprobs  number of likeliest tokens kept for each position
    """
    given = task.get("prompts") or prompts(task["seed"], task["lengths"], engine.vocabulary)
    every, asked = task.get("every", 0), task.get("logprobs")
    pending = list(enumerate(given))
    index_of: dict[str, int] = {}
    made: list[dict[str, Any]] = [{} for _ in given]
    before, step = engine.preemptions, 0
    while pending or engine.engine.has_unfinished_requests():
        while pending and step >= pending[0][0] * every:
            index, prompt = pending.pop(0)
            index_of[engine.add(prompt, task["new"], asked)] = index
        for output in engine.step():
            if output.finished:
                made[index_of[output.request_id]] = finished(output)
        step += 1
    return {
        "tokens": [each["tokens"] for each in made],
        "cached": [each["cached"] for each in made],
        "logprobs": [each["logprobs"] for each in made] if asked else None,
        "preemptions": engine.preemptions - before,
        "steps": step,
    }


def finished(output: Any) -> dict[str, Any]:
    first = output.outputs[0]
    return {
        "tokens": list(first.token_ids),
        "cached": output.num_cached_tokens or 0,
        "logprobs": [
            {str(token): each.logprob for token, each in position.items()}
            for position in first.logprobs or ()
        ],
    }


def speed(engine: Engine, task: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of a decode step, and in some more parts of the host's work and the kernels.

    batch, context  requests, each with a prompt of its own, and tokens of each
    steps           how many are timed
    """
    batch, context = task["batch"], task["context"]
    new = task["steps"] + WARM_STEPS + HOST_STEPS + PROFILED_STEPS + 2 * batch + 8
    names = [
        engine.add(prompt, new)
        for prompt in prompts(task.get("seed", 0), [context] * batch, engine.vocabulary)
    ]
    started: set[str] = set()
    while len(started) < batch:
        started |= {output.request_id for output in engine.step()}
    for _ in range(WARM_STEPS):
        engine.step()
    synchronize()
    times = []
    for _ in range(task["steps"]):
        start = time.perf_counter()
        engine.step()
        times.append(1e3 * (time.perf_counter() - start))
    synchronize()
    host = host_times(engine)
    kernels = profiled(engine)
    engine.abort(names)
    return {
        "step_ms": statistics.median(times),
        "all_ms": times,
        "host_us": host,
        "kernels": kernels,
    }


def host_times(engine: Engine) -> dict[str, list[float]]:
    """Microseconds of each of HOST_STEPS steps that the host spends on parts of it.

    metadata  the attention backend's own metadata
    replay    the launch of CUDA graphs
    """
    from vllm.v1.attention.backend import AttentionMetadataBuilder

    parts = {
        "metadata": (Clock(), [(each, "build") for each in subclasses(AttentionMetadataBuilder)]),
        "replay": (Clock(), [(torch.cuda.CUDAGraph, "replay")]),
    }
    found: dict[str, list[float]] = {part: [] for part in parts}
    with ExitStack() as scope:
        for clock, methods in parts.values():
            for owner, name in methods:
                if name in vars(owner):
                    scope.enter_context(timed(clock, owner, name))
        for _ in range(HOST_STEPS):
            engine.step()
            for part, (clock, _) in parts.items():
                found[part].append(1e6 * clock.take())
    return found


def subclasses(base: type) -> set[type]:
    """Return all loaded classes below a class."""
    return set().union(*({each} | subclasses(each) for each in base.__subclasses__()))


class Clock:
    """Seconds in some methods; in those that one of them calls, they count once."""

    def __init__(self) -> None:
        self.seconds, self.is_running = 0.0, False

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


@contextmanager
def timed(clock: Clock, owner: Any, name: str) -> Iterator[None]:
    """Let a clock run in a method of a class."""
    own = vars(owner)[name]

    def called(*arguments: Any, **named: Any) -> Any:
        if clock.is_running:
            return own(*arguments, **named)
        clock.is_running = True
        start = time.perf_counter()
        try:
            return own(*arguments, **named)
        finally:
            clock.seconds += time.perf_counter() - start
            clock.is_running = False

    setattr(owner, name, called)
    try:
        yield
    finally:
        setattr(owner, name, own)


def profiled(engine: Engine) -> dict[str, Any]:
    """Names of kernels, and every run of one in PROFILED_STEPS steps.

    A run is the number of its name, its start and its microseconds. Runs may overlap.
    """
    if not torch.cuda.is_available():
        return {"steps": 0, "names": [], "runs": []}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED_STEPS):
            engine.step()
        synchronize()
    numbers: dict[str, int] = {}
    runs = [
        (numbers.setdefault(event.name, len(numbers)), event.time_range.start, event.device_time)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return {"steps": PROFILED_STEPS, "names": list(numbers), "runs": runs}


def first_token(engine: Engine, task: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds from the arrival of a prompt to its first token, alone in the engine.

    length, repeats  of the prompt, and how many of that length are timed after one that is not
    """
    times = []
    made = prompts(task.get("seed", 0), [task["length"]] * (task["repeats"] + 1), engine.vocabulary)
    for prompt in made:
        synchronize()
        start = time.perf_counter()
        engine.add(prompt, 1)
        for _ in engine.finish():
            pass
        times.append(1e3 * (time.perf_counter() - start))
    return {"first_token_ms": statistics.median(times[1:]), "all_ms": times}


def soak(engine: Engine, task: dict[str, Any]) -> dict[str, Any]:
    """Random requests for a while, some cancelled; then as many again, each alone.

    seconds, alone_seconds  of the two parts
    longest                 tokens of a prompt; lengths are log-uniform from 1
    """
    rng = random.Random(task.get("seed", 0))
    asked: dict[str, tuple[list[int], int]] = {}
    arrivals: dict[str, float] = {}
    cancel_at: dict[str, float] = {}
    first: dict[str, float] = {}
    done: dict[str, float] = {}
    made: dict[str, list[int]] = {}
    cancelled = 0
    memory = allocated()
    start = time.perf_counter()
    arrives = 0.0
    while (now := time.perf_counter() - start) < task["seconds"] or (
        engine.engine.has_unfinished_requests()
    ):
        while arrives <= now < task["seconds"]:
            length = int(task["longest"] ** rng.random())
            prompt = [rng.randrange(FIRST_TOKEN, engine.vocabulary) for _ in range(length)]
            new = rng.randint(1, task["new"])
            name = engine.add(prompt, new)
            asked[name], arrivals[name] = (prompt, new), now
            if rng.random() < task["cancelled"]:
                cancel_at[name] = now + rng.random()
            arrives = now + rng.expovariate(task["per_second"])
        late = [name for name, at in cancel_at.items() if at <= now and name not in done]
        if late:
            engine.engine.abort_request(late)
            cancelled += len(late)
            for name in late:
                del cancel_at[name]
        for output in engine.step():
            first.setdefault(output.request_id, time.perf_counter() - start)
            if output.finished and output.outputs[0].finish_reason != "abort":
                made[output.request_id] = list(output.outputs[0].token_ids)
                done[output.request_id] = time.perf_counter() - start
    after = allocated()
    return {
        "requests": len(asked),
        "finished": len(done),
        "cancelled": cancelled,
        "preemptions": engine.preemptions,
        "latency_s": percentiles([done[name] - arrivals[name] for name in done]),
        "first_token_s": percentiles([first[name] - arrivals[name] for name in done]),
        "memory_before": memory,
        "memory_after": after,
        **alone(engine, [(*asked[name], made[name]) for name in done], task["alone_seconds"], rng),
    }


def alone(
    engine: Engine,
    requests: list[tuple[list[int], int, list[int]]],
    seconds: float,
    rng: random.Random,
) -> dict[str, Any]:
    """Serve requests again one at a time, in any order; count those with other tokens."""
    rng.shuffle(requests)
    start, compared, different = time.perf_counter(), 0, []
    for prompt, new, expected in requests:
        if time.perf_counter() - start > seconds:
            break
        engine.add(prompt, new)
        (output,) = engine.finish()
        own = list(output.outputs[0].token_ids)
        compared += 1
        if own != expected:
            position = next(i for i, each in enumerate(own) if each != expected[i])
            different.append({"prompt": len(prompt), "new": new, "position": position})
    return {"compared_alone": compared, "different_alone": different}


def percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{at}": ordered[(len(ordered) - 1) * at // 100] for at in (50, 99)} if values else {}


def num_kernels() -> int:
    """How often mlakit compiled a kernel in this process, or loaded one."""
    stats = mlakit.stats()
    return sum((stats.compiled + stats.loaded).values())


def environment() -> dict[str, object]:
    from mlakit.tools.bench.environment import describe, version_of

    return describe() | {"vllm": version_of("vllm"), "date": date.today().isoformat()}


def allocated() -> int:
    """Bytes of GPU memory in use by tensors."""
    synchronize()
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


TASKS: dict[str, Callable[[Engine, dict[str, Any]], dict[str, Any]]] = {
    "tokens": tokens,
    "speed": speed,
    "first_token": first_token,
    "soak": soak,
}


@contextmanager
def turn(lock: str | None) -> Iterator[None]:
    """Wait until no other process has the lock, and keep it."""
    if lock is None:
        yield
        return
    with Path(lock).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(path: Path) -> None:
    """Run the job in `path`; the result is written again after every task.

    Tasks that the result has already are not run again.
    """
    job = json.loads(path.read_text())
    target = Path(job["result"])
    result: dict[str, Any] = {"name": job.get("name"), "tasks": []}
    if target.exists():
        result = json.loads(target.read_text())
    import_engine()
    with turn(job.get("turn")):
        engine = Engine(job["model"], job["engine"])
        result["start_seconds"] = engine.start_seconds
        result["environment"] = environment()
        for task in job["tasks"][len(result["tasks"]) :]:
            start = time.perf_counter()
            gave = TASKS[task["kind"]](engine, task)
            seconds = time.perf_counter() - start
            result["tasks"].append({"task": task, "seconds": seconds} | gave)
            result["kernels_while_serving"] = num_kernels() - engine.kernels_at_start
            target.write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
