"""Products of 16-bit matrices on CPUs without instructions for them, such as Arm's Neoverse N1.

torch has loops for them. In bf16 they take 280 times as long as a product in float32 (398x512x1024,
one thread: 3300 and 12 ms), in fp16 8 to 40 times, which was most of the time of all tests. Here
such products are computed in float32 and rounded once, as torch does where there are instructions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from platform import machine
from typing import Any

import torch
from torch import Tensor

# kernels of torch's that are replaced; their `out` overloads are not, so they compute what is left
OPERATORS = ("mm", "bmm", "addmm", "baddbmm")
_registered: list[torch.library.Library] = []  # a library that is dropped takes its kernels with it


def slow_types() -> frozenset[torch.dtype]:
    """Types that torch has a loop for on this CPU."""
    is_fast = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        # on Arm it says yes, but takes its loop for most shapes
        torch.float16: machine() != "aarch64" and torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return frozenset(dtype for dtype in is_fast if not is_fast[dtype])


def use_float32(types: Collection[torch.dtype]) -> None:
    """For products of `types`, from here on, in this process."""
    if _registered or not types:
        return
    library = torch.library.Library("aten", "IMPL", "CPU")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for name in OPERATORS:
            library.impl(name, in_float32(getattr(torch, name), types))
    _registered.append(library)


def in_float32(
    function: Callable[..., Tensor], types: Collection[torch.dtype]
) -> Callable[..., Tensor]:
    def product(*matrices: Tensor, **factors: Any) -> Tensor:
        dtype = matrices[-1].dtype
        if dtype in types:
            matrices = tuple(each.float() for each in matrices)
        # of no size yet: `function` gives it one, and says so if the shapes do not match
        out = matrices[-1].new_empty(0)
        return function(*matrices, **factors, out=out).to(dtype)

    return product
