"""Kernels are compiled when an engine starts, so that no request waits for a compiler.

Nothing here imports an engine.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch

import mlakit
from mlakit import MLAGeometry
from mlakit.dispatch import knobs
from mlakit.precompile import WarmupError

logger = logging.getLogger(__name__)
_DONE: set[tuple[object, ...]] = set()  # deployments; an engine makes several backends of each


def compile_kernels(
    user: str, device: torch.device | str, describe: Callable[[], dict[str, Any]]
) -> None:
    """Compile what serving a model launches on a GPU of NVIDIA's.

    describe  returns the arguments of `mlakit.warmup`, with the model's config as `model`

    Where that fails a warning says why, and kernels are compiled at their first launch.
    """
    device = torch.device(device)
    if device.type != "cuda" or torch.version.hip is not None or not knobs.warmup():
        return
    try:
        deployment = describe()
        deployment["model"] = MLAGeometry.from_config(deployment["model"])
        key = (user, device, *sorted(deployment.items()))
        if key not in _DONE:
            with torch.cuda.device(device):
                done = mlakit.warmup(user=user, **deployment)
            _DONE.add(key)
            logger.info("mlakit: %s", done)
    except (WarmupError, AttributeError, ValueError, TypeError, OSError) as error:
        first = str(error).partition("\n")[0]
        warnings.warn(f"mlakit compiles kernels when they are launched: {first}", stacklevel=2)
