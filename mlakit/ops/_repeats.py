"""A call like one before it: the same kernels on its own tensors, without the way to them.

Which kernels an op starts on a GPU, and with which numbers, follows from what the host knows:
shapes, strides, dtypes, devices and alignment of its tensors, numbers, strings and knobs, the
`facts` of a call. Checking all of them and finding the kernels takes Python hundreds of
microseconds. So the second call with the same facts is recorded, and those that follow start what
was recorded: each pointer is known as a distance from one of the call's tensors, or lies in scratch
or in a result, which every call gets anew.

Nothing is recorded where more happened than that: torch ops that compute or read values, or a
pointer that may come from two places, and the body runs as it is each time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from mlakit import knobs
from mlakit.cache import CacheLayer
from mlakit.plan import DecodePlanTensors

Results = tuple[Tensor, ...]
ALIGNMENT = 128  # bytes; no kernel and no check asks for more
SCRATCH_ALIGNMENT = 256
MAX_PLANS = 64  # that are kept
MAX_KNOWN = 1024  # calls of one op that are remembered, at a few kilobytes each
MAX_FILLED = 256  # of one recording: layers times the places that queries and results come to
ATTEMPTS = 3  # to record: a constant that is being made stands in the way at first
NEW_TENSORS = {
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
}


class Repeats:
    """What is known of the calls of one op, whose arguments are of these types."""

    def __init__(self, types: Mapping[str, Any]) -> None:
        tensors = [name for name, type_ in types.items() if _has_tensors(type_)]
        self._tensors = _all_of(tensors)
        self._numbers = _all_of([name for name in types if name not in tensors])
        self._known: OrderedDict[object, Recording | int] = OrderedDict()

    def run(
        self,
        body: Callable[[], Results],
        arguments: Mapping[str, Any],
        results: Sequence[Tensor | None],
    ) -> Results:
        """What `body()` gives, which is the op with these arguments."""
        survey = Survey((*self._tensors(arguments), *results))
        if not survey.is_repeatable():
            with _made_current(survey.device):
                return body()
        numbers = self._numbers(arguments)
        # with their types: True is no number, yet equal to 1
        key = (*survey.facts, survey.device, knobs.backend(), numbers, *map(type, numbers))
        try:
            known = self._known.get(key, 0)
        except TypeError:  # a list where a number should be: what is wrong with it the body says
            return body()
        if isinstance(known, Recording):
            return body() if known.is_watched() else known.replay(survey)
        if known > ATTEMPTS:
            return body()
        if known == 0:
            self._remember(key, 1)
            return body()
        got, recording = record(body, survey.tensors)
        self._remember(key, recording or known + 1)
        return got

    def _remember(self, key: object, known: Recording | int) -> None:
        self._known[key] = known
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)


def _has_tensors(type_: Any) -> bool:
    return any(name in str(type_) for name in ("Tensor", "CacheLayer"))


def _all_of(names: Sequence[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    if len(names) > 1:
        return itemgetter(*names)
    return lambda arguments: tuple([arguments[name] for name in names])


class Survey:
    """The facts of a call's tensors, and these in the order in which they were met."""

    __slots__ = ("addresses", "device", "facts", "is_plain", "tensors")

    def __init__(self, values: Iterable[Any]) -> None:
        self.facts: list[object] = []
        self.tensors: list[Tensor] = []
        self.addresses: list[int] = []
        self.device: torch.device | None = None
        self.is_plain = True
        try:
            self._add_all(values)
        except RuntimeError:  # a tensor without memory of its own, such as a sparse one
            self.is_plain = False

    def _add_all(self, values: Iterable[Any]) -> None:
        facts, tensors, addresses = self.facts, self.tensors, self.addresses
        for value in values:
            kind = type(value)
            if value is None:
                facts.append(None)
            elif kind is Tensor or kind is Parameter:
                address = value.data_ptr()
                strides = None if value.is_contiguous() else value.stride()
                facts += (value.shape, strides, value.dtype, address % ALIGNMENT)
                tensors.append(value)
                addresses.append(address)
                self._is_on(value.device, not value.requires_grad)
            elif kind is CacheLayer or kind is DecodePlanTensors:
                whole = _layer(value) if kind is CacheLayer else _plan(value)
                facts.append(whole.number)
                tensors += whole.tensors
                addresses += whole.addresses
                self._is_on(whole.device, whole.is_plain)
            elif isinstance(value, (tuple, list)):
                facts += (kind, len(value))
                self._add_all(value)
            elif isinstance(value, Tensor):  # of a kind with a mind of its own: fake, sharded
                self.is_plain = False
            else:
                facts += (kind, value)
            if not self.is_plain:
                return

    def _is_on(self, device: torch.device | None, is_plain: bool) -> None:
        if self.device is None:
            self.device = device
        self.is_plain = is_plain and device == self.device

    def is_repeatable(self) -> bool:
        """Are these tensors where kernels run, and does nobody want to see how?"""
        return (
            self.is_plain
            and self.device is not None
            and _starts_kernels(self.device)
            and not knobs.check_values()
            and torch._C._len_torch_dispatch_stack() == 0
        )


def _starts_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and device.index == torch._C._cuda_getDevice()


def _made_current(device: torch.device | None) -> Any:
    """Kernels are started on the current device, which must be that of the tensors."""
    if device is None or device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def _current_stream(device: torch.device) -> int:
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    return stream


