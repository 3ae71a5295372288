"""The facts of a call: all that decides which kernels it starts, and with which numbers.

`flatten` takes arguments apart into tensors and other facts, `substitute` puts other tensors in
their place. `facts_of` and `comparison_with` describe the tensors; `is_plain` tells the tensors
whose memory a kernel may simply read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from itertools import count
from operator import or_
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from mlakit.cache import CacheLayer
from mlakit.plan import DecodePlanTensors

ALIGNMENT = 128  # bytes; no kernel and no check depends on more
PLAIN_TYPES = (Tensor, Parameter)
NUM_PLAN_TENSORS = 4  # numbers follow
MAX_LAYER_KINDS = 1024


def flatten(values: Sequence[Any], tensors: list[Tensor], facts: list[object]) -> None:
    """Append the tensors in `values` to `tensors`, everything else about them to `facts`."""
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
        elif isinstance(value, (tuple, list)):  # named tuples too: a tensor must not hide in one
            flatten(value, tensors, facts)
        elif isinstance(value, Tensor):
            tensors.append(value)
        else:
            facts.append(value)


def substitute(value: Any, tensors: Mapping[int, Tensor]) -> Any:
    """`value` with each tensor replaced by the one in `tensors` under its id."""
    if isinstance(value, Tensor):
        return tensors[id(value)]
    if isinstance(value, CacheLayer):
        names = ("payload", "scales", "tensor_scale")
        return replace(value, **{name: substitute(getattr(value, name), tensors) for name in names})
    if isinstance(value, (tuple, list)):
        parts = [substitute(part, tensors) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


# Comparing what a layer is besides its tensors at every call costs more than a number for it.
# No number is given twice.
_LAYER_KINDS: OrderedDict[Hashable, int] = OrderedDict()
_NEXT_KIND = count()
_LOCK = Lock()


def _layer(layer: CacheLayer) -> tuple[int, list[Tensor]]:
    """Its kind and its tensors. Kept with the layer: kept here they would keep the pool alive."""
    known: tuple[int, list[Tensor]] | None = vars(layer).get("_flat")
    if known is None:
        tensors: list[Tensor] = []
        facts: list[object] = [layer.codec.name, layer.codec.row]
        flatten((layer.payload, layer.scales, layer.tensor_scale), tensors, facts)
        known = vars(layer)["_flat"] = _layer_kind(tuple(facts)), tensors
    return known


def _layer_kind(facts: Hashable) -> int:
    with _LOCK:
        kind = _LAYER_KINDS.get(facts)
        if kind is None:
            kind = _LAYER_KINDS[facts] = next(_NEXT_KIND)
            if len(_LAYER_KINDS) > MAX_LAYER_KINDS:
                _LAYER_KINDS.popitem(last=False)
    return kind


def is_plain(tensor: Tensor) -> bool:
    """Is what a kernel finds at `data_ptr()` the tensor's values?

    Not for wrapper subclasses, fake and functional tensors, negative views, tensors of torch.func:
    their dispatch keys tell. Under their own dispatch they become plain tensors, or refuse the op.
    """
    return type(tensor) in PLAIN_TYPES and has_plain_memory(tensor)


def has_plain_memory(tensor: Tensor) -> bool:
    """`is_plain`, also for subclasses that differ in Python only."""
    return torch._C._dispatch_keys(tensor).raw_repr() in _plain_keys(tensor.device.type)


@lru_cache(maxsize=16)
def _plain_keys(device_type: str) -> frozenset[int]:
    """The dispatch keys of a tensor made by `torch.empty`, out of inference mode and in it."""
    name = device_type.upper()
    if name not in ("CPU", "CUDA"):  # meta tensors have no memory; others have no kernels here
        return frozenset()
    keys = torch._C.DispatchKey
    inference = _key_set(getattr(keys, name), getattr(keys, f"Autocast{name}"))
    usual = inference | _key_set(keys.ADInplaceOrView, getattr(keys, f"Autograd{name}"))
    return frozenset((inference.raw_repr(), usual.raw_repr()))


def _key_set(*keys: Any) -> Any:
    return reduce(or_, map(torch._C.DispatchKeySet, keys))


def facts_of(tensors: Iterable[Tensor]) -> tuple[object, ...]:
    """Type, shape, strides, dtype, device, alignment and need of gradients of each."""
    facts: list[object] = []
    for tensor in tensors:
        strides = None if tensor.is_contiguous() else tensor.stride()
        facts += (
            *(type(tensor), tensor.shape, strides, tensor.dtype, tensor.device),
            *(tensor.data_ptr() % ALIGNMENT, tensor.requires_grad),
        )
    return tuple(facts)


def comparison_with(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """A function that tells whether as many other tensors have the types, dtypes, devices, shapes,
    strides, dispatch keys and need of gradients of these. None if unavailable.

    torch.compile guards compiled code with it; torch makes no promise of it.
    """
    try:
        guards = torch._C._dynamo.guards.TensorGuards(
            *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
        )
        is_alike = guards.check(*tensors)
    except (AttributeError, TypeError, SystemError):
        return None
    return guards.check if is_alike else None
