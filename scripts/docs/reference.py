"""Writes the API reference into docs/api, from signatures and docstrings: `make reference`.

A page has an entry between `<!-- api: NAME -->` and `<!-- end -->`, where NAME is the full name of
a function, a class or a value; a new one begins as a line `::: NAME`. GitHub and the site show
what is committed.
`--check` names the pages that are not as the code has them.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from docstring_markdown import Entry, blocks_of, entries_of, escaped, trailing_comment
from generated_parts import markdown_table
from links import anchor

ROOT = Path(__file__).parents[2]
API = ROOT / "docs" / "api"
MARKER = re.compile(r"(^<!-- api: (\S+) -->\n)(?:.*?^)?(<!-- end -->$)", re.DOTALL | re.MULTILINE)
EXAMPLE = re.compile(r"^(#+) ([^\n]*)$|^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
WIDTH = 96
_BRACKETS = r"\[[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*\]"
SHAPE = re.compile(rf"{_BRACKETS}(?: or {_BRACKETS})*(?=[\s,;:.]|$)[,;:]?\s*")
_DTYPE = r"(?:u?int(?:8|16|32|64)|float(?:16|32|64)?|bf16|fp16|e4m3|bool)"
DTYPE = re.compile(rf"(?:{_DTYPE}(?:(?:, | or ){_DTYPE})*|in \w+'s dtype)(?=[\s,;:.]|$)[,;:.]?\s*")
SAME = re.compile(r"as (?:in|for) `(\w+)`")


# arguments that mean the same everywhere, where a docstring does not describe them
COMMON = {
    "backend": "auto, or the name of a backend",
    "cache": "the pool that holds the rows",
    "epsilon": "of the norm",
    "layer": "number of the layer in the cache",
    "mask": "which keys a query sees",
    "plan": "a schedule made beforehand; never changes a result beyond rounding",
    "power_of_two_scales": "round scales up to powers of two",
    "softmax_scale": "multiplies the scores: `MLAGeometry.softmax_scale`",
    "deterministic": "results do not depend on what else is in the batch",
    "out": "to write the result to",
    "lse": "to write lse to",
    "out_dtype": "of the result",
}


class Example(NamedTuple):
    """Where the documentation calls a name."""

    page: str  # from docs/api
    heading: str


def filled(page: str) -> str:
    """A page with its entries written."""
    page = re.sub(r"^::: (\S+)$", r"<!-- api: \1 -->\n<!-- end -->", page, flags=re.MULTILINE)
    return MARKER.sub(lambda match: f"{match[1]}{entry(match[2])}\n{match[3]}", page)


def entry(name: str) -> str:
    """The Markdown of one name."""
    module, _, short = name.rpartition(".")
    value: Any = getattr(importlib.import_module(module), short)
    methods: list[str] = []
    if inspect.isclass(value):
        own, methods = _class(short, value)
        parts = [own]
    elif callable(value) and hasattr(value, "__doc__") and inspect.isroutine(value):
        parts = [_signature(short, value), *_described(value)]
    else:
        parts = [f"```text\n{short} = {_shown(value)}\n```"]
    found = examples().get(id(value))
    if found is not None:
        parts.append(f"Example: [{found.heading}]({found.page}#{anchor(found.heading)}).")
    homes = (importlib.import_module(each) for each in (module, "mlakit"))
    is_twin = inspect.isclass(value) and any(hasattr(home, short.lower()) for home in homes)
    heading = f"{short} (class)" if is_twin else short  # an anchor has no capitals
    return "\n\n".join([f"## {heading}", *parts, *methods])


def _class(short: str, cls: Any) -> tuple[str, list[str]]:
    """The Markdown of a class, and that of its methods that have more than a sentence."""
    parts = [_constructor(short, cls), *_prose(inspect.getdoc(cls) or "", {}), *_fields(cls)]
    if cls.__init__.__doc__ and "__init__" in vars(cls):
        parts += _described(cls.__init__)
    methods, described = [], []
    for name, member in vars(cls).items():
        function = getattr(member, "__func__", getattr(member, "fget", member))
        is_ours = inspect.isfunction(function) and function.__module__.startswith("mlakit")
        if name.startswith("_") or not is_ours or not inspect.getdoc(function):
            continue
        is_property = isinstance(member, property) or type(member).__name__ == "cached_property"
        shown = f"`.{name}`" if is_property else f"`.{name}({_arguments(function)})`"
        if "\n\n" in (function.__doc__ or "") and not is_property:
            described += [f"### {short}.{name}", _signature(name, function), *_described(function)]
            shown = f"[{shown}](#{anchor(f'{short}.{name}')})"
        methods.append((shown, _cell(_sentence(inspect.getdoc(function) or ""))))
    if methods:
        parts.append(markdown_table(("member", "what it is"), methods))
    return "\n\n".join(part for part in parts if part), described


def _constructor(short: str, cls: Any) -> str:
    try:
        return _signature(short, cls) if "__init__" in vars(cls) else ""
    except ValueError:
        return ""


def _fields(cls: Any) -> list[str]:
    """A table of the annotated fields of a record; their comments describe them."""
    try:
        lines = inspect.getsource(cls).splitlines()
    except (OSError, TypeError):
        return []
    body = ast.parse(textwrap.dedent("\n".join(lines))).body[0]
    assert isinstance(body, ast.ClassDef)
    rows = []
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if node.target.id.startswith("_"):
                continue
            source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            comment = _cell(escaped(trailing_comment(source)))
            default = f" = {ast.unparse(node.value)}" if node.value is not None else ""
            shown = _cell(f"`{ast.unparse(node.annotation)}{default}`")
            rows.append((f"`{node.target.id}`", shown, comment))
    return [markdown_table(("field", "type", "what it is"), rows)] if rows else []


def _signature(short: str, function: Any) -> str:
    signature = inspect.signature(function)
    parts = _parameters(signature)
    result = signature.return_annotation
    arrow = "" if result is inspect.Signature.empty else f" -> {_annotation(result)}"
    line = f"{short}({', '.join(parts)}){arrow}"
    if len(line) > WIDTH:
        inner = textwrap.wrap(
            ", ".join(part.replace(" ", "\0") for part in parts), WIDTH - 4, break_on_hyphens=False
        )
        body = "\n".join(f"    {each}".replace("\0", " ") for each in inner)
        line = f"{short}(\n{body},\n){arrow}"
    return f"```text\n{line}\n```"


def _parameters(signature: inspect.Signature) -> list[str]:
    parts, is_starred = [], False
    for each in signature.parameters.values():
        if each.name in ("self", "cls"):
            continue
        if each.kind is each.KEYWORD_ONLY and not is_starred:
            parts.append("*")
            is_starred = True
        is_starred |= each.kind is each.VAR_POSITIONAL
        star = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        default = "" if each.default is each.empty else f"={_shown(each.default)}"
        parts.append(f"{star}{each.name}{default}")
    return parts


def _arguments(function: Any) -> str:
    return ", ".join(_parameters(inspect.signature(function)))


def _described(function: Any) -> list[str]:
    signature = inspect.signature(function)
    types = {
        name: "" if each.annotation is each.empty else _annotation(each.annotation)
        for name, each in signature.parameters.items()
        if name not in ("self", "cls")
    }
    return _prose(inspect.getdoc(function) or "", types)


def _prose(docstring: str, types: dict[str, str]) -> list[str]:
    """Prose as paragraphs, equations as code, and one table of all arguments after the first
    paragraphs."""
    parts: list[str] = []
    described: dict[str, Entry] = {}
    for lines in blocks_of(docstring):
        known, used = entries_of(lines)
        if lines[0].startswith("    "):
            code = "\n".join(line.removeprefix("    ") for line in lines)
            parts.append(f"```text\n{code}\n```")
            continue
        if known and all(set(each.name.split(", ")) <= set(types) for each in known):
            if parts and parts[-1].endswith(":"):  # a heading of these arguments
                when = parts.pop().rstrip(":")
                known = [Entry(e.name, [*e.texts, f"({when[0].lower()}{when[1:]})"]) for e in known]
            described |= {name: each for each in known for name in each.name.split(", ")}
            parts.append("\0")
        elif known:
            parts.append("\n".join(f"- `{e.name}`: {escaped(' '.join(e.texts))}" for e in known))
        if lines[used:]:
            parts.append(escaped("\n".join(line.strip() for line in lines[used:])))
    place = parts.index("\0") if "\0" in parts else min(1, len(parts))
    parts = [*parts[:place], *([_table(types, described)] if types else []), *parts[place:]]
    return [part for part in parts if part and part != "\0"]


def _table(types: dict[str, str], described: dict[str, Entry]) -> str:
    rows: list[tuple[str, ...]] = []
    for name, annotation in types.items():
        text = " ".join(described[name].texts) if name in described else COMMON.get(name, "")
        shape, dtype, text = _parsed(name, text)
        kind = _cell(f"`{annotation}`") if annotation else ""
        rows.append((f"`{name}`", kind, *map(_cell, (shape, dtype, escaped(text)))))
    header: tuple[str, ...] = ("argument", "type", "shape", "dtype", "what it is")
    if not any(shape or dtype for _, _, shape, dtype, _ in rows):
        header, rows = (*header[:2], header[-1]), [(*row[:2], row[-1]) for row in rows]
    return markdown_table(header, rows)


def _parsed(name: str, text: str) -> tuple[str, str, str]:
    """The shape, the dtype and the rest of the description of an argument."""
    shape = SHAPE.match(text)
    if shape is None:
        other = SAME.match(text)
        known = _texts(other[1]).get(name) if other else None
        return (*_parsed(name, known)[:2], text) if known else ("", "", text)
    rest = text[shape.end() :]
    dtype = DTYPE.match(rest)
    if dtype is None:
        return _tidy(shape), "", rest
    return _tidy(shape), _tidy(dtype).removeprefix("in "), rest[dtype.end() :]


@cache
def _texts(op: str) -> dict[str, str]:
    """The descriptions of the arguments of a public function."""
    public = importlib.import_module("mlakit")
    return {
        name: " ".join(each.texts)
        for lines in blocks_of(inspect.getdoc(getattr(public, op, None)) or "")
        for each in entries_of(lines)[0]
        for name in each.name.split(", ")
    }


def _tidy(match: re.Match[str]) -> str:
    return match[0].strip().rstrip(",;:.")


def _sentence(docstring: str) -> str:
    """The first paragraph of a docstring, on one line."""
    return escaped(" ".join(docstring.split("\n\n")[0].split()))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _annotation(annotation: Any) -> str:
    shown = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", shown)


def _shown(value: Any) -> str:
    """A default or a value, without addresses."""
    if inspect.isroutine(value) or inspect.isclass(value):
        return str(value.__name__)
    shown = repr(sorted(value)) if isinstance(value, (set, frozenset)) else repr(value)
    shown = re.sub(r"<function (\w+) at 0x[0-9a-f]+>", r"\1", shown)
    shown = re.sub(r"<([\w.]+) object at 0x[0-9a-f]+>", r"\1(...)", shown)
    return shown if len(shown) < 200 else f"{type(value).__name__}(...)"


@cache
def examples() -> dict[int, Example]:
    """The first example of the guides that uses each object of mlakit, by its id."""
    found: dict[int, Example] = {}
    guides = [API.parent / f"{name}.md" for name in ("quickstart", "layer", "parallel", "concepts")]
    guides += sorted(set(API.parent.glob("*.md")) - set(guides)) + sorted(API.glob("*.md"))
    for path in guides:
        page = path.name if path.parent == API else f"../{path.name}"
        heading, text = "", MARKER.sub("", path.read_text(encoding="utf-8"))
        for match in EXAMPLE.finditer(text):
            if match[2]:
                heading = match[2]
                continue
            for value in _used(match[3]):
                found.setdefault(id(value), Example(page, heading))
    return found


def _used(code: str) -> Iterator[object]:
    """Return what an example imports from mlakit, and the attributes that it reads of that."""
    nodes, bound = list(ast.walk(ast.parse(code))), {"mlakit": importlib.import_module("mlakit")}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "mlakit":
            home: Any = importlib.import_module(node.module or "")
            for each in node.names:
                bound[each.asname or each.name] = getattr(home, each.name)
    yield from bound.values()
    for node in nodes:
        if isinstance(node, ast.Attribute):
            yield _read(node, bound)


def _read(node: ast.expr, bound: dict[str, Any]) -> object:
    """The value of a dotted name; None for other expressions."""
    if isinstance(node, ast.Attribute):
        return getattr(_read(node.value, bound), node.attr, None)
    return bound.get(node.id) if isinstance(node, ast.Name) else None


def stale() -> Iterator[Path]:
    """The pages that are not as the code has them."""
    for path in sorted(API.glob("*.md")):
        page = path.read_text(encoding="utf-8")
        if filled(page) != page:
            yield path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail on a stale page")
    is_check, pages = parser.parse_args().check, list(stale())
    for path in pages:
        print(f"{path.relative_to(ROOT)}: {'stale, run make reference' if is_check else 'written'}")  # noqa: T201
        if not is_check:
            path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(is_check and bool(pages))


if __name__ == "__main__":
    main()
