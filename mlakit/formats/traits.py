"""What kernels know of a format: one record of constants, for rows of one shape."""

from __future__ import annotations

from typing import NamedTuple


class FormatTraits(NamedTuple):
    """The bytes of a row, and what its scales cover; kernels are compiled for it.

    Formats that have the same traits are the same to a kernel, whatever they are called.
    """

    IS_E4M3: bool  # latent columns are e4m3; else all columns are of one wider type
    ROPE_AT: int  # the byte of a row where its rotated columns begin; −1: they are beside the rows
    IS_BF16_ROPE: bool = False  # rotated columns are bfloat16; else they are as the latent ones
    SCALED_BY: str = ""  # what has one scale: "tensor", "row" or a "group" of latent columns
    GROUP: int = 0  # columns of a row that share a scale; 0 where rows have no scales
    SCALES_AT: int = -1  # the byte of a row where its scales begin; −1: they are beside the rows
    HAS_E8M0_SCALES: bool = False  # scales are exponents in a byte; else they are float32
    HIDES_NEGATIVE: bool = False  # a row with a negative scale is all zeros
    IS_E2M1: bool = False  # latent columns are e2m1, two in a byte; then they are not e4m3
