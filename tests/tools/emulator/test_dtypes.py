"""Formats of elements against torch: all bit patterns, and random values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mlakit.tools.emulator import dtypes

TORCH = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f8E4M3FN": torch.float8_e4m3fn,
    "f8E5M2": torch.float8_e5m2,
}
LARGEST = {"f8E4M3FN": dtypes.E4M3_MAX, "f8E5M2": dtypes.E5M2_MAX}


def all_bits(kind: str) -> np.ndarray:
    return np.arange(1 << dtypes.BITS[kind]).astype(dtypes.NARROW[kind])


def torch_values(bits: np.ndarray, kind: str) -> np.ndarray:
    signed = bits.view(np.int8 if bits.itemsize == 1 else np.int16)
    return torch.from_numpy(signed).view(TORCH[kind]).float().numpy()


def torch_bits(values: np.ndarray, kind: str) -> np.ndarray:
    narrow = torch.from_numpy(values).to(TORCH[kind])
    if dtypes.BITS[kind] == 8:
        return narrow.view(torch.uint8).numpy()
    return narrow.view(torch.int16).numpy().view(np.uint16)


def samples() -> np.ndarray:
    """float32 values of all sizes, and the neighbours of midpoints between narrow ones."""
    generator = np.random.default_rng(5)
    bits = generator.integers(0, 1 << 32, 200_000, np.uint32)
    middles = (generator.integers(0, 1 << 16, 20_000).astype(np.uint32) << 16) | 0x8000
    near = np.concatenate([middles - 1, middles, middles + 1])
    fp8 = np.concatenate([dtypes.E4M3[:127], dtypes.E5M2[:124]]).astype(np.float32)
    between = np.concatenate(
        [(dtypes.E4M3[1:127] + dtypes.E4M3[:126]) / 2, (dtypes.E5M2[1:124] + dtypes.E5M2[:123]) / 2]
    ).astype(np.float32)
    ties = np.concatenate([fp8, between, np.nextafter(between, 0), np.nextafter(between, 1e9)])
    values = np.concatenate([bits.view(np.float32), near.view(np.float32), ties, -ties])
    return np.concatenate([values, np.asarray([0.0, -0.0, np.inf, -np.inf, np.nan], np.float32)])


@pytest.mark.parametrize("kind", TORCH)
def test_every_bit_pattern_decodes_as_in_torch(kind):
    bits = all_bits(kind)
    np.testing.assert_array_equal(dtypes.decode(bits, kind), torch_values(bits, kind))


@pytest.mark.parametrize("kind", TORCH)
def test_every_value_encodes_to_its_bits(kind):
    bits = all_bits(kind)
    values = dtypes.decode(bits, kind)
    kept = ~np.isnan(values) & (np.isfinite(values) | (kind not in LARGEST))
    np.testing.assert_array_equal(dtypes.encode(values, kind)[kept], bits[kept])
    assert np.isnan(dtypes.decode(dtypes.encode(values[np.isnan(values)], kind), kind)).all()


@pytest.mark.parametrize("kind", TORCH)
def test_rounding_is_that_of_torch(kind):
    values = samples()
    with np.errstate(invalid="ignore"):
        values = values[np.abs(values) <= LARGEST.get(kind, np.inf)]
    np.testing.assert_array_equal(dtypes.encode(values, kind), torch_bits(values, kind))
    rounded = dtypes.rounded(values, kind)
    np.testing.assert_array_equal(rounded, torch_values(torch_bits(values, kind), kind))
    assert rounded.dtype == np.float32


@pytest.mark.parametrize("kind", LARGEST)
def test_fp8_saturates_as_cvt_satfinite_does(kind):
    large = np.asarray([LARGEST[kind] * 1.01, LARGEST[kind] * 2, 3e38, np.inf], np.float32)
    assert (dtypes.rounded(large, kind) == LARGEST[kind]).all()
    assert (dtypes.rounded(-large, kind) == -LARGEST[kind]).all()


@pytest.mark.parametrize("kind", TORCH)
def test_a_nan_stays_a_nan(kind):
    bits = np.asarray([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FC00000], np.uint32)
    assert np.isnan(dtypes.rounded(bits.view(np.float32), kind)).all()


@pytest.mark.parametrize("kind", TORCH)
def test_a_scalar_is_rounded_to_a_scalar(kind):
    rounded = dtypes.rounded(np.float32(0.3), kind)
    assert isinstance(rounded, np.float32)
    assert rounded == dtypes.rounded(np.asarray([0.3], np.float32), kind)[0]


@pytest.mark.parametrize("kind", dtypes.BITS)
def test_bits_and_values_are_inverse(kind):
    generator = np.random.default_rng(6)
    raw = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[dtypes.BITS[kind]]
    bits = generator.integers(0, 2 if kind == "i1" else np.iinfo(raw).max, 1000, raw)
    values = dtypes.from_bits(bits, kind)
    assert values.dtype == dtypes.value_dtype(kind)
    with np.errstate(invalid="ignore"):
        kept = ~np.isnan(values.astype(np.float64))
        if kind in LARGEST:
            kept &= np.isfinite(values)
    np.testing.assert_array_equal(dtypes.to_bits(values, kind)[kept], bits[kept])


def test_wider_registers_give_their_low_bits():
    np.testing.assert_array_equal(
        dtypes.from_bits(np.asarray([0xABCD3F80], np.uint32), "bf16"), np.asarray([1.0], np.float32)
    )
    assert dtypes.from_bits(np.asarray([0xFFFFFFFF], np.uint64), "i32")[0] == -1


@pytest.mark.parametrize(
    ("kind", "size"), [("i1", 1), ("i32", 4), ("ptr", 8), ("bf16", 2), ("f8E5M2", 1), ("f64", 8)]
)
def test_sizes_in_memory(kind, size):
    assert dtypes.element_size(kind) == size
    assert np.dtype(dtypes.memory_dtype(kind)).itemsize == size
