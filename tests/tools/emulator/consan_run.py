"""Runs one configuration on the GPU, and prints `RIGHT` if its results are: for `test_consan`.

    python -m tests.tools.emulator.consan_run hopper-decode-h128-bf16
    python -m tests.tools.emulator.consan_run --mistake "m64_bf16: P1 is not waited for"

Triton instruments the kernels if TRITON_INSTRUMENTATION_MODE is "consan" in the environment. ConSan
then reports what it finds by a device-side assertion, which ends the process.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from dataclasses import replace

import torch

from mlakit.tools.emulator import harness
from tests.tools.emulator import gpu_runs
from tests.tools.emulator.mistakes import TELLING

RIGHT = "results are right"


def main() -> None:
    """Run the configuration or the mistake of this name with seed 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mistake", action="store_true")
    parser.add_argument("name")
    given = parser.parse_args()
    if given.mistake:
        telling = TELLING[given.name]
        case, selects_for, made = telling.case, gpu_runs.NUM_SMS, telling.mistake.made()
    else:
        chosen = harness.configuration(given.name)
        case, selects_for, made = chosen.case, chosen.selects_for, nullcontext()
    trial = replace(case, seed=0).trial("cuda")
    with gpu_runs.few_sms(), made:
        results = gpu_runs.call(trial, selects_for)
    torch.cuda.synchronize()
    trial.check(results)
    sys.stdout.write(f"{RIGHT}\n")


if __name__ == "__main__":
    main()
