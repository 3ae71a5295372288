"""Mutations of `indexer_logits` and `indexer_topk`."""

from __future__ import annotations

from mlakit.workloads import IndexerLogitsCase, IndexerTopkCase
from tests.ops.mutations.changes import (
    keyless,
    loosened,
    scaled,
    unwindowed,
    with_pages_swapped,
    with_ties_reversed,
    without,
)
from tests.ops.mutations.checks import kernel, line

MUTATIONS = [
    kernel(IndexerLogitsCase, "drops the last key", keyless),
    kernel(IndexerLogitsCase, "is causal but for one key", loosened),
    kernel(IndexerLogitsCase, "has no window", unwindowed),
    kernel(IndexerLogitsCase, "swaps two pages", with_pages_swapped),
    kernel(IndexerLogitsCase, "scales weights by 1.001", scaled("weights", 1.001)),
    kernel(
        IndexerLogitsCase, "drops the sign of weights", lambda a: {"weights": a["weights"].abs()}
    ),
    kernel(
        IndexerLogitsCase,
        "leaves 0 where nothing is seen",
        after=lambda a: a["out"].nan_to_num_(neginf=0.0),
    ),
    line(IndexerLogitsCase, "indexer", "no relu", ".relu_()", ""),
    line(IndexerLogitsCase, "indexer", "sees the future", "~seen, -torch.inf", "~seen, 0.0"),
    kernel(IndexerTopkCase, "ignores row_ends", without("row_ends")),
    kernel(IndexerTopkCase, "ignores row_starts", without("row_starts")),
    kernel(IndexerTopkCase, "selects -inf", lambda a: {"logits": a["logits"].clamp_min(-1e38)}),
    kernel(
        IndexerTopkCase, "ranks NaN last", lambda a: {"logits": a["logits"].nan_to_num(nan=-1e38)}
    ),
    kernel(IndexerTopkCase, "prefers the later of equals", after=with_ties_reversed),
    line(
        IndexerTopkCase,
        "indexer",
        "last column lost",
        "row_ends[block, None], -",
        "row_ends[block, None] - 1, -",
    ),
    line(IndexerTopkCase, "indexer", "worst first", "descending=True", "descending=False"),
]
