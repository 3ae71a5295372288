"""Functions whose results do not depend on `torch.autocast`.

Autocast lowers float32 operands of products and refuses to join float64 tensors. What is computed
here says itself which precision each step has.
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
    """`function`, with autocast off while it runs."""

    @wraps(function)
    def unaffected(*args: P.args, **kwargs: P.kwargs) -> R:
        for device in DEVICES:
            if torch.is_autocast_enabled(device):
                with torch.autocast(device, enabled=False):
                    return unaffected(*args, **kwargs)
        return function(*args, **kwargs)

    return unaffected
