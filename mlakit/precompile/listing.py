"""The entries of Triton's cache that the calls of a deployment use, found without a compiler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from mlakit.dispatch import knobs, private
from mlakit.dispatch.checks import values_hidden
from mlakit.dispatch.private import CacheEntry
from mlakit.kernels.launch import Compilation, Target, compiling, launching_into
from mlakit.precompile.calls import Call
from mlakit.precompile.deployment import Deployment
from mlakit.precompile.engine_calls import engine_calls
from mlakit.precompile.step_calls import step_calls


@dataclass(frozen=True)
class Listing(Compilation):
    """The entries of the kernels that launchers started; nothing is compiled."""

    entries: dict[str, CacheEntry] = field(default_factory=dict)  # by key

    @property
    def device(self) -> int:
        return -1 - self.target.arch  # no kernel is ever compiled for this device

    def launch(
        self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        entry = private.cache_entry(lambda: kernel.warmup(*args, grid=grid, **options))
        if entry.key not in self.entries:
            self.entries[entry.key] = entry
            self.found(entry, kernel, grid, args, options)

    def found(self, entry: CacheEntry, *launch: Any) -> None:
        """Do something with the first launch of a kernel."""


@dataclass(frozen=True)
class OneKernel(Listing):
    """Compiles the kernel of one key."""

    key: str = ""

    def found(self, entry: CacheEntry, *launch: Any) -> None:
        if entry.key == self.key:
            with compiling(self.target) as compilation:
                compilation.launch(*launch)
            self.kernels.extend(compilation.kernels)


@dataclass(frozen=True)
class Loading(Compilation):
    """Loads kernels from Triton's cache, for a GPU of this process."""

    number: int = 0  # of the GPU

    @property
    def device(self) -> int:
        return self.number


@contextmanager
def launching(compilation: Compilation) -> Iterator[None]:
    """Give the launches of ops to `compilation`; tensors hold nothing, so no value is checked."""
    with ExitStack() as scope:
        scope.enter_context(values_hidden())
        scope.enter_context(knobs.override(launch_cache=False))
        scope.enter_context(launching_into(compilation))
        yield


def calls_of(d: Deployment) -> Iterator[Call]:
    for user in d.users:
        yield from (step_calls(d) if user == "steps" else engine_calls(d, user))


def load_kernels(calls: Iterable[Call], target: Target, number: int) -> None:
    """Load the kernels of calls as launches on the GPU with this number do."""
    for call in calls:
        with launching(Loading(target, number=number)):
            call.run()


def entries_of(calls: list[Call], target: Target) -> dict[CacheEntry, int]:
    """The entries that calls use on a GPU, each with the number of the first call that uses it."""
    found: dict[CacheEntry, int] = {}
    for number, call in enumerate(calls):
        listing = Listing(target)
        with launching(listing):
            call.run()
        for entry in listing.entries.values():
            found.setdefault(entry, number)
    return found


def compile_kernel(call: Call, key: str, target: Target) -> None:
    """Compile the kernel of this key, which `call` launches."""
    one = OneKernel(target, key=key)
    with launching(one):
        call.run()
    if not one.kernels:
        raise RuntimeError(f"{call.name} launches no kernel of the key {key}")
