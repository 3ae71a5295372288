"""Operations on global memory: loads, stores and atomics of threads."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from mlakit.tools.emulator import dtypes
from mlakit.tools.emulator.clusters import held_by, written_by
from mlakit.tools.emulator.dtypes import Array
from mlakit.tools.emulator.engines import AsyncTensor
from mlakit.tools.emulator.global_races import GlobalAccess
from mlakit.tools.emulator.ir import Unsupported
from mlakit.tools.emulator.layouts import thread_elements
from mlakit.tools.emulator.machine import Machine, Partition
from mlakit.tools.emulator.types import Type
from mlakit.tools.emulator.values import Divergent, scalar

_ATOMICS: dict[str, Any] = {
    "add": lambda a, b: a + b,
    "fadd": lambda a, b: a + b,
    "max": max,
    "min": min,
    "umax": max,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "exch": lambda a, b: b,
}


class GlobalOperations:
    """Loads, stores and atomics. `p` and `type`, of the pointer, say which warp has an element."""

    machine: Machine

    def load(
        self,
        pointer: Any,
        mask: Any,
        other: Any,
        kind: str,
        p: Partition | None = None,
        type: Type | None = None,
    ) -> Any:
        """Load a scalar or a tensor."""
        if isinstance(pointer, Divergent) or isinstance(mask, Divergent):
            some = pointer if isinstance(pointer, Divergent) else mask
            each = [None if one is None else some.lift(one) for one in (pointer, mask, other)]
            return Divergent(self.load(each[0], each[1], each[2], kind), some.type)
        memory = self.machine.memory
        if p is not None and type is not None and self.machine.num_ctas > 1 and type.is_tensor:
            mask = held_by(type, p.cta) if mask is None else held_by(type, p.cta) & mask
        if p is not None and self.machine.checks:
            self._check(p, pointer, mask, kind, type, is_write=False)
        if not isinstance(pointer, np.ndarray):
            if mask is not None and not mask:
                return other
            return scalar(memory.load(np.asarray([pointer]), kind)[0], kind)
        if mask is None:
            return memory.load(pointer, kind)
        zeros = np.zeros(pointer.shape, dtypes.value_dtype(kind))
        out = zeros if other is None else np.array(other)
        if mask.any():
            out[mask] = memory.load(pointer[mask], kind)
        return out

    def store(
        self,
        pointer: Any,
        value: Any,
        mask: Any,
        kind: str,
        p: Partition | None = None,
        type: Type | None = None,
    ) -> None:
        """Store a scalar or a tensor."""
        if isinstance(value, AsyncTensor):
            value.used()
        memory = self.machine.memory
        if p is not None and type is not None and self.machine.num_ctas > 1:
            own = written_by(type, p.cta) if type.is_tensor else p.cta == 0
            mask = own if mask is None else own & mask
        if p is not None and self.machine.checks:
            self._check(p, pointer, mask, kind, type, is_write=True)
        if not isinstance(pointer, np.ndarray):
            if mask is None or mask:
                memory.store(np.asarray([pointer]), np.asarray([value]), kind)
        elif mask is None:
            memory.store(pointer, value, kind)
        elif mask.any():
            memory.store(pointer[mask], np.asarray(value)[mask], kind)

    def atomic(self, operation: str, pointer: Any, value: Any, mask: Any, kind: str) -> Any:
        """Combine values with memory one after the other; return what was there."""
        if self.machine.num_ctas > 1:
            raise Unsupported("an atomic operation of a cluster")
        is_scalar = not isinstance(pointer, np.ndarray)
        at = np.atleast_1d(np.asarray(pointer)).ravel()
        values = np.broadcast_to(np.asarray(value), np.shape(pointer)).ravel()
        chosen: Array = np.ones(at.shape, np.bool_)
        if mask is not None:
            chosen = np.broadcast_to(mask, np.shape(pointer)).ravel()
        old: Array = np.zeros(at.shape, dtypes.value_dtype(kind))
        memory, combine = self.machine.memory, _ATOMICS[operation]
        for i in np.flatnonzero(chosen):
            old[i] = memory.load(at[i : i + 1], kind)[0]
            memory.store(at[i : i + 1], np.asarray([combine(old[i], values[i])]), kind)
        return scalar(old[0], kind) if is_scalar else old.reshape(np.shape(pointer))

    def _check(
        self, p: Partition, pointer: Any, mask: Any, kind: str, type: Type | None, *, is_write: bool
    ) -> None:
        """Check an access of threads by the warps that make it.

        Triton stores an element once, from the first warp that holds it, and loads it in all.
        """
        races = self.machine.global_races
        if not is_write and not races.has_writes:
            return
        addresses = np.atleast_1d(np.asarray(pointer)).ravel()
        index = np.arange(addresses.size)
        warps: Array | None = None
        if type is None or not type.is_tensor:
            count = 1 if is_write else p.num_warps
            index, warps = np.zeros(count, np.int64), np.arange(count)
        elif type.layout and self.machine.num_ctas == 1:
            assert type.shape is not None
            index, warps = _holders(type.layout, type.shape, p.num_warps, is_write)
        if mask is not None:
            chosen = np.broadcast_to(np.asarray(mask).ravel(), addresses.shape)[index]
            index = index[chosen]
            warps = None if warps is None else warps[chosen]
        access = GlobalAccess(
            addresses[index], dtypes.element_size(kind), warps, p.agent, p.tick(), p.clock,
            p.met, p.where,
        )  # fmt: skip
        if is_write:
            races.write(access)
        else:
            races.read(access)


@lru_cache(maxsize=1024)
def _holders(
    layout: str, shape: tuple[int, ...], num_warps: int, is_write: bool
) -> tuple[Array, Array]:
    """Return the pairs of an element and a warp that holds it; for writes the first warp alone."""
    places = thread_elements(layout, shape, num_warps)
    warps = np.broadcast_to(np.arange(places.shape[0])[:, None, None], places.shape)
    pairs = np.unique(places.ravel().astype(np.int64) * places.shape[0] + warps.ravel())
    index, warp = pairs // places.shape[0], pairs % places.shape[0]
    if is_write:
        index, first = np.unique(index, return_index=True)
        warp = warp[first]
    return index, warp
