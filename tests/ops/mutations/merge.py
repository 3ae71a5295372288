"""Mutations of `merge_states`."""

from __future__ import annotations

from mlakit.tools.workloads import MergeCase
from tests.ops.mutations.changes import with_empty_parts_read, with_equal_weights, without
from tests.ops.mutations.checks import kernel, line

MUTATIONS = [
    kernel(MergeCase, "ignores the sink", without("sink")),
    kernel(MergeCase, "weighs the parts alike", with_equal_weights),
    kernel(MergeCase, "reads empty partials", with_empty_parts_read),
    kernel(
        MergeCase,
        "loses a part",
        lambda a: {"outs": a["outs"][1:] or a["outs"], "lses": a["lses"][1:] or a["lses"]},
    ),
    line(
        MergeCase,
        "merge",
        "plain average",
        "(partial_lse - divisor).exp()",
        "(partial_lse * 0 + 1 / len(partials))",
    ),
    line(
        MergeCase,
        "merge",
        "reads empty partials",
        "if bool(is_empty.any()):",
        "if False:",
    ),
]
