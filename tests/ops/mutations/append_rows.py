"""Mutations of `append_rows`."""

from __future__ import annotations

from mlakit.tools.workloads import AppendRowsCase
from tests.ops.mutations.changes import (
    rolled,
    scaled,
    with_a_stray_write,
    with_next_slot,
    with_padding_stored,
)
from tests.ops.mutations.checks import kernel, line

MUTATIONS = [
    kernel(AppendRowsCase, "stores one slot late", with_next_slot),
    kernel(AppendRowsCase, "stores padding rows", with_padding_stored),
    kernel(AppendRowsCase, "stores the row of another token", rolled("latent", 0)),
    kernel(AppendRowsCase, "scales latents by 1.02", scaled("latent", 1.02)),
    kernel(
        AppendRowsCase,
        "leaves out the rope columns",
        lambda a: {} if a["k_rope"] is None else {"k_rope": 0 * a["k_rope"].nan_to_num()},
    ),
    kernel(AppendRowsCase, "has scales of one kind", lambda a: {"power_of_two_scales": True}),
    kernel(AppendRowsCase, "writes to another row", after=with_a_stray_write),
    line(
        AppendRowsCase,
        "append_rows",
        "stores padding rows",
        "slots[is_stored], rows[is_stored]",
        "slots.clamp_min(0), rows",
    ),
    line(
        AppendRowsCase,
        "append_rows",
        "the next block's slots",
        "slots[block], latent[block]",
        "slots.roll(-1)[block], latent[block]",
    ),
]
