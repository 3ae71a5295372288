"""Operations on shared memory: allocations, views of tiles, loads and stores of threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mlakit.tools.emulator import dtypes
from mlakit.tools.emulator.clusters import held_by, holders, local_shape
from mlakit.tools.emulator.dtypes import Array
from mlakit.tools.emulator.engines import AsyncTensor
from mlakit.tools.emulator.faults import OutOfBounds
from mlakit.tools.emulator.layouts import tensor_memory_columns
from mlakit.tools.emulator.machine import Coroutine, Machine, Partition
from mlakit.tools.emulator.memory import Allocation, MemDesc
from mlakit.tools.emulator.types import Type


class SharedOperations:
    """Tiles of shared memory. A view is a record; only loads and stores touch bytes."""

    machine: Machine

    def allocate(self, p: Partition, type: Type, name: str, value: Any = None) -> MemDesc:
        """Allocate a tile, and store `value` to it if there is one."""
        size = int(np.prod(local_shape(type.layout, type.shape)))
        size *= dtypes.element_size(type.pointee)
        each = self.machine.in_common(p.cta, name, lambda: self.machine.of_each_cta(size, name))
        tile = whole_tile(each, type)
        if value is not None:
            self.machine.check_write(tile, p.access())
            tile.write(value)
        return tile

    def index(self, tile: MemDesc, at: int, type: Type) -> MemDesc:
        """Return one of the tiles along the first dimension."""
        shape = shape_of(type)
        size = int(np.prod(local_shape(type.layout, shape))) * dtypes.element_size(type.pointee)
        if "tensor_memory" in type.space:
            size = tensor_memory_columns(type.layout, shape, dtypes.BITS[type.pointee])
        if not 0 <= at < tile.shape[0]:
            raise OutOfBounds(f"index {at} into {tile.shape} of {tile.allocation.name}")
        return MemDesc(
            tile.allocation, tile.base + at * size, shape, type.pointee, type.layout, type.alloc,
            (0,) * len(shape),
        )  # fmt: skip

    def subslice(self, tile: MemDesc, at: list[int], type: Type) -> MemDesc:
        """Return a part of a tile that begins at `at`."""
        first = tuple(a + b for a, b in zip(tile.first, at, strict=True))
        shape = shape_of(type)
        if any(a + n > limit for a, n, limit in zip(first, shape, tile.alloc, strict=True)):
            raise OutOfBounds(f"{shape} at {first} of {tile.alloc} of {tile.allocation.name}")
        return MemDesc(
            tile.allocation, tile.base, shape, type.pointee, type.layout, tile.alloc, first
        )

    def transpose(self, tile: MemDesc, order: list[int], type: Type) -> MemDesc:
        """Return a tile with its dimensions in another order."""
        alloc, first = (tuple(each[i] for i in order) for each in (tile.alloc, tile.first))
        return MemDesc(
            tile.allocation, tile.base, shape_of(type), type.pointee, type.layout, alloc, first
        )

    def reinterpret(self, tile: MemDesc, type: Type) -> MemDesc:
        """Return the bytes of a tile as another type, shape and layout."""
        base = tile.first_byte if any(tile.first) else tile.base
        shape = shape_of(type)
        return MemDesc(
            tile.allocation, base, shape, type.pointee, type.layout, shape, (0,) * len(shape)
        )

    def local_load(self, p: Partition, tile: MemDesc, type: Type) -> Coroutine:
        """Load a tile to registers, each CTA the elements that it holds."""
        yield None
        out: Any = None
        for part, some in self._parts(p, tile, type):
            self.machine.check_read(part, p.access(), some)
            values = part.read(some)
            out = values if out is None or some is None else np.where(some, values, out)
        return out

    def local_store(self, p: Partition, value: Any, tile: MemDesc, type: Type) -> Coroutine:
        """Store registers to a tile, each CTA the elements that it holds."""
        if isinstance(value, AsyncTensor):
            value.used()
        yield None
        for part, some in self._parts(p, tile, type):
            self.machine.check_write(part, p.access(), some)
            part.write(value, some)

    def _parts(
        self, p: Partition, tile: MemDesc, type: Type
    ) -> Iterator[tuple[MemDesc, Array | None]]:
        """Yield the CTAs' parts of a tile, and the elements there that this CTA's registers hold.

        A tile that lies in a peer's memory is accessed there, by ld.shared::cluster and the like.
        """
        if self.machine.num_ctas == 1:
            yield tile, None
            return
        owner, copies = holders(tile.layout, tile.alloc, tile.shape, tile.first)
        place, mine = owner | (p.cta & copies), held_by(type, p.cta)
        for cta in np.unique(place[mine]).tolist():
            yield tile.on(cta), mine & (place == cta)


def shape_of(type: Type) -> tuple[int, ...]:
    """Return the shape of a tile's or tensor's type."""
    assert type.shape is not None, type
    return type.shape


def whole_tile(allocation: Allocation, type: Type) -> MemDesc:
    """Return the tile of a type that begins where its allocation does."""
    shape = shape_of(type)
    return MemDesc(allocation, 0, shape, type.pointee, type.layout, type.alloc, (0,) * len(shape))
