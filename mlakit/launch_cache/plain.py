"""Plain tensors: those whose values a kernel finds at their address."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Parameter

from mlakit.dispatch import private

PLAIN_TYPES = (Tensor, Parameter)


def is_plain(tensor: Tensor) -> bool:
    """Return whether a kernel finds the tensor's values at `data_ptr()`.

    Not for wrapper subclasses, fake and functional tensors, negative views, tensors of torch.func:
    their dispatch keys tell. Under their own dispatch they become plain tensors, or refuse the op.
    """
    return type(tensor) in PLAIN_TYPES and has_plain_memory(tensor)


def has_plain_memory(tensor: Tensor) -> bool:
    """`is_plain`, also for subclasses that differ in Python only."""
    return private.dispatch_keys(tensor).raw_repr() in private.plain_keys(tensor.device.type)
