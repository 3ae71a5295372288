"""Mutations of `mla_decode`."""

from __future__ import annotations

from mlakit.cache import UNSHARDED
from mlakit.workloads import DecodeCase
from tests.ops.mutations.changes import (
    averaged,
    keyless,
    loosened,
    rescaled,
    unmasked,
    unwindowed,
    with_a_row_missing,
    with_a_split_left_out,
    with_a_stray_write,
    with_binary_lse,
    with_last_column_dropped,
    with_pages_swapped,
    with_unit_scale,
    without,
)
from tests.ops.mutations.checks import kernel, line

MUTATIONS = [
    kernel(DecodeCase, "drops the last key", keyless),
    kernel(DecodeCase, "reads past the end", lambda a: {"kv_lens": a["kv_lens"] + 1}),
    kernel(DecodeCase, "scales scores by 1.02", rescaled),
    kernel(DecodeCase, "weighs all keys alike", averaged),
    kernel(DecodeCase, "is causal but for one key", loosened),
    kernel(DecodeCase, "does not mask the tail", unmasked),
    kernel(DecodeCase, "has no window", unwindowed),
    kernel(DecodeCase, "ignores the sink", without("sink")),
    kernel(DecodeCase, "swaps two pages", with_pages_swapped),
    kernel(DecodeCase, "ignores q_scale", without("q_scale")),
    kernel(DecodeCase, "ignores the tensor scale", with_unit_scale, formats=("fp8",)),
    kernel(DecodeCase, "ignores the shard", lambda a: {"shard": UNSHARDED}),
    kernel(DecodeCase, "leaves a split out", with_a_split_left_out),
    kernel(DecodeCase, "drops a column of the rope", with_last_column_dropped("q_rope")),
    kernel(DecodeCase, "gives lse in base 2", after=with_binary_lse),
    kernel(DecodeCase, "leaves a row unwritten", after=with_a_row_missing),
    kernel(DecodeCase, "writes to the cache", after=with_a_stray_write),
    line(
        DecodeCase,
        "decode",
        "drops the newest key",
        "last = min(key_range[1], ",
        "last = min(key_range[1] - 1, ",
    ),
    line(
        DecodeCase,
        "decode",
        "drops the oldest key",
        "first = max(key_range[0], ",
        "first = max(key_range[0] + 1, ",
    ),
    line(
        DecodeCase,
        "decode",
        "scale 2 % off",
        ".mul_(a.softmax_scale)",
        ".mul_(a.softmax_scale * 1.02)",
    ),
    line(
        DecodeCase,
        "decode",
        "causal bound one too far",
        "mask.interval(kv_len - last + token, kv_len)",
        "mask.interval(kv_len - last + token + 1, kv_len)",
    ),
    line(
        DecodeCase,
        "decode",
        "unmasked tail",
        "block = keys[max(low - start, 0) : max(high - start, 0)]",
        "block = keys[max(low - start, 0) :]",
    ),
    line(DecodeCase, "decode", "ignores q_scale", "if q_scale is not None:", "if False:"),
    line(
        DecodeCase,
        "decode",
        "values one column off",
        "OnlineSoftmax.of((keys @ columns).T, keys[:, :v_width])",
        "OnlineSoftmax.of((keys @ columns).T, keys[:, -v_width:])",
    ),
    line(
        DecodeCase,
        "workers",
        "leaves out an item",
        "self.work(item)",
        "self._items and self.work(item)",
    ),
    line(
        DecodeCase,
        "softmax",
        "forgets the earlier tiles",
        "self.row_sum.mul_(rescale)",
        "self.total.mul_(0.0)",
    ),
    line(DecodeCase, "softmax", "does not rescale", "self.acc.mul_(rescale[..., None])", "pass"),
    line(DecodeCase, "softmax", "ignores the sink", "if sink is not None:", "if False:"),
    line(DecodeCase, "softmax", "base-2 lse", "self.row_sum.log()", "self.row_sum.log2()"),
]
