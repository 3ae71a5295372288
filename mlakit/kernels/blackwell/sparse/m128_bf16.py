"""Absorbed MLA attention over lists of 16-bit cache rows on Blackwell, 128 heads per CTA.

Maths      s = q·row · softmax_scale over the list's valid entries ; out = softmax(s) @ row[:512]
Work       a work tile is 128 heads of one token over a split of its lists, 64 entries per block.
           Two CTAs compute a tile: both compute all scores, each a column half of the result
Roles      a softmax warpgroup; a warp that issues Q·Kᵀ; a warp that issues P·V; a producer
           warpgroup that gathers rows with TMA, four per instruction
Memory     225 KB of shared memory: two stages of 64 rows, and the queries but for their left 256
           columns. All 512 columns of tensor memory: acc 256, the left queries 128, and the scores
           of two blocks, 64 each; a block's probabilities replace its scores. Splits write float32
           partials (`kernels.sparse_merge`)
Limits     rows of 576/512 or 512/512 columns at multiples of 16 bytes, pages at multiples of a
           row's distance. Triton 3.9 or newer
Numbers    P is rounded to the cache's dtype, acc is float32. Rows of invalid entries are zeros in
           shared memory: a gather reads zeros for row −1
Order      a part of a stage is loaded when the products that read it are complete, so the loads
           order the two warps that issue products, too: Q·Kᵀ of block j + 2 follows P·V of block j
Lineage    own design; ideas: FlashMLA's sparse prefill for sm_100 (queries in tensor memory, TMA
           gathers), FlashAttention-4 (probabilities over scores, lazy rescaling)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tcgen05_mma,
    tma,
)

from mlakit.kernels.blackwell.device.gathers import ENTRIES, gather
from mlakit.kernels.blackwell.sparse import configs
from mlakit.kernels.blackwell.sparse.rows import listed_rows
from mlakit.kernels.hopper.device.compat import record, reinterpret
from mlakit.kernels.hopper.device.primitives import (
    IN_EACH_THREAD,
    SMEM_16BIT,
    SMEM_VECTOR,
    alloc_barrier,
    alloc_barriers,
    in_each_thread,
)
from mlakit.kernels.hopper.device.softmax import (
    INITIAL_ROW_MAX,
    NEG_INF,
    apply_sign,
    next_row_max,
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
    valid_slots,
)
from mlakit.kernels.hopper.sparse.seesaw import Scale

HEADS = gl.constexpr(configs.HEAD_TILE)
BLOCK = gl.constexpr(configs.BLOCK)
HALF = gl.constexpr(configs.HALF)  # columns
D_R = gl.constexpr(configs.D_R)
STAGES = gl.constexpr(2)
IN_EACH_LANE = gl.constexpr(in_each_thread(1))  # of a partition of one warp
SCORES = gl.constexpr(TensorMemoryLayout((configs.HEAD_TILE, configs.BLOCK), col_stride=1))
ACC = gl.constexpr(TensorMemoryLayout((configs.HEAD_TILE, configs.HALF), col_stride=1))


@record
class Smem:
    """Shared memory; a stage is a block of keys."""

    q_right: object  # [1, 128, 256] columns 256 to 511 of the queries
    q_rope: object  # [1, 128, 64] columns past 512, or None
    keys: object  # [2 · stages, 64, 256]: columns 0 to 255, then 256 to 511 of each stage
    rope: object  # [stages, 64, 64] columns past 512, or None
    validity: object  # [stages, 64] float32: 0 where an entry is valid, −inf where not
    num_blocks: object  # [4] int32, all the same


@record
class Tmem:
    """Tensor memory."""

    q_left: object  # [128, 256] columns 0 to 255 of the queries
    scores: object  # [stages, 128, 64] float32
    acc: object  # [128, 256] float32


@record
class Barriers:
    """Barriers; those with a stage are arrays."""

    q_left: object  # loaded, and the number of blocks is known
    q_right: object  # loaded, with the columns past 512
    q_stored: object  # the left queries are in tensor memory
    keys_full: object  # by stage: the columns that only Q·Kᵀ reads
    keys_empty: object
    values_full: object  # by stage: the columns that P·V reads too, and the validity of entries
    values_empty: object  # P·V of the block in the stage is complete
    scores_full: object  # by stage
    probs_full: object  # by stage


@gluon.jit
def _load_query(q, q_rope, token, head, smem, barriers):
    """Start to load the queries; zeros past the last head. Stage 1 is lent to the left half."""
    DTYPE: gl.constexpr = q.dtype
    LAYOUT: gl.constexpr = q.layout
    left = reinterpret(smem.keys, DTYPE, [STAGES, 1, HEADS, HALF], LAYOUT).index(1)
    right = reinterpret(smem.q_right, DTYPE, [1, HEADS, HALF], LAYOUT)
    mbarrier.expect(barriers.q_left, HEADS * HALF * 2)
    tma.async_load(q, [token, head, 0], barriers.q_left, left)
    ROPE_BYTES: gl.constexpr = 0 if smem.q_rope is None else HEADS * D_R * 2
    mbarrier.expect(barriers.q_right, HEADS * HALF * 2 + ROPE_BYTES)
    tma.async_load(q, [token, head, HALF], barriers.q_right, right)
    if smem.q_rope is not None:
        ROPE_LAYOUT: gl.constexpr = q_rope.layout
        rope = reinterpret(smem.q_rope, DTYPE, [1, HEADS, D_R], ROPE_LAYOUT)
        tma.async_load(q_rope, [token, head, 0], barriers.q_right, rope)


@gluon.jit
def producer(q, q_rope, caches, work, tile, half, smem, barriers):
    """Load the queries, and gather the blocks of a work tile."""
    blocks = block_range(work, tile)
    # at least one: the results of an empty tile are written, too
    num_blocks = gl.maximum(blocks.end - blocks.first, 1)
    smem.num_blocks.store(gl.full([4], num_blocks, gl.int32, IN_EACH_THREAD))
    mbarrier.arrive(barriers.q_left, count=1)
    head = tile % work.head_tiles * HEADS
    _load_query(q, q_rope, blocks.token, head, smem, barriers)
    ROPE_BYTES: gl.constexpr = 0 if smem.rope is None else BLOCK * D_R * 2
    ids = load_ids(work, blocks, blocks.first, ENTRIES)
    for index in range(num_blocks):
        stage = index % STAGES
        phase = (index // STAGES & 1) ^ 1
        block = blocks.first + index
        slot = valid_slots(work, blocks, block, ids)
        ids = load_ids(work, blocks, block + 1, ENTRIES)
        rows = listed_rows(caches, work, blocks, block, slot)
        if index == 1:
            mbarrier.wait(barriers.q_stored, 0)
        keys_full = barriers.keys_full.index(stage)
        mbarrier.wait(barriers.keys_empty.index(stage), phase)
        mbarrier.expect(keys_full, BLOCK * HALF * 2 + ROPE_BYTES)
        others = smem.keys.index(2 * stage + 1 - half)
        gather(rows, (1 - half) * HALF, keys_full, others)
        if smem.rope is not None:
            gather(rows, 2 * HALF, keys_full, smem.rope.index(stage))
        values_full = barriers.values_full.index(stage)
        mbarrier.wait(barriers.values_empty.index(stage), phase)
        mbarrier.expect(values_full, BLOCK * HALF * 2)
        gather(rows, half * HALF, values_full, smem.keys.index(2 * stage + half))
        # P·V is complete, so this has passed; a commit says nothing of what the softmax warps read
        mbarrier.wait(barriers.probs_full.index(stage), phase)
        smem.validity.index(stage).store(gl.where(slot >= 0, 0.0, float("-inf")))
        mbarrier.arrive(values_full, count=1)


@gluon.jit
def issue_scores(smem, tmem, barriers):
    """Issue Q·Kᵀ of every block."""
    mbarrier.wait(barriers.q_stored, 0)
    mbarrier.wait(barriers.q_right, 0)
    num_blocks = gl.max(smem.num_blocks.load(IN_EACH_LANE), 0)
    for index in range(num_blocks):
        stage = index % STAGES
        phase = index // STAGES & 1
        mbarrier.wait(barriers.keys_full.index(stage), phase)
        mbarrier.wait(barriers.values_full.index(stage), phase)
        scores = tmem.scores.index(stage)
        left = smem.keys.index(2 * stage).permute((1, 0))
        right = smem.keys.index(2 * stage + 1).permute((1, 0))
        full = barriers.scores_full.index(stage)
        empty = barriers.keys_empty.index(stage)
        tcgen05_mma(tmem.q_left, left, scores, use_acc=False, mbarriers=[])
        if smem.rope is not None:
            tcgen05_mma(smem.q_right.index(0), right, scores, mbarriers=[])
            rope = smem.rope.index(stage).permute((1, 0))
            tcgen05_mma(smem.q_rope.index(0), rope, scores, mbarriers=[full, empty])
        else:
            tcgen05_mma(smem.q_right.index(0), right, scores, mbarriers=[full, empty])


@gluon.jit
def _probs(tmem, stage, DTYPE: gl.constexpr):
    """The probabilities of a block, in the place of its scores."""
    return tmem.scores.index(stage).slice(0, BLOCK // 2).reinterpret(DTYPE, [HEADS, BLOCK], SCORES)


@gluon.jit
def issue_values(half, smem, tmem, barriers):
    """Issue P·V of every block."""
    mbarrier.wait(barriers.q_stored, 0)
    num_blocks = gl.max(smem.num_blocks.load(IN_EACH_LANE), 0)
    for index in range(num_blocks):
        stage = index % STAGES
        mbarrier.wait(barriers.probs_full.index(stage), index // STAGES & 1)
        values = smem.keys.index(2 * stage + half)
        probs = _probs(tmem, stage, values.dtype)
        empty = barriers.values_empty.index(stage)
        tcgen05_mma(probs, values, tmem.acc, use_acc=index > 0, mbarriers=[empty])


@gluon.jit
def _store_left_query(smem, tmem, barriers):
    """Move the left queries from the stage that is lent to them to tensor memory."""
    mbarrier.wait(barriers.q_left, 0)
    left = reinterpret(smem.keys, smem.keys.dtype, [STAGES, HEADS, HALF], SMEM_16BIT).index(1)
    for i in gl.static_range(HALF // 64):
        part = tmem.q_left.slice(i * 64, 64)
        part.store(left.slice(i * 64, 64, 1).load(part.get_reg_layout()))
    fence_async_shared()  # TMA writes this stage next
    mbarrier.arrive(barriers.q_stored, count=1)


@gluon.jit
def _wait_for_values(barriers, index):
    """Wait for P·V of the newest block. Its stage has been loaded, so P·V of the block before it in
    the stage is complete: the parity names this one."""
    mbarrier.wait(barriers.values_empty.index(index % STAGES), index // STAGES & 1)


@gluon.jit
def _rescale(acc, rescale):
    """acc · rescale, [128] in the rows of the scores."""
    for i in gl.static_range(HALF // 64):
        part = acc.slice(i * 64, 64)
        values = part.load()
        factors = gl.convert_layout(rescale, gl.SliceLayout(1, values.type.layout))
        part.store(values * gl.expand_dims(factors, 1))


@gluon.jit
def softmax(work, outputs, tokens, heads, tile, half, smem, tmem, barriers, scale):
    """Make probabilities of the scores of every block, and store the results."""
    _store_left_query(smem, tmem, barriers)
    num_blocks = gl.max(smem.num_blocks.load(IN_EACH_THREAD), 0)
    LAYOUT: gl.constexpr = tmem.scores.index(0).get_reg_layout()
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    DTYPE: gl.constexpr = smem.keys.dtype
    row_max = gl.full([HEADS], INITIAL_ROW_MAX, gl.float32, ROW)
    row_sum = gl.zeros([HEADS], gl.float32, ROW)
    max_logit = gl.full([HEADS], NEG_INF, gl.float32, ROW)
    for index in range(num_blocks):
        stage = index % STAGES
        phase = index // STAGES & 1
        mbarrier.wait(barriers.values_full.index(stage), phase)
        is_valid = smem.validity.index(stage).load(gl.SliceLayout(0, LAYOUT)) == 0.0
        mbarrier.wait(barriers.scores_full.index(stage), phase)
        scores = apply_sign(tmem.scores.index(stage).load(LAYOUT), scale.SIGN)
        # no addition of −inf: with an infinite query the score of a row of zeros is NaN
        scores = gl.where(gl.expand_dims(is_valid, 0), scores, NEG_INF)
        block_max = gl.max(scores, 1) * scale.size
        max_logit = gl.maximum(max_logit, block_max)
        next_max = next_row_max(row_max, block_max)
        rescale = gl.exp2(row_max - next_max)
        if (index > 0) & (gl.max((rescale != 1.0).to(gl.int32), 0) > 0):
            _wait_for_values(barriers, index - 1)
            _rescale(tmem.acc, rescale)
        exponentials = gl.exp2(scores * scale.size - gl.expand_dims(next_max, 1))
        row_sum = row_sum * rescale + gl.sum(exponentials, 1)
        row_max = next_max
        probs = _probs(tmem, stage, DTYPE)
        probs.store(gl.convert_layout(exponentials.to(DTYPE), probs.get_reg_layout()))
        mbarrier.arrive(barriers.probs_full.index(stage), count=1)
    located = locate_tile(work, tokens, tile, HEADS)
    head = located.first_head + gl.arange(0, HEADS, ROW)
    lse, out_scale = finish_rows(located, outputs, heads, head, row_max, row_sum)
    if half == 0:
        store_statistics(located, outputs, heads, head, lse, row_sum, max_logit)
    _wait_for_values(barriers, num_blocks - 1)
    for i in gl.static_range(HALF // 64):
        values = tmem.acc.slice(i * 64, 64).load()
        factors = gl.convert_layout(out_scale, gl.SliceLayout(1, values.type.layout))
        values = (values * gl.expand_dims(factors, 1)).to(outputs.out.dtype.element_ty)
        store_columns(located, outputs, heads, values, half * HALF + i * 64)


@gluon.jit
def _alloc_smem(DTYPE: gl.constexpr, HAS_ROPE: gl.constexpr):
    """Allocate tiles of DTYPE for queries and keys."""
    q_rope: gl.constexpr = None
    rope: gl.constexpr = None
    if HAS_ROPE:
        q_rope = gl.allocate_shared_memory(DTYPE, [1, HEADS, D_R], SMEM_16BIT)
        rope = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK, D_R], SMEM_16BIT)
    return Smem(
        q_right=gl.allocate_shared_memory(DTYPE, [1, HEADS, HALF], SMEM_16BIT),
        q_rope=q_rope,
        keys=gl.allocate_shared_memory(DTYPE, [2 * STAGES, BLOCK, HALF], SMEM_16BIT),
        rope=rope,
        validity=gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], SMEM_VECTOR),
        num_blocks=gl.allocate_shared_memory(gl.int32, [4], SMEM_VECTOR),
    )


@gluon.jit(do_not_specialize=VARYING)
def sparse_mla_m128_bf16_kernel(
    q,  # TMA descriptors: tiles of 1 x 128 x 256
    q_rope,  # of 1 x 128 x 64 rotated columns, or None
    caches,  # (rows of 64 columns, likewise of a second cache or None)
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
):
    """Run a CTA on a column half of a work tile."""
    head_tiles = (heads + HEADS - 1) // HEADS
    work = make_work(
        (main, lens, topk, stride_token, stride_lens),
        (extra, extra_lens, extra_topk, extra_stride_token, extra_stride_lens),
        num_splits,
        head_tiles,
        tokens * num_splits * head_tiles,
        TRAITS,
    )
    outputs = Outputs(*outputs)
    tile = gl.program_id(0) // 2
    half = gl.program_id(0) % 2
    DTYPE: gl.constexpr = q.dtype
    smem = _alloc_smem(DTYPE, TRAITS.HAS_ROPE)
    tmem = Tmem(
        q_left=allocate_tensor_memory(DTYPE, [HEADS, HALF], ACC),
        scores=allocate_tensor_memory(gl.float32, [STAGES, HEADS, BLOCK], SCORES),
        acc=allocate_tensor_memory(gl.float32, [HEADS, HALF], ACC),
    )
    barriers = Barriers(
        q_left=alloc_barrier(2),
        q_right=alloc_barrier(),
        q_stored=alloc_barrier(),
        keys_full=alloc_barriers(STAGES, 1),
        keys_empty=alloc_barriers(STAGES, 1),
        values_full=alloc_barriers(STAGES, 2),
        values_empty=alloc_barriers(STAGES, 1),
        scores_full=alloc_barriers(STAGES, 1),
        probs_full=alloc_barriers(STAGES, 1),
    )
    scale = Scale(size=scale_log2, SIGN=TRAITS.SIGN)
    gl.warp_specialize(
        [
            (softmax, (work, outputs, tokens, heads, tile, half, smem, tmem, barriers, scale)),
            (producer, (q, q_rope, caches, work, tile, half, smem, barriers)),
            (issue_scores, (smem, tmem, barriers)),
            (issue_values, (half, smem, tmem, barriers)),
        ],
        [4, 1, 1],
        [configs.PRODUCER_REGISTERS, configs.ISSUE_REGISTERS, configs.ISSUE_REGISTERS],
    )
