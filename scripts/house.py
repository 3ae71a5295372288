"""Counts what keeps the code base small and readable: `make house`.

    python scripts/house.py            the counts
    python scripts/house.py --list     every place behind a count that should be none

Lines are those of tracked files. Sentences are those of docs/ and README.md; code and tables are
left out.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
EMULATOR = ("mlakit/tools/emulator/", "tests/tools/emulator/")
FRAGMENTS = ("Of ", "That ", "As ", "So ", "By ")
MAX_ARGUMENTS = 20  # of a kernel
MAX_WORDS = 40  # of a sentence
CODE = re.compile(r"^(```|~~~).*?^\1|<!--.*?-->", re.MULTILINE | re.DOTALL)
NOT_PROSE = re.compile(r"^\s*(\||#|:::|!\[|---|=== )")
SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`*\[0-9])")


def tracked(*folders: str, suffix: str) -> Iterator[Path]:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", *folders],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if name.endswith(suffix) and not name.startswith(EMULATOR):
            yield ROOT / name


def lines(*folders: str, suffix: str = ".py") -> int:
    return sum(
        len(path.read_text(encoding="utf-8").splitlines())
        for path in tracked(*folders, suffix=suffix)
    )


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def documented(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every docstring."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def is_kernel(node: ast.AST) -> bool:
    """Is the function launched? Its name ends so, and a decorator makes it device code."""
    if not isinstance(node, ast.FunctionDef) or not node.name.endswith("_kernel"):
        return False
    return any("jit" in ast.unparse(each) for each in node.decorator_list)


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line at which a paragraph begins, and each sentence in it."""
    text = CODE.sub(lambda found: "\n" * found[0].count("\n"), text)
    paragraph: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        is_item = re.match(r"\s*([-*]|\d+\.) ", line) is not None
        if paragraph and (not line.strip() or NOT_PROSE.match(line) or is_item):
            for sentence in SENTENCE_END.split(" ".join(paragraph)):
                yield number - len(paragraph), sentence
            paragraph = []
        if line.strip() and not NOT_PROSE.match(line):
            paragraph.append(line.strip())


def survey() -> tuple[dict[str, int], dict[str, list[str]]]:
    """Return the counts, and the places behind those that should be none."""
    fragments, wide, skips, largest = [], [], 0, 0
    for path in tracked("mlakit", suffix=".py"):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        skips += source.count("# fmt: skip")
        fragments += [
            f"{place(path, line)}  {text.splitlines()[0]}"
            for line, text in documented(tree)
            if text.startswith(FRAGMENTS)
        ]
        for node in filter(is_kernel, ast.walk(tree)):
            assert isinstance(node, ast.FunctionDef)
            count = len(node.args.args) + len(node.args.kwonlyargs)
            largest = max(largest, count)
            if count > MAX_ARGUMENTS:
                wide.append(f"{place(path, node.lineno)}  {node.name}: {count} arguments")
    long, words = [], 0
    for path in (*tracked("docs", suffix=".md"), ROOT / "README.md"):
        for line, sentence in sentences(path.read_text(encoding="utf-8")):
            count = len(sentence.split())
            words += 0 if path.parent.name == "api" else count  # most of these are generated
            if count > MAX_WORDS:
                long.append(f"{place(path, line)}  {count} words: {sentence[:80]}…")
    counts = {
        "lines of mlakit/": lines("mlakit"),
        "lines of mlakit/ without tools": lines("mlakit") - lines("mlakit/tools"),
        "lines of tests/": lines("tests"),
        "words of prose in docs/ and README.md": words,
        "# fmt: skip in mlakit/": skips,
        "arguments of the widest kernel": largest,
    }
    places = {
        f"kernels of more than {MAX_ARGUMENTS} arguments": wide,
        "docstrings that begin with Of, That, As, So or By": fragments,
        f"sentences of more than {MAX_WORDS} words": long,
    }
    return counts, places


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="show the places behind the counts")
    asked = parser.parse_args()
    counts, places = survey()
    table = Table("what", "count", title="emulator and its tests left out")
    for what, count in (counts | {what: len(found) for what, found in places.items()}).items():
        table.add_row(what, f"{count:,}")
    console = Console()
    if asked.list:
        for found in places.values():
            console.print(*found, sep="\n", markup=False, highlight=False, soft_wrap=True)
    console.print(table)


if __name__ == "__main__":
    main()
