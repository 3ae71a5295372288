"""Wrong calls of the sparse op, and the message of each."""

from __future__ import annotations

import torch

from mlakit.plan import plan_decode
from tests.ops.cases import BF16, TOKENS, int32
from tests.ops.wrong_calls.spoiling import OTHER_ROWS, CallTables, rescaled, with_scale
from tests.spoiling import of, part

WRONG: CallTables = {
    "sparse": {
        "the tensor_scale of cache must be positive and a normal float32, got 0.0": {
            "cache": with_scale(0.0)
        },
        "rows.shape[0] (tokens) must equal q.shape[0], 7, got 6": {"rows": part[1:]},
        "TypeError: rows must be int32 or int64, got float32": {"rows": of(torch.float32)},
        "topk_lens[3] must not exceed the entries of rows, 7, got 8": {
            "topk_lens": int32([7, 7, 7, 8, 7, 7, 7])
        },
        "topk_lens[1] must not be negative, got -1": {"topk_lens": int32([7, -1, 7, 7, 7, 7, 7])},
        "q_rope.shape[2] (rope) must equal the cache's qk_rope_head_dim, 8, got 7": lambda a: {
            "q": a["q"][..., :32],
            "q_rope": a["q"][..., :7],
        },
        "q.shape[2] (latent) must equal the cache's kv_lora_rank, 32, got 40": lambda a: {
            "q_rope": a["q"][..., :8]
        },
        "q_scale must have axes (tokens), got shape (7, 1)": {"q_scale": torch.ones(TOKENS, 1)},
        "TypeError: q_scale must be float32, got bfloat16": {
            "q_scale": torch.ones(TOKENS, dtype=BF16)
        },
        "topk_lens.shape[0] (tokens) must equal q.shape[0], 7, got 1": {"topk_lens": int32([7])},
        "extra.cache must have rows like the cache's, "
        "RowShape(kv_lora_rank=32, qk_rope_head_dim=8, v_width=32), "
        "got RowShape(kv_lora_rank=40, qk_rope_head_dim=8, v_width=40)": lambda a: {
            "extra": (OTHER_ROWS, a["rows"])
        },
        "extra.rows.shape[0] (tokens) must equal q.shape[0], 7, got 6": lambda a: {
            "extra": (a["cache"], a["rows"][1:])
        },
        "extra.topk_lens[0] must not exceed the entries of extra.rows, 7, got 8": lambda a: {
            "extra": (a["cache"], a["rows"], int32([8] * 7))
        },
        "extra.layer must be below the cache's 2 layers, got 2": lambda a: {
            "extra": (a["cache"], a["rows"], None, 2)
        },
        "TypeError: extra must be ExtraRows or (cache, rows, …), got PagedLatentCache": lambda a: {
            "extra": a["cache"]
        },
        "TypeError: extra.rows must be a tensor, got NoneType": lambda a: {
            "extra": (a["cache"], None)
        },
        "TypeError: plan must be an EvenSplit, got DecodePlan": {
            "plan": plan_decode((5,), num_ctas=1)
        },
        "TypeError: max_logits must be float32, got bfloat16": {"max_logits": of(torch.bfloat16)},
        "TypeError: softmax_scale must be a number, got NoneType": {"softmax_scale": None},
    },
    "sparse-extra": {
        "the tensor_scale of extra.cache must be finite, got nan": lambda a: {
            "extra": a["extra"]._replace(cache=rescaled(a["cache"], float("nan")))
        },
        "TypeError: q must be bfloat16 or float16 or float32 or float8_e4m3fn, got float64": {
            "q": of(torch.float64)
        },
    },
}
