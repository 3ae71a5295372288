"""Reads an object of a JSON file field by field, and names the field that has another type."""

from __future__ import annotations

import math
import re
from typing import Any, NoReturn

# names become parts of file names: no separator of folders, no suffix
NAME = re.compile(r"\w[\w +-]*")
MAX_INTEGER = 2**63 - 1


class FieldError(ValueError):
    """A field that is missing or has another type; the message names it."""


class JsonFields:
    """The fields of one object; `path` is its place in the file, "" for the whole."""

    def __init__(self, stored: object, path: str = "") -> None:
        self._path = path
        if not isinstance(stored, dict):
            raise FieldError(f"{path or 'the file'} must be an object, got {shown(stored)}")
        self._stored: dict[str, Any] = stored

    def fail(self, name: str, must: str) -> NoReturn:
        got = shown(self._stored[name]) if name in self._stored else "nothing"
        raise FieldError(f"{self._at(name)} must be {must}, got {got}")

    def _at(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def text(self, name: str) -> str:
        value = self._stored.get(name)
        if not isinstance(value, str):
            self.fail(name, "a string")
        return value

    def name(self, name: str) -> str:
        """A string that can be a part of a file's name."""
        value = self.text(name)
        if not NAME.fullmatch(value):
            self.fail(name, "a name of letters, digits, spaces and + - _")
        return value

    def count(self, name: str) -> int:
        """An integer of at least 0, in 64 bits."""
        value = self._stored.get(name)
        if type(value) is not int or not 0 <= value <= MAX_INTEGER:
            self.fail(name, f"an integer from 0 to {MAX_INTEGER}")
        return value

    def positive(self, name: str) -> float:
        value = self.optional_positive(name)
        if value is None:
            self.fail(name, "a number above 0")
        return value

    def optional_positive(self, name: str) -> float | None:
        """A finite number above 0, or null."""
        value = self._required(name)
        if value is None:
            return None
        is_number = type(value) is float or (type(value) is int and value <= MAX_INTEGER)
        if not is_number or not 0 < value < math.inf:
            self.fail(name, "a number above 0")
        number: float = value
        return number

    def optional_flag(self, name: str) -> bool | None:
        value = self._required(name)
        if value is not None and not isinstance(value, bool):
            self.fail(name, "true, false or null")
        return value

    def object(self, name: str) -> JsonFields:
        return JsonFields(self._required(name), self._at(name))

    def optional_object(self, name: str) -> JsonFields | None:
        return None if self._required(name) is None else self.object(name)

    def objects(self, name: str) -> list[JsonFields]:
        """A list of objects."""
        value = self._stored.get(name)
        if not isinstance(value, list):
            self.fail(name, "a list")
        return [JsonFields(each, f"{self._at(name)}[{i}]") for i, each in enumerate(value)]

    def as_dict(self) -> dict[str, Any]:
        return dict(self._stored)

    def _required(self, name: str) -> Any:
        if name not in self._stored:
            self.fail(name, "there")
        return self._stored[name]


def shown(value: object) -> str:
    """A value in a message, shortened; of a list or an object only the type."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
