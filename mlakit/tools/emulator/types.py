"""Types of TTGIR."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from mlakit.tools.emulator.scanning import split_top


@dataclass(frozen=True)
class Type:
    kind: str  # i32, f32, bf16, ..., ptr, memdesc, tensordesc, other
    shape: tuple[int, ...] | None = None  # of a tensor or tile
    layout: str = ""
    pointee: str = ""  # of a pointer; element of a tile
    alloc: tuple[int, ...] = ()
    space: str = ""

    @property
    def is_tensor(self) -> bool:
        return self.shape is not None and self.kind not in ("memdesc", "tensordesc")


def expand(text: str, aliases: dict[str, str]) -> str:
    """The text of a layout without aliases."""
    for _ in range(8):
        new = re.sub(
            r"#(?!ttg\.|ttng\.|tt\.|gluon\.)\w+", lambda m: aliases.get(m.group(), m.group()), text
        )
        if new == text:
            break
        text = new
    return text


def _shaped(text: str) -> tuple[tuple[int, ...], str]:
    found = re.match(r"((?:\d+x)*)(.*)$", text.strip())
    assert found
    return tuple(int(n) for n in found.group(1).split("x") if n), found.group(2).strip()


class Types:
    def __init__(self, aliases: dict[str, str]) -> None:
        self.aliases = aliases
        self.parse = lru_cache(maxsize=4096)(self._parse)

    def _parse(self, text: str) -> Type:
        text = text.strip()
        if text.startswith("tensor<"):
            parts = split_top(text[7:-1], ",")
            shape, element = _shaped(parts[0])
            inner = self._parse(element)
            layout = expand(",".join(parts[1:]).strip(), self.aliases) if len(parts) > 1 else ""
            return Type(inner.kind, shape, layout, inner.pointee)
        if text.startswith(("!ttg.memdesc<", "<")):
            parts = split_top(text[text.index("<") + 1 : -1], ",")
            shape, element = _shaped(parts[0])
            layout = expand(parts[1].strip(), self.aliases)
            space = expand(parts[2].strip(), self.aliases)
            alloc = shape
            if re.match(r"\s*\d+(x\d+)*\s*$", parts[-1]):
                alloc = tuple(int(n) for n in parts[-1].strip().split("x"))
            # the layout is of the last dimensions: leading ones that were indexed are gone
            return Type(
                "memdesc", shape, layout, self._parse(element).kind, alloc[-len(shape) :], space
            )
        if text.startswith("!tt.tensordesc<"):
            parts = split_top(text[15:-1], ",")
            inner = parts[0].strip()
            if inner.startswith("tensor<"):
                shaped = self._parse(inner)
                return Type("tensordesc", shaped.shape, "", shaped.kind)
            shape, element = _shaped(inner)
            return Type("tensordesc", shape, "", element)
        if text.startswith("!tt.ptr<"):
            return Type("ptr", None, "", self._parse(split_top(text[8:-1], ",")[0]).kind)
        if text == "index":
            return Type("i64")
        return Type(text)
