"""Expanded MLA prefill of FP8 queries, keys and values, ragged, on Blackwell.

Maths      scores = (q_n·k_n + q_r·k_r) · q_scale · k_scale · softmax_scale
           out = softmax(scores) @ (v · v_scale)
Work       as `bf16`, with 256 queries per work tile. Blocks of 128 keys begin at multiples of 128
           of a request: each has a scale of keys and one of values (`scales`)
Roles      as `bf16`
Memory     209 KB of shared memory: the queries, and eight stages of 128 columns of a block. All 512
           columns of tensor memory, as `bf16`: probabilities take 32 columns of their scores
Limits     e4m3, the widths of `configs.FP8_WIDTHS`, rows that TMA can address, adjacent columns of
           values; scales of blocks, or one of all keys. Triton 3.9 or newer
Numbers    P is rounded to e4m3, after the scale of values; row_sum is not. acc is float32
Lineage    own design; ideas: FlashAttention-4 (two query tiles in turns, probabilities over scores)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from mlakit.kernels.blackwell.prefill.loads import Inputs
from mlakit.kernels.blackwell.prefill.pipeline import KEYS, PART, QUERIES, alloc, sizes_of
from mlakit.kernels.blackwell.prefill.roles import run_roles
from mlakit.kernels.blackwell.prefill.scales import Scales
from mlakit.kernels.blackwell.prefill.softmax import Results, Values
from mlakit.kernels.hopper.prefill.bf16 import VARYING
from mlakit.kernels.hopper.prefill.epilogue import Outputs
from mlakit.kernels.hopper.prefill.pipeline import alloc_tile_stages
from mlakit.kernels.hopper.prefill.tiles import Schedule


@gluon.jit(do_not_specialize=VARYING)
def mla_prefill_e4m3_kernel(
    q,  # TMA descriptors of 128 x 128 columns
    q_rope,  # of 128 x 64, like k_rope, or None
    k,
    k_rope,
    v,
    scale_log2,
    heads,
    window,
    stride_q_head,
    stride_k_head,
    stride_v_head,
    stride_lse_token,
    stride_lse_head,
    schedule,  # this, values and outputs are of `hopper.prefill.arguments`
    values,
    scales,  # `launch.ScaleArguments`
    outputs,
    TRAITS: gl.constexpr,
    CONFIG: gl.constexpr,  # `configs.PrefillConfig`
):
    """Run persistent CTAs, at most one per SM, over the work tiles that they draw."""
    sizes = sizes_of(TRAITS, PART, CONFIG, IS_ALIGNED=True)
    smem, tmem, barriers = alloc(q.dtype, sizes, CONFIG.STAGES)
    tiles = alloc_tile_stages(4)
    gdc_wait()  # for the schedule
    schedule = Schedule(
        rows=schedule.rows,
        counters=schedule.counters,
        num_tiles=gl.load(schedule.counters + 1),
        heads=heads,
        window=window,
        MASK=TRAITS.MASK,
        BLOCK_Q=2 * QUERIES,
        BLOCK_K=KEYS,
    )
    inputs = Inputs(q, q_rope, k, k_rope, v, stride_q_head, stride_k_head, stride_v_head)
    results = Results(
        outputs=Outputs(
            *outputs, stride_lse_token=stride_lse_token, stride_lse_head=stride_lse_head
        ),
        values=Values(values.v, values.stride_token, stride_v_head, 1),
        scales=Scales(*scales, HAS_BLOCKS=True),
        scale_log2=scale_log2,
        SIGN=TRAITS.SIGN,
        RESCALE_THRESHOLD=CONFIG.RESCALE_THRESHOLD,
    )
    run_roles(schedule, tiles, inputs, sizes, smem, tmem, barriers, results, CONFIG)
