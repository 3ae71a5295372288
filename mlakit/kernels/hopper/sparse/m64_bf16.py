"""Absorbed MLA attention over lists of 16-bit cache rows, 64 heads per CTA.

Maths      s = q·row · softmax_scale over the list's valid entries ; out = softmax(s) @ row[:512]
Work       a work tile is 64 heads of one token over a split of its lists, 64 entries per block; a
           persistent CTA computes one tile after the other
Roles      two consumer warpgroups (`seesaw`), and a producer warpgroup that gathers rows with
           cp.async, 16 bytes per thread and copy, straight into the layout that wgmma reads
Memory     231 KB of shared memory. Splits write float32 partials (`kernels.sparse_merge`)
Limits     rows of 576/512 or 512/512 columns at multiples of 16 bytes, 2**31 rows in a cache
Numbers    P is rounded to the cache's dtype, acc is float32. Rows of invalid entries are zeros in
           shared memory: they are not read, and 0 · NaN is NaN
Lineage    own design; ideas: FlashMLA's sparse prefill (producer, order of loads)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mlakit.kernels.hopper.device.compat import copy_words, reinterpret, tma_load
from mlakit.kernels.hopper.device.primitives import IN_EACH_THREAD, allow_dependents
from mlakit.kernels.hopper.sparse.arguments import VARYING
from mlakit.kernels.hopper.sparse.epilogue import Outputs
from mlakit.kernels.hopper.sparse.lists import (
    block_range,
    choose_blocks,
    load_ids,
    make_work,
    num_pairs,
    rope_pointers,
    row_pointers,
    valid_slots,
)
from mlakit.kernels.hopper.sparse.seesaw import (
    Scale,
    alloc_all_barriers,
    alloc_smem,
    warpgroup,
)

# 16 bytes per thread, 128 bytes per row: a thread has 4 rows of a block
GATHERED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
ENTRIES = gl.constexpr(gl.SliceLayout(1, GATHERED))


@gluon.jit
def _gather(tile, pointers, is_valid, COLUMN: gl.constexpr):
    """Start to load some columns of a block; zeros where a row is not valid."""
    columns = COLUMN + gl.arange(0, tile.shape[1], gl.SliceLayout(0, GATHERED))
    copy_words(
        tile,
        gl.expand_dims(pointers, 1) + gl.expand_dims(columns, 0),
        mask=gl.expand_dims(is_valid, 1),
    )


@gluon.jit
def _gather_rope(tile, rope, slot, pointers, is_valid):
    """Start to load the rotated columns of a block, which a split cache has elsewhere."""
    if rope is None:
        _gather(tile, pointers, is_valid, 512)
    else:
        _gather(tile, rope_pointers(rope, slot, 8), is_valid, 0)


@gluon.jit
def _load_pair(work, blocks, block):
    return load_ids(work, blocks, block, ENTRIES), load_ids(work, blocks, block + 1, ENTRIES)


@gluon.jit
def load_query(q, q_rope, token, head, smem, full):
    """Start to load the queries of a work tile by TMA; zeros past the last head."""
    BYTES: gl.constexpr = 64 * 512 * 2 + (0 if smem.q_rope is None else 64 * 64 * 2)
    DTYPE: gl.constexpr = q.dtype
    mbarrier.expect(full, BYTES)
    LAYOUT: gl.constexpr = q.layout
    left = reinterpret(smem.q_left, DTYPE, [1, 64, 256], LAYOUT)
    right = reinterpret(smem.q_right, DTYPE, [1, 64, 256], LAYOUT)
    tma_load(q, [token, head, 0], full, left)
    tma_load(q, [token, head, 256], full, right)
    if smem.q_rope is not None:
        ROPE_LAYOUT: gl.constexpr = q_rope.layout
        rope = reinterpret(smem.q_rope, DTYPE, [1, 64, 64], ROPE_LAYOUT)
        tma_load(q_rope, [token, head, 0], full, rope)


@gluon.jit
def producer(q, q_rope, work, smem, barriers):
    """Load queries and pairs of blocks, in the order of `seesaw`."""
    tile = gl.program_id(0)
    blocks = block_range(work, tile)
    ids_even, ids_odd = _load_pair(work, blocks, blocks.first)
    pairs_done = tile * 0
    tiles_done = tile * 0
    while tile < work.num_tiles:
        pairs = num_pairs(blocks)
        mbarrier.wait(barriers.q.empty, (tiles_done & 1) ^ 1)
        smem.num_pairs.store(gl.full([4], pairs, gl.int32, IN_EACH_THREAD))
        mbarrier.arrive(barriers.q.full, count=1)
        head = tile % work.head_tiles * 64
        load_query(q, q_rope, blocks.token, head, smem, barriers.q.full)
        tile += gl.num_programs(0)
        next_blocks = blocks
        for pair in range(pairs):
            phase = ((pairs_done + pair) & 1) ^ 1
            block = blocks.first + 2 * pair
            slot_even = valid_slots(work, blocks, block, ids_even)
            slot_odd = valid_slots(work, blocks, block + 1, ids_odd)
            even = row_pointers(work, blocks, block, slot_even, 8)
            odd = row_pointers(work, blocks, block + 1, slot_odd, 8)
            is_even_valid = slot_even >= 0
            is_odd_valid = slot_odd >= 0
            mbarrier.wait(barriers.left_even.empty, phase)
            _gather(smem.left_even.index(0), even, is_even_valid, 0)
            async_copy.mbarrier_arrive(barriers.left_even.full, increment_count=False)
            mbarrier.wait(barriers.right_odd.empty, phase)
            _gather(smem.right_odd.index(0), odd, is_odd_valid, 256)
            if smem.rope_odd is not None:
                tile_odd = smem.rope_odd.index(0)
                _gather_rope(tile_odd, work.main.rope, slot_odd, odd, is_odd_valid)
            async_copy.mbarrier_arrive(barriers.right_odd.full, increment_count=False)
            mbarrier.wait(barriers.right_even.empty, phase)
            _gather(smem.right_even.index(0), even, is_even_valid, 256)
            if smem.rope_odd is not None:
                tile_even = smem.rope_even.index(0)
                _gather_rope(tile_even, work.main.rope, slot_even, even, is_even_valid)
            async_copy.mbarrier_arrive(barriers.right_even.full, increment_count=False)
            smem.validity_even.store(gl.where(is_even_valid, 0.0, float("-inf")))
            smem.validity_odd.store(gl.where(is_odd_valid, 0.0, float("-inf")))
            mbarrier.arrive(barriers.validity, count=1)
            # here the producer waits anyway, from the second pair on
            if pair == gl.minimum(pairs - 1, 1):
                next_blocks = block_range(work, tile)
            # the ids of the next pair, one pair ahead of their rows
            is_last = pair + 1 == pairs
            ahead = choose_blocks(is_last, next_blocks, blocks)
            next_block = gl.where(is_last, next_blocks.first, block + 2)
            ids_even, ids_odd = _load_pair(work, ahead, next_block)
            mbarrier.wait(barriers.left_odd.empty, phase)
            _gather(smem.left_odd.index(0), odd, is_odd_valid, 0)
            async_copy.mbarrier_arrive(barriers.left_odd.full, increment_count=False)
        pairs_done += pairs
        tiles_done += 1
        blocks = next_blocks
    if work.num_splits > 1:
        allow_dependents()  # the merge kernel


@gluon.jit(do_not_specialize=VARYING)
def sparse_mla_m64_bf16_kernel(
    q,  # TMA descriptors: tiles of 1 x 64 x 256
    q_rope,  # of 1 x 64 x 64 rotated columns, or None
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
    scales,  # `arguments.ScaleArguments`
    TRAITS: gl.constexpr,  # `configs.Traits`
    CONFIG: gl.constexpr,  # `configs.M64Bf16Config`
):
    """Run persistent CTAs over the work tiles of all tokens."""
    head_tiles = (heads + 63) // 64
    work = make_work(
        (main, lens, topk, stride_token, stride_lens),
        (extra, extra_lens, extra_topk, extra_stride_token, extra_stride_lens),
        num_splits,
        head_tiles,
        tokens * num_splits * head_tiles,
        TRAITS,
    )
    outputs = Outputs(*outputs)
    DTYPE: gl.constexpr = main.payload.dtype.element_ty
    smem = alloc_smem(DTYPE, DTYPE, TRAITS.HAS_ROPE)
    barriers = alloc_all_barriers(2, 128)
    scale = Scale(size=scales.scale_log2, SIGN=TRAITS.SIGN)
    gl.warp_specialize(
        [
            (warpgroup, (True, work, outputs, tokens, heads, smem, barriers, scale)),
            (warpgroup, (False, work, outputs, tokens, heads, smem, barriers, scale)),
            (producer, (q, q_rope, work, smem, barriers)),
        ],
        [4, 4],
        [CONFIG.CONSUMER_REGISTERS, CONFIG.PRODUCER_REGISTERS],
    )
