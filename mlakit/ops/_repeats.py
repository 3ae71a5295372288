"""A call like one before it: the same kernels on its own tensors, without the way to them.

Which kernels an op starts on a GPU, and with which numbers, follows from what the host knows:
shapes, strides, dtypes, devices and alignment of its tensors, numbers, strings and knobs, the
`facts` of a call. Checking all of them and finding the kernels takes Python hundreds of
microseconds. So the second call with the same facts is recorded (`_recording`), and those that
follow start what was recorded.

Even looking at the facts of ten tensors takes Python longer than launching. So the recordings that
were used last are found by what is no tensor, and torch compares the tensors with theirs at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import count
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from mlakit import knobs
from mlakit.cache import CacheLayer
from mlakit.plan import DecodePlanTensors

if TYPE_CHECKING:  # it needs Triton, which is there where a call is worth recording
    from mlakit.ops._recording import Recording

Results = tuple[Tensor, ...]
ALIGNMENT = 128  # bytes; no kernel and no check asks for more
MAX_KNOWN = 1024  # calls of one op that are remembered, at a few kilobytes each
MAX_RECENT = 4  # recordings of calls that differ in their tensors only
ATTEMPTS = 3  # to record: a constant that is being made stands in the way at first
PLAIN = (Tensor, Parameter)  # others have a mind of their own: fake, sharded
NUM_PLAN_TENSORS = 4  # numbers follow


class Recent(NamedTuple):
    """A recording that was used lately."""

    is_for: Callable[..., bool]  # tensors of the same kinds
    recording: Recording


class Repeats:
    """What is known of the calls of one op, whose arguments are of these types."""

    def __init__(self, types: Mapping[str, Any]) -> None:
        tensors = [name for name, type_ in types.items() if _has_tensors(type_)]
        self._tensors = _all_of(tensors)
        self._numbers = _all_of([name for name in types if name not in tensors])
        self._recent: OrderedDict[Hashable, tuple[Recent, ...]] = OrderedDict()
        self._known: OrderedDict[Hashable, Recording | int] = OrderedDict()

    def run(
        self,
        body: Callable[[], Results],
        arguments: Mapping[str, Any],
        results: tuple[Tensor | None, ...],
    ) -> Results:
        """What `body()` gives, which is the op with these arguments."""
        numbers = self._numbers(arguments)
        # with their types: True is no number, yet equal to 1
        facts = [knobs.backend(), numbers, *map(type, numbers)]
        tensors: list[Tensor] = []
        flatten(self._tensors(arguments) + results, tensors, facts)
        call = tuple(facts)
        try:
            recent = self._recent.get(call, ())
        except TypeError:  # a list where a number should be: what is wrong with it the body says
            return body()
        if _is_unseen():
            for is_for, recording in recent:
                if (
                    is_for(*tensors)
                    and recording.device_index == _current_device()
                    and not recording.is_watched()
                    and (got := recording.replay(tensors)) is not None
                ):
                    return got
        return self._run_anew(body, call, tensors)

    def _run_anew(
        self, body: Callable[[], Results], call: Hashable, tensors: list[Tensor]
    ) -> Results:
        """After a look at every tensor."""
        device = tensors[0].device if tensors else None
        if device is None or not _starts_kernels(device) or not _is_unseen():
            with _made_current(device):
                return body()
        facts = facts_of(tensors, device)
        if facts is None:
            return body()
        key = call, device, facts
        known = self._known.get(key, 0)
        if not isinstance(known, int):
            if known.is_watched():
                return body()
            self._use(call, tensors, known)
            got = known.replay(tensors)
            return body() if got is None else got
        if known > ATTEMPTS:
            return body()
        if known == 0:
            _keep(self._known, key, 1)
            return body()
        from mlakit.ops._recording import record

        results, recording = record(body, tensors)
        _keep(self._known, key, recording or known + 1)
        return results

    def _use(self, call: Hashable, tensors: Sequence[Tensor], recording: Recording) -> None:
        is_for = comparison_with(tensors)
        if is_for is not None:
            others = self._recent.get(call, ())[: MAX_RECENT - 1]
            _keep(self._recent, call, (Recent(is_for, recording), *others))


def _keep(table: OrderedDict[Hashable, Any], key: Hashable, value: object) -> None:
    table[key] = value
    if len(table) > MAX_KNOWN:
        table.popitem(last=False)


def _has_tensors(type_: Any) -> bool:
    return any(name in str(type_) for name in ("Tensor", "CacheLayer"))


def _all_of(names: Sequence[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    if len(names) > 1:
        return itemgetter(*names)
    return lambda arguments: tuple([arguments[name] for name in names])


def flatten(values: Sequence[Any], tensors: list[Tensor], facts: list[object]) -> None:
    """Add to `tensors` those among the values and in them, and to `facts` all else."""
    facts.append(tuple(map(type, values)))
    for value in values:
        if value is None:
            continue
        kind = type(value)
        if kind is Tensor:
            tensors.append(value)
        elif kind is CacheLayer:
            number, parts = _layer(value)
            facts.append(number)
            tensors += parts
        elif kind is DecodePlanTensors:
            facts.append(value[NUM_PLAN_TENSORS:])
            tensors += value[:NUM_PLAN_TENSORS]
        elif kind is tuple or kind is list:
            facts.append(len(value))
            flatten(value, tensors, facts)
        elif isinstance(value, Tensor):
            tensors.append(value)
        else:
            facts.append(value)


# of what is no tensor in a layer: comparing that each time would take longer; none is given twice
_NUMBERS: OrderedDict[Hashable, int] = OrderedDict()
_COUNT = count()


def _layer(layer: CacheLayer) -> tuple[int, list[Tensor]]:
    """Its number and its tensors. Kept with the layer: kept here, they would keep the pool."""
    known: tuple[int, list[Tensor]] | None = vars(layer).get("_flat")
    if known is None:
        tensors: list[Tensor] = []
        facts: list[object] = []
        codec = layer.codec
        parts = (codec.name, codec.row, layer.payload, layer.scales, layer.tensor_scale)
        flatten(parts, tensors, facts)
        key = tuple(facts)
        if key not in _NUMBERS:
            _keep(_NUMBERS, key, next(_COUNT))
        known = vars(layer)["_flat"] = _NUMBERS[key], tensors
    return known


def facts_of(tensors: Iterable[Tensor], device: torch.device) -> tuple[object, ...] | None:
    """Shape, strides, dtype and alignment of each; None where a kernel cannot just be started."""
    facts: list[object] = []
    for tensor in tensors:
        if type(tensor) not in PLAIN or tensor.requires_grad or tensor.device != device:
            return None
        try:
            strides = None if tensor.is_contiguous() else tensor.stride()
            facts += (tensor.shape, strides, tensor.dtype, tensor.data_ptr() % ALIGNMENT)
        except RuntimeError:  # without memory of its own, such as a sparse one
            return None
    return tuple(facts)


def comparison_with(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """Says of as many other tensors whether they have the types, dtypes, devices, shapes and
    strides of these, and as little to do with gradients and modes. None: it cannot be had.

    torch.compile asks it before running what it has compiled; torch promises no one else anything.
    """
    try:
        guards = torch._C._dynamo.guards.TensorGuards(
            *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
        )
        is_alike = guards.check(*tensors)
    except (AttributeError, TypeError, SystemError):
        return None
    return guards.check if is_alike else None  # not where one of them is there twice


def _is_unseen() -> bool:
    """Does nobody want to see how results come about?"""
    return torch._C._len_torch_dispatch_stack() == 0 and not knobs.check_values()


def _starts_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and device.index == _current_device()


def _current_device() -> int:
    index: int = torch._C._cuda_getDevice()
    return index


def _made_current(device: torch.device | None) -> Any:
    """Kernels are started on the current device, which must be that of the tensors."""
    if device is None or device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
