"""Tables of wrong calls: what is changed in a call that passes, and what must be said then."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mlakit.dispatch.checks import UnsupportedError

KINDS = {"": ValueError, "Type": TypeError, "Unsupported": UnsupportedError}


@dataclass(frozen=True)
class Edit:
    """A change that depends on the argument as it was."""

    changed: Callable[[Any], Any]


# by argument; or a function of all arguments, where a change needs others than its own
Changes: TypeAlias = "Mapping[str, Any] | Callable[[Mapping[str, Any]], Mapping[str, Any]]"
WrongCalls: TypeAlias = "Mapping[str, Changes]"  # by message, see `Wrong`


class Wrong:
    """One wrong call: the message of its ValueError, or other if it says, and what it changes.

    In a message, ... stands for any text.
    """

    def __init__(self, message: str, changes: Changes | None = None, /, **more: Any) -> None:
        kind, _, text = message.rpartition("Error: ")
        self.error = KINDS[kind]
        self.message = text
        self.changes = changes or more

    def __str__(self) -> str:
        return self.message

    def of(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that differ from those of the call that passes."""
        changes = self.changes(arguments) if callable(self.changes) else self.changes
        return {
            name: value.changed(arguments[name]) if isinstance(value, Edit) else value
            for name, value in changes.items()
        }

    def pattern(self, function: str) -> str:
        return re.escape(f"{function}: {self.message}").replace(r"\.\.\.", ".*")

    def assert_is(self, raised: Exception, function: str) -> None:
        """The error is of the kind and has the message that the row gives."""
        assert type(raised) is self.error
        assert re.fullmatch(self.pattern(function), str(raised)), str(raised)


def rows(table: WrongCalls) -> list[Wrong]:
    return [Wrong(message, changes) for message, changes in table.items()]


def name_of(parameter: Any) -> str:
    """The id of a test's parameter: the same in every process, whatever address a function has."""
    return str(getattr(parameter, "__name__", parameter))


class _Part:
    def __getitem__(self, index: Any) -> Edit:
        return Edit(lambda value: value[index])


part = _Part()  # part[1:] takes a part of the argument


def of(dtype: torch.dtype) -> Edit:
    return Edit(lambda tensor: tensor.to(dtype))


def changed(tensor: Tensor, index: Any, value: float) -> Tensor:
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


def put(index: Any, value: float) -> Edit:
    """A copy with another number in one place."""
    return Edit(lambda tensor: changed(tensor, index, value))


def columns_first(tensor: Tensor) -> Tensor:
    """The same numbers, strided along the last axis."""
    return tensor.mT.contiguous().mT


def shortened(axis: int) -> Edit:
    return Edit(lambda tensor: tensor.narrow(axis, 0, tensor.shape[axis] - 1).clone())


def doubled(axis: int) -> Edit:
    return Edit(lambda tensor: torch.cat([tensor, tensor], axis))


ON_META = Edit(lambda tensor: tensor.to("meta"))
AS_LIST = Edit(lambda tensor: tensor.tolist())
COLUMNS_FIRST = Edit(columns_first)
STRIDED = Edit(lambda tensor: torch.stack([tensor, tensor], dim=-1).flatten(-2)[..., ::2])
EXPANDED = Edit(lambda tensor: tensor[:1].expand(tensor.shape))
RANK_BELOW = Edit(lambda tensor: tensor[0])
RANK_ABOVE = Edit(lambda tensor: tensor[None])
REQUIRES_GRAD = Edit(lambda tensor: tensor.clone().requires_grad_())
