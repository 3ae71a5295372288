"""An SGLang engine in a process of its own: prompts in, tokens out.

    python -m tests.integrations.sglang.engine JOB.json

The job has the model, the engine's arguments and rounds of prompts, one after the other; the result
is written beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.integrations.sglang import cpu_shim
from tests.paths import ROOT

NEW_TOKENS = 16
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_PLUGINS": "mlakit,mlakit_cpu_shim",
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",  # a core of each rank
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
COMMON = {
    "attention_backend": "mlakit",
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.3,
    "max_total_tokens": 2048,
    "max_running_requests": 4,
    "log_level": "warning",
}


def serve(
    folder: Path,
    model: Path,
    rounds: list[list[list[int]]],
    *,
    expand_from: int = 8192,
    **arguments: Any,
) -> dict[str, Any]:
    """{"tokens": by round and prompt, "cached": likewise, "calls": kinds of attention}.

    expand_from  cached tokens of a batch that are expanded; fewer are attended to in the cache
    """
    calls = folder / "calls"
    calls.mkdir(parents=True)
    job = folder / "job.json"
    given = {**COMMON, "model_path": str(model), **arguments}
    job.write_text(json.dumps({"arguments": given, "rounds": rounds}))
    paths = [str(ROOT), str(cpu_shim.packages(folder / "packages")), os.environ.get("PYTHONPATH")]
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD": str(expand_from),
        cpu_shim.CALLS: str(calls),
    }
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(job)],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    result = job.with_suffix(".out")
    assert result.exists(), done.stdout[-4000:] + done.stderr[-8000:]
    kinds = {path.name.partition(".")[0] for path in calls.iterdir()}
    return {**json.loads(result.read_text()), "calls": kinds}


def main(job: Path) -> None:
    """Start the engine, and serve the rounds."""
    import sglang

    given = json.loads(job.read_text())
    engine = sglang.Engine(**given["arguments"])
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    served: dict[str, list[Any]] = {"tokens": [], "cached": []}
    for prompts in given["rounds"]:
        results = engine.generate(input_ids=prompts, sampling_params=sampling)
        served["tokens"].append([each["output_ids"] for each in results])
        served["cached"].append([each["meta_info"]["cached_tokens"] for each in results])
    job.with_suffix(".out").write_text(json.dumps(served))
    engine.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
