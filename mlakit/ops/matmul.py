"""Products with the up-projection weights, one matrix per head."""

from __future__ import annotations

from torch import Tensor

from mlakit.dispatch import selection
from mlakit.dispatch.checks import E4M3, FLOATS, Dims
from mlakit.dispatch.knobs import Backend
from mlakit.dispatch.specs import Problem, device_facts
from mlakit.kernels.arguments import BatchedMatmulArguments
from mlakit.ops._checks import check_result
from mlakit.ops._library import op

NAME = "batched_matmul"


def batched_matmul(
    a: Tensor, b: Tensor, *, out: Tensor | None = None, backend: Backend = "auto"
) -> Tensor:
    """a [batch, M, K] @ b [batch, N, K]ᵀ, accumulated in float32 and rounded once.

    a    [batch, M, K] bf16, fp16 or float32, any strides
    b    [batch, N, K] in a's dtype, any strides
    out  [batch, M, N] in a's dtype, or given in any other, with a contiguous last axis
    """
    (result,) = _matmul(BatchedMatmulArguments(a=a, b=b, backend=backend), out)
    return result


def _empty(args: BatchedMatmulArguments) -> tuple[Tensor]:
    return (args.a.new_empty(*args.a.shape[:2], args.b.shape[1]),)


@op(NAME, fake=_empty)
def _matmul(args: BatchedMatmulArguments, out: Tensor | None) -> tuple[Tensor]:
    dims = Dims(NAME)
    dims.match("a", args.a, "batch", "M", "K", dtypes=FLOATS)
    dims.match("b", args.b, "batch", "N", "K", dtypes=[args.a.dtype])
    if out is not None:
        dims.dtype("out", dims.tensor("out", out), *FLOATS, E4M3)
    dtype = args.a.dtype if out is None else out.dtype
    out = check_result(dims, "out", out, "batch", "M", "N", dtype=dtype)
    problem = Problem(*device_facts(args.a.device), dtype=str(args.a.dtype))
    selection.select(NAME, problem, args.backend).launch(args, out)
    return (out,)
