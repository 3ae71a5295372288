"""What mkdocstrings loads: every docstring goes through `markdown_of` before it is rendered."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))  # this file is loaded by its path, not by a name

from docstring_markdown import markdown_of, trailing_comment


class HouseDocstrings(griffe.Extension):
    """Rewrites docstrings where they are collected; fields get theirs from their comments."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown_of(obj.docstring.value)

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        comment = trailing_comment("\n".join(attr.lines)) if attr.docstring is None else ""
        if comment:
            attr.docstring = griffe.Docstring(markdown_of(comment), parent=attr)
