"""Serve on a GPU after a warm-up, and print how many kernels were compiled meanwhile.

Run by `test_warmup` in a process of its own, whose cache of kernels is empty.
"""

from __future__ import annotations

import json
import sys

import torch

import mlakit
from mlakit import launch_cache
from mlakit.precompile.deployment import deployment
from tests.precompile.serving import SglangEngine, VllmEngine

LONGEST = 5000
ENGINES = {"vllm": VllmEngine, "sglang": SglangEngine}


def main(model: str, heads: str, format: str, user: str) -> None:
    made = {"heads": int(heads), "format": format, "user": user, "max_context": LONGEST}
    done = mlakit.warmup(model, **made)
    launch_cache.reset_stats()
    d = deployment(model, page_size=64, page_rows=None, dtype="bf16", max_tokens=8192, **made)
    with torch.device("cuda"):
        for seed in range(4):
            for step in ENGINES[user](d, seed).steps():
                step()
    torch.cuda.synchronize()
    stats = mlakit.stats()
    result = {"kernels": done.kernels, "compiled": stats.compiled, "loaded": stats.loaded}
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
