"""Writes mlakit's solutions of FlashInfer-Bench's MLA and DSA definitions, in its format.

    python scripts/flashinfer_bench.py DATASET

DATASET is a folder in the format of flashinfer-trace. Then FlashInfer-Bench judges and times them:

    flashinfer-bench run --local DATASET --definitions mla_paged_decode_h16_ckv512_kpe64_ps64
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

import mlakit

# definition: (folder of the dataset, function of mlakit.compat.flashinfer.definitions)
SOLUTIONS = {
    **{
        f"{op}_h{heads}_ckv512_kpe64_ps1": ("mla_paged", f"{op}_ps1")
        for op in ("mla_paged_decode", "mla_paged_prefill_causal")
        for heads in (8, 16)
    },
    **{
        f"{op}_h16_ckv512_kpe64_ps64": ("mla_paged", op)
        for op in ("mla_paged_decode", "mla_paged_prefill_causal")
    },
    **{
        f"mla_ragged_prefill_causal_h{heads}_qk192_vo128": (
            "mla_ragged",
            "mla_ragged_prefill_causal",
        )
        for heads in (8, 16)
    },
    **{
        f"dsa_sparse_attention_h16_ckv512_kpe64_topk2048_ps{size}": (
            "dsa_paged",
            "dsa_sparse_attention",
        )
        for size in (1, 64)
    },
    "dsa_topk_indexer_fp8_h64_d128_topk2048_ps64": ("dsa_paged", "dsa_topk_indexer"),
}


def solution(definition: str, function: str) -> dict[str, Any]:
    """One solution: it imports a function of the installed mlakit."""
    source = f"from mlakit.compat.flashinfer.definitions import {function} as run\n"
    return {
        "name": f"mlakit_{definition}",
        "definition": definition,
        "author": "mlakit",
        "description": f"mlakit {mlakit.__version__}, the fastest of its kernels that applies",
        "spec": {
            "language": "triton",
            "target_hardware": ["cuda"],
            "entry_point": "main.py::run",
            "destination_passing_style": True,
            "dependencies": ["mlakit", "torch", "triton"],
        },
        "sources": [{"path": "main.py", "content": source + '\n__all__ = ["run"]\n'}],
    }


def write(dataset: Path) -> list[Path]:
    """Write all solutions into the folder `solutions` of a dataset."""
    paths = []
    for definition, (folder, function) in SOLUTIONS.items():
        path = dataset / "solutions" / "mlakit" / folder / definition / f"mlakit_{definition}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(solution(definition, function), indent=2)
        path.write_text(text + "\n", encoding="utf-8")
        paths.append(path)
    return paths


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for written in write(Path(sys.argv[1])):
        Console().print(str(written))
