"""The interface of a peer: its name, whether it is available, its call for a problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, get_args

from torch import Tensor

from mlakit.dispatch import knobs
from mlakit.tools.bench import gpu
from mlakit.tools.bench.peers import fetched
from mlakit.tools.bench.problems import Attention
from mlakit.tools.bench.suite import PEER_ERRORS

Call: TypeAlias = Callable[[], Tensor]


class Unavailable(Exception):
    """The peer is not available on this machine; the message says why."""


class Unsupported(Exception):
    """The peer does not support this problem; the message says why."""


@dataclass(frozen=True)
class Peer:
    """Another library.

    name      in reports and tables
    title     in the docs
    load      returns the library, or the text of its version; raises Unavailable
    prepare   does the work of once per step and returns the call of once per layer; raises
              Unsupported
    packages  distributions whose versions `mlakit doctor` prints
    in_grid   timed in the suite grid, which skips slow peers
    problems  the kinds of problem it has functions for; other suites do not name it
    """

    name: str
    title: str
    load: Callable[[], ModuleType | str]
    prepare: Callable[[Any], Call]  # of a problem of these kinds
    packages: tuple[str, ...] = ()
    in_grid: bool = True
    problems: tuple[type, ...] = get_args(Attention)

    def why_unavailable(self) -> str | None:
        try:
            self.load()
        except Unavailable as reason:
            return str(reason)
        return None

    def origin(self) -> str:
        """Its build: builds differ in speed."""
        loaded = self.load()
        if isinstance(loaded, str):
            return loaded
        if loaded.__name__.startswith(fetched.MODULE_PREFIX):
            return f"fetched, {fetched.WHEEL}"
        return f"installed, {loaded.__name__} {getattr(loaded, '__version__', '')}".rstrip()


def one_line(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def require_gpu() -> None:
    if reason := gpu.why_not():
        raise Unavailable(reason)


def installed_or_fetched(
    package: str, wrapper: Path, load_fetched: Callable[[Path], ModuleType]
) -> ModuleType:
    """The installed `package`, else the fetched one.

    wrapper       the source file of its interface, relative to the folder of fetched peers
    load_fetched  loads the module from that folder
    """
    require_gpu()
    try:
        module = import_module(package)
        if not _is_drop_in(module):
            return module
        missing = f"the installed {package} is mlakit's drop-in"
    except PEER_ERRORS as error:
        missing = one_line(error)
    folder = knobs.peers_folder()
    if not (folder / wrapper).is_file():
        raise Unavailable(f"{missing}, and it is not in {folder}: run mlakit bench --fetch-peers")
    try:
        return load_fetched(folder)
    except PEER_ERRORS as error:
        raise Unavailable(
            f"{missing}, and the one in {folder} does not load: {one_line(error)}"
        ) from error


def _is_drop_in(module: ModuleType) -> bool:
    """Whether it is `mlakit.compat` under the name of the library."""
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    return origin is not None and origin.startswith("mlakit.")
