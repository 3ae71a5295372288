"""Indexer logits of FP8 queries over paged FP8 keys.

Maths      logits[t, j] = scale[j] · Σ_h weights[t, h] · relu(q[t, h]·key[j]); hidden keys −inf
Work       a work tile is a token block (1, 2, 4 or 8 query tokens of a request) by a key tile (128
           or 256 keys), or by a range of hidden columns; each persistent CTA takes an equal,
           contiguous share of all work tiles (`scheduler`). A batch of one token block is dealt out
           by key tiles, and pages are loaded beside the length
Bound      few tokens: by reading keys. Many: by tensor cores and by the FP32 pipes, which take two
           instructions per product of key and head: relu, and multiply-add of the weight

             producer, one warp          two or four consumers
  a block    wait for an empty stage     load weights
             load queries        full -> wait
  a tile     wait for an empty stage
             load keys, scales   full -> S = K·Qᵀ, one piece of 64 keys after the other
                                <- empty: when the last S of a tile is complete
                                         logits = scale · Σ_h weight · relu(S)   (`head_sum`)
                                         write visible keys
  the last                               write −inf to hidden columns

Memory     two token blocks and the stages, up to 211 KiB of shared memory; no scratch
Limits     up to 64 heads of 128 columns; pages of a multiple of 64 keys, at a distance that TMA can
           address; `kernels.hopper.support` refuses the rest
Numbers    products are accumulated as tensor cores accumulate FP8 products
           (`reference.hopper_fp8_mma`); all else is float32. A NaN stays one
Lineage    DeepGEMM's indexer kernels (keys as the M side, weights in registers); ours: several
           tokens per CTA share a key tile, sums are exchanged by halves, shares of equal length
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlakit.kernels.hopper.indexer.consumer import Outputs, Tiling, consumer
from mlakit.kernels.hopper.indexer.loads import PIECE, Sources, alloc_stages, producer
from mlakit.kernels.hopper.indexer.scheduler import Requests, first_work_tile


@gluon.jit
def _warpgroup_0(request, block, tile, left, requests, outputs, stages, tiling):
    consumer(request, block, tile, left, requests, outputs, stages, tiling, 0)


@gluon.jit
def _warpgroup_1(request, block, tile, left, requests, outputs, stages, tiling):
    consumer(request, block, tile, left, requests, outputs, stages, tiling, 1)


@gluon.jit
def _warpgroup_2(request, block, tile, left, requests, outputs, stages, tiling):
    consumer(request, block, tile, left, requests, outputs, stages, tiling, 2)


@gluon.jit
def _warpgroup_3(request, block, tile, left, requests, outputs, stages, tiling):
    consumer(request, block, tile, left, requests, outputs, stages, tiling, 3)


@gluon.jit(
    do_not_specialize=[
        "batch",
        "tokens",
        "max_pages",
        "columns",
        "stride_table_request",
        "stride_weights_token",
        "stride_out",
    ]
)
def indexer_logits_kernel(
    q,  # TMA descriptors: [TOKENS, HEADS, 128]
    keys,  # [64, 128]
    scales,  # [64]
    batch,
    tokens,
    max_pages,
    columns,
    stride_table_request,
    stride_weights_token,
    stride_out,
    ragged,  # `decode.arguments.Batch`
    result,  # `ResultArguments`
    TRAITS: gl.constexpr,
    CONFIG: gl.constexpr,
):
    WARPGROUPS: gl.constexpr = (
        CONFIG.TOKENS // CONFIG.WG_TOKENS * (CONFIG.KEYS // (CONFIG.WG_PIECES * PIECE))
    )
    requests = Requests(
        q_starts=ragged.q_starts,
        kv_lens=ragged.kv_lens,
        page_table=ragged.page_table,
        stride_q_starts=ragged.stride_q_starts,
        stride_kv_lens=ragged.stride_kv_lens,
        stride_request=stride_table_request,
        stride_entry=ragged.stride_entry,
        tokens=tokens,
        max_pages=max_pages,
        columns=columns,
        IS_CAUSAL=TRAITS.IS_CAUSAL,
        IS_SINGLE=TRAITS.IS_SINGLE,
        TOKENS=CONFIG.TOKENS,
        KEYS=CONFIG.KEYS,
        FILL_COLUMNS=CONFIG.FILL_COLUMNS,
    )
    sources = Sources(
        q=q,
        keys=keys,
        scales=scales,
        PAGE=TRAITS.PAGE,
        PAGE_ROWS=TRAITS.PAGE_ROWS,
        PAGE_SCALES=TRAITS.PAGE_SCALES,
    )
    outputs = Outputs(
        weights=result.weights,
        out=result.out,
        stride_weights_token=stride_weights_token,
        stride_weights_head=result.stride_weights_head,
        stride_out=stride_out,
        HEADS=TRAITS.HEADS,
    )
    tiling = Tiling(
        TOKENS=CONFIG.TOKENS,
        HEADS=CONFIG.HEADS,
        WG_TOKENS=CONFIG.WG_TOKENS,
        WG_PIECES=CONFIG.WG_PIECES,
        KEYS=CONFIG.KEYS,
        STAGES=CONFIG.STAGES,
        IS_CHAINED=CONFIG.IS_CHAINED,
        ADDS_ODD_RELU=CONFIG.ADDS_ODD_RELU,
    )
    stages = alloc_stages(sources, CONFIG, TRAITS.IS_SINGLE, WARPGROUPS)
    if TRAITS.IS_SINGLE:
        request, block, tile = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
        left = gl.to_tensor(1)
    else:
        LINE: gl.constexpr = gl.int32 if TRAITS.FITS_INT32 else gl.int64
        request, block, tile, left = first_work_tile(requests, batch, LINE)
    if left > 0:
        common = (request, block, tile, left, requests, outputs, stages, tiling)
        loading = (request, block, tile, left, requests, sources, stages)
        if WARPGROUPS == 2:
            gl.warp_specialize(
                [(_warpgroup_0, common), (_warpgroup_1, common), (producer, loading)],
                [4, 1],
                [CONFIG.CONSUMER_REGISTERS, CONFIG.PRODUCER_REGISTERS],
            )
        else:
            gl.warp_specialize(
                [
                    (_warpgroup_0, common),
                    (_warpgroup_1, common),
                    (_warpgroup_2, common),
                    (_warpgroup_3, common),
                    (producer, loading),
                ],
                [4, 4, 4, 1],
                [
                    CONFIG.CONSUMER_REGISTERS,
                    CONFIG.CONSUMER_REGISTERS,
                    CONFIG.CONSUMER_REGISTERS,
                    CONFIG.PRODUCER_REGISTERS,
                ],
            )
