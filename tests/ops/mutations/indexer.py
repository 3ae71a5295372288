"""Mutations of `indexer_logits`, `indexer_topk` and `indexer_select`."""

from __future__ import annotations

import torch

from mlakit.tools.workloads import IndexerLogitsCase, IndexerSelectCase, IndexerTopkCase
from tests.kernel_launchers import Arguments
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


def reversed_(logits: torch.Tensor) -> torch.Tensor:
    return torch.where(logits == -torch.inf, logits, -logits)


def give_columns(a: Arguments) -> None:
    columns = a["logits"].sort(dim=1, descending=True, stable=True)
    found = columns.values[:, : a["out"].shape[1]] != -torch.inf
    chosen = torch.where(found, columns.indices[:, : a["out"].shape[1]], a["logits"].shape[1])
    chosen = chosen.sort(dim=1).values
    a["out"][:, : chosen.shape[1]] = torch.where(chosen < a["logits"].shape[1], chosen, -1).int()


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
    line(IndexerTopkCase, "indexer", "worst first", "(k, sorted", "(k, largest=False, sorted"),
    line(IndexerTopkCase, "indexer", "any of the equal ones", "taken < equal", "taken > equal"),
    kernel(IndexerSelectCase, "selects the worst", lambda a: {"logits": reversed_(a["logits"])}),
    kernel(IndexerSelectCase, "takes every block for the first", lambda a: {"first_token": 0}),
    kernel(IndexerSelectCase, "forgets the first keys", lambda a: {"init_tokens": 0}),
    kernel(IndexerSelectCase, "forgets the last keys", lambda a: {"local_tokens": 0}),
    kernel(IndexerSelectCase, "gives columns", after=lambda a: give_columns(a)),
    kernel(IndexerSelectCase, "drops the last row", after=lambda a: a["out"][:, -1:].fill_(-1)),
    line(IndexerSelectCase, "indexer_select", "ignores the queries after a block", "- after)", ")"),
    line(
        IndexerSelectCase,
        "indexer_select",
        "takes a block's end for its start",
        "block.start)",
        "block.stop)",
    ),
    line(
        IndexerSelectCase,
        "indexer_select",
        "row of the next token",
        "out[found].long())",
        "out[found].long() + 1)",
    ),
]
