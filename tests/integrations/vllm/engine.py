"""A vLLM engine in a process of its own: requests in, tokens out.

    python -m tests.integrations.vllm.engine JOB.json

The job has the model, the engine's arguments and the prompts; the result is written beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.integrations.vllm import cpu_shim
from tests.paths import ROOT

NEW_TOKENS = 16
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "900",  # the ranks of a busy machine share few cores
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "mlakit,mlakit_cpu_shim",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
COMMON = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 160,
    "max_num_seqs": 8,
    "block_size": 16,  # what vLLM takes by default depends on the CPU
    "disable_custom_all_reduce": True,
    "attention_backend": "MLAKIT",
}


def plugin_folder(folder: Path) -> Path:
    """A distribution with the entry point of the shim, for PYTHONPATH."""
    info = folder / "mlakit_cpu_shim-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mlakit-cpu-shim\nVersion: 0\n")
    point = f"mlakit_cpu_shim = {cpu_shim.__name__}:install\n"
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{point}")
    return folder


def serve(
    folder: Path,
    model: Path,
    prompts: list[list[int]],
    *,
    every: int = 0,
    oracle: bool = False,
    **engine: Any,
) -> dict[str, Any]:
    """{tokens, cached, preemptions, calls} of an engine with these arguments.

    every  steps between the arrivals of requests; 0: all at once
    """
    folder.mkdir(parents=True, exist_ok=True)
    calls = folder / "calls"
    calls.mkdir()
    job = {"model": str(model), "engine": COMMON | engine, "prompts": prompts, "every": every}
    (folder / "job.json").write_text(json.dumps(job))
    own = {
        cpu_shim.CALLS: str(calls),
        cpu_shim.ORACLE: "1" if oracle else "",
        "PYTHONPATH": f"{plugin_folder(folder)}{os.pathsep}{ROOT}",
        # one process where there is one rank: faster, and errors show where they are
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(engine.get("tensor_parallel_size", 1) > 1)),
    }
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(folder / "job.json")],
        env=os.environ | ENVIRONMENT | own,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    kinds = [path.name.partition(".")[0] for path in calls.iterdir()]
    return result | {"calls": {kind: kinds.count(kind) for kind in set(kinds)}}


def main(path: Path) -> None:
    """Run the job in `path`."""
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    job = json.loads(path.read_text())
    preemptions = []
    preempt = Scheduler._preempt_request
    Scheduler._preempt_request = lambda *a, **k: (preemptions.append(1), preempt(*a, **k))[1]
    engine = LLMEngine.from_engine_args(EngineArgs(model=job["model"], **job["engine"]))
    sampling = SamplingParams(
        temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False
    )
    pending = list(enumerate(job["prompts"]))
    tokens: dict[int, list[int]] = {}
    cached: dict[int, int] = {}
    step = 0
    while pending or engine.has_unfinished_requests():
        while pending and step >= (pending[0][0] * job["every"]):
            index, prompt = pending.pop(0)
            engine.add_request(str(index), {"prompt_token_ids": prompt}, sampling)
        for output in engine.step():
            if output.finished:
                index = int(output.request_id)
                tokens[index] = list(output.outputs[0].token_ids)
                cached[index] = output.num_cached_tokens or 0
        step += 1
    order = range(len(job["prompts"]))
    result = {
        "tokens": [tokens[i] for i in order],
        "cached": [cached[i] for i in order],
        "preemptions": len(preemptions),
    }
    (path.parent / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
