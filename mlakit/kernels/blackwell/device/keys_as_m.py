"""Attention with keys as the M side of both products: Sᵀ = K·Qᵀ and Oᵀ = Vᵀ·Pᵀ, for few heads.

The M of a product is 128 whatever is multiplied: heads would leave it half empty where there are 64
of them or fewer. Here they are N: 16, 32 or 64.

             producer                    issuing warp                    softmax warpgroup
  a block    four parts of latent        Sᵀ of each part that is there,
  of 128     columns, each into the      then of the rotated columns
  keys       next stage, and the           -- scores -->                 Pᵀ = exp2(Sᵀ − row_max)
             rotated columns             acc of each part = Vᵀ·Pᵀ        acc · rescale, if needed
               <- empty: each stage --     <- Pᵀ, in the place of the rotated columns --

A kernel has its own producer, which knows where rows are, and loops over blocks in all of the three
roles. Blocks are numbered from 0 through all work tiles of a CTA: what is used once per block has
phase `block & 1`, and a part's stage follows from the number, too (`stage_of`).

Deadlock   none: parts are loaded, multiplied and released in one order, and there are stages for
           all parts of a block
Memory     tensor memory: acc of 4 x 128 columns and the scores, ROWS columns each
Numbers    P is rounded to the keys' dtype, acc is float32. Keys that do not exist are zeros in
           shared memory, for 0 · NaN is NaN
Lineage    own design; ideas: swapped operands for few heads, FlashAttention-4's lazy rescaling
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
)

from mlakit.kernels.blackwell.device import configs
from mlakit.kernels.blackwell.device.gathers import gather
from mlakit.kernels.hopper.device.compat import record, reinterpret
from mlakit.kernels.hopper.device.primitives import (
    SMEM_16BIT,
    alloc_barrier,
    alloc_barriers,
    alloc_vector,
    smem_layout,
)
from mlakit.kernels.hopper.device.softmax import (
    INITIAL_ROW_MAX,
    NEG_INF,
    apply_sign,
    next_row_max,
)
from mlakit.kernels.hopper.sparse.seesaw import Softmax

KEYS = gl.constexpr(configs.KEYS)
PART = gl.constexpr(configs.PART)
PARTS = gl.constexpr(configs.D_C // configs.PART)
D_R = gl.constexpr(configs.D_R)
HEADS = gl.constexpr(configs.MIN_ROWS)  # whose results are stored at a time
PART_BYTES = gl.constexpr(2 * configs.KEYS * configs.PART)
# A thread has a fourth of the heads, of every eighth key. With a key and all heads in each thread,
# a maximum over keys would take 6 times the shuffles, and what there is per head 4 times the
# registers
SCORE_LOAD = gl.constexpr("16x256b")
ROPE_BYTES = gl.constexpr(2 * configs.KEYS * configs.D_R)


@record
class Smem:
    """Shared memory."""

    q: object  # [4, ROWS, 128] latent columns of the queries
    q_rope: object  # [1, ROWS, 64] rotated columns, or None
    latent: object  # [stages, 128, 128]: 128 latent columns of a block of keys
    rope: object  # [1, 128, 64] rotated columns of a block, which its probabilities replace
    out_scale: object  # [ROWS] float32


@record
class Tmem:
    """Tensor memory, all float32 and transposed."""

    scores: object  # [128 keys, ROWS]
    acc: object  # [4, 128 columns, ROWS]


@record
class Barriers:
    """Barriers; those of latent columns are arrays with an element per stage."""

    latent_full: object
    latent_empty: object
    rope_full: object  # None without rotated columns
    scores_full: object
    probs_full: object
    values_done: object  # acc has a block's values, and the probabilities have been read


@gluon.constexpr_function
def _tmem_layout(rows):
    return TensorMemoryLayout((configs.KEYS, rows), col_stride=1)


@gluon.jit
def alloc(DTYPE: gl.constexpr, HAS_ROPE: gl.constexpr, CONFIG: gl.constexpr):
    """Allocate tiles of DTYPE for queries and keys, accumulators and barriers: (Smem, Tmem,
    Barriers)."""
    ROWS: gl.constexpr = CONFIG.ROWS
    LAYOUT: gl.constexpr = _tmem_layout(ROWS)
    q_rope: gl.constexpr = None
    rope_full: gl.constexpr = None
    if HAS_ROPE:
        rope_full = alloc_barrier()
        q_rope = gl.allocate_shared_memory(DTYPE, [1, ROWS, D_R], SMEM_16BIT)
    smem = Smem(
        q=gl.allocate_shared_memory(DTYPE, [PARTS, ROWS, PART], SMEM_16BIT),
        q_rope=q_rope,
        latent=gl.allocate_shared_memory(DTYPE, [CONFIG.STAGES, KEYS, PART], SMEM_16BIT),
        rope=gl.allocate_shared_memory(DTYPE, [1, KEYS, D_R], SMEM_16BIT),
        out_scale=alloc_vector(ROWS),
    )
    tmem = Tmem(
        scores=allocate_tensor_memory(gl.float32, [KEYS, ROWS], LAYOUT),
        acc=allocate_tensor_memory(gl.float32, [PARTS, PART, ROWS], LAYOUT),
    )
    barriers = Barriers(
        latent_full=alloc_barriers(CONFIG.STAGES, 1),
        latent_empty=alloc_barriers(CONFIG.STAGES, 1),
        rope_full=rope_full,
        scores_full=alloc_barrier(),
        probs_full=alloc_barrier(),
        values_done=alloc_barrier(),
    )
    return smem, tmem, barriers


@gluon.jit
def stage_of(smem, block, part):
    """Return (stage, phase) of a part of a block."""
    STAGES: gl.constexpr = smem.latent.shape[0]
    fill = block * PARTS + part
    return fill % STAGES, fill // STAGES & 1


@gluon.jit
def gather_block(latent, rope, block, ROPE_COLUMN: gl.constexpr, smem, barriers):
    """Start to gather a block, once the one before has probabilities.

    latent, rope  `gathers.Rows` of its first and its last 64 keys; rope is not read without rotated
                  columns, which begin with column ROPE_COLUMN
    """
    for part in gl.static_range(PARTS):
        stage, phase = stage_of(smem, block, part)
        full = barriers.latent_full.index(stage)
        mbarrier.wait(barriers.latent_empty.index(stage), phase ^ 1)
        mbarrier.expect(full, PART_BYTES)
        gather(latent[0], part * PART, full, smem.latent.index(stage), 0)
        gather(latent[1], part * PART, full, smem.latent.index(stage), 1)
    # the softmax warps are done with the block before: a commit says nothing of what they did
    mbarrier.wait(barriers.probs_full, (block & 1) ^ 1)
    if smem.q_rope is not None:
        wait_for_values(block - 1, barriers)
        mbarrier.expect(barriers.rope_full, ROPE_BYTES)
        gather(rope[0], ROPE_COLUMN, barriers.rope_full, smem.rope.index(0), 0)
        gather(rope[1], ROPE_COLUMN, barriers.rope_full, smem.rope.index(0), 1)


@gluon.jit
def issue_scores(block, smem, tmem, barriers):
    """Issue K·Qᵀ of a block, part by part as they arrive."""
    for part in gl.static_range(PARTS):
        stage, phase = stage_of(smem, block, part)
        mbarrier.wait(barriers.latent_full.index(stage), phase)
        query = smem.q.index(part).permute((1, 0))
        tcgen05_mma(smem.latent.index(stage), query, tmem.scores, use_acc=part > 0, mbarriers=[])
    if smem.q_rope is not None:
        mbarrier.wait(barriers.rope_full, block & 1)
        query = smem.q_rope.index(0).permute((1, 0))
        tcgen05_mma(smem.rope.index(0), query, tmem.scores, mbarriers=[])
    tcgen05_commit(barriers.scores_full)


@gluon.jit
def _probs(smem, ROWS: gl.constexpr):
    """The probabilities of a block, [128 keys, ROWS]."""
    LAYOUT: gl.constexpr = smem_layout(ROWS, 16)
    return reinterpret(smem.rope, smem.rope.dtype, [D_R // ROWS, KEYS, ROWS], LAYOUT).index(0)


@gluon.jit
def issue_values(block, index, smem, tmem, barriers):
    """Issue Vᵀ·Pᵀ of a block, which releases its stages; it is number `index` of its work tile."""
    mbarrier.wait(barriers.probs_full, block & 1)
    probs = _probs(smem, smem.q.shape[1])
    for part in gl.static_range(PARTS):
        stage, _ = stage_of(smem, block, part)
        values = smem.latent.index(stage).permute((1, 0))
        empty = barriers.latent_empty.index(stage)
        tcgen05_mma(values, probs, tmem.acc.index(part), use_acc=index > 0, mbarriers=[empty])
    tcgen05_commit(barriers.values_done)


@gluon.jit
def wait_for_values(block, barriers):
    """Wait until acc has the values of a block; of block −1 there are none to wait for."""
    mbarrier.wait(barriers.values_done, block & 1)


@gluon.jit
def _rescale(acc, rescale):
    """acc · rescale, [ROWS] in the columns of the scores."""
    for part in gl.static_range(PARTS):
        tile = acc.index(part)
        values = tile.load(rescale.type.layout.parent)
        tile.store(values * gl.expand_dims(rescale, 0))


@gluon.jit
def _sums_of_threads(values):
    """[128 keys, ROWS] summed over the four keys of each thread: [4 warps, 8 keys, ROWS]."""
    return gl.sum(gl.reshape(values, [4, 4, KEYS // 16, values.shape[1]]), 1)


@gluon.jit
def initial_softmax(tmem):
    """The state of a work tile before its first block."""
    LAYOUT: gl.constexpr = tmem.scores.get_reg_layout(instr_variant=SCORE_LOAD)
    ROW: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    ROWS: gl.constexpr = tmem.scores.shape[1]
    return Softmax(
        row_max=gl.full([ROWS], INITIAL_ROW_MAX, gl.float32, ROW),
        row_sum=_sums_of_threads(gl.zeros([KEYS, ROWS], gl.float32, LAYOUT)),
        max_logit=gl.full([ROWS], NEG_INF, gl.float32, ROW),
    )


@gluon.jit
def softmax_block(block, index, is_valid, softmax, smem, tmem, barriers, scale):
    """Make probabilities of the scores of a block; return the state after it.

    index     of the block in its work tile
    is_valid  [128 keys] in the rows of the scores
    scale     `seesaw.Scale`
    """
    mbarrier.wait(barriers.scores_full, block & 1)
    scores = apply_sign(
        tmem.scores.load(tmem.scores.get_reg_layout(instr_variant=SCORE_LOAD)), scale.SIGN
    )
    # no addition of −inf: with an infinite query the score of a row of zeros is NaN
    scores = gl.where(gl.expand_dims(is_valid, 1), scores, NEG_INF)
    block_max = gl.max(scores, 0) * scale.size
    row_max = next_row_max(softmax.row_max, block_max)
    rescale = gl.exp2(softmax.row_max - row_max)
    exponentials = gl.exp2(scores * scale.size - gl.expand_dims(row_max, 0))
    probs = exponentials.to(smem.rope.dtype)
    row_sum = softmax.row_sum
    WARP: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, row_sum.type.layout))
    of_sums = gl.expand_dims(gl.expand_dims(gl.convert_layout(rescale, WARP), 0), 0)
    row_sum = row_sum * of_sums + _sums_of_threads(exponentials)
    # the scores' commit waits for all products before them: acc has the values of the last block
    if (index > 0) & (gl.max((rescale != 1.0).to(gl.int32), 0) > 0):
        _rescale(tmem.acc, rescale)
    _probs(smem, tmem.scores.shape[1]).store(probs)
    fence_async_shared()
    mbarrier.arrive(barriers.probs_full, count=1)
    return Softmax(
        row_max=row_max,
        row_sum=row_sum,
        max_logit=gl.maximum(softmax.max_logit, block_max),
    )


@gluon.jit
def row_sums(softmax):
    """row_sum of each head, in the layout of row_max."""
    sums = gl.sum(gl.sum(softmax.row_sum, 0), 0)
    return gl.convert_layout(sums, softmax.row_max.type.layout)


@gluon.jit
def result(smem, tmem, part, i):
    """128 columns of the results of 16 heads from 16 · i on, [128, 16]; a thread has a column.

    The factors are in `smem.out_scale`.
    """
    values = tmem.acc.index(part).slice(HEADS * i, HEADS).load()
    factors = smem.out_scale.slice(HEADS * i, HEADS)
    return values * gl.expand_dims(factors.load(gl.SliceLayout(0, values.type.layout)), 0)
