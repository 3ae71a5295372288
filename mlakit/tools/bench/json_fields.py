"""Reads records from the objects of a JSON file, and names the field that has another type."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, TypeVar

MAX_INTEGER = 2**63 - 1
# names become parts of file names: no separator of folders, no suffix
NAME = re.compile(r"\w[\w +-]*")
# by kind, which is the annotation of a record's field: what a value must be
KINDS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "str": ("a string", lambda value: isinstance(value, str)),
    "name": (
        "a name of letters, digits, spaces and + - _",
        lambda value: isinstance(value, str) and NAME.fullmatch(value),
    ),
    "int": (
        f"an integer from 0 to {MAX_INTEGER}",
        lambda value: type(value) is int and 0 <= value <= MAX_INTEGER,
    ),
    "float": (
        "a number above 0",
        lambda value: type(value) in (int, float) and 0 < value <= sys.float_info.max,
    ),
    "bool": ("true, false or null", lambda value: isinstance(value, bool)),
    "dict": ("an object", lambda value: isinstance(value, dict)),
    "list": ("a list", lambda value: isinstance(value, list)),
}

T = TypeVar("T")


class FieldError(ValueError):
    """A field that is missing or has another type; the message names it."""


def field(stored: object, name: str, kind: str, path: str = "") -> Any:
    """A value of the object at `path` of the file; "float | None" may be null."""
    if not isinstance(stored, dict):
        raise FieldError(f"{path or 'the file'} must be an object, got {_shown(stored)}")
    kind, _, is_optional = kind.partition(" | ")
    must, is_right = KINDS[kind]
    if name in stored:
        value = stored[name]
        if is_right(value) or (is_optional and value is None):
            return value
    got = _shown(stored[name]) if name in stored else "nothing"
    raise FieldError(f"{path}{'.' if path else ''}{name} must be {must}, got {got}")


def record(kind: type[T], stored: object, path: str, **given: Any) -> T:
    """A dataclass whose fields, but for those `given`, have the annotations in `KINDS`."""
    names = {each.name: str(each.type) for each in fields(kind)}  # type: ignore[arg-type]
    read = {
        name: field(stored, name, annotation, path)
        for name, annotation in names.items()
        if name not in given
    }
    return kind(**read, **given)


def objects(stored: object, name: str) -> Iterator[tuple[object, str]]:
    """The entries of a list, and their paths."""
    for i, each in enumerate(field(stored, name, "list")):
        yield each, f"{name}[{i}]"


def _shown(value: object) -> str:
    """A value in a message, shortened; of a list or an object only the type."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
