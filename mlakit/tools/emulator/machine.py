"""The hardware of one CTA: memories, mbarriers, asynchronous engines, a scheduler, and who saw what.

Threads    a warp partition is one thread (`Partition`): its warps are in step, as the barriers make
           them that the compiler inserts. It is a generator that yields where others may run
Engines    TMA, wgmma, tcgen05 and cp.async operations are queued when they are issued and run when
           the scheduler picks them: any time before something waits for them
Clocks     an agent is a partition or an engine's queue. Vector clocks say which operations of which
           agents happened before; shadow memory has the last writer and the last readers of each
           word. An access that the last conflicting one did not happen before is a race
Proxies    a second clock has what a fence made visible to the asynchronous proxy
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlakit.tools.emulator.dtypes import decode, element_size, encode, memory_dtype
from mlakit.tools.emulator.layouts import offsets

MAX_AGENTS = 512
WORD = 4  # bytes of shadow memory's granularity


class Fault(Exception):
    """What the emulator finds wrong with a kernel."""


class Deadlock(Fault):
    pass


class Race(Fault):
    pass


class MissingFence(Fault):
    pass


class UseBeforeWait(Fault):
    pass


class OutOfBounds(Fault):
    pass


class BarrierMisuse(Fault):
    pass


class UnfinishedAtExit(Fault):
    pass


# ------------------------------------------------------------------ global memory


class GlobalMemory:
    """Tensors by their addresses."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int, np.ndarray]] = []  # (start, end, bytes)

    def add(self, address: int, size: int) -> None:
        if size == 0 or any(start <= address < end for start, end, _ in self.spans):
            return
        raw = (ctypes.c_uint8 * size).from_address(address)
        self.spans.append((address, address + size, np.frombuffer(raw, np.uint8)))

    def _locate(self, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        low, high = int(addresses.min()), int(addresses.max()) + size
        for start, end, data in self.spans:
            if start <= low and high <= end:
                at = addresses - start
                if (at % size).any():
                    raise OutOfBounds(f"address {low:#x} is not aligned to {size} bytes")
                return data, at // size
        spans = ", ".join(f"[{start:#x}, {end:#x})" for start, end, _ in self.spans)
        raise OutOfBounds(f"addresses {low:#x} to {high:#x} are in no tensor: {spans}")

    def load(self, addresses: np.ndarray, kind: str) -> np.ndarray:
        size = element_size(kind)
        data, at = self._locate(addresses, size)
        usable = data[: data.size // size * size].view(memory_dtype(kind))
        return decode(usable[at], kind)

    def store(self, addresses: np.ndarray, values: np.ndarray, kind: str) -> None:
        size = element_size(kind)
        data, at = self._locate(addresses, size)
        data[: data.size // size * size].view(memory_dtype(kind))[at] = encode(values, kind)


@dataclass
class Descriptor:
    """A TMA descriptor on the host."""

    address: int
    shape: list[int]
    strides: list[int]  # in elements
    block: list[int]
    kind: str

    def tile(
        self, memory: GlobalMemory, at: list[int], rows: np.ndarray | None = None
    ) -> np.ndarray:
        """Elements outside of the tensor are zeros. `rows`: a gather, one row each."""
        index = [
            np.arange(size, dtype=np.int64) + start
            for size, start in zip(self.block, at, strict=True)
        ]
        if rows is not None:
            index[0] = rows.astype(np.int64)
        grid = np.meshgrid(*index, indexing="ij")
        inside = np.ones(grid[0].shape, bool)
        address = np.full(grid[0].shape, self.address, np.int64)
        for each, size, stride in zip(grid, self.shape, self.strides, strict=True):
            inside &= (each >= 0) & (each < size)
            address += each * (stride * element_size(self.kind))
        out = np.zeros(grid[0].shape, np.float32 if self.kind[0] in "bf" else np.int64)
        if inside.any():
            out[inside] = memory.load(address[inside], self.kind)
        return out

    def put(self, memory: GlobalMemory, at: list[int], values: np.ndarray) -> None:
        grid = np.meshgrid(
            *(
                np.arange(size, dtype=np.int64) + start
                for size, start in zip(values.shape, at, strict=True)
            ),
            indexing="ij",
        )
        inside = np.ones(grid[0].shape, bool)
        address = np.full(grid[0].shape, self.address, np.int64)
        for each, size, stride in zip(grid, self.shape, self.strides, strict=True):
            inside &= (each >= 0) & (each < size)
            address += each * (stride * element_size(self.kind))
        if inside.any():
            memory.store(address[inside], values[inside], self.kind)


# ------------------------------------------------------------------ shared and tensor memory


class Allocation:
    """Bytes of shared memory (or of TMEM), and who accessed each word last."""

    def __init__(self, size: int, name: str, loc: str) -> None:
        self.data = np.random.default_rng(1).integers(0, 256, size, np.uint8)  # not zeros
        self.name, self.loc = name, loc
        words = -(-size // WORD)
        self.writer = np.zeros(words, np.int32)  # agent 0: nobody
        self.written = np.zeros(words, np.int64)  # its time
        self.is_initialised = np.zeros(words, bool)
        self.read: dict[int, np.ndarray] = {}  # agent -> times
        self.places: dict[int, str] = {}  # agent -> where it was last seen
        self.barriers: dict[int, Barrier] = {}


@dataclass(frozen=True)
class MemDesc:
    """A tile in shared memory."""

    allocation: Allocation
    base: int  # bytes
    shape: tuple[int, ...]
    kind: str
    layout: str
    alloc: tuple[int, ...]  # the shape that the layout is of
    first: tuple[int, ...]  # where the tile begins in it

    def index(self) -> np.ndarray:
        size = element_size(self.kind)
        at = offsets(self.layout, self.alloc, self.shape, self.first, size * 8)
        assert self.base % size == 0
        return at + self.base // size if self.base else at

    def words(self) -> np.ndarray:
        return _words(
            self.layout, self.alloc, self.shape, self.first, element_size(self.kind), self.base
        )

    def read(self) -> np.ndarray:
        data = self.allocation.data
        size = element_size(self.kind)
        return decode(
            data[: data.size // size * size].view(memory_dtype(self.kind))[self.index()], self.kind
        )

    def write(self, values: np.ndarray) -> None:
        data, size = self.allocation.data, element_size(self.kind)
        data[: data.size // size * size].view(memory_dtype(self.kind))[self.index()] = encode(
            values, self.kind
        )

    @property
    def size(self) -> int:
        return int(np.prod(self.shape)) * element_size(self.kind)


_WORDS: dict[tuple, np.ndarray] = {}


def _words(
    layout: str, alloc: tuple, shape: tuple, first: tuple, size: int, base: int
) -> np.ndarray:
    key = (layout, alloc, shape, first, size, base)
    if key not in _WORDS:
        at = offsets(layout, alloc, shape, first, size * 8).ravel() * size + base
        low = at // WORD
        words = low if size <= WORD else np.concatenate([low, low + 1])
        _WORDS[key] = np.unique(words)
    return _WORDS[key]


# ------------------------------------------------------------------ clocks


class Clock:
    """What has happened before (`seen`), and of that, what the asynchronous proxy sees (`fenced`)."""

    __slots__ = ("fenced", "seen")

    def __init__(self) -> None:
        self.seen = np.zeros(MAX_AGENTS, np.int64)
        self.fenced = np.zeros(MAX_AGENTS, np.int64)

    def join(self, other: Clock) -> None:
        np.maximum(self.seen, other.seen, out=self.seen)
        np.maximum(self.fenced, other.fenced, out=self.fenced)

    def copy(self) -> Clock:
        clock = Clock()
        clock.seen[:], clock.fenced[:] = self.seen, self.fenced
        return clock


@dataclass
class Barrier:
    """An mbarrier."""

    count: int
    name: str
    agent: int  # of the TMA loads that complete on it
    phase: int = 0
    pending: int = 0
    bytes: int = 0  # expected and not yet there
    clock: Clock = field(default_factory=Clock)  # of the arrivals
    complete: Clock = field(default_factory=Clock)  # when the last phase was

    def __post_init__(self) -> None:
        self.pending = self.count

    def arrive(self, count: int = 1) -> None:
        self.pending -= count
        if self.pending < 0:
            raise BarrierMisuse(f"{self}: more arrivals than the {self.count} of a phase")
        self._advance()

    def expect(self, size: int) -> None:
        self.bytes += size
        self.arrive()

    def transfer(self, size: int) -> None:
        self.bytes -= size
        self._advance()

    def _advance(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            self.complete = self.clock.copy()

    def has_passed(self, parity: int) -> bool:
        return self.phase & 1 != parity & 1

    def __str__(self) -> str:
        return (
            f"barrier {self.name} (phase {self.phase}, {self.pending} of {self.count} arrivals"
            f" and {self.bytes} bytes missing)"
        )


class NamedBarrier:
    """One of the hardware's: bar.sync and bar.arrive."""

    def __init__(self) -> None:
        self.threads = 0
        self.generation = 0
        self.clock, self.complete = Clock(), Clock()

    def arrive(self, threads: int, of: int, clock: Clock) -> int:
        """The generation that is complete when all threads are there."""
        generation = self.generation
        self.clock.join(clock)
        self.threads += threads
        if self.threads > of:
            raise BarrierMisuse(f"{self.threads} threads at a named barrier of {of}")
        if self.threads == of:
            self.threads, self.generation = 0, self.generation + 1
            self.complete = self.clock.copy()
        return generation


@dataclass(frozen=True)
class Operation:
    """An asynchronous operation in flight."""

    where: str  # it was issued
    complete: Callable[[], None]


class Queue:
    """Operations of an engine that complete in their order."""

    def __init__(self, agent: int, name: str) -> None:
        self.agent, self.name = agent, name
        self.operations: deque[Operation] = deque()
        self.issued = 0
        self.done = 0
        self.last = 0  # that is no arrival

    def issue(
        self, operation: Callable[[], None], where: str, *, is_arrival: bool = False
    ) -> int:
        """Queue an operation that was issued at `where`."""
        self.operations.append(Operation(where, operation))
        self.issued += 1
        if not is_arrival:
            self.last = self.issued
        return self.issued

    def step(self) -> Operation:
        """Complete the first operation."""
        operation = self.operations.popleft()
        operation.complete()
        self.done += 1
        return operation


class AsyncTensor:
    """What a wgmma will have computed; used before a wait, it is a fault."""

    def __init__(self, where: str) -> None:
        self.value: Any = None
        self.where = where

    def used(self, *_: Any, **__: Any) -> Any:
        raise UseBeforeWait(f"the wgmma of {self.where} is used before it is waited for")

    __array__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = used
    __truediv__ = __rtruediv__ = __gt__ = __lt__ = __ge__ = __le__ = __neg__ = __getitem__ = used


Coroutine = Generator[Callable[[], bool] | None, None, Any]


class Partition:
    """A warp partition."""

    def __init__(self, machine: Machine, name: str, num_warps: int) -> None:
        self.machine, self.name, self.num_warps = machine, name, num_warps
        self.agent = machine.new_agent(name, is_generic=True)
        self.clock = Clock()
        self.wgmma = Queue(machine.new_agent(f"wgmma of {name}"), "wgmma")
        self.copies = Queue(machine.new_agent(f"cp.async of {name}", is_generic=True), "cp.async")
        self.stores = Queue(machine.new_agent(f"TMA stores of {name}"), "TMA store")
        self.tensor = Queue(machine.new_agent(f"tcgen05 of {name}"), "tcgen05")
        machine.queues += [self.wgmma, self.copies, self.stores, self.tensor]
        self._where = ""
        self.coroutine: Coroutine | None = None
        self.blocked: Callable[[], bool] | None = None
        self.reason = ""
        self.groups: list[int] = []  # cp.async groups: number of the last copy of each
        self.results: deque[AsyncTensor] = deque(maxlen=64)  # of the last wgmmas
        self.released = 0  # own time at the last arrival: what it wrote since is not published

    @property
    def where(self) -> str:
        """The operation that runs: its source lines and its name."""
        return self._where

    @where.setter
    def where(self, where: str) -> None:
        self._where = where
        self.machine.observer(self.name, where)

    def tick(self) -> int:
        self.clock.seen[self.agent] += 1
        return int(self.clock.seen[self.agent])

    def release(self) -> Clock:
        """What an arrival publishes."""
        self.released = self.tick()
        return self.clock


class Machine:
    """A CTA."""

    def __init__(
        self,
        memory: GlobalMemory,
        program: tuple[int, int, int],
        grid: tuple[int, int, int],
        seed: int,
        *,
        checks: bool = True,
    ) -> None:
        self.memory, self.program, self.grid = memory, program, grid
        self.rng = random.Random(seed)
        self.checks = checks
        self.agents: list[str] = ["nobody"]
        self.is_generic = np.zeros(MAX_AGENTS, bool)
        self.queues: list[Queue] = []
        self.loads: list[Operation] = []  # TMA: complete in any order
        self.observer: Callable[[str, str], None] = lambda who, what: None  # of every step
        self.partitions: list[Partition] = []
        self.named: dict[int, NamedBarrier] = {}
        self.warnings: dict[str, int] = {}
        self.steps = 0
        self.max_steps = 10_000_000
        self.tensor_columns = 0  # allocated
        self.issued: dict[int, int] = {}  # TMA loads: agent -> last phase

    def new_agent(self, name: str, *, is_generic: bool = False) -> int:
        self.agents.append(name)
        self.is_generic[len(self.agents) - 1] = is_generic
        return len(self.agents) - 1

    # -------------------------------------------------------------- the scheduler

    def run(self, body: Callable[[Partition], Coroutine], num_warps: int) -> None:
        main = Partition(self, "default", num_warps)
        self.partitions.append(main)
        main.coroutine = body(main)
        self.loop()
        self._check_exit(main)

    def _check_exit(self, main: Partition) -> None:
        """A CTA may not end before what it issued is complete and waited for."""
        for agent, time in self.issued.items():
            if main.clock.seen[agent] < time:
                raise UnfinishedAtExit(
                    f"the CTA ends, and nothing has waited for {self.agents[agent]}"
                )
        for each in self.partitions:
            for queue in (each.wgmma, each.stores, each.tensor):
                if (
                    queue.issued
                    and max(p.clock.seen[queue.agent] for p in self.partitions) < queue.last
                ):
                    raise UnfinishedAtExit(
                        f"{each.name} ends, and nothing has waited for its last {queue.name}"
                    )

    def loop(self) -> None:
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
            if self.steps > self.max_steps:
                raise Deadlock(f"no end after {self.steps} steps")
            pick = self.rng.randrange(choices)
            if pick < len(ready):
                self._resume(ready[pick])
            elif pick < len(ready) + len(engines):
                queue = engines[pick - len(ready)]
                self.observer(self.agents[queue.agent], f"completes {queue.step().where}")
            else:
                load = self.loads.pop(self.rng.randrange(len(self.loads)))
                self.observer("TMA loads", f"completes {load.where}")
                load.complete()

    def _resume(self, partition: Partition) -> None:
        partition.blocked = None
        assert partition.coroutine is not None
        # run on with some probability: long and short runs of one partition
        burst = 1 if self.rng.random() < 0.5 else self.rng.randrange(1, 12)
        for _ in range(burst):
            try:
                partition.blocked = next(partition.coroutine)
            except StopIteration:
                partition.coroutine = None
                return
            except Fault as fault:
                fault.args = (f"{fault.args[0]}\n  in {partition.name} at {partition.where}",)
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

    # -------------------------------------------------------------- who saw what

    def check_read(
        self,
        partition: Partition,
        tile: MemDesc,
        agent: int,
        time: int,
        *,
        is_async: bool,
        in_order: bool = False,
    ) -> None:
        """A read that is issued by `partition` and done by `agent` at its `time`.

        in_order  after what the agent did before, without a wait: tcgen05
        """
        if not self.checks:
            return
        allocation, words = tile.allocation, tile.words()
        writer, written = allocation.writer[words], allocation.written[words]
        if not allocation.is_initialised[words].all():
            text = f"read of {allocation.name}, which nobody has written, at {partition.where}"
            if is_async:
                raise Race(text)
            self.warnings[text] = self.warnings.get(text, 0) + 1  # its use may be masked
        late = partition.clock.seen[writer] < written
        if in_order:
            late &= writer != agent
        if late.any():
            self._race("read", "written", allocation, writer[late][0])
        if is_async:
            self._check_fence(partition, allocation, writer, written)
        times = allocation.read.get(agent)
        if times is None:
            times = allocation.read[agent] = np.zeros(allocation.writer.size, np.int64)
        times[words] = time
        allocation.places[agent] = partition.where

    def check_write(
        self,
        partition: Partition,
        tile: MemDesc,
        agent: int,
        time: int,
        *,
        is_async: bool,
        in_order: bool = False,
    ) -> None:
        if not self.checks:
            return
        allocation, words = tile.allocation, tile.words()
        writer, written = allocation.writer[words], allocation.written[words]
        late = partition.clock.seen[writer] < written
        if in_order:
            late &= writer != agent
        if late.any():
            self._race("write", "written", allocation, writer[late][0])
        for reader, times in allocation.read.items():
            if in_order and reader == agent:
                continue
            if (times[words] > partition.clock.seen[reader]).any():
                self._race("write", "read", allocation, reader)
        if is_async:
            self._check_fence(partition, allocation, writer, written)
        allocation.writer[words], allocation.written[words] = agent, time
        allocation.is_initialised[words] = True
        allocation.places[agent] = partition.where

    def _check_fence(
        self, partition: Partition, allocation: Allocation, writer: np.ndarray, written: np.ndarray
    ) -> None:
        unfenced = self.is_generic[writer] & (partition.clock.fenced[writer] < written)
        if unfenced.any():
            who = int(writer[unfenced][0])
            raise MissingFence(
                f"{allocation.name}: written by {self.agents[who]} at"
                f" {allocation.places.get(who, '?')} through the generic proxy and"
                " accessed through the asynchronous one without a fence between them"
            )

    def _race(self, action: str, done: str, allocation: Allocation, who: int) -> None:
        raise Race(
            f"{action} of {allocation.name}, last {done} by {self.agents[int(who)]} at"
            f" {allocation.places.get(int(who), '?')}, which has not happened before"
        )
