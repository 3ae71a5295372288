"""TMA descriptors, and the rules that the hardware has for them and for each copy.

The rules of a descriptor are those of cuTensorMapEncodeTiled (CUDA driver API, "Tensor Map Object
Management") and are checked when it is made, as the driver does. The rules of a copy are those of
PTX, "cp.async.bulk.tensor" and "Tensor size, alignment", and are checked when it is issued. A copy
that breaks one ends in an illegal instruction on the GPU, without a word of which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlakit.tools.emulator.dtypes import Array, element_size
from mlakit.tools.emulator.faults import IllegalCopy
from mlakit.tools.emulator.layouts import attributes
from mlakit.tools.emulator.memory import GlobalMemory, MemDesc
from mlakit.tools.emulator.overflow import Wrapped

UNIT = 16  # bytes: of addresses, strides, rows of a box, and the innermost coordinate
MAX_RANK = 5
MAX_DIM = 2**32
MAX_STRIDE = 2**40  # bytes
MAX_BOX = 256  # elements of a dimension
SHARED_ALIGNMENT = 128  # bytes
SWIZZLE_ROWS = 8  # a swizzle pattern repeats after so many rows of its span
SWIZZLES = (0, 32, 64, 128)
GATHERED_ROWS = 4  # by an instruction


@dataclass(frozen=True)
class Descriptor:
    """A TMA descriptor, made by the host.

    strides  in elements
    block    the tile of one Gluon copy; TMA copies it as one or more boxes
    part     what a CTA copies of it, all by default
    swizzle  the swizzle span in bytes, 0 for none
    name     of the kernel's argument, for reports
    """

    address: int
    shape: list[int]
    strides: list[int]
    block: list[int]
    kind: str
    swizzle: int = 0
    name: str = "descriptor"
    part: Sequence[int] | None = None

    def __post_init__(self) -> None:
        """Check the rules that the driver has."""
        for rule in (_check_rank, _check_address, _check_dims, _check_strides, _check_box):
            rule(self)

    @property
    def size(self) -> int:
        """The bytes of an element."""
        return element_size(self.kind)

    @property
    def box(self) -> list[int]:
        """The box of one TMA instruction: Triton splits a block at the swizzle span and at 256."""
        block = self.block if self.part is None else self.part
        inner = min(block[-1], MAX_BOX)
        if self.swizzle:
            inner = min(inner, max(self.swizzle // self.size, 1))
        return [*(min(each, MAX_BOX) for each in block[:-1]), inner]

    def refuse(self, rule: str, value: object) -> None:
        """Report a broken rule."""
        raise IllegalCopy(f"TMA descriptor {self.name}: {rule}, got {value}")

    def addresses(self, index: Sequence[Array], some: Array | None = None) -> tuple[Array, Array]:
        """Return the addresses of a tile's elements, and which of them are in the tensor.

        index  the coordinates of the tile along each axis
        some   the elements that are meant, all by default
        """
        grid = np.meshgrid(*index, indexing="ij")
        inside = np.ones(grid[0].shape, np.bool_)
        if some is not None:
            inside &= some.reshape(inside.shape)
        address = np.full(grid[0].shape, self.address, np.int64)
        for each, size, stride in zip(grid, self.shape, self.strides, strict=True):
            inside &= (each >= 0) & (each < size)
            address += each * (stride * self.size)
        return address, inside

    def index(
        self, at: Sequence[int], shape: Sequence[int], rows: Array | None = None
    ) -> list[Array]:
        """Return the coordinates along each axis of a tile of `shape` at `at`.

        rows  the first coordinates of a gather, one for each row
        """
        index = [
            np.arange(size, dtype=np.int64) + start for size, start in zip(shape, at, strict=True)
        ]
        if rows is not None:
            index[0] = rows.astype(np.int64)
        return index

    def tile(self, memory: GlobalMemory, at: Sequence[int], rows: Array | None = None) -> Array:
        """Return the tile at `at`.

        PTX, "Tiled mode", "Bounding box": elements outside of the tensor are read as zeros.
        """
        address, inside = self.addresses(self.index(at, self.block, rows))
        out: Array = np.zeros(inside.shape, np.float32 if self.kind[0] in "bf" else np.int64)
        if inside.any():
            out[inside] = memory.load(address[inside], self.kind)
        return out

    def put(
        self, memory: GlobalMemory, at: Sequence[int], values: Array, some: Array | None = None
    ) -> None:
        """Write a tile, or `some` elements; those outside of the tensor are not written."""
        address, inside = self.addresses(self.index(at, values.shape), some)
        if inside.any():
            memory.store(address[inside], values[inside], self.kind)


def _check_rank(each: Descriptor) -> None:
    """cuTensorMapEncodeTiled, tensorRank: 1 to 5 dimensions, all arrays of that length."""
    ranks = {len(each.shape), len(each.strides), len(each.block)}
    if ranks != {len(each.shape)} or not 1 <= len(each.shape) <= MAX_RANK:
        each.refuse(f"shape, strides and block must have one rank of 1 to {MAX_RANK}", ranks)


def _check_address(each: Descriptor) -> None:
    """cuTensorMapEncodeTiled, globalAddress: a multiple of 16 bytes."""
    if each.address % UNIT:
        each.refuse(f"the base address must be a multiple of {UNIT} bytes", hex(each.address))


def _check_dims(each: Descriptor) -> None:
    """cuTensorMapEncodeTiled, globalDim: each is 1 to 2^32."""
    for size in each.shape:
        if not 1 <= size <= MAX_DIM:
            each.refuse(f"each dimension must be 1 to {MAX_DIM}", each.shape)


def _check_strides(each: Descriptor) -> None:
    """cuTensorMapEncodeTiled, globalStrides: multiples of 16 bytes below 2^40.

    The innermost dimension has no stride: its elements are contiguous.
    """
    if each.strides[-1] != 1:
        each.refuse("the innermost stride must be 1", each.strides[-1])
    for size, stride in zip(each.shape[:-1], each.strides[:-1], strict=True):
        distance = stride * each.size
        if distance % UNIT or distance >= MAX_STRIDE or distance < 0:
            rule = f"strides must be multiples of {UNIT} bytes below 2^40"
            each.refuse(rule, f"{distance} bytes")
        if size > 1 and distance == 0:
            each.refuse("the stride of more than one row must not be 0", "0 bytes")


def _check_box(each: Descriptor) -> None:
    """cuTensorMapEncodeTiled, boxDim and swizzle.

    Each dimension of a box is 1 to 256. Its rows are a multiple of 16 bytes, and no longer than the
    swizzle span if there is one.
    """
    if each.swizzle not in SWIZZLES:
        each.refuse(f"the swizzle span must be one of {SWIZZLES} bytes", each.swizzle)
    box = each.box
    if any(not 1 <= size <= MAX_BOX for size in box):
        each.refuse(f"each dimension of the box must be 1 to {MAX_BOX}", box)
    row = box[-1] * each.size
    if row % UNIT:
        each.refuse(f"a row of the box must be a multiple of {UNIT} bytes", f"{row} bytes")
    if each.swizzle and row > each.swizzle:
        rule = f"a row of the box must not exceed the swizzle span of {each.swizzle} bytes"
        each.refuse(rule, f"{row} bytes")
    if any(block % size for block, size in zip(each.block, box, strict=True)):
        each.refuse("boxes must divide the block", f"a block of {each.block} and boxes of {box}")


def check_copy(
    descriptor: Descriptor, at: Sequence[int], tile: MemDesc, rows: Array | None = None
) -> None:
    """Check a copy of a tile between global and shared memory; `rows` are those of a gather."""
    _check_coordinates(descriptor, at)
    if rows is not None:
        _check_gather(descriptor, rows)
    _check_tile(descriptor, tile, 1 if rows is None else rows.size)


def _check_coordinates(descriptor: Descriptor, at: Sequence[int]) -> None:
    """Check the coordinates of a copy.

    PTX, "cp.async.bulk.tensor", tensorCoords: 32-bit signed integers. The innermost one must lie at
    a multiple of 16 bytes: PTX does not say so, and the hardware ends in an illegal instruction
    (triton-lang/triton issue 7385; Triton's own check of it is TRITON_INSTRUMENTATION_MODE=iisan).
    """
    for axis, each in enumerate(at):
        if isinstance(each, Wrapped):
            rule = f"coordinate {axis} must not overflow in its computation"
            descriptor.refuse(rule, f"{int(each)} after an overflow")
        if not -(2**31) <= each < 2**31:
            descriptor.refuse(f"coordinate {axis} must be a 32-bit integer", each)
    inner = at[-1] * descriptor.size
    if inner % UNIT:
        rule = f"the innermost coordinate must be a multiple of {UNIT} bytes"
        descriptor.refuse(rule, f"{at[-1]} elements of {descriptor.size} bytes, {inner} bytes")


def _check_gather(descriptor: Descriptor, rows: Array) -> None:
    """Check the rows of a gather.

    PTX, "cp.async.bulk.tensor", tile::gather4: the tensor has two dimensions, the box one row, and
    an instruction copies four rows. A row outside of the tensor, such as −1, is read as zeros.
    """
    if len(descriptor.block) != 2 or descriptor.block[0] != 1:
        descriptor.refuse("the block of a gather must be one row of a matrix", descriptor.block)
    if rows.ndim != 1 or rows.size % GATHERED_ROWS:
        rule = f"a gather must have a multiple of {GATHERED_ROWS} rows"
        descriptor.refuse(rule, list(rows.shape))


def _check_tile(descriptor: Descriptor, tile: MemDesc, blocks: int) -> None:
    """Check the shared memory of a copy.

    PTX, "cp.async.bulk.tensor", dstMem: a multiple of 128 bytes. The swizzle of TMA and wgmma
    depends on address bits, so a tile of Triton's layout begins at a multiple of its swizzle atom:
    eight rows of the span, 1024, 512 or 256 bytes. Triton allocates such tiles at these multiples.
    """
    swizzle = swizzle_span(tile.layout)
    if swizzle != descriptor.swizzle:
        rule = f"the tile must have the swizzle span of the descriptor, {descriptor.swizzle} bytes"
        descriptor.refuse(rule, f"{swizzle} bytes of {tile.allocation.name}")
    first, unit = tile.first_byte, max(SWIZZLE_ROWS * swizzle, SHARED_ALIGNMENT)
    if first % unit:
        rule = f"the tile must begin at a multiple of {unit} bytes of shared memory"
        descriptor.refuse(rule, f"byte {first} of {tile.allocation.name}")
    count = int(np.prod(descriptor.block)) * blocks
    if int(np.prod(tile.shape)) != count:
        rule = f"the tile must have the {count} elements that are copied"
        descriptor.refuse(rule, f"{list(tile.shape)} of {tile.allocation.name}")


def swizzle_span(layout: str) -> int:
    """Return the swizzle span in bytes of a shared layout that TMA writes."""
    if not layout.startswith("#ttg.nvmma_shared"):
        return 0
    return int(attributes(layout)["swizzlingByteWidth"])
