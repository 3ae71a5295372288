"""Vector clocks: which operations of which agents have happened before.

An agent is a warp partition, or a queue of an asynchronous engine, or the TMA loads that complete
on one mbarrier. Each agent counts its own operations; a clock has one count per agent. The order
that clocks hold is PTX's causality order (memory consistency model, "Causality Order"): an arrival
with release semantics stores the clock of its issuer, and a wait with acquire semantics joins it.
"""

from __future__ import annotations

import numpy as np

from mlakit.tools.emulator.dtypes import Array

MAX_AGENTS = 512


class Clock:
    """What has happened before (`seen`), and of that, what the asynchronous proxy sees (`fenced`).

    `fenced` follows PTX's proxies (memory consistency model, "Proxies"): operations of different
    proxies are ordered only by a proxy fence on the path between them.
    """

    __slots__ = ("fenced", "seen")

    def __init__(self) -> None:
        self.seen: Array = np.zeros(MAX_AGENTS, np.int64)
        self.fenced: Array = np.zeros(MAX_AGENTS, np.int64)

    def join(self, other: Clock) -> None:
        """Add what has happened before `other`."""
        np.maximum(self.seen, other.seen, out=self.seen)
        np.maximum(self.fenced, other.fenced, out=self.fenced)

    def observe(self, agent: int, time: int) -> None:
        """Add the operations of one agent up to `time`."""
        self.seen[agent] = max(self.seen[agent], time)

    def fence(self, agents: Array) -> None:
        """Make what has happened before visible to the asynchronous proxy.

        agents  those whose accesses the fence covers
        """
        np.maximum(self.fenced, self.seen, out=self.fenced, where=agents)

    def copy(self) -> Clock:
        """Return a clock of its own with the same counts."""
        clock = Clock()
        clock.seen[:], clock.fenced[:] = self.seen, self.fenced
        return clock


class Agents:
    """The agents of a cluster by number. Number 0 is nobody: it has written what is unwritten."""

    def __init__(self) -> None:
        self.names = ["nobody"]
        # by agent: are its writes made through the generic proxy?
        self.is_generic: Array = np.zeros(MAX_AGENTS, np.bool_)
        self.cta: Array = np.zeros(MAX_AGENTS, np.int64)  # of the cluster, by rank

    def add(self, name: str, *, cta: int = 0, is_generic: bool = False) -> int:
        """Return the number of a new agent."""
        if len(self.names) == MAX_AGENTS:
            raise NotImplementedError(f"emulator: a CTA must have fewer than {MAX_AGENTS} agents")
        self.names.append(name)
        self.is_generic[len(self.names) - 1] = is_generic
        self.cta[len(self.names) - 1] = cta
        return len(self.names) - 1
