"""Turns names in backticks into links to the API reference."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

DOCS = Path(__file__).parent.parent.parent / "docs"
ENTRY = re.compile(r"^(?:::: |<!-- api: )(\S+)(?: -->)?$", flags=re.MULTILINE)
FENCE = re.compile(r"(^```.*?^```$)", flags=re.MULTILINE | re.DOTALL)
# not within a link, and not in a heading: that would change its anchor
NAME = re.compile(r"^#.*$|(?<![\[`])`([A-Za-z_][\w.]*)`(?!`)", flags=re.MULTILINE)


def entries(pages: Iterable[str]) -> dict[str, str]:
    """Short and full names → full name. A short name means the entry with the shortest path:
    `mla_decode` is the op, not its oracle."""
    found = [name for page in pages for name in ENTRY.findall(page)]
    by_depth = sorted(found, key=lambda name: name.count("."), reverse=True)
    return {name.rpartition(".")[2]: name for name in by_depth} | {name: name for name in found}


def api_entries() -> dict[str, str]:
    return entries(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("api/*.md")))


def linked(markdown: str, names: Mapping[str, str]) -> str:
    """Markdown with links for names in backticks, outside code blocks."""

    def link(match: re.Match[str]) -> str:
        name = match[1] and names.get(match[1])
        return f"[{match[0]}][{name}]" if name else match[0]

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else NAME.sub(link, part) for part in parts)
