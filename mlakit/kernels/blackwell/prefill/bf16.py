"""Expanded MLA prefill, ragged, on Blackwell.

Maths      scores = (q_n·k_n + q_r·k_r) · softmax_scale ; out = softmax(scores) @ v
Work       persistent CTAs, which draw work tiles of a head as Hopper's kernel does
           (`hopper.prefill`): 256 queries with values of 128 columns, 128 queries with 256 columns.
           Blocks of 128 keys are the N of Q·Kᵀ; queries are M
Roles      a softmax warpgroup per 128 queries, which also rescales acc and stores results; a
           producer warp (TMA); a warp that issues the products; two masking warps
           (`hopper.prefill.values`)
Memory     225 KB of shared memory: the queries, and stages of 128 columns of a block, which keys
           and values share (`pipeline`). All 512 columns of tensor memory: scores of two query
           tiles or of two blocks, 128 columns each, which probabilities replace, and acc, 256
Limits     bf16 and fp16, the widths of `configs.WIDTHS`, rows that TMA can address. Triton 3.9 or
           newer
Numbers    P is rounded to the values' dtype, acc is float32
Lineage    own design; ideas: FlashAttention-4 (two query tiles in turns, probabilities over scores,
           lazy rescaling)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from mlakit.kernels.blackwell.prefill.loads import Inputs
from mlakit.kernels.blackwell.prefill.pipeline import KEYS, QUERIES, alloc, sizes_of
from mlakit.kernels.blackwell.prefill.roles import run_roles
from mlakit.kernels.blackwell.prefill.softmax import Results, Values
from mlakit.kernels.hopper.prefill.bf16 import VARYING
from mlakit.kernels.hopper.prefill.epilogue import Outputs
from mlakit.kernels.hopper.prefill.pipeline import alloc_tile_stages
from mlakit.kernels.hopper.prefill.tiles import Schedule


@gluon.jit(do_not_specialize=VARYING)
def mla_prefill_bf16_kernel(
    q,  # TMA descriptors of 128 x 64 columns
    k,
    k_rope,  # or None
    v,
    scale_log2,
    heads,
    window,
    stride_q_head,
    stride_k_head,
    stride_v_head,
    stride_lse_token,
    stride_lse_head,
    schedule,  # these three are of `hopper.prefill.arguments`
    values,
    outputs,
    D_V: gl.constexpr,
    TRAITS: gl.constexpr,
    CONFIG: gl.constexpr,  # `configs.PrefillConfig`
):
    """Run persistent CTAs, at most one per SM, over the work tiles that they draw."""
    TILES: gl.constexpr = CONFIG.TILES
    sizes = sizes_of(TRAITS, D_V, CONFIG, IS_ALIGNED=False)
    smem, tmem, barriers = alloc(q.dtype, sizes, CONFIG.STAGES)
    tiles = alloc_tile_stages(TILES + 2)
    gdc_wait()  # for the schedule
    schedule = Schedule(
        rows=schedule.rows,
        counters=schedule.counters,
        num_tiles=gl.load(schedule.counters + 1),
        heads=heads,
        window=window,
        MASK=TRAITS.MASK,
        BLOCK_Q=TILES * QUERIES,
        BLOCK_K=KEYS,
    )
    inputs = Inputs(q, q, k, k_rope, v, stride_q_head, stride_k_head, stride_v_head)
    results = Results(
        outputs=Outputs(
            *outputs, stride_lse_token=stride_lse_token, stride_lse_head=stride_lse_head
        ),
        values=Values(values.v, values.stride_token, stride_v_head, 1),
        scales=None,
        scale_log2=scale_log2,
        SIGN=TRAITS.SIGN,
        RESCALE_THRESHOLD=CONFIG.RESCALE_THRESHOLD,
    )
    run_roles(schedule, tiles, inputs, sizes, smem, tmem, barriers, results, CONFIG)
