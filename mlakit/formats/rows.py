"""Cache row formats: how one row is stored, as a codec per format in plain torch.

A row has D_C latent columns, then D_R rotated columns (`RowShape`). Sizes are for 512 + 64 columns,
and for 448 + 64 in `fp8_block64`:

    name           payload of one row                               separate scales    bytes/token
    bf16, fp16     D_C + D_R 16-bit floats                          none               1152
    fp32           D_C + D_R float32                                none               2304
    fp8            D_C + D_R e4m3                                   one per tensor     576
    fp8_token      D_C e4m3 | D_R bf16, both divided by the scale   1 f32              640 + 4
    fp8_block128   D_C e4m3 | ceil(D_C/128) f32 scales | D_R bf16   none               656
    fp8_block64    D_C e4m3 | D_R bf16                              8 bytes e8m0       576 + 8
    fp8_row        D_C + D_R e4m3                                   1 f32              576 + 4
    fp8_group32    D_C + D_R e4m3                                   1 f32 / 32 columns 576 + 72
    fp8_group64    D_C + D_R e4m3                                   1 f32 / 64 columns 576 + 36
    fp8_group128   D_C + D_R e4m3                                   1 f32 / 128        576 + 20

The last four are `GROUP_FORMATS`: rows of caches that come from MAX.

`SPLIT_FORMATS` (bf16_split, fp16_split, fp32_split, fp8_split) have the bytes of the format that
they are named after in two tensors: the latent columns, and beside them the rotated columns.

Dequantisation multiplies by the scale: value = stored · scale. Scales are float32 and are never
rounded to a 16-bit type. `power_of_two=True` makes the encoder choose powers of two; `fp8_block64`,
which stores exponents, always does. Scales and bf16 columns in byte rows are little endian.

NaN and infinity. A NaN stays NaN, with its whole scale group if the format has groups. An infinity
makes the scale of its group infinite, and the group decodes to NaN. Without groups an infinity is
kept, except in `fp8`, whose writes saturate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Literal, get_args

import torch
from torch import Tensor

from mlakit.dispatch.autocast import without_autocast
from mlakit.dispatch.checks import E4M3, Dims
from mlakit.formats.e4m3 import dequantise_e4m3, widen_e4m3
from mlakit.formats.traits import FormatTraits
from mlakit.model.geometry import RowShape

GeneralFormat = Literal["bf16", "fp16", "fp32", "fp8", "fp8_token", "fp8_block128", "fp8_block64"]
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


def _amax(x: Tensor, group: int) -> Tensor:
    """Largest magnitude per group of columns; the last group may be short."""
    return torch.stack([columns.abs().amax(-1) for columns in torch.split(x, group, -1)], -1)


def _scales_for(amax: Tensor, smallest: float, power_of_two: bool) -> Tensor:
    """max(amax / 448, smallest) in float32: the largest value of a group becomes 448."""
    # divide by a tensor: CUDA replaces division by a number with a rounded reciprocal
    scales = (amax / torch.full_like(amax, E4M3_MAX)).clamp_min(smallest)
    return round_up_power_of_two(scales) if power_of_two else scales


def _quantise(x: Tensor, scales: Tensor, group: int) -> Tensor:
    """e4m3(x / scale) as bytes, one scale per `group` columns."""
    groups = enumerate(torch.split(x, group, -1))
    quotients = [columns / scales[..., g : g + 1] for g, columns in groups]
    return saturating_cast(torch.cat(quotients, -1), E4M3).view(torch.uint8)


def _dequantised_rows(
    stored: Tensor, scales: Tensor, group: int, rope: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return [stored · scale | rope] in `dtype`, one scale per `group` columns of `stored`."""
    d_c = stored.shape[-1]
    shape = (*stored.shape[:-1], d_c + rope.shape[-1])
    rows = torch.empty(shape, dtype=dtype, device=stored.device)
    dequantise_e4m3(stored, scales, group, out=rows[..., :d_c])
    rows[..., d_c:] = rope
    return rows


def _to_bytes(x: Tensor) -> Tensor:
    """The bytes of a tensor, along its last axis."""
    return x.flatten().view(torch.uint8).view(*x.shape[:-1], x.shape[-1] * x.element_size())


def _from_bytes(stored: Tensor, dtype: torch.dtype) -> Tensor:
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
        return _split_columns(self.row, payload) if self.is_split else (payload, beside)

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
            payload, beside = _join_columns(payload, beside), None
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


