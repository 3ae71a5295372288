"""Mutations of `sparse_mla`."""

from __future__ import annotations

from mlakit.tools.workloads import SparseCase
from tests.ops.mutations.changes import (
    apart_with_column_dropped,
    averaged,
    rescaled,
    with_a_stray_write,
    with_negative_rows_wrapped,
    without,
)
from tests.ops.mutations.checks import kernel, line

MUTATIONS = [
    kernel(SparseCase, "scales scores by 1.02", rescaled),
    kernel(SparseCase, "weighs all keys alike", averaged),
    kernel(SparseCase, "ignores the lengths", without("topk_lens")),
    kernel(SparseCase, "drops the last entry", lambda a: {"rows": a["rows"][:, :-1]}),
    kernel(SparseCase, "takes negative rows from the end", with_negative_rows_wrapped),
    kernel(SparseCase, "clamps rows", lambda a: {"rows": a["rows"].clamp(0)}),
    kernel(SparseCase, "ignores the extra cache", without("extra")),
    kernel(SparseCase, "ignores the sink", without("sink")),
    kernel(SparseCase, "ignores q_scale", without("q_scale")),
    kernel(SparseCase, "drops a column of a separate rope", apart_with_column_dropped),
    kernel(SparseCase, "gives lse for max_logits", after=lambda a: a["max_logits"].copy_(a["lse"])),
    kernel(SparseCase, "writes to the cache", after=with_a_stray_write),
    line(
        SparseCase,
        "sparse",
        "last row of the pool lost",
        "(chosen < self.layer.num_slots)",
        "(chosen < self.layer.num_slots - 1)",
    ),
    line(
        SparseCase,
        "sparse",
        "counts beyond topk_lens",
        "valid &= entry < self.lens",
        "valid &= entry <= self.lens",
    ),
    line(SparseCase, "sparse", "forgets the second cache", "if a.extra is not None:", "if False:"),
]
