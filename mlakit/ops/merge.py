"""Combining partial attention results over disjoint keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mlakit.dispatch import selection
from mlakit.dispatch.checks import FLOATS, Dims
from mlakit.dispatch.knobs import Backend
from mlakit.dispatch.specs import Problem, device_facts
from mlakit.kernels.arguments import MergeArguments
from mlakit.ops._checks import check_result, check_sink
from mlakit.ops._library import op

NAME = "merge_states"


def merge_states(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    *,
    sink: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Combine partial attention results into the attention over all keys.

        lse = log Σ_p exp lse_p        out = Σ_p exp(lse_p − lse) out_p

    outs  [tokens, heads, v_width] bf16, fp16 or float32 of each part, which may differ in their
          dtypes; not read where the part's lse is −inf
    lses  [tokens, heads] float32 of each part, natural log
    sink  [heads] float32 logit that joins out's denominator only

    Returns out in the dtype of the first part, or given in any other, and lse float32; 0 and −inf
    where every part is empty.
    `out` and `lse` may be those of one of the parts, which is then merged in place.
    """
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, Iterable):
            got = type(parts).__name__
            raise TypeError(f"{NAME}: {name} must be a sequence of tensors, got {got}")
    arguments = MergeArguments(outs=list(outs), lses=list(lses), sink=sink, backend=backend)
    return _merge(arguments, out, lse)


def _empty(a: MergeArguments) -> tuple[Tensor, Tensor]:
    part, lse = a.outs[0], a.lses[0]
    return part.new_empty(part.shape), lse.new_empty(lse.shape)


@op(NAME, fake=_empty)
def _merge(a: MergeArguments, out: Tensor | None, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    dims = Dims(NAME)
    dims.require(len(a.outs) >= 1, "outs", "hold at least one part", 0)
    dims.require(
        len(a.lses) == len(a.outs), "lses", f"hold one per part, {len(a.outs)}", len(a.lses)
    )
    axes = ("tokens", "heads", "v_width")
    for i, (part, part_lse) in enumerate(zip(a.outs, a.lses, strict=True)):
        dims.match(f"outs[{i}]", part, *axes, dtypes=FLOATS)
        dims.rows_contiguous(f"outs[{i}]", part)
        dims.match(f"lses[{i}]", part_lse, *axes[:2], dtypes=[torch.float32])
    check_sink(dims, a.sink)
    if out is not None:
        dims.dtype("out", dims.tensor("out", out), *FLOATS)
    dtype = a.outs[0].dtype if out is None else out.dtype
    out = check_result(dims, "out", out, *axes, dtype=dtype)
    lse = check_result(dims, "lse", lse, *axes[:2], dtype=torch.float32)
    problem = Problem(*device_facts(dims.device), dtype=str(out.dtype), heads=dims["heads"])
    selection.select(NAME, problem, a.backend).launch(a, out, lse)
    return out, lse
