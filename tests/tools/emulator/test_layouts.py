"""Layouts against Triton's own linear layouts, and against closed forms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mlakit.tools.emulator.clusters import holders, local_shape
from mlakit.tools.emulator.ir import Unsupported
from mlakit.tools.emulator.layouts import (
    LANE_BYTES,
    offsets,
    tensor_memory_columns,
    thread_elements,
)
from mlakit.tools.emulator.types import Types

gl = pytest.importorskip("triton.experimental.gluon.language")
WGMMA = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])


@pytest.fixture(scope="module")
def builder() -> Iterator[Any]:
    """A builder of IR; it does not keep its context alive, so that the fixture does."""
    from triton._C.libtriton import gluon_ir, ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    context = ir.context()
    ir.load_dialects(context)
    make_backend(GPUTarget("cuda", 90, 32)).load_dialects(context)
    yield gluon_ir.GluonOpBuilder(context)
    del context


def span(bases: list[list[int]], rank: int) -> np.ndarray:
    """[2 ** len(bases), rank]: the exclusive or of the bases of each number's bits."""
    elements = np.zeros((1, rank), np.int64)
    for basis in bases:
        elements = np.concatenate([elements, elements ^ np.asarray(basis)])
    return elements


def triton_threads(layout: Any, shape: list[int]) -> np.ndarray:
    """[warps, lanes, registers] of a linear layout of Triton's."""
    bases = [*layout.reg_bases, *layout.lane_bases, *layout.warp_bases]
    flat = np.ravel_multi_index(tuple(span(bases, len(shape)).T), shape)
    return flat.reshape(2 ** len(layout.warp_bases), 32, -1)


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (gl.BlockedLayout([1], [32], [4], [0]), [128]),
        (gl.BlockedLayout([1], [32], [4], [0]), [512]),
        (gl.BlockedLayout([1], [32], [4], [0]), [64]),
        (gl.BlockedLayout([4], [32], [1], [0]), [8]),
        (gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]), [64, 128]),
        (gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]), [8, 16]),
        (gl.BlockedLayout([2, 2], [8, 4], [1, 4], [0, 1]), [64, 128]),
        (gl.BlockedLayout([1, 1, 2], [4, 4, 2], [4, 1, 1], [2, 1, 0]), [16, 8, 8]),
        (gl.SliceLayout(0, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])), [128]),
        (gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])), [64]),
        (gl.SliceLayout(1, gl.BlockedLayout([1, 4], [32, 1], [1, 1], [1, 0])), [32]),
        (WGMMA, [64, 64]),
        (WGMMA, [64, 256]),
        (WGMMA, [128, 64]),
        (gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 128, 32]), [128, 128]),
        (gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]), [64, 64]),
        (gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]), [64, 8]),
        (gl.SliceLayout(0, WGMMA), [64]),
        (gl.SliceLayout(1, WGMMA), [64]),
        (gl.SliceLayout(1, WGMMA), [128]),
        (gl.DotOperandLayout(0, WGMMA, 2), [64, 64]),
        (gl.DotOperandLayout(0, WGMMA, 4), [64, 128]),
        (gl.DotOperandLayout(0, WGMMA, 2), [128, 32]),
    ],
    ids=str,
)
def test_threads_have_the_elements_that_triton_gives_them(builder, layout, shape):
    attribute = layout._to_ir(builder)
    text = str(builder.get_distributed_ty(builder.get_float_ty(), shape, attribute))
    theirs = triton_threads(builder.to_linear_layout(attribute, shape), shape)
    ours = thread_elements(Types({}).parse(text).layout, tuple(shape), theirs.shape[0])
    np.testing.assert_array_equal(ours, theirs)


def test_a_linear_layout_is_its_bases():
    layout = gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 4]],
        [[0, 2], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [0, 0]],
        [],
        [32, 16],
    )
    text = (
        f"#ttg.linear<{{register = {layout.reg_bases}, lane = {layout.lane_bases},"
        f" warp = {layout.warp_bases}, block = []}}>"
    )
    ours = thread_elements(text, (32, 16), 4)
    np.testing.assert_array_equal(ours, triton_threads(layout, [32, 16]))
    np.testing.assert_array_equal(ours[0], ours[2])  # the last basis of warps is zero: copies


def test_warps_beyond_the_layout_have_copies():
    text = (
        "#ttg.linear<{register = [[1]], lane = [[2], [4], [8], [16], [32]], warp = [], block = []}>"
    )
    ours = thread_elements(text, (64,), 4)
    assert ours.shape == (4, 32, 2)
    np.testing.assert_array_equal(ours[0], ours[3])
    np.testing.assert_array_equal(ours[0].ravel(), np.arange(64))


