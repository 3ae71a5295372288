"""Absorbed MLA attention over lists of 16-bit cache rows on Blackwell, 16, 32 or 64 heads per CTA.

Maths      s = q·row · softmax_scale over the list's valid entries ; out = softmax(s) @ row[:512]
Work       a work tile is ROWS heads of one token over a split of its lists, two blocks of 64
           entries at a time, which are the M side of both products (`device.keys_as_m`)
Roles      a softmax warpgroup; a warp that issues the products; a producer warpgroup that gathers
           rows with TMA, four per instruction
Memory     64 heads: 222 KB of shared memory, of which the queries are 72 KB and the four stages of
           latent columns 128 KB; 16 heads have five. Tensor memory: five times ROWS columns.
           Splits write float32 partials (`kernels.sparse_merge`)
Limits     rows of 576/512 or 512/512 columns at multiples of 16 bytes, pages at multiples of a
           row's distance. Triton 3.9 or newer
Numbers    P is rounded to the cache's dtype, acc is float32. Rows of invalid entries are zeros in
           shared memory: a gather reads zeros for row −1
Lineage    own design; ideas: swapped operands for few heads, TMA gathers as FlashMLA's
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier, tma

from mlakit.kernels.blackwell.device.gathers import ENTRIES, GATHERED
from mlakit.kernels.blackwell.device.keys_as_m import (
    D_R,
    HEADS,
    KEYS,
    PART,
    PARTS,
    SCORE_LOAD,
    alloc,
    gather_block,
    initial_softmax,
    issue_scores,
    issue_values,
    result,
    row_sums,
    softmax_block,
    wait_for_values,
)
from mlakit.kernels.blackwell.sparse.rows import listed_rows
from mlakit.kernels.hopper.device.compat import record, reinterpret
from mlakit.kernels.hopper.device.primitives import (
    IN_EACH_THREAD,
    SMEM_VECTOR,
    alloc_barrier,
    in_each_thread,
)
from mlakit.kernels.hopper.sparse.arguments import VARYING
from mlakit.kernels.hopper.sparse.epilogue import (
    Outputs,
    finish_rows,
    store_columns,
    store_statistics,
)
from mlakit.kernels.hopper.sparse.lists import (
    block_range,
    load_ids,
    locate_tile,
    make_work,
    num_pairs,
    valid_slots,
)
from mlakit.kernels.hopper.sparse.seesaw import Scale

IN_EACH_LANE = gl.constexpr(in_each_thread(1))  # of a partition of one warp


@record
class Entries:
    """What the producer says of list entries, in shared memory."""

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
def producer(q, q_rope, kv, extra_kv, work, tile, smem, barriers, entries):
    """Load the queries, and gather the blocks of a work tile."""
    blocks = block_range(work, tile)
    num_blocks = num_pairs(blocks)
    entries.num_blocks.store(gl.full([4], num_blocks, gl.int32, IN_EACH_THREAD))
    mbarrier.arrive(entries.q_full, count=1)
    head = tile % work.head_tiles * smem.q.shape[1]
    _load_query(q, q_rope, blocks.token, head, smem, entries.q_full)
    first_ids = load_ids(work, blocks, blocks.first, ENTRIES)
    second_ids = load_ids(work, blocks, blocks.first + 1, ENTRIES)
    for index in range(num_blocks):
        block = blocks.first + 2 * index
        first_slot = valid_slots(work, blocks, block, first_ids)
        second_slot = valid_slots(work, blocks, block + 1, second_ids)
        first_ids = load_ids(work, blocks, block + 2, ENTRIES)
        second_ids = load_ids(work, blocks, block + 3, ENTRIES)
        first = listed_rows(kv, extra_kv, work, blocks, block, first_slot)
        second = listed_rows(kv, extra_kv, work, blocks, block + 1, second_slot)
        gather_block((first, second), (first, second), index, PARTS * PART, smem, barriers)
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


@gluon.jit(do_not_specialize=VARYING)
def sparse_mla_n64_bf16_kernel(
    q,  # TMA descriptors: tiles of 1 x ROWS x 128
    q_rope,  # of 1 x ROWS x 64 rotated columns, or None
    kv,  # rows of 64 columns
    extra_kv,  # likewise of a second cache, or None
    tokens,
    heads,
    num_splits,
    lens,  # [tokens], or None
    topk,
    stride_token,  # from a list to the next
    stride_lens,
    extra_lens,  # of a second cache, as all that is extra
    extra_topk,
    extra_stride_token,
    extra_stride_lens,
    main,  # `arguments.ListArguments`
    extra,  # likewise, or None
    outputs,  # `arguments.OutputArguments`
    scale_log2,  # |softmax_scale| · log2(e)
    TRAITS: gl.constexpr,  # `configs.Traits`
    CONFIG: gl.constexpr,  # `device.configs.KeysAsMConfig`
):
    """Run a CTA on a work tile."""
    head_tiles = (heads + CONFIG.ROWS - 1) // CONFIG.ROWS
    work = make_work(
        (main, lens, topk, stride_token, stride_lens),
        (extra, extra_lens, extra_topk, extra_stride_token, extra_stride_lens),
        num_splits,
        head_tiles,
        tokens * num_splits * head_tiles,
        TRAITS,
    )
    outputs = Outputs(*outputs)
    tile = gl.program_id(0)
    smem, tmem, barriers = alloc(q.dtype, TRAITS.HAS_ROPE, CONFIG)
    entries = Entries(
        num_blocks=gl.allocate_shared_memory(gl.int32, [4], SMEM_VECTOR),
        validity=gl.allocate_shared_memory(gl.float32, [KEYS], SMEM_VECTOR),
        q_full=alloc_barrier(2),
        full=alloc_barrier(),
    )
    scale = Scale(size=scale_log2, SIGN=TRAITS.SIGN)
    gl.warp_specialize(
        [
            (
                softmax_warps,
                (work, outputs, tokens, heads, tile, smem, tmem, barriers, entries, scale),
            ),
            (producer, (q, q_rope, kv, extra_kv, work, tile, smem, barriers, entries)),
            (issue, (smem, tmem, barriers, entries)),
        ],
        [4, 1],
        [CONFIG.PRODUCER_REGISTERS, CONFIG.ISSUE_REGISTERS],
    )
