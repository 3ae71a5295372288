"""What the launches of a call are, and how they are made again for other tensors.

Each pointer that a kernel got is known as a distance from one of the call's tensors, or it lies in
scratch or in a result, which every call gets anew.

Nothing is recorded where more happened than that: torch ops that compute or read values, or a
pointer that may come from two places, and the body runs as it is each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mlakit.kernels.triton.launch import is_watched, recording
from mlakit.kernels.triton.relaunch import Launch, Pointer
from mlakit.ops import _repeats

Results = tuple[Tensor, ...]
Filled = tuple[Callable[..., None], tuple[Any, ...]]  # a launch, with all that it takes
SCRATCH_ALIGNMENT = 256
MAX_FILLED = 256  # of one recording: layers times the places that queries and results come to
NEW_TENSORS = {
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
}
data_ptr = Tensor.data_ptr


@dataclass(frozen=True)
class Template:
    """Arguments of a kernel, with gaps for what is particular to a call."""

    values: tuple[Any, ...]
    gaps: tuple[tuple[int, int, int, Any], ...]  # (argument, place, byte in that, taken as)
    tuples: tuple[tuple[int, Template], ...]

    def fill(self, addresses: Sequence[int]) -> tuple[Any, ...]:
        values = list(self.values)
        for at, place, offset, taken_as in self.gaps:
            address = addresses[place] + offset
            values[at] = address if taken_as is None else taken_as[address]
        for at, part in self.tuples:
            values[at] = part.fill(addresses)
        return tuple(values)


@dataclass(frozen=True)
class Step:
    """A kernel that is started."""

    start: Callable[..., None]
    before_stream: tuple[Any, ...]
    after_stream: tuple[Any, ...]
    arguments: Template

    def filled(self, where: Sequence[int]) -> Filled:
        arguments = self.arguments.fill(where)
        return self.start, (*self.before_stream, where[-1], *self.after_stream, *arguments)


@dataclass(frozen=True)
class Recording:
    """What a call did. Places count the call's tensors, new ones, then the stream."""

    steps: tuple[Step, ...]
    results: tuple[int, ...]  # their places
    new: tuple[tuple[Any, ...], ...]  # shape, strides, dtype: of results, and of the scratch
    alignments: list[int]  # of the call's tensors
    device_index: int
    allocate: Callable[..., Tensor]  # of a shape, strides and dtype
    quick_allocator: Callable[..., Tensor]
    constants: tuple[Tensor, ...]  # kept: they are pointed to
    is_watched: Callable[[], bool]  # by a profiler that wants to hear of each launch
    filled: dict[tuple[int, ...], list[Filled]] = field(default_factory=dict)

    def replay(self, tensors: list[Tensor]) -> Results | None:
        """The results for tensors of the same shapes, strides and dtypes on the same device, which
        is the current one; None where they are aligned differently."""
        is_quick = not torch._C._get_deterministic_algorithms()
        allocate = self.quick_allocator if is_quick else self.allocate
        room = tensors + [allocate(*each) for each in self.new]
        where = (*map(data_ptr, room), _current_stream(self.device_index))
        # the same memory comes round again and again: what was filled in is kept for a while
        filled = self.filled.get(where)
        if filled is None:
            alignments = [address % _repeats.ALIGNMENT for address in where[: len(tensors)]]
            if alignments != self.alignments:
                return None
            filled = [step.filled(where) for step in self.steps]
            if len(self.filled) >= MAX_FILLED:
                self.filled.clear()
            self.filled[where] = filled
        for start, arguments in filled:
            start(*arguments)
        return tuple([room[place] for place in self.results])


def _current_stream(device_index: int) -> int:
    stream: int = torch._C._cuda_getCurrentRawStream(device_index)
    return stream


