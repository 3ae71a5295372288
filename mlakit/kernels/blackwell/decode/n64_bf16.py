"""Absorbed MLA decode over 16-bit cache rows on Blackwell, 16, 32 or 64 heads per CTA.

Maths      scores = (q_c·c + q_r·r) · softmax_scale ; out = softmax(scores) @ c
Work       a work tile is ROWS heads of one query over a split of its request's keys, 128 keys at a
           time, which are the M side of both products (`device.keys_as_m`); a persistent CTA
           computes one tile after the other (`hopper.decode.scheduler`)
Roles      a softmax warpgroup; a warp that issues the products; a producer warpgroup that gathers
           rows with TMA, four per instruction, so pages may have any size
Memory     64 heads: 222 KB of shared memory, of which the queries are 72 KB and the four stages of
           latent columns 128 KB; 16 heads have five. Tensor memory: five times ROWS columns.
           Splits write float32 partials (`kernels.decode_merge`)
Limits     D_C = 512, D_R = 64. Triton 3.9 or newer
Numbers    P is rounded to the cache's dtype, acc is float32. Rows of keys that a query does not see
           are zeros in shared memory: a gather reads zeros for row −1
Lineage    own design; ideas: swapped operands for few heads, split-KV flash decoding, FlashMLA's
           TMA gathers
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
from mlakit.kernels.blackwell.device.gathers import ENTRIES, Rows
from mlakit.kernels.blackwell.device.keys_as_m import alloc, gather_block
from mlakit.kernels.hopper.decode.arguments import VARYING
from mlakit.kernels.hopper.decode.scheduler import (
    first_tile,
    launch_dependents,
    make_work,
    next_tile,
)
from mlakit.kernels.hopper.device.pipeline import Query
from mlakit.kernels.hopper.device.primitives import alloc_barrier
from mlakit.kernels.hopper.sparse.seesaw import Scale


@gluon.jit
def _rows(inputs, keys, block, half, page):
    """The rows of 64 keys, in the tensors of their latent and of their rotated columns."""
    row, is_seen = rows_of_half(inputs, keys, block, half, page, ENTRIES)
    row = gl.where(is_seen, row, -1)
    NONE: gl.constexpr = None
    return Rows(inputs.kv, NONE, False, row), Rows(inputs.kv_rope, NONE, False, row)


@gluon.jit
def producer(item, index, inputs, scheduler, query, smem, barriers):
    """Load the queries of every work tile, and gather its blocks."""
    ROPE_COLUMN: gl.constexpr = inputs.ROPE_COLUMN
    block = item * 0  # of all work tiles
    while item < scheduler.last_item:
        keys, first, num_blocks = start_tile(inputs, scheduler, item, index, block, query, barriers)
        low_pages = lookup(inputs, keys, first, 0, ENTRIES)
        high_pages = lookup(inputs, keys, first, 1, ENTRIES)
        for i in range(num_blocks):
            low, low_rope = _rows(inputs, keys, first + i, 0, low_pages)
            high, high_rope = _rows(inputs, keys, first + i, 1, high_pages)
            low_pages = lookup(inputs, keys, first + i + 1, 0, ENTRIES)
            high_pages = lookup(inputs, keys, first + i + 1, 1, ENTRIES)
            rope = (low_rope, high_rope)
            gather_block((low, high), rope, block, ROPE_COLUMN, smem, barriers)
            block += 1
        item, index = next_tile(scheduler, item, index + gl.num_programs(0))


@gluon.jit(do_not_specialize=VARYING)
def mla_decode_n64_bf16_kernel(
    q,  # TMA descriptors: tiles of ROWS x 128
    q_rope,  # of ROWS x 64
    kv,  # rows of 64 columns
    kv_rope,  # likewise
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
                (producer, (item, index, inputs, scheduler, query, smem, barriers)),
                (issue, (item, index, inputs, scheduler, query, smem, tmem, barriers)),
            ],
            [4, 1],
            [CONFIG.PRODUCER_REGISTERS, CONFIG.ISSUE_REGISTERS],
        )
