"""Wrong calls of the fp8 ops, and the message of each."""

from __future__ import annotations

import torch

from tests.ops.wrong_calls.spoiling import WrongCalls, columns_first

WRONG: WrongCalls = {
    "quantize": {
        "x must have 2 axes, or 3 with a batch, got 1": lambda a: {"x": a["x"][0]},
        "group must be at least 1, got 0": lambda a: {"group": 0},
        "TypeError: group must be an integer, got bool": lambda a: {"group": True},
        "scale_ub must be positive, got 0.0": lambda a: {"scale_ub": 0.0},
        "scale_ub must be positive, got nan": lambda a: {"scale_ub": float("nan")},
        "TypeError: scale_ub must be a number, got str": lambda a: {"scale_ub": "1"},
        "TypeError: x must be bfloat16 or float16 or float32, got int32": lambda a: {
            "x": a["x"].int()
        },
        "x must have a contiguous last axis, got strides (1, 5)": lambda a: {
            "x": columns_first(a["x"])
        },
        "TypeError: out must be float8_e4m3fn, got uint8": lambda a: {
            "out": a["out"].view(torch.uint8)
        },
        "scales.shape[1] (padded M) must equal M, rounded up to 4, 8, got 5": lambda a: {
            "scales": torch.empty(3, 5)
        },
    },
    "scaled-mm": {
        "TypeError: a must be float8_e4m3fn, got bfloat16": lambda a: {"a": a["a"].bfloat16()},
        "a must have 2 axes, or 3 with a batch, got 1": lambda a: {"a": a["a"][0]},
        "b.shape[1] (K) must equal a.shape[1], 20, got 19": lambda a: {"b": a["b"][:, :-1]},
        "a_scale.shape[0] (K groups) must equal K / k_group, rounded up, 3, got 2": lambda a: {
            "a_scale": a["a_scale"][:-1]
        },
        "a_scale must have a column for each of 5 rows, got 4": lambda a: {
            "a_scale": a["a_scale"][:, :4]
        },
        "b_scale.shape[0] (N groups) must equal N / n_group, rounded up, 2, got 3": lambda a: {
            "b_scale": a["b_scale"].T
        },
        "TypeError: b_scale must be float32, got float64": lambda a: {
            "b_scale": a["b_scale"].double()
        },
        "n_group must be at least 1, got 0": lambda a: {"n_group": 0},
        "TypeError: out_dtype must be a float or float8_e4m3fn, got int32": lambda a: {
            "out_dtype": torch.int32,
            "out": None,
        },
        "TypeError: out must be a float or float8_e4m3fn, got int32": lambda a: {
            "out": torch.empty(5, 7, dtype=torch.int32)
        },
        "TypeError: out must be a tensor, got list": lambda a: {"out": [1]},
        "out.shape[1] (N) must equal b.shape[0], 7, got 6": lambda a: {"out": a["out"][:, :-1]},
        "b must have axes (N, K), got shape (1, 7, 20)": lambda a: {"b": a["b"][None]},
    },
}
