"""`install()` of a drop-in: importing another library's name finds a package of ours."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, TracebackType


class Alias:
    """The name of another library, which a package of ours can take.

    name     "flash_mla"
    package  the package that takes it; the origin of its modules
    modules  makes the modules, the root first, when they are installed
    """

    def __init__(
        self, name: str, package: str, modules: Callable[[], Iterable[ModuleType]]
    ) -> None:
        self.name = name
        self.package = package
        self._modules = modules
        self._displaced: dict[str, ModuleType] = {}  # modules of the real library

    def install(self, *, force: bool) -> Installation:
        """Put our modules into `sys.modules`; with `force` they replace those of the library."""
        if self.is_installed():
            return Installation(self)
        if not force:
            self._refuse_to_replace()
        self._displaced.update(self._take_out())
        for module in self._modules():
            sys.modules[module.__name__] = module
            parent, _, attribute = module.__name__.rpartition(".")
            if parent:
                setattr(sys.modules[parent], attribute, module)
        return Installation(self)

    def uninstall(self) -> None:
        """Undo `install`; no effect if it is not installed."""
        if not self.is_installed():
            return
        self._take_out()
        sys.modules.update(self._displaced)
        self._displaced.clear()

    def is_installed(self) -> bool:
        """Return whether importing the name finds our package."""
        spec = getattr(sys.modules.get(self.name), "__spec__", None)
        return spec is not None and spec.origin == self.package

    def module(self, name: str, doc: str | None, **contents: object) -> ModuleType:
        """A module called `name` with these attributes, all of them in its `__all__`."""
        module = ModuleType(name, doc)
        module.__spec__ = ModuleSpec(
            name, loader=None, origin=self.package, is_package=name == self.name
        )
        if name == self.name:
            module.__path__ = []
        module.__dict__.update(contents)
        module.__dict__["__all__"] = [each for each in contents if not each.startswith("_")]
        return module

    def _take_out(self) -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name.split(".")[0] == self.name]
        return {name: sys.modules.pop(name) for name in names}

    def _refuse_to_replace(self) -> None:
        if self.name in sys.modules:
            where = getattr(sys.modules[self.name], "__file__", None) or "no file"
            found = f"is already imported, from {where}"
        elif (spec := find_spec(self.name)) is not None:
            found = f"is installed, in {spec.origin or 'a namespace'}"
        else:
            return
        raise RuntimeError(
            f"install: another {self.name} {found}; "
            "install(force=True) replaces it until uninstall()"
        )


class Installation:
    """The result of `install`; as a context manager it uninstalls at the end of the block."""

    def __init__(self, alias: Alias) -> None:
        self._alias = alias

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._alias.uninstall()
