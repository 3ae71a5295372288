"""Runs one configuration on the GPU, and prints `RIGHT` if its results are: for `test_consan`.

Triton instruments the kernels if TRITON_INSTRUMENTATION_MODE is "consan" in the environment. ConSan
then reports what it finds by a device-side assertion, which ends the process.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from mlakit.dispatch import knobs
from mlakit.tools.emulator import harness

RIGHT = "results are right"


def main(name: str) -> None:
    """Run the configuration of this name with seed 0."""
    trial = replace(harness.configuration(name).case, seed=0).trial("cuda")
    with knobs.override(launch_cache=False):
        results = trial.call("hopper")
    torch.cuda.synchronize()
    trial.check(results)
    sys.stdout.write(f"{RIGHT}\n")


if __name__ == "__main__":
    main(sys.argv[1])
