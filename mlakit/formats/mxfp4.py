"""Rows of four-bit columns: OCP's MXFP4, e2m1 values in groups of 32 that share a power of two."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from mlakit.formats.codec import (
    SMALLEST_SCALE,
    Format,
    RowCodec,
    exponent_bytes,
    from_bytes,
    largest_magnitudes,
    scales_for,
    split_columns,
    to_bytes,
)
from mlakit.formats.traits import FormatTraits
from mlakit.model.geometry import RowShape

E2M1_MAX = 6.0
GROUP = 32
ROPE_ALIGNMENT = 16  # bytes, where rotated columns follow


def narrow_e2m1(x: Tensor) -> Tensor:
    """The codes of x, uint8 0 to 15: to nearest even, beyond ±6 saturated. NaN and −0 become 0."""
    magnitude = x.abs()
    # a value between two codes belongs to the even one: below these bounds, from the others on
    codes = torch.zeros_like(magnitude, dtype=torch.uint8)
    for bound in (0.25, 1.25, 2.5, 5.0):
        codes += magnitude > bound
    for bound in (0.75, 1.75, 3.5):
        codes += magnitude >= bound
    return codes | (x < 0).to(torch.uint8) << 3


def widen_e2m1(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of codes, exactly: float16 has the same bits further left, and is 2**14 times too
    small, since its exponent has a bias of 15, that of e2m1 of 1."""
    wide = codes.to(torch.int16)
    halves = ((wide & 8) << 12 | (wide & 7) << 9).view(torch.float16)
    return halves.to(dtype) * 2.0**14


def pack(codes: Tensor) -> Tensor:
    """Two codes a byte, the first one in its lower half."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack(stored: Tensor) -> Tensor:
    return torch.stack([stored & 0xF, stored >> 4], -1).flatten(-2)


class FourBitCodec(RowCodec):
    """e2m1(c / 2**e_g) in pairs | one byte e_g + 127 per 32 columns (e8m0) | padding | bf16(r).

    2**e_g is the smallest power of two ≥ max(amax_g / 6, smallest normal). Byte 255 is NaN: the
    group has a NaN or an infinity. Bytes of padding are 0.
    """

    @property
    def _scales_end(self) -> int:
        return self.traits.SCALES_AT + ceil(self.row.kv_lora_rank / GROUP)

    def _of_columns(self, scales: Tensor) -> Tensor:
        """The scale of each latent column; the last group may be short."""
        return scales.repeat_interleave(GROUP, -1)[..., : self.row.kv_lora_rank]

    def _encode(
        self, rows: Tensor, tensor_scale: Tensor | None, power_of_two: bool
    ) -> tuple[Tensor, Tensor | None]:
        latent, rope = split_columns(self.row, rows.to(torch.float32))
        amax = largest_magnitudes(latent, GROUP)
        scales = scales_for(amax, SMALLEST_SCALE, power_of_two=True, largest=E2M1_MAX)
        codes = narrow_e2m1(latent / self._of_columns(scales))
        payload = codes.new_zeros(*rows.shape[:-1], self.payload_elements)
        payload[..., : self.traits.SCALES_AT] = pack(codes)
        payload[..., self.traits.SCALES_AT : self._scales_end] = exponent_bytes(scales)
        payload[..., self.traits.ROPE_AT :] = to_bytes(rope.to(torch.bfloat16))
        return payload, None

    def _decode(self, payload: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        exponents = payload[..., self.traits.SCALES_AT : self._scales_end].contiguous()
        columns = self._of_columns(exponents.view(torch.float8_e8m0fnu).to(dtype))
        latent = widen_e2m1(unpack(payload[..., : self.traits.SCALES_AT]), dtype) * columns
        rope = from_bytes(payload[..., self.traits.ROPE_AT :], torch.bfloat16)
        return torch.cat([latent, rope.to(dtype)], -1)


def four_bit_rows(name: Format, row: RowShape) -> RowCodec:
    if row.kv_lora_rank % 2:
        raise ValueError(
            f"{name}: kv_lora_rank must be even (a byte holds two columns), got {row.kv_lora_rank}"
        )
    scales_at = row.kv_lora_rank // 2
    rope_at = scales_at + ceil(row.kv_lora_rank / GROUP)
    if row.qk_rope_head_dim:
        rope_at = -(-rope_at // ROPE_ALIGNMENT) * ROPE_ALIGNMENT
    traits = FormatTraits(
        IS_E4M3=False,
        ROPE_AT=rope_at,
        IS_BF16_ROPE=True,
        SCALED_BY="group",
        GROUP=GROUP,
        SCALES_AT=scales_at,
        HAS_E8M0_SCALES=True,
        IS_E2M1=True,
    )
    return FourBitCodec(name, row, traits, torch.uint8, rope_at + 2 * row.qk_rope_head_dim)
