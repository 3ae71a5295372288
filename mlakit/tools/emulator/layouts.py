"""Which thread has which element of a tensor; where an element of a tile is in shared memory.

Values are whole tensors, so most operations need no layout. Inline assembly needs to know what a
thread holds, shared memory where bytes are: kernels reinterpret tiles as other types and shapes.
"""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np

from mlakit.tools.emulator.scanning import split_top


def attributes(text: str) -> dict[str, str]:
    """Members of `#ttg.x<{a = 1, b = [..]}>`."""
    inside = text[text.index("{") + 1 : text.rindex("}")]
    pairs = (each.split("=", 1) for each in split_top(inside, ",") if "=" in each)
    return {name.strip(): value.strip() for name, value in pairs}


def ints(text: str) -> list[int]:
    return [int(each) for each in re.findall(r"-?\d+", text)]


def bases(text: str) -> list[list[int]]:
    return [ints(each) for each in re.findall(r"\[([-\d, ]+)\]", text)]


# ------------------------------------------------------------------ threads


@lru_cache(maxsize=4096)
def thread_elements(layout: str, shape: tuple[int, ...], num_warps: int) -> np.ndarray:
    """[warps, 32 lanes, registers]: the flat index of the element in each register."""
    registers, lanes, warps = _distributed(layout, shape, num_warps)
    lanes = (lanes + [[0] * len(shape)] * 5)[:5]
    while 1 << len(warps) < num_warps:
        warps = warps + [[0] * len(shape)]
    total = np.zeros((1, len(shape)), np.int64)
    for group in (registers, lanes, warps):  # slower and slower
        for base in group:
            total = np.concatenate([total, total ^ np.asarray(base)])
    flat = np.ravel_multi_index(tuple(total.T), shape)
    return flat.reshape(1 << len(warps), 32, 1 << len(registers))


