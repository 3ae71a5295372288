"""Launching absorbed attention over paged rows of 576 columns, and planning it.

Work       the plan's workers times the units that a request has on average; see `decode_kernel`,
           and for up to 32 heads `decode_few_kernel`; over FP8 rows `decode_fp8_kernel`,
           for queries of e4m3 too `decode_e4m3_kernel`, and `decode_few_fp8_kernel`
Memory     float32 partials, two per worker: 35 MB at most where there are 132 SMs
           (where requests are cut on their own account, one per part that the table has room for)
Limits     rows of 576/512 in halves and queries of their dtype, or rows of e4m3 and queries of
           halves or e4m3; rows that TMA can copy boxes of, also where pages are of no size for
           that and rows come one by one (`decode_copies`); `support` says no to the rest
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mlakit.cache import WHOLE, CacheLayer, KVShard
from mlakit.formats import SMALLEST_SCALE
from mlakit.kernels.hopper.decode_e4m3_kernel import mla_decode_e4m3_kernel
from mlakit.kernels.hopper.decode_few_fp8_kernel import mla_decode_few_fp8_kernel
from mlakit.kernels.hopper.decode_few_kernel import mla_decode_few_kernel
from mlakit.kernels.hopper.decode_fp8_kernel import mla_decode_fp8_kernel
from mlakit.kernels.hopper.decode_kernel import mla_decode_kernel
from mlakit.kernels.hopper.support import ARCH, BLOCK, FP8_FORMATS, PAGES, are_boxes
from mlakit.kernels.triton.decode_merge import merge_partials, rows_per_slot
from mlakit.kernels.triton.decode_plan import SPLIT_KEYS, OwnCuts, plan_decode
from mlakit.kernels.triton.launch import SHARED_BYTES, launch, target
from mlakit.masks import Mask
from mlakit.plan import DecodePlanTensors, EvenSplit
from mlakit.replay import workspace

LATENT, ROPE = 512, 64  # columns
E4M3 = torch.float8_e4m3fn
PANEL = 64  # columns of halves: what a swizzle is of
OTHER_BYTES = 3072  # barriers, what warps tell each other and what they begin with
LEAST_KEYS = 128  # that are worth a worker
LEAST_KEYS_OF_FEW = 64  # likewise, where a worker has few heads
FEW_HEADS = 32  # at most: more of them fill the 64 rows of the other kernel half or better
FEW_BLOCKS = 16  # of keys, for each SM
FP8_BOXES = 2  # of 128 columns, in one place of a ring of e4m3
E4M3_WARPS = {
    "ADDER_REGISTERS": 184,
    "SCORER_REGISTERS": 112,
    "PRODUCER_REGISTERS": 32,
    "maxnreg": 128,
}
# likewise, where rows are copied one by one; the first adder has the rest
E4M3_COPYING_WARPS = {
    "ADDER_REGISTERS": 176,
    "SCORER_REGISTERS": 104,
    "PRODUCER_REGISTERS": 48,
    "maxnreg": 128,
}
MANY_FP8_WARPS = {"ADDER_REGISTERS": 160, "WIDENER_REGISTERS": 136, "maxnreg": 168}
LEAST_PAGE_OF_MANY = 16  # rows: for boxes of fewer the kernel for many heads would spill registers
MANY_COPYING_WARPS = {"maxnreg": 168}  # of that kernel, where rows are copied one by one


@dataclass(frozen=True)
class Variant:
    """A kernel, and the units it works on."""

    kernel: Any
    rows: int  # of a unit: heads of one query
    columns: int  # of a box of latent columns of queries
    cache_columns: int  # likewise of a cache in halves
    tile: int  # keys that it works on at a time
    least_keys: int


def variant_for(
    layer: CacheLayer,
    page_table: Tensor,
    heads: int,
    num_tokens: int,
    q_dtype: torch.dtype,
    *,
    batch_decides: bool = True,
) -> Variant:
    """The kernel for few heads also where there is little to do: it is the quicker to begin.

    Unless the batch is not to decide: kernels do not give the same bits.
    """
    capacity = triton.cdiv(page_table.shape[1] * layer.page_size, BLOCK)
    blocks = num_tokens * triton.cdiv(heads, FEW_HEADS) * capacity
    is_fp8 = layer.codec.name in FP8_FORMATS
    is_little = batch_decides and blocks <= FEW_BLOCKS * target(page_table.device).num_sms
    is_much = heads > FEW_HEADS and not is_little
    if layer.codec.name in ("fp8", "fp8_token") and is_much:
        if q_dtype == E4M3:
            return Variant(mla_decode_e4m3_kernel, 64, 128, 0, BLOCK, LEAST_KEYS)
        return Variant(mla_decode_fp8_kernel, 64, 256, 0, BLOCK, LEAST_KEYS)
    if is_fp8 or not is_much:
        rows = max(triton.next_power_of_2(min(heads, FEW_HEADS)), 8)
        kernel = mla_decode_few_fp8_kernel if is_fp8 else mla_decode_few_kernel
        cache_columns = PANEL if layer.page_size in PAGES else 128
        return Variant(kernel, rows, 128, cache_columns, BLOCK, LEAST_KEYS_OF_FEW)
    return Variant(mla_decode_kernel, 64, 256, 256, 2 * BLOCK, LEAST_KEYS)


def mla_decode(
    q_latent: Tensor,  # [tokens, heads, 512], rows at one distance
    q_rope: Tensor,  # [tokens, heads, 64], likewise
    q_scale: Tensor | None,  # [tokens] float32, with queries of e4m3
    layer: CacheLayer,
    page_table: Tensor,
    q_starts: Tensor,  # [batch + 1]
    kv_lens: Tensor,  # [batch] cached tokens, these queries included
    *,
    shard: KVShard,  # all of them
    splits: DecodePlanTensors | EvenSplit | None,
    softmax_scale: float,
    mask: Mask,
    sink: Tensor | None,  # [heads] float32
    deterministic: bool,
    out: Tensor,  # [tokens, heads, 512]
    lse: Tensor,  # [tokens, heads] float32
) -> None:
    (tokens, heads, _), batch = q_latent.shape, kv_lens.shape[0]
    if tokens == 0:
        return  # there is nothing to write, nor to copy boxes of
    variant = variant_for(
        layer,
        page_table,
        heads,
        tokens,
        q_latent.dtype,
        batch_decides=_batch_decides(splits, deterministic),
    )
    if isinstance(splits, DecodePlanTensors):
        plan = splits
        if plan.empty_requests.shape[0] > 0:
            out.zero_()  # no item of a plan writes these
            lse.fill_(-torch.inf)
    else:
        cuts = None
        if isinstance(splits, EvenSplit):
            cuts = OwnCuts(0, splits.num_splits)
        elif deterministic:
            cuts = OwnCuts(SPLIT_KEYS // variant.tile)
        plan = _plan(variant, layer, page_table, q_starts, kv_lens, mask, heads, tokens, cuts)
    head_blocks = triton.cdiv(heads, variant.rows)
    units = triton.cdiv(tokens, batch) * head_blocks
    all_rows = tokens * head_blocks * variant.rows
    slot_rows = rows_per_slot(
        plan, rows=units * variant.rows, all_rows=all_rows, v_width=out.shape[-1]
    )
    partial_rows = plan.max_partials * slot_rows
    partial_out = workspace.scratch((partial_rows, out.shape[-1]), torch.float32, out.device)
    partial_lse = workspace.scratch((partial_rows,), torch.float32, out.device)
    q_boxes, q_token_rows = _query_boxes(q_latent, variant.rows, variant.columns)
    rope_boxes, rope_token_rows = _query_boxes(q_rope, variant.rows, ROPE)
    copied_bytes = sum(variant.rows * q.shape[-1] for q in (q_latent, q_rope) if q.dtype == E4M3)
    pool = _pool_arguments(layer, variant, copied_bytes)
    options = pool.options
    if layer.codec.name in FP8_FORMATS and variant.kernel is not mla_decode_fp8_kernel:
        stride = 0 if q_scale is None else q_scale.stride(0)
        options = {**options, "q_scale": q_scale, "stride_q_scale": stride}
    launch(
        variant.kernel,
        (units, plan.worker_starts.shape[0] - 1),
        q_boxes,
        rope_boxes,
        pool.latent,
        pool.rope,
        page_table,
        q_starts,
        kv_lens,
        sink,
        out,
        lse,
        partial_out,
        partial_lse,
        plan.items,
        plan.worker_starts,
        plan.partial_starts,
        # a scale of 0 would turn the −inf of a hidden key into NaN
        max(abs(softmax_scale) * log2(e) * pool.host_scale, SMALLEST_SCALE),
        *page_table.stride(),
        q_starts.stride(0),
        kv_lens.stride(0),
        *out.stride()[:2],
        *lse.stride(),
        0 if sink is None else sink.stride(0),
        q_token_rows,
        rope_token_rows,
        heads,
        slot_rows,
        head_blocks=head_blocks,
        ROWS=variant.rows,
        PAGE_ROWS=pool.page_rows,
        PAGE=layer.page_size,
        IS_CAUSAL=mask.kind == "causal",
        SIGN=(softmax_scale > 0) - (softmax_scale < 0),
        IS_GIVEN=plan.slot_rows != units * variant.rows or plan.tile % BLOCK > 0,
        ITEM_COLUMNS=plan.items.shape[1],
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
        padded_heads=head_blocks * variant.rows,
        slot_rows=slot_rows,
        sink=sink,
        out=out,
        lse=lse,
    )


def plan_mla_decode(
    layer: CacheLayer,
    page_table: Tensor,
    q_starts: Tensor,  # [batch + 1]
    kv_lens: Tensor,  # [batch]
    *,
    shard: KVShard,  # all of them
    mask: Mask,
    heads: int,
    num_tokens: int,
    dtype: torch.dtype,  # of the queries
) -> DecodePlanTensors:
    """A plan, made on the device, for as many workers as run at the same time."""
    variant = variant_for(layer, page_table, heads, num_tokens, dtype)
    return _plan(variant, layer, page_table, q_starts, kv_lens, mask, heads, num_tokens, None)


def _plan(
    variant: Variant,
    layer: CacheLayer,
    page_table: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    mask: Mask,
    heads: int,
    num_tokens: int,
    cuts: OwnCuts | None,
) -> DecodePlanTensors:
    padded_heads = triton.cdiv(heads, variant.rows) * variant.rows
    rows = triton.cdiv(num_tokens, max(kv_lens.shape[0], 1)) * padded_heads
    num_sms = target(kv_lens.device).num_sms
    return plan_decode(
        q_starts,
        kv_lens,
        shard=WHOLE,
        mask=mask,
        heads=padded_heads,
        num_workers=max(num_sms * variant.rows // max(rows, variant.rows), 1),
        tile=variant.tile,
        least_tiles=variant.least_keys // variant.tile,
        slot_rows=rows,
        capacity=page_table.shape[1] * layer.page_size,
        cuts=cuts,
    )


def _batch_decides(splits: DecodePlanTensors | EvenSplit | None, deterministic: bool) -> bool:
    """Not with splits of a request's own, which a plan of no kernel may have too."""
    if isinstance(splits, DecodePlanTensors):
        return splits.slot_rows > 0
    return splits is None and not deterministic


