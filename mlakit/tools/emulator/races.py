"""The race detector: who accessed each word last, and whether a new access comes after it.

Shadow memory has, for each word, the last writer with its time and the last read of each agent.
Two accesses of a word conflict if one of them writes. PTX leaves the outcome of conflicting weak
accesses undefined unless one happens before the other (memory consistency model, "Data-Races").
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from mlakit.tools.emulator.clocks import Agents, Clock
from mlakit.tools.emulator.dtypes import Array
from mlakit.tools.emulator.faults import MissingFence, Race


@dataclass(frozen=True)
class Access:
    """One access of memory, checked when it is issued.

    clock     what has happened before, as the issuing partition knows it
    where     the operation that issues it
    agent     the agent that performs it, at its `time`
    is_async  it goes through the asynchronous proxy
    in_order  the agent performs it after its earlier ones without a wait (tcgen05)
    uses_all  it uses each value that it reads, which must hence have been written
    cta       the rank in its cluster of the CTA that issues it
    """

    clock: Clock
    where: str
    agent: int
    time: int
    is_async: bool = False
    in_order: bool = False
    uses_all: bool = False
    cta: int = 0


class Shadow:
    """The last accesses of each word of some memory, which reports call `name`."""

    def __init__(self, words: int, name: str) -> None:
        self.name = name
        self.writer: Array = np.zeros(words, np.int32)
        self.written: Array = np.zeros(words, np.int64)  # the writer's time
        self.is_initialised: Array = np.zeros(words, np.bool_)
        # by agent, the times of its last reads since the last write; 0: none
        self.reads: dict[int, Array] = {}
        self.places: dict[int, str] = {}  # by agent, the operation of its last access


class RaceDetector:
    """Checks accesses to shadow memory and records them.

    warnings  how often each suspicion that is no fault was met
    """

    def __init__(self, agents: Agents) -> None:
        self.agents = agents
        self.warnings: Counter[str] = Counter()

    def read(self, shadow: Shadow, words: Array, access: Access) -> None:
        """Check and record a read: it must come after the last write of each word."""
        self._check_initialised(shadow, words, access)
        self._check_written(shadow, words, access, "read")
        times = shadow.reads.get(access.agent)
        if times is None:
            times = shadow.reads[access.agent] = np.zeros(shadow.writer.size, np.int64)
        times[words] = access.time
        shadow.places[access.agent] = access.where

    def write(self, shadow: Shadow, words: Array, access: Access) -> None:
        """Check and record a write: it must come after the last write and all reads since then.

        A read comes after the last write, which has been checked, so a write that comes after a
        read comes after both: causality order is transitive. A stage that TMA has filled and
        tcgen05 has read may be filled again once the commit says that it was read, though the
        commit's arrival publishes no load of TMA.
        """
        self._check_written(shadow, words, access, "write")
        for reader, times in shadow.reads.items():
            if access.in_order and reader == access.agent:
                continue
            if (times[words] > access.clock.seen[reader]).any():
                self._report("write", "read", shadow, reader)
            is_generic = self.agents.is_generic[reader]
            if (
                access.is_async
                and is_generic
                and (times[words] > access.clock.fenced[reader]).any()
            ):
                self._report_proxy(shadow, reader, "read")
        for times in shadow.reads.values():
            times[words] = 0
        shadow.writer[words], shadow.written[words] = access.agent, access.time
        shadow.is_initialised[words] = True
        shadow.places[access.agent] = access.where

    def _check_initialised(self, shadow: Shadow, words: Array, access: Access) -> None:
        """Report a read of words that nobody wrote.

        PTX: the content of a shared variable is undefined until it is written. A copy or a product
        always uses what it reads, so that is a fault. A generic read only warns: vector loads read
        bytes beyond the used ones and a mask discards them, which shows in the values alone.
        Unwritten memory holds random bytes, so a used one gives wrong results.
        """
        if shadow.is_initialised[words].all():
            return
        text = f"read of {shadow.name}, which nobody has written, at {access.where}"
        if access.is_async or access.uses_all:
            raise Race(text)
        self.warnings[text] += 1

    def _check_written(self, shadow: Shadow, words: Array, access: Access, action: str) -> None:
        writer, written = shadow.writer[words], shadow.written[words]
        late = access.clock.seen[writer] < written
        if access.in_order:
            late &= writer != access.agent
        if action == "write":
            for reader, times in shadow.reads.items():
                late &= (times[words] == 0) | (times[words] > access.clock.seen[reader])
        if late.any():
            self._report(action, "written", shadow, int(writer[late][0]))
        if access.is_async:
            unfenced = self.agents.is_generic[writer] & (access.clock.fenced[writer] < written)
            if unfenced.any():
                self._report_proxy(shadow, int(writer[unfenced][0]), "written")

    def _report_proxy(self, shadow: Shadow, who: int, done: str) -> None:
        """Report accesses through both proxies without a fence between them.

        PTX: "Accessing the same memory location across multiple proxies needs a cross-proxy fence.
        For the async proxy, fence.proxy.async should be used" (cp.async.bulk); wgmma, TMA and
        tcgen05 access shared memory through it. Causality order joins two proxies by "a proxy fence
        along the base causality path" (memory consistency model, "Causality Order"), so the fence
        may be on either side of the synchronisation between them: by the one before its arrival, or
        by the other after its wait. It covers what happened before it.

        An asynchronous read needs it after a generic write, an asynchronous write also after a
        generic read: unordered, the read may return what is written after it. Two reads need none.
        From the asynchronous proxy to the generic one none is needed: the completion of a bulk copy
        on an mbarrier, and wgmma.wait_group, are followed by an implicit generic-async proxy fence.
        """
        raise MissingFence(
            f"{shadow.name}: {done} by {self.agents.names[who]} at {shadow.places.get(who, '?')}"
            " through the generic proxy and accessed through the asynchronous one without a fence"
            " between them"
        )

    def _report(self, action: str, done: str, shadow: Shadow, who: int) -> None:
        raise Race(
            f"{action} of {shadow.name}, last {done} by {self.agents.names[who]} at"
            f" {shadow.places.get(who, '?')}, which has not happened before"
        )
