"""An extension for mkdocstrings: converts every docstring by `markdown_of`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))  # this file is loaded by its path

from docstring_markdown import markdown_of, trailing_comment
from links import api_entries, linked

NAMES = api_entries()


class ConvertedDocstrings(griffe.Extension):
    """Converts docstrings when they are collected; fields get theirs from comments."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = linked(markdown_of(obj.docstring.value), NAMES)

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        comment = trailing_comment("\n".join(attr.lines)) if attr.docstring is None else ""
        if comment:
            text = linked(markdown_of(comment), NAMES)
            attr.docstring = griffe.Docstring(text, parent=attr)
