"""Layouts: which thread has which element of a tensor, and where an element of a tile is in memory.

Threads         blocked, slice, linear, nvidia_mma (wgmma), dot_op layouts, as bases of registers,
                lanes and warps: the element of a register is the exclusive or of the bases of the
                bits of its number, and likewise for lanes and warps (Triton's linear layouts)
Shared memory   nvmma_shared, swizzled_shared and shared_linear layouts: offsets of elements
Tensor memory   tensor_memory_encoding: 128 lanes of 512 columns of 32 bits
Clusters        offsets are in the memory of the CTA that has the element (`clusters`)

Values of the emulator are whole tensors, so that most operations need no layout. Inline assembly
needs to know what a thread holds. Shared memory needs the place of bytes, since kernels reinterpret
tiles as other types and shapes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import TypeAlias

import numpy as np

from mlakit.tools.emulator.clusters import local_shape
from mlakit.tools.emulator.dtypes import Array
from mlakit.tools.emulator.ir import Unsupported
from mlakit.tools.emulator.scanning import split_top

Basis: TypeAlias = list[int]  # a step in each dimension
Bases: TypeAlias = tuple[list[Basis], list[Basis], list[Basis]]  # of registers, lanes, warps

LANES = 32
TENSOR_LANES = 128
LANE_BYTES = 512 * 4  # of tensor memory: 512 columns
SWIZZLE_VECTOR = 128  # bits that a swizzle moves together


def attributes(layout: str) -> dict[str, str]:
    """Return the members of `#ttg.x<{a = 1, b = [..]}>`."""
    inside = layout[layout.index("{") + 1 : layout.rindex("}")]
    pairs = (each.split("=", 1) for each in split_top(inside, ",") if "=" in each)
    return {name.strip(): value.strip() for name, value in pairs}


def _ints(text: str) -> list[int]:
    return [int(each) for each in re.findall(r"-?\d+", text)]


def _bases(text: str) -> list[Basis]:
    """Return the bases of `[[0, 1], [8, 0]]`."""
    return [_ints(each) for each in re.findall(r"\[([-\d, ]+)\]", text)]


def _log2(size: int) -> int:
    return size.bit_length() - 1


# ---------------------------------------------------------- threads


@lru_cache(maxsize=4096)
def thread_elements(layout: str, shape: tuple[int, ...], num_warps: int) -> Array:
    """Return [warps, lanes, registers]: the flat index of the element in each register."""
    registers, lanes, warps = _distributed(layout, shape)
    nowhere = [0] * len(shape)
    lanes = [*lanes, *[nowhere] * _log2(LANES)][: _log2(LANES)]
    warps = [*warps, *[nowhere] * (_log2(num_warps) - len(warps))]
    elements = np.zeros((1, len(shape)), np.int64)
    for basis in (*registers, *lanes, *warps):  # slower and slower
        elements = np.concatenate([elements, elements ^ np.asarray(basis)])
    flat = np.ravel_multi_index(tuple(elements.T), shape)
    return flat.reshape(1 << len(warps), LANES, 1 << len(registers))


def _distributed(layout: str, shape: tuple[int, ...]) -> Bases:
    """Return the bases of a layout, for a tensor of this shape."""
    found = attributes(layout)
    if layout.startswith("#ttg.linear"):
        return _fit(
            (_bases(found["register"]), _bases(found["lane"]), _bases(found["warp"])), shape
        )
    if layout.startswith("#ttg.blocked"):
        return _fit(_blocked(found), shape, _ints(found["order"]))
    if layout.startswith("#ttg.slice"):
        return _slice(found, shape)
    if layout.startswith("#ttg.nvidia_mma") and found["versionMajor"] == "3":
        return _fit(_wgmma(found), shape)
    if layout.startswith("#ttg.dot_op") and found["opIdx"] == "0":
        return _fit(_wgmma_operand(found), shape)
    raise Unsupported(f"the threads of layout {layout}")


def _blocked(found: dict[str, str]) -> Bases:
    order = _ints(found["order"])
    reached = [1] * len(order)

    def bases(sizes: list[int]) -> list[Basis]:
        group: list[Basis] = []
        for dim in order:
            for _ in range(_log2(sizes[dim])):
                group.append(_step(len(order), dim, reached[dim]))
                reached[dim] *= 2
        return group

    registers = bases(_ints(found["sizePerThread"]))
    lanes = bases(_ints(found["threadsPerWarp"]))
    return registers, lanes, bases(_ints(found["warpsPerCTA"]))


def _slice(found: dict[str, str], shape: tuple[int, ...]) -> Bases:
    """The layout of a tensor without one of the dimensions of its parent's."""
    dim = int(found["dim"])
    parent = _distributed(found["parent"], (*shape[:dim], 1, *shape[dim:]))
    registers, lanes, warps = (
        [basis[:dim] + basis[dim + 1 :] for basis in group] for group in parent
    )
    # registers that differ only in the sliced dimension hold the same element
    return [basis for basis in registers if any(basis)], lanes, warps


