"""Finds calls of torch's factories that leave a keyword, such as `device`, to torch's default."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

import mlakit

PACKAGE = Path(mlakit.__file__).parent
# commands, which have their process to themselves
COMMANDS = tuple(
    f"tools/{each}"
    for each in ("bench/", "demo/", "compile/", "cli.py", "doctor.py", "check.py", "support.py")
)


def calls_without(keyword: str, factories: Collection[str], source: str) -> Iterator[str]:
    """Such as `zeros:12`, the factory and its line."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and (node.func.value.id, node.func.attr in factories) == ("torch", True)
            # the keyword, or **options that have it
            and not any(given.arg in (keyword, None) for given in node.keywords)
        ):
            yield f"{node.func.attr}:{node.lineno}"


def package_calls_without(keyword: str, factories: Collection[str]) -> dict[str, list[str]]:
    """By file of the package, its commands left out."""
    return {
        name: calls
        for path in sorted(PACKAGE.rglob("*.py"))
        if not (name := path.relative_to(PACKAGE).as_posix()).startswith(COMMANDS)
        and (calls := list(calls_without(keyword, factories, path.read_text(encoding="utf-8"))))
    }
