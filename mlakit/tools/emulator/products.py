"""Matrix products of Hopper: wgmma, and the arithmetic of its tensor cores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mlakit.reference.hopper_fp8_mma import bf16_mma, fp8_mma, fp16_mma
from mlakit.tools.emulator.copies import Copies
from mlakit.tools.emulator.dtypes import Array
from mlakit.tools.emulator.engines import AsyncTensor
from mlakit.tools.emulator.faults import Fault
from mlakit.tools.emulator.layouts import thread_elements
from mlakit.tools.emulator.machine import Coroutine, Partition
from mlakit.tools.emulator.memory import MemDesc
from mlakit.tools.emulator.types import Type
from mlakit.tools.emulator.values import Divergent

E4M3 = "f8E4M3FN"
SUMS = {E4M3: fp8_mma, "bf16": bf16_mma, "f16": fp16_mma}


class Products(Copies):
    """wgmma: issued in order, complete in order, unusable until a wait."""

    def dot(
        self, p: Partition, a: Any, b: MemDesc, c: Any, uses_c: bool, is_async: bool
    ) -> Coroutine:
        """Issue D = A B, plus C if `uses_c`. A may be in registers.

        PTX, "wgmma.mma_async": operands in shared memory are read through the asynchronous proxy,
        at any time until wgmma.wait_group. Products of one partition complete in order, and may use
        the accumulator of the one before without a wait.
        """
        yield None
        queue = p.wgmma
        for each in (a, b):
            if isinstance(each, MemDesc):
                self.machine.check_read(each, p.queued(queue, is_async=True))
            elif isinstance(each, AsyncTensor):
                each.used()
        result = AsyncTensor(p.where)
        sums = None
        if self.machine.hardware_sums or (b.kind == E4M3 and not self.machine.exact_fp8):
            sums = SUMS.get(b.kind)

        def operation() -> None:
            left: Array = a.read() if isinstance(a, MemDesc) else a
            accumulator = None
            if uses_c:
                accumulator = c.value if isinstance(c, AsyncTensor) else c
            if sums is None:
                result.value = exact_product(left, b.read(), accumulator)
            else:
                result.value = hardware_product(sums, left, b.read(), accumulator)

        queue.issue(operation, p.where)
        p.results.append(result)
        if is_async:
            return result
        yield from self.drain(p, queue, 0)
        return result.value

    def dot_wait(self, p: Partition, values: list[Any], pending: int) -> Coroutine:
        """Wait until at most `pending` products are left (wgmma.wait_group).

        The result of a product that is left may be passed through a wait, which orders what comes
        later behind the wait; it stays unusable.
        """
        yield from self.drain(p, p.wgmma, pending)
        recent = list(p.results)
        left = {id(each) for each in recent[len(recent) - pending :]} if pending else set()
        return [
            each.value if isinstance(each, AsyncTensor) and id(each) not in left else each
            for each in values
        ]

    def convert(self, value: Any, source: Type, target: Type, warps: int) -> Any:
        """Return a value in another layout.

        Moving the registers of a pending product uses them. A layout that has each element where it
        was only renames it, which the compiler does without an instruction.
        """
        if isinstance(value, AsyncTensor):
            assert source.shape is not None
            assert target.shape is not None
            before = thread_elements(source.layout, source.shape, warps)
            after = thread_elements(target.layout, target.shape, warps)
            if not np.array_equal(before, after):
                value.used()
        elif isinstance(value, Divergent) and source.layout != target.layout:
            raise Fault("threads have different values of what convert_layout takes for one")
        return value


def exact_product(a: Array, b: Array, accumulator: Array | None) -> Array:
    """Return a b in float32: 16-bit products are exact, and so are their sums but for rounding."""
    product: Array = a.astype(np.float32) @ b.astype(np.float32)
    return product if accumulator is None else product + accumulator


def hardware_product(
    sums: Callable[..., torch.Tensor], a: Array, b: Array, accumulator: Array | None
) -> Array:
    """Return a b as Hopper's tensor cores accumulate it, to the bit.

    sums  of `reference.hopper_fp8_mma`, for the type of B, which is that of A in all kernels
    """
    left, right = (np.ascontiguousarray(each, np.float32) for each in (a, b.T))
    before = np.zeros((len(left), len(right)), np.float32) if accumulator is None else accumulator
    # The reference is of finite values. What is not finite spreads to its own row or column only,
    # in any order of summation: other results of the tile stay those of the tensor cores.
    tensors = [torch.from_numpy(_finite(each)) for each in (left, right, before)]
    result: Array = sums(*tensors).numpy()
    if all(np.isfinite(each).all() for each in (left, right, before)):
        return result
    exact = exact_product(a, b, accumulator)
    return np.where(np.isfinite(exact), result, exact)


def _finite(values: Array) -> Array:
    return np.where(np.isfinite(values), values, 0).astype(np.float32)
