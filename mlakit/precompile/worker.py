"""A process that compiles kernels into Triton's cache, one after the other.

It reads pickled objects from its standard input: a deployment and a target, then a `Task` for each
kernel; after each it writes a `Done` to its standard output. It is a program of its own and no
child of `multiprocessing`: those import the main module again, and engines start their workers as
daemons, which may have no such children.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from mlakit.precompile.worker import main
main()
"""


class Task(NamedTuple):
    """A kernel to compile: its key in Triton's cache, and which call of the deployment needs it."""

    key: str
    call: int


@dataclass(frozen=True)
class Done:
    """The end of a task; `error` says in one line why there is no kernel."""

    seconds: float
    error: str = ""


class Worker:
    """A started process, which `do` gives tasks."""

    def __init__(self, deployment: object, target: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a compiler's warnings; its errors come as `Done.error`
            start_new_session=True,  # a Ctrl-C reaches the parent only, which stops its workers
        )
        self._send((deployment, target))

    def _send(self, value: object) -> None:
        assert self._process.stdin is not None
        pickle.dump(value, self._process.stdin)
        self._process.stdin.flush()

    def do(self, task: Task) -> Done:
        assert self._process.stdout is not None
        try:
            self._send(task)
            done: Done = pickle.load(self._process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            self._process.wait()
            return Done(0.0, f"a compiling process ended with status {self._process.returncode}")
        return done

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # the process has not read all
                    pipe.close()


def main() -> None:
    """Compile until the input ends."""
    from mlakit.precompile.listing import calls_of, compile_kernel

    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a compiler's messages are no results
    deployment, target = pickle.load(sys.stdin.buffer)
    calls = list(calls_of(deployment))
    while True:
        try:
            task: Task = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        start = perf_counter()
        error = ""
        try:
            compile_kernel(calls[task.call], task.key, target)
        except Exception as failure:  # noqa: BLE001  # any error of a compiler is the result
            error = one_line(failure)
        pickle.dump(Done(perf_counter() - start, error), out)
        out.flush()


def one_line(error: BaseException) -> str:
    """The root cause of an error, without the source that a compiler quotes."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines: list[Any] = [line.strip() for line in str(error).splitlines() if line.strip("^ ")]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"
