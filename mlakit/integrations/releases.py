"""The release of an engine that an integration was tested with, and its names, imported late.

Nothing here imports torch: engines load plugins in every process.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Release:
    """One release of an engine; others are refused, since the seams of engines change fast."""

    engine: str  # as its project writes it
    distribution: str  # its name on PyPI, mlakit's extra, and the package in mlakit.integrations
    version: str

    @property
    def package(self) -> str:
        """The package of mlakit that serves it."""
        return f"mlakit.integrations.{self.distribution}"

    @property
    def install(self) -> str:
        """The command that installs it."""
        wanted = f"{self.distribution}=={self.version}"
        return f"pip install 'mlakit[{self.distribution}]' ({wanted})"

    def why_not(self) -> str | None:
        """Return why the integration cannot serve: the engine is missing, or of another release."""
        try:
            version = importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return f"{self.package}: {self.engine} must be installed: {self.install}"
        if version.partition("+")[0] == self.version:  # a local part names a build: 0.32.0+cu130
            return None
        tested = f"{self.version}, the release that was tested"
        return f"{self.package}: {self.engine} must be {tested}, got {version}: {self.install}"

    def check(self) -> None:
        """Raise UnsupportedError if the integration cannot serve."""
        from mlakit.dispatch.checks import UnsupportedError  # imports torch

        if refusal := self.why_not():
            raise UnsupportedError(refusal)

    def find(self, paths: Mapping[str, str], module: str, name: str) -> Any:
        """A name of the engine, imported now from the module that `paths` gives for it."""
        if name not in paths:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        self.check()
        return getattr(importlib.import_module(paths[name]), name)
