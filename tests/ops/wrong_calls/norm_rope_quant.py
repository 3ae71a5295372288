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
    "append": [
        (
            lambda a: {"cache": with_scale(a["cache"], float("inf"))},
            "ValueError: the tensor_scale of cache must be finite, got inf",
        ),
        (
            lambda a: {"q_rope": a["q_rope"][..., :6]},
            "ValueError: q_rope.shape[2] (rope) must equal the cache's qk_rope_head_dim, 8, got 6",
        ),
        (
            lambda a: {"q_rope": a["q_rope"].to(E4M3)},
            "TypeError: q_rope must be bfloat16 or float16 or float32, got float8_e4m3fn",
        ),
        (
            lambda a: {"kv": a["kv"][:, :-2]},
            "ValueError: kv.shape[1] (width) must equal the row width of the cache, 40, got 38",
        ),
        (
            lambda a: {"kv": a["kv"][:-1]},
            "ValueError: kv.shape[0] (tokens) must equal q_rope.shape[0], 7, got 6",
        ),
        (
            lambda a: {"freqs": a["freqs"][:, :6]},
            "ValueError: freqs.shape[1] (rope) must equal the cache's qk_rope_head_dim, 8, got 6",
        ),
        (
            lambda a: {"freqs": a["freqs"][:8]},
            "ValueError: freqs must have a row for position 8 of request 2, got 8 rows",
        ),
        (
            lambda a: {"freqs": a["freqs"].double()},
            "TypeError: freqs must be bfloat16 or float16 or float32, got float64",
        ),
        (
            lambda a: {"gamma": a["gamma"][1:]},
            "ValueError: gamma.shape[0] (latent) must equal the cache's kv_lora_rank, 32, got 31",
        ),
        (lambda a: {"epsilon": -1e-6}, "ValueError: epsilon must not be negative, got -1e-06"),
        (lambda a: {"epsilon": float("nan")}, "ValueError: epsilon must be finite, got nan"),
        (lambda a: {"epsilon": "1e-6"}, "TypeError: epsilon must be a number, got str"),
        (
            lambda a: {"rope": "neox"},
            "ValueError: rope must be one of interleaved, half, got 'neox'",
        ),
        (
            lambda a: {"kv_lens": changed(a["kv_lens"], 0, 9)},
            "ValueError: page_table[0, 2] must be in [0, 12), got 2147483647",
        ),
        (
            lambda a: {"page_table": changed(a["page_table"], (2, 2), -1)},
            "ValueError: page_table[2, 2] must be in [0, 12), got -1",
        ),
        (
            lambda a: {"q_starts": None},
            "ValueError: q_starts must be given for 7 query tokens of 5 requests, got None",
        ),
        (
            lambda a: {"q_rope_out": a["q_rope_out"].half()},
            "TypeError: q_rope_out must be bfloat16 or float8_e4m3fn, got float16",
        ),
        (
            lambda a: {"q_rope_out": a["q_rope_out"][:, :2]},
            "ValueError: q_rope_out.shape[1] (heads) must equal q_rope.shape[1], 3, got 2",
        ),
        (
            lambda a: {"q_rope_out": a["q_rope_out"][:, :1].expand(TOKENS, HEADS, 8)},
            "ValueError: q_rope_out must be writable, got stride 0 on axis 1 (an expanded tensor)",
        ),
        (
            lambda a: {"kv": columns_first(a["kv"])},
            "ValueError: kv must have a contiguous last axis, got strides (1, 7)",
        ),
        (
            lambda a: {"kv_lens": changed(a["kv_lens"], 2, 2)},
            "ValueError: kv_lens[2] must include the 3 new tokens of the request, got 2",
        ),
        (
            lambda a: {"slots": int32(range(7)), "positions": int32(range(7))},
            "TypeError: page_table must be None where slots are given, got Tensor",
        ),
        (
            lambda a: {"slots": int32(range(7)), "page_table": None},
            "TypeError: kv_lens must be None where slots are given, got Tensor",
        ),
        (
            lambda a: {"positions": int32(range(7)), "page_table": None, "kv_lens": None},
            "TypeError: page_table must be given with q_starts, got None",
        ),
        (
            lambda a: {"positions": int32([0, 1, 2, 3, 4, 9, 0])},
            "ValueError: positions[5] must be in [0, 9), the rows of freqs, got 9",
        ),
        (
            lambda a: {"positions": int32([0, 1, -1, 3, 4, 5, 0])},
            "ValueError: positions[2] must be in [0, 9), the rows of freqs, got -1",
        ),
        (
            lambda a: {"positions": int32(range(6))},
            "ValueError: positions.shape[0] (tokens) must equal q_rope.shape[0], 7, got 6",
        ),
        (
            lambda a: {"kv_shard": (2, 2, 1)},
            "ValueError: kv_shard rank must be below world, 2, got 2",
        ),
        (
            lambda a: {"kv_shard": 2},
            "TypeError: kv_shard must be (rank, world, interleave), got 2",
        ),
        (
            lambda a: {"kv_shard": (0, 2, 0)},
            "ValueError: kv_shard interleave must be at least 1, got 0",
        ),
        (
            lambda a: {"kv_shard": (0, 2, 1), "page_table": a["page_table"] * 0 - 1},
            "ValueError: page_table[0, 0] must be in [0, 12), got -1",
        ),
        (
            lambda a: {"page_table": None},
            "TypeError: page_table must be given with kv_lens and q_starts, got None",
        ),
        (
            lambda a: {"kv_lens": None, "q_starts": None},
            "TypeError: kv_lens must be given with page_table, got None",
        ),
        (
            lambda a: dict.fromkeys(("page_table", "kv_lens", "q_starts")),
            "TypeError: page_table must be given with kv_lens, or slots with positions, got None",
        ),
    ],
    "append-slots": [
        (
            lambda a: {"cache": expanded_pages(a["cache"])},
            "ValueError: the payload of cache must be writable, got stride 0 on axis 0 (an "
            "expanded tensor)",
        ),
        (
            lambda a: {"slots": changed(changed(a["slots"], 2, 7), 4, 7)},
            "ValueError: slots must be unique, got 7 in slots[2] and slots[4]",
        ),
        (
            lambda a: {"positions": None},
            "TypeError: positions must be given with slots, got None",
        ),
        (
            lambda a: {"slots": None},
            "TypeError: slots must be given with positions, got None",
        ),
        (
            lambda a: {"q_starts": starts(Q_LENS)},
            "TypeError: q_starts must be None where slots are given, got Tensor",
        ),
        (
            lambda a: {"slots": a["slots"].float()},
            "TypeError: slots must be int32 or int64, got float32",
        ),
        (
            lambda a: {"slots": a["slots"].tolist()},
            "TypeError: slots must be a tensor, got list",
        ),
        (
            lambda a: {"positions": a["positions"] > 0},
            "TypeError: positions must be int32 or int64, got bool",
        ),
        (
            lambda a: {"slots": a["slots"][1:]},
            "ValueError: slots.shape[0] (tokens) must equal q_rope.shape[0], 7, got 6",
        ),
        (
            lambda a: {"positions": a["positions"][:, None]},
            "ValueError: positions must have axes (tokens), got shape (7, 1)",
        ),
        (
            lambda a: {"slots": changed(a["slots"], 4, 48)},
            "ValueError: slots[4] must be -1 or in [0, 48), got 48",
        ),
        (
            lambda a: {"slots": changed(a["slots"], 4, -2)},
            "ValueError: slots[4] must be -1 or in [0, 48), got -2",
        ),
        (
            lambda a: {"slots": changed(a["slots"], 4, 48), "kv_shard": (0, 2, 1)},
            "ValueError: slots[4] must be -1 or in [0, 48), got 48",
        ),
        (
            lambda a: {"positions": changed(a["positions"], 4, 9)},
            "ValueError: positions[4] must be in [0, 9), the rows of freqs, or its slot -1, got 9",
        ),
        (
            lambda a: {"positions": changed(a["positions"], 4, -1)},
            "ValueError: positions[4] must be in [0, 9), the rows of freqs, or its slot -1, got -1",
        ),
        (
            lambda a: {"positions": a["positions"].to("meta")},
            "ValueError: positions must be on a device that holds data, got a meta tensor",
        ),
    ],
}
