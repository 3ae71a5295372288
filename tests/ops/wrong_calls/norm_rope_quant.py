"""Wrong calls of the norm_rope_quant op, and the message of each."""

from __future__ import annotations

import torch

from tests.ops.cases import E4M3, HEADS, Q_LENS, TOKENS, int32, starts
from tests.ops.wrong_calls.spoiling import EXPANDED_PAGES, CallTables, with_scale
from tests.spoiling import AS_LIST, COLUMNS_FIRST, ON_META, Edit, changed, of, part, put

WRONG: CallTables = {
    "append": {
        "the tensor_scale of cache must be finite, got inf": {"cache": with_scale(float("inf"))},
        "q_rope.shape[2] (rope) must equal the cache's qk_rope_head_dim, 8, got 6": {
            "q_rope": part[..., :6]
        },
        "TypeError: q_rope must be bfloat16 or float16 or float32, got float8_e4m3fn": {
            "q_rope": of(E4M3)
        },
        "kv.shape[1] (width) must equal the row width of the cache, 40, got 38": {
            "kv": part[:, :-2]
        },
        "kv.shape[0] (tokens) must equal q_rope.shape[0], 7, got 6": {"kv": part[:-1]},
        "freqs.shape[1] (rope) must equal the cache's qk_rope_head_dim, 8, got 6": {
            "freqs": part[:, :6]
        },
        "freqs must have a row for position 8 of request 2, got 8 rows": {"freqs": part[:8]},
        "TypeError: freqs must be bfloat16 or float16 or float32, got float64": {
            "freqs": of(torch.float64)
        },
        "gamma.shape[0] (latent) must equal the cache's kv_lora_rank, 32, got 31": {
            "gamma": part[1:]
        },
        "epsilon must not be negative, got -1e-06": {"epsilon": -1e-06},
        "epsilon must be finite, got nan": {"epsilon": float("nan")},
        "TypeError: epsilon must be a number, got str": {"epsilon": "1e-6"},
        "rope must be one of interleaved, half, got 'neox'": {"rope": "neox"},
        "page_table[0, 2] must be in [0, 12), got 2147483647": {"kv_lens": put(0, 9)},
        "page_table[2, 2] must be in [0, 12), got -1": {"page_table": put((2, 2), -1)},
        "q_starts must be given for 7 query tokens of 5 requests, got None": {"q_starts": None},
        "TypeError: q_rope_out must be bfloat16 or float8_e4m3fn, got float16": {
            "q_rope_out": of(torch.float16)
        },
        "q_rope_out.shape[1] (heads) must equal q_rope.shape[1], 3, got 2": {
            "q_rope_out": part[:, :2]
        },
        "q_rope_out must be writable, got stride 0 on axis 1 (an expanded tensor)": {
            "q_rope_out": Edit(lambda t: t[:, :1].expand(TOKENS, HEADS, 8))
        },
        "kv must have a contiguous last axis, got strides (1, 7)": {"kv": COLUMNS_FIRST},
        "kv_lens[2] must include the 3 new tokens of the request, got 2": {"kv_lens": put(2, 2)},
        "TypeError: page_table must be None where slots are given, got Tensor": {
            "slots": int32(range(7)),
            "positions": int32(range(7)),
        },
        "TypeError: kv_lens must be None where slots are given, got Tensor": {
            "slots": int32(range(7)),
            "page_table": None,
        },
        "TypeError: page_table must be given with q_starts, got None": {
            "positions": int32(range(7)),
            "page_table": None,
            "kv_lens": None,
        },
        "positions[5] must be in [0, 9), the rows of freqs, got 9": {
            "positions": int32([0, 1, 2, 3, 4, 9, 0])
        },
        "positions[2] must be in [0, 9), the rows of freqs, got -1": {
            "positions": int32([0, 1, -1, 3, 4, 5, 0])
        },
        "positions.shape[0] (tokens) must equal q_rope.shape[0], 7, got 6": {
            "positions": int32(range(6))
        },
        "kv_shard rank must be below world, 2, got 2": {"kv_shard": (2, 2, 1)},
        "TypeError: kv_shard must be (rank, world, interleave), got 2": {"kv_shard": 2},
        "kv_shard interleave must be at least 1, got 0": {"kv_shard": (0, 2, 0)},
        "page_table[0, 0] must be in [0, 12), got -1": {
            "kv_shard": (0, 2, 1),
            "page_table": Edit(lambda t: t * 0 - 1),
        },
        "TypeError: page_table must be given with kv_lens and q_starts, got None": {
            "page_table": None
        },
        "TypeError: kv_lens must be given with page_table, got None": {
            "kv_lens": None,
            "q_starts": None,
        },
        "TypeError: page_table must be given with kv_lens, or slots with positions, "
        "got None": lambda a: dict.fromkeys(("page_table", "kv_lens", "q_starts")),
    },
    "append-slots": {
        "the payload of cache must be writable, got stride 0 on axis 0 (an expanded tensor)": {
            "cache": EXPANDED_PAGES
        },
        "slots must be unique, got 7 in slots[2] and slots[4]": {
            "slots": Edit(lambda t: changed(changed(t, 2, 7), 4, 7))
        },
        "TypeError: positions must be given with slots, got None": {"positions": None},
        "TypeError: slots must be given with positions, got None": {"slots": None},
        "TypeError: q_starts must be None where slots are given, got Tensor": {
            "q_starts": starts(Q_LENS)
        },
        "TypeError: slots must be int32 or int64, got float32": {"slots": of(torch.float32)},
        "TypeError: slots must be a tensor, got list": {"slots": AS_LIST},
        "TypeError: positions must be int32 or int64, got bool": {
            "positions": Edit(lambda t: t > 0)
        },
        "slots.shape[0] (tokens) must equal q_rope.shape[0], 7, got 6": {"slots": part[1:]},
        "positions must have axes (tokens), got shape (7, 1)": {"positions": part[:, None]},
        "slots[4] must be -1 or in [0, 48), got 48": {"slots": put(4, 48)},
        "slots[4] must be -1 or in [0, 48), got -2": {"slots": put(4, -2)},
        "slots[4] must be -1 or in [0, 48), got 49": {"slots": put(4, 49), "kv_shard": (0, 2, 1)},
        "positions[4] must be in [0, 9), the rows of freqs, or its slot -1, got 9": {
            "positions": put(4, 9)
        },
        "positions[4] must be in [0, 9), the rows of freqs, or its slot -1, got -1": {
            "positions": put(4, -1)
        },
        "positions must be on a device that holds data, got a meta tensor": {"positions": ON_META},
    },
}
