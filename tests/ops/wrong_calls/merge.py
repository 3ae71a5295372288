"""Wrong calls of the merge op, and the message of each."""

from __future__ import annotations

import torch

from tests.ops.wrong_calls.spoiling import WrongCalls

WRONG: WrongCalls = {
    "merge": {
        "TypeError: outs must be a sequence of tensors, got NoneType": lambda a: {"outs": None},
        "TypeError: lses must be a sequence of tensors, got float": lambda a: {"lses": 1.0},
        "outs must hold at least one part, got 0": lambda a: {"outs": [], "lses": []},
        "lses must hold one per part, 3, got 2": lambda a: {"lses": a["lses"][1:]},
        "outs[2].shape[0] (tokens) must equal outs[0].shape[0], 7, got 6": lambda a: {
            "outs": [*a["outs"][:2], a["outs"][2][:-1]]
        },
        "TypeError: outs[2] must be bfloat16 or float16 or float32, got int32": lambda a: {
            "outs": [*a["outs"][:2], a["outs"][2].int()]
        },
        "TypeError: lses[2] must be float32, got bfloat16": lambda a: {
            "lses": [*a["lses"][:2], a["lses"][2].bfloat16()]
        },
        "lses[2].shape[0] (tokens) must equal outs[0].shape[0], 7, got 3": lambda a: {
            "lses": [*a["lses"][:2], a["lses"][2].T]
        },
        "sink.shape[0] (heads) must equal outs[0].shape[1], 3, got 1": lambda a: {
            "sink": torch.zeros(1)
        },
        "TypeError: outs[0] must be a tensor, got int": lambda a: {"outs": [1, 2, 3]},
        "TypeError: out must be bfloat16 or float16 or float32, got float64": lambda a: {
            "out": a["out"].double()
        },
    },
}
