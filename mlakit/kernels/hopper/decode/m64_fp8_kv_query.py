"""Shared state of the consumers of `m64_fp8_kv`: queries, and the data they hand to each other."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mlakit.kernels.hopper.decode.scheduler import locate_tile, query_at
from mlakit.kernels.hopper.device.compat import record, reinterpret, tma_load
from mlakit.kernels.hopper.device.fp8_convert import to_fp16
from mlakit.kernels.hopper.device.named_barriers import NAMED_FIRST
from mlakit.kernels.hopper.device.primitives import (
    SMEM_16BIT,
    alloc_barrier,
    alloc_vector,
    named_arrive,
    named_wait,
)
from mlakit.kernels.hopper.device.query_scale import SCORES
from mlakit.kernels.hopper.device.row_scales import load_q_scale

PROBS_FULL = gl.constexpr(NAMED_FIRST + 8)  # after those of `m64_fp8_kv_dequant`


@record
class Query:
    left: object  # [1, 64, 256] float16
    right: object
    rope: object  # [1, 64, 64], of the type of the blocks' rotated columns
    full: object


@record
class ProbStage:
    """Hand-over from QK-softmax to PV: a block of probabilities, and the end of a work tile."""

    probs: object  # [64 heads, 64 keys] float16
    rescale: object  # [64] float32, of acc
    full: object  # None: a named barrier
    empty: object
    out_scale: object  # [64] float32, of a work tile's acc
    out_scale_full: object


@record
class Softmax:
    row_max: object  # [64]
    row_sum: object
    prob_scale: object  # the power of two of the probabilities


@record
class SoftmaxTraits:
    """Properties of the softmax that are known when the kernel is compiled."""

    HAS_ROW_SCALES: object
    SCORES: object  # `ScoreTraits`


@gluon.jit
def alloc_prob_stage(IS_NAMED: gl.constexpr):
    full: gl.constexpr = None
    if not IS_NAMED:
        full = alloc_barrier()
    return ProbStage(
        probs=gl.allocate_shared_memory(gl.float16, [64, 64], SMEM_16BIT),
        rescale=alloc_vector(64),
        full=full,
        empty=alloc_barrier(),
        out_scale=alloc_vector(64),
        out_scale_full=alloc_barrier(),
    )


@gluon.jit
def store_probs(stage, probs, rescale):
    stage.probs.store(probs)
    stage.rescale.store(rescale)
    fence_async_shared()
    if stage.full is None:
        named_arrive(PROBS_FULL, 256)
    else:
        mbarrier.arrive(stage.full, count=1)


@gluon.jit
def wait_probs(stage, fill):
    """Wait for the probabilities of a block."""
    if stage.full is None:
        named_wait(PROBS_FULL, 256)
        fence_async_shared()  # of the dequant warpgroup's stores
    else:
        mbarrier.wait(stage.full, fill & 1)


@gluon.jit
def _as_loaded(smem, descriptor):
    """The memory of queries, as a TMA tile of the descriptor."""
    shape: gl.constexpr = [1, 64, descriptor.block_shape[1]]
    return reinterpret(smem, descriptor.dtype, shape, descriptor.layout).index(0)


@gluon.jit
def load_query(inputs, scheduler, item, index, query):
    tile = locate_tile(scheduler, item, index)
    row, column = query_at(tile.token, tile.first_head, inputs.q_token_rows, inputs.Q_BY_HEAD)
    rope_row, rope_column = query_at(
        tile.token, tile.first_head, inputs.q_rope_token_rows, inputs.Q_ROPE_BY_HEAD
    )
    WIDTH: gl.constexpr = inputs.q.block_shape[1]
    BITS: gl.constexpr = (
        2 * WIDTH * inputs.q.dtype.primitive_bitwidth
        + inputs.q_rope.block_shape[1] * inputs.q_rope.dtype.primitive_bitwidth
    )
    mbarrier.expect(query.full, 64 * BITS // 8)
    right = _as_loaded(query.right, inputs.q)
    tma_load(inputs.q, [row, column + WIDTH], query.full, right)
    tma_load(inputs.q, [row, column], query.full, _as_loaded(query.left, inputs.q))
    rope = _as_loaded(query.rope, inputs.q_rope)
    tma_load(inputs.q_rope, [rope_row, rope_column], query.full, rope)


@gluon.jit
def _convert(smem, descriptor, factor):
    """Queries · factor (±1 or NaN) as the 16-bit type of `smem`, in place; FP8 ones are words."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    values = _as_loaded(smem, descriptor).load(LAYOUT)
    if descriptor.dtype == gl.int32:
        values = to_fp16(values)
    smem.index(0).store((values.to(gl.float32) * factor).to(smem.dtype))


@gluon.jit
def convert_queries(inputs, scheduler, q_scales, item, index, query):
    """Convert FP8 queries to float16, exactly and in place; return the scale of scores.

    q_scales  `arguments.QScales`: a scale is one of scores, but for its sign, which queries get
    """
    scale = load_q_scale(q_scales, scheduler, item, index)
    factor = gl.where(scale < 0, -1.0, 1.0) + scale * 0.0  # a NaN stays one
    _convert(query.left, inputs.q, factor)
    _convert(query.right, inputs.q, factor)
    _convert(query.rope, inputs.q_rope, factor)
    fence_async_shared()
    return gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, SCORES)) * gl.abs(scale)
