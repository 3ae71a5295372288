"""The two consumer warpgroups of the sparse kernels with 64 heads per CTA: the seesaw.

             even (columns 0 to 255)                  odd (columns 256 to 511)
  a pair     S0 = Q·K0ᵀ, issued in the pair before    S1 = Q·K1ᵀ, likewise
  of blocks  m0 = next_row_max(m, S0)   -- m0 -->     m1 = next_row_max(m0, S1)
             P0 = exp2(S0 − m0)         <- m1, P1 --  P1 = exp2(S1 − m1)
             acc = acc·a + P0·V0 left                 acc = acc·a + P1·V1 right
             P0 · exp2(m0 − m1)         --- P0 --->   acc = acc + P0·V0 right
             acc = acc·b + P1·V1 left
             S0 = Q·K0ᵀ of the next pair              S1 = Q·K1ᵀ of the next pair

A producer loads the parts of a pair in the order: K0 left, K1 right with its columns past 512, K0
right likewise, K1 left; each part has a `full` and an `empty` barrier. P0 replaces K0's columns
past 512 where rows have them, so that tile is empty when K0 right is. The queries' columns past 512
are in registers of the even warpgroup, if there is one cache. With the queries of a tile comes
the number of its pairs (`Smem.num_pairs`), with each block which of its entries are valid.

Shared by all sparse kernels with 64 heads per CTA: everything here. A kernel allocates
(`alloc_smem`, `alloc_all_barriers`), starts `even_warpgroup`, `odd_warpgroup` and its own producer,
which follows the order above (`m64_bf16.producer` is an example).

Lineage    the schedule and its name are FlashMLA's (its sparse prefill); this code is written from
           that idea. Differences: warpgroups exchange row_max only, and each computes the rescale
           of the other's block itself; rescaling is lazy; CTAs are persistent, and the next tile's
           queries and first pair are loaded during the epilogue; any head count and list length
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mlakit.kernels.hopper.device.compat import record, reinterpret
from mlakit.kernels.hopper.device.primitives import (
    IN_EACH_THREAD,
    SMEM_16BIT,
    SMEM_VECTOR,
    acc_layout,
    alloc_barrier,
    alloc_vector,
    opaque_zero,
    rescale_acc,
)
from mlakit.kernels.hopper.device.softmax import (
    INITIAL_ROW_MAX,
    NEG_INF,
    apply_sign,
    next_row_max,
)
from mlakit.kernels.hopper.sparse.epilogue import store_half
from mlakit.kernels.hopper.sparse.lists import locate_tile


@record
class Scale:
    """The factor of scores."""

    size: object  # |softmax_scale| · log2(e)
    SIGN: object  # of softmax_scale: 1, 0 or −1


@record
class Softmax:
    """The online softmax of a work tile, in log2 units."""

    row_max: object  # [64], kept until a score exceeds it by far
    row_sum: object
    max_logit: object  # [64], −inf where no entry is valid


@record
class Smem:
    """Shared memory. `left` and `right` are halves of columns 0 to 511 of a block."""

    q_left: object  # [1, 64, 256]
    q_right: object
    q_rope: object  # [1, 64, 64] columns past 512, or None
    left_even: object  # [1, 64, 256]; tiles of both blocks in one would cost the producer barriers
    left_odd: object
    right_even: object
    right_odd: object
    rope_even: object  # [1, 64, 64], or None
    rope_odd: object
    p_even: object  # [1, 64, 64]: the tile of K0's columns past 512, if there are any
    p_odd: object  # [64, 64]
    validity_even: object  # [64] float32: 0 where an entry is valid, −inf where not
    validity_odd: object
    max_even: object  # [64] float32, which warpgroups exchange
    max_odd: object
    sum_even: object
    sum_odd: object
    max_logit_odd: object
    num_pairs: object  # [4] int32, all the same


@record
class PartBarriers:
    """Barriers of one part of a block of keys."""

    full: object
    empty: object


@record
class Barriers:
    """Barriers of the loads, and of the data that one warpgroup hands to the other."""

    q: object  # PartBarriers: the queries of a tile and its number of pairs
    left_even: object  # PartBarriers, as all of blocks
    left_odd: object
    right_even: object
    right_odd: object
    validity: object  # of the entries of a pair
    max_even: object
    max_odd: object
    p_even: object
    p_odd: object
    sum_even: object
    sum_odd: object


@gluon.jit
def alloc_smem(DTYPE: gl.constexpr, ROPE_DTYPE: gl.constexpr, HAS_ROPE: gl.constexpr):
    """Allocate tiles of DTYPE for queries, keys and probabilities, of ROPE_DTYPE past column
    512."""
    q_rope: gl.constexpr = None
    rope_even: gl.constexpr = None
    rope_odd: gl.constexpr = None
    if HAS_ROPE:
        q_rope = gl.allocate_shared_memory(ROPE_DTYPE, [1, 64, 64], SMEM_16BIT)
        rope_even = gl.allocate_shared_memory(ROPE_DTYPE, [1, 64, 64], SMEM_16BIT)
        rope_odd = gl.allocate_shared_memory(ROPE_DTYPE, [1, 64, 64], SMEM_16BIT)
        p_even = reinterpret(rope_even, DTYPE, [1, 64, 64], SMEM_16BIT)
    else:
        p_even = gl.allocate_shared_memory(DTYPE, [1, 64, 64], SMEM_16BIT)
    return Smem(
        q_left=gl.allocate_shared_memory(DTYPE, [1, 64, 256], SMEM_16BIT),
        q_right=gl.allocate_shared_memory(DTYPE, [1, 64, 256], SMEM_16BIT),
        q_rope=q_rope,
        left_even=gl.allocate_shared_memory(DTYPE, [1, 64, 256], SMEM_16BIT),
        left_odd=gl.allocate_shared_memory(DTYPE, [1, 64, 256], SMEM_16BIT),
        right_even=gl.allocate_shared_memory(DTYPE, [1, 64, 256], SMEM_16BIT),
        right_odd=gl.allocate_shared_memory(DTYPE, [1, 64, 256], SMEM_16BIT),
        rope_even=rope_even,
        rope_odd=rope_odd,
        p_even=p_even,
        p_odd=gl.allocate_shared_memory(DTYPE, [64, 64], SMEM_16BIT),
        validity_even=alloc_vector(64),
        validity_odd=alloc_vector(64),
        max_even=alloc_vector(64),
        max_odd=alloc_vector(64),
        sum_even=alloc_vector(64),
        sum_odd=alloc_vector(64),
        max_logit_odd=alloc_vector(64),
        num_pairs=gl.allocate_shared_memory(gl.int32, [4], SMEM_VECTOR),
    )


@gluon.jit
def alloc_all_barriers(Q_ARRIVALS: gl.constexpr, PART_ARRIVALS: gl.constexpr):
    """Allocate all barriers. The producer arrives Q_ARRIVALS times per tile, for `num_pairs` and
    the queries, and PART_ARRIVALS times per part of a block."""
    return Barriers(
        q=PartBarriers(alloc_barrier(Q_ARRIVALS), alloc_barrier(2)),
        left_even=PartBarriers(alloc_barrier(PART_ARRIVALS), alloc_barrier()),
        left_odd=PartBarriers(alloc_barrier(PART_ARRIVALS), alloc_barrier()),
        right_even=PartBarriers(alloc_barrier(PART_ARRIVALS), alloc_barrier()),
        right_odd=PartBarriers(alloc_barrier(PART_ARRIVALS), alloc_barrier()),
        validity=alloc_barrier(),
        max_even=alloc_barrier(),
        max_odd=alloc_barrier(),
        p_even=alloc_barrier(),
        p_odd=alloc_barrier(),
        sum_even=alloc_barrier(),
        sum_odd=alloc_barrier(),
    )


@gluon.jit
def _mask(scores, validity, full, phase, SIGN: gl.constexpr):
    """Return scores with −inf for invalid entries."""
    scores = apply_sign(scores, SIGN)
    mbarrier.wait(full, phase)
    # no addition of −inf: with an infinite query the score of a row of zeros is NaN
    is_valid = validity.load(gl.SliceLayout(0, scores.type.layout)) == 0.0
    return gl.where(gl.expand_dims(is_valid, 0), scores, NEG_INF)


@gluon.jit
def _wait_part(part, phase):
    """Wait for rows that wgmma reads: cp.async writes go through the generic proxy."""
    mbarrier.wait(part.full, phase)
    fence_async_shared()


@gluon.jit
def _add_rope_scores(smem, zero, scores, q_rope, keys):
    """Issue the product of the columns past 512.

    q_rope  these columns of the queries, in registers: wgmma of 64 x 64 scores reads 128 bytes of
            shared memory per cycle, all there is. A number: they are in shared memory
    """
    if len(q_rope.shape) == 0:
        q_rope = smem.q_rope.index(zero)
    return warpgroup_mma(q_rope, keys, scores, is_async=True)


@gluon.jit
def _even_scores(smem, barriers, phase, zero, scores, q_rope, IS_FIRST: gl.constexpr):
    """Issue Q·K0ᵀ: the columns right of 256 and past 512; if IS_FIRST, those left of it before."""
    if IS_FIRST:
        _wait_part(barriers.left_even, phase)
        keys = smem.left_even.index(zero).permute((1, 0))
        scores = warpgroup_mma(smem.q_left.index(zero), keys, scores, use_acc=False, is_async=True)
    _wait_part(barriers.right_even, phase)
    keys = smem.right_even.index(zero).permute((1, 0))
    scores = warpgroup_mma(smem.q_right.index(zero), keys, scores, is_async=True)
    if smem.rope_odd is not None:
        keys = smem.rope_even.index(zero).permute((1, 0))
        scores = _add_rope_scores(smem, zero, scores, q_rope, keys)
    return scores


@gluon.jit
def _odd_scores(smem, barriers, phase, zero, scores, q_rope):
    """Issue Q·K1ᵀ."""
    _wait_part(barriers.right_odd, phase)
    keys = smem.right_odd.index(zero).permute((1, 0))
    scores = warpgroup_mma(smem.q_right.index(zero), keys, scores, use_acc=False, is_async=True)
    if smem.rope_odd is not None:
        keys = smem.rope_odd.index(zero).permute((1, 0))
        scores = _add_rope_scores(smem, zero, scores, q_rope, keys)
    _wait_part(barriers.left_odd, phase)
    keys = smem.left_odd.index(zero).permute((1, 0))
    return warpgroup_mma(smem.q_left.index(zero), keys, scores, is_async=True)


@gluon.jit
def _even_pair(phase, smem, barriers, acc, softmax, scores, scale, q_rope, IS_LAST: gl.constexpr):
    """The even warpgroup's side of a pair of blocks."""
    SCORES: gl.constexpr = scores.type.layout
    PROBS: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    DTYPE: gl.constexpr = smem.p_odd.dtype
    zero = opaque_zero()
    scores = _mask(scores, smem.validity_even, barriers.validity, phase, scale.SIGN)
    block_max = gl.max(scores, 1) * scale.size
    max_logit = gl.maximum(softmax.max_logit, block_max)
    even_max = next_row_max(softmax.row_max, block_max)
    smem.max_even.store(even_max)
    mbarrier.arrive(barriers.max_even, count=1)
    rescale = gl.exp2(softmax.row_max - even_max)
    exponentials = gl.exp2(scores * scale.size - gl.expand_dims(even_max, 1))
    row_sum = softmax.row_sum * rescale + gl.sum(exponentials, 1)
    acc = rescale_acc(acc, rescale)
    own_probs = gl.convert_layout(exponentials.to(DTYPE), PROBS)
    pending = warpgroup_mma(own_probs, smem.left_even.index(zero), acc, is_async=True)
    mbarrier.wait(barriers.max_odd, phase)
    row_max = smem.max_odd.load(gl.SliceLayout(1, SCORES))
    odd_rescale = gl.exp2(even_max - row_max)
    probs = (exponentials * gl.expand_dims(odd_rescale, 1)).to(DTYPE)
    smem.p_even.index(0).store(probs)
    fence_async_shared()
    mbarrier.arrive(barriers.p_even, count=1)
    acc, own_probs = warpgroup_mma_wait(0, deps=(pending, own_probs))
    mbarrier.arrive(barriers.left_even.empty, count=1)
    row_sum = row_sum * odd_rescale
    acc = rescale_acc(acc, odd_rescale)
    mbarrier.wait(barriers.p_odd, phase)
    pending = warpgroup_mma(smem.p_odd, smem.left_odd.index(zero), acc, is_async=True)
    if not IS_LAST:
        zeros = gl.zeros([64, 64], gl.float32, SCORES)
        _wait_part(barriers.left_even, phase ^ 1)
        keys = smem.left_even.index(zero).permute((1, 0))
        qk = warpgroup_mma(smem.q_left.index(zero), keys, zeros, use_acc=False, is_async=True)
        # these columns keep the tensor cores busy while the odd block's left half is reloaded
        acc = warpgroup_mma_wait(1, deps=(pending,))
        mbarrier.arrive(barriers.left_odd.empty, count=1)
        qk = _even_scores(smem, barriers, phase ^ 1, zero, qk, q_rope, False)
        scores = warpgroup_mma_wait(0, deps=(qk,))
    else:
        acc = warpgroup_mma_wait(0, deps=(pending,))
        mbarrier.arrive(barriers.left_odd.empty, count=1)
    return acc, Softmax(row_max, row_sum, max_logit), scores


