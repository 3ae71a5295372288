"""What every peer is: a name, whether it is here, and how it is called on a problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

from torch import Tensor

from mlakit import knobs
from mlakit.bench import gpu
from mlakit.bench.peers import folder
from mlakit.bench.problems import Problem
from mlakit.bench.suite import PEER_ERRORS

Call: TypeAlias = Callable[[], Tensor]


class Absent(Exception):
    """The peer is not on this machine; the message says why."""


class CannotTake(Exception):
    """The peer has no way to do this problem; the message says why."""


@dataclass(frozen=True)
class Peer:
    """A rival.

    load     the library, or in words what stands for it; raises Absent where it is not here
    prepare  does what is done once per step, and returns what is done once per layer; raises
             CannotTake
    """

    name: str
    load: Callable[[], ModuleType | str]
    prepare: Callable[[Problem], Call]

    def why_absent(self) -> str | None:
        try:
            self.load()
        except Absent as reason:
            return str(reason)
        return None

    def origin(self) -> str:
        """Which build it is: they differ in speed."""
        loaded = self.load()
        if isinstance(loaded, str):
            return loaded
        if loaded.__name__.startswith(folder.FETCHED):
            return f"fetched, {folder.WHEEL}"
        return f"installed, {loaded.__name__} {getattr(loaded, '__version__', '')}".rstrip()


def told(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def require_gpu() -> None:
    if reason := gpu.why_not():
        raise Absent(reason)


def installed_or_fetched(
    package: str, wrapper: Path, load_fetched: Callable[[Path], ModuleType]
) -> ModuleType:
    """The installed `package`, else what was fetched.

    wrapper       the source file that is its interface, within the folder of peers
    load_fetched  makes a module of that folder
    """
    require_gpu()
    try:
        module = import_module(package)
        if not _is_ours(module):
            return module
        missing = f"the {package} here is mlakit's own"
    except PEER_ERRORS as error:
        missing = told(error)
    fetched = knobs.peers_folder()
    if not (fetched / wrapper).is_file():
        raise Absent(f"{missing}, and the folder {fetched} has none: mlakit bench --fetch-peers")
    try:
        return load_fetched(fetched)
    except PEER_ERRORS as error:
        raise Absent(f"{missing}, and the one in {fetched} does not load: {told(error)}") from error


def _is_ours(module: ModuleType) -> bool:
    """Is it the drop-in of `mlakit.compat` under another name? One does not race oneself."""
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    return origin is not None and origin.startswith("mlakit.")
