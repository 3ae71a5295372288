"""One CTA: its partitions and engines, and the scheduler that interleaves them.

Partitions  a warp partition is a generator that yields where others may run. Its warps are in step:
            the compiler orders their accesses of shared memory. Where it does not, at named
            barriers and in global memory, each warp knows by itself how far the others are
Engines     TMA, wgmma, tcgen05 and cp.async operations are queued when they are issued and run when
            the scheduler picks them, at any time before something waits for them
Order       a seeded choice among the partitions that can run, the heads of the queues, and the TMA
            loads in flight, which complete in any order
Checks      `races` sees every access when it is issued
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from mlakit.tools.emulator.barriers import Barrier, NamedBarrier
from mlakit.tools.emulator.clocks import Agents, Clock
from mlakit.tools.emulator.dtypes import Array
from mlakit.tools.emulator.engines import AsyncTensor, Operation, Queue
from mlakit.tools.emulator.faults import BarrierMisuse, Deadlock, Fault, UnfinishedAtExit
from mlakit.tools.emulator.global_races import GlobalRaces
from mlakit.tools.emulator.ir import Unsupported
from mlakit.tools.emulator.layouts import LANE_BYTES, TENSOR_LANES
from mlakit.tools.emulator.memory import Allocation, GlobalMemory, MemDesc
from mlakit.tools.emulator.races import Access, RaceDetector

MAX_STEPS = 10_000_000
MAX_BURST = 12  # yields that a partition runs through at once
RECENT_WGMMAS = 64

# yields None to let others run, or a condition to be resumed when it holds
Coroutine = Generator[Callable[[], bool] | None, None, Any]


class Partition:
    """A warp partition.

    clock     what has happened before, as its threads know it
    blocked   the condition that it waits for, and `reason` in words
    groups    the number of the last copy of each cp.async group
    results   the results of its latest wgmmas
    met       [warps, warps]: the time up to which a warp knows that another one has come
    written   the agent of what its TMA stores write to global memory
    """

    def __init__(self, machine: Machine, name: str, num_warps: int) -> None:
        self.machine, self.name, self.num_warps = machine, name, num_warps
        agents = machine.agents
        self.agent = agents.add(name, is_generic=True)
        self.clock = Clock()
        self.wgmma = Queue(agents.add(f"wgmma of {name}"), "wgmma")
        # PTX, "cp.async": the copies are weak operations of the generic proxy, not of the async one
        self.copies = Queue(agents.add(f"cp.async of {name}", is_generic=True), "cp.async")
        self.stores = Queue(agents.add(f"TMA stores of {name}"), "TMA store")
        self.written = agents.add(f"TMA stores of {name} to global memory")
        self.tensor = Queue(agents.add(f"tcgen05 of {name}"), "tcgen05")
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
        return Access(self.clock, self.where, self.agent, self.tick())

    def queued(self, queue: Queue, *, is_async: bool, in_order: bool = False) -> Access:
        """Return the access of the operation that is issued next to a queue."""
        return Access(
            self.clock, self.where, queue.agent, queue.issued + 1, is_async, in_order, in_order
        )


class Machine:
    """A CTA.

    checks     for races, fences and unwritten memory; the rules of barriers and TMA always hold
    exact_fp8  sums of e4m3 products are exact instead of rounded as Hopper's tensor cores do
    hardware_sums  sums of 16-bit products are rounded as they do, too
    observer   is told every step
    loads      TMA loads in flight
    issued     for each agent of TMA loads the last phase that has some
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
        self.num_ctas = num_ctas  # of a cluster, which run in step
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
        self.named: dict[int, NamedBarrier] = {}
        self.steps = 0
        self.issued: dict[int, int] = {}

    @cached_property
    def tensor_memory(self) -> Allocation:
        """The tensor memory, whose columns tiles have one after the other."""
        return Allocation(TENSOR_LANES * LANE_BYTES * self.num_ctas, "tensor memory")

    @property
    def warnings(self) -> dict[str, int]:
        """How often each suspicion that is no fault was met."""
        return self.races.warnings

    def check_read(self, tile: MemDesc, access: Access) -> None:
        """Check a read of shared or tensor memory when it is issued."""
        if self.checks:
            self.races.read(tile.allocation.shadow, tile.words(), access)

    def check_write(self, tile: MemDesc, access: Access) -> None:
        """Check a write of shared or tensor memory when it is issued."""
        if self.checks:
            self.races.write(tile.allocation.shadow, tile.words(), access)

    def run(self, body: Callable[[Partition], Coroutine], num_warps: int) -> None:
        """Run a kernel: `body` is the coroutine of its first partition, of `num_warps` warps."""
        main = Partition(self, "default", num_warps)
        self.partitions.append(main)
        main.coroutine = body(main)
        self._loop()
        self._check_exit(main)

    def _check_exit(self, main: Partition) -> None:
        """Report operations that nothing has waited for when the CTA ends.

        PTX, "cp.async.bulk": the mbarrier and the shared memory of a copy must stay valid until the
        copy is complete, and shared memory ends with its CTA. A wgmma or tcgen05 operation that is
        pending at exit is undefined in the same way. An mbarrier whose bytes never arrive, or
        arrive without being expected, was told another size than the copies have.
        """
        for agent, time in self.issued.items():
            if main.clock.seen[agent] < time:
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