@gluon.jit
def _odd_pair(phase, smem, barriers, acc, softmax, scores, scale, q_rope, IS_LAST: gl.constexpr):
    """The odd warpgroup's side of the same pair."""
    SCORES: gl.constexpr = scores.type.layout
    PROBS: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    DTYPE: gl.constexpr = smem.p_odd.dtype
    zero = opaque_zero()
    scores = _mask(scores, smem.validity_odd, barriers.validity, phase, scale.SIGN)
    block_max = gl.max(scores, 1) * scale.size
    max_logit = gl.maximum(softmax.max_logit, block_max)
    mbarrier.wait(barriers.max_even, phase)
    odd_max = next_row_max(smem.max_even.load(gl.SliceLayout(1, SCORES)), block_max)
    smem.max_odd.store(odd_max)
    mbarrier.arrive(barriers.max_odd, count=1)
    exponentials = gl.exp2(scores * scale.size - gl.expand_dims(odd_max, 1))
    probs = exponentials.to(DTYPE)
    smem.p_odd.store(probs)
    fence_async_shared()
    mbarrier.arrive(barriers.p_odd, count=1)
    rescale = gl.exp2(softmax.row_max - odd_max)
    row_sum = softmax.row_sum * rescale + gl.sum(exponentials, 1)
    acc = rescale_acc(acc, rescale)
    own_probs = gl.convert_layout(probs, PROBS)
    pending = warpgroup_mma(own_probs, smem.right_odd.index(zero), acc, is_async=True)
    mbarrier.wait(barriers.p_even, phase)
    last = warpgroup_mma(
        smem.p_even.index(zero), smem.right_even.index(zero), pending, is_async=True
    )
    last, own_probs = warpgroup_mma_wait(1, deps=(last, own_probs))
    mbarrier.arrive(barriers.right_odd.empty, count=1)
    acc = warpgroup_mma_wait(0, deps=(last,))
    mbarrier.arrive(barriers.right_even.empty, count=1)
    if not IS_LAST:
        zeros = gl.zeros([64, 64], gl.float32, SCORES)
        qk = _odd_scores(smem, barriers, phase ^ 1, zero, zeros, q_rope)
        scores = warpgroup_mma_wait(0, deps=(qk,))
    return acc, Softmax(odd_max, row_sum, max_logit), scores


