"""`install()`: make `import flash_mla` find this package."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, TracebackType

ALIAS = "flash_mla"
# FlashMLA defines its functions in flash_mla_interface; callers also import that
ALIASES = (ALIAS, f"{ALIAS}.flash_mla_interface")
PACKAGE = "mlakit.compat.flash_mla"

_displaced: dict[str, ModuleType] = {}  # modules of the real flash_mla, for uninstall


class Installation:
    """The result of `install`; as a context manager it uninstalls at the end of the block."""

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        uninstall()


def install(*, force: bool = False) -> Installation:
    """Make `import flash_mla` and `import flash_mla.flash_mla_interface` find this package.

    Raises RuntimeError if another flash_mla is installed. With `force` this package replaces it
    until `uninstall`; modules that imported it before keep it. A second call has no effect.
    """
    if is_installed():
        return Installation()
    if not force:
        _refuse_to_replace()
    theirs = [name for name in sys.modules if name.split(".")[0] == ALIAS]
    _displaced.update({name: sys.modules.pop(name) for name in theirs})
    package = import_module(PACKAGE)
    modules = [_alias(name, package) for name in ALIASES]
    for module in modules:
        sys.modules[module.__name__] = module
    modules[0].flash_mla_interface = modules[1]  # type: ignore[attr-defined]
    return Installation()


def uninstall() -> None:
    """Undo `install`; no effect if it is not installed."""
    if not is_installed():
        return
    for name in ALIASES:
        sys.modules.pop(name, None)
    sys.modules.update(_displaced)
    _displaced.clear()


def is_installed() -> bool:
    """Return whether `import flash_mla` finds this package."""
    spec = getattr(sys.modules.get(ALIAS), "__spec__", None)
    return spec is not None and spec.origin == PACKAGE


def _refuse_to_replace() -> None:
    if ALIAS in sys.modules:
        where = getattr(sys.modules[ALIAS], "__file__", None) or "no file"
        found = f"is already imported, from {where}"
    elif (spec := find_spec(ALIAS)) is not None:
        found = f"is installed, in {spec.origin or 'a namespace'}"
    else:
        return
    raise RuntimeError(
        f"install: another flash_mla {found}; install(force=True) replaces it until uninstall()"
    )


def _alias(name: str, package: ModuleType) -> ModuleType:
    module = ModuleType(name, package.__doc__)
    module.__spec__ = ModuleSpec(name, loader=None, origin=PACKAGE)
    module.__dict__.update({each: getattr(package, each) for each in package.__all__})
    module.__dict__.update(__version__=package.__version__, __all__=list(package.__all__))
    return module
