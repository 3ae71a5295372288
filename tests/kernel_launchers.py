"""Kernels that are watched, or changed for a mutation test."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest

from mlakit import dispatch, knobs

Launcher = Callable[..., object]
Change = Callable[[Launcher], Launcher]
Arguments = dict[str, Any]


def replace_launcher(
    monkeypatch: pytest.MonkeyPatch, op: str, change: Change, *, backend: str | None = None
) -> None:
    """Every kernel of `op` becomes change(kernel), also in calls that are known from before."""
    specs = [each for each in dispatch.specs(op) if backend in (None, each.backend)]
    assert specs, f"{op} has no kernel of {backend}"
    for spec in specs:
        # the dictionary is where cached_property keeps the launcher
        monkeypatch.setitem(spec.__dict__, "launch", change(spec.launch))
    monkeypatch.setenv(knobs.replay.variable, "0")


def named_arguments(launch: Launcher, args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
    return signature(launch).bind(*args, **kwargs).arguments


def by_name(
    before: Callable[[Arguments], Arguments] = lambda a: {},
    after: Callable[[Arguments], object] = lambda a: None,
) -> Change:
    """Change a kernel's arguments before it runs (`before` gives the new ones), or its results
    after. Both get all arguments by name."""

    def change(launch: Launcher) -> Launcher:
        def changed(*args: Any, **kwargs: Any) -> None:
            arguments = named_arguments(launch, args, kwargs)
            arguments.update(before(arguments))
            launch(**arguments)
            after(arguments)

        return changed

    return change


def leaves_unwritten(output: str, index: object) -> Change:
    """The kernel without what it writes to output[index]."""

    def change(launch: Launcher) -> Launcher:
        def changed(*args: Any, **kwargs: Any) -> None:
            out = named_arguments(launch, args, kwargs)[output]
            before = out[index].clone()
            launch(*args, **kwargs)
            out[index] = before

        return changed

    return change


def does_nothing(launch: Launcher) -> Launcher:
    """Outputs keep what they held."""
    return lambda *args, **kwargs: None
