"""Checks of the slots (physical row indices) that a caller passes."""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.dispatch.checks import Dims

SKIPPED = -1
"""The slot of a row that is not written; engines pad their slot mappings with it."""


def check_slots(dims: Dims, slots: object, payload: Tensor, num_slots: int) -> None:
    """Require slots to be an integer tensor on the device of the layer's `payload`."""
    dims.same_device("the cache", payload)
    tensor = dims.tensor("slots", slots)
    dims.dtype("slots", tensor, torch.int32, torch.int64)
    dims.same_device("slots", tensor)
    empty = tensor.numel() == 0
    dims.require(
        num_slots > 0 or empty, "slots", "be empty for a pool without pages", tuple(tensor.shape)
    )


def check_rows_for_slots(dims: Dims, slots: Tensor, rows: object, width: int) -> None:
    """Require one row of `width` floats per slot; a single row is not broadcast."""
    tensor = dims.tensor("rows", rows)
    if not tensor.is_floating_point():
        got = str(tensor.dtype).removeprefix("torch.")
        raise TypeError(f"{dims.op}: rows must be of a floating-point dtype, got {got}")
    expected = (*slots.shape, width)
    shape = tuple(tensor.shape)
    dims.require(shape == expected, "rows", f"have shape {expected}, one row per slot", shape)
    dims.same_device("rows", tensor)


def check_slot_values(dims: Dims, slots: Tensor, num_slots: int, *, minimum: int) -> None:
    """Require every slot to be in [minimum, num_slots); `minimum` is 0 or `SKIPPED`.

    Reads the values: call it only if `values_visible(slots)`.
    """
    if slots.numel() == 0:
        return
    smallest, largest = slots.aminmax()
    if minimum <= int(smallest) and int(largest) < num_slots:
        return
    place = tuple(((slots < minimum) | (slots >= num_slots)).nonzero()[0].tolist())
    name = f"slots[{', '.join(map(str, place))}]" if place else "slots"
    skips = f" or {SKIPPED}, which is skipped" if minimum == SKIPPED else ""
    dims.fail(name, f"be in [0, {num_slots}){skips}", int(slots[place]))


def check_slots_unique(dims: Dims, slots: Tensor) -> None:
    """Require that no slot is written twice: the order of the threads would decide the result."""
    if len(slots) < 2:
        return
    ordered = slots.sort().values
    duplicates = ordered[1:][(ordered[1:] == ordered[:-1]) & (ordered[1:] != SKIPPED)]
    if len(duplicates):
        places = (slots == duplicates[0]).nonzero().flatten().tolist()
        where = f"slots[{places[0]}] and slots[{places[1]}]"
        dims.fail("slots", "be unique", f"{int(duplicates[0])} in {where}")
