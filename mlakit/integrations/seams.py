"""Reads the names and signatures of an engine that mlakit relies on, from the engine's source.

Nothing is imported: a plugin asks before the engine's modules are loaded, and a wheel need not be
installed (`scripts/check_seams.py`).
"""

from __future__ import annotations

import ast
import importlib.metadata
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

Version: TypeAlias = tuple[int, ...]
ReadFile: TypeAlias = Callable[[str], "str | None"]
Definition: TypeAlias = "ast.ClassDef | ast.FunctionDef | ast.stmt"


@dataclass(frozen=True)
class Seam:
    """A name of an engine, and what mlakit relies on about it."""

    module: str
    # by method, "" for the function itself: parameters that mlakit passes, or reads where it
    # overrides the method
    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # by method that mlakit overrides: all parameters that its own takes, since the engine may pass
    # any that the engine's has
    overrides: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    attributes: tuple[str, ...] = ()  # of an instance, which its methods set
    since: Version = ()  # the first release that has the name; mlakit does without it in others
    before: Version = ()  # the first release that has it no more
    # (release, module): where releases before that one have it
    earlier: tuple[Version, str] = ((), "")
    names: str = ""  # the name in the module, if it is another one

    def module_in(self, version: Version) -> str:
        """Where a release has it."""
        release, module = self.earlier
        return module if version < release else self.module

    def is_in(self, version: Version) -> bool:
        """Whether a release must have it."""
        return self.since <= version and (not self.before or version < self.before)


def version_of(text: str) -> Version:
    """The numbers of a release: (0, 33, 0) of "0.33.0rc1+cu130"."""
    numbers: list[int] = []
    for part in text.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:  # 0rc1
            break
    return tuple(numbers)


class Source:
    """The source of an engine, parsed where it is asked for."""

    def __init__(self, read: ReadFile) -> None:
        self._read = read
        self._modules: dict[str, ast.Module | None] = {}

    @classmethod
    def of_wheel(cls, wheel: Path) -> Source:
        archive = zipfile.ZipFile(wheel)
        names = set(archive.namelist())
        return cls(lambda name: archive.read(name).decode() if name in names else None)

    @classmethod
    def installed(cls, distribution: str) -> Source:
        found = importlib.metadata.distribution(distribution)

        def read(name: str) -> str | None:
            path = Path(str(found.locate_file(name)))
            return path.read_text(encoding="utf-8") if path.exists() else None

        return cls(read)

    def module(self, name: str) -> ast.Module | None:
        if name not in self._modules:
            path = name.replace(".", "/")
            text = self._read(f"{path}.py")
            text = self._read(f"{path}/__init__.py") if text is None else text
            self._modules[name] = None if text is None else ast.parse(text)
        return self._modules[name]

    def find(self, module: str, name: str) -> tuple[str, Definition] | None:
        """The statement that defines a name, and its module; imports are followed."""
        tree = self.module(module)
        for statement in _statements(tree.body) if tree is not None else ():
            if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
                own = [each.name for each in statement.names if name in (each.asname, each.name)]
                if own:
                    # a compiled module cannot be read: that it is imported is all there is to see
                    return self.find(statement.module, own[0]) or (module, statement)
            elif name in _defined(statement):
                return module, statement
        return None

    def missing(self, name: str, seam: Seam, version: Version) -> list[str]:
        """What a release lacks of a seam."""
        name, module = seam.names or name, seam.module_in(version)
        found = self.find(module, name)
        if found is None:
            return [f"{module}.{name}"]
        lacks = []
        for method, wanted in seam.parameters.items():
            function = self._method(*found, method) if method else found[1]
            label = ".".join(filter(None, [module, name, method]))
            if not isinstance(function, ast.FunctionDef):
                lacks.append(label)
                continue
            given = _parameters(function)
            lacks += [f"{label}({each}=)" for each in wanted if given and each not in given]
        for method, taken in seam.overrides.items():
            function = self._method(*found, method)
            label = f"{module}.{name}.{method}"
            if function is None:
                lacks.append(label)
                continue
            others = [each for each in _parameters(function)[1:] if each not in taken]
            lacks += [f"{label} without {each}=" for each in others]
        for attribute in seam.attributes:
            if not self._sets(*found, attribute):
                lacks.append(f"{module}.{name}.{attribute}")
        return lacks

    def _method(self, module: str, owner: Definition, name: str) -> ast.FunctionDef | None:
        for _, each in self._ancestors(module, owner):
            for statement in _statements(each.body):
                if isinstance(statement, ast.FunctionDef) and statement.name == name:
                    return statement
        return None

    def _sets(self, module: str, owner: Definition, attribute: str) -> bool:
        return any(attribute in _set_by(each) for _, each in self._ancestors(module, owner))

    def _ancestors(self, module: str, owner: Definition) -> Iterator[tuple[str, ast.ClassDef]]:
        """The class, and those that it inherits from as far as the engine defines them."""
        if not isinstance(owner, ast.ClassDef):
            return
        yield module, owner
        for base in owner.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            found = self.find(module, plain.id) if isinstance(plain, ast.Name) else None
            if found is not None:
                yield from self._ancestors(*found)


def missing(seams: Mapping[str, Seam], source: Source, version: Version) -> list[str]:
    """What a release lacks of the seams that it must have."""
    return [
        each
        for name, seam in seams.items()
        if seam.is_in(version)
        for each in source.missing(name, seam, version)
    ]


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body, with those behind a condition such as TYPE_CHECKING."""
    for statement in body:
        yield statement
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            yield from _statements(statement.body)
            yield from _statements(getattr(statement, "orelse", []))


def _defined(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return [each.id for each in targets if isinstance(each, ast.Name)]


def _parameters(function: ast.FunctionDef) -> list[str]:
    """The names of all parameters; none if any name is taken."""
    given = function.args
    if given.kwarg is not None:
        return []
    return [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def _set_by(owner: ast.ClassDef) -> set[str]:
    """The attributes that the body of a class and its methods set."""
    names = {each for statement in owner.body for each in _defined(statement)}
    for node in ast.walk(owner):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            names.add(node.attr)
    return names
