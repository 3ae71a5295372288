"""Mutations of `compress_rows`."""

from __future__ import annotations

import torch

from mlakit.tools.workloads import CompressCase
from tests.ops.mutations.changes import (
    plus_one,
    rolled,
    scaled,
    with_a_stray_write,
    with_pages_swapped,
    without,
)
from tests.ops.mutations.checks import kernel, line

MUTATIONS = [
    kernel(CompressCase, "counts one token too many", lambda a: plus_one(a, "kv_lens")),
    kernel(CompressCase, "swaps two pages", with_pages_swapped),
    kernel(CompressCase, "keeps one token more", lambda a: plus_one(a, "keep")),
    kernel(CompressCase, "does not rotate", without("freqs")),
    kernel(CompressCase, "has no bias", lambda a: {"bias": torch.zeros_like(a["bias"])}),
    kernel(CompressCase, "shifts the bias by a token", rolled("bias", 0)),
    kernel(CompressCase, "exchanges the columns of a window's halves", rolled("kv", 1)),
    kernel(CompressCase, "scales gamma by 1.02", scaled("gamma", 1.02)),
    kernel(CompressCase, "has scales of one kind", lambda a: {"power_of_two_scales": True}),
    kernel(CompressCase, "writes to another row", after=with_a_stray_write),
    line(
        CompressCase,
        "compress_rows",
        "window 0 reads tokens before it",
        "z.masked_fill(~exists[..., None], -torch.inf)",
        "z",
    ),
    line(
        CompressCase, "compress_rows", "one position late", "window * rate]", "window * rate + 1]"
    ),
    line(
        CompressCase,
        "compress_rows",
        "reads all tokens from kv",
        "exists & (token >= before[request][:, None])",
        "exists & (token >= before[request][:, None] - 1)",
    ),
    line(
        CompressCase,
        "compress_rows",
        "forgets the window before",
        "(kv_lens - a.keep) // a.rate - int(a.overlap)",
        "(kv_lens - a.keep) // a.rate",
    ),
]
