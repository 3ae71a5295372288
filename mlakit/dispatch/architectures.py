"""GPU architectures as integers: 90 is sm_90, 0x942 is gfx942.

A compute capability of CUDA has at most three decimal digits. AMD numbers its architectures in
hexadecimal (gfx90a), from gfx600 on, so that both fit one integer without a clash.
"""

from __future__ import annotations

import re

FIRST_AMD = 0x600
# AMD's that the portable kernels are compiled for; they have not been run on any of them
AMD = {0x942: "MI300X", 0x950: "MI350X", 0x1100: "RX 7900"}
# usual cards of every architecture with kernels
CARDS = {
    80: "A100",
    86: "RTX 30, A40",
    89: "L40S, RTX 40",
    90: "H100, H200",
    100: "B200",
    120: "RTX 50",
    **AMD,
}
# streaming multiprocessors, or AMD's compute units, of a usual card
NUM_SMS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 103: 148, 120: 170}
NUM_SMS |= {0x942: 304, 0x950: 256, 0x1100: 96}
GFX = re.compile(r"gfx(?P<number>[0-9a-f]{3,4})")


# e4m3 conversions of NVIDIA's from here on. gfx942 has them for another e4m3 (fnuz: the same bits
# are half the value). gfx950 has them for this one, but that they saturate alike has not been run.
FIRST_WITH_FP8 = 89


def has_fp8(arch: int) -> bool:
    """Return whether e4m3 conversions are instructions; otherwise they are integer arithmetic."""
    return FIRST_WITH_FP8 <= arch < FIRST_AMD


def is_amd(arch: int) -> bool:
    return arch >= FIRST_AMD


def arch_name(arch: int) -> str:
    """Return the name of an architecture, such as sm_90 or gfx942."""
    return f"gfx{arch:x}" if is_amd(arch) else f"sm_{arch}"


def amd_arch(name: str) -> int | None:
    """Return 0x942 for gfx942 or gfx942:sramecc+:xnack-, ROCm's names; None for other text."""
    found = GFX.fullmatch(name.lower().partition(":")[0])
    return int(found["number"], 16) if found else None


def card_arch(name: str) -> int | None:
    """Return 90 for H200, a name in `CARDS`; None for other text. Case does not matter."""
    for arch, cards in CARDS.items():
        if name.lower() in cards.lower().split(", "):
            return arch
    return None
