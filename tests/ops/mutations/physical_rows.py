"""Mutations of `physical_rows`."""

from __future__ import annotations

from mlakit.tools.workloads import PhysicalRowsCase
from tests.ops.mutations.changes import plus_one
from tests.ops.mutations.checks import kernel, line

MUTATIONS = [
    kernel(PhysicalRowsCase, "one position late", lambda a: plus_one(a, "tokens")),
    kernel(PhysicalRowsCase, "pages of another size", lambda a: plus_one(a, "page_size")),
    kernel(PhysicalRowsCase, "drops a row", after=lambda a: a["out"][:, -1:].fill_(-1)),
    line(
        PhysicalRowsCase,
        "physical_rows",
        "padding queries of the last request",
        "live = num_queries if a.q_starts is None else int(a.q_starts[-1])",
        "live = num_queries",
    ),
    line(
        PhysicalRowsCase,
        "physical_rows",
        "rows before the pool",
        "(row < 0) | (row > torch.iinfo(torch.int32).max)",
        "row > torch.iinfo(torch.int32).max",
    ),
    line(
        PhysicalRowsCase,
        "physical_rows",
        "positions of the next request",
        "(listed < lengths[request])",
        "(listed <= lengths[request])",
    ),
]
