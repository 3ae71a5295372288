"""Operations of Blackwell's tensor memory and tensor cores: tcgen05."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mlakit.tools.emulator import dtypes
from mlakit.tools.emulator.barriers import Barrier
from mlakit.tools.emulator.clusters import group
from mlakit.tools.emulator.dtypes import Array
from mlakit.tools.emulator.faults import OutOfBounds
from mlakit.tools.emulator.layouts import LANE_BYTES, tensor_memory_columns
from mlakit.tools.emulator.machine import Coroutine, Partition
from mlakit.tools.emulator.memory import Allocation, MemDesc, as_peers
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
        base = lane * LANE_BYTES + column * COLUMN_BYTES

        def tiles() -> list[Allocation]:
            names = [self.machine.named_in(name, each.rank) for each in self.machine.ctas]
            memory = self.machine.tensor_memory
            found = [all.as_tenant(each) for all, each in zip(memory, names, strict=True)]
            for each in as_peers(found):
                tile = replace(whole_tile(each, type), base=base)
                each.shadow.is_initialised[tile.words()] = False
            return found

        tile = replace(whole_tile(self.machine.in_common(p.cta, name, tiles), type), base=base)
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
        is_pair: bool = False,
        is_multicast: bool = False,
    ) -> Coroutine:
        """Issue D = A B, plus D if `uses_d`, and commits to barriers.

        PTX, "tcgen05.mma": operands in shared memory are read through the asynchronous proxy.
        "tcgen05, Pipelined Instructions": products of a thread execute in order. With .cta_group::2
        the even CTA of a pair issues it, and it reads and writes the memory of both.
        """
        yield None
        ranks = _pair(p, is_pair)
        if not is_asked or not ranks:
            return
        queue, check = p.tensor, self.machine
        own = p.queued(queue, is_async=False, in_order=True)
        for cta in ranks:
            in_shared_memory = p.queued(queue, is_async=True, in_order=True)
            check.check_read(a.on(cta), own if in_tensor_memory else in_shared_memory)
            check.check_read(b.on(cta), in_shared_memory)
            if uses_d:
                check.check_read(d.on(cta), own)
            check.check_write(d.on(cta), own)

        def operation() -> None:
            left, right = _values(a, ranks), _values(b, ranks)
            product = exact_product(left, right, _values(d, ranks) if uses_d else None)
            for cta in ranks:
                d.on(cta).write(product)

        queue.issue(operation, p.where)
        for barrier, is_on in barriers:
            if is_on:
                self.commit(p, barrier, is_pair, [a, b] if is_multicast else [])

    def commit(
        self,
        p: Partition,
        barrier: MemDesc,
        is_pair: bool = False,
        tiles: Sequence[MemDesc] = (),
    ) -> None:
        """Arrive at an mbarrier when all operations so far are complete.

        PTX, "tcgen05.commit": the mbarrier tracks the prior asynchronous tcgen05 operations of the
        thread. The arrival publishes them, and not what the thread did itself. With multicast it is
        signalled at the same address in each CTA of a mask.

        tiles  whose copies in other CTAs the operations have read, or none: these CTAs are told
        """
        if not _pair(p, is_pair):
            return
        queue = p.tensor
        number, last = queue.issued, queue.last
        shared = [each.copies for each in tiles if "tensor_memory" not in each.layout] or [0]
        targets = {each for bits in shared for each in group(p.cta, bits | is_pair)}
        for cta in sorted(targets):
            on = self.barrier(p, barrier.on(cta), (queue.agent, last))
            queue.issue(partial(_arrive, on, queue.agent, number), p.where, is_arrival=True)

    def copy_to_tensor_memory(
        self, p: Partition, source: MemDesc, target: MemDesc, is_pair: bool = False
    ) -> Coroutine:
        """Issue a copy of a plain tile to tensor memory (tcgen05.cp)."""
        yield None
        queue = p.tensor
        for cta in _pair(p, is_pair):
            here, there = source.on(cta), target.on(cta)
            self.machine.check_read(here, p.queued(queue, is_async=True, in_order=True))
            self.machine.check_write(there, p.queued(queue, is_async=False, in_order=True))
            write = partial(_copy, here, there)
            queue.issue(write, p.where)


def _pair(p: Partition, is_pair: bool) -> list[int]:
    """Return the CTAs that an operation works for; none in a CTA that does not issue it."""
    if not is_pair:
        return [p.cta]
    return [] if p.cta & 1 else [p.cta, p.cta | 1]


def _values(tile: MemDesc, ranks: Sequence[int]) -> Array:
    """Return a tile's values in the memories of some CTAs."""
    values = tile.on(ranks[0]).read()
    for cta in ranks[1:]:
        part = tile.on(cta).part
        values = values if part is None else np.where(part, tile.on(cta).read(), values)
    return values


def _arrive(on: Barrier, agent: int, number: int) -> None:
    on.clock.observe(agent, number)
    on.arrive()


def _copy(source: MemDesc, target: MemDesc) -> None:
    target.write(source.read().reshape(target.shape))
