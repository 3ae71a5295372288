"""What operations do: the functions that generated code calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mlakit.tools.emulator import dtypes, ptx
from mlakit.tools.emulator.layouts import (
    LANE_BYTES,
    cta_split,
    tensor_memory_columns,
    thread_elements,
)
from mlakit.tools.emulator.machine import (
    Allocation,
    AsyncTensor,
    Barrier,
    Coroutine,
    Fault,
    Machine,
    MemDesc,
    NamedBarrier,
    Operation,
    Partition,
    UseBeforeWait,
)
from mlakit.tools.emulator.types import Type

np.seterr(all="ignore")


class Divergent(np.lib.mixins.NDArrayOperatorsMixin):
    """Elements whose copies in different threads differ: made by inline assembly, on purpose.

    data  values [warps, lanes, registers]; elementwise operations are done per thread
    """

    def __init__(self, data: np.ndarray, type: Type) -> None:
        self.data, self.type = data, type

    def lift(self, other: Any) -> Any:
        """A tensor of the same shape and layout, per thread."""
        if isinstance(other, Divergent):
            return other.data
        if isinstance(other, np.ndarray) and other.ndim:
            places = thread_elements(self.type.layout, self.type.shape, self.data.shape[0])
            return np.ascontiguousarray(other).reshape(-1)[places]
        return other

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **_: Any) -> Divergent:
        if method != "__call__":
            raise Fault("threads have different values of what a reduction takes for one")
        return Divergent(ufunc(*map(self.lift, inputs)), self.type)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function is np.where:
            return Divergent(np.where(*map(self.lift, args)), self.type)
        raise Fault(f"threads have different values of what {function.__name__} takes for one")

    def astype(self, dtype: Any) -> Divergent:
        return Divergent(self.data.astype(dtype), self.type)


def reshape_last(value: Any, rank: int, shape: tuple[int, ...], is_broadcast: bool) -> np.ndarray:
    """Another shape of the last `rank` dimensions."""
    value = np.asarray(value)
    first = value.shape[: value.ndim - rank]
    if is_broadcast:
        own = value.shape[value.ndim - rank :] or (1,) * len(shape)
        return np.broadcast_to(value.reshape(first + own), first + shape)
    return value.reshape(first + shape)


def transpose_last(value: np.ndarray, order: list[int]) -> np.ndarray:
    first = list(range(value.ndim - len(order)))
    return np.transpose(value, first + [value.ndim + each for each in order])


def fma(a: Any, b: Any, c: Any) -> Any:
    """One rounding."""
    return (np.asarray(a, np.float64) * b + c).astype(np.float32)


def astype(value: Any, dtype: Any) -> Any:
    return value.astype(dtype) if isinstance(value, Divergent) else np.asarray(value).astype(dtype)


def wrap(value: int, bits: int) -> int:
    half = 1 << (bits - 1)
    return ((int(value) + half) & ((1 << bits) - 1)) - half


def trunc_div(a: Any, b: Any) -> Any:
    """Division of integers towards zero."""
    if isinstance(a, np.ndarray):
        quotient = np.abs(a.astype(np.int64)) // np.maximum(np.abs(b.astype(np.int64)), 1)
        return np.where((a < 0) != (b < 0), -quotient, quotient).astype(a.dtype)
    quotient = abs(a) // abs(b)
    return -quotient if (a < 0) != (b < 0) else quotient


def trunc_rem(a: Any, b: Any) -> Any:
    return (
        (a - trunc_div(a, b) * b).astype(a.dtype)
        if isinstance(a, np.ndarray)
        else a - trunc_div(a, b) * b
    )


def unsigned(value: Any, kind: str) -> Any:
    if isinstance(value, np.ndarray):
        return value.view(dtypes.UNSIGNED[kind])
    return int(value) & ((1 << dtypes.BITS[kind]) - 1)


def signed(value: Any, kind: str) -> Any:
    if isinstance(value, np.ndarray):
        return value.view(dtypes.INTS[kind])
    return wrap(value, dtypes.BITS[kind])


def scalar(value: Any, kind: str) -> Any:
    if kind == "i1":
        return bool(value)
    if kind[0] == "i" or kind == "ptr":
        return int(value)
    return np.float32(value)


def bitcast(value: Any, source: str, target: str, is_tensor: bool) -> Any:
    if source == target or "ptr" in (source, target):
        return value
    if isinstance(value, Divergent):
        return Divergent(bitcast(value.data, source, target, True), value.type)
    array = np.asarray(value, dtypes.value_dtype(source))
    result = dtypes.from_bits(dtypes.to_bits(np.atleast_1d(array), source), target)
    return result.reshape(array.shape) if is_tensor else scalar(result[0], target)


def reduce(values: tuple[np.ndarray, ...], axis: int, combine: Callable) -> tuple[np.ndarray, ...]:
    """By halves, as shuffles do it."""
    values = tuple(np.moveaxis(each, axis, 0) for each in values)
    while values[0].shape[0] > 1:
        half = values[0].shape[0] // 2
        rest = tuple(each[2 * half :] for each in values)
        values = combine(
            *(each[:half] for each in values), *(each[half : 2 * half] for each in values)
        )
        if rest[0].shape[0]:
            values = tuple(
                np.concatenate([each, more]) for each, more in zip(values, rest, strict=True)
            )
    return tuple(each[0] for each in values)


def scan(values: tuple[np.ndarray, ...], axis: int, is_reverse: bool, combine: Callable) -> tuple:
    values = tuple(np.moveaxis(each, axis, 0) for each in values)
    if is_reverse:
        values = tuple(each[::-1] for each in values)
    step, count = 1, values[0].shape[0]
    while step < count:
        later = combine(*(each[:-step] for each in values), *(each[step:] for each in values))
        values = tuple(
            np.concatenate([each[:step], new]) for each, new in zip(values, later, strict=True)
        )
        step *= 2
    if is_reverse:
        values = tuple(each[::-1] for each in values)
    return tuple(np.moveaxis(each, 0, axis) for each in values)


class Runtime:
    """Operations on a machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.memory = machine.memory
        self.counts: dict[str, int] = {}

    # -------------------------------------------------------------- global memory

    def load(self, pointer: Any, mask: Any, other: Any, kind: str) -> Any:
        if isinstance(pointer, Divergent) or isinstance(mask, Divergent):
            some = pointer if isinstance(pointer, Divergent) else mask
            each = [None if one is None else some.lift(one) for one in (pointer, mask, other)]
            return Divergent(self.load(each[0], each[1], each[2], kind), some.type)
        if not isinstance(pointer, np.ndarray):
            if mask is not None and not mask:
                return other
            return scalar(self.memory.load(np.asarray([pointer]), kind)[0], kind)
        if mask is None:
            return self.memory.load(pointer, kind)
        out = (
            np.zeros(pointer.shape, dtypes.value_dtype(kind)) if other is None else np.array(other)
        )
        if mask.any():
            out[mask] = self.memory.load(pointer[mask], kind)
        return out

    def store(self, pointer: Any, value: Any, mask: Any, kind: str) -> None:
        if isinstance(value, AsyncTensor):
            value.used()
        if not isinstance(pointer, np.ndarray):
            if mask is None or mask:
                self.memory.store(np.asarray([pointer]), np.asarray([value]), kind)
        elif mask is None:
            self.memory.store(pointer, value, kind)
        elif mask.any():
            self.memory.store(pointer[mask], np.asarray(value)[mask], kind)

    def atomic(self, operation: str, pointer: Any, value: Any, mask: Any, kind: str) -> Any:
        is_scalar = not isinstance(pointer, np.ndarray)
        at = np.atleast_1d(np.asarray(pointer)).ravel()
        values = np.broadcast_to(np.asarray(value), np.shape(pointer)).ravel()
        chosen = (
            np.ones(at.shape, bool)
            if mask is None
            else np.broadcast_to(mask, np.shape(pointer)).ravel()
        )
        old = np.zeros(at.shape, dtypes.value_dtype(kind))
        pick = {
            "add": lambda a, b: a + b,
            "fadd": lambda a, b: a + b,
            "max": max,
            "min": min,
            "umax": max,
            "and": lambda a, b: a & b,
            "or": lambda a, b: a | b,
            "exch": lambda a, b: b,
        }[operation]
        for i in np.flatnonzero(chosen):
            old[i] = self.memory.load(at[i : i + 1], kind)[0]
            self.memory.store(at[i : i + 1], np.asarray([pick(old[i], values[i])]), kind)
        return scalar(old[0], kind) if is_scalar else old.reshape(np.shape(pointer))

    # -------------------------------------------------------------- shared memory

    def allocate(self, p: Partition, type: Type, name: str, value: Any = None) -> MemDesc:
        size = int(np.prod(type.shape)) * dtypes.element_size(type.pointee)
        tile = MemDesc(
            Allocation(size, name, p.where),
            0,
            type.shape,
            type.pointee,
            type.layout,
            type.alloc,
            (0,) * len(type.shape),
        )
        if value is not None:
            self.machine.check_write(p, tile, p.agent, p.tick(), is_async=False)
            tile.write(value)
        return tile

    def index(self, tile: MemDesc, at: int, type: Type) -> MemDesc:
        size = int(np.prod(type.shape)) * dtypes.element_size(type.pointee)
        if "tensor_memory" in type.space:
            size = tensor_memory_columns(type.layout, type.shape, dtypes.BITS[type.pointee])
        if not 0 <= at < tile.shape[0]:
            raise Fault(f"index {at} into {tile.shape} of {tile.allocation.name}")
        return MemDesc(
            tile.allocation,
            tile.base + at * size,
            type.shape,
            type.pointee,
            type.layout,
            type.alloc,
            (0,) * len(type.shape),
        )

    def subslice(self, tile: MemDesc, at: list[int], type: Type) -> MemDesc:
        first = tuple(a + b for a, b in zip(tile.first, at, strict=True))
        return MemDesc(
            tile.allocation, tile.base, type.shape, type.pointee, type.layout, tile.alloc, first
        )

    def transpose(self, tile: MemDesc, order: list[int], type: Type) -> MemDesc:
        return MemDesc(
            tile.allocation,
            tile.base,
            type.shape,
            type.pointee,
            type.layout,
            tuple(tile.alloc[i] for i in order),
            tuple(tile.first[i] for i in order),
        )

    def reinterpret(self, tile: MemDesc, type: Type) -> MemDesc:
        base = tile.base
        if any(tile.first):
            base += int(
                MemDesc(
                    tile.allocation,
                    0,
                    (1,) * len(tile.shape),
                    tile.kind,
                    tile.layout,
                    tile.alloc,
                    tile.first,
                )
                .index()
                .flat[0]
            ) * dtypes.element_size(tile.kind)
        return MemDesc(
            tile.allocation,
            base,
            type.shape,
            type.pointee,
            type.layout,
            type.shape,
            (0,) * len(type.shape),
        )

    def local_load(self, p: Partition, tile: MemDesc) -> Coroutine:
        yield
        self.machine.check_read(p, tile, p.agent, p.tick(), is_async=False)
        return tile.read()

    def local_store(self, p: Partition, value: Any, tile: MemDesc) -> Coroutine:
        if isinstance(value, AsyncTensor):
            value.used()
        yield
        self.machine.check_write(p, tile, p.agent, p.tick(), is_async=False)
        tile.write(value)

    # -------------------------------------------------------------- barriers

    def init_barrier(self, p: Partition, tile: MemDesc, count: int) -> None:
        name = f"{tile.allocation.name}[{tile.base // 8}]"
        barrier = Barrier(count, name, self.machine.new_agent(f"TMA loads of {name}"))
        tile.allocation.barriers[tile.base] = barrier
        barrier.clock.join(p.clock)

    def barrier(self, tile: MemDesc) -> Barrier:
        barrier = tile.allocation.barriers.get(tile.base)
        if barrier is None:
            raise Fault(f"barrier {tile.allocation.name}[{tile.base // 8}] is not initialised")
        return barrier

    def arrive(self, p: Partition, tile: MemDesc, count: int, is_asked: bool) -> Coroutine:
        yield
        if is_asked:
            barrier = self.barrier(tile)
            barrier.clock.join(p.release())
            barrier.arrive(count)

    def expect(self, p: Partition, tile: MemDesc, size: int, is_asked: bool) -> Coroutine:
        yield
        if is_asked:
            barrier = self.barrier(tile)
            barrier.clock.join(p.release())
            barrier.expect(size)

    def wait(self, p: Partition, tile: MemDesc, phase: int, is_asked: bool) -> Coroutine:
        yield
        if is_asked:
            barrier = self.barrier(tile)
            p.reason = f"parity {int(phase) & 1} of {barrier.name}"
            yield _passes(p, barrier, int(phase))
            p.clock.join(barrier.complete)

    def fence(self, p: Partition) -> None:
        p.tick()
        np.maximum(p.clock.fenced, p.clock.seen, out=p.clock.fenced)

    def named(
        self, p: Partition, kind: str, number: int, threads: int, is_asked: bool
    ) -> Coroutine:
        yield
        if not is_asked:
            return
        barrier = self.machine.named.setdefault(number, NamedBarrier())
        generation = barrier.arrive(p.num_warps * 32, threads, p.release())
        if kind == "sync":
            p.reason = f"named barrier {number}"
            yield lambda: barrier.generation > generation
            p.clock.join(barrier.complete)

    # -------------------------------------------------------------- asynchronous copies

    def tma_load(
        self,
        p: Partition,
        descriptor: Any,
        at: list[int],
        tile: MemDesc,
        barrier: MemDesc,
        is_asked: bool,
        rows: np.ndarray | None = None,
    ) -> Coroutine:
        yield
        if not is_asked:
            return
        on = self.barrier(barrier)
        self.machine.check_write(p, tile, on.agent, on.phase + 1, is_async=True)
        self.machine.issued[on.agent] = on.phase + 1

        def operation() -> None:
            tile.write(descriptor.tile(self.memory, at, rows).reshape(tile.shape))
            on.clock.seen[on.agent] = max(on.clock.seen[on.agent], on.phase + 1)
            on.transfer(tile.size // int(np.prod(cta_split(tile.layout))))  # bytes of each CTA

        self.machine.loads.append(Operation(p.where, operation))

    def tma_store(self, p: Partition, descriptor: Any, at: list[int], tile: MemDesc) -> Coroutine:
        yield
        self.machine.check_read(p, tile, p.stores.agent, p.stores.issued + 1, is_async=True)
        p.stores.issue(lambda: descriptor.put(self.memory, at, tile.read()), p.where)

    def drain(self, p: Partition, queue: Any, pending: int) -> Coroutine:
        """Wait until no more than `pending` operations of a queue are left."""
        goal = queue.issued - pending
        p.reason = queue.name
        yield lambda: queue.done >= goal
        p.clock.seen[queue.agent] = max(p.clock.seen[queue.agent], goal)

    def copy_async(
        self, p: Partition, pointer: np.ndarray, tile: MemDesc, mask: Any, other: Any
    ) -> Coroutine:
        yield
        queue = p.copies
        self.machine.check_write(p, tile, queue.agent, queue.issued + 1, is_async=False)

        def operation() -> None:
            tile.write(self.load(pointer, mask, other, tile.kind))

        queue.issue(operation, p.where)

    def copy_arrive(self, p: Partition, barrier: MemDesc) -> Coroutine:
        """All copies of a thread so far, then an arrival per thread.

        It follows what the issuer waited for, and does not publish what the issuer stored itself.
        """
        yield
        on, queue = self.barrier(barrier), p.copies
        number = queue.issued + 1
        p.tick()
        issued = p.clock.copy()
        for each in (issued.seen, issued.fenced):
            each[p.agent] = min(each[p.agent], p.released)

        def operation() -> None:
            on.clock.join(issued)
            on.clock.seen[queue.agent] = max(on.clock.seen[queue.agent], number)
            on.arrive(p.num_warps * 32)

        queue.issue(operation, p.where, is_arrival=True)

    def commit_group(self, p: Partition) -> None:
        p.groups.append(p.copies.issued)

    def wait_groups(self, p: Partition, pending: int) -> Coroutine:
        if len(p.groups) > pending:
            goal = p.groups[len(p.groups) - pending - 1]
            yield from self.drain(p, p.copies, p.copies.issued - goal)

    # -------------------------------------------------------------- wgmma

    def operand(self, value: Any) -> np.ndarray:
        return value.read() if isinstance(value, MemDesc) else value

    def dot(
        self, p: Partition, a: Any, b: MemDesc, c: Any, uses_c: bool, is_async: bool
    ) -> Coroutine:
        yield
        queue = p.wgmma
        for each in (a, b):
            if isinstance(each, MemDesc):
                self.machine.check_read(p, each, queue.agent, queue.issued + 1, is_async=True)
            elif isinstance(each, AsyncTensor):
                each.used()
        result = AsyncTensor(p.where)

        def operation() -> None:
            product = self.operand(a).astype(np.float32) @ self.operand(b).astype(np.float32)
            if uses_c:
                product = product + (c.value if isinstance(c, AsyncTensor) else c)
            result.value = product

        queue.issue(operation, p.where)
        p.results.append(result)
        if is_async:
            return result
        yield from self.drain(p, queue, 0)
        return result.value

    def dot_wait(self, p: Partition, values: list[Any], pending: int) -> Coroutine:
        yield from self.drain(p, p.wgmma, pending)
        # what stays pending may be passed through a wait, to order it: it remains unusable
        left = {id(each) for each in list(p.results)[len(p.results) - pending :]} if pending else ()
        return [
            each.value if isinstance(each, AsyncTensor) and id(each) not in left else each
            for each in values
        ]

    def convert(self, value: Any, source: Type, target: Type, warps: int) -> Any:
        """Another layout. That of a pending wgmma's result may change in name only."""
        if isinstance(value, AsyncTensor):
            places = [thread_elements(each.layout, each.shape, warps) for each in (source, target)]
            if not np.array_equal(*places):
                value.used()
        elif isinstance(value, Divergent) and source.layout != target.layout:
            raise Fault("threads have different values of what convert_layout takes for one")
        return value

    # -------------------------------------------------------------- tcgen05 and tensor memory

    def allocate_tensor_memory(
        self, p: Partition, type: Type, name: str, value: Any = None
    ) -> MemDesc:
        columns = tensor_memory_columns(type.layout, type.shape, dtypes.BITS[type.pointee]) // 4
        self.machine.tensor_columns += columns
        if self.machine.tensor_columns > 512:
            raise Fault(f"{self.machine.tensor_columns} columns of tensor memory: there are 512")
        tile = MemDesc(
            Allocation(128 * LANE_BYTES * int(np.prod(cta_split(type.layout))), name, p.where),
            0,
            type.shape,
            type.pointee,
            type.layout,
            type.alloc,
            (0,) * len(type.shape),
        )
        if value is not None:
            self.machine.check_write(p, tile, p.agent, p.tick(), is_async=False)
            tile.write(value)
        return tile

    def tmem_load(self, p: Partition, tile: MemDesc) -> Coroutine:
        yield
        self.machine.check_read(p, tile, p.agent, p.tick(), is_async=False)
        return tile.read()

    def tmem_store(self, p: Partition, value: Any, tile: MemDesc, is_asked: bool) -> Coroutine:
        yield
        if is_asked:
            self.machine.check_write(p, tile, p.agent, p.tick(), is_async=False)
            tile.write(value)

    def mma(
        self,
        p: Partition,
        a: MemDesc,
        b: MemDesc,
        d: MemDesc,
        uses_d: bool,
        is_asked: bool,
        barriers: list[tuple[MemDesc, bool]],
        in_tensor_memory: bool,
    ) -> Coroutine:
        yield
        if not is_asked:
            return
        queue, number = p.tensor, p.tensor.issued + 1
        check = self.machine
        check.check_read(p, a, queue.agent, number, is_async=not in_tensor_memory, in_order=True)
        check.check_read(p, b, queue.agent, number, is_async=True, in_order=True)
        if uses_d:
            check.check_read(p, d, queue.agent, number, is_async=False, in_order=True)
        check.check_write(p, d, queue.agent, number, is_async=False, in_order=True)

        def operation() -> None:
            product = a.read().astype(np.float32) @ b.read().astype(np.float32)
            d.write(product + d.read() if uses_d else product)

        queue.issue(operation, p.where)
        for barrier, is_on in barriers:
            if is_on:
                self.commit(p, barrier)

    def commit(self, p: Partition, barrier: MemDesc) -> None:
        """An arrival when all operations so far are complete."""
        on, queue = self.barrier(barrier), p.tensor
        number = queue.issued
        p.tick()
        issued = p.clock.copy()

        def operation() -> None:
            on.clock.join(issued)
            on.clock.seen[queue.agent] = max(on.clock.seen[queue.agent], number)
            on.arrive()

        queue.issue(operation, p.where, is_arrival=True)

    def copy_to_tensor_memory(self, p: Partition, source: MemDesc, target: MemDesc) -> Coroutine:
        """tcgen05.cp of plain tiles; scales have layouts of their own."""
        yield
        queue, number = p.tensor, p.tensor.issued + 1
        self.machine.check_read(p, source, queue.agent, number, is_async=True, in_order=True)
        self.machine.check_write(p, target, queue.agent, number, is_async=False, in_order=True)
        queue.issue(lambda: target.write(source.read().reshape(target.shape)), p.where)

    # -------------------------------------------------------------- partitions

    def fork(self, p: Partition, bodies: list[Callable], warps: list[int]) -> list[Partition]:
        workers = []
        p.tick()
        for i, (body, num_warps) in enumerate(zip(bodies, warps, strict=True)):
            worker = Partition(self.machine, f"partition{i}", num_warps)
            worker.clock.join(p.clock)
            worker.coroutine = body(worker)
            workers.append(worker)
        self.machine.partitions += workers
        return workers

    def join(self, p: Partition, workers: list[Partition]) -> Coroutine:
        p.reason = "the other partitions"
        yield lambda: all(each.coroutine is None for each in workers)
        for each in workers:
            p.clock.join(each.clock)

    # -------------------------------------------------------------- inline assembly

    def asm(
        self,
        p: Partition,
        text: str,
        constraints: str,
        pack: int,
        values: list[Any],
        types: list[Type],
        results: list[Type],
    ) -> Any:
        """Registers are numbered: results, then operands; tied operands share a result's."""
        kinds = [each.strip() for each in constraints.split(",")]
        num_out = sum(each.startswith("=") for each in kinds)
        for each in values:
            if isinstance(each, AsyncTensor):
                each.used()
        tensor = next((each for each in [*results, *types] if each.is_tensor), None)
        by_lane = tensor is not None and (
            pack > 1
            or ptx.LANE_OPERATIONS.search(text) is not None
            or any(isinstance(each, Divergent) for each in values)
        )
        places = None
        if by_lane:
            places = thread_elements(tensor.layout, tensor.shape, p.num_warps)
            warps, lanes, count = places.shape
            groups = max(count // pack, 1)
            if count < pack:
                places = np.concatenate([places] + [places[..., -1:]] * (pack - count), -1)
            places = places.reshape(warps, lanes, groups, pack)
            shape = (warps, lanes, groups)
        else:
            shape = (1, int(np.prod(tensor.shape)) if tensor else 1, 1)
        registers: list[np.ndarray] = []
        for value, type in zip(values, types, strict=True):
            registers += _unpack(value, type, pack, places, shape)
        inputs: dict[str, np.ndarray] = {}
        for i, (kind, register) in enumerate(zip(kinds[num_out:], registers, strict=True)):
            inputs[f"${num_out + i}"] = register
            if kind.isdigit():
                inputs[f"${kind}"] = register
        after = ptx.Thread(inputs, shape).run(text)
        outs, at = [], 0
        for type in results:
            per = _registers_of(type, pack)
            raw = [after.get(f"${at + k}", np.zeros(shape, np.uint32)) for k in range(per)]
            outs.append(_repack(raw, type, pack, places))
            at += per
        return outs[0] if len(outs) == 1 else tuple(outs)


def _passes(p: Partition, barrier: Barrier, phase: int) -> Callable[[], bool]:
    def passes() -> bool:
        p.reason = f"parity {phase & 1} of {barrier}"
        return barrier.has_passed(phase)

    return passes


def _per_register(kind: str, pack: int) -> int:
    bits = dtypes.BITS[kind]
    return min(32 // bits, pack) if bits < 32 else 1


def _registers_of(type: Type, pack: int) -> int:
    return pack // _per_register(type.kind, pack)


def _unpack(value: Any, type: Type, pack: int, places: Any, shape: tuple) -> Iterator[np.ndarray]:
    """The registers of an operand."""
    if isinstance(value, Divergent):
        bits = dtypes.to_bits(value.data, type.kind).reshape(*shape, pack)
    elif places is None or not type.is_tensor:
        array = np.asarray(value, dtypes.value_dtype(type.kind)).reshape(-1)
        bits = np.broadcast_to(
            dtypes.to_bits(array, type.kind).reshape(-1, 1, 1)
            if array.size == 1
            else dtypes.to_bits(array, type.kind).reshape(1, -1, 1),
            shape,
        )[..., None]
    else:
        flat = dtypes.to_bits(np.ascontiguousarray(value).reshape(-1), type.kind)
        bits = flat[places]
    per = _per_register(type.kind, pack)
    width = dtypes.BITS[type.kind]
    out = []
    for first in range(0, bits.shape[-1], per):
        register = bits[..., first]
        if per > 1:
            register = sum(
                bits[..., first + i].astype(np.uint32) << np.uint32(i * width) for i in range(per)
            )
        out.append(np.ascontiguousarray(register))
    return out


def _repack(raw: list[np.ndarray], type: Type, pack: int, places: Any) -> Any:
    per, width = _per_register(type.kind, pack), dtypes.BITS[type.kind]
    elements = []
    for register in raw:
        for i in range(per):
            shifted = (
                register
                if per == 1
                else (register >> np.uint32(i * width)) & np.uint32((1 << width) - 1)
            )
            elements.append(shifted)
    bits = np.stack(elements, -1)
    if not type.is_tensor:
        return scalar(dtypes.from_bits(bits.reshape(-1)[:1], type.kind)[0], type.kind)
    if places is None:
        return dtypes.from_bits(bits.reshape(-1), type.kind).reshape(type.shape)
    flat = np.zeros(int(np.prod(type.shape)), bits.dtype)
    flat[places.reshape(-1)] = bits.reshape(-1)
    if not np.array_equal(flat[places], bits):
        values = dtypes.from_bits(bits, type.kind)
        return Divergent(values.reshape(*places.shape[:2], -1), type)
    return dtypes.from_bits(flat, type.kind).reshape(type.shape)
