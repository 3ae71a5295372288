"""Mutations of `mla_prefill`."""

from __future__ import annotations

from mlakit.tools.workloads import PrefillCase
from tests.ops.mutations.changes import (
    averaged,
    loosened,
    rescaled,
    rolled,
    unmasked,
    unwindowed,
    with_a_row_missing,
    with_binary_lse,
    with_last_column_dropped,
    without,
)
from tests.ops.mutations.checks import kernel, line

MUTATIONS = [
    kernel(PrefillCase, "scales scores by 1.02", rescaled),
    kernel(PrefillCase, "weighs all keys alike", averaged),
    kernel(PrefillCase, "is causal but for one key", loosened),
    kernel(PrefillCase, "does not mask the tail", unmasked),
    kernel(PrefillCase, "has no window", unwindowed),
    kernel(PrefillCase, "ignores the sink", without("sink")),
    kernel(PrefillCase, "ignores the slopes", without("alibi_slopes")),
    kernel(PrefillCase, "drops a column of the rope", with_last_column_dropped("k_rope")),
    kernel(PrefillCase, "mixes up the heads", rolled("v", 1)),
    kernel(PrefillCase, "gives lse in base 2", after=with_binary_lse),
    kernel(PrefillCase, "leaves a row unwritten", after=with_a_row_missing),
    line(
        PrefillCase,
        "prefill",
        "scale 2 % off",
        ".mul_(a.softmax_scale)",
        ".mul_(a.softmax_scale * 1.02)",
    ),
    line(
        PrefillCase,
        "prefill",
        "drops the last key",
        "stop = min(start + tiling.keys, last)",
        "stop = min(start + tiling.keys, last - 1)",
    ),
    line(
        PrefillCase,
        "prefill",
        "unmasked tail",
        "visible = None if is_full else",
        "visible = None if True else",
    ),
    line(PrefillCase, "prefill", "no alibi", "if alibi_slopes is not None:", "if False:"),
    line(PrefillCase, "prefill_fused", "unmasked", "yield own, True", "yield own, False"),
    line(PrefillCase, "prefill_fused", "forgets the context", "yield tile, False", "pass"),
    line(
        PrefillCase,
        "prefill_fused",
        "ignores the sink",
        "None if a.sink is None else a.sink[heads, None]",
        "None",
    ),
]
