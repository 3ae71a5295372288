"""Processes in which kernels are compiled. In that of the tests, Triton's interpreter runs them.

Triton decides when a kernel is defined, so one process cannot do both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context


@contextmanager
def compiling_process() -> Iterator[ProcessPoolExecutor]:
    """Start one process, which keeps the IR of kernels from task to task."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_begin) as pool:
        yield pool


def _begin() -> None:
    os.environ["TRITON_INTERPRET"] = "0"
    # Tiles are small: threads of numpy's library would wait for each other, a third of the time of
    # a quiet machine and most of that of a busy one. Read when numpy is imported
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    # not before: mlakit reads the variable when it defines a kernel
    import torch

    from mlakit.tools.emulator.lowering import exit_without_leak_reports

    torch.set_num_threads(1)
    exit_without_leak_reports()
