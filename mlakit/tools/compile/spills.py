"""Register spills that are known and allowed: exactly `(stores, loads)`.

An entry that is no longer needed is an error, too.
"""

from __future__ import annotations

_SPARSE = {
    # outside the loops
    "3.6.0": {
        "sparse-h128-fp8_block128": (2, 2),
        "sparse-extra": (2, 2),
        "sparse-odd-pages": (1, 1),
    },
    # most outside the loops: the accumulators of 64 heads and the scales of a row tile stay live
    "3.9.0": {
        "sparse-h128-fp8_block128": (6, 9),
        "sparse-h128-fp8_block64": (8, 8),
        "sparse-extra": (27, 43),
        "sparse-odd-pages": (15, 32),
    },
}

_SMALL_M_FP8_KV = {
    # once per work tile; with page size 1 and 32 heads some are in the producer's loop
    "3.6.0": {
        "h16-fp8-page3": (6, 5),
        "h16-fp8_block128-page1": (5, 6),
        "h16-fp8_token-page1": (6, 6),
        "h16-fp8_token-page32": (6, 5),
        "h32-fp8_block128": (4, 2),
        "h32-fp8_block128-e4m3-q": (4, 2),
        "h32-fp8_block128-e4m3-q-bf16-rope": (4, 2),
        "h32-fp8_block128-external-plan": (4, 2),
        "h32-fp8_block128-page1": (14, 15),
        "h32-fp8_block128-page32": (4, 2),
        "h32-fp8_block128-page8": (6, 4),
        "h32-fp8_token-page1": (7, 6),
    },
    # thread indices that stay live across warp roles, nearly all once per work tile; up to three
    # loads are in a loop over blocks, six with page size 32, thirteen in a gather producer's loop
    "3.9.0": {
        "h8-fp8": (2, 4),
        "h8-fp8_token": (4, 9),
        "h8-fp8_token-e4m3-q": (4, 9),
        "h16-fp8": (2, 4),
        "h16-fp8-e4m3-q": (2, 5),
        "h16-fp8-fp16-q": (2, 4),
        "h16-fp8-page3": (15, 46),
        "h16-fp8-page32": (16, 45),
        "h16-fp8-page8": (7, 14),
        "h16-fp8_block128-page1": (22, 46),
        "h16-fp8_token": (7, 14),
        "h16-fp8_token-e4m3-q": (5, 11),
        "h16-fp8_token-e4m3-q-bf16-rope": (5, 11),
        "h16-fp8_token-page1": (28, 60),
        "h16-fp8_token-page32": (18, 45),
        "h16-fp8_token-page8": (8, 16),
        "h32-fp8": (1, 3),
        "h32-fp8-e4m3-q": (1, 3),
        "h32-fp8-e4m3-q-external-plan": (1, 3),
        "h32-fp8-external-plan": (2, 4),
        "h32-fp8_block128": (36, 60),
        "h32-fp8_block128-e4m3-q": (43, 73),
        "h32-fp8_block128-e4m3-q-bf16-rope": (43, 72),
        "h32-fp8_block128-external-plan": (33, 56),
        "h32-fp8_block128-page1": (53, 80),
        "h32-fp8_block128-page32": (38, 59),
        "h32-fp8_block128-page8": (33, 54),
        "h32-fp8_token": (2, 5),
        "h32-fp8_token-e4m3-q": (2, 4),
        "h32-fp8_token-e4m3-q-bf16-rope": (1, 3),
        "h32-fp8_token-e4m3-q-external-plan": (3, 6),
        "h32-fp8_token-page1": (32, 59),
        "h32-fp8_token-page32": (19, 43),
        "h32-fp8_token-page8": (6, 10),
    },
}

# with a gather producer, which takes registers
_M64_BF16 = {
    "3.6.0": {"h128-bf16-page96": (1, 1)},
    # thread indices, as above
    "3.9.0": {
        "h128-bf16-page1": (19, 50),
        "h128-bf16-page8": (14, 47),
        "h128-bf16-page96": (25, 55),
    },
}

