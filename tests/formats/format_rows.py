"""Rows for tests of the formats, and the bytes that they must become.

The expected bytes are built here from the definitions of e4m3, bf16 and e8m0 with numpy and struct,
not with torch's casts.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch

from mlakit.formats import FORMATS
from mlakit.model.geometry import RowShape

E4M3 = torch.float8_e4m3fn
NAN, INF = math.nan, math.inf
V3 = RowShape(512, 64)
V4 = RowShape(448, 64, v_width=512)
PARTIAL = RowShape(132, 6)
"""Rows whose last scale group is short: 128 + 4 columns, and 64 + 64 + 4."""
SHAPES = (V3, V4, RowShape(256, 64), RowShape(256, 32), RowShape(512, 0), PARTIAL)
SCALED = ("fp8_token", "fp8_block128", "fp8_block64")
SMALLEST_NORMAL = 2.0**-126


def shape_id(row: RowShape) -> str:
    return f"{row.kv_lora_rank}+{row.qk_rope_head_dim}"


every_format = pytest.mark.parametrize("name", FORMATS)
every_shape = pytest.mark.parametrize("row", SHAPES, ids=shape_id)
either_scale = pytest.mark.parametrize("power_of_two", [False, True], ids=["any", "pow2"])


# e4m3 by its definition: 1 sign bit, 4 exponent bits of bias 7, 3 mantissa bits, one NaN per sign
E4M3_MAGNITUDES = np.array(
    [
        mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        for exponent in range(16)
        for mantissa in range(8)
    ][:127]
)


def e4m3_byte(value: float) -> int:
    """The nearest e4m3 code, ties to the even one, beyond ±448 the last one."""
    if math.isnan(value):
        return 0x7F
    sign = 0x80 if math.copysign(1.0, value) < 0 else 0
    distance = np.abs(E4M3_MAGNITUDES - min(abs(value), 448.0))
    nearest = np.flatnonzero(distance == distance.min())
    return sign | int(nearest[nearest % 2 == 0][0] if len(nearest) > 1 else nearest[0])


def bf16_bits(value: np.float32) -> int:
    """A float32 with its low 16 bits rounded away, to nearest even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def least_power_of_two(value: float) -> float:
    mantissa, exponent = math.frexp(value)
    return 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)


def expected_scale(group: np.ndarray, smallest: float, power_of_two: bool) -> np.float32:
    scale = max(np.abs(group).max() / np.float32(448), np.float32(smallest))
    return np.float32(least_power_of_two(float(scale)) if power_of_two else scale)


def e4m3_bytes(group: np.ndarray, scale: np.float32) -> bytes:
    return bytes(e4m3_byte(float(x / scale)) for x in group)


def bf16_bytes(values: np.ndarray) -> bytes:
    return struct.pack(f"<{len(values)}H", *(bf16_bits(x) for x in values))


def in_groups(columns: np.ndarray, size: int) -> list[np.ndarray]:
    return [columns[start : start + size] for start in range(0, len(columns), size)]


def random_rows(row: RowShape, n: int = 5, seed: int = 0) -> torch.Tensor:
    """Rows whose scale groups differ in size by orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, row.width, generator=generator)
    return rows * torch.exp(2 * torch.randn(n, row.width, generator=generator))


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
