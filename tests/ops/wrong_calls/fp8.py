"""Wrong calls of the fp8 ops, and the message of each."""

from __future__ import annotations

import torch

from tests.ops.wrong_calls.spoiling import CallTables
from tests.spoiling import COLUMNS_FIRST, Edit, of, part

WRONG: CallTables = {
    "quantize": {
        "x must have 2 axes, or 3 with a batch, got 1": {"x": part[0]},
        "group must be at least 1, got 0": {"group": 0},
        "TypeError: group must be an integer, got bool": {"group": True},
        "scale_ub must be positive, got 0.0": {"scale_ub": 0.0},
        "scale_ub must be positive, got nan": {"scale_ub": float("nan")},
        "TypeError: scale_ub must be a number, got str": {"scale_ub": "1"},
        "TypeError: x must be bfloat16 or float16 or float32, got int32": {"x": of(torch.int32)},
        "x must have a contiguous last axis, got strides (1, 5)": {"x": COLUMNS_FIRST},
        "TypeError: out must be float8_e4m3fn, got uint8": {
            "out": Edit(lambda t: t.view(torch.uint8))
        },
        "scales.shape[1] (padded M) must equal M, rounded up to 4, 8, got 5": {
            "scales": torch.empty(3, 5)
        },
    },
    "scaled-mm": {
        "TypeError: a must be float8_e4m3fn, got bfloat16": {"a": of(torch.bfloat16)},
        "a must have 2 axes, or 3 with a batch, got 1": {"a": part[0]},
        "b.shape[1] (K) must equal a.shape[1], 20, got 19": {"b": part[:, :-1]},
        "a_scale.shape[0] (K groups) must equal K / k_group, rounded up, 3, got 2": {
            "a_scale": part[:-1]
        },
        "a_scale must have a column for each of 5 rows, got 4": {"a_scale": part[:, :4]},
        "b_scale.shape[0] (N groups) must equal N / n_group, rounded up, 2, got 3": {
            "b_scale": Edit(lambda t: t.T)
        },
        "TypeError: b_scale must be float32, got float64": {"b_scale": of(torch.float64)},
        "n_group must be at least 1, got 0": {"n_group": 0},
        "TypeError: out_dtype must be a float or float8_e4m3fn, got int32": {
            "out_dtype": torch.int32,
            "out": None,
        },
        "TypeError: out must be a float or float8_e4m3fn, got int32": {
            "out": torch.empty(5, 7, dtype=torch.int32)
        },
        "TypeError: out must be a tensor, got list": {"out": [1]},
        "out.shape[1] (N) must equal b.shape[0], 7, got 6": {"out": part[:, :-1]},
        "b must have axes (N, K), got shape (1, 7, 20)": {"b": part[None]},
    },
}
