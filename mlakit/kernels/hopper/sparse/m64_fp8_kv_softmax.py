"""The softmax state of the FP8 sparse kernel of 64 heads, and the end of a work tile."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mlakit.kernels.hopper.device.compat import record
from mlakit.kernels.hopper.device.epilogue import finish_rows
from mlakit.kernels.hopper.device.named_barriers import NAMED_FIRST
from mlakit.kernels.hopper.device.primitives import (
    IN_EACH_THREAD,
    SMEM_16BIT,
    alloc_barrier,
    alloc_vector,
    named_arrive,
    named_wait,
)
from mlakit.kernels.hopper.device.query_scale import SCORES
from mlakit.kernels.hopper.device.softmax import INITIAL_ROW_MAX, NEG_INF, PROB_SCALE
from mlakit.kernels.hopper.sparse.epilogue import store_statistics

SMALLEST_ACC_SCALE = gl.constexpr(2.0**-60)
PROBS_FULL = gl.constexpr(NAMED_FIRST + 8)  # a named barrier


@record
class ProbStage:
    """Hand-over from QK-softmax to PV: a block, or after the last one the scale of results.

    One stage; fill n is block n − t of the CTA, or the end of its tile t.
    """

    probs: object  # [64 heads, 64 entries] float16
    rescale: object  # [64] float32, of acc
    empty: object  # an mbarrier: see `m64_fp8_kv`, where the QK-softmax warpgroup waits for it


@record
class Softmax:
    row_max: object  # [64], kept until a score exceeds it by far
    row_sum: object
    max_logit: object  # [64]
    acc_scale: object  # the largest block_scale: acc is divided by it


@gluon.jit
def alloc_prob_stage():
    return ProbStage(
        gl.allocate_shared_memory(gl.float16, [64, 64], SMEM_16BIT),
        alloc_vector(64),
        alloc_barrier(),
    )


@gluon.jit
def initial_softmax():
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    return Softmax(
        gl.full([64], INITIAL_ROW_MAX, gl.float32, ROW),
        gl.zeros([64], gl.float32, ROW),
        gl.full([64], NEG_INF, gl.float32, ROW),
        gl.to_tensor(SMALLEST_ACC_SCALE),
    )


@gluon.jit
def load_block_scale(stages, stage):
    return gl.max(stages.block_scale.index(stage).load(IN_EACH_THREAD), 0)


@gluon.jit
def inverse_power(power):
    """1 / power, of a power of two."""
    return ((254 << 23) - power.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)


@gluon.jit
def finish_tile(tile, outputs, heads, softmax, prob_stage, fill):
    """Return (lse, scale of acc); the scale also goes to the PV warpgroup, as soon as it is known.

    fill  of `prob_stage`
    """
    head = tile.first_head + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    lse, out_scale = finish_rows(tile, outputs, heads, head, softmax.row_max, softmax.row_sum)
    out_scale *= softmax.acc_scale * (1.0 / PROB_SCALE)
    mbarrier.wait(prob_stage.empty, (fill & 1) ^ 1)
    prob_stage.rescale.store(out_scale)
    named_arrive(PROBS_FULL, 256)
    return lse, out_scale


@gluon.jit
def store_tile_statistics(tile, outputs, heads, softmax, lse):
    """Store lse and max_logits."""
    head = tile.first_head + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    store_statistics(tile, outputs, heads, head, lse, softmax.row_sum, softmax.max_logit)


@gluon.jit
def receive_out_scale(prob_stage, ROW: gl.constexpr):
    named_wait(PROBS_FULL, 256)
    out_scale = prob_stage.rescale.load(ROW)
    mbarrier.arrive(prob_stage.empty, count=1)
    return out_scale
