"""Launching a compiled kernel again, past Triton's look at its arguments.

At each launch Triton looks at every argument to find the compiled kernel, and encodes every TMA
descriptor. Where only addresses differ, both are known from the recorded launch. The launch
function that is called then, and how it takes its arguments, changes with Triton's version: each
known version has a file here, and for others `any_version` calls the kernel's own launcher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from mlakit.launch_cache.launchers import any_version, triton_3_6, triton_3_9
from mlakit.launch_cache.launchers.prepared import Pointer, PreparedLaunch

__all__ = ["Pointer", "PreparedLaunch", "RecordedLaunch", "has_launch_hooks"]

BY_VERSION = {"3.6.": triton_3_6, "3.9.": triton_3_9}


@dataclass(frozen=True)
class RecordedLaunch:
    """A launch as it was recorded."""

    kernel: Any  # compiled
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]  # in the kernel's order, constexprs included

    def prepare(self) -> PreparedLaunch:
        """How to make it again."""
        grid = (*self.grid, 1, 1)[:3]
        known = BY_VERSION if torch.version.hip is None else {}  # these are CUDA's launchers
        for version, launcher in known.items():
            if triton.__version__.startswith(version):
                prepared: PreparedLaunch | None = launcher.prepare(
                    self.kernel, grid, self.arguments
                )
                if prepared is not None:
                    return prepared
        return any_version.prepare(self.kernel, grid, self.arguments)


def has_launch_hooks() -> bool:
    """Does a profiler want to be called at each launch? A replay does not call it."""
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
