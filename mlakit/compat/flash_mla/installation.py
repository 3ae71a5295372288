"""`install()`: make `import flash_mla` find this package."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

from mlakit.compat.installation import Alias, Installation

NAME = "flash_mla"
PACKAGE = __name__.rpartition(".")[0]


def install(*, force: bool = False) -> Installation:
    """Make `import flash_mla` and `import flash_mla.flash_mla_interface` find this package.

    Raises RuntimeError if another flash_mla is installed. With `force` this package replaces it
    until `uninstall`; modules that imported it before keep it. A second call has no effect.
    """
    return ALIAS.install(force=force)


def uninstall() -> None:
    """Undo `install`; no effect if it is not installed."""
    ALIAS.uninstall()


def _modules() -> Iterator[ModuleType]:
    package = import_module(PACKAGE)
    names = {each: getattr(package, each) for each in package.__all__}
    # FlashMLA defines its functions in flash_mla_interface; callers also import that
    for name in (NAME, f"{NAME}.flash_mla_interface"):
        yield ALIAS.module(name, package.__doc__, **names, __version__=package.__version__)


ALIAS = Alias(NAME, PACKAGE, _modules)
