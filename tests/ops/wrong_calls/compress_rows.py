"""Wrong calls of `compress_rows`, and the message of each."""

from __future__ import annotations

from mlakit.cache import PagedLatentCache
from mlakit.model.geometry import RowShape
from tests.ops.cases import E4M3
from tests.ops.wrong_calls.spoiling import EXPANDED_PAGES, CallTables, with_scale
from tests.spoiling import COLUMNS_FIRST, Edit, of, part, put


def of_width(columns: int, format: str) -> PagedLatentCache:
    return PagedLatentCache.allocate(RowShape(columns, 0), format, num_pages=20, num_layers=2)


WRONG: CallTables = {
    "compress": {
        "rate must be at least 1, got 0": {"rate": 0},
        "keep must be at least 0, got -1": {"keep": -1},
        "epsilon must not be negative, got -1.0": {"epsilon": -1.0},
        "kv.shape[1] (columns) must equal twice the row width of the cache, 80, got 79": {
            "kv": part[:, :-1]
        },
        "kv.shape[1] (columns) must equal the row width of the cache, 40, got 80": {
            "overlap": False
        },
        "TypeError: gate must be bfloat16 or float16 or float32, got float8_e4m3fn": {
            "gate": of(E4M3)
        },
        "gate.shape[0] (tokens) must equal kv.shape[0], 7, got 6": {"gate": part[1:]},
        "gate must have a contiguous last axis, got strides (1, 7)": {"gate": COLUMNS_FIRST},
        "bias.shape[0] (rate) must equal the argument rate, 3, got 2": {"rate": 3},
        "gamma.shape[0] (width) must equal the row width of the cache, 40, got 32": {
            "gamma": part[:32]
        },
        "freqs.shape[1] (rope) must equal the cache's qk_rope_head_dim, 8, got 6": {
            "freqs": part[:, :6]
        },
        "freqs must have a row for position 6 of request 2, got 6 rows": {"freqs": part[:6]},
        "the tensor_scale of cache must be positive and a normal float32, got -1.0": {
            "cache": with_scale(-1.0)
        },
        "the payload of cache must be writable, got stride 0 on axis 0 (an expanded tensor)": {
            "cache": EXPANDED_PAGES
        },
        "the payload of state_cache must be writable, got stride 0 on axis 0 (an "
        "expanded tensor)": {"state_cache": EXPANDED_PAGES},
        "TypeError: cache must be a PagedLatentCache, got CacheLayer": {
            "cache": Edit(lambda t: t.layer(0))
        },
        "TypeError: state_cache must be a PagedLatentCache, got CacheLayer": {
            "state_cache": Edit(lambda t: t.layer(0))
        },
        "layer must be below the cache's 2 layers, got 2": {"layer": 2},
        "state_layer must be below the cache's 2 layers, got 2": {"state_layer": 2},
        "state_cache must have rows of format fp32, got bf16": {
            "state_cache": of_width(160, "bf16")
        },
        "state_cache must have rows of 160 columns, kv and gate of a token, got 80": {
            "state_cache": of_width(80, "fp32")
        },
        "kv_lens[2] must include the 3 new tokens of the request, got 2": {"kv_lens": put(2, 2)},
        "q_starts.shape[0] (batch + 1) must equal one more than the batch, 6, got 5": {
            "q_starts": part[:-1]
        },
        "page_table.shape[0] (batch) must equal kv_lens.shape[0], 5, got 4": {
            "page_table": part[:4]
        },
        # the state of another batch
        "state_table.shape[0] (batch) must equal kv_lens.shape[0], 5, got 4": {
            "state_table": part[:4]
        },
        "page_table[2, 0] must be in [0, 7), got 7": {"page_table": put((2, 0), 7)},
        "windows of kv_lens[0] must not exceed the 0 tokens its page table holds, got 2": {
            "page_table": part[:, :0]
        },
        "state_table[2, 1] must be in [0, 12), got -1": {"state_table": put((2, 1), -1)},
        "state_table[2, 2] must be in [0, 12), got 12": {"state_table": put((2, 2), 12)},
    },
}
