"""Checks of slots, the physical addresses of cache rows, that a caller hands over."""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.checks import Dims

SKIPPED = -1
"""The slot of a row that is not to be written: what engines pad their slot mappings with."""


def check_slots(dims: Dims, slots: object, payload: Tensor, num_slots: int) -> None:
    """Slots of a layer are an integer tensor on the device of its `payload`."""
    dims.same_device("the cache", payload)
    tensor = dims.tensor("slots", slots)
    dims.dtype("slots", tensor, torch.int32, torch.int64)
    dims.same_device("slots", tensor)
    empty = tensor.numel() == 0
    dims.require(
        num_slots > 0 or empty, "slots", "be empty for a pool without pages", tuple(tensor.shape)
    )


def check_rows_for(dims: Dims, slots: Tensor, rows: object, width: int) -> None:
    """There is one row of `width` floats for each slot: a row alone would be written to all."""
    tensor = dims.tensor("rows", rows)
    if not tensor.is_floating_point():
        got = str(tensor.dtype).removeprefix("torch.")
        raise TypeError(f"{dims.op}: rows must be of a floating-point dtype, got {got}")
    expected = (*slots.shape, width)
    shape = tuple(tensor.shape)
    dims.require(shape == expected, "rows", f"have shape {expected}, one row per slot", shape)
    dims.same_device("rows", tensor)


def check_slot_values(dims: Dims, slots: Tensor, num_slots: int, *, minimum: int) -> None:
    """Every slot is below `num_slots` and at least `minimum`: 0, or `SKIPPED` where that is one.

    Looks at the values: for slots that `values_visible` lets be seen.
    """
    if slots.numel() == 0:
        return
    least, most = slots.aminmax()
    if minimum <= int(least) and int(most) < num_slots:
        return
    place = tuple(((slots < minimum) | (slots >= num_slots)).nonzero()[0].tolist())
    name = f"slots[{', '.join(map(str, place))}]" if place else "slots"
    skips = f" or {SKIPPED}, which is skipped" if minimum == SKIPPED else ""
    dims.fail(name, f"be in [0, {num_slots}){skips}", int(slots[place]))


def check_slots_differ(dims: Dims, slots: Tensor) -> None:
    """No row is written twice: which one stays would be for the threads to decide."""
    if len(slots) < 2:
        return
    ordered = slots.sort().values
    again = ordered[1:][(ordered[1:] == ordered[:-1]) & (ordered[1:] != SKIPPED)]
    if len(again):
        places = (slots == again[0]).nonzero().flatten().tolist()
        where = f"slots[{places[0]}] and slots[{places[1]}]"
        dims.fail("slots", "name every row once", f"{int(again[0])} in {where}")