_M64_FP8_QK = {
    # in the epilogue of the PV warpgroups, after the loop over blocks
    "3.6.0": {
        "h128-fp8-e4m3-q-page24": (18, 23),
        "h128-fp8_token-e4m3-q-page1": (16, 24),
        "m64-fp8-e4m3-q": (31, 32),
        "m64-fp8-e4m3-q-external-plan": (1, 1),
        "m64-fp8-e4m3-q-page8": (12, 13),
        "m64-fp8_token-e4m3-q": (31, 32),
        "m64-fp8_token-e4m3-q-bf16-rope": (31, 32),
        "m64-fp8_token-e4m3-q-external-plan": (1, 1),
        "m64-fp8_token-e4m3-q-page8": (12, 13),
    },
    # thread indices, with a gather producer
    "3.9.0": {
        "h128-fp8-e4m3-q-page24": (39, 76),
        "h128-fp8_token-e4m3-q-page1": (41, 70),
    },
}

# outside the loops over key tiles but for one store and one load of h32-q9 with 3.6.0
_INDEXER = {
    "3.6.0": {"h32-q9": (4, 8), "h64-q4": (1, 5)},
    "3.9.0": {
        "h32-q9": (16, 37),
        "h64-q4": (13, 38),
        "h64-q9": (7, 20),
        "int64": (7, 20),
        "null-mask-q9": (7, 20),
    },
}

_PREFILL = {
    # once per work tile, none in the loops over keys
    "3.6.0": {
        "192-128": (11, 12),
        "256-256": (16, 19),
        "128-128": (10, 10),
        "96-64": (9, 8),
        "fp16-sink": (11, 12),
        "null": (11, 12),
        "256-256-null": (16, 19),
        "sliding_window_causal": (12, 12),
        "sliding_window_noncausal": (12, 12),
        "chunked": (12, 12),
        "chunked_causal": (12, 12),
    },
    # in the loops over keys one load of the chunked masks; in those of the producer and the cleaner
    # a few
    "3.9.0": {
        "192-128": (21, 32),
        "256-256": (24, 45),
        "128-128": (15, 25),
        "96-64": (12, 23),
        "fp16-sink": (22, 33),
        "null": (19, 30),
        "256-256-null": (24, 43),
        "sliding_window_causal": (21, 37),
        "sliding_window_noncausal": (20, 33),
        "chunked": (23, 38),
        "chunked_causal": (19, 34),
    },
}

_PREFILL_FP8 = {
    # in the loop over keys at most ten stores and eleven loads with 3.6.0, 14 and 19 with 3.9.0,
    # none and three without scales, two of each with those of blocks; most others in a branch of
    # the epilogue, for values that are not finite
    "3.6.0": {
        "fp8": (188, 186),
        "fp8-unscaled": (123, 123),
        "fp8-blocks": (128, 128),
        "fp8-null-sink": (159, 157),
        "fp8-chunked": (170, 170),
        "fp8-128-128": (196, 194),
    },
    "3.9.0": {
        "fp8": (254, 266),
        "fp8-unscaled": (175, 193),
        "fp8-blocks": (176, 194),
        "fp8-null-sink": (142, 151),
        "fp8-chunked": (214, 229),
        "fp8-128-128": (254, 266),
    },
}

_SPARSE_FP8_KV = {
    # in the loop of the dequant warpgroup five stores and 22 loads, the others once per work tile
    "3.6.0": {"fp8_block64": (52, 65)},
    # thread indices, as above; with a second cache also its strides. fp8_block64: as with 3.6.0
    "3.9.0": {
        "fp8_block128": (9, 26),
        "fp8_block128-extra": (8, 25),
        "fp8_block64": (75, 108),
    },
}

