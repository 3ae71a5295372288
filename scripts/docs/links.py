"""Names in backticks become links to their entries in the API reference."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

DOCS = Path(__file__).parent.parent.parent / "docs"
ENTRY = re.compile(r"^::: (\S+)$", flags=re.MULTILINE)
FENCE = re.compile(r"(^```.*?^```$)", flags=re.MULTILINE | re.DOTALL)
# neither in a link already, nor in a heading, whose anchor it would change
NAME = re.compile(r"^#.*$|(?<![\[`])`([A-Za-z_][\w.]*)`(?!`)", flags=re.MULTILINE)


def entries(pages: Iterable[str]) -> dict[str, str]:
    """Short and full names → full name. Of equal short names that of the shortest path counts:
    `mla_decode` is the op, not its oracle."""
    found = [name for page in pages for name in ENTRY.findall(page)]
    by_depth = sorted(found, key=lambda name: name.count("."), reverse=True)
    return {name.rpartition(".")[2]: name for name in by_depth} | {name: name for name in found}


def api_entries() -> dict[str, str]:
    return entries(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("api/*.md")))


def linked(markdown: str, names: Mapping[str, str]) -> str:
    """Markdown with links for the names it has in backticks, outside blocks of code."""

    def link(match: re.Match[str]) -> str:
        name = match[1] and names.get(match[1])
        return f"[{match[0]}][{name}]" if name else match[0]

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else NAME.sub(link, part) for part in parts)