@gluon.jit
def warpgroup(IS_EVEN: gl.constexpr, work, outputs, tokens, heads, smem, barriers, scale):
    """Run the even or the odd warpgroup."""
    SCORES: gl.constexpr = acc_layout(64)
    ACC: gl.constexpr = acc_layout(256)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    pairs_done = tokens * 0  # its parity is the phase of the barriers
    tiles_done = tokens * 0
    # no hoisting: addresses of a thread's elements would be kept across tiles, and spilled
    for tile in tl.range(gl.program_id(0), work.num_tiles, gl.num_programs(0), disable_licm=True):
        zero = opaque_zero()
        zeros = gl.zeros([64, 64], gl.float32, SCORES)
        acc = gl.zeros([64, 256], gl.float32, ACC)
        softmax = Softmax(
            row_max=gl.full([64], INITIAL_ROW_MAX, gl.float32, ROW),
            row_sum=gl.zeros([64], gl.float32, ROW),
            max_logit=gl.full([64], NEG_INF, gl.float32, ROW),
        )
        mbarrier.wait(barriers.q.full, tiles_done & 1)
        num_pairs = gl.max(smem.num_pairs.load(IN_EACH_THREAD), 0)
        q_rope = zero
        # the odd warpgroup has no registers left for them, with a second cache neither has
        if IS_EVEN and smem.rope_odd is not None and not work.HAS_EXTRA:
            q_rope = smem.q_rope.index(0).load(gl.DotOperandLayout(0, SCORES, 2))
        if IS_EVEN:
            qk = _even_scores(smem, barriers, pairs_done & 1, zero, zeros, q_rope, True)
        else:
            qk = _odd_scores(smem, barriers, pairs_done & 1, zero, zeros, q_rope)
        scores = warpgroup_mma_wait(0, deps=(qk,))
        last_pair = pairs_done + num_pairs - 1
        for pair in range(pairs_done, last_pair):
            if IS_EVEN:
                acc, softmax, scores = _even_pair(
                    pair & 1, smem, barriers, acc, softmax, scores, scale, q_rope, False
                )
            else:
                acc, softmax, scores = _odd_pair(
                    pair & 1, smem, barriers, acc, softmax, scores, scale, q_rope, False
                )
        mbarrier.arrive(barriers.q.empty, count=1)
        if IS_EVEN:
            acc, softmax, scores = _even_pair(
                last_pair & 1, smem, barriers, acc, softmax, scores, scale, q_rope, True
            )
            smem.sum_even.store(softmax.row_sum)
            mbarrier.arrive(barriers.sum_even, count=1)
            mbarrier.wait(barriers.sum_odd, tiles_done & 1)
            softmax = softmax.replace(
                row_sum=softmax.row_sum + smem.sum_odd.load(ROW),
                max_logit=gl.maximum(softmax.max_logit, smem.max_logit_odd.load(ROW)),
            )
        else:
            acc, softmax, scores = _odd_pair(
                last_pair & 1, smem, barriers, acc, softmax, scores, scale, q_rope, True
            )
            smem.sum_odd.store(softmax.row_sum)
            smem.max_logit_odd.store(softmax.max_logit)
            mbarrier.arrive(barriers.sum_odd, count=1)
            mbarrier.wait(barriers.sum_even, tiles_done & 1)
            softmax = softmax.replace(row_sum=softmax.row_sum + smem.sum_even.load(ROW))
        pairs_done = last_pair + 1
        tiles_done += 1
        located = locate_tile(work, tokens, tile)
        store_half(located, outputs, heads, acc, softmax, IS_EVEN)
