"""Scanning of IR text: brackets, quotes and locations.

Triton prints one operation per line. The functions here split such a line at places that are
outside of brackets and quotes, which is all the grammar that the emulator needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

OPENING = "<([{"
CLOSING = ">)]}"
# a quoted string is skipped as a whole, and `->` is an arrow and no bracket
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|->|[<>()\[\]{}:,;]')


def split_top(text: str, separator: str) -> list[str]:
    """Split text at each separator (a comma or a semicolon) outside of brackets and quotes."""
    if separator not in text:
        return [text]
    parts: list[str] = []
    start = 0
    for position in _top_level(text, separator):
        parts.append(text[start:position])
        start = position + 1
    parts.append(text[start:])
    return parts


def split_types(text: str) -> tuple[str, str]:
    """Split an operation at the colon before its types; the second part is empty without one."""
    for position in _top_level(text, ":"):
        if position > 0 and text[position - 1] in " )" and position + 1 < len(text):
            return text[:position].rstrip(), text[position + 1 :].strip()
    return text, ""


def _top_level(text: str, separator: str) -> Iterator[int]:
    """Yield the positions of a separator outside of brackets and quotes."""
    depth = 0
    for found in _BRACKETS.finditer(text):
        token = found.group()
        if token == separator:
            if depth == 0:
                yield found.start()
        elif token in OPENING:
            depth += 1
        elif token in CLOSING:
            depth -= 1


def end_of_parenthesis(text: str, start: int) -> int:
    """Return the position after the parenthesis that closes the one opened before `start`."""
    depth = 1
    for found in _BRACKETS.finditer(text, start):
        if found.group() == "(":
            depth += 1
        elif found.group() == ")":
            depth -= 1
            if depth == 0:
                return found.end()
    raise ValueError(f"a parenthesis is not closed: {text}")


def strip_locations(line: str) -> tuple[str, str]:
    """Remove every `loc(...)` from a line; return the rest and the text of the last location."""
    kept: list[str] = []
    location, start = "", 0
    for found in re.finditer(r"(?:^| )loc\(", line):
        if found.start() < start:  # inside of the location before it
            continue
        end = end_of_parenthesis(line, found.end())
        kept.append(line[start : found.start()].rstrip(" "))
        location, start = line[found.end() : end - 1], end
    kept.append(line[start:])
    return "".join(kept).rstrip(), location
