"""Memories: tensors in global memory by address, tiles in shared and tensor memory as bytes."""

from __future__ import annotations

import ctypes
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from mlakit.tools.emulator.clusters import held, holders
from mlakit.tools.emulator.dtypes import Array, decode, element_size, encode, memory_dtype
from mlakit.tools.emulator.faults import OutOfBounds
from mlakit.tools.emulator.layouts import offsets
from mlakit.tools.emulator.races import Shadow

if TYPE_CHECKING:
    from mlakit.tools.emulator.barriers import Barrier

WORD = 4  # bytes that share an entry of shadow memory


@dataclass(frozen=True)
class Span:
    """The bytes of one tensor's storage: addresses [start, end)."""

    start: int
    end: int
    data: Array


class GlobalMemory:
    """Tensors by their addresses."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def add(self, address: int, size: int) -> None:
        """Make `size` bytes of host memory accessible."""
        if size == 0 or any(each.start <= address < each.end for each in self.spans):
            return
        raw = (ctypes.c_uint8 * size).from_address(address)
        self.spans.append(Span(address, address + size, np.frombuffer(memoryview(raw), np.uint8)))

    def locate(self, addresses: Array, size: int) -> Span:
        """Return the span that holds all elements of `size` bytes at `addresses`.

        PTX: an address of ld, st and atom must be a multiple of the size of the access
        ("Addresses as Operands", alignment), and one outside of an allocation faults.
        """
        low, high = int(addresses.min()), int(addresses.max()) + size
        for span in self.spans:
            if span.start <= low and high <= span.end:
                if (addresses % size).any():
                    raise OutOfBounds(f"address {low:#x} is not a multiple of {size} bytes")
                return span
        spans = ", ".join(f"[{each.start:#x}, {each.end:#x})" for each in self.spans)
        raise OutOfBounds(f"addresses {low:#x} to {high:#x} are in no tensor: {spans}")

    def _view(self, addresses: Array, kind: str) -> tuple[Array, Array]:
        """Return the elements of a span, and the index of each address among them."""
        size = element_size(kind)
        span = self.locate(addresses, size)
        first = -span.start % size  # elements lie at multiples of their size
        usable = span.data[first : first + (span.data.size - first) // size * size]
        return usable.view(memory_dtype(kind)), (addresses - span.start - first) // size

    def load(self, addresses: Array, kind: str) -> Array:
        """Return the elements at `addresses`."""
        elements, index = self._view(addresses, kind)
        return decode(elements[index], kind)

    def store(self, addresses: Array, values: Array, kind: str) -> None:
        """Write elements to `addresses`."""
        elements, index = self._view(addresses, kind)
        elements[index] = encode(values, kind)


class Allocation:
    """Bytes of shared or tensor memory, with their shadow and the mbarriers that lie in them.

    cta    the rank in its cluster of the CTA that has it
    peers  by rank, the same allocation of each CTA of the cluster
    """

    def __init__(self, size: int, name: str, cta: int = 0) -> None:
        # random bytes: a value that nobody has written must not be a lucky zero
        self.data: Array = np.random.default_rng(1).integers(0, 256, size, np.uint8)
        self.name = name
        self.shadow = Shadow(-(-size // WORD), name)
        self.barriers: dict[int, Barrier] = {}  # by their first byte
        self.cta, self.peers = cta, [self]

    def as_tenant(self, name: str) -> Allocation:
        """Return the same memory under the name of what is in it now."""
        tenant = copy(self)
        tenant.name, tenant.shadow = name, copy(self.shadow)
        tenant.shadow.name = name
        return tenant

    def elements(self, kind: str) -> Array:
        """Return the bytes as elements of a type; what is written to them is written here."""
        size = element_size(kind)
        return self.data[: self.data.size // size * size].view(memory_dtype(kind))


def as_peers(allocations: list[Allocation]) -> list[Allocation]:
    """Let the same allocation of each CTA of a cluster know the others."""
    for each in allocations:
        each.peers = allocations
    return allocations


@dataclass(frozen=True)
class MemDesc:
    """A tile in shared or tensor memory, of a cluster and as one of its CTAs has it.

    base   its first byte in the allocation, before `first`
    alloc  the shape that the layout describes
    first  the element of that shape where the tile begins
    """

    allocation: Allocation
    base: int
    shape: tuple[int, ...]
    kind: str
    layout: str
    alloc: tuple[int, ...]
    first: tuple[int, ...]

    def index(self) -> Array:
        """Return where each element of the tile is among those of the allocation."""
        size = element_size(self.kind)
        at: Array = offsets(self.layout, self.alloc, self.shape, self.first, size * 8)
        if self.base % size:
            raise OutOfBounds(
                f"a tile of {self.kind} begins at byte {self.base} of {self.allocation.name}"
            )
        return at + self.base // size if self.base else at

    def on(self, cta: int) -> MemDesc:
        """Return the same tile as another CTA has it."""
        if cta == self.allocation.cta:
            return self
        return replace(self, allocation=self.allocation.peers[cta])

    @property
    def part(self) -> Array | None:
        """The elements that are in this CTA's memory; None: all of them."""
        if len(self.allocation.peers) == 1:
            return None
        return held(self.layout, self.alloc, self.shape, self.first, self.allocation.cta)

    @property
    def copies(self) -> int:
        """The bits of a rank in which CTAs differ that have copies of the tile."""
        every = len(self.allocation.peers) - 1
        return holders(self.layout, self.alloc, self.shape, self.first)[1] & every

    def words(self, some: Array | None = None) -> Array:
        """Return the numbers of the words of shadow memory that the tile covers here.

        some  the elements that are meant, by default all that are in this CTA's memory
        """
        size, some = element_size(self.kind), self.part if some is None else some
        if some is not None:
            return _words_at(self.index()[some] * size, size)
        return _words(self.layout, self.alloc, self.shape, self.first, size, self.base)

    def read(self, some: Array | None = None) -> Array:
        """Return the values of the tile; those of other elements are NaN or 0."""
        values = decode(self.allocation.elements(self.kind)[self.index()], self.kind)
        some = self.part if some is None else some
        if some is None:
            return values
        nothing = np.nan if values.dtype.kind == "f" else 0
        return np.where(some, values, np.asarray(nothing, values.dtype))

    def write(self, values: Array, some: Array | None = None) -> None:
        """Set the values of the tile that are in this CTA's memory."""
        elements, at = self.allocation.elements(self.kind), self.index()
        some = self.part if some is None else some
        if some is None:
            elements[at] = encode(values, self.kind)
        else:
            elements[at[some]] = encode(np.broadcast_to(values, self.shape)[some], self.kind)

    @property
    def size(self) -> int:
        """The bytes of the tile's elements that are in this CTA's memory."""
        part = self.part
        count = np.prod(self.shape) if part is None else np.count_nonzero(part)
        return int(count) * element_size(self.kind)

    @property
    def first_byte(self) -> int:
        """Where the tile's first element lies in the allocation."""
        one = MemDesc(
            self.allocation, 0, (1,) * len(self.shape), self.kind, self.layout, self.alloc,
            self.first,
        )  # fmt: skip
        return self.base + int(one.index().flat[0]) * element_size(self.kind)


@lru_cache(maxsize=4096)
def _words(
    layout: str,
    alloc: tuple[int, ...],
    shape: tuple[int, ...],
    first: tuple[int, ...],
    size: int,
    base: int,
) -> Array:
    return _words_at(offsets(layout, alloc, shape, first, size * 8).ravel() * size + base, size)


def _words_at(at: Array, size: int) -> Array:
    """Return the words of elements of `size` bytes that begin at these bytes."""
    low = at // WORD
    return np.unique(low if size <= WORD else np.concatenate([low, low + 1]))
