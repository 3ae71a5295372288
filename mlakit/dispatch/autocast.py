"""Functions that ignore `torch.autocast`.

Autocast converts float32 operands of matrix products to a 16-bit type and refuses to concatenate
float64 tensors. The functions here choose the precision of each step themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

DEVICES = ("cpu", "cuda")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """`function` with autocast disabled."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        for device in DEVICES:
            if torch.is_autocast_enabled(device):
                with torch.autocast(device, enabled=False):
                    return wrapper(*args, **kwargs)
        return function(*args, **kwargs)

    return wrapper
