"""Writes docs/data/flashinfer-bench.json: each solution beside the reference of its definition.

    FLASHINFER_TRACE=DATASET python -m tests.compat.flashinfer.record_definitions COMMIT

DATASET has the folder `definitions`, as it is in COMMIT of flashinfer-ai/flashinfer-bench. It runs
on a CPU; nothing is timed.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime, timezone

import torch

import mlakit
from tests.compat.flashinfer import test_definitions
from tests.paths import ROOT


def main() -> None:
    found = [
        {
            "definition": name,
            "function": function,
            "share_of_rule": round(test_definitions.largest_share_of_the_rule(name), 3),
        }
        for name, (_, function) in test_definitions.SCRIPT["SOLUTIONS"].items()
    ]
    record = {
        "definitions": f"flashinfer-ai/flashinfer-bench {sys.argv[1]}",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": "cpu",
        "mlakit": mlakit.__version__,
        "torch": torch.__version__,
        "solutions": found,
    }
    path = ROOT / "docs" / "data" / "flashinfer-bench.json"
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
