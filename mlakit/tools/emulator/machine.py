"""One CTA, or a cluster of them: partitions and engines, and the scheduler that interleaves them.

Partitions  a warp partition is a generator that yields where others may run. Its warps are in step:
            the compiler orders their accesses of shared memory. Where it does not, at named
            barriers and in global memory, each warp knows by itself how far the others are
Engines     TMA, wgmma, tcgen05 and cp.async operations are queued when they are issued and run when
            the scheduler picks them, at any time before something waits for them
Order       a seeded choice among the partitions that can run, the heads of the queues, and the TMA
            loads in flight, which complete in any order
Checks      `races` sees every access when it is issued
Clusters    each CTA has partitions, engines and memory of its own. It may access its peers' memory
            after it knows that they have begun, and before they end
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from mlakit.tools.emulator.barriers import Barrier, NamedBarrier
from mlakit.tools.emulator.clocks import Agents, Clock
from mlakit.tools.emulator.dtypes import Array
from mlakit.tools.emulator.engines import AsyncTensor, Operation, Queue
from mlakit.tools.emulator.faults import (
    BarrierMisuse,
    Deadlock,
    Fault,
    Race,
    UnfinishedAtExit,
)
from mlakit.tools.emulator.global_races import GlobalRaces
from mlakit.tools.emulator.ir import Unsupported
from mlakit.tools.emulator.layouts import LANE_BYTES, TENSOR_LANES
from mlakit.tools.emulator.memory import Allocation, GlobalMemory, MemDesc, as_peers
from mlakit.tools.emulator.races import Access, RaceDetector

MAX_STEPS = 10_000_000
MAX_BURST = 12  # yields that a partition runs through at once
RECENT_WGMMAS = 64
MAIN = "default"  # the first partition

# yields None to let others run, or a condition to be resumed when it holds
Coroutine = Generator[Callable[[], bool] | None, None, Any]


@dataclass
class Cta:
    """A CTA of a cluster.

    agent   stands for its beginning, at time 1, and for its initialisations of mbarriers that are
            fenced, at one time each
    inits   how many mbarriers it has initialised; `fenced` of them before its last fence
    remote  by agent, the time of its last access of this CTA's memory from another CTA
    allocated, met  by name, how often it has allocated a tile, and reached a cluster barrier
    """

    rank: int
    agent: int
    inits: int = 0
    fenced: int = 0
    has_ended: bool = False
    remote: dict[int, int] = field(default_factory=dict)
    allocated: Counter[str] = field(default_factory=Counter)
    met: Counter[str] = field(default_factory=Counter)


class Partition:
    """A warp partition.

    cta       its CTA's rank in the cluster
    role      its name without the CTA's
    clock     what has happened before, as its threads know it
    blocked   the condition that it waits for, and `reason` in words
    groups    the number of the last copy of each cp.async group
    results   the results of its latest wgmmas
    met       [warps, warps]: the time up to which a warp knows that another one has come
    written   the agent of what its TMA stores write to global memory
    """

    def __init__(self, machine: Machine, role: str, num_warps: int, cta: int = 0) -> None:
        self.machine, self.role, self.num_warps, self.cta = machine, role, num_warps, cta
        self.name = name = machine.named_in(role, cta)
        add = partial(machine.agents.add, cta=cta)
        self.agent = add(name, is_generic=True)
        self.clock = Clock()
        self.clock.observe(machine.ctas[cta].agent, 1)
        self.wgmma = Queue(add(f"wgmma of {name}"), "wgmma")
        # PTX, "cp.async": the copies are weak operations of the generic proxy, not of the async one
        self.copies = Queue(add(f"cp.async of {name}", is_generic=True), "cp.async")
        self.stores = Queue(add(f"TMA stores of {name}"), "TMA store")
        self.written = add(f"TMA stores of {name} to global memory")
        self.tensor = Queue(add(f"tcgen05 of {name}"), "tcgen05")
        machine.queues += [self.wgmma, self.copies, self.stores, self.tensor]
        self._where = ""
        self.coroutine: Coroutine | None = None
        self.blocked: Callable[[], bool] | None = None
        self.reason = ""
        self.groups: list[int] = []
        self.results: deque[AsyncTensor] = deque(maxlen=RECENT_WGMMAS)
        self.met: Array = np.zeros((num_warps, num_warps), np.int64)

    @property
    def where(self) -> str:
        """The operation that runs: its source lines and its name."""
        return self._where

    @where.setter
    def where(self, where: str) -> None:
        self._where = where
        self.machine.observer(self.name, where)

    def tick(self) -> int:
        """Count an operation of this partition; return its time."""
        self.clock.seen[self.agent] += 1
        return int(self.clock.seen[self.agent])

    def meet(self, warps: Sequence[int] | None = None) -> None:
        """Order all accesses of some warps, or all, so far before theirs from here on."""
        time, some = self.tick(), list(range(self.num_warps)) if warps is None else list(warps)
        known = self.met[some].max(0)
        known[some] = time
        self.met[some] = known

    def learn(self, clock: Clock) -> None:
        """Add what had happened before an operation of other partitions, to all warps.

        What these know of this partition, all of its warps had done before they published it.
        """
        self.clock.join(clock)
        np.maximum(self.met, clock.seen[self.agent], out=self.met)

    def access(self) -> Access:
        """Return an access that the threads of this partition make themselves."""
        return Access(self.clock, self.where, self.agent, self.tick(), cta=self.cta)

    def queued(self, queue: Queue, *, is_async: bool, in_order: bool = False) -> Access:
        """Return the access of the operation that is issued next to a queue."""
        return Access(
            self.clock, self.where, queue.agent, queue.issued + 1, is_async, in_order, in_order,
            self.cta,
        )  # fmt: skip


class Machine:
    """A cluster, which is one CTA by default.

    checks     for races, fences and unwritten memory; the rules of barriers and TMA always hold
    exact_fp8  sums of e4m3 products are exact instead of rounded as Hopper's tensor cores do
    hardware_sums  sums of 16-bit products are rounded as they do, too
    observer   is told every step
    loads      TMA loads in flight
    issued     for each agent of TMA loads the last phase that has some
    common     what an allocation of a cluster is, until each of its CTAs has made it
    meetings   the clocks of the CTAs that have come, by the partition and the number of a barrier
    """

    def __init__(
        self,
        memory: GlobalMemory,
        program: tuple[int, int, int],
        grid: tuple[int, int, int],
        seed: int,
        *,
        checks: bool = True,
        exact_fp8: bool = False,
        hardware_sums: bool = False,
        num_ctas: int = 1,
    ) -> None:
        self.memory, self.program, self.grid = memory, program, grid
        self.num_ctas = num_ctas
        self.rng = random.Random(seed)
        self.checks, self.exact_fp8, self.hardware_sums = checks, exact_fp8, hardware_sums
        self.agents = Agents()
        self.races = RaceDetector(self.agents)
        self.global_races = GlobalRaces(memory, self.agents)
        self.queues: list[Queue] = []
        self.loads: list[Operation] = []
        self.observer: Callable[[str, str], None] = lambda who, what: None
        self.partitions: list[Partition] = []
        self.barriers: list[Barrier] = []
        self.named: dict[tuple[int, int], NamedBarrier] = {}  # by CTA and number
        self.steps = 0
        self.issued: dict[int, int] = {}
        self.ctas = [
            Cta(each, self.agents.add(self.named_in("the beginning", each), cta=each))
            for each in range(num_ctas)
        ]
        self.common: dict[tuple[str, int], list[Allocation]] = {}
        self.meetings: dict[tuple[str, int], dict[int, Clock]] = {}

    @cached_property
    def tensor_memory(self) -> list[Allocation]:
        """The tensor memory of each CTA, whose columns tiles have one after the other."""
        return self.of_each_cta(TENSOR_LANES * LANE_BYTES, "tensor memory")

    def named_in(self, name: str, cta: int) -> str:
        """Return a name that tells a CTA's partition or tile from that of another one."""
        return f"{name} of CTA {cta}" if self.num_ctas > 1 else name

    def of_each_cta(self, size: int, name: str) -> list[Allocation]:
        """Return an allocation in each CTA's memory."""
        ranks = range(self.num_ctas)
        return as_peers([Allocation(size, self.named_in(name, each), each) for each in ranks])

    def in_common(self, cta: int, name: str, make: Callable[[], list[Allocation]]) -> Allocation:
        """Return a CTA's part of an allocation, which the first CTA that comes to it makes for all.

        Memory is allocated when a kernel is compiled, so a peer may use it before its CTA comes.
        """
        if self.num_ctas == 1:
            return make()[0]
        counts = self.ctas[cta].allocated
        key = name, counts[name]
        counts[name] += 1
        if key not in self.common:
            self.common[key] = make()
        made = self.common[key]
        if all(each.allocated[name] > key[1] for each in self.ctas):
            del self.common[key]
        return made[cta]

    @property
    def warnings(self) -> dict[str, int]:
        """How often each suspicion that is no fault was met."""
        return self.races.warnings

    def check_read(self, tile: MemDesc, access: Access, some: Array | None = None) -> None:
        """Check a read of shared or tensor memory when it is issued; `some` elements or all."""
        self._check_peer(tile.allocation, access)
        if self.checks:
            self.races.read(tile.allocation.shadow, tile.words(some), access)

    def check_write(self, tile: MemDesc, access: Access, some: Array | None = None) -> None:
        """Check a write of shared or tensor memory when it is issued; `some` elements or all."""
        self._check_peer(tile.allocation, access)
        if self.checks:
            self.races.write(tile.allocation.shadow, tile.words(some), access)

    def _check_peer(self, memory: Allocation, access: Access) -> None:
        if memory.cta != access.cta:
            self.check_lifetime(memory, access.clock, access.agent, access.time)

    def check_lifetime(self, memory: Allocation, clock: Clock, agent: int, time: int) -> None:
        """Check an access of a peer's memory: the peer has begun, and does not end before it.

        PTX, "barrier.cluster" and "mapa" leave what is at an address of shared::cluster undefined
        unless its CTA exists: CTAs of a cluster begin at different times, and memory ends with its
        CTA. A barrier of the cluster says that all have begun, and a last one that all are done.
        """
        cta = self.ctas[memory.cta]
        if clock.seen[cta.agent] < 1:
            raise Race(f"access of {memory.name}, and its CTA may not have begun")
        if cta.has_ended:
            raise UnfinishedAtExit(f"access of {memory.name}, and its CTA has ended")
        cta.remote[agent] = max(cta.remote.get(agent, 0), time)

    def run(self, body: Callable[[Partition], Coroutine], num_warps: int) -> None:
        """Run a kernel: `body` is the coroutine of its first partition, of `num_warps` warps."""
        for cta in self.ctas:
            main = Partition(self, MAIN, num_warps, cta.rank)
            self.partitions.append(main)
            main.coroutine = body(main)
        mains = list(self.partitions)
        self._loop()
        self._check_exit(mains)

    def _end(self, main: Partition) -> None:
        """End a CTA: what others do with its memory must have happened before."""
        cta = self.ctas[main.cta]
        cta.has_ended = True
        for agent, time in cta.remote.items():
            if main.clock.seen[agent] < time:
                raise UnfinishedAtExit(
                    f"CTA {cta.rank} ends, and an access of its memory by"
                    f" {self.agents.names[agent]} has not happened before"
                )

    def _check_exit(self, mains: list[Partition]) -> None:
        """Report operations that nothing has waited for when the CTA ends.

        PTX, "cp.async.bulk": the mbarrier and the shared memory of a copy must stay valid until the
        copy is complete, and shared memory ends with its CTA. A wgmma or tcgen05 operation that is
        pending at exit is undefined in the same way. An mbarrier whose bytes never arrive, or
        arrive without being expected, was told another size than the copies have.
        """
        for agent, time in self.issued.items():
            if mains[self.agents.cta[agent]].clock.seen[agent] < time:
                raise UnfinishedAtExit(
                    f"the CTA ends, and nothing has waited for {self.agents.names[agent]}"
                )
        for each in self.partitions:
            for queue in (each.wgmma, each.copies, each.stores, each.tensor):
                seen = max(other.clock.seen[queue.agent] for other in self.partitions)
                if seen < queue.last:
                    raise UnfinishedAtExit(
                        f"{each.name} ends, and nothing has waited for its last {queue.name}"
                    )
        for barrier in self.barriers:
            if barrier.bytes:
                raise BarrierMisuse(f"{barrier}: the CTA ends with a transaction count")

    def _loop(self) -> None:
        while True:
            ready = [
                each
                for each in self.partitions
                if each.coroutine is not None and (each.blocked is None or each.blocked())
            ]
            engines = [queue for queue in self.queues if queue.operations]
            choices = len(ready) + len(engines) + (1 if self.loads else 0)
            if choices == 0:
                if any(each.coroutine is not None for each in self.partitions):
                    self._report_deadlock()
                return
            self.steps += 1
            if self.steps > MAX_STEPS:
                raise Deadlock(f"no end after {self.steps} steps")
            pick = self.rng.randrange(choices)
            if pick < len(ready):
                self._resume(ready[pick])
            elif pick < len(ready) + len(engines):
                queue = engines[pick - len(ready)]
                self.observer(self.agents.names[queue.agent], f"completes {queue.step().where}")
            else:
                load = self.loads.pop(self.rng.randrange(len(self.loads)))
                self.observer("TMA loads", f"completes {load.where}")
                load.run()

    def _resume(self, partition: Partition) -> None:
        partition.blocked = None
        assert partition.coroutine is not None
        # half of the runs are longer than one yield: interleavings are coarse and fine
        burst = 1 if self.rng.random() < 0.5 else self.rng.randrange(1, MAX_BURST)
        for _ in range(burst):
            try:
                partition.blocked = next(partition.coroutine)
            except StopIteration:
                partition.coroutine = None
                if self.num_ctas > 1 and partition.role == MAIN:
                    self._end(partition)
                return
            except (Fault, Unsupported) as error:
                error.args = (f"{error.args[0]}\n  in {partition.name} at {partition.where}",)
                raise
            if partition.blocked is not None:
                if not partition.blocked():
                    self.observer(partition.name, f"waits for {partition.reason}")
                    return
                partition.blocked = None

    def _report_deadlock(self) -> None:
        lines = [
            f"  {each.name} waits at {each.where}: {each.reason}"
            for each in self.partitions
            if each.coroutine is not None
        ]
        raise Deadlock("deadlock\n" + "\n".join(lines))
