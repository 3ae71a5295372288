"""Operations that order partitions: mbarriers, fences, named barriers, warp specialisation."""

from __future__ import annotations

from collections.abc import Callable

from mlakit.tools.emulator.barriers import BARRIER_BYTES, WARP, Barrier, NamedBarrier
from mlakit.tools.emulator.faults import BarrierMisuse, Race
from mlakit.tools.emulator.machine import Coroutine, Machine, Partition
from mlakit.tools.emulator.memory import MemDesc


class Synchronisation:
    """mbarriers, proxy fences, named barriers, and the start and end of partitions."""

    machine: Machine

    def init_barrier(self, p: Partition, tile: MemDesc, count: int) -> None:
        """Initialise an mbarrier (mbarrier.init).

        PTX, "mbarrier.init": the object is aligned to 8 bytes, and initialising one that is valid
        is undefined: mbarrier.inval comes first.
        """
        machine, at = self.machine, tile.first_byte
        name = f"{tile.allocation.name}[{at // BARRIER_BYTES}]"
        if at % BARRIER_BYTES:
            raise BarrierMisuse(f"an mbarrier must lie at a multiple of 8 bytes, got byte {at}")
        before = tile.allocation.barriers.get(at)
        if before is not None and before.is_valid:
            raise BarrierMisuse(f"{before}: initialised again without an invalidation")
        agent = machine.agents.add(f"TMA loads of {name}") if before is None else before.agent
        barrier = Barrier(count, name, agent)
        if before is not None:  # copies of its next life come after those of the last one
            barrier.first_copy = before.last_copy
        barrier.initialiser, barrier.initialised = p.agent, p.tick()
        tile.allocation.barriers[at] = barrier
        machine.barriers.append(barrier)
        barrier.clock.join(p.clock)

    def invalidate_barrier(self, p: Partition, tile: MemDesc) -> None:
        """Invalidate an mbarrier (mbarrier.inval): it must not be used afterwards."""
        barrier = self.barrier(p, tile)
        barrier.check_unused("invalidated")
        barrier.is_valid = False
        p.tick()

    def barrier(self, p: Partition, tile: MemDesc) -> Barrier:
        """Return a valid mbarrier.

        PTX, "mbarrier": operations on a location without a valid mbarrier object are undefined.
        The initialisation is a write: it must have happened before every use.
        """
        barrier = tile.allocation.barriers.get(tile.first_byte)
        if barrier is None or not barrier.is_valid:
            name = f"{tile.allocation.name}[{tile.first_byte // BARRIER_BYTES}]"
            raise BarrierMisuse(f"barrier {name} is used and is not initialised")
        if p.clock.seen[barrier.initialiser] < barrier.initialised:
            who = self.machine.agents.names[barrier.initialiser]
            raise Race(f"{barrier} is initialised by {who}, which has not happened before")
        return barrier

    def arrive(self, p: Partition, tile: MemDesc, count: int, is_asked: bool) -> Coroutine:
        """Arrive at an mbarrier with release semantics.

        PTX, "mbarrier.arrive": .release is assumed where no semantics are given. Triton puts a
        barrier of the partition's warps before the arrival of one thread.
        """
        yield None
        if is_asked:
            barrier = self.barrier(p, tile)
            p.sync_warps()
            barrier.clock.join(p.clock)
            barrier.arrive(count)

    def expect(self, p: Partition, tile: MemDesc, size: int, is_asked: bool) -> Coroutine:
        """Arrive, and expect bytes of copies (mbarrier.arrive.expect_tx)."""
        yield None
        if is_asked:
            barrier = self.barrier(p, tile)
            p.sync_warps()
            barrier.clock.join(p.clock)
            barrier.expect(size)

    def wait(self, p: Partition, tile: MemDesc, phase: int, is_asked: bool) -> Coroutine:
        """Wait for the phase of a parity with acquire semantics.

        PTX, "mbarrier.try_wait": .acquire is assumed where no semantics are given. What happened
        before the arrivals of the phase, and its bulk copies, has then happened before.
        """
        yield None
        if is_asked:
            barrier = self.barrier(p, tile)
            p.reason = f"parity {int(phase) & 1} of {barrier.name}"
            yield _passes(p, barrier, int(phase))
            p.clock.join(barrier.complete)

    def fence(self, p: Partition) -> None:
        """Order generic accesses before asynchronous ones (fence.proxy.async.shared::cta)."""
        p.tick()
        p.clock.fence()

    def sync_warps(self, p: Partition) -> None:
        """Wait for all warps of a partition (`gl.barrier`, bar.sync of its own threads)."""
        p.sync_warps()

    def named(
        self, p: Partition, kind: str, number: int, threads: int, is_asked: bool
    ) -> Coroutine:
        """Arrive at a named barrier; wait for the other threads if `kind` is sync.

        PTX, "bar, barrier": bar.sync and bar.arrive guarantee that prior memory accesses of the
        arriving threads are performed relative to all threads of the barrier. bar.arrive lets the
        threads go on, so it orders the warps of a partition for others and not for each other.
        """
        yield None
        if not is_asked:
            return
        named = self.machine.named
        if number not in named:
            named[number] = NamedBarrier(int(number))
        barrier = named[number]
        p.tick()
        generation = barrier.arrive(p.num_warps * WARP, threads, p.clock)
        if kind == "sync":
            p.reason = f"named barrier {number}"
            yield lambda: barrier.generation > generation
            p.clock.join(barrier.complete)
            p.sync_warps()

    def fork(
        self, p: Partition, bodies: list[Callable[[Partition], Coroutine]], warps: list[int]
    ) -> list[Partition]:
        """Start the other partitions of a warp-specialised kernel."""
        workers = []
        p.sync_warps()
        for i, (body, num_warps) in enumerate(zip(bodies, warps, strict=True)):
            worker = Partition(self.machine, f"partition{i}", num_warps)
            worker.clock.join(p.clock)
            worker.coroutine = body(worker)
            workers.append(worker)
        self.machine.partitions += workers
        return workers

    def join(self, p: Partition, workers: list[Partition]) -> Coroutine:
        """Wait until the other partitions have ended."""
        p.reason = "the other partitions"
        yield lambda: all(each.coroutine is None for each in workers)
        for each in workers:
            p.clock.join(each.clock)
        p.sync_warps()


def _passes(p: Partition, barrier: Barrier, phase: int) -> Callable[[], bool]:
    def passes() -> bool:
        p.reason = f"parity {phase & 1} of {barrier}"
        return barrier.has_passed(phase)

    return passes
