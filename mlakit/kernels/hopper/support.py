"""What the Gluon kernels take; everything else is left to the portable ones."""

from __future__ import annotations

from mlakit.specs import KernelSpec, Problem

ARCH = 90
BLOCK = 64  # keys that a kernel works on at a time
PAGES = (8, 16, 32)  # rows of those that a block has several of, as boxes
ROW = (576, 512)
E4M3 = "torch.float8_e4m3fn"
FORMATS = {
    "bf16": ("torch.bfloat16",),
    "fp16": ("torch.float16",),
    "fp8": ("torch.bfloat16", "torch.float16", E4M3),
    "fp8_token": ("torch.bfloat16", E4M3),  # bf16 as its rotated columns
    "fp8_block128": ("torch.bfloat16", E4M3),
}
FP8_FORMATS = ("fp8", "fp8_token", "fp8_block128")
MASKS = ("causal", "null")


def are_boxes(page_size: int) -> bool:
    """Can TMA copy a block as boxes, of its pages or of a part of one?"""
    return page_size in PAGES or page_size % BLOCK == 0


def _why_not_decode(problem: Problem) -> str | None:
    if problem.device != "cuda" or problem.arch != ARCH:
        where = f"sm_{problem.arch}" if problem.device == "cuda" else problem.device
        return f"needs sm_{ARCH}, got {where}"
    if problem.format not in FORMATS:
        return f"needs rows of {' or '.join(FORMATS)}, got {problem.format}"
    if problem.dtype not in FORMATS[problem.format]:
        needed = " or ".join(FORMATS[problem.format])
        return f"needs queries of {needed} with rows of {problem.format}, got {problem.dtype}"
    row = problem.row
    if row is None or (row.width, row.v_width) != ROW:
        got = "none" if row is None else f"{row.width}/{row.v_width}"
        return f"needs rows of {ROW[0]}/{ROW[1]}, got {got}"
    if problem.mask not in MASKS:
        return f"needs a mask of {' or '.join(MASKS)}, got {problem.mask}"
    refused = [use for use in problem.uses if use not in _taken_uses(problem)]
    return f"takes no {refused[0]}" if refused else None


def _taken_uses(problem: Problem) -> tuple[str, ...]:
    if problem.dtype != E4M3:
        return ()
    return ("q_scale",) if problem.format == "fp8" else ("q_scale", "bf16 q_rope of e4m3 q")


SPECS = (
    KernelSpec(
        "hopper",
        "mla_decode",
        "mlakit.kernels.hopper.decode:mla_decode",
        _why_not_decode,
        planner="mlakit.kernels.hopper.decode:plan_mla_decode",
    ),
)
