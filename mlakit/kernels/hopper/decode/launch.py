"""Launching the decode kernels of Hopper, and planning for them.

Work       for each CTA of the plan as many CTAs as a request has work tiles on average
Memory     float32 partials, two per CTA of the plan: 35 MB at most on 132 SMs (with splits of a
           request's own, one per split that the page table has room for)
Limits     rows of 576/512 columns, in small_m_bf16 also of 320/256; 16-bit rows with queries of
           their dtype, or FP8 rows; rows that TMA can address, also where no TMA tile fits a page
           and a gather producer loads rows one by one. `kernels.hopper.support` refuses the rest
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mlakit.cache import CacheLayer
from mlakit.kernels.arguments import DecodeArguments, DecodePlanArguments, filled
from mlakit.kernels.hopper.decode.arguments import Gather, KVScales, QScales
from mlakit.kernels.hopper.decode.calls import E4M3, CacheArguments, make_plan, run, tma_tiles
from mlakit.kernels.hopper.decode.configs import (
    BLOCK,
    D_C,
    D_R,
    MIN_TMA_PAGE_M64_BF16,
    PAGES,
    Tiles,
    m64_bf16_config,
    m64_fp8_kv_config,
    m64_fp8_qk_config,
    m64_tiles,
    small_m_bf16_config,
    small_m_fp4_kv_config,
    small_m_fp8_kv_config,
    small_m_tiles,
)
from mlakit.kernels.hopper.decode.m64_bf16 import mla_decode_m64_bf16_kernel
from mlakit.kernels.hopper.decode.m64_fp8_kv import mla_decode_m64_fp8_kv_kernel
from mlakit.kernels.hopper.decode.m64_fp8_qk import mla_decode_m64_fp8_qk_kernel
from mlakit.kernels.hopper.decode.small_m_bf16 import mla_decode_small_m_bf16_kernel
from mlakit.kernels.hopper.decode.small_m_fp4_kv import mla_decode_small_m_fp4_kv_kernel
from mlakit.kernels.hopper.decode.small_m_fp8_kv import mla_decode_small_m_fp8_kv_kernel
from mlakit.kernels.hopper.pool_rows import pool_rows
from mlakit.plan import DecodePlanTensors

KERNELS: dict[str, Any] = {
    "small_m_bf16": mla_decode_small_m_bf16_kernel,
    "small_m_fp4_kv": mla_decode_small_m_fp4_kv_kernel,
    "small_m_fp8_kv": mla_decode_small_m_fp8_kv_kernel,
    "m64_bf16": mla_decode_m64_bf16_kernel,
    "m64_fp8_kv": mla_decode_m64_fp8_kv_kernel,
    "m64_fp8_qk": mla_decode_m64_fp8_qk_kernel,
}


def tiles_of(kernel: str, heads: int, page_size: int) -> Tiles:
    is_small_m = kernel.startswith("small_m")
    return small_m_tiles(heads, page_size) if is_small_m else m64_tiles(kernel)


def mla_decode(kernel: str, a: DecodeArguments, out: Tensor, lse: Tensor) -> None:
    """Launch one of `KERNELS`."""
    tokens, heads, _ = a.q.shape
    if tokens == 0 or heads == 0:
        return  # nothing to write, and no tile for TMA to load
    tiles = tiles_of(kernel, heads, a.layer.page_size)
    queries = (a.q, filled(a.q_rope))
    copied_bytes = sum(tiles.rows * q.shape[-1] for q in queries if q.dtype == E4M3)
    head_tiles = triton.cdiv(heads, tiles.rows)
    cache = _cache_arguments(kernel, a.layer, tiles, head_tiles, copied_bytes, a.q_scale)
    is_m64_bf16 = kernel == "m64_bf16"
    run(KERNELS[kernel], tiles, cache, a, out, lse, has_constant_head_tiles=is_m64_bf16)


def plan_mla_decode(kernel: str, a: DecodePlanArguments) -> DecodePlanTensors:
    """A plan, made on the device, for as many CTAs as run at the same time."""
    return make_plan(tiles_of(kernel, a.heads, a.layer.page_size), a)


def _cache_arguments(
    kernel: str,
    layer: CacheLayer,
    tiles: Tiles,
    head_tiles: int,
    copied_bytes: int,
    q_scale: Tensor | None,
) -> CacheArguments:
    """Return how a kernel reads rows; FP8 queries as loaded take `copied_bytes` of shared
    memory."""
    rows, page_rows = pool_rows(layer.payload)
    tile_rows = layer.page_size if layer.page_size in PAGES else BLOCK
    gather = _gather(kernel, layer, rows)
    is_gathered = gather.words is not None
    format = layer.codec.traits
    # support takes rotated columns in a tensor of their own only with the same PAGE_ROWS
    rope_rows = rows if layer.rope is None else pool_rows(layer.rope)[0]
    if format.IS_E2M1:
        return _fp4_arguments(layer, rows, page_rows, tile_rows, gather, tiles)
    if not format.IS_E4M3:
        kv = tma_tiles(rows, tile_rows, tiles.kv_columns)
        kv_rope = tma_tiles(rope_rows, tile_rows, D_R)
        latent_columns = layer.codec.row.kv_lora_rank
        rope_column = latent_columns if layer.rope is None else 0
        extra_arguments: dict[str, Any] = {}
        config: Any = None
        if kernel == "small_m_bf16":
            config = small_m_bf16_config(tiles.rows, latent_columns)
        if kernel == "m64_bf16":
            is_packed = _is_packed(rows) and layer.rope is None
            extra_arguments = {"packed_rows": rows if is_packed else None}
            config = m64_bf16_config(head_tiles, is_gathered=is_gathered)
        return CacheArguments(
            kv, kv_rope, page_rows, rope_column, gather, extra_arguments, 1.0, config
        )
    words = rows.view(torch.int32)
    if not format.IS_BF16_ROPE:
        kv_rope = tma_tiles(rope_rows.view(torch.int32), tile_rows, D_R // 4)
        rope_column = D_C // 4 if layer.rope is None else 0
    else:
        values = rows.view(torch.bfloat16)
        kv_rope, rope_column = tma_tiles(values, tile_rows, D_R), values.shape[1] - D_R
    kv_scales, host_scale = _kv_scales(layer)
    extra_arguments = {"kv_scales": kv_scales, "q_scales": _q_scales(q_scale)}
    if kernel == "m64_fp8_kv":
        # its own loads need the strides too
        gather = Gather(gather.words, words.stride(0) // 4)
        config = m64_fp8_kv_config(is_packed=_is_packed(words) and _is_packed(rope_rows))
        if layer.rope is not None:
            kv_rope = rope_rows.view(torch.int32)
            gather = gather._replace(rope_row_chunks=kv_rope.stride(0) // 4)
        return CacheArguments(
            words, kv_rope, page_rows, rope_column, gather, extra_arguments, host_scale, config
        )
    rope_bytes = BLOCK * kv_rope.block_shape[1] * kv_rope.base.element_size()
    if kernel == "m64_fp8_qk":
        config = m64_fp8_qk_config(
            format, rope_bytes=rope_bytes, copied_bytes=copied_bytes, is_gathered=is_gathered
        )
    else:
        config = small_m_fp8_kv_config(
            tiles.rows,
            format,
            rope_bytes=rope_bytes,
            copied_bytes=copied_bytes,
            is_gathered=is_gathered,
        )
    kv = tma_tiles(words, tile_rows, 32)
    return CacheArguments(
        kv, kv_rope, page_rows, rope_column, gather, extra_arguments, host_scale, config
    )


def _fp4_arguments(
    layer: CacheLayer, rows: Tensor, page_rows: int, tile_rows: int, gather: Gather, tiles: Tiles
) -> CacheArguments:
    """Return how `small_m_fp4_kv` reads rows."""
    words = rows.view(torch.int32)
    # a TMA tile of 16 bytes is narrower than every swizzle
    plain: Any = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    shape, strides = list(words.shape), list(words.stride())
    scales = TensorDescriptor(words, shape, strides, [tile_rows, 4], plain)
    return CacheArguments(
        tma_tiles(words, tile_rows, 32),
        tma_tiles(rows.view(torch.bfloat16), tile_rows, D_R),
        page_rows,
        layer.codec.traits.ROPE_AT // 2,
        gather,
        {"kv_scales": scales},
        1.0,
        small_m_fp4_kv_config(tiles.rows),
    )


def _gather(kernel: str, layer: CacheLayer, rows: Tensor) -> Gather:
    """Return the arguments of a gather producer; they are None where TMA loads blocks."""
    is_tma_page = layer.page_size in PAGES or layer.page_size % BLOCK == 0
    if kernel == "m64_bf16" and layer.page_size < MIN_TMA_PAGE_M64_BF16:
        is_tma_page = False
    if is_tma_page:
        return Gather(None, None)
    words = rows.view(torch.int32)
    return Gather(words, words.stride(0) // 4)


def _kv_scales(layer: CacheLayer) -> tuple[KVScales, float]:
    """The scales of an FP8 cache, and the tensor's where it is on the host."""
    scale = layer.tensor_scale
    host_scale = 1.0 if isinstance(scale, Tensor) else float(scale)
    device_scale = scale.to(layer.payload.device) if isinstance(scale, Tensor) else None
    scales, format = layer.scales, layer.codec.traits
    if format.SCALES_AT >= 0:
        scales = layer.payload[..., format.SCALES_AT : format.ROPE_AT].view(torch.float32)
    strides = (0, 0) if scales is None else scales.stride()[:2]
    return KVScales(scales, *strides, host_scale, device_scale), host_scale


def _q_scales(q_scale: Tensor | None) -> QScales:
    return QScales(q_scale, 0 if q_scale is None else q_scale.stride(0))


def _is_packed(rows: Tensor) -> bool:
    return rows.stride(0) == rows.shape[1]
