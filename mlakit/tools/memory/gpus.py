"""The memory of known GPUs.

Data sheets say GB, and the value is close to what the driver reports in GiB: an H200 (141 GB) has
143771 MiB, 140.4 GiB, of which the driver keeps about 1 GiB. The table has the data sheets' values
as GiB. B200 is 180 as in HGX and DGX B200 (1440 GB for 8 GPUs); other texts say 192, the memory on
the package.
"""

from __future__ import annotations

from math import isfinite

GIB = 1 << 30

GPUS: dict[str, int] = {
    "A100": 80,
    "H100": 80,
    "H20": 96,
    "H200": 141,
    "B200": 180,
    "L4": 24,
    "L40S": 48,
    "RTX4090": 24,
    "RTX5090": 32,
    "MI300X": 192,
    "MI325X": 256,
}
MOST_GIB = 2048  # a larger number is a model number such as 4090


def gpu_bytes(gpu: str) -> int:
    """The memory of a GPU in bytes: by its name in `GPUS` (case, spaces and hyphens do not matter),
    or a number in GiB."""
    try:
        gib = float(gpu)
    except ValueError:
        name = "".join(letter for letter in gpu.upper() if letter not in " -_")
        if name not in GPUS:
            raise ValueError(
                f"unknown GPU {gpu!r}; choose from {', '.join(GPUS)}, or give its memory in GiB"
            ) from None
        gib = GPUS[name]
    if not (isfinite(gib) and 0 < gib <= MOST_GIB):
        raise ValueError(f"gpu must have between 0 and {MOST_GIB} GiB, got {gpu}")
    return int(gib * GIB)
