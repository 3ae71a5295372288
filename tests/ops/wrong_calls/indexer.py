"""Wrong calls of the indexer ops, and the message of each."""

from __future__ import annotations

from mlakit.model import masks
from tests.ops.cases import int32
from tests.ops.wrong_calls.spoiling import WrongCalls, changed, columns_first

WRONG: WrongCalls = {
    "logits": {
        "page_table must be a tensor or (kv_starts, slots), got a tuple of 0": lambda a: {
            "page_table": (),
            "max_kv_len": None,
        },
        "TypeError: weights must be float32, got bfloat16": lambda a: {
            "weights": a["weights"].bfloat16()
        },
        "weights.shape[1] (index_heads) must equal q.shape[1], 2, got 1": lambda a: {
            "weights": a["weights"][:, :1]
        },
        "q.shape[2] (D) must equal the row width of the cache, 16, got 8": lambda a: {
            "q": a["q"][..., :8]
        },
        "kv_lens[2] must not exceed max_kv_len, 8, got 9": lambda a: {"max_kv_len": 8},
        "max_kv_len must be at least 0, got -1": lambda a: {"max_kv_len": -1},
        "kv_lens[2] must not exceed max_kv_len, 12, got 13": lambda a: {
            "kv_lens": changed(a["kv_lens"], 2, 13)
        },
        "out.shape[1] (columns) must equal max_kv_len, 12, got 11": lambda a: {
            "out": a["out"][:, :-1]
        },
        "TypeError: page_table must be a tensor, got list": lambda a: {"page_table": [[0]]},
        "page_table must have axes (batch, max_pages), got shape (3,)": lambda a: {
            "page_table": a["page_table"][0]
        },
        "TypeError: cache must be a PagedLatentCache, got NoneType": lambda a: {"cache": None},
        "q_starts must be given for 7 query tokens of 5 requests, got None": lambda a: {
            "q_starts": None
        },
    },
    "select": {
        "k must be at least 1, got 0": lambda a: {"k": 0},
        "max_score_bytes must hold the scores of one query, 48 bytes, got 47": lambda a: {
            "max_score_bytes": 47
        },
        "max_score_bytes must be at least 1, got 0": lambda a: {"max_score_bytes": 0},
        "max_score_bytes must hold all scores with the mask chunked, 336 bytes, got 96": lambda a: {
            "mask": masks.chunked(3)
        },
        "kv_lens[2] must not exceed max_kv_len, 8, got 9": lambda a: {"max_kv_len": 8},
        "weights.shape[0] (tokens) must equal q.shape[0], 7, got 3": lambda a: {
            "weights": a["weights"][:3]
        },
        "out.shape[1] (k) must equal k, 4, got 3": lambda a: {"out": a["out"][:, :3]},
        "TypeError: cache must be a PagedLatentCache, got NoneType": lambda a: {"cache": None},
    },
    "physical-rows": {
        "TypeError: tokens must be int32 or int64, got float32": lambda a: {
            "tokens": a["tokens"].float()
        },
        "tokens must have axes (queries, topk), got shape (5,)": lambda a: {
            "tokens": a["tokens"][0]
        },
        "tokens must have a contiguous last axis, got strides (1, 9)": lambda a: {
            "tokens": columns_first(a["tokens"])
        },
        "page_size must be at least 1, got 0": lambda a: {"page_size": 0},
        "TypeError: page_size must be an integer, got float": lambda a: {"page_size": 4.0},
        "page_table.shape[0] (batch) must equal the requests of the queries, 5, got 4": lambda a: {
            "page_table": a["page_table"][1:]
        },
        "page_table.shape[0] (batch) must equal the requests of the queries, 9, got 5": lambda a: {
            "q_starts": None
        },
        "q_starts[-1] must not exceed the number of query tokens, 9, got 10": lambda a: {
            "q_starts": changed(a["q_starts"], 5, 10)
        },
        "TypeError: out must be int32, got int64": lambda a: {"out": a["out"].long()},
        "page_table[0][-1] must not exceed the 1 slots of page_table[1], got 7": lambda a: {
            "page_table": (a["q_starts"], a["q_starts"][:1])
        },
    },
    "topk": {
        "k must be at least 1, got 0": lambda a: {"k": 0},
        "TypeError: k must be an integer, got float": lambda a: {"k": 2.0},
        "TypeError: logits must be float32, got bfloat16": lambda a: {
            "logits": a["logits"].bfloat16()
        },
        "logits must have axes (tokens, columns), got shape (11,)": lambda a: {
            "logits": a["logits"][0]
        },
        "row_starts.shape[0] (tokens) must equal logits.shape[0], 7, got 1": lambda a: {
            "row_starts": int32([0])
        },
        "row_ends[3] must not exceed the columns of logits, 11, got 12": lambda a: {
            "row_ends": int32([1, 2, 3, 12, 5, 6, 7])
        },
        "row_starts[6] must not be negative, got -1": lambda a: {
            "row_starts": int32([0, 0, 0, 0, 0, 0, -1])
        },
        "TypeError: out must be int32, got int64": lambda a: {"out": a["out"].long()},
        "logits must have a contiguous last axis, got strides (1, 7)": lambda a: {
            "logits": columns_first(a["logits"])
        },
    },
}
