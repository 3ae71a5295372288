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
    mxfp4_block32  D_C e2m1, two in a byte | ceil(D_C/32) e8m0 | D_R bf16   none       400
    fp8_row        D_C + D_R e4m3                                   1 f32              576 + 4
    fp8_group32    D_C + D_R e4m3                                   1 f32 / 32 columns 576 + 72
    fp8_group64    D_C + D_R e4m3                                   1 f32 / 64 columns 576 + 36
    fp8_group128   D_C + D_R e4m3                                   1 f32 / 128        576 + 20

The last four are `GROUP_FORMATS`: rows of caches that come from MAX.

`SPLIT_FORMATS` (bf16_split, fp16_split, fp32_split, fp8_split) have the bytes of the format that
they are named after in two tensors: the latent columns, and beside them the rotated columns.

Dequantisation multiplies by the scale: value = stored · scale. Scales are float32 and are never
rounded to a 16-bit type. `power_of_two=True` makes the encoder choose powers of two; `fp8_block64`
and `mxfp4_block32`, which store exponents, always do. Scales and bf16 columns in byte rows are
little endian.

NaN and infinity. A NaN stays NaN, with its whole scale group if the format has groups. An infinity
makes the scale of its group infinite, and the group decodes to NaN. Without groups an infinity is
kept, except in `fp8`, whose writes saturate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from math import ceil

import torch
from torch import Tensor

from mlakit.dispatch.checks import E4M3
from mlakit.formats.codec import (
    ENGINE_NAMES,
    SMALLEST_SCALE,
    SMALLEST_TOKEN_SCALE,
    Format,
    RowCodec,
    dequantised_rows,
    exponent_bytes,
    from_bytes,
    largest_magnitudes,
    quantise,
    saturating_cast,
    scales_for,
    split_columns,
    to_bytes,
)
from mlakit.formats.e4m3 import dequantise_e4m3, widen_e4m3
from mlakit.formats.mxfp4 import four_bit_rows
from mlakit.formats.traits import FormatTraits
from mlakit.model.geometry import RowShape


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
        latent, rope = split_columns(self.row, rows.to(torch.float32))
        d_c = self.row.kv_lora_rank
        scales = scales_for(largest_magnitudes(latent, d_c), SMALLEST_TOKEN_SCALE, power_of_two)
        stored_rope = to_bytes((rope / scales).to(torch.bfloat16))
        return torch.cat([quantise(latent, scales, d_c), stored_rope], -1), scales

    def _decode(self, payload: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        assert scales is not None
        d_c = self.row.kv_lora_rank
        scales = scales.to(dtype).clamp_min(0)
        rope = from_bytes(payload[..., d_c:], torch.bfloat16).to(dtype) * scales
        return dequantised_rows(payload[..., :d_c], scales, d_c, rope, dtype)


class BlockScaleCodec(RowCodec):
    """e4m3(c / s_g) | s_g | bf16(r), s_g = max(amax_g / 448, smallest normal).

    Group g is the latent columns from g · `scale_group` on; the last group may be short.
    """

    def _encode(
        self, rows: Tensor, tensor_scale: Tensor | None, power_of_two: bool
    ) -> tuple[Tensor, Tensor | None]:
        latent, rope = split_columns(self.row, rows.to(torch.float32))
        scales = scales_for(
            largest_magnitudes(latent, self.scale_group), SMALLEST_SCALE, power_of_two
        )
        stored = quantise(latent, scales, self.scale_group)
        return torch.cat([stored, to_bytes(scales), to_bytes(rope.to(torch.bfloat16))], -1), None

    def _decode(self, payload: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        d_c = self.row.kv_lora_rank
        rope_at = self.payload_elements - 2 * self.row.qk_rope_head_dim
        scales = from_bytes(payload[..., d_c:rope_at], torch.float32).to(dtype)
        rope = from_bytes(payload[..., rope_at:], torch.bfloat16)
        return dequantised_rows(payload[..., :d_c], scales, self.scale_group, rope, dtype)


class GroupScaleCodec(RowCodec):
    """e4m3(x / s_g) in all columns, and separately s_g = max(amax_g / 448, smallest normal).

    Group g is the columns from g · `scale_group` on, latent and rotated ones alike; the last group
    may be short.
    """

    def _encode(
        self, rows: Tensor, tensor_scale: Tensor | None, power_of_two: bool
    ) -> tuple[Tensor, Tensor | None]:
        rows = rows.to(torch.float32)
        scales = scales_for(
            largest_magnitudes(rows, self.scale_group), SMALLEST_SCALE, power_of_two
        )
        return quantise(rows, scales, self.scale_group).view(E4M3), scales

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
        latent, rope = split_columns(self.row, rows.to(torch.float32))
        scales = scales_for(
            largest_magnitudes(latent, self.scale_group), SMALLEST_SCALE, power_of_two=True
        )
        payload = torch.cat(
            [quantise(latent, scales, self.scale_group), to_bytes(rope.to(torch.bfloat16))], -1
        )
        exponents = exponent_bytes(scales)
        footer = exponents.new_zeros(*exponents.shape[:-1], self.footer_bytes)
        footer[..., : exponents.shape[-1]] = exponents
        return payload, footer

    def _decode(self, payload: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        assert scales is not None
        d_c = self.row.kv_lora_rank
        scales = scales.view(torch.float8_e8m0fnu).to(dtype)
        rope = from_bytes(payload[..., d_c:], torch.bfloat16)
        return dequantised_rows(payload[..., :d_c], scales, self.scale_group, rope, dtype)


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
    "mxfp4_block32": four_bit_rows,
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
