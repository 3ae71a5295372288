"""What the mutation tests rest on: mutants are made and undone, and one that survives is named."""

from __future__ import annotations

import importlib
import sys

import pytest

from tests.mutations import mutate_source, of_attribute, of_source

SOURCE = """
from dataclasses import dataclass

def double(x):
    return x + x

def later(x):
    def inner():
        return x * 3
    return inner()

@dataclass
class Point:
    x: int

    @property
    def left(self):
        return self.x - 1

    @classmethod
    def at(cls, x):
        return cls(x + 10)

LIMIT = 5
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "mutated_module.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("mutated_module")
    del sys.modules["mutated_module"]


@pytest.mark.parametrize(
    ("old", "new", "call", "before", "after"),
    [
        ("x + x", "x + x + 1", lambda m: m.double(2), 4, 5),
        ("x * 3", "x * 4", lambda m: m.later(2), 6, 8),
        ("self.x - 1", "self.x - 2", lambda m: m.Point(7).left, 6, 5),
        ("cls(x + 10)", "cls(x)", lambda m: m.Point.at(1).x, 11, 1),
    ],
)
def test_a_line_of_any_function_is_mutated_and_restored(module, old, new, call, before, after):
    with pytest.MonkeyPatch.context() as patch:
        mutate_source(patch, module="mutated_module", old=old, new=new)
        assert call(module) == after
    assert call(module) == before


def test_other_modules_run_the_mutant_that_they_imported(module, monkeypatch):
    imported = module.double
    mutate_source(monkeypatch, module="mutated_module", old="x + x", new="x")
    assert imported(2) == 2


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("old", "message"),
    [
        ("return", "mutated_module must hold the text to mutate once, got 5 times: return"),
        ("absent", "mutated_module must hold the text to mutate once, got 0 times: absent"),
        ("LIMIT = 5", "mutated_module: no function changes"),
    ],
)
def test_a_mutation_of_no_one_line_of_a_function_is_an_error(old, message, monkeypatch):
    with pytest.raises(ValueError, match=f"^{message}"):
        mutate_source(monkeypatch, module="mutated_module", old=old, new="pass")


def test_a_mutant_that_survives_is_named(module, monkeypatch):
    def returns_nothing(function):
        return lambda x: None

    survives = of_attribute(module, "double", returns_nothing, lambda: module.double(2))
    with pytest.raises(AssertionError, match=r"^mutant survives: double returns_nothing$"):
        survives.assert_killed(monkeypatch)
    assert module.double(2) == 4


def test_a_mutant_must_be_killed_by_the_error_of_its_mutation(module, monkeypatch):
    def check() -> None:
        assert module.double(2) == 4, "double is wrong"

    mutation = of_source("mutated_module", "adds one", "x + x", "x + x + 1", check, "is wrong")
    mutation.assert_killed(monkeypatch)
    other = of_source("mutated_module", "adds one", "x + x", "x + x + 1", check, "another")
    with pytest.raises(AssertionError, match=r"adds one: the check fails with another error: doub"):
        other.assert_killed(monkeypatch)
