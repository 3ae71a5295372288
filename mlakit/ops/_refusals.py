"""Refusals of what no op takes: derivatives, vmap's batches, values outside of memory.

Each function names the op and the argument, and raises UnsupportedError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mlakit.cache import CacheLayer
from mlakit.dispatch import private
from mlakit.dispatch.checks import UnsupportedError, refuse_gradient, refuse_tangent
from mlakit.launch_cache.plain import has_plain_memory


def refuse_grad(op: str, **arguments: Any) -> None:
    """Refuse derivatives of both modes."""
    if forward_ad._current_level >= 0 and not torch.compiler.is_compiling():
        refuse_tangents(op, **arguments)
    if not torch.is_grad_enabled():
        return
    for name, part in _all_parts(arguments):
        if isinstance(part, Tensor):
            refuse_gradient(op, name, part)


def refuse_tangents(op: str, **arguments: Any) -> None:
    """Refuse forward-mode derivatives."""
    for name, part in _all_parts(arguments):
        if isinstance(part, Tensor):
            refuse_tangent(op, name, part)


def refuse_vmap(op: str, **arguments: Any) -> NoReturn:
    """Name the argument that is a batch of torch.vmap."""
    names = [name for name, part in _all_parts(arguments) if _is_batch(part)]
    raise UnsupportedError(
        f"{op}: {names[0]} must not be a batch of torch.vmap, for there is no batching rule; "
        "the op takes many tokens and requests in one call"
    )


def _is_batch(value: object) -> bool:
    return isinstance(value, Tensor) and private.is_batched(value)


def refuse_lazy_signs(op: str, **written: Any) -> None:
    """Refuse to write to a tensor whose memory holds the negative or conjugate of its values."""
    for name, part in _all_parts(written):
        if isinstance(part, Tensor) and (part.is_neg() or part.is_conj()):
            view = "negative" if part.is_neg() else "conjugate"
            raise UnsupportedError(
                f"{op}: {name} must hold its values in memory, got a {view} view"
            )


def refuse_results(op: str, **written: Any) -> None:
    """What an op refuses of its results, for a function that writes before it calls that op."""
    refuse_grad(op, **written)
    if torch.compiler.is_compiling():
        return
    refuse_lazy_signs(op, **written)
    if any(map(_is_batch, written.values())):
        refuse_vmap(op, **written)


def refuse_memory(op: str, **arguments: Any) -> NoReturn:
    """Name the argument whose values a kernel cannot find at its address."""
    name, part = next(
        (name, part)
        for name, part in _all_parts(arguments)
        if isinstance(part, Tensor) and not has_plain_memory(part)
    )
    raise UnsupportedError(
        f"{op}: {name} must have memory that a kernel can read, got a "
        f"{type(part).__name__} with {private.dispatch_keys(part)}"
    )


def requires_grad(value: Any) -> bool:
    """Return whether a tensor, layer or list of tensors requires grad; quick, for few do."""
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, CacheLayer):
        return any(map(requires_grad, (value.payload, value.beside, value.tensor_scale)))
    return isinstance(value, list) and any(map(requires_grad, value))


def _all_parts(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The parts of each argument, by name."""
    for argument, value in arguments.items():
        yield from _parts(argument, value)


def _parts(name: str, value: Any) -> list[tuple[str, Any]]:
    """Yield the parts of an argument by name."""
    if isinstance(value, (list, tuple)):
        return [(f"{name}[{i}]", each) for i, each in enumerate(value)]
    if isinstance(value, CacheLayer):
        beside = "rope columns" if value.codec.is_split else "scales"
        parts = {"payload": value.payload, beside: value.beside, "tensor_scale": value.tensor_scale}
        return [(f"the {part} of {name}", tensor) for part, tensor in parts.items()]
    return [(name, value)]
