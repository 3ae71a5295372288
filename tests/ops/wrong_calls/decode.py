"""Wrong calls of the decode op, and the message of each."""

from __future__ import annotations

import torch

from mlakit.plan import plan_context, plan_decode
from tests.ops.cases import BF16, HEADS, TOKENS
from tests.ops.wrong_calls.spoiling import CallTables, with_scale
from tests.spoiling import AS_LIST, COLUMNS_FIRST, ON_META, Edit, changed, of, part, put

WRONG: CallTables = {
    "decode": {
        "the tensor_scale of cache must be positive and a normal float32, got 0.0": {
            "cache": with_scale(0.0)
        },
        "TypeError: backend must be a string, got NoneType": {"backend": None},
        "softmax_scale must be finite, got a number above 1.7976931348623157e+308": {
            "softmax_scale": 10**400
        },
        "TypeError: q must be a tensor, got list": {"q": [1.0]},
        "q must have axes (tokens, heads, width), got shape (3, 40)": {"q": part[0]},
        "q.shape[2] (width) must equal the row width of the cache, 40, got 39": {
            "q": part[..., :-1]
        },
        "TypeError: q must be bfloat16 or float8_e4m3fn, got float16": {"q": of(torch.float16)},
        "q must be on a device that holds data, got a meta tensor": {"q": ON_META},
        "q must have a contiguous last axis, got strides (120, 1, 3)": {"q": COLUMNS_FIRST},
        "TypeError: cache must be a PagedLatentCache, got Tensor; "
        "PagedLatentCache.wrap(tensor, geometry) makes one": {"cache": Edit(lambda t: t.payload)},
        "layer must be below the cache's 2 layers, got 2": {"layer": 2},
        "layer must be at least 0, got -1": {"layer": -1},
        "TypeError: layer must be an integer, got float": {"layer": 1.0},
        "TypeError: layer must be an integer, got bool": {"layer": True},
        "TypeError: kv_lens must be int32 or int64, got float32": {"kv_lens": of(torch.float32)},
        "kv_lens must have axes (batch), got shape (1, 5)": {"kv_lens": part[None]},
        "kv_lens[2] must not be negative, got -1": {"kv_lens": put(2, -1)},
        "kv_lens[2] must not exceed the 12 tokens its page table holds, got 13": {
            "kv_lens": put(2, 13)
        },
        "kv_lens must be on a device that holds data, got a meta tensor": {"kv_lens": ON_META},
        "q_starts.shape[0] (batch + 1) must equal one more than the batch, 6, got 5": {
            "q_starts": part[:-1]
        },
        "q_starts[0] must be 0, got 1": {"q_starts": Edit(lambda t: t + 1)},
        "q_starts[2] must not be below q_starts[1] = 2, got 1": {"q_starts": put(2, 1)},
        "q_starts[-1] must not exceed the number of query tokens, 7, got 8": {
            "q_starts": put(-1, 8)
        },
        "q_starts must be given for 7 query tokens of 5 requests, got None": {"q_starts": None},
        "TypeError: q_starts must be int32 or int64, got int16": {"q_starts": of(torch.int16)},
        "TypeError: page_table must be int32 or int64, got float32": {
            "page_table": of(torch.float32)
        },
        "page_table.shape[0] (batch) must equal kv_lens.shape[0], 5, got 4": {
            "page_table": part[1:]
        },
        "TypeError: page_table must be a tensor, got list": {"page_table": AS_LIST},
        "page_table must be a tensor or (kv_starts, slots), got a tuple of 3": {
            "page_table": Edit(lambda t: (t,) * 3)
        },
        "page_table[2, 1] must be in [0, 12), got 99": {"page_table": put((2, 1), 99)},
        "page_table[2, 1] must be in [0, 12), got -1": {"page_table": put((2, 1), -1)},
        "softmax_scale must be finite, got nan": {"softmax_scale": float("nan")},
        "TypeError: softmax_scale must be a number, got Tensor": {
            "softmax_scale": torch.tensor(0.1)
        },
        "TypeError: softmax_scale must be a number, got bool": {"softmax_scale": True},
        "sink.shape[0] (heads) must equal q.shape[1], 3, got 2": {"sink": torch.zeros(2)},
        "TypeError: sink must be float32, got bfloat16": {"sink": torch.zeros(3, dtype=BF16)},
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
        "kv_shard rank must be below world, 2, got 2": {"kv_shard": (2, 2, 1)},
        "kv_shard world must be at least 1, got 0": {"kv_shard": (0, 0, 1)},
        "kv_shard interleave must be at least 1, got 0": {"kv_shard": (0, 1, 0)},
        "TypeError: kv_shard must be (rank, world, interleave), got (0,)": {"kv_shard": (0,)},
        "plan must be made for kv_lens[2] = 9 keys, got 8": {
            "plan": plan_decode((5, 6, 8, 1, 4), num_ctas=2, tile=2)
        },
        "plan must be made for this batch, got another batch size": {
            "plan": plan_decode((5, 6, 9, 1, 4, 2), num_ctas=2, tile=2)
        },
        "TypeError: plan must be a DecodePlan, its tensors or an EvenSplit, got ContextPlan": {
            "plan": plan_context((5,), (1,))
        },
        "TypeError: mask must be a Mask, got str": {"mask": "causal"},
        "TypeError: out must be bfloat16, got float32": {"out": of(torch.float32)},
        "out.shape[0] (tokens) must equal q.shape[0], 7, got 6": {"out": part[:-1]},
        "out.shape[2] (v_width) must equal the cache's value width, 32, got 40": {
            "out": torch.empty(TOKENS, HEADS, 40, dtype=BF16)
        },
        "out must be writable, got stride 0 on axis 0 (an expanded tensor)": {
            "out": Edit(lambda t: t[:1].expand(TOKENS, HEADS, 32))
        },
        "out must have a contiguous last axis, got strides (96, 1, 3)": {"out": COLUMNS_FIRST},
        "TypeError: lse must be float32, got float64": {"lse": of(torch.float64)},
        "TypeError: lse must be a tensor, got ndarray": {"lse": Edit(lambda t: t.numpy())},
    },
    "decode-fp8-scale-tensor-flat": {
        "page_table[0][2] must not be below page_table[0][1] = 5, got 1": {
            "page_table": Edit(lambda t: (changed(t[0], 2, 1), t[1]))
        },
        "page_table[1][3] must be in [0, 48), got -2": {
            "page_table": Edit(lambda t: (t[0], changed(t[1], 3, -2)))
        },
        "page_table[0][-1] must not exceed the 24 slots of page_table[1], got 25": {
            "page_table": Edit(lambda t: (t[0], t[1][:-1]))
        },
        "kv_lens[0] must not exceed the 5 tokens its page table holds, got 6": {
            "kv_lens": put(0, 6)
        },
    },
}
