"""Wrong calls of the matmul op, and the message of each."""

from __future__ import annotations

import torch

from tests.ops.wrong_calls.spoiling import CallTables
from tests.spoiling import Edit, of, part

WRONG: CallTables = {
    "matmul": {
        "a must have axes (batch, M, K), got shape (5, 8)": {"a": part[0]},
        "b.shape[2] (K) must equal a.shape[2], 8, got 7": {"b": part[..., :-1]},
        "TypeError: b must be bfloat16, got float32": {"b": of(torch.float32)},
        "b.shape[0] (batch) must equal a.shape[0], 3, got 2": {"b": part[1:]},
        "TypeError: out must be bfloat16 or float16 or float32 or float8_e4m3fn, got float64": {
            "out": of(torch.float64)
        },
        "out must be writable, got stride 0 on axis 0 (an expanded tensor)": {
            "out": Edit(lambda t: t[:1].expand(3, 5, 6))
        },
    },
}
