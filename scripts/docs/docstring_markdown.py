"""Converts the docstrings of this project to Markdown.

Docstrings are written for a terminal: arguments are in aligned columns, equations are indented.
Markdown would join the columns, so they become a definition list, and equations become code blocks.

    q       [tokens, heads, D] absorbed            `q`
    q_rope  [tokens, heads, R], and its       →    :   [tokens, heads, D] absorbed
            other lines
"""

from __future__ import annotations

import io
import re
import tokenize
from typing import NamedTuple

INDENT = " " * 4
IN_COLUMNS = re.compile(r"(?P<name>[^\s`](?:[^`]*?\S)?) {2,}(?P<text>\S.*)")
NAMES = re.compile(r"[\w.]+(, [\w.]+)*")


class Entry(NamedTuple):
    """One argument and the lines of its description."""

    name: str
    texts: list[str]


def markdown_of(docstring: str) -> str:
    """A docstring, its indentation already removed, as Markdown."""
    return "\n\n".join(_block(lines) for lines in blocks_of(docstring))


def blocks_of(docstring: str) -> list[list[str]]:
    """The paragraphs and indented blocks of a docstring, as lines."""
    blocks: list[list[str]] = []
    for block in re.split(r"\n\s*\n", docstring.strip("\n")):
        lines = block.splitlines()
        if blocks and _is_code(lines) and _is_code(blocks[-1]):
            blocks[-1] += ["", *lines]  # a blank line inside an indented block
        else:
            blocks.append(lines)
    return blocks


def trailing_comment(source: str) -> str:
    """The comment after a line of code, such as the declaration of a field; "" if there is none.

    Fields have comments instead of docstrings.
    """
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source.strip()).readline))
    except (tokenize.TokenError, IndentationError):  # an incomplete statement
        return ""
    return next((each.string[1:].strip() for each in tokens if each.type == tokenize.COMMENT), "")


def _is_code(lines: list[str]) -> bool:
    return all(line.startswith(INDENT) or not line for line in lines)


def _block(lines: list[str]) -> str:
    if _is_code(lines):
        return "\n".join(["```text", *(line.removeprefix(INDENT) for line in lines), "```"])
    entries, used = entries_of(lines)
    if not entries:
        return escaped("\n".join(lines))
    items = [f"`{name}`\n:   {escaped(' '.join(texts))}" for name, texts in entries]
    rest = [_block(lines[used:])] if used < len(lines) else []
    return "\n\n".join([*items, *rest])


def entries_of(lines: list[str]) -> tuple[list[Entry], int]:
    """The entries at the start of a block, and their number of lines."""
    matches = (IN_COLUMNS.fullmatch(line) for line in lines)
    column = next((match.start("text") for match in matches if match), 0)
    entries: list[Entry] = []
    for used, line in enumerate(lines):
        is_followed = used + 1 < len(lines) and lines[used + 1].startswith(INDENT)
        if line.startswith(" ") and entries:
            entries[-1].texts.append(line.strip())
        elif match := IN_COLUMNS.fullmatch(line):
            entries.append(Entry(match["name"], [match["text"]]))
        elif column and line[column - 1 : column] == " " and NAMES.fullmatch(line[: column - 1]):
            entries.append(Entry(line[: column - 1], [line[column:]]))  # the longest name
        elif column and is_followed and NAMES.fullmatch(line):
            entries.append(Entry(line, []))  # the name is too long for its column
        else:
            return entries, used
    return entries, len(lines)


def escaped(prose: str) -> str:
    """Escape stars and angle brackets outside code."""
    parts = re.split(r"(`[^`]*`)", prose)
    return "".join(
        part if part.startswith("`") else re.sub(r"([*<])", r"\\\1", part) for part in parts
    )
