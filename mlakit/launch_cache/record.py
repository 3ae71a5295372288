"""Recording a call: its launches, and how to make them again for other tensors.

The call runs with a stand-in for each of its tensors: the same memory in a storage of its own. A
view has the storage of the tensor it is a view of, so the storage of each tensor that a kernel gets
says which argument, result or scratch it points into, also where arguments overlap. Nothing is
recorded where more happens than launches: a torch op that computes or reads values, other than a
library call that says so (`workspace.library_call`), or a pointer into memory of unknown origin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.dlpack import from_dlpack

from mlakit.cache import CacheLayer
from mlakit.dispatch import private
from mlakit.dispatch.private import Pointer
from mlakit.kernels import workspace
from mlakit.launch_cache.key import ALIGNMENT, getter

Results = tuple[Tensor, ...]
FilledLaunch = tuple[Callable[..., None], tuple[Any, ...]]  # a launch function and its arguments
SCRATCH_ALIGNMENT = 256
MAX_FILLED = 256  # per recording: layers times the addresses that queries and results come to
data_ptr = Tensor.data_ptr


class RefusedRecordingError(Exception):
    """The reason why a call cannot be recorded."""


@dataclass(frozen=True)
class ArgumentTemplate:
    """Arguments of a kernel, with gaps for the addresses of one call."""

    values: tuple[Any, ...]
    gaps: tuple[tuple[int, int, int, Any], ...]  # (argument, index, byte offset, encoder)
    tuples: tuple[tuple[int, ArgumentTemplate], ...]

    def fill(self, addresses: Sequence[int]) -> tuple[Any, ...]:
        values = list(self.values)
        for at, index, offset, encode in self.gaps:
            address = addresses[index] + offset
            values[at] = address if encode is None else encode[address]
        for at, part in self.tuples:
            values[at] = part.fill(addresses)
        return tuple(values)


@dataclass(frozen=True)
class LaunchTemplate:
    """A recorded launch, with gaps for the addresses of one call."""

    function: Callable[..., None]
    before_stream: tuple[Any, ...]
    after_stream: tuple[Any, ...]
    arguments: ArgumentTemplate
    arguments_are_one: bool  # the launch function takes them as one tuple
    kernel: object  # kept: its module is unloaded when the last reference goes

    def filled(self, addresses: Sequence[int]) -> FilledLaunch:
        arguments = self.arguments.fill(addresses)
        last = (arguments,) if self.arguments_are_one else arguments
        return self.function, (*self.before_stream, addresses[-1], *self.after_stream, *last)


class RecordedLaunch(NamedTuple):
    """A launch as it was recorded."""

    kernel: Any  # compiled
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]  # in the kernel's order, constexprs included


class LibraryCall(NamedTuple):
    """A call of torch over tensors of the recorded call."""

    function: Callable[..., None]
    tensors: Callable[[Sequence[Tensor]], Sequence[Tensor]]  # picks them by index


@dataclass(frozen=True)
class Recording:
    """The launches of a call. Indices count its tensors, new results, scratch, the stream."""

    launches: tuple[LaunchTemplate, ...]
    library_calls: tuple[LibraryCall, ...]  # only where there are no launches
    results: Callable[[Sequence[Tensor]], Results]  # picks them by index
    new: tuple[tuple[Any, ...], ...]  # shape, strides, dtype: of new results, and of all scratch
    alignments: list[int]  # of the call's tensors
    device_index: int
    allocate: Callable[..., Tensor]  # of a shape, strides and dtype
    quick_allocator: Callable[..., Tensor]
    constants: tuple[Tensor, ...]  # kept: kernels point to them
    has_launch_hooks: Callable[[], bool]  # a profiler wants to be called at each launch
    filled: dict[tuple[int, ...], list[FilledLaunch]] = field(default_factory=dict)

    def replay(self, tensors: list[Tensor]) -> Results | None:
        """Launch the kernels for tensors with the key of the recorded ones, on the current device.

        None if their alignment differs; nothing was launched then.
        """
        is_quick = not private.is_deterministic()
        allocate = self.quick_allocator if is_quick else self.allocate
        room = tensors + [allocate(*each) for each in self.new]
        addresses = (*map(data_ptr, room), private.current_stream(self.device_index))
        # the allocator hands out the same memory again and again: filled arguments are kept
        filled = self.filled.get(addresses)
        if filled is None:
            alignments = [address % ALIGNMENT for address in addresses[: len(tensors)]]
            if alignments != self.alignments:
                return None
            filled = [launch.filled(addresses) for launch in self.launches]
            if len(self.filled) >= MAX_FILLED:
                self.filled.clear()
            self.filled[addresses] = filled
        for function, arguments in filled:
            function(*arguments)
        for call in self.library_calls:
            call.function(*call.tensors(room))
        return self.results(room)


def allocators(device: torch.device) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return what makes tensors of a shape, strides and a dtype on `device`, and what does so at
    less cost on the current device."""

    def allocate(shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return allocate, private.quick_allocator(device.type) or allocate


def record(
    body: Callable[[Any, Sequence[Any]], Results],
    arguments: tuple[Any, ...],
    results: Sequence[Tensor | None],
    tensors: Sequence[Tensor],
) -> tuple[Results, Recording | str]:
    """Run a call, `body(arguments, results)`, whose distinct tensors are `tensors`.

    Returns its results, and how to have them again or the reason why not.
    """
    stand_ins = [_stand_in(tensor) for tensor in tensors]
    by_id = {id(tensor): other for tensor, other in zip(tensors, stand_ins, strict=True)}
    recorder = CallRecorder(stand_ins)
    with workspace.recording(recorder), recorder:
        got = body(_substitute(arguments, by_id), _substitute(tuple(results), by_id))
    originals = {id(other): tensor for tensor, other in zip(tensors, stand_ins, strict=True)}
    returned = tuple(originals.get(id(tensor), tensor) for tensor in got)
    try:
        return returned, recorder.finish(got, tensors[0].device)
    except RefusedRecordingError as refusal:
        return returned, str(refusal)


def _substitute(value: Any, tensors: Mapping[int, Tensor]) -> Any:
    """`value` with each tensor replaced by the one in `tensors` under its id."""
    if isinstance(value, Tensor):
        return tensors[id(value)]
    if isinstance(value, CacheLayer):
        names = ("payload", "beside", "tensor_scale")
        parts = {name: _substitute(getattr(value, name), tensors) for name in names}
        return replace(value, **parts)
    if isinstance(value, (tuple, list)):
        members = [_substitute(part, tensors) for part in value]
        return type(value)(*members) if hasattr(value, "_fields") else type(value)(members)
    return value


def _stand_in(tensor: Tensor) -> Tensor:
    """The same values, shape, strides and address, in a storage of its own."""
    storage = tensor.untyped_storage()
    every_byte = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    alias = from_dlpack(every_byte).untyped_storage()
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(alias, *place)


class CallRecorder(TorchDispatchMode):
    """Notes the launches of a call and the memory they point to; sees every torch op of the call.

    It keeps every tensor until the end, so that no two have the same storage.
    """

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arguments = list(arguments)
        self._results: list[Tensor] = []
        self._scratch: list[Tensor] = []
        self._constants: list[Tensor] = []
        self._launches: list[RecordedLaunch] = []
        self._library_calls: list[tuple[Callable[..., None], Sequence[Tensor]]] = []
        self._refusal: str | None = None
        self._is_allocating = False  # or in a library call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not (self._is_allocating or func.is_view or self._refusal):
            self._refusal = f"the call runs {func._schema.name}"
        return func(*args, **(kwargs or {}))

    def add_result(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._new(self._results, shape, dtype, device)

    def add_scratch(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._new(self._scratch, shape, dtype, device)

    def _new(
        self, kept: list[Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        self._is_allocating = True
        try:
            made = torch.empty(shape, dtype=dtype, device=device)
        finally:
            self._is_allocating = False
        kept.append(made)
        return made

    def add_constant(self, tensor: Tensor) -> None:
        self._constants.append(tensor)

    def add_launch(
        self, kernel: object, grid: tuple[int, ...], arguments: tuple[object, ...]
    ) -> None:
        self._launches.append(RecordedLaunch(kernel, grid, arguments))

    def add_library_call(self, function: Callable[..., None], tensors: Sequence[Tensor]) -> None:
        self._is_allocating = True
        try:
            function(*tensors)
        finally:
            self._is_allocating = False
        self._library_calls.append((function, tensors))

    def finish(self, returned: Sequence[Tensor], device: torch.device) -> Recording:
        if self._refusal is not None:
            raise RefusedRecordingError(self._refusal)
        indices = {id(tensor): i for i, tensor in enumerate([*self._arguments, *self._results])}
        if any(id(tensor) not in indices for tensor in returned):
            raise RefusedRecordingError("the call returns a tensor that is no result of its own")
        if self._library_calls and self._launches:
            raise RefusedRecordingError("the call launches kernels beside those of torch")
        used = [tensor for _, tensors in self._library_calls for tensor in tensors]
        if any(id(tensor) not in indices for tensor in used):
            raise RefusedRecordingError("a library call takes a tensor that is not the call's")
        library_calls = tuple(
            LibraryCall(function, getter([indices[id(tensor)] for tensor in tensors]))
            for function, tensors in self._library_calls
        )
        origins = Origins(self._arguments, self._results, self._scratch, self._constants)
        return Recording(
            tuple(origins.template(launch) for launch in self._launches),
            library_calls,
            getter([indices[id(tensor)] for tensor in returned]),
            origins.new,
            [tensor.data_ptr() % ALIGNMENT for tensor in self._arguments],
            device.index,
            *allocators(device),
            tuple(self._constants),
            private.launch_hooks(),
        )


class Origins:
    """The origin of each pointer of a launch, by the storage of the tensor it was taken from."""

    def __init__(
        self,
        arguments: Sequence[Tensor],
        results: Sequence[Tensor],
        scratch: Sequence[Tensor],
        constants: Sequence[Tensor],
    ) -> None:
        whole = [*arguments, *results]
        self._origins = {_storage(t): (index, t.data_ptr()) for index, t in enumerate(whole)}
        end = 0
        for tensor in scratch:  # one allocation holds all of it
            self._origins[_storage(tensor)] = len(whole), tensor.data_ptr() - end
            end += -(-tensor.nbytes // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
        self._constants = {_storage(tensor) for tensor in constants}
        new: list[tuple[Any, ...]] = [(tuple(t.shape), t.stride(), t.dtype) for t in results]
        if end > 0:
            new.append(((end,), (1,), torch.uint8))
        self.new = tuple(new)

    def template(self, launch: RecordedLaunch) -> LaunchTemplate:
        grid = (*launch.grid, 1, 1)[:3]
        prepared = private.prepare_launch(launch.kernel, grid, launch.arguments)
        return LaunchTemplate(
            prepared.function,
            prepared.before_stream,
            prepared.after_stream,
            self._arguments(prepared.arguments),
            prepared.arguments_are_one,
            launch.kernel,
        )

    def _arguments(self, arguments: Sequence[Any]) -> ArgumentTemplate:
        values, gaps, tuples = list(arguments), [], []
        for at, value in enumerate(arguments):
            if isinstance(value, tuple):
                values[at] = None  # its pointers would keep the tensors of this call alive
                tuples.append((at, self._arguments(value)))
            elif isinstance(value, Pointer):
                origin = self._origin(value.tensor)
                if origin is None:
                    address = value.tensor.data_ptr()
                    values[at] = address if value.encode is None else value.encode[address]
                else:
                    values[at] = None
                    gaps.append((at, *origin, value.encode))
            elif isinstance(value, (Tensor, list, dict)):
                raise RefusedRecordingError(f"a kernel takes a {type(value).__name__}")
        return ArgumentTemplate(tuple(values), tuple(gaps), tuple(tuples))

    def _origin(self, tensor: Tensor) -> tuple[int, int] | None:
        """(index, byte offset); None for a constant, and where there is nothing to point to."""
        address, storage = tensor.data_ptr(), _storage(tensor)
        if address == 0 or storage in self._constants:
            return None
        if storage not in self._origins:
            raise RefusedRecordingError("a kernel points to memory that is not the call's")
        index, start = self._origins[storage]
        return index, address - start


def _storage(tensor: Tensor) -> int:
    """The identity of its storage, which views share."""
    identity: int = tensor.untyped_storage()._cdata
    return identity