_SPARSE_SMALL_M_FP8_KV = {
    # with one cache three of each, once per work tile; not looked into with two
    "3.6.0": {"h32-fp8_block128-extra": (2, 1)},
    # thread indices, as above; with a second cache also its strides
    "3.9.0": {"h32-fp8_block128-extra": (36, 75)},
}


def _of(
    kernel: str, prefix: str, known: dict[str, dict[str, tuple[int, int]]]
) -> dict[tuple[str, str, int], dict[str, tuple[int, int]]]:
    return {
        (version, prefix + name, 90): {kernel: spills}
        for version, by_name in known.items()
        for name, spills in by_name.items()
    }


# with 3.9.0, once per row: outside the loops of the search
_TOPK = {
    ("topk-4096", 90): (4, 8),
    ("topk-4096", 100): (5, 9),
    ("topk-4096", 120): (4, 7),
    ("topk-8192", 90): (9, 9),
    ("topk-8192", 100): (10, 10),
    ("topk-8192", 120): (20, 20),
    ("topk-131072", 90): (17, 17),
    ("topk-131072", 100): (13, 13),
    ("topk-131072", 120): (18, 18),
    ("topk-long", 90): (17, 17),
    ("topk-long", 100): (13, 13),
    ("topk-long", 120): (18, 18),
    ("topk-many", 120): (1, 1),
}

# the queries and the accumulators of all pieces of a row stay live: 18 pieces of fp8_group32, 9 of
# fp8_group64
_DECODE_GROUPS = {
    ("3.6.0", "decode-h16-fp8_group32", 80): (8, 11),
    ("3.6.0", "decode-h16-fp8_group32", 89): (30, 32),
    ("3.6.0", "decode-h16-fp8_group32", 90): (12, 14),
    ("3.6.0", "decode-h16-fp8_group32", 100): (30, 33),
    ("3.6.0", "decode-h16-fp8_group32", 120): (28, 32),
    ("3.6.0", "decode-h16-fp8_group64", 80): (3, 4),
    ("3.6.0", "decode-h16-fp8_group64", 89): (5, 4),
    ("3.6.0", "decode-h16-fp8_group64", 90): (5, 4),
    ("3.6.0", "decode-h16-fp8_group64", 100): (2, 1),
    ("3.9.0", "decode-h16-fp8_group32", 80): (14, 14),
    ("3.9.0", "decode-h16-fp8_group32", 89): (5, 4),
    ("3.9.0", "decode-h16-fp8_group32", 90): (3, 3),
    ("3.9.0", "decode-h16-fp8_group32", 100): (2, 2),
    ("3.9.0", "decode-h16-fp8_group32", 120): (4, 4),
}

# by (version of Triton, configuration, architecture)
ALLOWED_SPILLS = {
    **{where: {"mla_decode_kernel": spills} for where, spills in _DECODE_GROUPS.items()},
    **{("3.9.0", *where): {"_select_kernel": spills} for where, spills in _TOPK.items()},
    **_of("sparse_mla_kernel", "", _SPARSE),
    **_of("mla_decode_small_m_fp8_kv_kernel", "hopper-decode-", _SMALL_M_FP8_KV),
    **_of("mla_decode_m64_bf16_kernel", "hopper-decode-", _M64_BF16),
    **_of("mla_decode_m64_fp8_qk_kernel", "hopper-decode-", _M64_FP8_QK),
    **_of("indexer_logits_kernel", "hopper-indexer-", _INDEXER),
    **_of("mla_prefill_kernel", "hopper-prefill-", _PREFILL),
    **_of("mla_prefill_fp8_kernel", "hopper-prefill-", _PREFILL_FP8),
    **_of("sparse_mla_m64_fp8_kv_kernel", "hopper-sparse-", _SPARSE_FP8_KV),
    **_of("sparse_mla_small_m_fp8_kv_kernel", "hopper-sparse-", _SPARSE_SMALL_M_FP8_KV),
}
