"""Kernels of lists with keys as M share queries, entries, products, softmax and epilogue.

Their producers differ, by how rows come to shared memory: `n64_bf16`, `n64_fp8_kv`.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier, tma

from mlakit.kernels.blackwell.device.gathers import GATHERED
from mlakit.kernels.blackwell.device.keys_as_m import (
    D_R,
    HEADS,
    KEYS,
    PART,
    PARTS,
    SCORE_LOAD,
    initial_softmax,
    issue_scores,
    issue_values,
    result,
    row_sums,
    softmax_block,
    wait_for_values,
)
from mlakit.kernels.hopper.device.compat import record, reinterpret
from mlakit.kernels.hopper.device.primitives import (
    IN_EACH_THREAD,
    SMEM_VECTOR,
    alloc_barrier,
    in_each_thread,
)
from mlakit.kernels.hopper.sparse.epilogue import (
    finish_rows,
    store_columns,
    store_statistics,
)
from mlakit.kernels.hopper.sparse.lists import block_range, locate_tile, num_pairs

IN_EACH_LANE = gl.constexpr(in_each_thread(1))  # of a partition of one warp


@record
class Entries:
    """The producer tells consumers this about list entries, in shared memory."""

    num_blocks: object  # [4] int32, all the same: blocks of 128 entries
    validity: object  # [128] float32: 0 where an entry is valid, −inf where not
    q_full: object  # barrier: the queries are loaded, and the number of blocks is known
    full: object  # barrier: the validity of a block


@gluon.jit
def _load_query(q, q_rope, token, head, smem, full):
    """Start to load the queries; zeros past the last head."""
    ROWS: gl.constexpr = smem.q.shape[1]
    LAYOUT: gl.constexpr = q.layout
    tiles = reinterpret(smem.q, q.dtype, [PARTS, 1, ROWS, PART], LAYOUT)
    ROPE_COLUMNS: gl.constexpr = 0 if smem.q_rope is None else D_R
    mbarrier.expect(full, ROWS * (PARTS * PART + ROPE_COLUMNS) * 2)
    for part in gl.static_range(PARTS):
        tma.async_load(q, [token, head, part * PART], full, tiles.index(part))
    if smem.q_rope is not None:
        ROPE_LAYOUT: gl.constexpr = q_rope.layout
        rope = reinterpret(smem.q_rope, q.dtype, [1, ROWS, D_R], ROPE_LAYOUT)
        tma.async_load(q_rope, [token, head, 0], full, rope)


@gluon.jit
def alloc_entries():
    return Entries(
        num_blocks=gl.allocate_shared_memory(gl.int32, [4], SMEM_VECTOR),
        validity=gl.allocate_shared_memory(gl.float32, [KEYS], SMEM_VECTOR),
        q_full=alloc_barrier(2),
        full=alloc_barrier(),
    )


@gluon.jit
def start_tile(q, q_rope, work, tile, smem, entries):
    """Say how many blocks of 128 entries a work tile has, and start to load its queries; return
    (`lists.BlockRange`, that number)."""
    blocks = block_range(work, tile)
    num_blocks = num_pairs(blocks)
    entries.num_blocks.store(gl.full([4], num_blocks, gl.int32, IN_EACH_THREAD))
    mbarrier.arrive(entries.q_full, count=1)
    head = tile % work.head_tiles * smem.q.shape[1]
    _load_query(q, q_rope, blocks.token, head, smem, entries.q_full)
    return blocks, num_blocks


@gluon.jit
def store_validity(entries, first_slot, second_slot):
    """Say which entries of a block are valid, once its predecessor has probabilities."""
    validity = gl.where(first_slot >= 0, 0.0, float("-inf"))
    entries.validity.slice(0, GATHERED).store(validity)
    validity = gl.where(second_slot >= 0, 0.0, float("-inf"))
    entries.validity.slice(GATHERED, GATHERED).store(validity)
    mbarrier.arrive(entries.full, count=1)


@gluon.jit
def issue(smem, tmem, barriers, entries):
    """Issue the products of every block."""
    mbarrier.wait(entries.q_full, 0)
    num_blocks = gl.max(entries.num_blocks.load(IN_EACH_LANE), 0)
    # no hoisting: descriptors of operands would be kept across blocks, and spilled
    for block in tl.range(0, num_blocks, disable_licm=True):
        issue_scores(block, smem, tmem, barriers)
        issue_values(block, block, smem, tmem, barriers)


@gluon.jit
def softmax_warps(work, outputs, tokens, heads, tile, smem, tmem, barriers, entries, scale):
    """Make probabilities of the scores of every block, and store the results."""
    ROWS: gl.constexpr = smem.q.shape[1]
    LAYOUT: gl.constexpr = tmem.scores.get_reg_layout(instr_variant=SCORE_LOAD)
    mbarrier.wait(entries.q_full, 0)
    num_blocks = gl.max(entries.num_blocks.load(IN_EACH_THREAD), 0)
    softmax = initial_softmax(tmem)
    for block in range(num_blocks):
        mbarrier.wait(entries.full, block & 1)
        is_valid = entries.validity.load(gl.SliceLayout(1, LAYOUT)) == 0.0
        softmax = softmax_block(block, block, is_valid, softmax, smem, tmem, barriers, scale)
    located = locate_tile(work, tokens, tile, ROWS)
    head = located.first_head + gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
    row_sum = row_sums(softmax)
    lse, out_scale = finish_rows(located, outputs, heads, head, softmax.row_max, row_sum)
    store_statistics(located, outputs, heads, head, lse, row_sum, softmax.max_logit)
    smem.out_scale.store(out_scale)
    wait_for_values(num_blocks - 1, barriers)
    for i in gl.static_range(ROWS // HEADS):
        some = located.replace(first_head=located.first_head + i * HEADS)
        for part in gl.static_range(PARTS):
            values = result(smem, tmem, part, i).to(outputs.out.dtype.element_ty)
            store_columns(some, outputs, heads, gl.permute(values, (1, 0)), part * PART)
