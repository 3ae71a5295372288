"""Products of bf16 matrices on CPUs without instructions for them, such as Arm's Neoverse N1.

torch has a loop for them that takes 280 times as long as a product in float32 (398x512x1024, one
thread: 3300 and 12 ms), which was most of the time of all tests. Here they are computed in float32
and rounded once, as the instructions and torch's kernels for them do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# kernels of torch's that are replaced; their `out` overloads are not, so they compute what is left
OPERATORS = ("mm", "bmm", "addmm", "baddbmm")
_registered: list[torch.library.Library] = []  # a library that is dropped takes its kernels with it


def has_instructions() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def use_float32() -> None:
    """From here on, in this process."""
    if _registered:
        return
    library = torch.library.Library("aten", "IMPL", "CPU")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for name in OPERATORS:
            library.impl(name, _in_float32(getattr(torch, name)))
    _registered.append(library)


def _in_float32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def product(*matrices: Tensor, **factors: Any) -> Tensor:
        dtype = matrices[-1].dtype
        if dtype is torch.bfloat16:
            matrices = tuple(each.float() for each in matrices)
        # of no size yet: `function` gives it one, and says so if the shapes do not match
        out = matrices[-1].new_empty(0)
        return function(*matrices, **factors, out=out).to(dtype)

    return product
