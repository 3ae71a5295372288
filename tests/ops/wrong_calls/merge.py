"""Wrong calls of the merge op, and the message of each."""

from __future__ import annotations

import torch

from tests.ops.wrong_calls.spoiling import CallTables
from tests.spoiling import Edit, of, part

WRONG: CallTables = {
    "merge": {
        "TypeError: outs must be a sequence of tensors, got NoneType": {"outs": None},
        "TypeError: lses must be a sequence of tensors, got float": {"lses": 1.0},
        "outs must hold at least one part, got 0": {"outs": [], "lses": []},
        "lses must hold one per part, 3, got 2": {"lses": part[1:]},
        "outs[2].shape[0] (tokens) must equal outs[0].shape[0], 7, got 6": {
            "outs": Edit(lambda t: [*t[:2], t[2][:-1]])
        },
        "TypeError: outs[2] must be bfloat16 or float16 or float32, got int32": {
            "outs": Edit(lambda t: [*t[:2], t[2].int()])
        },
        "TypeError: lses[2] must be float32, got bfloat16": {
            "lses": Edit(lambda t: [*t[:2], t[2].bfloat16()])
        },
        "lses[2].shape[0] (tokens) must equal outs[0].shape[0], 7, got 3": {
            "lses": Edit(lambda t: [*t[:2], t[2].T])
        },
        "sink.shape[0] (heads) must equal outs[0].shape[1], 3, got 1": {"sink": torch.zeros(1)},
        "TypeError: outs[0] must be a tensor, got int": {"outs": [1, 2, 3]},
        "TypeError: out must be bfloat16 or float16 or float32, got float64": {
            "out": of(torch.float64)
        },
    },
}