class Whole:
    """A layer of a cache, or a plan: the same one in many calls, and surveyed once."""

    __slots__ = ("addresses", "device", "is_plain", "number", "tensors")

    def __init__(self, kind: type, parts: Iterable[Any]) -> None:
        survey = Survey(parts)
        self.tensors, self.addresses, self.device = survey.tensors, survey.addresses, survey.device
        self.is_plain = survey.is_plain
        facts = (kind, *survey.facts)
        if facts not in _NUMBERS:
            _NUMBERS[facts] = next(_COUNT)
            if len(_NUMBERS) > MAX_KNOWN:
                _NUMBERS.popitem(last=False)
        self.number = _NUMBERS[facts]

    def is_current(self) -> bool:
        """A tensor can be given other memory in place, though hardly anyone does that."""
        return self.addresses == [tensor.data_ptr() for tensor in self.tensors]


# of facts: comparing those each time would take longer; none is given twice
_NUMBERS: OrderedDict[object, int] = OrderedDict()
_COUNT = count()
_PLANS: OrderedDict[int, tuple[DecodePlanTensors, Whole]] = OrderedDict()


def _layer(layer: CacheLayer) -> Whole:
    """Kept with the layer: kept here, it would keep the pool."""
    known: Whole | None = vars(layer).get("_whole")
    if known is None or not known.is_current():
        codec = layer.codec
        parts = (codec.name, codec.row, layer.payload, layer.scales, layer.tensor_scale)
        known = vars(layer)["_whole"] = Whole(CacheLayer, parts)
    return known


def _plan(plan: DecodePlanTensors) -> Whole:
    """Kept with the plan, which is small, so that no other has its id."""
    known = _PLANS.get(id(plan))
    if known is None or not known[1].is_current():
        known = _PLANS[id(plan)] = plan, Whole(DecodePlanTensors, plan)
        if len(_PLANS) > MAX_PLANS:
            _PLANS.popitem(last=False)
    return known[1]


@dataclass(frozen=True)
class Template:
    """Arguments of a kernel, with gaps for what is particular to a call."""

    values: tuple[Any, ...]
    gaps: tuple[tuple[int, int, int, Any], ...]  # (argument, place, byte in that, taken as)
    tuples: tuple[tuple[int, Template], ...]

    def fill(self, addresses: Sequence[int]) -> list[Any]:
        values = list(self.values)
        for at, place, offset, taken_as in self.gaps:
            address = addresses[place] + offset
            values[at] = address if taken_as is None else taken_as[address]
        for at, part in self.tuples:
            values[at] = tuple(part.fill(addresses))
        return values


@dataclass(frozen=True)
class Recording:
    """What a call did. Places count the call's tensors, its new results, then the scratch."""

    steps: tuple[tuple[Callable[..., None], Template], ...]
    results: tuple[int, ...]  # their places
    new_results: tuple[tuple[Any, ...], ...]  # shape, strides, dtype
    scratch_bytes: int
    device: torch.device
    constants: tuple[Tensor, ...]  # kept: they are pointed to
    is_watched: Callable[[], bool]  # by a profiler that wants to hear of each launch
    filled: dict[tuple[int, ...], list[tuple[Callable[..., None], list[Any]]]] = field(
        default_factory=dict
    )

    def replay(self, survey: Survey) -> Results:
        tensors, addresses = survey.tensors, survey.addresses
        for shape, strides, dtype in self.new_results:
            new = torch.empty_strided(shape, strides, dtype=dtype, device=self.device)
            tensors.append(new)
            addresses.append(new.data_ptr())
        if self.scratch_bytes:
            scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=self.device)
            addresses.append(scratch.data_ptr())
        stream = _current_stream(self.device)
        # the same memory comes round again and again: what was filled in is kept for a while
        where = tuple(addresses)
        filled = self.filled.get(where)
        if filled is None:
            filled = [(start, template.fill(where)) for start, template in self.steps]
            if len(self.filled) >= MAX_FILLED:
                self.filled.clear()
            self.filled[where] = filled
        for start, arguments in filled:
            start(stream, arguments)
        return tuple([tensors[place] for place in self.results])


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
    # not at the top: Triton is there where its kernels have run, and this is not the first call
    from mlakit.kernels.triton.launch import is_watched, recording

    with recording() as launches, Observer() as observer:
        got = body()
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
        tuple((tuple(t.shape), t.stride(), t.dtype) for t in new_results),
        room.scratch_bytes,
        tensors[0].device,
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
    scratch_bytes: int
    constants: list[Tensor]

    @classmethod
    def of(
        cls, tensors: Sequence[Tensor], new_results: Sequence[Tensor], scratch: Iterable[Tensor]
    ) -> Room:
        places, end = [], 0
        for tensor in scratch:
            places.append((tensor, end))
            end += -(-_num_bytes(tensor) // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
        return cls([*tensors, *new_results], places, end, [])

    def step(self, launch: Any) -> tuple[Callable[..., None], Template]:
        start, arguments = launch.prepare()
        return start, self._template(arguments)

    def _template(self, arguments: Sequence[Any]) -> Template:
        values, gaps, tuples = list(arguments), [], []
        for at, value in enumerate(arguments):
            if isinstance(value, tuple):
                tuples.append((at, self._template(value)))
            elif hasattr(value, "taken_as"):
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
