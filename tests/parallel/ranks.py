"""Processes that are the ranks of gloo groups, kept for many tests: starting one takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

START_TIMEOUT = 240  # seconds: each process imports torch
TIMEOUT = 60  # of a collective, and of a call
AFTER_FAILURE = 3  # one rank's failure may leave the others in a collective
WORLDS = (2, 4)


class Ranks:
    """Four processes, and the groups of the first two of them and of all.

    A process is forked from a server that has imported torch and run nothing.
    """

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.parallel.steps", "tests.parallel.heads"])
        self.is_usable = True
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(max(WORLDS)):
            mine, other = context.Pipe()
            process = context.Process(target=_serve, args=(rank, folder, other), daemon=True)
            process.start()
            other.close()
            self._pipes.append(mine)
            self._processes.append(process)
        self._wait(self._pipes, START_TIMEOUT)

    def run(self, world: int, function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Call function(group, *args, **kwargs) on the first `world` ranks; raises what they do.

        The function is importable; it makes its checks itself.
        """
        pipes = self._pipes[:world]
        for pipe in pipes:
            pipe.send((world, function, args, kwargs))
        self._wait(pipes, TIMEOUT)

    def _wait(self, pipes: list[Connection], seconds: float) -> None:
        """Every rank sends None, or its traceback."""
        failures: dict[int, str] = {}
        pending = list(pipes)
        while pending:
            ready = connection.wait(pending, seconds)
            for pipe in ready or list(pending):
                assert isinstance(pipe, Connection)
                failure = pipe.recv() if ready else "no answer"
                pending.remove(pipe)
                if failure is not None:
                    failures[pipes.index(pipe)] = failure
                    seconds = AFTER_FAILURE
            if not ready:
                self.close()  # a rank is in a collective that others have not come to
        if failures:
            lines = [f"rank {rank} of {len(pipes)}:\n{said}" for rank, said in failures.items()]
            raise AssertionError("\n".join(lines))

    def close(self) -> None:
        self.is_usable = False
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _serve(rank: int, folder: Path, pipe: Connection) -> None:
    """Run what comes through the pipe until its other end is closed."""
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    size = str(max(WORLDS))  # as torchrun sets them; transformers reads them
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size}
    # as in conftest: an uninitialised tensor holds NaN
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    store = dist.FileStore(str(folder / "store"), max(WORLDS))
    timeout = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=max(WORLDS), timeout=timeout)
    groups = {world: dist.new_group(list(range(world)), timeout=timeout) for world in WORLDS}
    pipe.send(None)
    while True:
        try:
            world, function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            function(groups[world], *args, **kwargs)
            pipe.send(None)
        except BaseException:  # noqa: BLE001  # the test shows it
            pipe.send(traceback.format_exc())
