"""Wrong calls of the norm_rope_quant op, and the message of each."""

from __future__ import annotations

from tests.ops.cases import E4M3, HEADS, Q_LENS, TOKENS, int32, starts
from tests.ops.wrong_calls.spoiling import (
    WrongCalls,
    changed,
    columns_first,
    expanded_pages,
    with_scale,
)

WRONG: WrongCalls = {
    "append": {
        "the tensor_scale of cache must be finite, got inf": lambda a: {
            "cache": with_scale(a["cache"], float("inf"))
        },
        "q_rope.shape[2] (rope) must equal the cache's qk_rope_head_dim, 8, got 6": lambda a: {
            "q_rope": a["q_rope"][..., :6]
        },
        "TypeError: q_rope must be bfloat16 or float16 or float32, got float8_e4m3fn": lambda a: {
            "q_rope": a["q_rope"].to(E4M3)
        },
        "kv.shape[1] (width) must equal the row width of the cache, 40, got 38": lambda a: {
            "kv": a["kv"][:, :-2]
        },
        "kv.shape[0] (tokens) must equal q_rope.shape[0], 7, got 6": lambda a: {"kv": a["kv"][:-1]},
        "freqs.shape[1] (rope) must equal the cache's qk_rope_head_dim, 8, got 6": lambda a: {
            "freqs": a["freqs"][:, :6]
        },
        "freqs must have a row for position 8 of request 2, got 8 rows": lambda a: {
            "freqs": a["freqs"][:8]
        },
        "TypeError: freqs must be bfloat16 or float16 or float32, got float64": lambda a: {
            "freqs": a["freqs"].double()
        },
        "gamma.shape[0] (latent) must equal the cache's kv_lora_rank, 32, got 31": lambda a: {
            "gamma": a["gamma"][1:]
        },
        "epsilon must not be negative, got -1e-06": lambda a: {"epsilon": -1e-6},
        "epsilon must be finite, got nan": lambda a: {"epsilon": float("nan")},
        "TypeError: epsilon must be a number, got str": lambda a: {"epsilon": "1e-6"},
        "rope must be one of interleaved, half, got 'neox'": lambda a: {"rope": "neox"},
        "page_table[0, 2] must be in [0, 12), got 2147483647": lambda a: {
            "kv_lens": changed(a["kv_lens"], 0, 9)
        },
        "page_table[2, 2] must be in [0, 12), got -1": lambda a: {
            "page_table": changed(a["page_table"], (2, 2), -1)
        },
        "q_starts must be given for 7 query tokens of 5 requests, got None": lambda a: {
            "q_starts": None
        },
        "TypeError: q_rope_out must be bfloat16 or float8_e4m3fn, got float16": lambda a: {
            "q_rope_out": a["q_rope_out"].half()
        },
        "q_rope_out.shape[1] (heads) must equal q_rope.shape[1], 3, got 2": lambda a: {
            "q_rope_out": a["q_rope_out"][:, :2]
        },
        "q_rope_out must be writable, got stride 0 on axis 1 (an expanded tensor)": lambda a: {
            "q_rope_out": a["q_rope_out"][:, :1].expand(TOKENS, HEADS, 8)
        },
        "kv must have a contiguous last axis, got strides (1, 7)": lambda a: {
            "kv": columns_first(a["kv"])
        },
        "kv_lens[2] must include the 3 new tokens of the request, got 2": lambda a: {
            "kv_lens": changed(a["kv_lens"], 2, 2)
        },
        "TypeError: page_table must be None where slots are given, got Tensor": lambda a: {
            "slots": int32(range(7)),
            "positions": int32(range(7)),
        },
        "TypeError: kv_lens must be None where slots are given, got Tensor": lambda a: {
            "slots": int32(range(7)),
            "page_table": None,
        },
        "TypeError: page_table must be given with q_starts, got None": lambda a: {
            "positions": int32(range(7)),
            "page_table": None,
            "kv_lens": None,
        },
        "positions[5] must be in [0, 9), the rows of freqs, got 9": lambda a: {
            "positions": int32([0, 1, 2, 3, 4, 9, 0])
        },
        "positions[2] must be in [0, 9), the rows of freqs, got -1": lambda a: {
            "positions": int32([0, 1, -1, 3, 4, 5, 0])
        },
        "positions.shape[0] (tokens) must equal q_rope.shape[0], 7, got 6": lambda a: {
            "positions": int32(range(6))
        },
        "kv_shard rank must be below world, 2, got 2": lambda a: {"kv_shard": (2, 2, 1)},
        "TypeError: kv_shard must be (rank, world, interleave), got 2": lambda a: {"kv_shard": 2},
        "kv_shard interleave must be at least 1, got 0": lambda a: {"kv_shard": (0, 2, 0)},
        "page_table[0, 0] must be in [0, 12), got -1": lambda a: {
            "kv_shard": (0, 2, 1),
            "page_table": a["page_table"] * 0 - 1,
        },
        "TypeError: page_table must be given with kv_lens and q_starts, got None": lambda a: {
            "page_table": None
        },
        "TypeError: kv_lens must be given with page_table, got None": lambda a: {
            "kv_lens": None,
            "q_starts": None,
        },
        "TypeError: page_table must be given with kv_lens, or slots with positions, "
        "got None": lambda a: dict.fromkeys(("page_table", "kv_lens", "q_starts")),
    },
    "append-slots": {
        "the payload of cache must be writable, got stride 0 on axis 0 (an "
        "expanded tensor)": lambda a: {"cache": expanded_pages(a["cache"])},
        "slots must be unique, got 7 in slots[2] and slots[4]": lambda a: {
            "slots": changed(changed(a["slots"], 2, 7), 4, 7)
        },
        "TypeError: positions must be given with slots, got None": lambda a: {"positions": None},
        "TypeError: slots must be given with positions, got None": lambda a: {"slots": None},
        "TypeError: q_starts must be None where slots are given, got Tensor": lambda a: {
            "q_starts": starts(Q_LENS)
        },
        "TypeError: slots must be int32 or int64, got float32": lambda a: {
            "slots": a["slots"].float()
        },
        "TypeError: slots must be a tensor, got list": lambda a: {"slots": a["slots"].tolist()},
        "TypeError: positions must be int32 or int64, got bool": lambda a: {
            "positions": a["positions"] > 0
        },
        "slots.shape[0] (tokens) must equal q_rope.shape[0], 7, got 6": lambda a: {
            "slots": a["slots"][1:]
        },
        "positions must have axes (tokens), got shape (7, 1)": lambda a: {
            "positions": a["positions"][:, None]
        },
        "slots[4] must be -1 or in [0, 48), got 48": lambda a: {
            "slots": changed(a["slots"], 4, 48)
        },
        "slots[4] must be -1 or in [0, 48), got -2": lambda a: {
            "slots": changed(a["slots"], 4, -2)
        },
        "slots[4] must be -1 or in [0, 48), got 49": lambda a: {
            "slots": changed(a["slots"], 4, 49),
            "kv_shard": (0, 2, 1),
        },
        "positions[4] must be in [0, 9), the rows of freqs, or its slot -1, got 9": lambda a: {
            "positions": changed(a["positions"], 4, 9)
        },
        "positions[4] must be in [0, 9), the rows of freqs, or its slot -1, got -1": lambda a: {
            "positions": changed(a["positions"], 4, -1)
        },
        "positions must be on a device that holds data, got a meta tensor": lambda a: {
            "positions": a["positions"].to("meta")
        },
    },
}
