"""Mutations of `batched_matmul`."""

from __future__ import annotations

from mlakit.tools.workloads import BatchedMatmulCase
from tests.ops.mutations.changes import rolled, scaled, with_last_column_dropped, with_overflow
from tests.ops.mutations.checks import kernel, line

MUTATIONS = [
    kernel(BatchedMatmulCase, "does not saturate", after=with_overflow("out")),
    kernel(BatchedMatmulCase, "drops the last product", with_last_column_dropped("a")),
    kernel(BatchedMatmulCase, "scales by 1.02", scaled("b", 1.02)),
    kernel(BatchedMatmulCase, "mixes up the batch", rolled("b", 0)),
    line(
        BatchedMatmulCase,
        "matmul",
        "last tile lost",
        "yield slice(start, min(start + tile, rows))",
        "yield slice(start, min(start + tile, rows - 1))",
    ),
]
