"""Mutation tests: a named change to a function, and the check that must fail on it.

The changed function is a mutant. A check that fails on the mutant kills it. Where a mutant
survives, a check is missing. Each list of mutations lies beside the checks that it is for.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from tests.kernel_launchers import Change, replace_launcher

Check = Callable[[], object]


@dataclass(frozen=True)
class Mutation:
    """`make` puts the mutant in the place of the function; `check` then must fail.

    function  what is changed: an op, an oracle, a module
    name      what the mutant does wrong
    error     a regular expression that the failure of the check must match
    """

    function: str
    name: str
    make: Callable[[pytest.MonkeyPatch], None]
    check: Check
    error: str = ""

    def __str__(self) -> str:
        return f"{self.function} {self.name}"

    def assert_killed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            self.make(patch)
            try:
                self.check()
            except AssertionError as failure:
                found = str(failure)
            else:
                raise AssertionError(f"mutant survives: {self}")
        assert re.search(self.error, found), f"{self}: the check fails with another error: {found}"


def of_kernel(op: str, name: str, change: Change, check: Check, **where: Any) -> Mutation:
    """A mutation of the launchers of an op's kernels, of all or of those of one `backend`."""
    error = where.pop("error", "")

    def make(patch: pytest.MonkeyPatch) -> None:
        replace_launcher(patch, op, change, **where)

    return Mutation(op, name, make, check, error)


def of_attribute(owner: ModuleType, attribute: str, change: Change, check: Check) -> Mutation:
    """A mutation of a function that `check` looks up as `owner.attribute`."""

    def make(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(owner, attribute, change(getattr(owner, attribute)))

    return Mutation(attribute, change.__name__, make, check)


def of_source(
    module: str, name: str, old: str, new: str, check: Check, error: str = ""
) -> Mutation:
    """A mutation of a line in a function of a module: `old` becomes `new`."""
    return Mutation(
        module, name, partial(mutate_source, module=module, old=old, new=new), check, error
    )


def mutate_source(patch: pytest.MonkeyPatch, *, module: str, old: str, new: str) -> None:
    """Give the functions of a module the code that they have with `new` for `old` in its source.

    Only the code changes, not the function, so modules that imported the function run the mutant.
    """
    loaded = import_module(module)
    file = inspect.getsourcefile(loaded)
    assert file is not None
    source = Path(file).read_text(encoding="utf-8")
    if source.count(old) != 1:
        raise ValueError(
            f"{module} must hold the text to mutate once, got {source.count(old)} times: {old}"
        )
    codes = dict(_codes(compile(source.replace(old, new), file, "exec", dont_inherit=True)))
    changed = [
        (function, codes[function.__qualname__])
        for function in _functions(loaded)
        if codes.get(function.__qualname__, function.__code__) != function.__code__
    ]
    if not changed:
        raise ValueError(f"{module}: no function changes with {new!r} for {old!r}")
    for function, code in changed:
        patch.setattr(function, "__code__", code)


def _codes(code: CodeType, prefix: str = "") -> Iterator[tuple[str, CodeType]]:
    """(qualified name, code) of the functions of a module and of its classes."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield prefix + each.co_name, each
            yield from _codes(each, f"{prefix}{each.co_name}.")


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    own = [each for each in vars(module).values() if _is_of(each, module)]
    methods = [each for owner in own if isinstance(owner, type) for each in vars(owner).values()]
    for each in (*own, *methods):
        function = inspect.unwrap(getattr(each, "fget", None) or getattr(each, "__func__", each))
        if isinstance(function, FunctionType) and _is_of(function, module):
            yield function


def _is_of(value: object, module: ModuleType) -> bool:
    return getattr(value, "__module__", None) == module.__name__
