"""The key of a call: all that decides which kernels it launches, and with which numbers.

`split` takes arguments apart into tensors and the rest of the key. `tensor_key` describes the
tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from operator import itemgetter
from threading import Lock
from typing import Any

from torch import Tensor

from mlakit.cache import CacheLayer, KVShard
from mlakit.plan import DecodePlanTensors

Values = tuple[Any, ...]
ALIGNMENT = 128  # bytes; no kernel and no check depends on more
NUM_PLAN_TENSORS = 4  # numbers follow
MAX_LAYER_KINDS = 1024
MAX_LAYOUTS = 4096


@dataclass(frozen=True, eq=False)  # compared by identity: it stands for its types in a key
class Layout:
    """The positions of the tensors among values of certain types."""

    tensors: Callable[[Values], Values]
    scalars: Callable[[Values], Values]  # numbers, strings and the like
    holders: tuple[int, ...]  # indices of cache layers, plans, tuples and lists


# asking each value of a call for its type costs more than a look at all types together
_LAYOUTS: dict[tuple[type, ...], Layout] = {}


def split(values: Values) -> tuple[list[Tensor], list[object]]:
    """The tensors in `values`, and everything else about them. A tensor must not stay hidden."""
    types = tuple(map(type, values))
    layout = _LAYOUTS.get(types) or _layout(types)
    tensors = [*layout.tensors(values)]
    # True is no number, yet equal to 1: the layout tells their types apart
    key: list[object] = [layout, layout.scalars(values)]
    for at in layout.holders:
        value = values[at]
        if type(value) is CacheLayer:
            number, parts = vars(value).get("_flat") or _flatten(value)
            key.append(number)
            tensors += parts
        elif type(value) is DecodePlanTensors:
            key.append(value[NUM_PLAN_TENSORS:])
            tensors += value[:NUM_PLAN_TENSORS]
        else:
            inner, rest = split(tuple(value))
            key.append(tuple(rest))
            tensors += inner
    return tensors, key


def _layout(types: tuple[type, ...]) -> Layout:
    tensors, scalars, holders = [], [], []
    for at, type_ in enumerate(types):
        if issubclass(type_, Tensor):
            tensors.append(at)
        elif type_ is CacheLayer or (issubclass(type_, (tuple, list)) and type_ is not KVShard):
            holders.append(at)
        elif type_ is not type(None):
            scalars.append(at)
    layout = Layout(getter(tensors), getter(scalars), tuple(holders))
    if len(_LAYOUTS) >= MAX_LAYOUTS:
        _LAYOUTS.clear()
    return _LAYOUTS.setdefault(types, layout)


def getter(indices: Sequence[int]) -> Callable[[Sequence[Any]], Values]:
    """A function that gives the values at `indices`, always as a tuple."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda values: tuple([values[at] for at in indices])


# Comparing what a layer is besides its tensors at every call costs more than a number for it.
# No number is given twice.
_LAYER_KINDS: OrderedDict[Hashable, int] = OrderedDict()
_NEXT_KIND = count()
_LOCK = Lock()


def _flatten(layer: CacheLayer) -> tuple[int, list[Tensor]]:
    """Return a layer's kind and tensors; kept with the layer, so that no pool is kept alive."""
    tensors, rest = split((layer.payload, layer.beside, layer.tensor_scale))
    kind = _layer_kind((layer.codec.name, layer.codec.row, *rest))
    vars(layer)["_flat"] = flat = kind, tensors
    return flat


def _layer_kind(key: Hashable) -> int:
    with _LOCK:
        kind = _LAYER_KINDS.get(key)
        if kind is None:
            kind = _LAYER_KINDS[key] = next(_NEXT_KIND)
            if len(_LAYER_KINDS) > MAX_LAYER_KINDS:
                _LAYER_KINDS.popitem(last=False)
    return kind


def tensor_key(tensors: Iterable[Tensor]) -> tuple[object, ...]:
    """Type, shape, strides, dtype, device, alignment and need of gradients of each."""
    key: list[object] = []
    for tensor in tensors:
        strides = None if tensor.is_contiguous() else tensor.stride()
        key += (
            *(type(tensor), tensor.shape, strides, tensor.dtype, tensor.device),
            *(tensor.data_ptr() % ALIGNMENT, tensor.requires_grad),
        )
    return tuple(key)
