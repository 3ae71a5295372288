"""The warp roles of the prefill kernels, and their registers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlakit.kernels.blackwell.prefill.loads import masking_warps, producer
from mlakit.kernels.blackwell.prefill.products import issue
from mlakit.kernels.blackwell.prefill.softmax import softmax_warps
from mlakit.kernels.hopper.prefill.values import MASKING_WARPS


@gluon.jit
def run_roles(schedule, tiles, inputs, SIZES, smem, tmem, barriers, results, CONFIG: gl.constexpr):
    """Run a softmax warpgroup per query tile, the producer, the issuing warp, the masking warps."""
    OTHERS: gl.constexpr = CONFIG.OTHER_REGISTERS
    if SIZES.TILES == 2:
        gl.warp_specialize(
            [
                (softmax_warps, (0, schedule, tiles, SIZES, smem, tmem, barriers, results)),
                (softmax_warps, (1, schedule, tiles, SIZES, smem, tmem, barriers, results)),
                (producer, (schedule, tiles, inputs, SIZES, smem, barriers)),
                (issue, (schedule, tiles, SIZES, smem, tmem, barriers)),
                (masking_warps, (schedule, tiles, SIZES, smem, barriers)),
            ],
            [4, 1, 1, MASKING_WARPS],
            [CONFIG.SOFTMAX_REGISTERS, OTHERS, OTHERS, OTHERS],
        )
    else:
        gl.warp_specialize(
            [
                (softmax_warps, (0, schedule, tiles, SIZES, smem, tmem, barriers, results)),
                (producer, (schedule, tiles, inputs, SIZES, smem, barriers)),
                (issue, (schedule, tiles, SIZES, smem, tmem, barriers)),
                (masking_warps, (schedule, tiles, SIZES, smem, barriers)),
            ],
            [1, 1, MASKING_WARPS],
            [OTHERS, OTHERS, OTHERS],
        )
