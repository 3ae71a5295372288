"""From the docstrings of this project to Markdown.

They are written to be read in a terminal: arguments stand in aligned columns, equations are
indented. Markdown would run the columns together, so they become a definition list, and the
equations a block of code.

    q          [tokens, heads, D] absorbed           `q`
    q_rope     [tokens, heads, R] and what is   →    :   [tokens, heads, D] absorbed
               said of it
"""

from __future__ import annotations

import re

INDENT = 4
NAMED = re.compile(r"(?P<name>\S.*?) {2,}(?P<text>\S.*)")
ONE_NAME = re.compile(r"[\w.·]+(, [\w.·]+)*")


def markdown_of(docstring: str) -> str:
    """A docstring, its indentation already removed, as Markdown."""
    blocks = re.split(r"\n\s*\n", docstring.strip("\n"))
    return "\n\n".join(_block(block.splitlines()) for block in _join_code(blocks))


def _join_code(blocks: list[str]) -> list[str]:
    """Indented blocks that follow each other are one."""
    joined: list[str] = []
    for block in blocks:
        if joined and _is_code(block) and _is_code(joined[-1]):
            joined[-1] += "\n\n" + block
        else:
            joined.append(block)
    return joined


def _is_code(block: str) -> bool:
    return all(line.startswith(" " * INDENT) or not line for line in block.splitlines())


def _block(lines: list[str]) -> str:
    if _is_code("\n".join(lines)):
        return "\n".join(["```text", *(line[INDENT:] for line in lines), "```"])
    for first in range(len(lines)):
        if _named(lines[first], None) and _continues(lines[first:]):
            before = [_escape("\n".join(lines[:first]))] if first else []
            return "\n\n".join([*before, _definitions(lines[first:])])
    return _escape("\n".join(lines))


def _named(line: str, column: int | None) -> tuple[str, str] | None:
    """The name and the text of a line in two columns, the second at `column` if that is known."""
    if line.startswith((" ", "- ", "|")):
        return None
    if match := NAMED.fullmatch(line):
        return (match["name"], match["text"]) if "`" not in match["name"] else None
    if column is None or len(line) <= column or line[column - 1] != " ":
        return None
    name = line[: column - 1].strip()  # the longest name has but one space after it
    return (name, line[column:]) if ONE_NAME.fullmatch(name) else None


def _continues(lines: list[str]) -> bool:
    """Is the second line of the block no prose that merely has two spaces in its first?"""
    return (
        len(lines) == 1 or lines[1].startswith(" ") or _named(lines[1], _column(lines)) is not None
    )


def _column(lines: list[str]) -> int | None:
    for line in lines:
        if match := NAMED.fullmatch(line):
            return match.start("text")
    return None


def _definitions(lines: list[str]) -> str:
    """A list of names and texts; from the first line that is neither on, plain text again."""
    column = _column(lines)
    found: list[tuple[str, list[str]]] = []
    rest: list[str] = []
    for line in lines:
        if rest or (not line.startswith(" ") and _named(line, column) is None):
            rest.append(line)
        elif line.startswith(" "):
            found[-1][1].append(line.strip())
        else:
            name, text = _named(line, column) or ("", line)
            found.append((name, [text]))
    items = [f"`{name}`\n:   {_escape(' '.join(text))}" for name, text in found]
    return "\n\n".join([*items, *([_block(rest)] if rest else [])])


def _escape(prose: str) -> str:
    """Stars and angle brackets as they are, outside code."""
    parts = re.split(r"(`[^`]*`)", prose)
    return "".join(
        part if part.startswith("`") else re.sub(r"([*<])", r"\\\1", part) for part in parts
    )
