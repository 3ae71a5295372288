"""Wrong calls of the prefill op, and the message of each."""

from __future__ import annotations

from typing import Any

import torch

from tests.ops.cases import BF16, E4M3, TOKENS
from tests.ops.wrong_calls.spoiling import CallTables
from tests.spoiling import COLUMNS_FIRST, columns_first, of, part, put


def _fp8(a: dict[str, Any]) -> dict[str, Any]:
    return {name: a[name].to(E4M3) for name in ("q", "k_nope", "k_rope", "v")}


WRONG: CallTables = {
    "prefill": {
        "q.shape[2] must equal the widths of k_nope and k_rope together, 10, got 9": {
            "q": part[..., 1:]
        },
        "k_nope.shape[1] (heads) must equal q.shape[1], 3, got 2": {"k_nope": part[:, 1:]},
        "TypeError: k_nope must be bfloat16, got float16": {"k_nope": of(torch.float16)},
        "v.shape[0] (keys) must equal k_nope.shape[0], 25, got 24": {"v": part[1:]},
        "k_rope must have axes (keys, D_R), got shape (25, 1, 4)": {"k_rope": part[:, None]},
        "kv_starts.shape[0] (batch + 1) must equal q_starts.shape[0], 6, got 5": {
            "kv_starts": part[:-1]
        },
        "kv_starts[-1] must equal the number of keys, 25, got 26": {"kv_starts": put(-1, 26)},
        "kv_starts[2] must not be below kv_starts[1] = 12, got 11": {"kv_starts": put(1, 12)},
        "q_starts must have batch + 1 entries, got none": {
            "kv_starts": part[:0],
            "q_starts": part[:0],
        },
        "TypeError: alibi_slopes must be float32, got bfloat16": {
            "alibi_slopes": torch.ones(3, dtype=BF16)
        },
        "sink.shape[0] (heads) must equal q.shape[1], 3, got 4": {"sink": torch.ones(4)},
        "v must have a contiguous last axis, got strides (15, 1, 3)": {"v": COLUMNS_FIRST},
        "TypeError: mask must be a Mask, got NoneType": {"mask": None},
        "softmax_scale must be finite, got inf": {"softmax_scale": float("inf")},
        "TypeError: q must be bfloat16 or float16 or float32 or float8_e4m3fn, got float64": {
            "q": of(torch.float64)
        },
        "TypeError: k_nope must be float8_e4m3fn, got bfloat16": {"q": of(E4M3)},
        "k_scale must be None unless q, k_nope, k_rope and v are e4m3, got q of torch.bfloat16": {
            "k_scale": torch.ones(25)
        },
        f"q_scale must have axes (tokens, heads), got shape ({TOKENS},)": lambda a: {
            **_fp8(a),
            "q_scale": torch.ones(a["q"].shape[0]),
        },
        "q_scale must not be negative, got -1.0": lambda a: {
            **_fp8(a),
            "q_scale": torch.full((TOKENS, 3), -1.0),
        },
        "k_scale.shape[0] (keys) must equal k_nope.shape[0], 25, got 24": lambda a: {
            **_fp8(a),
            "k_scale": torch.ones(24),
        },
        "TypeError: v_scale must be float32, got bfloat16": lambda a: {
            **_fp8(a),
            "v_scale": torch.ones(25, 3, dtype=BF16),
        },
        "keys_per_scale must be 1 or 128, got 64": lambda a: {**_fp8(a), "keys_per_scale": 64},
        "TypeError: keys_per_scale must be an integer, got float": {"keys_per_scale": 128.0},
        "k_scale.shape[0] (blocks) must equal keys // 128 + batch, 5, got 25": lambda a: {
            **_fp8(a),
            "k_scale": torch.ones(25),
            "keys_per_scale": 128,
        },
        "v must have a contiguous last axis, got strides (12, 1, 3)": lambda a: {
            **_fp8(a),
            "v": columns_first(a["v"][..., 1:].to(E4M3)),
        },
    },
}
