"""References that compute all queries of a request at once.

Each stands beside the reference of one query at a time, takes its arguments and returns the same.
On a GPU a problem takes milliseconds. A query's scores include keys that it does not see, so keys
and values that any query of the request sees must be finite; the others may be NaN.
"""

from __future__ import annotations

from mlakit.reference.decode import mla_decode_batched as mla_decode
from mlakit.reference.indexer import indexer_logits_batched as indexer_logits
from mlakit.reference.indexer import indexer_select_batched as indexer_select
from mlakit.reference.indexer import indexer_topk_batched as indexer_topk
from mlakit.reference.prefill import mla_prefill_batched as mla_prefill
from mlakit.reference.sparse import sparse_mla_batched as sparse_mla

__all__ = [
    "indexer_logits",
    "indexer_select",
    "indexer_topk",
    "mla_decode",
    "mla_prefill",
    "sparse_mla",
]
