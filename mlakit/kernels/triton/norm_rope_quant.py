"""Launches `norm_rope_quant_kernel`: RoPE, RMSNorm, quantise and append in one launch per step."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from mlakit.arguments import AppendArguments
from mlakit.cache import CacheLayer
from mlakit.formats import SMALLEST_SCALE, SMALLEST_TOKEN_SCALE, BlockScaleCodec, PageFooterCodec
from mlakit.kernels.triton.configs import pick_append_config
from mlakit.kernels.triton.launch import launch, target
from mlakit.kernels.triton.norm_quant import (
    BLOCK_SCALES,
    FOOTER_SCALES,
    NO_SCALE,
    TENSOR_SCALE,
    TOKEN_SCALE,
)
from mlakit.kernels.triton.norm_rope_quant_kernel import norm_rope_quant_kernel
from mlakit.kernels.triton.rows import as_bytes, rows_are_aligned

_SCALING = {
    "fp8": TENSOR_SCALE,
    "fp8_token": TOKEN_SCALE,
    "fp8_block128": BLOCK_SCALES,
    "fp8_block64": FOOTER_SCALES,
}


def norm_rope_quant_append(a: AppendArguments, q_rope_out: Tensor) -> None:
    q_rope, kv, freqs, gamma, layer = a.q_rope, a.kv, a.freqs, a.gamma, a.layer
    page_table, kv_lens, q_starts = a.page_table, a.kv_lens, a.q_starts
    slots, positions = a.slots, a.positions
    tokens, heads, d_r = q_rope.shape
    d_c = layer.codec.row.kv_lora_rank
    device = target(q_rope.device)
    config = pick_append_config(
        tokens=tokens,
        heads=heads,
        kv_lora_rank=d_c,
        rope=d_r,
        itemsize=q_rope.element_size(),
        num_sms=device.num_sms,
    )
    q_rope_out, payload = as_bytes(q_rope_out), as_bytes(layer.payload)
    flat = isinstance(page_table, tuple)
    kv_starts, pages = page_table if isinstance(page_table, tuple) else (None, page_table)
    scales = layer.scales
    scaling = _SCALING.get(layer.codec.name, NO_SCALE)
    group, latent_tile = _tile_of_latent(scaling, d_c)
    pdl = config.pdl and device.arch >= 90
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}

    norm_programs = triton.cdiv(tokens, config.rows)
    rope_programs = 0
    if d_r:
        rope_programs = tokens * triton.cdiv(heads, config.heads)
    launch(
        norm_rope_quant_kernel,
        (norm_programs + rope_programs,),
        q_rope,
        kv,
        freqs,
        gamma,
        payload,
        scales,
        *_tensor_scale(layer),
        kv_starts,
        pages,
        kv_lens,
        q_starts,
        slots,
        positions,
        q_rope_out,
        tokens,
        heads,
        0 if kv_lens is None else kv_lens.shape[0],
        freqs.shape[0],
        float(a.epsilon),
        norm_programs,
        q_rope.stride(0),
        q_rope.stride(1),
        kv.stride(0),
        freqs.stride(0),
        freqs.stride(1),
        _stride(gamma, 0),
        payload.stride(0),
        payload.stride(1),
        _stride(scales, 0),
        _stride(scales, 1),
        _stride(kv_starts, 0),
        0 if flat else _stride(pages, 0),
        _stride(pages, -1),
        _stride(kv_lens, 0),
        _stride(q_starts, 0),
        _stride(slots, 0),
        _stride(positions, 0),
        q_rope_out.stride(0),
        q_rope_out.stride(1),
        D_C=d_c,
        D_R=d_r,
        PAGE_SIZE=layer.page_size,
        SCALING=scaling.value,
        GROUP=group,
        POWER_OF_TWO=a.power_of_two_scales or bool(scaling == FOOTER_SCALES),
        SMALLEST=SMALLEST_TOKEN_SCALE if scaling == TOKEN_SCALE else SMALLEST_SCALE,
        ALIGNED=rows_are_aligned(layer),
        INTERLEAVED=a.rope == "interleaved",
        HAS_FP8=device.has_fp8,
        LATENT_TILE=latent_tile,
        PAIRS=triton.next_power_of_2(max(d_r // 2, 1)),
        ROWS=config.rows,
        HEADS=config.heads,
        PROBES=config.probes,
        PDL=pdl,
        num_warps=config.num_warps,
        # on sm_120 the assembler otherwise stops at 40 registers and spills two words
        **({"maxnreg": 128} if device.arch == 120 else {}),
        **options,
    )


def _stride(tensor: Tensor | None, axis: int) -> int:
    return 0 if tensor is None else tensor.stride(axis)


def _tensor_scale(layer: CacheLayer) -> tuple[float, Tensor | None]:
    """(the scale as a number, None), or (1.0, the scale on the device)."""
    scale = layer.tensor_scale
    if isinstance(scale, Tensor):
        return 1.0, scale.to(layer.payload.device)
    return float(scale), None


def _tile_of_latent(scaling: Any, d_c: int) -> tuple[int, int]:
    """(columns that share a scale, columns of the tile), powers of two."""
    width = triton.next_power_of_2(d_c)
    if scaling == BLOCK_SCALES:
        return BlockScaleCodec.group, max(width, BlockScaleCodec.group)
    if scaling == FOOTER_SCALES:  # one group per byte of a footer
        return PageFooterCodec.group, PageFooterCodec.group * PageFooterCodec.footer_bytes
    return width, width
