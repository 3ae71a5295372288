"""Quantise finished rows and store them at their slots: one kernel for every cache format.

Maths      `store_rows` has the equations
Work       one program per ROWS tokens
Memory     reads latent, k_rope and slots; writes one cache row per token with a slot in the pool
Limits     none: widths are padded to powers of two, rows may have any stride and alignment
"""

from __future__ import annotations

import triton
import triton.language as tl

from mlakit.kernels.arguments import AppendRowsArguments
from mlakit.kernels.launch import launch, target
from mlakit.kernels.triton.arguments import as_bytes, stride_of
from mlakit.kernels.triton.configs import pick_append_config
from mlakit.kernels.triton.rope import load_pairs
from mlakit.kernels.triton.store_rows import (
    row_options,
    store_latent,
    store_rope,
    tensor_scale_of,
)


def append_rows(a: AppendRowsArguments) -> None:
    latent, k_rope, layer = a.latent, a.k_rope, a.layer
    tokens = latent.shape[0]
    device = target(latent.device)
    config = pick_append_config(
        tokens=tokens,
        heads=1,
        kv_lora_rank=latent.shape[1],
        rope=layer.codec.row.qk_rope_head_dim,
        itemsize=latent.element_size(),
        num_sms=device.num_sms,
    )
    payload, scales = as_bytes(layer.payload), layer.scales
    launch(
        append_rows_kernel,
        (triton.cdiv(tokens, config.rows),),
        latent,
        k_rope,
        payload,
        scales,
        *tensor_scale_of(layer),
        a.slots,
        tokens,
        layer.num_slots,
        latent.stride(0),
        stride_of(k_rope, 0),
        payload.stride(0),
        payload.stride(1),
        stride_of(scales, 0),
        stride_of(scales, 1),
        a.slots.stride(0),
        ROWS=config.rows,
        num_warps=config.num_warps,
        **row_options(layer, power_of_two=a.power_of_two_scales, has_fp8=device.has_fp8),
        # the choices of `norm_rope_quant_kernel`
        **({"maxnreg": 128} if device.arch == 120 else {}),
    )


@triton.jit(do_not_specialize=["tokens", "num_slots", "slots_stride"])
def append_rows_kernel(
    latent,  # [tokens, D_C]
    k_rope,  # [tokens, D_R]; None where D_R is 0
    payload,  # [pages, PAGE_SIZE, row], e4m3 as uint8
    scales,  # [pages, PAGE_SIZE, 1 or FOOTER_BYTES]; None if all scales are inside the row
    tensor_scale,
    tensor_scale_at,  # pointer to the tensor scale on the device, or None
    slots,  # [tokens]; outside of [0, num_slots): no row is written
    tokens,
    num_slots,
    latent_stride_token,
    k_rope_stride_token,
    payload_stride_page,
    payload_stride_row,
    scales_stride_page,
    scales_stride_row,
    slots_stride,
    D_C: tl.constexpr,
    D_R: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCALING: tl.constexpr,
    GROUP: tl.constexpr,  # columns of the tile that share a scale
    POWER_OF_TWO: tl.constexpr,
    SMALLEST: tl.constexpr,  # scale
    ALIGNED: tl.constexpr,  # rows start at multiples of 4 bytes
    HAS_FP8: tl.constexpr,
    LATENT_TILE: tl.constexpr,  # D_C padded
    PAIRS: tl.constexpr,  # D_R / 2 padded
    ROWS: tl.constexpr,
):
    """Cache rows of ROWS tokens."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_token = token < tokens
    slot = tl.load(slots + token * slots_stride, mask=is_token, other=-1).to(tl.int64)
    is_stored = (slot >= 0) & (slot < num_slots)
    column = tl.arange(0, LATENT_TILE)
    # rows without a slot are not read: they may lie in memory that holds nothing
    x = tl.load(
        latent + token[:, None] * latent_stride_token + column[None, :],
        mask=is_stored[:, None] & (column < D_C)[None, :],
        other=0.0,
    )
    if D_R > 0:
        k0, k1 = load_pairs(
            (k_rope + token * k_rope_stride_token)[:, None, None], is_stored[:, None, None],
            D_R, PAIRS, True,
        )  # fmt: skip
    page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
    row = payload + page * payload_stride_page + offset * payload_stride_row  # [T]
    rope = None
    if D_R > 0:
        rope = (k0.to(tl.float32), k1.to(tl.float32))
    rope_scale = store_latent(
        x.to(tl.float32), rope, row, page, offset, is_stored,
        (scales, scales_stride_page, scales_stride_row), (tensor_scale, tensor_scale_at),
        D_C, SCALING, GROUP, POWER_OF_TWO, SMALLEST, ALIGNED, HAS_FP8,
    )  # fmt: skip
    if D_R > 0:
        store_rope(
            rope[0], rope[1], row, is_stored, rope_scale,
            D_C, D_R, PAIRS, SCALING, GROUP, POWER_OF_TWO, SMALLEST, ALIGNED, True, HAS_FP8,
        )  # fmt: skip
