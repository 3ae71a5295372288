"""Examples in Markdown, found by their headings, and how they are run."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from typing import NamedTuple

import torch

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", flags=re.MULTILINE)


class Example(NamedTuple):
    """Python code, and what the block right below it says it prints."""

    code: str
    printed: str


def examples(markdown: str) -> dict[str, Example]:
    """Python examples by their last heading, of which each may have one."""
    found: dict[str, Example] = {}
    end_of_code = 0
    for match in FENCE.finditer(markdown):
        heading = HEADING.findall(FENCE.sub("", markdown[: match.start()]))[-1]
        if match[1] == "python":
            assert heading not in found, f"two examples under {heading!r}"
            found[heading] = Example(match[2], "")
            end_of_code = match.end()
        elif (
            match[1] == "text" and end_of_code and not markdown[end_of_code : match.start()].strip()
        ):
            found[heading] = Example(found[heading].code, match[2])
    return found


def output_of(code: str, name: str) -> str:
    """What an example prints."""
    torch.manual_seed(0)
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(code, name, "exec"), {"__name__": "example"})
    return printed.getvalue()


def ends_in_a_check(example: Example) -> bool:
    """Does the last statement print what is shown, or assert?"""
    *_, last = re.split(r"\n(?=\S)", example.code.rstrip())
    return "assert" in last or ("print" in last and bool(example.printed))


def table(markdown: str, header: str) -> list[list[str]]:
    """The rows of the table whose first column is `header`, as cells without backticks."""
    _, _, rest = markdown.partition(f"\n| {header} |")
    assert rest, f"there is no table of {header}"
    lines = rest.split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().replace("`", "") for cell in line.split("|")[1:-1]] for line in lines]


def numbers(cell: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", cell)]
