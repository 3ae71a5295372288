"""Operations on shared memory: allocations, views of tiles, loads and stores of threads."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlakit.tools.emulator import dtypes
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
        shape = shape_of(type)
        size = int(np.prod(shape)) * dtypes.element_size(type.pointee)
        tile = whole_tile(Allocation(size, name), type)
        if value is not None:
            self.machine.check_write(tile, p.access())
            tile.write(value)
        return tile

    def index(self, tile: MemDesc, at: int, type: Type) -> MemDesc:
        """Return one of the tiles along the first dimension."""
        shape = shape_of(type)
        size = int(np.prod(shape)) * dtypes.element_size(type.pointee)
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

    def local_load(self, p: Partition, tile: MemDesc) -> Coroutine:
        """Load a tile to registers."""
        yield None
        self.machine.check_read(tile, p.access())
        return tile.read()

    def local_store(self, p: Partition, value: Any, tile: MemDesc) -> Coroutine:
        """Store registers to a tile."""
        if isinstance(value, AsyncTensor):
            value.used()
        yield None
        self.machine.check_write(tile, p.access())
        tile.write(value)


def shape_of(type: Type) -> tuple[int, ...]:
    """Return the shape of a tile's or tensor's type."""
    assert type.shape is not None, type
    return type.shape


def whole_tile(allocation: Allocation, type: Type) -> MemDesc:
    """Return the tile of a type that begins where its allocation does."""
    shape = shape_of(type)
    return MemDesc(allocation, 0, shape, type.pointee, type.layout, type.alloc, (0,) * len(shape))
