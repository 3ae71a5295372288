"""Every environment variable mlakit reads: its name, type, default and meaning, in one place.

A knob is a function: `knobs.check_values()` gives the value in force. `with knobs.override(
check_values=True): …` changes it for a scope (per thread and per async task). A value that does not
parse is an error that names the variable, never a silent default.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

from mlakit.dispatch.names import BACKENDS, one_of
from mlakit.dispatch.names import Backend as Backend
from mlakit.dispatch.names import DecodeKernel as DecodeKernel

T = TypeVar("T")

_OVERRIDES: ContextVar[Mapping[str, object] | None] = ContextVar("mlakit_knobs", default=None)
REGISTRY: dict[str, Knob[object]] = {}


@dataclass(frozen=True)
class Knob(Generic[T]):
    """One setting. Calling it gives the scoped override, else the environment, else the default."""

    name: str
    default: T
    parse: Callable[[str], T]
    meaning: str
    old_variable: str = ""  # the environment variable that set it before; an error where it is set

    @cached_property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return f"MLAKIT_{self.name.upper()}"

    @cached_property
    def _key(self) -> object:
        """The name of the variable as the environment keeps it."""
        return os.environ.encodekey(self.variable)

    def __call__(self) -> T:
        overrides = _OVERRIDES.get()
        if overrides is not None and self.name in overrides:
            return overrides[self.name]  # type: ignore[return-value]  # override() checked it
        if self.old_variable and self.old_variable in os.environ:
            raise ValueError(f"{self.old_variable} must not be set: it is {self.variable} now")
        # `in os.environ` encodes the name each time, a good part of the host cost of a call
        if self._key not in os.environ._data:  # type: ignore[attr-defined]
            return self.default
        text = os.environ[self.variable]
        try:
            return self.parse(text)
        except ValueError as error:
            raise ValueError(f"{self.variable} {error}, got {text!r}") from None


def _boolean(text: str) -> bool:
    words = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
    if text.lower() not in words:
        raise ValueError("must be one of 1, 0, true, false, on, off")
    return words[text.lower()]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("must be a whole number of at least 1")
    return int(text)


def _backend(text: str) -> Backend:
    for backend in BACKENDS:
        if text == backend:
            return backend
    raise ValueError(f"must be one of {', '.join(BACKENDS)}")


def _folder(text: str) -> str:
    # a relative one would be another folder wherever a command is run
    if not Path(text).expanduser().is_absolute():
        raise ValueError("must name a folder by an absolute path")
    return text


def _knob(
    name: str, default: T, parse: Callable[[str], T], meaning: str, old_variable: str = ""
) -> Knob[T]:
    knob = Knob(name, default, parse, meaning, old_variable)
    REGISTRY[name] = knob  # type: ignore[assignment]  # a registry of knobs of every type
    return knob


check_values = _knob(
    "check_values",
    False,
    _boolean,
    "Check lengths, page ids and positions of GPU tensors too (costs a synchronisation per call).",
)
backend: Knob[str] = _knob(
    "backend",
    "auto",
    _backend,
    f"Backend that backend='auto' stands for: {one_of(BACKENDS)}.",
)
launch_cache = _knob(
    "launch_cache",
    True,
    _boolean,
    "Launch the recorded kernels of repeated calls on a GPU again; 0 turns that off.",
    old_variable="MLAKIT_REPLAY",
)
proved_kernels = _knob(
    "proved_kernels",
    True,
    _boolean,
    "Let auto take kernels that need a passed check on this machine, mlakit check --backend "
    "blackwell or hopper; 0 leaves them out.",
)
warmup = _knob(
    "warmup",
    True,
    _boolean,
    "Compile a model's kernels when vLLM or SGLang starts; 0 leaves it to their first launch.",
)
log = _knob(
    "log",
    False,
    _boolean,
    "Write a line to stderr for each kernel that is chosen for a new problem, with the reasons "
    "against faster ones, and for each that is compiled.",
)
workspace_mib = _knob(
    "workspace_mib",
    64,
    _positive,
    "Upper bound in MiB on the scratch memory of one CPU kernel call.",
)
peers = _knob(
    "peers",
    "~/.cache/mlakit/peers",
    _folder,
    "Folder of the libraries that mlakit bench --fetch-peers fetches and mlakit bench loads; "
    "XDG_CACHE_HOME moves the default.",
)


def for_launch_cache() -> tuple[str, bool]:
    """Return (what kernels are selected by, may calls be replayed?) in one look: an op asks at
    every call."""
    environment = os.environ._data  # type: ignore[attr-defined]
    if (
        _OVERRIDES.get() is None
        and backend._key not in environment
        and launch_cache._key not in environment
        and _OLD_KEY not in environment
        and check_values._key not in environment
        and proved_kernels._key not in environment
    ):
        return _FOR_LAUNCH_CACHE
    selects_by = backend() if proved_kernels() else f"{backend()} without proofs"
    return selects_by, launch_cache() and not check_values()


_FOR_LAUNCH_CACHE = backend.default, launch_cache.default and not check_values.default
_OLD_KEY = os.environ.encodekey(launch_cache.old_variable)


def peers_folder() -> Path:
    """Return the folder that `peers` stands for; its default is in the user's cache folder."""
    text = peers()
    if text != peers.default:
        return Path(text).expanduser()
    return cache_folder() / "peers"


def cache_folder() -> Path:
    """Return mlakit's folder in the user's cache folder."""
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not caches.is_absolute():  # unset or, by its specification, to be ignored
        caches = Path("~/.cache").expanduser()
    return caches / "mlakit"


def columns() -> int | None:
    """Return the width of the output, where the terminal's variable says it; else None."""
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isdecimal() else None


def interpreted() -> bool:
    """Return whether Triton's own variable makes it run kernels in its interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


@contextmanager
def override(**values: object) -> Iterator[None]:
    """Set knobs for the scope of a `with` block."""
    for name, value in values.items():
        if name not in REGISTRY:
            raise ValueError(f"unknown knob {name!r}; choose from {sorted(REGISTRY)}")
        default = REGISTRY[name].default
        if type(value) is not type(default):
            raise TypeError(
                f"knob {name} must be {type(default).__name__}, got {type(value).__name__}"
            )
        try:
            REGISTRY[name].parse(str(value))
        except ValueError as error:
            raise ValueError(f"knob {name} {error}, got {value!r}") from None
    token = _OVERRIDES.set({**(_OVERRIDES.get() or {}), **values})
    try:
        yield
    finally:
        _OVERRIDES.reset(token)
