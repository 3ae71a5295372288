"""Turns names in backticks into links to the API reference, and headings into anchors."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path

DOCS = Path(__file__).parent.parent.parent / "docs"
ENTRY = re.compile(r"^<!-- api: (\S+) -->\n## (.+)$", flags=re.MULTILINE)
FENCE = re.compile(r"(^```.*?^```$)", flags=re.MULTILINE | re.DOTALL)
# not within a link, and not in a heading: that would change its anchor
NAME = re.compile(r"^#.*$|(?<![\[`])`([A-Za-z_][\w.]*)`(?!`)", flags=re.MULTILINE)


def anchor(heading: str) -> str:
    """The anchor of a heading, on GitHub and on the site."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def api_entries() -> dict[str, str]:
    """Short and full names → page#anchor from docs/. A short name means the entry with the shortest
    path: `mla_decode` is the op, not its oracle."""
    found = {
        name: f"api/{path.name}#{anchor(heading)}"
        for path in sorted(DOCS.glob("api/*.md"))
        for name, heading in ENTRY.findall(path.read_text(encoding="utf-8"))
    }
    by_depth = sorted(found, key=lambda name: name.count("."), reverse=True)
    return {name.rpartition(".")[2]: found[name] for name in by_depth} | found


def linked(markdown: str, names: Mapping[str, str], page: str = "index.md") -> str:
    """Markdown of a page with links for names in backticks, outside code blocks.

    names  as `api_entries` gives them
    """
    folder = posixpath.dirname(page)

    def link(match: re.Match[str]) -> str:
        target = names.get(match[1] or "")
        return f"[{match[0]}]({posixpath.relpath(target, folder)})" if target else match[0]

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else NAME.sub(link, part) for part in parts)
