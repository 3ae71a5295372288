"""Indexer logits of FP8 queries over paged FP8 keys, on Blackwell.

Maths      logits[t, j] = scale[j] · Σ_h weights[t, h] · relu(q[t, h]·key[j]); hidden keys −inf
Work       as on Hopper (`hopper.indexer`): work tiles are token blocks of a request by key tiles,
           or by ranges of hidden columns, and each persistent CTA takes an equal share of them. A
           token block is up to 256 columns (token, head): 4 tokens of 64 heads, 8 of 32
Bound      few tokens: by reading keys. Many: by relu and multiply-add of each score, and by tensor
           cores

             producer, one warp      issuing warp           two summing warpgroups
  a block    load queries    full -> wait                   load weights
  a tile     load keys,      full -> K·Qᵀ of 128 keys       load scales
             scales                    -- scores.full -->   logits = scale · Σ_h weight · relu(S)
                         <- empty: by commit, and once scales are loaded
                                       <- scores.empty --
                                                            write visible keys
  the last                                                  write −inf to hidden columns

Memory     two token blocks and the stages, up to 215 KiB of shared memory; two buffers of scores,
           up to 512 columns of tensor memory; no scratch
Limits     up to 64 heads of 128 columns; pages of a multiple of 64 keys, at a distance that TMA can
           address; `kernels.blackwell.support` refuses the rest
Numbers    products and sums are float32. A NaN stays one
Lineage    DeepGEMM's indexer kernels (keys as the M side, weights in registers, a key per thread);
           the shares, loads and fill tiles of Hopper's kernel
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlakit.kernels.blackwell.indexer.products import WARPGROUPS, alloc_scores, issue
from mlakit.kernels.blackwell.indexer.sums import Tiling, sum_warps
from mlakit.kernels.hopper.indexer.arguments import VARYING, first_tile, unpack
from mlakit.kernels.hopper.indexer.loads import alloc_stages, producer


@gluon.jit(do_not_specialize=VARYING)
def indexer_logits_m128_kernel(
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
    ragged,  # `hopper.decode.arguments.Batch`
    result,  # `hopper.indexer.arguments.ResultArguments`
    TRAITS: gl.constexpr,
    CONFIG: gl.constexpr,  # `configs.IndexerConfig`
):
    requests, sources, outputs = unpack(
        *(q, keys, scales, tokens, max_pages, columns),
        *(stride_table_request, stride_weights_token, stride_out, ragged, result, TRAITS, CONFIG),
    )
    # keys are read by products, and their scales by the summing warpgroups; queries by products
    stages = alloc_stages(sources, CONFIG, TRAITS.IS_SINGLE, 1 + WARPGROUPS, 1)
    scores = alloc_scores(CONFIG)
    request, block, tile, left = first_tile(requests, batch, TRAITS)
    if left > 0:
        tiling = Tiling(CONFIG.WG_TOKENS, CONFIG.HEADS, CONFIG.KEYS)
        start = (request, block, tile, left)
        gl.warp_specialize(
            [
                (sum_warps, (0, start, requests, outputs, stages, scores, tiling)),
                (sum_warps, (1, start, requests, outputs, stages, scores, tiling)),
                (producer, (request, block, tile, left, requests, sources, stages)),
                (issue, (start, requests, stages, scores)),
            ],
            [4, 1, 1],
            [CONFIG.SUM_REGISTERS, CONFIG.OTHER_REGISTERS, CONFIG.OTHER_REGISTERS],
        )
