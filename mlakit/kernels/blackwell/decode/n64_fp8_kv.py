"""Absorbed MLA decode over FP8 cache rows on Blackwell, 16, 32 or 64 heads per CTA.

Maths      scores = (q_c·c + q_r·r) · softmax_scale ; out = softmax(scores) @ c
Work       as `n64_bf16`: a persistent CTA computes the work tiles of its plan, 128 keys at a time
Roles      a softmax warpgroup; a warp that issues the products; a dequant warpgroup
           (`device.dequant`), which loads rows by their addresses, so pages may have any size
Memory     as `n64_bf16`: rows pass through no other shared memory
Limits     rows of fp8_block128, 656 bytes: 512 e4m3, four float32 scales, 64 bfloat16. Triton 3.9
           or newer
Numbers    the product of a value and its scale is rounded to bfloat16, and P too; acc is float32
Lineage    own design; ideas: split-KV flash decoding, FlashMLA's dequantising warpgroup
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlakit.kernels.blackwell.decode.n64 import (
    issue,
    lookup,
    rows_of_half,
    softmax_warps,
    start_tile,
)
from mlakit.kernels.blackwell.device.dequant import Half, dequant_block
from mlakit.kernels.blackwell.device.keys_as_m import alloc
from mlakit.kernels.hopper.decode.arguments import VARYING
from mlakit.kernels.hopper.decode.scheduler import (
    first_tile,
    launch_dependents,
    make_work,
    next_tile,
)
from mlakit.kernels.hopper.device.fp8_rows import KEYS as ROW_KEYS
from mlakit.kernels.hopper.device.pipeline import Query
from mlakit.kernels.hopper.device.primitives import alloc_barrier
from mlakit.kernels.hopper.sparse.seesaw import Scale


@gluon.jit
def _half(inputs, keys, block, half, page):
    row, is_seen = rows_of_half(inputs, keys, block, half, page, ROW_KEYS)
    # the explicit factor of four shows the compiler the alignment to 16 bytes
    return Half(inputs.words + row.to(gl.int64) * inputs.row_chunks * 4, is_seen)


@gluon.jit
def dequant_producer(item, index, inputs, scheduler, FORMAT: gl.constexpr, query, smem, barriers):
    """Load the queries of every work tile, and convert its blocks."""
    block = item * 0  # of all work tiles
    while item < scheduler.last_item:
        keys, first, num_blocks = start_tile(inputs, scheduler, item, index, block, query, barriers)
        low_pages = lookup(inputs, keys, first, 0, ROW_KEYS)
        high_pages = lookup(inputs, keys, first, 1, ROW_KEYS)
        for i in range(num_blocks):
            low = _half(inputs, keys, first + i, 0, low_pages)
            high = _half(inputs, keys, first + i, 1, high_pages)
            low_pages = lookup(inputs, keys, first + i + 1, 0, ROW_KEYS)
            high_pages = lookup(inputs, keys, first + i + 1, 1, ROW_KEYS)
            dequant_block(low, high, block, FORMAT, smem, barriers)
            block += 1
        item, index = next_tile(scheduler, item, index + gl.num_programs(0))


@gluon.jit(do_not_specialize=VARYING)
def mla_decode_n64_fp8_kv_kernel(
    q,  # TMA descriptors: tiles of ROWS x 128
    q_rope,  # of ROWS x 64
    kv,  # the cache as int32 [rows, words]
    kv_rope,  # the same
    scale_log2,
    stride_table_request,
    q_token_rows,
    q_rope_token_rows,
    heads,
    slot_rows,
    stride_lse_token,
    batch,  # these four are of `arguments`
    schedule,
    outputs,
    gather,
    TRAITS: gl.constexpr,
    CONFIG: gl.constexpr,  # `device.configs.KeysAsMConfig`
):
    """Run the plan on a grid (work tiles of a request that run at once, CTAs of the plan)."""
    inputs, scheduler, outputs = make_work(
        (q, q_rope, kv, kv_rope),
        (stride_table_request, q_token_rows, q_rope_token_rows, heads, slot_rows, stride_lse_token),
        (batch, schedule, outputs, gather),
        TRAITS,
        schedule.head_tiles,
    )
    smem, tmem, barriers = alloc(q.dtype, True, CONFIG)
    query = Query(smem.q, smem.q_rope, alloc_barrier())
    scale = Scale(size=scale_log2, SIGN=TRAITS.SCORES.SIGN)
    item, index = first_tile(scheduler, schedule)
    if item < scheduler.last_item:
        launch_dependents(scheduler, item)
        gl.warp_specialize(
            [
                (
                    softmax_warps,
                    (item, index, inputs, scheduler, outputs, smem, tmem, barriers, scale),
                ),
                (
                    dequant_producer,
                    (item, index, inputs, scheduler, TRAITS.FORMAT, query, smem, barriers),
                ),
                (issue, (item, index, inputs, scheduler, query, smem, tmem, barriers)),
            ],
            [4, 1],
            [CONFIG.PRODUCER_REGISTERS, CONFIG.ISSUE_REGISTERS],
        )
