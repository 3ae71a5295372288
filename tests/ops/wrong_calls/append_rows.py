"""Wrong calls of `append_rows`, and the message of each."""

from __future__ import annotations

import torch

from tests.ops.cases import E4M3
from tests.ops.wrong_calls.spoiling import EXPANDED_PAGES, CallTables, with_scale
from tests.spoiling import AS_LIST, COLUMNS_FIRST, ON_META, Edit, changed, of, part, put

WRONG: CallTables = {
    "append-rows": {
        "the tensor_scale of cache must be positive and a normal float32, got -1.0": {
            "cache": with_scale(-1.0)
        },
        "the payload of cache must be writable, got stride 0 on axis 0 (an expanded tensor)": {
            "cache": EXPANDED_PAGES
        },
        "latent.shape[1] (latent) must equal the cache's kv_lora_rank, 32, got 31": {
            "latent": part[:, :-1]
        },
        "TypeError: latent must be bfloat16 or float16 or float32, got float8_e4m3fn": {
            "latent": of(E4M3)
        },
        "latent must have a contiguous last axis, got strides (1, 7)": {"latent": COLUMNS_FIRST},
        "TypeError: k_rope must be given for a cache with 8 rope columns, got None": {
            "k_rope": None
        },
        "k_rope must have axes (tokens, rope), got shape (7, 1, 8)": {"k_rope": part[:, None]},
        "k_rope.shape[0] (tokens) must equal latent.shape[0], 7, got 6": {"k_rope": part[1:]},
        "TypeError: k_rope must be bfloat16 or float16 or float32, got float64": {
            "k_rope": of(torch.float64)
        },
        "TypeError: cache must be a PagedLatentCache, got CacheLayer": {
            "cache": Edit(lambda t: t.layer(0))
        },
        "layer must be below the cache's 2 layers, got 2": {"layer": 2},
        "TypeError: slots must be int32 or int64, got float32": {"slots": of(torch.float32)},
        "TypeError: slots must be a tensor, got list": {"slots": AS_LIST},
        "slots.shape[0] (tokens) must equal latent.shape[0], 7, got 6": {"slots": part[:6]},
        "slots[4] must be in [0, 12) or -1, which is skipped, got 12": {"slots": put(4, 12)},
        "slots[4] must be in [0, 12) or -1, which is skipped, got -2": {"slots": put(4, -2)},
        "slots must be unique, got 3 in slots[1] and slots[4]": {
            "slots": Edit(lambda t: changed(changed(t, 1, 3), 4, 3))
        },
        "slots must be on a device that holds data, got a meta tensor": {"slots": ON_META},
    },
    "append-rows-index-keys": {
        "k_rope.shape[1] (rope) must equal the cache's qk_rope_head_dim, 0, got 2": lambda a: {
            "k_rope": a["latent"][:, :2]
        },
    },
}
