"""Asynchronous engines: operations that are issued now and complete later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from mlakit.tools.emulator.faults import Fault, UseBeforeWait


@dataclass(frozen=True)
class Operation:
    """An asynchronous operation in flight, issued at `where`."""

    where: str
    complete: Callable[[], None]

    def run(self) -> None:
        """Complete; a fault names where the operation was issued."""
        try:
            self.complete()
        except Fault as fault:
            fault.args = (f"{fault.args[0]}\n  issued at {self.where}",)
            raise


class Queue:
    """Operations of an engine that complete in the order of their issue.

    issued  their number; operation n is complete when `done` is n
    last    the number of the last one that is not an arrival at a barrier
    """

    def __init__(self, agent: int, name: str) -> None:
        self.agent, self.name = agent, name
        self.operations: deque[Operation] = deque()
        self.issued = 0
        self.done = 0
        self.last = 0

    def issue(self, operation: Callable[[], None], where: str, *, is_arrival: bool = False) -> int:
        """Queue an operation that is issued at `where`; return its number."""
        self.operations.append(Operation(where, operation))
        self.issued += 1
        if not is_arrival:
            self.last = self.issued
        return self.issued

    def step(self) -> Operation:
        """Complete the first operation."""
        operation = self.operations.popleft()
        operation.run()
        self.done += 1
        return operation


class AsyncTensor:
    """The result of a wgmma in flight.

    PTX, "wgmma.mma_async": accessing the registers of the accumulator, or of an operand, before
    wgmma.wait_group is undefined. Every use of this object but a wait is a fault.
    """

    def __init__(self, where: str) -> None:
        self.value: Any = None
        self.where = where

    def used(self, *_: Any, **__: Any) -> NoReturn:
        """Report a use before the wait."""
        raise UseBeforeWait(f"the wgmma of {self.where} is used before it is waited for")

    __array__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = used
    __truediv__ = __rtruediv__ = __gt__ = __lt__ = __ge__ = __le__ = __neg__ = __getitem__ = used
