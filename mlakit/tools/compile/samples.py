"""Shorter lists of compile checks, for one more version of Triton.

A sample has every kernel, but few of its configurations. CI compiles all configurations of
Hopper's kernels with the oldest Triton, where they take less time, and all portable ones with the
newest; of the others a sample. Blackwell's need the newest Triton, and CI compiles each of them for
one of its architectures in turn: their machine code differs in the name of the target alone.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from mlakit.dispatch.names import one_of
from mlakit.tools.compile.configurations import (
    BLACKWELL,
    BLACKWELL_ARCHS,
    EVERYWHERE,
    HOPPER,
    HOPPER_ARCH,
    ON_AMD,
    named_checks,
)

Part: TypeAlias = Literal["hopper", "portable"]
PARTS: tuple[Part, ...] = get_args(Part)
# every Gluon kernel; those with a gather producer, split lists or several token blocks twice
OF_HOPPER = (
    "hopper-decode-h128-bf16",
    "hopper-decode-h128-bf16-page1",
    "hopper-decode-h16-bf16",
    "hopper-decode-h32-fp8_block128",
    "hopper-decode-h16-fp8_token-page1",
    "hopper-decode-h16-mxfp4_block32",
    "hopper-decode-m64-fp8_block128",
    "hopper-decode-m64-fp8_token-e4m3-q",
    "hopper-indexer-h64-q1",
    "hopper-indexer-h64-q9",
    "hopper-sparse-h128-bf16",
    "hopper-sparse-fp8_block128-extra",
    "hopper-sparse-h16-fp8_block128",
    "hopper-sparse-h16-mxfp4_block32",
    "hopper-scaled-mm-256x128",
    "hopper-scaled-mm-swapped-32",
    "hopper-prefill-192-128",
    "hopper-prefill-256-256",
    "hopper-prefill-fp8",
)
# every op, as on AMD's GPUs, and what is compiled everywhere; here on sm_90
OF_PORTABLE = tuple(dict.fromkeys((*ON_AMD, *EVERYWHERE)))


def checks_with_sample(part: str) -> list[tuple[str, int]]:
    """`named_checks`, but of the kernels of `part` a sample. Raises ValueError for another part."""
    if part not in PARTS:
        raise ValueError(f"--sample must be {one_of(PARTS)}, got {part!r}")
    whole = [each for each in named_checks() if (each[0] in HOPPER) != (part == "hopper")]
    if part == "hopper":
        others = [each for each in whole if each[0] not in BLACKWELL]
        in_turn = [(name, BLACKWELL_ARCHS[i % 2]) for i, name in enumerate(BLACKWELL)]
        return [
            *others,
            *(each for each in whole if each in in_turn),
            *((name, HOPPER_ARCH) for name in OF_HOPPER),
        ]
    return [*((name, HOPPER_ARCH) for name in OF_PORTABLE), *whole]
