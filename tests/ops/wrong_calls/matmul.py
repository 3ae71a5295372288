"""Wrong calls of the matmul op, and the message of each."""

from __future__ import annotations

from tests.ops.wrong_calls.spoiling import WrongCalls

WRONG: WrongCalls = {
    "matmul": {
        "a must have axes (batch, M, K), got shape (5, 8)": lambda a: {"a": a["a"][0]},
        "b.shape[2] (K) must equal a.shape[2], 8, got 7": lambda a: {"b": a["b"][..., :-1]},
        "TypeError: b must be bfloat16, got float32": lambda a: {"b": a["b"].float()},
        "b.shape[0] (batch) must equal a.shape[0], 3, got 2": lambda a: {"b": a["b"][1:]},
        "TypeError: out must be bfloat16 or float16 or float32 or float8_e4m3fn, "
        "got float64": lambda a: {"out": a["out"].double()},
        "out must be writable, got stride 0 on axis 0 (an expanded tensor)": lambda a: {
            "out": a["out"][:1].expand(3, 5, 6)
        },
    },
}
