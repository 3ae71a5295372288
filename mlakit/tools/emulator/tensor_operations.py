"""Operations of Blackwell's tensor memory and tensor cores: tcgen05."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlakit.tools.emulator import dtypes
from mlakit.tools.emulator.faults import OutOfBounds
from mlakit.tools.emulator.layouts import LANE_BYTES, tensor_memory_columns
from mlakit.tools.emulator.machine import Coroutine, Partition
from mlakit.tools.emulator.memory import MemDesc
from mlakit.tools.emulator.products import exact_product
from mlakit.tools.emulator.shared_operations import shape_of, whole_tile
from mlakit.tools.emulator.synchronisation import Synchronisation
from mlakit.tools.emulator.types import Type

TENSOR_COLUMNS = 512
COLUMN_BYTES = 4


class TensorOperations(Synchronisation):
    """tcgen05: products and copies of a partition complete in order."""

    def allocate_tensor_memory(
        self, p: Partition, type: Type, name: str, lane: int, column: int, value: Any = None
    ) -> MemDesc:
        """Return a tile at its place in tensor memory, of which an SM has 512 columns.

        Triton allocates all columns at once, and gives those of a tile that is used no more to
        another one. So what the tile's words were used for before must have happened before, and
        none of them has been written for this tile.
        """
        bits = dtypes.BITS[type.pointee]
        columns = column + tensor_memory_columns(type.layout, shape_of(type), bits) // COLUMN_BYTES
        if columns > TENSOR_COLUMNS:
            raise OutOfBounds(
                f"a CTA must use at most {TENSOR_COLUMNS} columns of tensor memory, got {columns}"
            )
        whole = whole_tile(self.machine.tensor_memory.as_tenant(name), type)
        tile = replace(whole, base=lane * LANE_BYTES + column * COLUMN_BYTES)
        tile.allocation.shadow.is_initialised[tile.words()] = False
        if value is not None:
            self.machine.check_write(tile, p.access())
            tile.write(value)
        return tile

    def tmem_load(self, p: Partition, tile: MemDesc) -> Coroutine:
        """Load a tile of tensor memory to registers (tcgen05.ld and its wait)."""
        yield None
        self.machine.check_read(tile, p.access())
        return tile.read()

    def tmem_store(self, p: Partition, value: Any, tile: MemDesc, is_asked: bool) -> Coroutine:
        """Store registers to tensor memory (tcgen05.st and its wait)."""
        yield None
        if is_asked:
            self.machine.check_write(tile, p.access())
            tile.write(value)

    def mma(
        self,
        p: Partition,
        a: MemDesc,
        b: MemDesc,
        d: MemDesc,
        uses_d: bool,
        is_asked: bool,
        barriers: list[tuple[MemDesc, bool]],
        in_tensor_memory: bool,
    ) -> Coroutine:
        """Issue D = A B, plus D if `uses_d`, and commits to barriers.

        PTX, "tcgen05.mma": operands in shared memory are read through the asynchronous proxy.
        "tcgen05, Pipelined Instructions": products of a thread execute in order.
        """
        yield None
        if not is_asked:
            return
        queue, check = p.tensor, self.machine
        check.check_read(a, p.queued(queue, is_async=not in_tensor_memory, in_order=True))
        check.check_read(b, p.queued(queue, is_async=True, in_order=True))
        own = p.queued(queue, is_async=False, in_order=True)
        if uses_d:
            check.check_read(d, own)
        check.check_write(d, own)

        def operation() -> None:
            d.write(exact_product(a.read(), b.read(), d.read() if uses_d else None))

        queue.issue(operation, p.where)
        for barrier, is_on in barriers:
            if is_on:
                self.commit(p, barrier)

    def commit(self, p: Partition, barrier: MemDesc) -> None:
        """Arrive at an mbarrier when all operations so far are complete.

        PTX, "tcgen05.commit": the mbarrier tracks the prior asynchronous tcgen05 operations of the
        thread. The arrival publishes them, and not what the thread did itself.
        """
        on, queue = self.barrier(p, barrier), p.tensor
        number = queue.issued

        def operation() -> None:
            on.clock.observe(queue.agent, number)
            on.arrive()

        queue.issue(operation, p.where, is_arrival=True)

    def copy_to_tensor_memory(self, p: Partition, source: MemDesc, target: MemDesc) -> Coroutine:
        """Issue a copy of a plain tile to tensor memory (tcgen05.cp)."""
        yield None
        queue = p.tensor
        self.machine.check_read(source, p.queued(queue, is_async=True, in_order=True))
        self.machine.check_write(target, p.queued(queue, is_async=False, in_order=True))
        queue.issue(lambda: target.write(source.read().reshape(target.shape)), p.where)
