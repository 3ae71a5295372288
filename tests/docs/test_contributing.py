"""CONTRIBUTING.md and docs/architecture.md: every path they name exists, with the symbols named.
Other pages: every source file they name exists.

    `path` (`symbol`, `Class.method`)    a file, and what it defines

Each of the twelve searches begins with a command that lists the file of its answer.
"""

from __future__ import annotations

import ast
import re
import shlex
from fnmatch import fnmatch

import pytest

from tests.docs.snippets import FENCE
from tests.paths import ROOT

PAGES = ("CONTRIBUTING.md", "docs/architecture.md")
SUFFIXES = "py|md|yml|toml|json|svg"
REFERENCE = re.compile(
    rf"`(?P<path>[\w./-]+\.(?:{SUFFIXES})|[\w.-]+/[\w./-]*)`(?:\s\((?P<symbols>`[^)]*`)\))?"
)
PATTERN_FILES = {"support.py", "configs.py"}  # of a folder that a checklist has you make
SEARCHED = ("mlakit", "tests", "scripts", "docs")


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def references(markdown: str) -> list[tuple[str, list[str]]]:
    """Every path in backticks, and the symbols in the parentheses behind it."""
    found = []
    for match in REFERENCE.finditer(FENCE.sub("", markdown)):
        symbols = re.findall(r"`([\w.]+)`", match["symbols"] or "")
        found.append((match["path"], symbols))
    return found


def defined_names(source: str) -> set[str]:
    """Functions, classes and variables of a module, and members of its classes by dotted name."""
    names: set[str] = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.If | ast.Try):
                visit(node.body, prefix)
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", 0)]
            names.update(prefix + each.id for each in targets if isinstance(each, ast.Name))

    visit(ast.parse(source).body, "")
    return names


def missing(path: str, symbols: list[str]) -> list[str]:
    """What a reference names and is not there."""
    file = ROOT / path
    if not file.exists():
        return [path]
    if file.is_dir() or not symbols:
        return []
    names = defined_names(file.read_text(encoding="utf-8"))
    return [f"{path}: {symbol}" for symbol in symbols if symbol not in names]


REFERENCES = sorted(
    {
        (page, path, tuple(symbols))
        for page in PAGES
        for path, symbols in references(text_of(page))
        if path not in PATTERN_FILES
    }
)


@pytest.mark.parametrize(("page", "path", "symbols"), REFERENCES)
def test_a_path_exists_with_its_symbols(page, path, symbols):
    assert missing(path, list(symbols)) == []


def test_paths_and_symbols_are_read():
    text = "`mlakit/plan/decode.py` (`plan_decode`, `A.b`) and `tests/`, not `bench/x y` or `fp8`"
    assert references(text) == [("mlakit/plan/decode.py", ["plan_decode", "A.b"]), ("tests/", [])]
    assert references("`mlakit/plan/decode.py`\n(`plan_decode`)") == [
        ("mlakit/plan/decode.py", ["plan_decode"])
    ]
    assert references("```text\n`nowhere.py`\n```") == []
    assert len(REFERENCES) > 60


def test_the_checker_sees_what_is_renamed():
    assert missing("mlakit/model/masks.py", ["Mask", "Mask.interval", "KINDS"]) == []
    assert missing("mlakit/mask.py", []) == ["mlakit/mask.py"]
    assert missing("mlakit/model/masks.py", ["Masque"]) == ["mlakit/model/masks.py: Masque"]
    assert missing("mlakit/model/masks.py", ["Mask.gap"]) == ["mlakit/model/masks.py: Mask.gap"]
    assert missing("mlakit/model/masks.py", ["Tensor"]) == [
        "mlakit/model/masks.py: Tensor"
    ]  # imported only


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_a_source_file_that_a_page_names_exists(page):
    named = re.findall(r"\b(?:mlakit|scripts|tests)/[\w/]+\.py\b", page.read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).is_file()] == []


def searches() -> list[tuple[str, str, str]]:
    """(question, command, answer) of the table of searches."""
    section = text_of("CONTRIBUTING.md").partition("## Twelve searches\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in lines]


SEARCHES = searches()
FILES = [
    path
    for folder in SEARCHED
    for path in sorted((ROOT / folder).rglob("*"))
    if path.is_file() and "__pycache__" not in path.parts
]


def found_by(command: str) -> list[str]:
    """The files that `git ls-files 'PATTERN'` or `git grep -l 'WORD' -- FOLDER` lists."""
    _, program, *words = shlex.split(command)
    names = [path.relative_to(ROOT).as_posix() for path in FILES]
    if program == "ls-files":
        (pattern,) = words
        return [name for name in names if fnmatch(name, pattern)]
    options, word, _, folder = words
    fold = str.lower if "i" in options else str
    inside = [name for name in names if name.startswith(f"{folder}/") and name.endswith(".py")]
    return [name for name in inside if fold(word) in fold(text_of(name))]


@pytest.mark.parametrize(("question", "guess", "answer"), SEARCHES)
def test_the_first_guess_lists_the_answer(question, guess, answer):
    found = found_by(guess.strip("`"))
    first_path, _ = references(answer)[0]
    assert first_path in found


def test_links_of_contributing_lead_somewhere():
    text = text_of("CONTRIBUTING.md")
    anchors = {
        re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", text), flags=re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        assert (ROOT / file).exists() if file else anchor in anchors, target


def test_every_make_target_that_is_named_exists():
    makefile = text_of("Makefile")
    named = set(re.findall(r"`make ([a-z-]+)`", text_of("CONTRIBUTING.md")))
    assert {name for name in named if f"\n{name}:" not in makefile} == set()
    assert {"test", "test-all", "docs"} <= named
