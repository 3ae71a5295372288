"""Every rule of TMA descriptors and copies: values at its limit, and values beyond it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from mlakit.tools.emulator.faults import IllegalCopy
from mlakit.tools.emulator.memory import Allocation, GlobalMemory, MemDesc
from mlakit.tools.emulator.overflow import wrap
from mlakit.tools.emulator.tma import Descriptor, check_copy

RIGHT: dict[str, Any] = {
    "address": 1 << 20,
    "shape": [100, 1088],
    "strides": [1344, 1],
    "block": [64, 128],
    "kind": "bf16",
    "swizzle": 128,
    "name": "k",
}


def descriptor(**changes: Any) -> Descriptor:
    return Descriptor(**{**RIGHT, **changes})


def layout(swizzle: int, bits: int = 16) -> str:
    return (
        f"#ttg.nvmma_shared<{{swizzlingByteWidth = {swizzle}, transposed = false,"
        f" elementBitWidth = {bits}}}>"
    )


def tile(base: int = 0, swizzle: int = 128, shape: tuple[int, int] = (64, 128)) -> MemDesc:
    allocation = Allocation(base + 2 * shape[0] * shape[1], "k_tiles")
    return MemDesc(allocation, base, shape, "bf16", layout(swizzle), shape, (0, 0))


@dataclass(frozen=True)
class Case:
    changes: dict[str, Any]
    message: str  # "" where the rule is kept


DESCRIPTORS = {
    "as it is": Case({}, ""),
    "address of 8 bytes": Case({"address": (1 << 20) + 8}, "base address must be a multiple of 16"),
    "address of 16 bytes": Case({"address": (1 << 20) + 16}, ""),
    "no rows": Case({"shape": [0, 1088]}, "dimension must be 1 to 4294967296, got .0, 1088."),
    "2^32 rows": Case({"shape": [2**32, 1088]}, ""),
    "more rows": Case({"shape": [2**32 + 1, 1088]}, "dimension must be 1 to"),
    "pitch of 8 bytes": Case({"strides": [1348, 1]}, "multiples of 16 bytes.*got 2696 bytes"),
    "pitch of 16 bytes": Case({"strides": [1352, 1]}, ""),
    "pitch of 2^40 bytes": Case({"strides": [2**39, 1]}, "below 2.40, got 1099511627776 bytes"),
    "negative pitch": Case({"strides": [-1344, 1]}, "multiples of 16 bytes below"),
    "no pitch": Case({"strides": [0, 1]}, "more than one row must not be 0"),
    "no pitch of one row": Case({"strides": [0, 1], "shape": [1, 1088]}, ""),
    "columns apart": Case({"strides": [1344, 2]}, "innermost stride must be 1, got 2"),
    "other rank": Case({"strides": [1]}, "must have one rank of 1 to 5"),
    "rank 6": Case(
        {"shape": [1] * 5 + [64], "strides": [64] * 5 + [1], "block": [1] * 5 + [64]},
        "one rank of 1 to 5",
    ),
    "256 rows of a box": Case({"block": [256, 128]}, ""),
    "512 rows of a block": Case({"block": [512, 128]}, ""),  # two boxes
    "no rows of a box": Case({"block": [0, 128]}, "dimension of the box must be 1 to 256"),
    "rows of 8 bytes": Case({"block": [64, 4], "swizzle": 0}, "row of the box.*got 8 bytes"),
    "rows of 16 bytes": Case({"block": [64, 8], "swizzle": 0}, ""),
    "rows of 16 bytes in a swizzle": Case({"block": [64, 8], "swizzle": 32}, ""),
    "swizzle of 16 bytes": Case({"swizzle": 16}, "swizzle span must be one of"),
    "boxes that do not divide": Case({"block": [64, 96]}, "boxes must divide the block"),
}


@pytest.mark.parametrize("case", DESCRIPTORS.values(), ids=DESCRIPTORS)
def test_the_driver_takes_a_descriptor_only_by_its_rules(case: Case) -> None:
    if not case.message:
        descriptor(**case.changes)
        return
    with pytest.raises(IllegalCopy, match=f"TMA descriptor k: .*{case.message}"):
        descriptor(**case.changes)


@pytest.mark.parametrize(
    ("kind", "column", "message"),
    [
        ("bf16", 0, ""),
        ("bf16", 8, ""),
        ("bf16", -8, ""),
        ("bf16", 262, "innermost coordinate must be a multiple of 16 bytes, got 262 elements"),
        ("bf16", 4, "of 2 bytes, 8 bytes"),
        ("f8E4M3FN", 16, ""),
        ("f8E4M3FN", 8, "of 1 bytes, 8 bytes"),
        ("f32", 4, ""),
        ("f32", 2, "of 4 bytes, 8 bytes"),
    ],
)
def test_the_innermost_coordinate_lies_at_a_multiple_of_16_bytes(
    kind: str, column: int, message: str
) -> None:
    columns = {"bf16": 64, "f8E4M3FN": 128, "f32": 32}[kind]
    source = descriptor(kind=kind, block=[64, columns], strides=[1344, 1])
    target = tile(shape=(64, columns))
    if not message:
        check_copy(source, [3, column], target)
        return
    with pytest.raises(IllegalCopy, match=message):
        check_copy(source, [3, column], target)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (2**31 - 1, ""),
        (-(2**31), ""),
        (2**31, "coordinate 0 must be a 32-bit integer, got 2147483648"),
        (wrap(2**31, 32), "coordinate 0 must not overflow in its computation"),
        (wrap(2**31, 32) + 5, "must not overflow"),
        (3 * wrap(2**31, 32) - 7, "must not overflow"),
        (wrap(2**31 - 1, 32), ""),
    ],
)
def test_coordinates_are_32_bit_integers_without_overflow(row: int, message: str) -> None:
    if not message:
        check_copy(descriptor(), [row, 0], tile())
        return
    with pytest.raises(IllegalCopy, match=message):
        check_copy(descriptor(), [row, 0], tile())


@pytest.mark.parametrize(
    ("swizzle", "base", "message"),
    [
        (128, 1024, ""),
        (128, 512, "multiple of 1024 bytes of shared memory, got byte 512 of k_tiles"),
        (64, 512, ""),
        (64, 256, "multiple of 512 bytes"),
        (32, 256, ""),
        (32, 128, "multiple of 256 bytes"),
        (0, 128, ""),
        (0, 64, "multiple of 128 bytes"),
    ],
)
def test_a_tile_begins_at_its_swizzle_atom(swizzle: int, base: int, message: str) -> None:
    columns = swizzle // 2 or 64
    source = descriptor(swizzle=swizzle, block=[64, columns])
    target = tile(base, swizzle, (64, columns))
    if not message:
        check_copy(source, [0, 0], target)
        return
    with pytest.raises(IllegalCopy, match=message):
        check_copy(source, [0, 0], target)


def test_a_slice_of_rows_begins_at_its_swizzle_atom() -> None:
    whole = tile(shape=(64, 64))
    for first, is_legal in ((8, True), (4, False)):
        part = MemDesc(whole.allocation, 0, (8, 64), "bf16", whole.layout, whole.alloc, (first, 0))
        source = descriptor(block=[8, 64])
        if is_legal:
            check_copy(source, [0, 0], part)
            continue
        with pytest.raises(IllegalCopy, match=r"multiple of 1024 bytes.*got byte 5"):
            check_copy(source, [0, 0], part)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (tile(swizzle=64), "swizzle span of the descriptor, 128 bytes, got 64 bytes of k_tiles"),
        (tile(shape=(32, 128)), "must have the 8192 elements that are copied"),
    ],
)
def test_a_tile_has_the_form_of_the_block(target: MemDesc, message: str) -> None:
    with pytest.raises(IllegalCopy, match=message):
        check_copy(descriptor(), [0, 0], target)


def test_elements_outside_of_the_tensor_are_zeros_and_are_not_written() -> None:
    data = np.arange(5 * 64, dtype=np.float32)
    address = data.ctypes.data
    if address % 16:
        pytest.skip("the array is not aligned")
    memory = GlobalMemory()
    memory.add(address, data.nbytes)
    rows = Descriptor(address, [5, 64], [64, 1], [8, 32], "f32", swizzle=128)
    loaded = rows.tile(memory, [-2, 32])
    expected = np.zeros((8, 32), np.float32)
    expected[2:7] = data.reshape(5, 64)[:, 32:]
    np.testing.assert_array_equal(loaded, expected)
    rows.put(memory, [3, 32], np.full((8, 32), -1, np.float32))
    assert (data.reshape(5, 64)[3:, 32:] == -1).all()
    assert (data.reshape(5, 64)[:3] >= 0).all()
    assert (data.reshape(5, 64)[:, :32] >= 0).all()


def _launch_prefill(gap: int) -> str:
    """Launch the prefill kernel over heads that lie `gap` columns apart; return the fault."""
    from mlakit.kernels.arguments import PrefillArguments
    from mlakit.kernels.hopper.prefill.launch import mla_prefill
    from mlakit.model.masks import CAUSAL
    from mlakit.tools.emulator.frontend import emulating_mlakit

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16)

    q, expanded = randn(10, 4, 256 + gap)[:, :3, :256], randn(100, 3, 448)
    arguments = PrefillArguments(
        q=q,
        k_nope=expanded[..., :192],
        k_rope=randn(100, 64),
        v=expanded[..., 192:],
        q_starts=torch.tensor([0, 10], dtype=torch.int32),
        kv_starts=torch.tensor([0, 100], dtype=torch.int32),
        q_scale=None,
        k_scale=None,
        v_scale=None,
        keys_per_scale=1,
        softmax_scale=0.1,
        mask=CAUSAL,
        alibi_slopes=None,
        sink=None,
        backend="auto",
    )
    with emulating_mlakit():
        try:
            mla_prefill(arguments, torch.empty_like(q), torch.empty(10, 3))
        except IllegalCopy as fault:
            return str(fault)
    return ""


def test_prefill_over_heads_at_odd_distances_is_an_illegal_instruction(
    in_emulator: Callable[..., Any],
) -> None:
    """The rows of q are 2,096 bytes apart, which TMA takes; its heads are 524 bytes apart."""
    pytest.importorskip("triton.experimental.gluon")
    fault = in_emulator(_launch_prefill, 6)
    assert "descriptor q: the innermost coordinate must be a multiple of 16 bytes" in fault
    assert "at parts.py:" in fault
    assert in_emulator(_launch_prefill, 8) == ""