class PlainCodec(RowCodec):
    """All columns in one float dtype."""

    def _encode(
        self, rows: Tensor, tensor_scale: Tensor | None, power_of_two: bool
    ) -> tuple[Tensor, Tensor | None]:
        return rows.to(self.payload_dtype), None

    def _decode(self, payload: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        return payload


class TensorScaleCodec(RowCodec):
    """All columns e4m3(x / s) with one scale s per tensor; values beyond ±448 · s saturate."""

    def _encode(
        self, rows: Tensor, tensor_scale: Tensor | None, power_of_two: bool
    ) -> tuple[Tensor, Tensor | None]:
        assert tensor_scale is not None
        return saturating_cast(rows.to(torch.float32) / tensor_scale, self.payload_dtype), None

    def _decode(self, payload: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        assert scales is not None
        return widen_e4m3(payload, dtype) * scales.to(dtype)


class TokenScaleCodec(RowCodec):
    """e4m3(c / σ) | bf16(r / σ), with σ = max(amax(c) / 448, 2**-33) stored separately.

    The score of a row is one dot product times σ. Decoding uses max(σ, 0): a negative scale in an
    unused slot gives a zero row; NaN stays NaN.
    """

    def _encode(
        self, rows: Tensor, tensor_scale: Tensor | None, power_of_two: bool
    ) -> tuple[Tensor, Tensor | None]:
        latent, rope = _split_columns(self.row, rows.to(torch.float32))
        d_c = self.row.kv_lora_rank
        scales = _scales_for(_amax(latent, d_c), SMALLEST_TOKEN_SCALE, power_of_two)
        stored_rope = _to_bytes((rope / scales).to(torch.bfloat16))
        return torch.cat([_quantise(latent, scales, d_c), stored_rope], -1), scales

    def _decode(self, payload: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        assert scales is not None
        d_c = self.row.kv_lora_rank
        scales = scales.to(dtype).clamp_min(0)
        rope = _from_bytes(payload[..., d_c:], torch.bfloat16).to(dtype) * scales
        return _dequantised_rows(payload[..., :d_c], scales, d_c, rope, dtype)


class BlockScaleCodec(RowCodec):
    """e4m3(c / s_g) | s_g | bf16(r), s_g = max(amax_g / 448, smallest normal).

    Group g is the latent columns from g · `scale_group` on; the last group may be short.
    """

    def _encode(
        self, rows: Tensor, tensor_scale: Tensor | None, power_of_two: bool
    ) -> tuple[Tensor, Tensor | None]:
        latent, rope = _split_columns(self.row, rows.to(torch.float32))
        scales = _scales_for(_amax(latent, self.scale_group), SMALLEST_SCALE, power_of_two)
        stored = _quantise(latent, scales, self.scale_group)
        return torch.cat([stored, _to_bytes(scales), _to_bytes(rope.to(torch.bfloat16))], -1), None

    def _decode(self, payload: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        d_c = self.row.kv_lora_rank
        rope_at = self.payload_elements - 2 * self.row.qk_rope_head_dim
        scales = _from_bytes(payload[..., d_c:rope_at], torch.float32).to(dtype)
        rope = _from_bytes(payload[..., rope_at:], torch.bfloat16)
        return _dequantised_rows(payload[..., :d_c], scales, self.scale_group, rope, dtype)


class GroupScaleCodec(RowCodec):
    """e4m3(x / s_g) in all columns, and separately s_g = max(amax_g / 448, smallest normal).

    Group g is the columns from g · `scale_group` on, latent and rotated ones alike; the last group
    may be short.
    """

    def _encode(
        self, rows: Tensor, tensor_scale: Tensor | None, power_of_two: bool
    ) -> tuple[Tensor, Tensor | None]:
        rows = rows.to(torch.float32)
        scales = _scales_for(_amax(rows, self.scale_group), SMALLEST_SCALE, power_of_two)
        return _quantise(rows, scales, self.scale_group).view(E4M3), scales

    def _decode(self, payload: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        assert scales is not None
        rows = torch.empty(payload.shape, dtype=dtype, device=payload.device)
        dequantise_e4m3(payload, scales.to(dtype), self.scale_group, out=rows)
        return rows


class PageFooterCodec(RowCodec):
    """e4m3(c / 2**e_g) | bf16(r), and separately one byte e_g + 127 per 64 columns (e8m0).

    2**e_g is the smallest power of two ≥ max(amax_g / 448, smallest normal). Byte 255 is NaN: the
    group has a NaN or an infinity, which e8m0 cannot represent. Unused scale bytes are 0.
    """

    footer_bytes = 8

    def page_bytes(self, page_size: int) -> int:
        """Bytes per page: all rows, then all scales, padded to a multiple of the row size.

        Row t starts at t · payload_elements, its scales at page_size · payload_elements + 8 · t.
        """
        rows = ceil(super().page_bytes(page_size) / self.payload_elements)
        return rows * self.payload_elements

    def _encode(
        self, rows: Tensor, tensor_scale: Tensor | None, power_of_two: bool
    ) -> tuple[Tensor, Tensor | None]:
        latent, rope = _split_columns(self.row, rows.to(torch.float32))
        scales = _scales_for(_amax(latent, self.scale_group), SMALLEST_SCALE, power_of_two=True)
        payload = torch.cat(
            [_quantise(latent, scales, self.scale_group), _to_bytes(rope.to(torch.bfloat16))], -1
        )
        # the e8m0 byte of a power of two, inf or NaN is its float32 exponent field
        exponents = (scales.view(torch.int32) >> 23 & 0xFF).to(torch.uint8)
        footer = exponents.new_zeros(*exponents.shape[:-1], self.footer_bytes)
        footer[..., : exponents.shape[-1]] = exponents
        return payload, footer

    def _decode(self, payload: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        assert scales is not None
        d_c = self.row.kv_lora_rank
        scales = scales.view(torch.float8_e8m0fnu).to(dtype)
        rope = _from_bytes(payload[..., d_c:], torch.bfloat16)
        return _dequantised_rows(payload[..., :d_c], scales, self.scale_group, rope, dtype)


def _split_columns(row: RowShape, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The latent and the rotated columns of rows."""
    return rows[..., : row.kv_lora_rank], rows[..., row.kv_lora_rank :]


def _join_columns(latent: Tensor, rope: Tensor) -> Tensor:
    """Return rows [latent | rope] of either dtype, copied as bytes where torch has no other way."""
    if latent.dtype != E4M3:
        return torch.cat([latent, rope], -1)
    parts = [part.view(torch.uint8) for part in (latent, rope)]
    return torch.cat(parts, -1).view(E4M3)


def _require_aligned(name: str, row: RowShape) -> None:
    if row.kv_lora_rank % 4:
        raise ValueError(
            f"{name}: kv_lora_rank must be a multiple of 4 (float32 scales and bf16 columns follow "
            f"the latent bytes and must be aligned), got {row.kv_lora_rank}"
        )


def _plain(dtype: torch.dtype) -> Callable[[Format, RowShape], RowCodec]:
    def build(name: Format, row: RowShape) -> RowCodec:
        traits = FormatTraits(IS_E4M3=False, ROPE_AT=row.kv_lora_rank * dtype.itemsize)
        return PlainCodec(name, row, traits, dtype, row.width)

    return build


def _tensor_scaled(name: Format, row: RowShape) -> RowCodec:
    traits = FormatTraits(IS_E4M3=True, ROPE_AT=row.kv_lora_rank, SCALED_BY="tensor")
    return TensorScaleCodec(name, row, traits, E4M3, row.width)


def _token_scaled(name: Format, row: RowShape) -> RowCodec:
    _require_aligned(name, row)
    traits = FormatTraits(
        IS_E4M3=True,
        ROPE_AT=row.kv_lora_rank,
        IS_BF16_ROPE=True,
        SCALED_BY="row",
        GROUP=row.width,
        HIDES_NEGATIVE=True,
    )
    payload_bytes = row.kv_lora_rank + 2 * row.qk_rope_head_dim
    return TokenScaleCodec(name, row, traits, torch.uint8, payload_bytes, torch.float32, 1)


def _block_scaled(group: int) -> Callable[[Format, RowShape], RowCodec]:
    def build(name: Format, row: RowShape) -> RowCodec:
        _require_aligned(name, row)
        traits = FormatTraits(
            IS_E4M3=True,
            ROPE_AT=row.kv_lora_rank + 4 * ceil(row.kv_lora_rank / group),
            IS_BF16_ROPE=True,
            SCALED_BY="group",
            GROUP=group,
            SCALES_AT=row.kv_lora_rank,
        )
        payload_bytes = traits.ROPE_AT + 2 * row.qk_rope_head_dim
        return BlockScaleCodec(name, row, traits, torch.uint8, payload_bytes)

    return build


def _page_footer(name: Format, row: RowShape) -> RowCodec:
    _require_aligned(name, row)
    footer_bytes = PageFooterCodec.footer_bytes
    traits = FormatTraits(
        IS_E4M3=True,
        ROPE_AT=row.kv_lora_rank,
        IS_BF16_ROPE=True,
        SCALED_BY="group",
        GROUP=64,
        HAS_E8M0_SCALES=True,
    )
    widest = traits.GROUP * footer_bytes
    if row.kv_lora_rank > widest:
        raise ValueError(
            f"{name}: kv_lora_rank must not exceed {widest} ({footer_bytes} scale bytes per token, "
            f"one per {traits.GROUP} columns), got {row.kv_lora_rank}"
        )
    payload_bytes = row.kv_lora_rank + 2 * row.qk_rope_head_dim
    return PageFooterCodec(name, row, traits, torch.uint8, payload_bytes, torch.uint8, footer_bytes)


def _row_scaled(name: Format, row: RowShape) -> RowCodec:
    traits = FormatTraits(IS_E4M3=True, ROPE_AT=row.kv_lora_rank, SCALED_BY="row", GROUP=row.width)
    return GroupScaleCodec(name, row, traits, E4M3, row.width, torch.float32, 1)


def _group_scaled(group: int) -> Callable[[Format, RowShape], RowCodec]:
    def build(name: Format, row: RowShape) -> RowCodec:
        if row.kv_lora_rank % group:
            raise ValueError(
                f"{name}: kv_lora_rank must be a multiple of {group} (latent and rotated columns "
                f"share no scale), got {row.kv_lora_rank}"
            )
        if row.v_width > row.kv_lora_rank:
            raise ValueError(
                f"{name}: v_width must not exceed kv_lora_rank {row.kv_lora_rank}, "
                f"got {row.v_width}"
            )
        traits = FormatTraits(
            IS_E4M3=True, ROPE_AT=row.kv_lora_rank, SCALED_BY="group", GROUP=group
        )
        groups = ceil(row.width / group)
        return GroupScaleCodec(name, row, traits, E4M3, row.width, torch.float32, groups)

    return build


def _split(build: Callable[[Format, RowShape], RowCodec]) -> Callable[[Format, RowShape], RowCodec]:
    """Return a builder of the same rows in two tensors."""

    def build_split(name: Format, row: RowShape) -> RowCodec:
        if row.qk_rope_head_dim == 0:
            raise ValueError(f"{name}: qk_rope_head_dim must be at least 1, got 0")
        if row.v_width > row.kv_lora_rank:
            raise ValueError(
                f"{name}: v_width must not exceed kv_lora_rank {row.kv_lora_rank}, "
                f"got {row.v_width}"
            )
        joined = build(name, row)
        return replace(
            joined,
            traits=joined.traits._replace(ROPE_AT=-1),
            payload_elements=row.kv_lora_rank,
            beside_dtype=joined.payload_dtype,
            beside_elements=row.qk_rope_head_dim,
        )

    return build_split


_BUILDERS: dict[Format, Callable[[Format, RowShape], RowCodec]] = {
    "bf16": _plain(torch.bfloat16),
    "fp16": _plain(torch.float16),
    "fp32": _plain(torch.float32),
    "fp8": _tensor_scaled,
    "fp8_token": _token_scaled,
    "fp8_block128": _block_scaled(128),
    "fp8_block64": _page_footer,
    "fp8_row": _row_scaled,
    "fp8_group32": _group_scaled(32),
    "fp8_group64": _group_scaled(64),
    "fp8_group128": _group_scaled(128),
    "bf16_split": _split(_plain(torch.bfloat16)),
    "fp16_split": _split(_plain(torch.float16)),
    "fp32_split": _split(_plain(torch.float32)),
    "fp8_split": _split(_tensor_scaled),
}


FLOAT_FORMATS: dict[torch.dtype, Format] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}


def format_of_dtype(dtype: torch.dtype) -> Format:
    """The format whose rows hold nothing but values of `dtype`: "fp8" for float8_e4m3fn.

    Raises TypeError for a dtype that no format stores alone.
    """
    formats: dict[torch.dtype, Format] = {**FLOAT_FORMATS, torch.float8_e4m3fn: "fp8"}
    if dtype not in formats:
        known = ", ".join(str(each).removeprefix("torch.") for each in formats)
        got = str(dtype).removeprefix("torch.")
        raise TypeError(f"format_of_dtype: dtype must be one of {known}, got {got}")
    return formats[dtype]


def split_format(name: Format) -> Format:
    """The format of the same rows in two tensors; ValueError for rows that have scales."""
    return known_format(f"{name}_split")


def known_format(name: object) -> Format:
    """Return the format of a name or of an engine's name for it (`ENGINE_NAMES`).

    Another name is a ValueError with the choices.
    """
    for known in _BUILDERS:
        if name == known:
            return known
    if isinstance(name, str) and name in ENGINE_NAMES:
        return ENGINE_NAMES[name]
    raise ValueError(f"unknown cache format {name!r}; choose from {', '.join(_BUILDERS)}")


@lru_cache(maxsize=256)
def row_codec(name: Format, row: RowShape) -> RowCodec:
    """The codec of a format for rows of one shape; ValueError if the format does not support it."""
    known = known_format(name)
    return _BUILDERS[known](known, row)
