"""Changes of kernels by name of argument: what a kernel is given, or what it gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import e, log2

import torch

from mlakit.model.masks import CAUSAL, NULL, Mask
from tests.kernel_launchers import Arguments

Before = Callable[[Arguments], Arguments]
After = Callable[[Arguments], object]


class LooseMask(Mask):
    """Shows every query one key too many."""

    def interval(self, position, num_keys):
        first, last = super().interval(position, num_keys)
        return first, min(last + 1, num_keys)

    def visible(self, positions, keys):
        return super().visible(positions, keys) | (keys[None, :] == positions[:, None] + 1)


def keyless(a: Arguments) -> Arguments:
    return {"kv_lens": (a["kv_lens"] - 1).clamp_min(0)}


def rescaled(a: Arguments) -> Arguments:
    return {"softmax_scale": 1.02 * a["softmax_scale"]}


def loosened(a: Arguments) -> Arguments:
    return {"mask": LooseMask(a["mask"].kind, a["mask"].window)}


def unmasked(a: Arguments) -> Arguments:
    return {"mask": NULL}


def unwindowed(a: Arguments) -> Arguments:
    return {"mask": CAUSAL if a["mask"].is_causal else a["mask"]}


def without(name: str) -> Before:
    return lambda a: {name: None}


def with_pages_swapped(a: Arguments) -> Arguments:
    """The first and the last entry of every request that name something, exchanged."""
    is_flat = isinstance(a["page_table"], tuple)
    entries = (a["page_table"][1] if is_flat else a["page_table"]).clone()
    limit = a["layer"].num_slots if is_flat else len(a["layer"].payload)
    for request in entries[None] if is_flat else entries:
        used = ((request >= 0) & (request < limit)).nonzero().flatten()
        request[used[:1]], request[used[-1:]] = request[used[-1:]], request[used[:1]]
    return {"page_table": (a["page_table"][0], entries) if is_flat else entries}


def by_request(change: Before) -> Before:
    """Of an append by page table and lengths; others stay as they are."""
    return lambda a: change(a) if a["slots"] is None else {}


def by_slot(change: Before) -> Before:
    """Of an append by slots and positions."""
    return lambda a: {} if a["slots"] is None else change(a)


def plus_one(a: Arguments, name: str) -> Arguments:
    return {name: a[name] + 1}


def with_next_slot(a: Arguments) -> Arguments:
    later = (a["slots"] + 1) % a["layer"].num_slots
    return {"slots": torch.where(a["slots"] < 0, a["slots"], later)}


def with_next_rank(a: Arguments) -> Arguments:
    shard = a["shard"]
    return {"shard": shard._replace(rank=(shard.rank + 1) % shard.world)}


def with_padding_stored(a: Arguments) -> Arguments:
    return {"slots": a["slots"].clamp_min(0)}


def with_any_position(a: Arguments) -> Arguments:
    return {"positions": a["positions"].clamp(0, max(len(a["freqs"]) - 1, 0))}


def with_binary_lse(a: Arguments) -> None:
    a["lse"].mul_(log2(e))


def with_a_row_missing(a: Arguments) -> None:
    a["out"][-1:] = 0


def averaged(a: Arguments) -> Arguments:
    return {"softmax_scale": 0.0}


def with_a_stray_write(a: Arguments) -> None:
    a["layer"].payload[-1, -1].view(torch.uint8)[-1] ^= 1


def with_overflow(name: str) -> After:
    """e4m3 that goes to NaN where it should saturate."""

    def overflow(a: Arguments) -> None:
        if a[name].dtype == torch.float8_e4m3fn:
            stored = a[name].view(torch.uint8)
            stored[stored & 0x7F == 0x7E] |= 1

    return overflow


def with_last_column_dropped(name: str) -> Before:
    def drop(a: Arguments) -> Arguments:
        changed = a[name].clone()
        changed[..., -1:] = 0
        return {name: changed}

    return drop


def apart_with_column_dropped(a: Arguments) -> Arguments:
    return {} if a["q_rope"] is None else with_last_column_dropped("q_rope")(a)


def scaled(name: str, factor: float) -> Before:
    return lambda a: {name: (a[name].float() * factor).to(a[name].dtype)}


def rolled(name: str, axis: int) -> Before:
    return lambda a: {name: a[name].roll(1, axis)}


def with_unit_scale(a: Arguments) -> Arguments:
    return {"layer": replace(a["layer"], tensor_scale=1.0)}


def with_negative_rows_wrapped(a: Arguments) -> Arguments:
    num_slots = a["layer"].num_slots
    rows = a["rows"]
    return {"rows": torch.where((rows < 0) & (rows >= -num_slots), rows + num_slots, rows)}


def with_ties_reversed(a: Arguments) -> None:
    columns = a["logits"].shape[1]
    if a["row_starts"] is None and a["row_ends"] is None and columns:
        order = a["logits"].flip(1).sort(dim=1, descending=True, stable=True)
        best = (columns - 1 - order.indices).masked_fill(order.values == -torch.inf, -1)
        kept = min(columns, a["out"].shape[1])
        a["out"][:, :kept] = best[:, :kept].int()


def with_equal_weights(a: Arguments) -> Arguments:
    return {"lses": [lse.clamp(max=0.0) for lse in a["lses"]]}


def with_empty_parts_read(a: Arguments) -> Arguments:
    return {"lses": [lse.clamp(min=-1e30) for lse in a["lses"]]}
