"""The releases of an engine that an integration serves, and the engine's names, imported late.

Nothing here imports torch: engines load plugins in every process.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mlakit.integrations.seams import Seam, Source, Version, missing, version_of


@dataclass(frozen=True)
class Releases:
    """The releases of an engine that serve.

    Tests have run some. The others must have every name and signature that mlakit relies on: they
    are read from the engine's source before it is used. Outside of the range from `first` to `last`
    a warning says that the release has not been tested.
    """

    engine: str  # as its project writes it
    distribution: str  # its name on PyPI, mlakit's extra, and the package in mlakit.integrations
    seams: Mapping[str, Seam]
    run: tuple[str, ...]
    first: str
    last: str

    @property
    def package(self) -> str:
        """The package of mlakit that serves it."""
        return f"mlakit.integrations.{self.distribution}"

    @property
    def install(self) -> str:
        """The command that installs it."""
        wanted = f"{self.distribution}=={self.run[-1]}"
        return f"pip install 'mlakit[{self.distribution}]' ({wanted})"

    @property
    def installed(self) -> Version:
        """The release that is installed."""
        return version_of(installed_version(self.distribution))

    def why_not(self) -> str | None:
        """Return why the integration cannot serve: the engine is missing, or lacks a name."""
        try:
            version = installed_version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return f"{self.package}: {self.engine} must be installed: {self.install}"
        version = version.partition("+")[0]  # a local part names a build: 0.32.0+cu130
        return None if version in self.run else _why_not(self.distribution, version, self)

    def check(self) -> None:
        """Raise UnsupportedError if the integration cannot serve."""
        from mlakit.dispatch.checks import UnsupportedError  # imports torch

        if refusal := self.why_not():
            raise UnsupportedError(refusal)

    def has(self, name: str) -> bool:
        """Whether the installed release has a name that others lack."""
        return self.seams[name].is_in(self.installed)

    def find(self, asked: str, name: str) -> Any:
        """A name of the engine, imported now from where the installed release has it."""
        if name not in self.seams:
            raise AttributeError(f"module {asked!r} has no attribute {name!r}")
        self.check()
        seam = self.seams[name]
        module = importlib.import_module(seam.module_in(self.installed))
        return getattr(module, seam.names or name)

    def __hash__(self) -> int:
        return hash(self.distribution)


@lru_cache(maxsize=8)
def installed_version(distribution: str) -> str:
    """Return the version of an installed package, read once: names are asked for in every step."""
    return importlib.metadata.version(distribution)


@lru_cache(maxsize=8)
def _why_not(distribution: str, version: str, releases: Releases) -> str | None:
    """Return what a release lacks that tests have not run; warn if it is out of the range."""
    lacks = missing(releases.seams, Source.installed(distribution), version_of(version))
    served = f"{releases.engine} {releases.first} to {releases.last}"
    if lacks:
        return (
            f"{releases.package}: serves {served}, and {version} lacks {', '.join(lacks)}: "
            f"{releases.install}"
        )
    if not version_of(releases.first) <= version_of(version) <= version_of(releases.last):
        warnings.warn(
            f"{releases.package}: serves {served}; {version} has every name it needs, "
            f"but has not been tested",
            stacklevel=4,
        )
    return None
