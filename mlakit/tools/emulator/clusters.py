"""Clusters: which of its CTAs holds which element of a tensor or of a tile.

Values      of a cluster's tensors have the whole shape in each CTA, which computes all elements and
            knows its own; only these are stored
Tiles       have the whole shape, too; each CTA's memory has its part
CGALayout   has a step for each bit of a CTA's rank, in parts of a CTA along each dimension; with a
            step of zeros the CTAs that differ in this bit have copies
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from mlakit.tools.emulator.dtypes import Array
from mlakit.tools.emulator.types import Type

Steps = list[list[int]]  # for each bit of a rank, along each dimension

ALL_BITS = -1


@lru_cache(maxsize=4096)
def holders(
    layout: str, alloc: tuple[int, ...], shape: tuple[int, ...], first: tuple[int, ...]
) -> tuple[Array, int]:
    """Return the lowest rank that holds each element, and the bits in which holders differ.

    The arguments are those of `layouts.offsets`.
    """
    steps = _steps(layout, alloc)
    owner: Array = np.zeros(shape, np.int64)
    copies = ALL_BITS << len(steps)
    for bit, step in enumerate(steps):
        before = len(alloc) - len(step)  # dimensions of several tiles, which each CTA has
        dims = [i + before for i, each in enumerate(step) if 0 < each < alloc[i + before]]
        if not dims:
            copies |= 1 << bit
        for dim in dims:
            at = np.arange(shape[dim]) + first[dim]
            line = (at // step[dim - before] & 1) << bit
            owner |= line.reshape([-1 if i == dim else 1 for i in range(len(shape))])
    return owner, copies


@lru_cache(maxsize=4096)
def held(
    layout: str, alloc: tuple[int, ...], shape: tuple[int, ...], first: tuple[int, ...], cta: int
) -> Array:
    """Return which elements a CTA holds."""
    owner, copies = holders(layout, alloc, shape, first)
    return np.asarray(owner == (cta & ~copies))


def of_tensor(type: Type) -> tuple[Array, int]:
    """Return what `holders` does for a tensor, or for a scalar, which every CTA has."""
    return holders(type.layout, type.shape, type.shape, (0,) * len(type.shape))


def held_by(type: Type, cta: int) -> Array:
    """Return which elements of a tensor a CTA holds."""
    owner, copies = of_tensor(type)
    return np.asarray(owner == (cta & ~copies))


def written_by(type: Type, cta: int) -> Array:
    """Return which elements of a tensor a CTA stores: of several with copies, the first one does.

    Triton does so for every store to global memory, and for those of scalars, too.
    """
    owner, _ = of_tensor(type)
    return np.asarray(owner == cta)


def group(cta: int, bits: int) -> Iterator[int]:
    """Yield the ranks that differ from a CTA's in no other bits, in order."""
    ranks = range((cta | bits) + 1)
    return (each for each in ranks if each & ~bits == cta & ~bits)


def stays(source: Type, target: Type, num_ctas: int) -> bool:
    """Has each CTA all elements that it needs for another layout of a tensor?"""
    ranks = range(num_ctas)
    return all((held_by(source, each) | ~held_by(target, each)).all() for each in ranks)


def is_split(type: Type, axis: int) -> bool:
    """Do the CTAs share a dimension of a tensor?"""
    step = _steps(type.layout, type.shape)
    return any(0 < each[axis] < type.shape[axis] for each in step)


@lru_cache(maxsize=4096)
def local_shape(layout: str, alloc: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a CTA's part of a tile."""
    found = re.search(r"CGALayout = (\[\[.*?\]\])", layout)
    return part_of(alloc, _vectors(found.group(1)) if found else [])


def part_of(shape: Sequence[int], bases: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the shape of a CTA's part of a tile that is split by a CGALayout."""
    sizes = list(shape)
    for basis in bases:
        for i, each in enumerate(basis):
            dim = i + len(shape) - len(basis)
            if each:
                sizes[dim] = max(sizes[dim] // 2, 1)
    return tuple(sizes)


def _steps(layout: str, alloc: tuple[int, ...]) -> Steps:
    """Return the step in elements that each bit of a rank makes."""
    if layout.startswith("#ttg.slice"):
        dim = int(layout[layout.index("dim = ") + len("dim = ") :].split(",")[0])
        parent = layout[layout.index("parent = ") + len("parent = ") : layout.rindex("}")]
        whole = _steps(parent, (*alloc[:dim], 1, *alloc[dim:]))
        return [[*each[:dim], *each[dim + 1 :]] for each in whole]
    if layout.startswith("#ttg.linear"):
        found = re.search(r"block = (\[.*?\])}", layout)
        return _vectors(found.group(1)) if found else []
    found = re.search(r"CGALayout = (\[\[.*?\]\])", layout)
    bases = _vectors(found.group(1)) if found else []
    if layout.startswith("#ttg.dot_op"):  # no CTA has a part of the dimension that is summed
        summed = 1 if "opIdx = 0" in layout else 0
        bases = [[0 if i == summed else each for i, each in enumerate(basis)] for basis in bases]
    part = part_of(alloc, bases)
    part = part[len(part) - len(bases[0]) :] if bases else part
    return [[a * b for a, b in zip(basis, part, strict=True)] for basis in bases]


def _vectors(text: str) -> Steps:
    return [
        [int(number) for number in each.split(",")] for each in re.findall(r"\[([-\d, ]+)\]", text)
    ]
