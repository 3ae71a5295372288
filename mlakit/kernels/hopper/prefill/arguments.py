"""The arguments of the prefill kernels, as named tuples.

`decode.arguments` says which arguments stay single, and why.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ScheduleTensors(NamedTuple):
    """The tile schedule of a batch, which `schedule` makes on the device."""

    rows: Tensor  # [max_query_tiles, ROW_COLUMNS] int32
    counters: Tensor  # [COUNTERS] int32


class ValueArguments(NamedTuple):
    """Values as the epilogue reads them, where some are not finite."""

    v: Tensor  # [keys, heads, D_V]
    stride_token: int


class OutputArguments(NamedTuple):
    """The tensors that results are written to."""

    out: Tensor  # [tokens, heads, D_V]
    lse: Tensor  # [tokens, heads] float32
    sink: Tensor | None  # [heads] float32
    stride_out_token: int
    stride_out_head: int
    stride_sink: int


def output_arguments(out: Tensor, lse: Tensor, sink: Tensor | None) -> OutputArguments:
    stride_sink = 0 if sink is None else sink.stride(0)
    return OutputArguments(out, lse, sink, *out.stride()[:2], stride_sink)
