"""Races in global memory between the threads of one CTA.

The compiler puts a barrier between two accesses of the same shared memory by the warps of a
partition. It does not do so for global memory: a kernel that passes values from warp to warp
through global memory needs a barrier of its own, by `bar.sync` in inline assembly, `gl.barrier`, or
an mbarrier. Here a write remembers the partition, its time and the warp of every element.

Two guarantees are modelled. Between partitions, PTX's causality order: the reader's clock must have
the write. Inside a partition, "bar, barrier": it orders prior accesses of all participating threads
before their later ones; a warp may read what another one wrote only after it has met that warp
(`Partition.meet`).
Accesses of other CTAs, and writes after reads, are not followed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mlakit.tools.emulator.clocks import Agents, Clock
from mlakit.tools.emulator.dtypes import Array
from mlakit.tools.emulator.faults import MissingFence, Race
from mlakit.tools.emulator.memory import GlobalMemory, Span

NO_WARP = -1
ANY_WARP = -2  # written by an engine, or by an operation whose threads are not known


@dataclass
class _Writes:
    """The last write of each element of a span, elements having `size` bytes."""

    size: int
    writer: Array
    written: Array
    warp: Array
    places: dict[int, str]


@dataclass(frozen=True)
class GlobalAccess:
    """Elements of global memory that a partition or an engine accesses.

    addresses  [n], of elements of `size` bytes
    warps      [n] the warp that accesses each element, or None where it is not known
    met        what each warp of the partition knows of the others (`Partition.met`)
    """

    addresses: Array
    size: int
    warps: Array | None
    agent: int
    time: int
    clock: Clock
    met: Array
    where: str
    is_async: bool = False


class GlobalRaces:
    """Checks reads of global memory against the writes of the same CTA."""

    def __init__(self, memory: GlobalMemory, agents: Agents) -> None:
        self.memory, self.agents = memory, agents
        self._writes: dict[int, _Writes] = {}  # by the start of the span

    @property
    def has_writes(self) -> bool:
        """Has this CTA written to global memory?"""
        return bool(self._writes)

    def write(self, access: GlobalAccess) -> None:
        """Check and record a write: it must come after the last write of each element."""
        if access.addresses.size == 0:
            return
        span = self.memory.locate(access.addresses, access.size)
        self._check(access, span, "write")
        writes = self._writes.get(span.start)
        if writes is None:
            count = -(-(span.end - span.start) // access.size) + 1
            writes = self._writes[span.start] = _Writes(
                access.size,
                np.zeros(count, np.int32),
                np.zeros(count, np.int64),
                np.full(count, NO_WARP, np.int16),
                {},
            )
        index = (access.addresses - span.start) // writes.size
        writes.writer[index], writes.written[index] = access.agent, access.time
        writes.warp[index] = ANY_WARP if access.warps is None else access.warps
        writes.places[access.agent] = access.where

    def read(self, access: GlobalAccess) -> None:
        """Check a read: it must come after the last write of each element."""
        if access.addresses.size and self._writes:
            span = self.memory.locate(access.addresses, access.size)
            self._check(access, span, "read")

    def _check(self, access: GlobalAccess, span: Span, action: str) -> None:
        writes = self._writes.get(span.start)
        if writes is None:
            return
        index = (access.addresses - span.start) // writes.size
        writer, written = writes.writer[index], writes.written[index]
        late = access.clock.seen[writer] < written
        if late.any():
            self._report(action, writes, int(writer[late][0]), "which has not happened before")
        if access.warps is not None and not access.is_async:
            warp = writes.warp[index]
            other = (writer == access.agent) & (warp >= 0) & (warp != access.warps)
            other &= written > access.met[access.warps, np.maximum(warp, 0)]
            if other.any():
                who = int(writer[other][0])
                text = f"another warp ({warp[other][0]}), without a barrier since"
                self._report(action, writes, who, text)
        if access.is_async:
            self._check_proxy(writes, writer)

    def _check_proxy(self, writes: _Writes, writer: Array) -> None:
        """Report a TMA access of what this CTA wrote through the generic proxy.

        PTX, "fence.proxy.async": only the form without a state space, or with .global, orders
        generic accesses of global memory before asynchronous ones. Gluon's `fence_async_shared` is
        fence.proxy.async.shared::cta, so no fence that a kernel can make covers this.
        """
        generic = self.agents.is_generic[writer]
        if generic.any():
            who = int(writer[generic][0])
            raise MissingFence(
                f"global memory: written by {self.agents.names[who]} at"
                f" {writes.places.get(who, '?')} through the generic proxy and accessed by TMA"
            )

    def _report(self, action: str, writes: _Writes, who: int, why: str) -> None:
        raise Race(
            f"{action} of global memory, last written by {self.agents.names[who]} at"
            f" {writes.places.get(who, '?')}, {why}"
        )
