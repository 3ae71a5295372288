"""One SGLang engine, the tasks of a job, and what they gave as JSON.

    python scripts/engines/sglang_job.py JOB.json

The tasks are those of vllm_job.py: "tokens", with all requests at once, and "speed", which is the
difference between a long and a short answer, since the engine's steps run in another process.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from vllm_job import prompts

REPEATS = 3


def generate(engine: Any, given: list[list[int]], new: int, logprobs: int = 0) -> list[Any]:
    """Return SGLang's answers to prompts of tokens."""
    sampling = {"temperature": 0.0, "max_new_tokens": new, "ignore_eos": True}
    named = {"return_logprob": True, "top_logprobs_num": logprobs} if logprobs else {}
    answers: list[Any] = engine.generate(input_ids=given, sampling_params=sampling, **named)
    return answers


def tokens(engine: Any, task: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    given = prompts(task["seed"], task["lengths"], vocabulary)
    answers = generate(engine, given, task["new"], task.get("logprobs", 0))
    likeliest = [
        [
            {str(token): logprob for logprob, token, *_ in position}
            for position in answer["meta_info"].get("output_top_logprobs", ())
        ]
        for answer in answers
    ]
    return {"tokens": [answer["output_ids"] for answer in answers], "logprobs": likeliest}


def speed(engine: Any, task: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """Milliseconds of a decode step; prompts are cached after their first answer."""
    batch, steps = task["batch"], task["steps"]
    given = prompts(task.get("seed", 0), [task["context"]] * batch, vocabulary)
    generate(engine, given, 1)
    seconds: dict[int, list[float]] = {1: [], 1 + steps: []}
    for _ in range(REPEATS):
        for new, times in seconds.items():
            start = time.perf_counter()
            generate(engine, given, new)
            times.append(time.perf_counter() - start)
    short, long = (statistics.median(times) for times in seconds.values())
    return {"step_ms": 1e3 * (long - short) / steps}


TASKS = {"tokens": tokens, "speed": speed}


def main(path: Path) -> None:
    """Run the job in `path`; the result is written again after every task."""
    import sglang

    job = json.loads(path.read_text())
    vocabulary = json.loads(Path(job["model"], "config.json").read_text())["vocab_size"]
    result: dict[str, Any] = {"name": job.get("name"), "tasks": []}
    start = time.perf_counter()
    engine = sglang.Engine(model_path=job["model"], **job["engine"])
    result["start_seconds"] = time.perf_counter() - start
    try:
        for task in job["tasks"]:
            gave = TASKS[task["kind"]](engine, task, vocabulary)
            result["tasks"].append({"task": task} | gave)
            Path(job["result"]).write_text(json.dumps(result))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
