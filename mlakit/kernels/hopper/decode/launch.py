"""Launching the decode kernels of Hopper, and planning for them.

Work       for each CTA of the plan as many CTAs as a request has work tiles on average
Memory     float32 partials, two per CTA of the plan: 35 MB at most on 132 SMs (with splits of a
           request's own, one per split that the page table has room for)
Limits     rows of 576/512 columns; 16-bit rows with queries of their dtype, or FP8 rows; rows that
           TMA can address, also where no TMA tile fits a page and a gather producer loads rows one
           by one. `kernels.hopper.support` refuses the rest
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import e, log2
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mlakit.cache import UNSHARDED, CacheLayer
from mlakit.formats import SMALLEST_SCALE
from mlakit.kernels import workspace
from mlakit.kernels.arguments import DecodeArguments, DecodePlanArguments, filled
from mlakit.kernels.decode_merge import clear_results, merge_partials, rows_per_slot
from mlakit.kernels.decode_plan import OwnSplits, plan_decode
from mlakit.kernels.hopper.decode.arguments import (
    Batch,
    Gather,
    KVScales,
    OutputArguments,
    QScales,
    Schedule,
    Traits,
)
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
    small_m_fp8_kv_config,
    small_m_tiles,
)
from mlakit.kernels.hopper.decode.m64_bf16 import mla_decode_m64_bf16_kernel
from mlakit.kernels.hopper.decode.m64_fp8_kv import mla_decode_m64_fp8_kv_kernel
from mlakit.kernels.hopper.decode.m64_fp8_qk import mla_decode_m64_fp8_qk_kernel
from mlakit.kernels.hopper.decode.small_m_bf16 import mla_decode_small_m_bf16_kernel
from mlakit.kernels.hopper.decode.small_m_fp8_kv import mla_decode_small_m_fp8_kv_kernel
from mlakit.kernels.hopper.device.primitives import smem_layout
from mlakit.kernels.hopper.device.softmax import ScoreTraits
from mlakit.kernels.hopper.pool_rows import pool_rows
from mlakit.kernels.launch import launch, target
from mlakit.model.masks import Mask
from mlakit.plan import DecodePlanTensors, EvenSplit
from mlakit.plan.split_heuristic import DETERMINISTIC_SPLIT_KEYS

E4M3 = torch.float8_e4m3fn
KERNELS: dict[str, Any] = {
    "small_m_bf16": mla_decode_small_m_bf16_kernel,
    "small_m_fp8_kv": mla_decode_small_m_fp8_kv_kernel,
    "m64_bf16": mla_decode_m64_bf16_kernel,
    "m64_fp8_kv": mla_decode_m64_fp8_kv_kernel,
    "m64_fp8_qk": mla_decode_m64_fp8_qk_kernel,
}


def tiles_of(kernel: str, heads: int, page_size: int) -> Tiles:
    is_small_m = kernel.startswith("small_m")
    return small_m_tiles(heads, page_size) if is_small_m else m64_tiles(kernel)


def mla_decode(kernel: str, a: DecodeArguments, out: Tensor, lse: Tensor) -> None:
    """Launch one of `KERNELS`; a.q and a.q_rope are uniformly strided or heads-major
    (`_checks`)."""
    q_latent, q_rope, q_scale, q_starts = a.q, filled(a.q_rope), a.q_scale, filled(a.q_starts)
    layer, kv_lens, splits = a.layer, a.kv_lens, a.splits
    softmax_scale, mask, sink = a.softmax_scale, a.mask, a.sink
    assert isinstance(a.page_table, Tensor)
    page_table = a.page_table
    (tokens, heads, _), batch = q_latent.shape, kv_lens.shape[0]
    if tokens == 0 or heads == 0:
        return  # nothing to write, and no tile for TMA to load
    tiles = tiles_of(kernel, heads, layer.page_size)
    if isinstance(splits, DecodePlanTensors):
        plan = splits
        if plan.empty_requests.shape[0] > 0:
            clear_results(out, lse, q_starts)  # no item of a plan writes these
    else:
        own_splits = None
        if isinstance(splits, EvenSplit):
            own_splits = OwnSplits(0, splits.num_splits)
        elif a.deterministic:
            own_splits = OwnSplits(DETERMINISTIC_SPLIT_KEYS // tiles.keys)
        plan = _plan(tiles, layer, page_table, q_starts, kv_lens, mask, heads, tokens, own_splits)
    head_tiles = triton.cdiv(heads, tiles.rows)
    request_tiles = triton.cdiv(tokens, batch) * head_tiles
    padded_heads = head_tiles * tiles.rows
    slot_rows = rows_per_slot(plan, most_queries=a.most_queries, padded_heads=padded_heads)
    partial_rows = plan.max_partials * slot_rows
    partial_out = workspace.scratch((partial_rows, out.shape[-1]), torch.float32, out.device)
    partial_lse = workspace.scratch((partial_rows,), torch.float32, out.device)
    q_tiles, q_token_rows = _query_tiles(q_latent, tiles.rows, tiles.q_columns)
    rope_tiles, rope_token_rows = _query_tiles(q_rope, tiles.rows, D_R)
    copied_bytes = sum(tiles.rows * q.shape[-1] for q in (q_latent, q_rope) if q.dtype == E4M3)
    cache = _cache_arguments(kernel, layer, tiles, head_tiles, copied_bytes, q_scale)
    is_external = plan.slot_rows != request_tiles * tiles.rows or plan.tile % BLOCK > 0
    options = {} if cache.config.MAX_REGISTERS is None else {"maxnreg": cache.config.MAX_REGISTERS}
    launch(
        KERNELS[kernel],
        (request_tiles, plan.cta_starts.shape[0] - 1),
        q=q_tiles,
        q_rope=rope_tiles,
        kv=cache.kv,
        kv_rope=cache.kv_rope,
        # a scale of 0 would turn the −inf of a hidden key into NaN
        scale_log2=max(abs(softmax_scale) * log2(e) * cache.host_scale, SMALLEST_SCALE),
        stride_table_request=page_table.stride(0),
        q_token_rows=q_token_rows,
        q_rope_token_rows=rope_token_rows,
        heads=heads,
        slot_rows=slot_rows,
        stride_lse_token=lse.stride(0),
        batch=Batch(
            *(q_starts, kv_lens, page_table),
            *(q_starts.stride(0), kv_lens.stride(0), page_table.stride(1)),
        ),
        schedule=Schedule(
            *(plan.items, plan.cta_starts, plan.partial_starts),
            None if kernel == "m64_bf16" else head_tiles,
        ),
        outputs=OutputArguments(
            *(out, lse, partial_out, partial_lse, sink),
            *(*out.stride()[:2], lse.stride(1), 0 if sink is None else sink.stride(0)),
        ),
        gather=cache.gather,
        **cache.extra_arguments,
        TRAITS=Traits(
            ROWS=tiles.rows,
            PAGE=layer.page_size,
            PAGE_ROWS=cache.page_rows,
            FORMAT=layer.codec.traits,
            ROPE_COLUMN=cache.rope_column,
            IS_CAUSAL=mask.is_causal,
            SCORES=ScoreTraits(
                SIGN=(softmax_scale > 0) - (softmax_scale < 0),
                IS_EXTERNAL_PLAN=is_external,
            ),
            ITEM_COLUMNS=plan.items.shape[1],
            Q_BY_HEAD=_is_heads_major(q_latent),
            Q_ROPE_BY_HEAD=_is_heads_major(q_rope),
        ),
        CONFIG=cache.config,
        num_warps=4,
        **options,
    )
    if plan.max_partials == 0:
        return
    merge_partials(
        partial_out,
        partial_lse,
        partial_starts=plan.partial_starts,
        q_starts=q_starts,
        kv_lens=kv_lens,
        padded_heads=padded_heads,
        slot_rows=slot_rows,
        is_batch_invariant=a.is_batch_invariant,
        sink=sink,
        out=out,
        lse=lse,
    )


def plan_mla_decode(kernel: str, a: DecodePlanArguments) -> DecodePlanTensors:
    """A plan, made on the device, for as many CTAs as run at the same time."""
    assert isinstance(a.page_table, Tensor)
    tiles = tiles_of(kernel, a.heads, a.layer.page_size)
    lengths = (a.q_starts, a.kv_lens, a.mask)
    return _plan(tiles, a.layer, a.page_table, *lengths, a.heads, a.num_tokens, None, a.out)


def _plan(
    tiles: Tiles,
    layer: CacheLayer,
    page_table: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    mask: Mask,
    heads: int,
    num_tokens: int,
    own_splits: OwnSplits | None,
    out: DecodePlanTensors | None = None,
) -> DecodePlanTensors:
    padded_heads = triton.cdiv(heads, tiles.rows) * tiles.rows
    rows = triton.cdiv(num_tokens, max(kv_lens.shape[0], 1)) * padded_heads
    num_sms = target(kv_lens.device).num_sms
    return plan_decode(
        q_starts,
        kv_lens,
        shard=UNSHARDED,
        mask=mask,
        heads=padded_heads,
        num_ctas=max(num_sms * tiles.rows // max(rows, tiles.rows), 1),
        tile=tiles.keys,
        min_tiles=tiles.min_keys // tiles.keys,
        slot_rows=rows,
        capacity=page_table.shape[1] * layer.page_size,
        own=own_splits,
        num_tokens=num_tokens,
        out=out,
    )


@dataclass(frozen=True)
class CacheArguments:
    """Arguments by which a kernel reads the rows of a cache."""

    kv: TensorDescriptor | Tensor
    kv_rope: TensorDescriptor | Tensor
    page_rows: int
    rope_column: int
    gather: Gather
    extra_arguments: dict[str, Any]  # that not every kernel has
    host_scale: float  # of the tensor; 1 where it is on the device
    config: Any  # of `configs`


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
    if not format.IS_E4M3:
        kv = _tma_tiles(rows, tile_rows, tiles.kv_columns)
        kv_rope = _tma_tiles(rope_rows, tile_rows, D_R)
        rope_column = D_C if layer.rope is None else 0
        extra_arguments: dict[str, Any] = {}
        config: Any = small_m_bf16_config(tiles.rows) if kernel == "small_m_bf16" else None
        if kernel == "m64_bf16":
            is_packed = _is_packed(rows) and layer.rope is None
            extra_arguments = {"packed_rows": rows if is_packed else None}
            config = m64_bf16_config(head_tiles, is_gathered=is_gathered)
        return CacheArguments(
            kv, kv_rope, page_rows, rope_column, gather, extra_arguments, 1.0, config
        )
    words = rows.view(torch.int32)
    if not format.IS_BF16_ROPE:
        kv_rope = _tma_tiles(rope_rows.view(torch.int32), tile_rows, D_R // 4)
        rope_column = D_C // 4 if layer.rope is None else 0
    else:
        values = rows.view(torch.bfloat16)
        kv_rope, rope_column = _tma_tiles(values, tile_rows, D_R), values.shape[1] - D_R
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
    kv = _tma_tiles(words, tile_rows, 32)
    return CacheArguments(
        kv, kv_rope, page_rows, rope_column, gather, extra_arguments, host_scale, config
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


def _is_heads_major(q: Tensor) -> bool:
    """Return whether q is heads-major: the tokens of a head are adjacent."""
    return q.shape[0] > 1 and q.shape[1] > 1 and 0 < q.stride(0) < q.stride(1)


def _query_tiles(q: Tensor, rows: int, columns: int) -> tuple[TensorDescriptor, int]:
    """TMA tiles of 16-bit queries, or of the words of FP8 ones, and rows between two tokens.

    Where queries lie by head, a row has all tokens of a head, and columns are counted.
    """
    is_heads_major = _is_heads_major(q)
    if is_heads_major:
        tokens, heads, width = q.shape
        token_rows = q.stride(0)
        q_rows = q.as_strided((heads, (tokens - 1) * token_rows + width), (q.stride(1), 1))
    else:
        q_rows, token_rows = pool_rows(q)
    if q.dtype == E4M3:
        token_rows = token_rows // 4 if is_heads_major else token_rows
        return _tma_tiles(q_rows.view(torch.int32), rows, columns // 4), token_rows
    return _tma_tiles(q_rows, rows, columns), token_rows


# kept: what a layout checks of itself takes the host longer than the rest of a descriptor
_smem_layout = lru_cache(maxsize=64)(smem_layout)


def _tma_tiles(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    layout = _smem_layout(columns, tensor.element_size() * 8)
    shape, strides = list(tensor.shape), list(tensor.stride())
    return TensorDescriptor(tensor, shape, strides, [rows, columns], layout)
