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

from mlakit.kernels.hopper.indexer.arguments import VARYING, first_tile, unpack
from mlakit.kernels.hopper.indexer.consumer import Tiling, consumer
from mlakit.kernels.hopper.indexer.loads import PIECE, alloc_stages, producer


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


@gluon.jit(do_not_specialize=VARYING)
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
    result,  # `arguments.ResultArguments`
    TRAITS: gl.constexpr,
    CONFIG: gl.constexpr,
):
    WARPGROUPS: gl.constexpr = (
        CONFIG.TOKENS // CONFIG.WG_TOKENS * (CONFIG.KEYS // (CONFIG.WG_PIECES * PIECE))
    )
    requests, sources, outputs = unpack(
        *(q, keys, scales, tokens, max_pages, columns),
        *(stride_table_request, stride_weights_token, stride_out, ragged, result, TRAITS, CONFIG),
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
    stages = alloc_stages(sources, CONFIG, TRAITS.IS_SINGLE, WARPGROUPS, WARPGROUPS)
    request, block, tile, left = first_tile(requests, batch, TRAITS)
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