@pytest.mark.parametrize(
    "layout", ["#ttg.amd_mfma<{version = 3}>", "#ttg.nvidia_mma<{versionMajor = 2}>"]
)
def test_a_layout_that_is_not_known_is_named(layout):
    with pytest.raises(Unsupported, match=layout.split("<")[0]):
        thread_elements(layout, (16, 16), 4)
    with pytest.raises(Unsupported, match=layout.split("<")[0]):
        offsets(layout, (16, 16), (16, 16), (0, 0), 16)


# ---------------------------------------------------------- shared memory

SHARED = [
    (gl.NVMMASharedLayout(128, 16, 2), [64, 64], 16),
    (gl.NVMMASharedLayout(128, 16, 2), [64, 256], 16),
    (gl.NVMMASharedLayout(128, 8, 2), [64, 256], 8),
    (gl.NVMMASharedLayout(128, 32, 2), [16, 64], 32),
    (gl.NVMMASharedLayout(64, 16, 2), [32, 32], 16),
    (gl.NVMMASharedLayout(32, 16, 2), [16, 16], 16),
    (gl.NVMMASharedLayout(0, 16, 2), [8, 8], 16),
    (gl.NVMMASharedLayout(128, 16, 2, transposed=True), [128, 64], 16),
    (gl.NVMMASharedLayout(128, 8, 3), [4, 16, 128], 8),
    (gl.SwizzledSharedLayout(1, 1, 1, [0]), [64], 32),
    (gl.SwizzledSharedLayout(1, 1, 1, [1, 0]), [8, 16], 32),
    (gl.SwizzledSharedLayout(8, 1, 8, [1, 0]), [64, 128], 16),
    (gl.SwizzledSharedLayout(4, 2, 4, [0, 1]), [64, 32], 16),
]


@pytest.mark.parametrize(("layout", "shape", "bits"), SHARED, ids=str)
def test_shared_memory_has_the_elements_where_triton_puts_them(builder, layout, shape, bits):
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip("Triton 3.6 aborts when it is asked for the linear layout of shared memory")
    attribute = layout._to_ir(builder)
    element = {8: builder.get_int8_ty, 16: builder.get_half_ty, 32: builder.get_float_ty}[bits]()
    text = str(builder.get_shared_mem_desc_ty(element, shape, attribute, shape))
    theirs = span(builder.to_linear_layout(attribute, shape).offset_bases, len(shape))
    ours = offsets(
        Types({}).parse(text).layout, tuple(shape), tuple(shape), (0,) * len(shape), bits
    )
    np.testing.assert_array_equal(ours[tuple(theirs.T)], np.arange(len(theirs)))


def nvmma(swizzle: int, bits: int) -> str:
    return (
        f"#ttg.nvmma_shared<{{swizzlingByteWidth = {swizzle}, transposed = false,"
        f" elementBitWidth = {bits}}}>"
    )