@dataclass(frozen=True)
class PoolArguments:
    """How a kernel gets at the rows of a cache."""

    latent: TensorDescriptor | Tensor
    rope: TensorDescriptor
    page_rows: int
    host_scale: float  # of the tensor; 1 where it is on the device
    options: dict[str, Any]  # what not every kernel takes


def _pool_arguments(layer: CacheLayer, variant: Variant, copied_bytes: int) -> PoolArguments:
    """`copied_bytes` of shared memory for queries before they are halves."""
    rows, page_rows = _as_rows(layer.payload)
    box_rows = layer.page_size if layer.page_size in PAGES else BLOCK
    if layer.codec.name not in FP8_FORMATS:
        latent = _boxes(rows, box_rows, variant.cache_columns)
        rope = _boxes(rows, box_rows, ROPE)
        options = _one_by_one(layer, variant, rows)
        if variant.kernel is mla_decode_kernel:
            is_packed = rows.stride(0) == rows.shape[1]
            options["packed_rows"] = rows if is_packed else None
            if options["words"] is not None:
                options |= MANY_COPYING_WARPS
        return PoolArguments(latent, rope, page_rows, 1.0, options)
    words = rows.view(torch.int32)
    scale = layer.tensor_scale
    host_scale = 1.0 if isinstance(scale, Tensor) else float(scale)
    scales, scales_page, scales_row = _row_scales(layer)
    options = {
        "scales": scales,
        "stride_scales_page": scales_page,
        "stride_scales_row": scales_row,
        "tensor_scale": host_scale,
        "device_scale": scale.to(rows.device) if isinstance(scale, Tensor) else None,
        "FORMAT": layer.codec.name,
        **_one_by_one(layer, variant, rows),
    }
    if layer.codec.name == "fp8":
        rope, rope_column, copies = _boxes(words, box_rows, ROPE // 4), LATENT // 4, 1
    else:
        halves = rows.view(torch.bfloat16)
        rope, rope_column = _boxes(halves, box_rows, ROPE), halves.shape[1] - ROPE
        copies = 4 if layer.codec.name == "fp8_block128" else 1
    options["ROPE_COLUMN"] = rope_column
    if variant.kernel is mla_decode_fp8_kernel:
        is_packed = words.stride(0) == words.shape[1]
        options |= {"row_quads": words.stride(0) // 4, "SIDE_BY_SIDE": is_packed, **MANY_FP8_WARPS}
        return PoolArguments(words, rope, page_rows, host_scale, options)
    rope_bytes = BLOCK * rope.block_shape[1] * rope.base.element_size()
    if variant.kernel is mla_decode_e4m3_kernel:
        warps = E4M3_WARPS if options["words"] is None else E4M3_COPYING_WARPS
        options |= {"PLACES": _e4m3_places(copied_bytes, rope_bytes), **warps}
        return PoolArguments(_boxes(words, box_rows, 32), rope, page_rows, host_scale, options)
    # of a block, and the largest of them
    scale_bytes = 0 if layer.codec.name == "fp8" else (copies * BLOCK + 4) * 4
    options |= {
        **_fp8_places(variant.rows, copies, rope_bytes + scale_bytes, copied_bytes),
        **_fp8_warps(variant.rows, layer.codec.name, one_by_one=options["words"] is not None),
    }
    return PoolArguments(_boxes(words, box_rows, 32), rope, page_rows, host_scale, options)


def _one_by_one(layer: CacheLayer, variant: Variant, rows: Tensor) -> dict[str, Any]:
    """What is needed to copy rows one by one, where they do not come in boxes."""
    is_small = variant.kernel is mla_decode_kernel and layer.page_size < LEAST_PAGE_OF_MANY
    if are_boxes(layer.page_size) and not is_small:
        return {"words": None, "row_quads": None}
    words = rows.view(torch.int32)
    return {"words": words, "row_quads": words.stride(0) // 4}


def _row_scales(layer: CacheLayer) -> tuple[Tensor | None, int, int]:
    """Float32 scales of rows, and their strides from a page and from a row to the next."""
    if layer.codec.name == "fp8_token":
        assert layer.scales is not None
        return layer.scales, layer.scales.stride(0), layer.scales.stride(1)
    if layer.codec.name == "fp8_block128":
        scales = layer.payload[..., LATENT : LATENT + 16].view(torch.float32)
        return scales, scales.stride(0), scales.stride(1)
    return None, 0, 0


def _fp8_places(rows: int, copies: int, rope_bytes: int, copied_bytes: int) -> dict[str, int]:
    """Places of rings that fit beside the queries and two messages of `copies` of weights."""
    place_bytes = FP8_BOXES * BLOCK * 128
    other = rows * (LATENT + ROPE) * 2 + 2 * rows * (copies * BLOCK * 2 + 4) + OTHER_BYTES
    room = SHARED_BYTES[ARCH] - other - copied_bytes
    fills = 4 // FP8_BOXES  # of places, for a box of rotated columns
    places = max(n for n in range(64) if n * place_bytes + -(-n // fills) * rope_bytes <= room)
    return {"BOXES": FP8_BOXES, "PLACES": places, "ROPE_PLACES": -(-places // fills)}


def _e4m3_places(copied_bytes: int, rope_bytes: int) -> int:
    """Blocks that fit beside queries as they come, their rotated columns as halves, messages."""
    halves = BLOCK * ROPE * 2
    room = SHARED_BYTES[ARCH] - copied_bytes - halves - 2 * BLOCK * BLOCK * 2 - OTHER_BYTES
    return room // (BLOCK * LATENT + rope_bytes)


def _fp8_warps(rows: int, format: str, *, one_by_one: bool) -> dict[str, int]:
    """How many adders, and the registers of a thread of each kind; the first adder has the rest.

    Two adders are quicker where sums and scales leave registers for the scorers beside them.
    `support.compilation` says what is spilled.
    """
    producer = 48 if one_by_one else 32
    if rows <= 16 and format != "fp8_block128":
        return {
            "ADDERS": 2,
            "ADDER_REGISTERS": 112 if one_by_one else 120,
            "SCORER_REGISTERS": 104,
            "PRODUCER_REGISTERS": producer,
            "maxnreg": 96,
        }
    one = {"ADDERS": 1, "ADDER_REGISTERS": 0, "maxnreg": 128}
    if rows <= 16:
        return {**one, "SCORER_REGISTERS": 152, "PRODUCER_REGISTERS": 48}
    if format == "fp8_block128":
        return {**one, "SCORER_REGISTERS": 136, "PRODUCER_REGISTERS": 32}
    return {**one, "SCORER_REGISTERS": 128, "PRODUCER_REGISTERS": producer}


def _query_boxes(q: Tensor, rows: int, columns: int) -> tuple[TensorDescriptor, int]:
    """Boxes of halves, or of words of e4m3, and how many rows tokens are apart."""
    q_rows, apart = _as_rows(q)
    if q.dtype == E4M3:
        return _boxes(q_rows.view(torch.int32), rows, columns // 4), apart
    return _boxes(q_rows, rows, columns), apart


def _boxes(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=min(columns * tensor.element_size(), 128),
        element_bitwidth=tensor.element_size() * 8,
        rank=2,
    )
    shape, strides = list(tensor.shape), list(tensor.stride())
    return TensorDescriptor(tensor, shape, strides, [rows, columns], layout)


def _as_rows(pool: Tensor) -> tuple[Tensor, int]:
    """[n, m, columns] as rows at one distance, and how many of them the n are apart."""
    num_pages, page_size, columns = pool.shape
    distance = pool.stride(0) if page_size == 1 < num_pages else pool.stride(1)
    apart = pool.stride(0) // distance if num_pages > 1 else page_size
    rows = (num_pages - 1) * apart + page_size if num_pages else 0
    return pool.as_strided((rows, columns), (distance, 1)), apart
