"""The arguments of the prefill kernels, as named tuples.

`decode.arguments` says which arguments stay single, and why.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from mlakit.kernels.arguments import stride_of


class ScheduleTensors(NamedTuple):
    """The tile schedule of a batch, which `schedule` makes on the device."""

    rows: Tensor  # [max_query_tiles, ROW_COLUMNS] int32
    counters: Tensor  # [COUNTERS] int32


class ValueArguments(NamedTuple):
    """Values as the epilogue reads them, where some are not finite."""

    v: Tensor  # [keys, heads, D_V]
    stride_token: int


class Fp8ValueTensors(NamedTuple):
    """Values as the FP8 epilogue reads them, where some are not finite."""

    v: Tensor  # [keys, heads, D_V] e4m3
    flags: Tensor  # of `fp8_values`


class ScaleTensors(NamedTuple):
    """The factors of e4m3 operands, float32 or None each."""

    q: Tensor | None  # [tokens, heads]
    k: Tensor | None  # [keys]; None where blocks have scales
    v: Tensor | None  # [keys, heads], or [blocks, heads]


class OutputTensors(NamedTuple):
    """The tensors that the FP8 kernel writes its results to."""

    out: Tensor  # [tokens, heads, D_V]
    lse: Tensor  # [tokens, heads] float32
    sink: Tensor | None  # [heads] float32


class OutputArguments(NamedTuple):
    """The tensors that results are written to."""

    out: Tensor  # [tokens, heads, D_V]
    lse: Tensor  # [tokens, heads] float32
    sink: Tensor | None  # [heads] float32
    stride_out_token: int
    stride_out_head: int
    stride_sink: int


def output_arguments(out: Tensor, lse: Tensor, sink: Tensor | None) -> OutputArguments:
    return OutputArguments(out, lse, sink, *out.stride()[:2], stride_of(sink, 0))