def test_rows_of_a_swizzled_tile_exchange_sixteen_bytes():
    ours = offsets(nvmma(128, 16), (16, 64), (16, 64), (0, 0), 16)
    row, column = np.meshgrid(np.arange(16), np.arange(64), indexing="ij")
    chunk = (column // 8) ^ (row % 8)
    np.testing.assert_array_equal(ours, row * 64 + chunk * 8 + column % 8)


@pytest.mark.parametrize(
    "layout",
    [nvmma(128, 16), "#ttg.swizzled_shared<{vec = 8, perPhase = 1, maxPhase = 8, order = [1, 0]}>"],
)
def test_a_slice_is_a_part_of_the_whole(layout):
    whole = offsets(layout, (32, 128), (32, 128), (0, 0), 16)
    np.testing.assert_array_equal(
        offsets(layout, (32, 128), (8, 64), (16, 64), 16), whole[16:24, 64:]
    )


def test_stages_follow_each_other():
    whole = offsets(nvmma(128, 16), (3, 16, 64), (3, 16, 64), (0, 0, 0), 16)
    one = offsets(nvmma(128, 16), (16, 64), (16, 64), (0, 0), 16)
    np.testing.assert_array_equal(whole, np.stack([one + 1024 * stage for stage in range(3)]))


def test_a_shared_linear_layout_is_its_bases():
    bases = [[0, 1], [0, 2], [1, 2], [2, 0]]
    text = f"#ttg.shared_linear<{{offset = {bases}, block = []}}, alignment = 16>"
    ours = offsets(text, (4, 4), (4, 4), (0, 0), 16)
    theirs = span(bases, 2)
    np.testing.assert_array_equal(ours[tuple(theirs.T)], np.arange(16))


# ---------------------------------------------------------- tensor memory and clusters


def tensor_memory(block_m: int, block_n: int, stride: int = 1, more: str = "") -> str:
    return (
        f"#ttng.tensor_memory_encoding<blockM = {block_m}, blockN = {block_n},"
        f" colStride = {stride}{more}>"
    )


def lanes_and_columns(layout: str, shape: tuple[int, int], bits: int) -> tuple[np.ndarray, ...]:
    return np.divmod(offsets(layout, shape, shape, (0, 0), bits), LANE_BYTES * 8 // bits)


def test_a_tile_of_128_rows_has_a_lane_for_each():
    lane, column = lanes_and_columns(tensor_memory(128, 64), (128, 64), 32)
    np.testing.assert_array_equal(lane, np.arange(128)[:, None] + 0 * column)
    np.testing.assert_array_equal(column, np.arange(64)[None] + 0 * lane)


def test_rows_beyond_128_are_in_further_columns():
    lane, column = lanes_and_columns(tensor_memory(128, 64), (256, 128), 32)
    np.testing.assert_array_equal(lane[128:], lane[:128])
    assert column[128, 0] == 64  # then the second half of the columns, of both
    assert column[0, 64] == 128
    assert len(np.unique(lane * 512 + column)) == lane.size


def test_a_tile_of_64_rows_has_sixteen_lanes_of_each_warp():
    lane, column = lanes_and_columns(tensor_memory(64, 32), (64, 64), 32)
    np.testing.assert_array_equal(lane[:, 0], np.arange(64) % 16 + np.arange(64) // 16 * 32)
    np.testing.assert_array_equal(lane[:, 32], lane[:, 0] + 16)
    np.testing.assert_array_equal(column[:, :32], column[:, 32:])


def test_columns_of_tensor_memory_are_counted_in_bytes_per_lane():
    assert tensor_memory_columns(tensor_memory(128, 64), (128, 64), 32) == 256
    assert tensor_memory_columns(tensor_memory(128, 64), (2, 256, 64), 32) == 1024
    assert tensor_memory_columns(tensor_memory(128, 64, 2), (128, 64), 16) == 256


def test_a_cluster_of_two_shares_rows_or_columns():
    rows = tensor_memory(128, 64, more=", CGALayout = [[1, 0]]")
    columns = tensor_memory(128, 64, more=", CGALayout = [[0, 1]]")
    assert local_shape(rows, (256, 64)) == local_shape(columns, (128, 128)) == (128, 64)
    assert local_shape(tensor_memory(128, 64), (128, 64)) == (128, 64)
    assert tensor_memory_columns(rows, (256, 64), 32) == 256
    lane, _ = lanes_and_columns(rows, (256, 64), 32)
    np.testing.assert_array_equal(lane[128:], lane[:128])  # each in the memory of its CTA


@pytest.mark.parametrize(
    ("layout", "shape", "owner", "copies"),
    [
        ("#ttg.x<{CGALayout = [[1, 0], [0, 1]]}>", (2, 2), [[0, 2], [1, 3]], 0),
        ("#ttg.x<{CGALayout = [[0, 1], [0, 0]]}>", (1, 2), [[0, 1]], 2),
        ("#ttg.x<{CGALayout = [[1, 0], [2, 0]]}>", (3, 4, 1), [[[0], [1], [2], [3]]] * 3, 0),
        ("#ttg.linear<{register = [[2]], block = [[1]]}>", (4,), [0, 1, 0, 1], 0),
        ("#ttg.slice<{dim = 0, parent = #ttg.x<{CGALayout = [[1, 0]]}>}>", (2,), [0, 0], 1),
        ("#ttg.slice<{dim = 0, parent = #ttg.x<{CGALayout = [[0, 1]]}>}>", (2,), [0, 1], 0),
        ("#ttg.dot_op<{opIdx = 0, parent = #ttg.x<{CGALayout = [[0, 1]]}>}>", (1, 2), [[0, 0]], 1),
        ("#ttg.x<{CGALayout = [[1]]}>", (1,), [0], 1),
    ],
)
def test_an_element_has_an_owner_in_a_cluster_or_copies(layout, shape, owner, copies):
    ranks, bits = holders(layout, shape, shape, (0,) * len(shape))
    np.testing.assert_array_equal(ranks, owner)
    assert bits & 1 == copies & 1
    assert "], [" not in layout or bits & 2 == copies & 2
