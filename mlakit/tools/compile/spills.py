"""Upper bounds of the register spills of kernels, for every version of Triton.

A bound is the largest number of stores and of loads that Triton 3.6.0 and 3.9.0 made in the
configurations that it covers. Fewer spills pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

NO_SPILLS = (0, 0)

# (stores, loads) by kernel, then by a pattern of configurations: the first that matches holds. A
# kernel or a configuration without a pattern must not spill.
SPILL_BOUNDS: Mapping[str, Mapping[str, tuple[int, int]]] = {
    # the queries and the accumulators of all pieces of a row stay live: 18 pieces of fp8_group32, 9
    # of fp8_group64
    "mla_decode_kernel": {"decode-h16-fp8_group32": (30, 33), "decode-h16-fp8_group64": (5, 4)},
    # thread indices that stay live across warp roles and column indices of masks, nearly all once
    # per work tile. 32 heads and fp8_block128: up to three loads in the loop of a QK-softmax
    # warpgroup, whose keys and accumulators need all of its 136 registers. Gather producers have up
    # to thirteen loads in their loop.
    "mla_decode_small_m_fp8_kv_kernel": {
        "hopper-decode-h32-fp8_block128*": (53, 80),
        "*-page*": (32, 60),
        "*": (7, 14),
    },
    # in the gather producer, and thread indices once per work tile
    "mla_decode_m64_bf16_kernel": {"hopper-decode-h128-bf16-page*": (25, 55)},
    # in the epilogue of the PV warpgroups: with more registers for them the QK-softmax warpgroup
    # would have too few. h128: in the gather producer too. fp8_block128: where they are is not
    # looked at
    "mla_decode_m64_fp8_qk_kernel": {
        "hopper-decode-h128-*": (41, 76),
        "hopper-decode-m64_fp8_qk-fp8_block128*": (55, 92),
        "*": (31, 32),
    },
    # outside the loops over key tiles but for one store and one load
    "indexer_logits_kernel": {
        "hopper-indexer-h32-q9": (16, 37),
        "hopper-indexer-h64-q4": (13, 38),
        "*-q9": (7, 20),
        "hopper-indexer-int64": (7, 20),
        "hopper-indexer-single-h64-q4": (7, 24),  # where they are is not looked at
    },
    # before the loops over key tiles; with four tokens of 32 heads three loads in that of a summing
    # warpgroup
    "indexer_logits_m128_kernel": {"*-q1": NO_SPILLS, "*-h64-*": (3, 10), "*": (7, 14)},
    # once per work tile; in the loops over keys one load of the chunked masks, and a few in the
    # loops of the producer and of the masking warpgroup
    "mla_prefill_kernel": {
        "*-256-256*": (24, 45),
        "*-256-0-256*": (24, 45),  # where they are is not looked at
        "*-96-64": (12, 23),
        "*": (23, 38),
    },
    # the thread's index, stored at the start and loaded outside of the loops over blocks
    "sparse_mla_m128_bf16_kernel": {"*-extra": (2, 9), "*": (1, 6)},
    # likewise, once per work tile, but for seven loads in the loop of the softmax warps of 64 heads
    "mla_decode_n64_bf16_kernel": {
        "*-h16-*": NO_SPILLS,
        "*-external-plan": (2, 22),
        "*": (39, 102),
    },
    "mla_decode_n64_fp8_kv_kernel": {"*-h16-*": (2, 18), "*": (22, 67)},
    # likewise, and none in a loop over blocks
    "mla_prefill_bf16_kernel": {
        "*-256-256*": NO_SPILLS,
        "*-sliding_window_causal": (3, 10),
        "*": (2, 7),
    },
    "mla_prefill_e4m3_kernel": {"*": (4, 11)},  # likewise
    # likewise, but for one load in the loop of the softmax warps
    "sparse_mla_n64_bf16_kernel": {"*-h16-*": NO_SPILLS, "*": (7, 13)},
    # likewise, but for two loads in the loop of the dequant warpgroup
    "sparse_mla_n64_fp8_kv_kernel": {"*": (4, 13)},
    # most in a branch of the epilogue, for values that are not finite; in the loop over keys at
    # most 14 stores and 19 loads, three loads without scales, two of each with scales of blocks
    "mla_prefill_fp8_kernel": {
        "*-unscaled": (175, 193),
        "*-blocks": (176, 194),
        "*": (254, 266),
    },
    # sparse-h128-*: outside the loops. Others: the accumulators of 64 heads and the scales of a row
    # tile stay live; ten loads in the two loops of sparse-extra, one store and
    # one load in the loop of sparse-h64-v4-mxfp4.
    "sparse_mla_kernel": {
        "sparse-h128-fp8_block*": (8, 9),
        "sparse-h64-v4-mxfp4": (13, 17),
        "sparse-extra": (27, 43),
        "sparse-odd-pages": (15, 32),
    },
    # fp8_block64: in the loop of the dequant warpgroup five stores and 22 loads. Others: thread
    # indices and the strides of a second cache.
    "sparse_mla_m64_fp8_kv_kernel": {
        "*-fp8_block64": (75, 108),
        "*-no-rope-fp8_block128": (11, 31),
        "*-fp8_block128*": (9, 26),
    },
    # thread indices and the strides of a second cache
    "sparse_mla_small_m_fp8_kv_kernel": {
        "*-h32-fp8_block128-extra": (36, 75),
        "*-no-rope-h32-fp8_token": (2, 3),
    },
    # with Triton 3.6.0 only; where they are is not looked at
    "_merge_partials_kernel": {"hopper-decode-narrow-*": (3, 3)},
    # addresses, once per row: outside the loops of the search
    "_select_kernel": {
        "topk-4096": (5, 9),
        "topk-8192": (20, 20),
        "topk-131072": (18, 18),
        "topk-long": (18, 18),
        "topk-many": (1, 1),
    },
}


def spill_bound(kernel: str, configuration: str) -> tuple[int, int]:
    """The largest number of stores and of loads that a compiled kernel may have."""
    bounds = SPILL_BOUNDS.get(kernel, {})
    return next((b for name, b in bounds.items() if fnmatchcase(configuration, name)), NO_SPILLS)
