"""All codecs of cache rows share names of formats, rounding, and the checks of a codec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from mlakit.dispatch.autocast import without_autocast
from mlakit.dispatch.checks import E4M3, Dims
from mlakit.formats.e4m3 import dequantise_e4m3
from mlakit.formats.traits import FormatTraits
from mlakit.model.geometry import RowShape

GeneralFormat = Literal[
    "bf16", "fp16", "fp32", "fp8", "fp8_token", "fp8_block128", "fp8_block64", "mxfp4_block32"
]
GroupFormat = Literal["fp8_row", "fp8_group32", "fp8_group64", "fp8_group128"]
SplitFormat = Literal["bf16_split", "fp16_split", "fp32_split", "fp8_split"]
Format = Literal[GeneralFormat, GroupFormat, SplitFormat]
"""The values of the argument `format`."""
FORMATS: tuple[Format, ...] = get_args(GeneralFormat)
"""The formats that every op takes."""
GROUP_FORMATS: tuple[Format, ...] = get_args(GroupFormat)
"""E4m3 columns only, with one float32 scale per row or per 32, 64 or 128 columns in a tensor beside
them. Ops that append and `mla_decode` take them."""
ENGINE_NAMES: dict[str, Format] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "fp8_e4m3": "fp8",
    "fp8_ds_mla": "fp8_block128",
}
"""vLLM's and torch's names of formats, which every argument `format` takes, too."""
SPLIT_FORMATS: tuple[Format, ...] = get_args(SplitFormat)
"""Latent columns in one tensor and rotated columns in another, as FlashInfer's caches have them."""

E4M3_MAX = 448.0
SCALE_BLOCK = 128
"""Keys of a request that share a scale of K or V, where each has no scale of its own."""
SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal
"""Smallest scale of a block or tensor: some devices flush subnormals to 0, and 0/0 is NaN."""
SMALLEST_TOKEN_SCALE = 2.0**-33
"""Smallest scale of `fp8_token`, about 1.2e-10. The rotated columns are divided by the scale of the
latent columns, which may all be zero: with this scale every |rope| up to 3.9e28 is finite in bf16.
The error is below half a step of e4m3, 2**-43 or 1.1e-13, in rows with values below 5.2e-8."""


