"""Types of the IR: scalars, pointers, tensors, tiles of memory (memdesc), TMA descriptors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from mlakit.tools.emulator.ir import Unsupported
from mlakit.tools.emulator.scanning import split_top

MAX_ALIAS_DEPTH = 8
# names with a dialect, such as #ttg.slice, are no aliases
_ALIAS = re.compile(r"#(?!ttg\.|ttng\.|tt\.|gluon\.)\w+")


@dataclass(frozen=True)
class Type:
    """A type.

    kind       i32, f32, bf16, ... of a scalar or of a tensor's elements; ptr, memdesc, tensordesc
    shape      of a tensor or a tile
    is_tensor  whether values are distributed over threads
    layout     its text, without aliases
    pointee    the kind of what a pointer points to, or of a tile's elements
    alloc      the shape that a tile's layout is of, which a slice keeps from its source
    space      the memory of a tile: shared or tensor memory
    """

    kind: str
    shape: tuple[int, ...] = ()
    layout: str = ""
    pointee: str = ""
    alloc: tuple[int, ...] = ()
    space: str = ""
    is_tensor: bool = False


def expand_aliases(text: str, aliases: dict[str, str]) -> str:
    """Return the text of a layout without aliases."""
    for _ in range(MAX_ALIAS_DEPTH):
        expanded = _ALIAS.sub(lambda found: aliases.get(found.group(), found.group()), text)
        if expanded == text:
            return text
        text = expanded
    raise Unsupported(f"aliases of layouts nested deeper than {MAX_ALIAS_DEPTH}: {text}")


class Types:
    """A reader of the types of one module, which has the aliases of its layouts."""

    def __init__(self, aliases: dict[str, str]) -> None:
        self.aliases = aliases
        self.parse = lru_cache(maxsize=4096)(self._parse)

    def _parse(self, text: str) -> Type:
        text = text.strip()
        if text.startswith("tensor<"):
            return self._tensor(text)
        if text.startswith(("!ttg.memdesc<", "<")):
            return self._memdesc(text)
        if text.startswith("!tt.tensordesc<"):
            return self._tensordesc(text)
        if text.startswith("!tt.ptr<"):
            return Type("ptr", pointee=self._parse(_inside(text)[0]).kind)
        return Type("i64" if text == "index" else text)

    def _tensor(self, text: str) -> Type:
        shaped, *layout = _inside(text)
        shape, element = _split_shape(shaped)
        inner = self._parse(element)
        return Type(
            inner.kind,
            shape=shape,
            layout=expand_aliases(",".join(layout).strip(), self.aliases),
            pointee=inner.pointee,
            is_tensor=True,
        )

    def _memdesc(self, text: str) -> Type:
        parts = [each.strip() for each in _inside(text)]
        shape, element = _split_shape(parts[0])
        alloc = shape
        if re.fullmatch(r"\d+(x\d+)*", parts[-1]):
            alloc = tuple(int(size) for size in parts[-1].split("x"))
        return Type(
            "memdesc",
            shape=shape,
            layout=expand_aliases(parts[1], self.aliases),
            pointee=self._parse(element).kind,
            # the layout is of the last dimensions: leading ones that were indexed are gone
            alloc=alloc[-len(shape) :],
            space=expand_aliases(parts[2], self.aliases),
        )

    def _tensordesc(self, text: str) -> Type:
        inner = _inside(text)[0].strip()
        if inner.startswith("tensor<"):
            tensor = self._parse(inner)
            return Type("tensordesc", shape=tensor.shape, pointee=tensor.kind)
        shape, element = _split_shape(inner)
        return Type("tensordesc", shape=shape, pointee=self._parse(element).kind)


def _inside(text: str) -> list[str]:
    """Return the arguments of `name<a, b>`."""
    return split_top(text[text.index("<") + 1 : -1], ",")


def _split_shape(text: str) -> tuple[tuple[int, ...], str]:
    """Return the shape and the element of `64x128xbf16`."""
    sizes = re.match(r"(?:\d+x)*", text.strip())
    head = sizes.group() if sizes else ""
    return tuple(int(size) for size in head.split("x") if size), text.strip()[len(head) :].strip()
