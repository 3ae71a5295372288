"""Wrong calls of the indexer ops, and the message of each."""

from __future__ import annotations

import torch

from mlakit.model import masks
from tests.ops.cases import int32
from tests.ops.wrong_calls.spoiling import CallTables
from tests.spoiling import COLUMNS_FIRST, of, part, put

WRONG: CallTables = {
    "logits": {
        "page_table must be a tensor or (kv_starts, slots), got a tuple of 0": {
            "page_table": (),
            "max_kv_len": None,
        },
        "TypeError: weights must be float32, got bfloat16": {"weights": of(torch.bfloat16)},
        "weights.shape[1] (index_heads) must equal q.shape[1], 2, got 1": {"weights": part[:, :1]},
        "q.shape[2] (D) must equal the row width of the cache, 16, got 8": {"q": part[..., :8]},
        "kv_lens[2] must not exceed max_kv_len, 8, got 9": {"max_kv_len": 8},
        "max_kv_len must be at least 0, got -1": {"max_kv_len": -1},
        "kv_lens[2] must not exceed max_kv_len, 12, got 13": {"kv_lens": put(2, 13)},
        "out.shape[1] (columns) must equal max_kv_len, 12, got 11": {"out": part[:, :-1]},
        "TypeError: page_table must be a tensor, got list": {"page_table": [[0]]},
        "page_table must have axes (batch, max_pages), got shape (3,)": {"page_table": part[0]},
        "TypeError: cache must be a PagedLatentCache, got NoneType": {"cache": None},
        "q_starts must be given for 7 query tokens of 5 requests, got None": {"q_starts": None},
    },
    "select": {
        "k must be at least 1, got 0": {"k": 0},
        "k must be at least init_tokens and local_tokens together, 5, got 4": {
            "init_tokens": 2,
            "local_tokens": 3,
        },
        "init_tokens must be at least 0, got -1": {"init_tokens": -1},
        "local_tokens must be at least 0, got -2": {"local_tokens": -2},
        "max_score_bytes must hold the scores of one query, 48 bytes, got 47": {
            "max_score_bytes": 47
        },
        "max_score_bytes must be at least 1, got 0": {"max_score_bytes": 0},
        "max_score_bytes must hold all scores with the mask chunked, 336 bytes, got 96": {
            "mask": masks.chunked(3)
        },
        "kv_lens[2] must not exceed max_kv_len, 8, got 9": {"max_kv_len": 8},
        "weights.shape[0] (tokens) must equal q.shape[0], 7, got 3": {"weights": part[:3]},
        "out.shape[1] (k) must equal k, 4, got 3": {"out": part[:, :3]},
        "TypeError: cache must be a PagedLatentCache, got NoneType": {"cache": None},
    },
    "physical-rows": {
        "TypeError: tokens must be int32 or int64, got float32": {"tokens": of(torch.float32)},
        "tokens must have axes (queries, topk), got shape (5,)": {"tokens": part[0]},
        "tokens must have a contiguous last axis, got strides (1, 9)": {"tokens": COLUMNS_FIRST},
        "page_size must be at least 1, got 0": {"page_size": 0},
        "TypeError: page_size must be an integer, got float": {"page_size": 4.0},
        "page_table.shape[0] (batch) must equal the requests of the queries, 5, got 4": {
            "page_table": part[1:]
        },
        "page_table.shape[0] (batch) must equal the requests of the queries, 9, got 5": {
            "q_starts": None
        },
        "q_starts[-1] must not exceed the number of query tokens, 9, got 10": {
            "q_starts": put(5, 10)
        },
        "TypeError: out must be int32, got int64": {"out": of(torch.int64)},
        "page_table[0][-1] must not exceed the 1 slots of page_table[1], got 7": lambda a: {
            "page_table": (a["q_starts"], a["q_starts"][:1])
        },
    },
    "topk": {
        "k must be at least 1, got 0": {"k": 0},
        "TypeError: k must be an integer, got float": {"k": 2.0},
        "TypeError: logits must be float32, got bfloat16": {"logits": of(torch.bfloat16)},
        "logits must have axes (tokens, columns), got shape (11,)": {"logits": part[0]},
        "row_starts.shape[0] (tokens) must equal logits.shape[0], 7, got 1": {
            "row_starts": int32([0])
        },
        "row_ends[3] must not exceed the columns of logits, 11, got 12": {
            "row_ends": int32([1, 2, 3, 12, 5, 6, 7])
        },
        "row_starts[6] must not be negative, got -1": {"row_starts": int32([0, 0, 0, 0, 0, 0, -1])},
        "TypeError: out must be int32, got int64": {"out": of(torch.int64)},
        "logits must have a contiguous last axis, got strides (1, 7)": {"logits": COLUMNS_FIRST},
    },
}
