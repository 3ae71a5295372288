"""Triton of any version: the compiled kernel's own launcher, as Triton itself calls it.

It encodes every TMA descriptor at every launch, so a replay costs the host more than with a
launcher that has a file of its own here.
"""

from __future__ import annotations

from typing import Any

from mlakit.launch_cache.launchers.descriptors import Descriptors
from mlakit.launch_cache.launchers.prepared import PreparedLaunch, with_pointers


def prepare(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> PreparedLaunch:
    """kernel.run(x, y, z, stream, function, metadata, launch_metadata, hooks …, *arguments)."""
    marked = tuple(with_pointers(value, Descriptors) for value in arguments)
    return PreparedLaunch(
        kernel.run, grid, (kernel.function, kernel.packed_metadata, None, None, None), marked
    )
