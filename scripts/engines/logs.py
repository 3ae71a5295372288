"""The lines of an engine's log that say why it ended."""

from __future__ import annotations

import re

# what engines write before a line: the process, the level with time and place, the rank
PREFIX = re.compile(
    r"^(\(\S+ pid=\d+\) ?)?"
    r"((?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]+\] ?)?"
    r"(\[rank\d+\]: ?)?"
)
BEGIN = "Traceback (most recent call last):"
FRAMES, MESSAGE, BLOCKS, END = 8, 6, 3, 4


def telling(log: str) -> list[str]:
    """Return the innermost frames and the errors of the first tracebacks, then the last lines.

    Engines go on after the first error, and end with what follows from it. Tracebacks in warnings
    are of errors that an engine expects.
    """
    lines = log.splitlines()
    found: list[str] = []
    blocks, at = 0, 0
    while at < len(lines) and blocks < BLOCKS:
        match = PREFIX.match(lines[at])
        assert match is not None  # every part may be missing
        if match["level"] == "WARNING" or not lines[at][match.end() :].startswith(BEGIN):
            at += 1
            continue
        block, at = _block(lines, at + 1)
        found += block
        blocks += 1
    return [*found, *lines[-END:]]


def _block(lines: list[str], at: int) -> tuple[list[str], int]:
    """Return what a traceback ends with, and the place of the line after it."""
    frames: list[str] = []
    message: list[str] = []
    level = None
    while at < len(lines) and len(message) < MESSAGE:
        match = PREFIX.match(lines[at])
        assert match is not None
        line = lines[at][match.end() :]
        is_frame = line.startswith(" ") and not message
        if message and (not line.strip() or match["level"] != level or line.startswith(BEGIN)):
            break
        level, at = match["level"], at + 1
        if not is_frame:
            message.append(line)
        elif line.strip(" ^~"):
            frames.append(line)
    return [*frames[-FRAMES:], *message], at
