"""Kernels that are watched, or changed for a mutation test."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest

from mlakit.dispatch import knobs, selection

Launcher = Callable[..., object]
Change = Callable[[Launcher], Launcher]
Arguments = dict[str, Any]


def replace_launcher(
    monkeypatch: pytest.MonkeyPatch, op: str, change: Change, *, backend: str | None = None
) -> None:
    """Every kernel of `op` becomes change(kernel), also in calls that are known from before."""
    specs = [each for each in selection.specs(op) if backend in (None, each.backend)]
    assert specs, f"{op} has no kernel of {backend}"
    for spec in specs:
        # the dictionary is where cached_property keeps the launcher
        monkeypatch.setitem(spec.__dict__, "launch", change(spec.launch))
    monkeypatch.setenv(knobs.launch_cache.variable, "0")


def result_names(launch: Launcher) -> list[str]:
    """The parameters of a launcher after its record of arguments."""
    return list(signature(launch).parameters)[1:]


def by_name(
    before: Callable[[Arguments], Arguments] = lambda a: {},
    after: Callable[[Arguments], object] = lambda a: None,
) -> Change:
    """Change a kernel's arguments before it runs (`before` gives the new ones), or its results
    after. Both get all arguments and results by name."""

    def change(launch: Launcher) -> Launcher:
        names = result_names(launch)

        def changed(arguments: Any, *results: Any) -> None:
            named = arguments._asdict() | dict(zip(names, results, strict=True))
            named.update(before(named))
            fields = {name: named[name] for name in arguments._fields}
            launch(arguments._replace(**fields), *(named[name] for name in names))
            after(named)

        return changed

    return change


def leaves_unwritten(output: str, index: object) -> Change:
    """The kernel without what it writes to output[index]."""

    def change(launch: Launcher) -> Launcher:
        at = result_names(launch).index(output)

        def changed(arguments: Any, *results: Any) -> None:
            before = results[at][index].clone()
            launch(arguments, *results)
            results[at][index] = before

        return changed

    return change


def does_nothing(launch: Launcher) -> Launcher:
    """Outputs keep what they held."""
    return lambda *args, **kwargs: None