def allocators(device: torch.device) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """How tensors of a shape, strides and a dtype are made on `device`, and how at less cost if it
    is the current one.

    Compiled code takes memory past torch's dispatcher, in half the time; but what is so made is
    not filled where that was asked for (`torch.utils.deterministic`).
    """

    def allocate(shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return allocate, getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", allocate)


class Observer(TorchDispatchMode):
    """Sees the torch ops of a body: those that make room, and whether there are others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[Tensor] = []  # all kept until the end: no two have the same address
        self.is_plain = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in NEW_TENSORS:
            self.made.append(result)
        elif not func.is_view:
            self.is_plain = False
        return result


def record(
    body: Callable[[], Results], tensors: Sequence[Tensor]
) -> tuple[Results, Recording | None]:
    """The results of the body, and how to have them again; None: there is no other way."""
    with recording() as launches, Observer() as observer:
        got = body()
    device = tensors[0].device
    given = {id(tensor): place for place, tensor in enumerate(tensors)}
    new_results = [tensor for tensor in got if id(tensor) not in given]
    # by address: what an op returns under a mode is another object for the same memory
    starts = {tensor.data_ptr() for tensor in new_results}
    scratch = [tensor for tensor in observer.made if tensor.data_ptr() not in starts]
    if not observer.is_plain or len(scratch) + len(new_results) != len(observer.made):
        return got, None
    room = Room.of(tensors, new_results, scratch)
    try:
        steps = tuple(room.step(launch) for launch in launches)
    except UnknownOriginError:
        return got, None
    places = given | {id(tensor): len(tensors) + i for i, tensor in enumerate(new_results)}
    return got, Recording(
        steps,
        tuple(places[id(tensor)] for tensor in got),
        room.new,
        [tensor.data_ptr() % _repeats.ALIGNMENT for tensor in tensors],
        device.index,
        *allocators(device),
        tuple(room.constants),
        is_watched,
    )


class UnknownOriginError(LookupError):
    """A pointer whose origin cannot be told."""


@dataclass(frozen=True)
class Room:
    """All memory that a body's kernels may point to."""

    tensors: Sequence[Tensor]  # of the call, then its new results
    scratch: Sequence[tuple[Tensor, int]]  # and where each begins when all are one piece
    new: tuple[tuple[Any, ...], ...]  # shape, strides, dtype: of new results, and of that piece
    constants: list[Tensor]

    @classmethod
    def of(
        cls, tensors: Sequence[Tensor], new_results: Sequence[Tensor], scratch: Iterable[Tensor]
    ) -> Room:
        places, end = [], 0
        for tensor in scratch:
            places.append((tensor, end))
            end += -(-_num_bytes(tensor) // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
        new: list[tuple[Any, ...]] = [(tuple(t.shape), t.stride(), t.dtype) for t in new_results]
        if end > 0:
            new.append(((end,), (1,), torch.uint8))
        return cls([*tensors, *new_results], places, tuple(new), [])

    def step(self, launch: Launch) -> Step:
        prepared = launch.prepare()
        arguments = self._template(prepared.arguments)
        return Step(prepared.start, prepared.before_stream, prepared.after_stream, arguments)

    def _template(self, arguments: Sequence[Any]) -> Template:
        values, gaps, tuples = list(arguments), [], []
        for at, value in enumerate(arguments):
            if isinstance(value, tuple):
                tuples.append((at, self._template(value)))
            elif isinstance(value, Pointer):
                origin = self._origin(value.tensor)
                values[at] = None
                if origin is not None:
                    gaps.append((at, *origin, value.taken_as))
                else:
                    address = value.tensor.data_ptr()
                    values[at] = address if value.taken_as is None else value.taken_as[address]
            elif isinstance(value, (Tensor, list, dict)):
                raise UnknownOriginError
        return Template(tuple(values), tuple(gaps), tuple(tuples))

    def _origin(self, tensor: Tensor) -> tuple[int, int] | None:
        """(place, byte); None for a constant, or for nothing at all."""
        address = tensor.data_ptr()
        if address == 0:
            return None
        starts = [place for place, t in enumerate(self.tensors) if t.data_ptr() == address]
        holders = starts or [p for p, t in enumerate(self.tensors) if _holds(t, address)]
        if len(holders) == 1:
            return holders[0], address - self.tensors[holders[0]].data_ptr()
        if holders:
            raise UnknownOriginError
        for piece, first in self.scratch:
            if _holds(piece, address):
                return len(self.tensors), first + address - piece.data_ptr()
        if any(_storage_holds(t, address) for t in self.tensors):
            raise UnknownOriginError
        self.constants.append(tensor)
        return None


def _num_bytes(tensor: Tensor) -> int:
    """From its first element to its last."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def _holds(tensor: Tensor, address: int) -> bool:
    return 0 <= address - tensor.data_ptr() < _num_bytes(tensor)


def _storage_holds(tensor: Tensor, address: int) -> bool:
    storage = tensor.untyped_storage()
    return 0 <= address - storage.data_ptr() < storage.nbytes()