def _wgmma(found: dict[str, str]) -> Bases:
    """The accumulator of wgmma: a warp has 16 rows, and a thread two columns of every eight."""
    n = _ints(found["instrShape"])[1]
    warps_m, warps_n = _ints(found["warpsPerCTA"])
    registers = [[0, 1], [8, 0], *([0, 8 << i] for i in range(_log2(n // 8)))]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    rows = [[16 << i, 0] for i in range(_log2(warps_m))]
    columns = [[0, n << i] for i in range(_log2(warps_n))]
    return registers, lanes, rows + columns


def _wgmma_operand(found: dict[str, str]) -> Bases:
    """The first operand of wgmma in registers: `kWidth` columns of a row are consecutive."""
    k_width = int(found["kWidth"])
    _, _, rows = _wgmma(attributes(found["parent"]))
    registers = [*([0, 1 << i] for i in range(_log2(k_width))), [8, 0], [0, 4 * k_width]]
    lanes = [[0, k_width], [0, 2 * k_width], [1, 0], [2, 0], [4, 0]]
    return registers, lanes, [basis if basis[0] else [0, 0] for basis in rows]


def _fit(each: Bases, shape: tuple[int, ...], order: Sequence[int] = ()) -> Bases:
    """Fit bases to a shape.

    Steps outside of the shape are zeros: threads have copies. What no basis reaches is in further
    registers, first along the dimension that is first in `order`, which is the last one by default.
    """
    registers, lanes, warps = (
        [
            [step if step < size else 0 for step, size in zip(basis, shape, strict=True)]
            for basis in group
        ]
        for group in each
    )
    registers = [basis for basis in registers if any(basis)]
    reached = [1] * len(shape)
    for basis in (*registers, *lanes, *warps):
        for dim, step in enumerate(basis):
            reached[dim] = max(reached[dim], step * 2)
    for dim in order or reversed(range(len(shape))):
        while reached[dim] < shape[dim]:
            registers.append(_step(len(shape), dim, reached[dim]))
            reached[dim] *= 2
    return registers, lanes, warps


def _step(rank: int, dim: int, size: int) -> Basis:
    basis = [0] * rank
    basis[dim] = size
    return basis


# ---------------------------------------------------------- shared memory


@lru_cache(maxsize=4096)
def offsets(
    layout: str, alloc: tuple[int, ...], shape: tuple[int, ...], first: tuple[int, ...], bits: int
) -> Array:
    """Return the offset of each element of a tile, in elements from the start of its allocation.

    alloc  the shape that the layout is of
    shape  of the tile
    first  where the tile begins in `alloc`
    bits   of an element
    """
    alloc = local_shape(layout, alloc)
    ranges = [
        (np.arange(n, dtype=np.int64) + at) % size
        for n, at, size in zip(shape, first, alloc, strict=True)
    ]
    index: list[Array] = list(np.meshgrid(*ranges, indexing="ij"))
    if layout.startswith("#ttng.tensor_memory_encoding"):
        if any(first[:-2]):
            raise Unsupported(f"a slice of several tiles of tensor memory: {first}")
        return np.ascontiguousarray(_tensor_memory(layout, alloc[-2:], index[-2:], bits))
    found = attributes(layout)
    if layout.startswith("#ttg.nvmma_shared"):
        rank = int(found.get("rank", "2").split(":")[0])
        offset = _nvmma(found, alloc[-rank:], index[-rank:], bits)
    elif layout.startswith("#ttg.swizzled_shared"):
        rank = len(_ints(found["order"]))
        offset = _swizzled(found, alloc[-rank:], index[-rank:])
    elif layout.startswith("#ttg.shared_linear"):
        rank = len(alloc)
        offset = _shared_linear(found, alloc, index)
    else:
        raise Unsupported(f"shared layout {layout}")
    # tiles of the leading dimensions, such as the stages of a pipeline, follow each other
    size = prod(alloc[len(alloc) - rank :])
    for dim in reversed(range(len(shape) - rank)):
        offset = offset + index[dim] * size
        size *= alloc[dim]
    return np.ascontiguousarray(offset)


def _nvmma(found: dict[str, str], shape: Sequence[int], index: list[Array], bits: int) -> Array:
    """The layout of TMA and wgmma: rows of `swizzlingByteWidth` bytes, swizzled by 16 bytes."""
    if found["transposed"] == "true":  # the first dimension is the contiguous one
        index, shape = [*index[1:], index[0]], (*shape[1:], shape[0])
    swizzle = int(found["swizzlingByteWidth"])
    row: Array = np.zeros_like(index[0])
    for each, size in zip(index[:-1], shape[:-1], strict=True):
        row = row * size + each
    column = index[-1]
    if swizzle == 0:
        return np.asarray(row * shape[-1] + column)
    rows = prod(shape[:-1])
    width = swizzle * 8 // bits  # elements of a row of a swizzled tile
    phase = (row // (128 // swizzle)) % (swizzle // 16)
    within = (column % width) ^ (phase * (SWIZZLE_VECTOR // bits))
    return np.asarray((column // width) * rows * width + row * width + within)


def _swizzled(found: dict[str, str], shape: Sequence[int], index: list[Array]) -> Array:
    order = _ints(found["order"])
    vec, per_phase, max_phase = (int(found[name]) for name in ("vec", "perPhase", "maxPhase"))
    index = list(index)
    if len(order) >= 2 and max_phase > 1:
        fast, slow = order[0], order[1]
        phase = (index[slow] // per_phase) % max_phase
        index[fast] = index[fast] ^ (phase * vec)
    offset: Array = np.zeros_like(index[0])
    stride = 1
    for dim in order:
        offset = offset + index[dim] * stride
        stride *= shape[dim]
    return offset


def _shared_linear(found: dict[str, str], shape: tuple[int, ...], index: list[Array]) -> Array:
    places = np.zeros((1, len(shape)), np.int64)
    for basis in _bases(found["offset"]):
        places = np.concatenate([places, places ^ np.asarray(basis)])
    offset = np.empty(shape, np.int64)
    offset[tuple(places.T)] = np.arange(len(places))
    return np.asarray(offset[tuple(index)])


# ---------------------------------------------------------- tensor memory


def tensor_memory_columns(layout: str, shape: tuple[int, ...], bits: int) -> int:
    """Return the bytes per lane of a tile [M, N], or of several of them."""
    found = _tensor_memory_attributes(layout)
    m, n = local_shape(layout, shape)[-2:]
    rows = 128 if found["blockM"] == 128 or m > 64 else 64
    per_tile = max(m // rows, 1) * n * found["colStride"] * bits // 8
    return per_tile * prod(shape[:-2])


def _tensor_memory(layout: str, shape: Sequence[int], index: list[Array], bits: int) -> Array:
    """Offsets by lane, in the tensor memory of one CTA."""
    found = _tensor_memory_attributes(layout)
    (m, n), (row, column) = shape, index
    block_n = min(found["blockN"], n)
    tile_m, tile_n = row // 128, column // block_n
    if found["blockM"] == 128:
        lane = row % 128
    elif m > 64:  # two blocks of 64 rows, each in half of the lanes
        lane = row % 16 + 16 * (row // 64 % 2) + (row % 64 // 16) * 32
    else:  # 64 rows: every other block of columns is in the other half of the lanes
        lane = row % 16 + 16 * (tile_n % 2) + (row % 64 // 16) * 32
        tile_n = tile_n // 2
    position = column % block_n + block_n * (tile_m + max(m // 128, 1) * tile_n)
    return np.asarray(lane * (LANE_BYTES * 8 // bits) + position * found["colStride"])


def _tensor_memory_attributes(layout: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+) = (\d+)", layout)}
