"""Mutations of `norm_rope_quant_append`."""

from __future__ import annotations

import torch

from mlakit.cache import UNSHARDED
from mlakit.tools.workloads import AppendCase
from tests.ops.mutations.changes import (
    by_request,
    by_slot,
    plus_one,
    scaled,
    with_a_stray_write,
    with_any_position,
    with_next_rank,
    with_next_slot,
    with_overflow,
    with_padding_stored,
    with_pages_swapped,
)
from tests.ops.mutations.checks import kernel, line

MUTATIONS = [
    kernel(AppendCase, "appends one position late", by_request(lambda a: plus_one(a, "kv_lens"))),
    kernel(AppendCase, "swaps two pages", by_request(with_pages_swapped)),
    kernel(AppendCase, "rotates one position late", by_slot(lambda a: plus_one(a, "positions"))),
    kernel(
        AppendCase,
        "rotates by lengths where positions are given",
        by_request(lambda a: {"positions": None}),
    ),
    kernel(AppendCase, "stores the tokens of all ranks", lambda a: {"shard": UNSHARDED}),
    kernel(AppendCase, "stores the tokens of the next rank", with_next_rank),
    kernel(AppendCase, "stores one slot late", by_slot(with_next_slot)),
    kernel(AppendCase, "stores padding tokens", by_slot(with_padding_stored)),
    kernel(AppendCase, "rotates padding tokens without a position", by_slot(with_any_position)),
    kernel(AppendCase, "scales gamma by 1.02", scaled("gamma", 1.02)),
    kernel(AppendCase, "doubles epsilon", lambda a: {"epsilon": 2 * a["epsilon"]}),
    kernel(
        AppendCase,
        "rotates the other way",
        lambda a: {
            "freqs": torch.stack([a["freqs"][:, 0::2], -a["freqs"][:, 1::2]], -1).flatten(1)
        },
    ),
    kernel(AppendCase, "has one rope", lambda a: {"rope": "half"}),
    kernel(AppendCase, "has scales of one kind", lambda a: {"power_of_two_scales": True}),
    kernel(AppendCase, "does not saturate", after=with_overflow("q_rope_out")),
    kernel(AppendCase, "writes to another row", after=with_a_stray_write),
    line(
        AppendCase,
        "norm_rope_quant",
        "position one off",
        "cos_sin = freqs[positions[block]]",
        "cos_sin = freqs[positions[block] + 1]",
    ),
    line(
        AppendCase,
        "norm_rope_quant",
        "epsilon ignored",
        "keepdim=True) + epsilon)",
        "keepdim=True) + 1e-30)",
    ),
    line(
        AppendCase,
        "norm_rope_quant",
        "gamma before rounding",
        "normalised.to(gamma.dtype) * gamma",
        "(normalised * gamma.float()).to(gamma.dtype)",
    ),
    line(
        AppendCase, "norm_rope_quant", "turns the wrong way", "y0 = x0 * cos - ", "y0 = x0 * cos + "
    ),
]
