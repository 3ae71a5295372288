"""Asynchronous copies: TMA loads and stores, cp.async."""

from __future__ import annotations

from typing import Any

from mlakit.tools.emulator.barriers import WARP
from mlakit.tools.emulator.clusters import group
from mlakit.tools.emulator.dtypes import Array
from mlakit.tools.emulator.engines import Operation, Queue
from mlakit.tools.emulator.global_operations import GlobalOperations
from mlakit.tools.emulator.global_races import GlobalAccess
from mlakit.tools.emulator.machine import Coroutine, Partition
from mlakit.tools.emulator.memory import MemDesc
from mlakit.tools.emulator.races import Access
from mlakit.tools.emulator.synchronisation import Synchronisation
from mlakit.tools.emulator.tma import Descriptor, check_copy


class Copies(GlobalOperations, Synchronisation):
    """Copies between global and shared memory that complete later."""

    def tma_load(
        self,
        p: Partition,
        descriptor: Descriptor,
        at: list[int],
        tile: MemDesc,
        barrier: MemDesc,
        is_asked: bool,
        rows: Array | None = None,
        is_multicast: bool = False,
    ) -> Coroutine:
        """Start to load a tile; `barrier` counts its bytes. `rows` makes it a gather.

        With multicast the first of the CTAs that have copies loads for all of them, and the bytes
        count at the mbarrier of each: at the same address there, or at that of its pair.

        PTX, "cp.async.bulk.tensor" and "Asynchronous Operations" of the memory consistency model:
        the copy is ordered after prior instructions of its thread. Its complete-tx on the mbarrier
        is ordered after the writes of the copy alone, and not after what its thread did before, so
        a wait on the barrier learns of the tile and not of the issuer.
        """
        yield None
        if not is_asked:
            return
        check_copy(descriptor, at, tile, rows)
        copies = tile.copies if is_multicast else 0
        if p.cta & copies:
            return
        for cta in group(p.cta, copies):
            self._load_to(p, descriptor, at, tile.on(cta), barrier.on(cta & ~barrier.copies), rows)

    def _load_to(
        self,
        p: Partition,
        descriptor: Descriptor,
        at: list[int],
        tile: MemDesc,
        barrier: MemDesc,
        rows: Array | None,
    ) -> None:
        """Issue the load of what one CTA has of a tile."""
        machine, before = self.machine, barrier.allocation.barriers.get(barrier.first_byte)
        last = None if before is None else (before.agent, before.last_copy)
        on = self.barrier(p, barrier, last)
        time, phase = on.last_copy, on.phase
        access = Access(p.clock, p.where, on.agent, time, is_async=True, cta=p.cta)
        machine.check_write(tile, access)
        if machine.checks and machine.global_races.has_writes:
            index = descriptor.index(at, descriptor.block, rows)
            address, inside = descriptor.addresses(index, tile.part)
            self._check_global(p, address[inside], descriptor.size, on.agent, time, is_write=False)
        machine.issued[on.agent] = on.used[on.agent] = time

        def operation() -> None:
            tile.write(descriptor.tile(machine.memory, at, rows).reshape(tile.shape))
            on.clock.observe(on.agent, time)
            on.transfer(tile.size, phase)

        machine.loads.append(Operation(p.where, operation))

    def tma_store(
        self, p: Partition, descriptor: Descriptor, at: list[int], tile: MemDesc
    ) -> Coroutine:
        """Start to store a tile; `store_wait` says when it is complete."""
        yield None
        machine, queue = self.machine, p.stores
        check_copy(descriptor, at, tile)
        if p.cta & tile.copies:  # the first of the CTAs that have copies stores
            return
        machine.check_read(tile, p.queued(queue, is_async=True))
        if machine.checks:
            index = descriptor.index(at, descriptor.block)
            address, inside = descriptor.addresses(index, tile.part)
            agent, time = p.written, queue.issued + 1
            self._check_global(p, address[inside], descriptor.size, agent, time, is_write=True)
        queue.issue(lambda: descriptor.put(machine.memory, at, tile.read(), tile.part), p.where)

    def store_wait(self, p: Partition, pending: int, is_read: bool) -> Coroutine:
        """Wait until at most `pending` TMA stores are left.

        PTX, "cp.async.bulk.wait_group": with .read, which `is_read` says and is Gluon's default,
        the wait ends when the sources have been read. The tile may then be reused, and the writes
        to global memory are not known to be done: nothing in this CTA may read them. Without .read
        they have been made visible to the executing thread.
        """
        yield from self.drain(p, p.stores, pending)
        if not is_read:
            p.clock.observe(p.written, p.stores.issued - pending)

    def _check_global(
        self, p: Partition, addresses: Array, size: int, agent: int, time: int, *, is_write: bool
    ) -> None:
        access = GlobalAccess(
            addresses.ravel(), size, None, agent, time, p.clock, p.met, p.where, is_async=True
        )
        races = self.machine.global_races
        if is_write:
            races.write(access)
        else:
            races.read(access)

    def drain(self, p: Partition, queue: Queue, pending: int) -> Coroutine:
        """Wait until at most `pending` operations of a queue are left.

        wgmma.wait_group, cp.async.bulk.wait_group.read: groups complete in order, and what the
        complete ones did has happened before.
        """
        goal = queue.issued - pending
        p.reason = queue.name
        yield lambda: queue.done >= goal
        p.clock.observe(queue.agent, goal)

    def copy_async(
        self, p: Partition, pointer: Array, tile: MemDesc, mask: Any, other: Any
    ) -> Coroutine:
        """Start to copy elements (cp.async); they are written through the generic proxy."""
        yield None
        self.machine.check_write(tile, p.queued(p.copies, is_async=False))

        def operation() -> None:
            tile.write(self.load(pointer, mask, other, tile.kind))

        p.copies.issue(operation, p.where)

    def copy_arrive(self, p: Partition, barrier: MemDesc, increments: bool = False) -> Coroutine:
        """Arrive at an mbarrier once all copies of each thread so far are complete.

        cp.async.mbarrier.arrive.noinc; with `increments`, the form without .noinc, each arrival
        first adds itself to the count, so that the barrier's own count stays as it is.

        What the arrival publishes is the question of the gather path of `m64_bf16`. PTX, memory
        consistency model, "Asynchronous Operations": "The asynchronous mbarrier arrive-on operation
        performed by a cp.async.mbarrier.arrive instruction is ordered with respect to the memory
        operations performed by all prior cp.async operations initiated by the same thread, but not
        to those of any other instruction issued by the thread." So a wait on the barrier learns of
        the copies. It does not learn of what the issuing thread had waited for, nor of its own
        stores: the arrival is no part of the thread's program order, and causality order needs it
        to be. A kernel that hands an observation on needs an mbarrier.arrive of a thread itself,
        such as that of the warpgroup whose reads the producer has waited for.
        """
        yield None
        on, queue = self.barrier(p, barrier), p.copies
        number, threads = queue.issued + 1, p.num_warps * WARP
        on.used[queue.agent] = number
        if increments:
            on.pending += threads

        def operation() -> None:
            on.clock.observe(queue.agent, number)
            on.arrive(threads)

        queue.issue(operation, p.where, is_arrival=True)

    def commit_group(self, p: Partition) -> None:
        """End a group of copies (cp.async.commit_group)."""
        p.groups.append(p.copies.issued)

    def wait_groups(self, p: Partition, pending: int) -> Coroutine:
        """Wait for all groups of copies but the last `pending` (cp.async.wait_group).

        A thread waits for its own copies; the compiler adds the barrier of the partition's warps.
        """
        if len(p.groups) > pending:
            goal = p.groups[len(p.groups) - pending - 1]
            yield from self.drain(p, p.copies, p.copies.issued - goal)