def saturating_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` rounded to nearest even in `dtype`; e4m3 clamps to ±448 first. NaN stays NaN.

    Other dtypes are a plain cast. Torch converts float64 to e4m3 through float32.
    """
    if dtype == E4M3:
        x = x.clamp(-E4M3_MAX, E4M3_MAX)
    return x.to(dtype)


def round_up_power_of_two(x: Tensor) -> Tensor:
    """The smallest power of two ≥ x, exactly, for float x ≥ 0; 0, inf and NaN are unchanged."""
    mantissa, _ = torch.frexp(x)  # x = mantissa · 2**exponent, 1/2 ≤ mantissa < 1
    # the quotient is 2**exponent: the division is exact
    rounded = torch.where(mantissa == 0.5, x, x / mantissa)
    return torch.where((x > 0) & x.isfinite(), rounded, x)


def largest_magnitudes(x: Tensor, group: int) -> Tensor:
    """Largest magnitude per group of columns; the last group may be short."""
    return torch.stack([columns.abs().amax(-1) for columns in torch.split(x, group, -1)], -1)


def scales_for(
    amax: Tensor, smallest: float, power_of_two: bool, largest: float = E4M3_MAX
) -> Tensor:
    """max(amax / largest, smallest) in float32: the largest value of a group becomes `largest`."""
    # divide by a tensor: CUDA replaces division by a number with a rounded reciprocal
    scales = (amax / torch.full_like(amax, largest)).clamp_min(smallest)
    return round_up_power_of_two(scales) if power_of_two else scales


def quantise(x: Tensor, scales: Tensor, group: int) -> Tensor:
    """e4m3(x / scale) as bytes, one scale per `group` columns."""
    groups = enumerate(torch.split(x, group, -1))
    quotients = [columns / scales[..., g : g + 1] for g, columns in groups]
    return saturating_cast(torch.cat(quotients, -1), E4M3).view(torch.uint8)


def dequantised_rows(
    stored: Tensor, scales: Tensor, group: int, rope: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return [stored · scale | rope] in `dtype`, one scale per `group` columns of `stored`."""
    d_c = stored.shape[-1]
    shape = (*stored.shape[:-1], d_c + rope.shape[-1])
    rows = torch.empty(shape, dtype=dtype, device=stored.device)
    dequantise_e4m3(stored, scales, group, out=rows[..., :d_c])
    rows[..., d_c:] = rope
    return rows


def exponent_bytes(scales: Tensor) -> Tensor:
    """The e8m0 bytes of powers of two, infinities or NaN: their exponent fields in float32."""
    return (scales.view(torch.int32) >> 23 & 0xFF).to(torch.uint8)


def to_bytes(x: Tensor) -> Tensor:
    """The bytes of a tensor, along its last axis."""
    return x.flatten().view(torch.uint8).view(*x.shape[:-1], x.shape[-1] * x.element_size())


def from_bytes(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes along the last axis as `dtype`; they may have any stride and alignment."""
    size = dtype.itemsize
    places = (stored.storage_offset(), *stored.stride()[:-1])
    if stored.stride(-1) == 1 and not any(place % size for place in places):
        return stored.view(dtype)
    elements = stored.shape[-1] // size
    aligned = stored.clone(memory_format=torch.contiguous_format)
    return aligned.flatten().view(dtype).view(*stored.shape[:-1], elements)


@dataclass(frozen=True)
class RowCodec(ABC):
    """One format for rows of one shape: sizes, encode and decode.

    traits                            what kernels read of the format
    payload_dtype, payload_elements   the stored row
    beside_dtype, beside_elements     stored beside it: the scales of a row, or its rotated columns;
                                      None and 0 if there is nothing
    """

    name: Format
    row: RowShape
    traits: FormatTraits
    payload_dtype: torch.dtype
    payload_elements: int
    beside_dtype: torch.dtype | None = None
    beside_elements: int = 0

    @property
    def has_tensor_scale(self) -> bool:
        """Whether the whole tensor has one scale, an argument of `encode` and `decode`."""
        return self.traits.SCALED_BY == "tensor"

    @property
    def is_split(self) -> bool:
        """Whether the rotated columns are beside the row."""
        return self.traits.ROPE_AT < 0

    @property
    def scale_group(self) -> int:
        """The columns of a row that share a scale; 0 if rows have no scales."""
        return self.traits.GROUP

    @property
    def bytes_per_token(self) -> int:
        """Payload of one token, and what is beside it."""
        itemsize = self.beside_dtype.itemsize if self.beside_dtype else 0
        return self.payload_elements * self.payload_dtype.itemsize + self.beside_elements * itemsize

    def page_bytes(self, page_size: int) -> int:
        """Bytes that a new pool allocates per page and layer, with all padding."""
        if page_size < 1:
            raise ValueError(
                f"{self.name} page_bytes: page_size must be at least 1, got {page_size}"
            )
        return page_size * self.bytes_per_token

    @without_autocast
    def encode(
        self, rows: Tensor, *, tensor_scale: float | Tensor = 1.0, power_of_two: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Encode rows: x -> (payload, beside) with payload · scale ≈ x, computed in float32.

        rows          [..., row.width] any float dtype
        tensor_scale  the scale of the whole tensor, rounded to float32 (`has_tensor_scale` only)
        power_of_two  round the computed scales up to powers of two
        Returns payload [..., payload_elements] and beside [..., beside_elements] or None. Formats
        without scales may return `rows` itself, or views of it.
        """
        dims = Dims(f"{self.name} encode")
        dims.tensor("rows", rows)
        if not rows.is_floating_point():
            got = str(rows.dtype).removeprefix("torch.")
            raise TypeError(f"{dims.op}: rows must be of a floating-point dtype, got {got}")
        _last_axis(dims, "rows", rows, self.row.width)
        scale = self._tensor_scale(dims, tensor_scale, rows.device)
        payload, beside = self._encode(rows.detach(), scale, power_of_two)
        return split_columns(self.row, payload) if self.is_split else (payload, beside)

    @without_autocast
    def decode(
        self,
        payload: Tensor,
        beside: Tensor | None,
        *,
        tensor_scale: float | Tensor = 1.0,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Decode rows: payload · scale in float32, rounded to `dtype`.

        payload  [..., payload_elements] payload_dtype, any strides
        beside   [..., beside_elements] beside_dtype, scales or rotated columns; None if the format
                 has nothing beside its rows
        With dtype=float64 the product is exact. Returns rows [..., row.width]; formats without
        scales may return `payload` itself.
        """
        dims = Dims(f"{self.name} decode")
        dims.tensor("payload", payload)
        dims.dtype("payload", payload, self.payload_dtype)
        _last_axis(dims, "payload", payload, self.payload_elements)
        self._check_beside(dims, payload, beside)
        scale = self._tensor_scale(dims, tensor_scale, payload.device)
        if self.is_split and beside is not None:
            payload, beside = join_columns(payload, beside), None
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        return self._decode(payload, scale if beside is None else beside, compute).to(dtype)

    @abstractmethod
    def _encode(
        self, rows: Tensor, tensor_scale: Tensor | None, power_of_two: bool
    ) -> tuple[Tensor, Tensor | None]: ...

    @abstractmethod
    def _decode(self, payload: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Decode rows; `scales` are separate scales, the tensor scale, or None, as the format has
        them."""

    def _tensor_scale(
        self, dims: Dims, scale: float | Tensor, device: torch.device
    ) -> Tensor | None:
        """The tensor scale as a float32 scalar on `device`; None if the format has none."""
        if not self.has_tensor_scale:
            if isinstance(scale, Tensor) or scale != 1.0:
                dims.fail("tensor_scale", "be left at 1.0 (the format has no tensor scale)", scale)
            return None
        scale = dims.scale("tensor_scale", scale)
        if isinstance(scale, Tensor):
            return scale.detach().to(device, torch.float32).reshape(())
        return torch.full((), scale, dtype=torch.float32, device=device)

    def _check_beside(self, dims: Dims, payload: Tensor, beside: Tensor | None) -> None:
        name = "rope" if self.is_split else "scales"
        if self.beside_dtype is None:
            if beside is not None:
                dims.fail(name, "be None (the format has no separate scales)", "a tensor")
            return
        beside = dims.tensor(name, beside)
        dims.dtype(name, beside, self.beside_dtype)
        expected = (*payload.shape[:-1], self.beside_elements)
        if beside.shape != expected:
            dims.fail(name, f"have shape {expected}", tuple(beside.shape))


def _last_axis(dims: Dims, arg: str, tensor: Tensor, size: int) -> None:
    if tensor.ndim < 1 or tensor.shape[-1] != size:
        dims.fail(arg, f"have a last axis of {size}", f"shape {tuple(tensor.shape)}")


def split_columns(row: RowShape, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The latent and the rotated columns of rows."""
    return rows[..., : row.kv_lora_rank], rows[..., row.kv_lora_rank :]


def join_columns(latent: Tensor, rope: Tensor) -> Tensor:
    """Return rows [latent | rope] of either dtype, copied as bytes where torch has no other way."""
    if latent.dtype != E4M3:
        return torch.cat([latent, rope], -1)
    parts = [part.view(torch.uint8) for part in (latent, rope)]
    return torch.cat(parts, -1).view(E4M3)
