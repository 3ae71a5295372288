"""Plain tensors: those whose values a kernel finds at their address."""

from __future__ import annotations

from functools import lru_cache, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

PLAIN_TYPES = (Tensor, Parameter)


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
