"""Operations that order partitions: mbarriers, fences, named barriers, warp specialisation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from mlakit.tools.emulator.barriers import BARRIER_BYTES, Barrier, NamedBarrier
from mlakit.tools.emulator.clocks import Clock
from mlakit.tools.emulator.clusters import group
from mlakit.tools.emulator.faults import BarrierMisuse, Race
from mlakit.tools.emulator.ir import Unsupported
from mlakit.tools.emulator.layouts import thread_elements
from mlakit.tools.emulator.machine import Coroutine, Machine, Partition
from mlakit.tools.emulator.memory import MemDesc
from mlakit.tools.emulator.types import Type


class Synchronisation:
    """mbarriers, proxy fences, named barriers, and the start and end of partitions."""

    machine: Machine

    def init_barrier(self, p: Partition, tile: MemDesc, count: int) -> None:
        """Initialise an mbarrier (mbarrier.init).

        Of CTAs that share a barrier the first one has it, and it counts the arrivals of all.

        PTX, "mbarrier.init": the object is aligned to 8 bytes, and initialising one that is valid
        is undefined: mbarrier.inval comes first.
        """
        if p.cta & tile.copies:
            return
        machine, at, cta = self.machine, tile.first_byte, self.machine.ctas[p.cta]
        count *= machine.num_ctas // int(np.prod(tile.shape)) if machine.num_ctas > 1 else 1
        name = f"{tile.allocation.name}[{at // BARRIER_BYTES}]"
        if at % BARRIER_BYTES:
            raise BarrierMisuse(f"an mbarrier must lie at a multiple of 8 bytes, got byte {at}")
        before = tile.allocation.barriers.get(at)
        if before is not None and before.is_valid:
            raise BarrierMisuse(f"{before}: initialised again without an invalidation")
        new = machine.agents.add
        agent = new(f"TMA loads of {name}", cta=p.cta) if before is None else before.agent
        cta.inits += 1
        barrier = Barrier(count, name, agent, 1 + cta.inits)
        if before is not None:  # copies of its next life come after those of the last one
            barrier.first_copy = before.last_copy
        barrier.initialiser, barrier.initialised = p.agent, p.tick()
        tile.allocation.barriers[at] = barrier
        machine.barriers.append(barrier)
        barrier.clock.join(p.clock)

    def invalidate_barrier(self, p: Partition, tile: MemDesc) -> None:
        """Invalidate an mbarrier (mbarrier.inval): it must not be used afterwards.

        PTX, "mbarrier.inval": the location may then be used for anything. So this is a write, which
        all operations on the barrier must have happened before, copies that complete on it too.
        """
        if p.cta & tile.copies:
            return
        barrier = self.barrier(p, tile)
        barrier.check_unused("invalidated")
        for agent, time in barrier.used.items():
            if p.clock.seen[agent] < time:
                who = self.machine.agents.names[agent]
                raise Race(
                    f"{barrier} is invalidated, and its use by {who} has not happened before"
                )
        barrier.is_valid = False

    def barrier(self, p: Partition, tile: MemDesc, last: tuple[int, int] | None = None) -> Barrier:
        """Return a valid mbarrier, in the memory of the CTA that has the tile.

        PTX, "mbarrier": operations on a location without a valid mbarrier object are undefined.
        The initialisation is a write: it must have happened before every use. For a peer it has if
        fence.mbarrier_init.release.cluster and a barrier of the cluster come between, even a
        relaxed one.

        last  the agent and its operation that a peer's mbarrier is signalled after, where it is not
              the thread itself that arrives
        """
        memory = tile.allocation
        agent, time = last or (p.agent, p.tick())
        if memory.cta != p.cta:
            self.machine.check_lifetime(memory, p.clock, agent, time)
        barrier = tile.allocation.barriers.get(tile.first_byte)
        if barrier is None or not barrier.is_valid:
            name = f"{tile.allocation.name}[{tile.first_byte // BARRIER_BYTES}]"
            raise BarrierMisuse(f"barrier {name} is used and is not initialised")
        is_fenced = p.clock.seen[self.machine.ctas[memory.cta].agent] >= barrier.number
        if p.clock.seen[barrier.initialiser] < barrier.initialised and not is_fenced:
            who = self.machine.agents.names[barrier.initialiser]
            raise Race(f"{barrier} is initialised by {who}, which has not happened before")
        if memory.cta == p.cta:
            agent, time = p.agent, p.tick()
        barrier.used[agent] = time
        return barrier

    def arrive(
        self,
        p: Partition,
        tile: MemDesc,
        count: int,
        is_asked: bool,
        size: int | None = None,
        from_cta: int | None = None,
        multicast: int | None = None,
    ) -> Coroutine:
        """Arrive at an mbarrier with release semantics, and expect bytes of copies if there are.

        PTX, "mbarrier.arrive": .release is assumed where no semantics are given. Triton puts a
        barrier of the partition's warps before the arrival of one thread.

        size       what mbarrier.arrive.expect_tx expects
        from_cta   the bits of the rank of the CTA that arrives at all CTAs with the same bits
        multicast  the bits in which a CTA's rank and those of the CTAs that it arrives at differ
        """
        yield None
        if not is_asked:
            return
        for target in self._targets(p, tile, from_cta, multicast):
            barrier = self.barrier(p, tile.on(target))
            p.meet()
            barrier.clock.join(p.clock)
            if size is None:
                barrier.arrive(count)
            else:
                barrier.expect(size)

    def _targets(
        self, p: Partition, tile: MemDesc, from_cta: int | None, multicast: int | None
    ) -> Iterable[int]:
        """Return the CTAs whose mbarriers an arrival counts at."""
        if multicast:
            return group(p.cta, multicast)
        if from_cta is None:
            return [p.cta & ~tile.copies]
        bits = (self.machine.num_ctas - 1) & ~from_cta
        return [] if p.cta & bits else group(p.cta, bits)

    def wait(self, p: Partition, tile: MemDesc, phase: int, is_asked: bool) -> Coroutine:
        """Wait for the phase of a parity with acquire semantics.

        PTX, "mbarrier.try_wait": .acquire is assumed where no semantics are given. What happened
        before the arrivals of the phase, and its bulk copies, has then happened before. Of CTAs
        that share a barrier only the one that has it waits: try_wait takes a barrier of its own.
        """
        yield None
        if is_asked and not p.cta & tile.copies:
            barrier = self.barrier(p, tile)
            p.reason = f"parity {int(phase) & 1} of {barrier.name}"
            yield _passes(p, barrier, int(phase))
            barrier.used[p.agent] = p.tick()
            p.learn(barrier.complete)

    def fence(self, p: Partition, is_of_cluster: bool = False) -> None:
        """Order generic accesses before asynchronous ones (fence.proxy.async).

        The form .shared::cta covers the memory of its CTA, and hence the accesses of its threads;
        .shared::cluster covers those of the peers, too.
        """
        p.tick()
        cta = self.machine.agents.cta
        p.clock.fence(np.ones_like(cta, np.bool_) if is_of_cluster else cta == p.cta)

    def fence_initialisations(self, p: Partition) -> None:
        """Let peers see initialised mbarriers (fence.mbarrier_init.release.cluster)."""
        cta = self.machine.ctas[p.cta]
        cta.fenced = cta.inits

    def meet_cluster(self, p: Partition, is_relaxed: bool) -> Coroutine:
        """Wait for the same partition of the cluster's other CTAs.

        PTX, "barrier.cluster": .release and .acquire order memory accesses of the arriving threads
        before those after the wait. With .relaxed the arrival orders none, except initialisations
        of mbarriers that are fenced. It waits for threads that have not exited.
        """
        yield None
        machine, cta = self.machine, self.machine.ctas[p.cta]
        p.meet()
        key = p.role, cta.met[p.role]
        cta.met[p.role] += 1
        clock = Clock() if is_relaxed else p.clock.copy()
        clock.observe(cta.agent, 1 + cta.fenced)
        come = machine.meetings.setdefault(key, {})
        come[p.cta] = clock
        p.reason = "the other CTAs of the cluster"
        yield lambda: all(each.rank in come or each.has_ended for each in machine.ctas)
        for other in come.values():
            p.learn(other)

    def sync_warps(self, p: Partition) -> None:
        """Wait for all warps of a partition (`gl.barrier`, bar.sync of its own threads)."""
        p.meet()

    def named(
        self,
        p: Partition,
        kind: str,
        number: Any,
        threads: int,
        is_asked: bool = True,
        type: Type | None = None,
    ) -> Coroutine:
        """Arrive at a named barrier; wait for the other threads if `kind` is sync.

        PTX, "bar, barrier": bar.sync and bar.arrive guarantee that prior memory accesses of the
        arriving threads are performed relative to all threads of the barrier. bar.arrive lets the
        threads go on, so it orders the warps of a partition for others and not for each other.

        type  of `number`, which may be a tensor: warps then arrive at barriers of their own
        """
        yield None
        if not is_asked:
            return
        time, arrived = p.tick(), []
        for own, warps in _warps_of(number, type, p.num_warps).items():
            barrier = self.machine.named.setdefault((p.cta, own), NamedBarrier(own))
            self._check_generation(p, barrier, warps)
            barrier.is_divided |= len(warps) < p.num_warps
            if barrier.is_divided and any(each[0] != p.agent for each in barrier.arrivals):
                raise Unsupported("some warps of a partition at a named barrier with another one")
            arrived.append((barrier, warps, barrier.arrive(p.agent, warps, threads, p.clock, time)))
        if kind == "sync":
            p.reason = " and ".join(f"named barrier {each[0].number}" for each in arrived)
            yield lambda: all(each.generation > before for each, _, before in arrived)
            for barrier, warps, _ in arrived:
                if not barrier.is_divided:
                    p.learn(barrier.complete)
                p.meet(warps)

    def _check_generation(self, p: Partition, barrier: NamedBarrier, warps: list[int]) -> None:
        """Report an arrival that may count for the generation before.

        PTX, "bar, barrier": a barrier counts threads and does not tell one arrival of a warp from
        two. So a warp may arrive again only when it knows that all others have arrived before.
        """
        for agent, others, time in barrier.before:
            known = p.clock.seen[agent]
            if agent == p.agent:
                known = p.met[np.ix_(warps, others)].min()
            if known < time:
                raise BarrierMisuse(
                    f"named barrier {barrier.number}: an arrival, and the last one of"
                    f" {self.machine.agents.names[agent]} has not happened before in all its warps"
                )

    def fork(
        self, p: Partition, bodies: list[Callable[[Partition], Coroutine]], warps: list[int]
    ) -> list[Partition]:
        """Start the other partitions of a warp-specialised kernel."""
        workers = []
        p.meet()
        for i, (body, num_warps) in enumerate(zip(bodies, warps, strict=True)):
            worker = Partition(self.machine, f"partition{i}", num_warps, p.cta)
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
            p.learn(each.clock)
        p.meet()


def _warps_of(number: Any, type: Type | None, num_warps: int) -> dict[int, list[int]]:
    """Return which warps name which barrier."""
    if not isinstance(number, np.ndarray):
        return {int(number): list(range(num_warps))}
    assert type is not None
    assert type.shape is not None
    each = number.reshape(-1)[thread_elements(type.layout, type.shape, num_warps)]
    if each.shape[2] != 1 or (each != each[:, :1]).any():
        raise Unsupported("a named barrier whose number differs within a warp")
    found: dict[int, list[int]] = {}
    for warp, own in enumerate(each[:, 0, 0].tolist()):
        found.setdefault(own, []).append(warp)
    return found


def _passes(p: Partition, barrier: Barrier, phase: int) -> Callable[[], bool]:
    def passes() -> bool:
        p.reason = f"parity {phase & 1} of {barrier}"
        return barrier.has_passed(phase)

    return passes