def _distributed(layout: str, shape: tuple[int, ...], num_warps: int) -> tuple[list, list, list]:
    """Bases of registers, lanes and warps."""
    if layout.startswith("#ttg.linear"):
        found = attributes(layout)
        each = bases(found["register"]), bases(found["lane"]), bases(found["warp"])
        return _fit(each, shape)
    if layout.startswith("#ttg.blocked"):
        found = attributes(layout)
        order = ints(found["order"])
        sizes = [ints(found[name]) for name in ("sizePerThread", "threadsPerWarp", "warpsPerCTA")]
        return _fit(_blocked(sizes, order), shape)
    if layout.startswith("#ttg.slice"):
        found = attributes(layout)
        dim = int(found["dim"])
        parent = shape[:dim] + (1,) + shape[dim:]
        each = _distributed(found["parent"], parent, num_warps)
        registers, lanes, warps = (
            [base[:dim] + base[dim + 1 :] for base in group] for group in each
        )
        # registers that differ only in the sliced dimension are the same element
        return [base for base in registers if any(base)], lanes, warps
    if layout.startswith("#ttg.nvidia_mma"):
        found = attributes(layout)
        _, n, _ = ints(found["instrShape"])[-3:]
        warps = ints(found["warpsPerCTA"])
        registers = [[0, 1], [8, 0]] + [[0, 8 << i] for i in range((n // 8).bit_length() - 1)]
        lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
        of_warps, row = [], 16
        for i in range(warps[0].bit_length() - 1):
            of_warps.append([row << i, 0])
        for i in range(warps[1].bit_length() - 1):
            of_warps.append([0, n << i])
        return _fit((registers, lanes, of_warps), shape)
    raise NotImplementedError(f"threads of {layout}")


def _blocked(sizes: list[list[int]], order: list[int]) -> tuple[list, list, list]:
    rank, reached, groups = len(order), [1] * len(order), []
    for size in sizes:
        group = []
        for dim in order:
            for _ in range(size[dim].bit_length() - 1):
                base = [0] * rank
                base[dim] = reached[dim]
                reached[dim] *= 2
                group.append(base)
        groups.append(group)
    return groups[0], groups[1], groups[2]


def _fit(each: tuple[list, list, list], shape: tuple[int, ...]) -> tuple[list, list, list]:
    """Bases outside of the shape are zeros; what no base reaches is in further registers."""
    registers, lanes, warps = ([list(base) for base in group] for group in each)
    reached = [1] * len(shape)
    for group in (registers, lanes, warps):
        for base in group:
            for dim, step in enumerate(base):
                if step >= shape[dim]:
                    base[dim] = 0
                elif step:
                    reached[dim] = max(reached[dim], step * 2)
    registers = [base for base in registers if any(base)]
    for dim in reversed(range(len(shape))):
        step = reached[dim]
        while step < shape[dim]:
            base = [0] * len(shape)
            base[dim] = step
            registers.append(base)
            step *= 2
    return registers, lanes, warps


# ------------------------------------------------------------------ shared memory


@lru_cache(maxsize=4096)
def offsets(
    layout: str, alloc: tuple[int, ...], shape: tuple[int, ...], first: tuple[int, ...], bits: int
) -> np.ndarray:
    """Offsets, in elements from the start of the allocation, of the elements of a tile `shape` that
    begins at `first`."""
    where = np.meshgrid(
        *(np.arange(n, dtype=np.int64) + at for n, at in zip(shape, first, strict=True)),
        indexing="ij",
    )
    if layout.startswith("#ttng.tensor_memory_encoding"):
        lead, inner = where[:-2], alloc[-2:]
        offset = _tensor_memory(layout, inner, where[-2:], bits)
        for dim in reversed(range(len(lead))):
            assert not lead[dim].any()  # indexed, not sliced
        return np.ascontiguousarray(offset)
    found = attributes(layout)
    if layout.startswith("#ttg.nvmma_shared"):
        rank = int(found["rank"].split(":")[0]) if "rank" in found else 2
        lead, where = where[: len(shape) - rank], where[len(shape) - rank :]
        inner = alloc[len(shape) - rank :]
        offset = _nvmma(found, inner, where, bits)
    elif layout.startswith("#ttg.swizzled_shared"):
        order = ints(found["order"])
        rank = len(order)
        lead, where = where[: len(shape) - rank], where[len(shape) - rank :]
        inner = alloc[len(shape) - rank :]
        offset = _swizzled(found, order, inner, where)
    elif layout.startswith("#ttg.shared_linear"):
        lead, inner = [], alloc
        table = np.zeros(1, np.int64)
        place = np.zeros((1, len(alloc)), np.int64)
        for i, base in enumerate(bases(found["offset"])):
            place = np.concatenate([place, place ^ np.asarray(base)])
            table = np.concatenate([table, table + (1 << i)])
        at = np.empty(alloc, np.int64)
        at[tuple(place.T)] = table
        offset = at[tuple(where)]
    else:
        raise NotImplementedError(f"shared layout {layout}")
    size = int(np.prod(inner))
    for dim in reversed(range(len(lead))):
        offset = offset + lead[dim] * size
        size *= alloc[dim]
    return np.ascontiguousarray(offset)


def _nvmma(found: dict[str, str], inner: tuple[int, ...], where: list, bits: int) -> np.ndarray:
    is_transposed = found["transposed"] == "true"
    if is_transposed:  # the first dimension is the contiguous one
        where, inner = [*where[1:], where[0]], (*inner[1:], inner[0])
    swizzle = int(found["swizzlingByteWidth"])
    row = np.zeros_like(where[0])
    for index, size in zip(where[:-1], inner[:-1], strict=True):
        row = row * size + index
    column, columns = where[-1], inner[-1]
    if swizzle == 0:
        return row * columns + column
    rows = int(np.prod(inner[:-1]))
    wide, vector = swizzle * 8 // bits, 128 // bits  # elements of a tile's row, of 16 bytes
    per_phase, max_phase = 128 // swizzle, swizzle // 16
    tile, within = column // wide, column % wide
    phase = (row // per_phase) % max_phase
    return tile * rows * wide + row * wide + (within ^ (phase * vector))


def _swizzled(
    found: dict[str, str], order: list[int], inner: tuple[int, ...], where: list
) -> np.ndarray:
    vec, per_phase, max_phase = (int(found[name]) for name in ("vec", "perPhase", "maxPhase"))
    index = list(where)
    if len(order) >= 2 and max_phase > 1:
        fast, slow = order[0], order[1]
        phase = (index[slow] // per_phase) % max_phase
        index[fast] = index[fast] ^ (phase * vec)
    offset, stride = np.zeros_like(where[0]), 1
    for dim in order:
        offset = offset + index[dim] * stride
        stride *= inner[dim]
    return offset


# ------------------------------------------------------------------ tensor memory

LANE_BYTES = 512 * 4  # 128 lanes of 512 columns


def cta_split(layout: str) -> tuple[int, int]:
    """How many CTAs of a cluster share the rows and the columns of a tile."""
    found = re.search(r"CGALayout = (\[\[.*?\]\])", layout)
    rows = columns = 1
    for base in bases(found.group(1)) if found else []:
        rows *= 2 if base[0] else 1
        columns *= 2 if len(base) > 1 and base[1] else 1
    return rows, columns


def tensor_memory_columns(layout: str, shape: tuple[int, ...], bits: int) -> int:
    """Bytes per lane of a tile [M, N], or of several of them."""
    found = dict(re.findall(r"(\w+) = (\d+)", layout))
    ctas = cta_split(layout)
    shape = (*shape[:-2], shape[-2] // ctas[0], shape[-1] // ctas[1])
    rows = 128 if int(found["blockM"]) == 128 or shape[-2] > 64 else 64
    per_tile = max(shape[-2] // rows, 1) * shape[-1] * int(found["colStride"]) * bits // 8
    return per_tile * int(np.prod(shape[:-2]))


def _tensor_memory(layout: str, inner: tuple[int, ...], where: list, bits: int) -> np.ndarray:
    """Lane major; the lanes of a second CTA follow those of the first."""
    found = dict(re.findall(r"(\w+) = (\d+)", layout))
    ctas = cta_split(layout)
    inner = (inner[0] // ctas[0], inner[1] // ctas[1])
    cta = where[0] // inner[0] + ctas[0] * (where[1] // inner[1])
    where = [where[0] % inner[0], where[1] % inner[1]]
    block_m, stride = int(found["blockM"]), int(found["colStride"])
    block_n = min(int(found["blockN"]), inner[1])
    row, column = where
    if block_m == 128:
        lane, tile_m, reps_m = row % 128, row // 128, max(inner[0] // 128, 1)
        tile_n = column // block_n
    else:
        half = (row // 64) % 2 if inner[0] > 64 else (column // block_n) % 2
        lane = row % 16 + 16 * half + (row % 64 // 16) * 32
        tile_m, reps_m = row // 128, max(inner[0] // 128, 1)
        tile_n = column // block_n if inner[0] > 64 else column // block_n // 2
    position = (column % block_n + block_n * (tile_m + reps_m * tile_n)) * stride
    return (cta * 128 + lane) * (LANE_BYTES * 8 // bits) + position
