"""Wrong calls of `append_rows`, and the message of each."""

from __future__ import annotations

from tests.ops.cases import E4M3
from tests.ops.wrong_calls.spoiling import (
    WrongCalls,
    changed,
    columns_first,
    expanded_pages,
    with_scale,
)

WRONG: WrongCalls = {
    "append-rows": {
        "the tensor_scale of cache must be positive and a normal float32, got -1.0": lambda a: {
            "cache": with_scale(a["cache"], -1.0)
        },
        "the payload of cache must be writable, got stride 0 on axis 0 (an "
        "expanded tensor)": lambda a: {"cache": expanded_pages(a["cache"])},
        "latent.shape[1] (latent) must equal the cache's kv_lora_rank, 32, got 31": lambda a: {
            "latent": a["latent"][:, :-1]
        },
        "TypeError: latent must be bfloat16 or float16 or float32, got float8_e4m3fn": lambda a: {
            "latent": a["latent"].to(E4M3)
        },
        "latent must have a contiguous last axis, got strides (1, 7)": lambda a: {
            "latent": columns_first(a["latent"])
        },
        "TypeError: k_rope must be given for a cache with 8 rope columns, got None": lambda a: {
            "k_rope": None
        },
        "k_rope must have axes (tokens, rope), got shape (7, 1, 8)": lambda a: {
            "k_rope": a["k_rope"][:, None]
        },
        "k_rope.shape[0] (tokens) must equal latent.shape[0], 7, got 6": lambda a: {
            "k_rope": a["k_rope"][1:]
        },
        "TypeError: k_rope must be bfloat16 or float16 or float32, got float64": lambda a: {
            "k_rope": a["k_rope"].double()
        },
        "TypeError: cache must be a PagedLatentCache, got CacheLayer": lambda a: {
            "cache": a["cache"].layer(0)
        },
        "layer must be below the cache's 2 layers, got 2": lambda a: {"layer": 2},
        "TypeError: slots must be int32 or int64, got float32": lambda a: {
            "slots": a["slots"].float()
        },
        "TypeError: slots must be a tensor, got list": lambda a: {"slots": a["slots"].tolist()},
        "slots.shape[0] (tokens) must equal latent.shape[0], 7, got 6": lambda a: {
            "slots": a["slots"][:6]
        },
        "slots[4] must be in [0, 12) or -1, which is skipped, got 12": lambda a: {
            "slots": changed(a["slots"], 4, 12)
        },
        "slots[4] must be in [0, 12) or -1, which is skipped, got -2": lambda a: {
            "slots": changed(a["slots"], 4, -2)
        },
        "slots must be unique, got 3 in slots[1] and slots[4]": lambda a: {
            "slots": changed(changed(a["slots"], 1, 3), 4, 3)
        },
        "slots must be on a device that holds data, got a meta tensor": lambda a: {
            "slots": a["slots"].to("meta")
        },
    },
    "append-rows-index-keys": {
        "k_rope.shape[1] (rope) must equal the cache's qk_rope_head_dim, 0, got 2": lambda a: {
            "k_rope": a["latent"][:, :2]
        },
    },
}
