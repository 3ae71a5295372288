"""Group quantisation to e4m3 and the block-scaled matmul over it, plain and batched."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from mlakit.dispatch import selection
from mlakit.dispatch.checks import E4M3, FLOATS, Dims
from mlakit.dispatch.knobs import Backend
from mlakit.dispatch.specs import Problem, ProductShape, Use, device_facts, num_sms
from mlakit.kernels.arguments import QuantizeArguments, ScaledMatmulArguments
from mlakit.ops._checks import check_result
from mlakit.ops._library import op

QUANTIZE = "quantize_fp8"
MATMUL = "scaled_mm_fp8"
TMA_BYTES = 16  # at multiples of them begin rows that TMA can address
SCALE_ALIGNMENT = 4  # float32 entries, 16 bytes: what a scaled GEMM loads at once


def quantize_fp8(
    x: Tensor,
    group: int,
    *,
    scale_ub: float = inf,
    out: Tensor | None = None,
    scales: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """x as e4m3 with one scale per row and `group` columns.

        s = min(amax, scale_ub) / 448        q = e4m3(clamp(x · 1/s, ±448))

    x         [M, K] or [batch, M, K] bf16, fp16 or float32; its rows may be strided
    group     columns that share a scale
    scale_ub  bounds amax; entries beyond it saturate
    scales    float32 to write the scales to

    Returns q in x's shape and scales [ceil(K / group), M rounded up to 4] float32 (after the batch
    axis): transposed, as `scaled_mm_fp8` reads them. A group of zeros has
    scale 0. The last group may be short. Padding entries are 0.
    """
    arguments = QuantizeArguments(x=x, group=group, scale_ub=scale_ub, backend=backend)
    return _quantize(arguments, out, scales)


def scaled_mm_fp8(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    n_group: int = 128,
    k_group: int = 128,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """a @ bᵀ of block-scaled e4m3 matrices, accumulated in float32 and rounded once.

        out[m, n] = Σ_k a[m, k] · a_scale[k / g, m] · b[n, k] · b_scale[n / h, k / g]

    with g = k_group, h = n_group.

    a        [M, K] e4m3: the left matrix
    a_scale  [ceil(K / k_group), at least M] float32, as `quantize_fp8` gives it
    b        [N, K] e4m3: the right matrix, transposed
    b_scale  [ceil(N / n_group), ceil(K / k_group)] float32: a scale of each block of b
    n_group  rows of b that share a scale
    k_group  columns of a and b that share a scale
    out      [M, N] in `out_dtype`, any strides with a contiguous last axis; e4m3 saturates

    All of them may have a leading batch axis.
    """
    if out is not None:
        out_dtype = Dims(MATMUL).tensor("out", out).dtype
    arguments = ScaledMatmulArguments(
        a=a,
        a_scale=a_scale,
        b=b,
        b_scale=b_scale,
        n_group=n_group,
        k_group=k_group,
        out_dtype=out_dtype,
        backend=backend,
    )
    (result,) = _scaled_mm(arguments, out)
    return result


def _batch_axes(dims: Dims, arg: str, tensor: Tensor) -> tuple[str, ...]:
    dims.require(tensor.ndim in (2, 3), arg, "have 2 axes, or 3 with a batch", tensor.ndim)
    return ("batch",) if tensor.ndim == 3 else ()


def _empty_quantized(args: QuantizeArguments) -> tuple[Tensor, Tensor]:
    *batch, rows, columns = args.x.shape
    padded = (rows + SCALE_ALIGNMENT - 1) // SCALE_ALIGNMENT * SCALE_ALIGNMENT
    groups = (columns + args.group - 1) // args.group
    scales = args.x.new_empty(*batch, groups, padded, dtype=torch.float32)
    return args.x.new_empty(args.x.shape, dtype=E4M3), scales


@op(QUANTIZE, fake=_empty_quantized)
def _quantize(
    args: QuantizeArguments, out: Tensor | None, scales: Tensor | None
) -> tuple[Tensor, Tensor]:
    dims = Dims(QUANTIZE)
    x = dims.tensor("x", args.x)
    batch = _batch_axes(dims, "x", x)
    dims.match("x", x, *batch, "M", "K", dtypes=FLOATS)
    dims.rows_contiguous("x", x)
    group = dims.integer("group", args.group, 1)
    if isinstance(args.scale_ub, bool) or not isinstance(args.scale_ub, (int, float)):
        got = type(args.scale_ub).__name__
        raise TypeError(f"{QUANTIZE}: scale_ub must be a number, got {got}")
    dims.require(args.scale_ub > 0, "scale_ub", "be positive", args.scale_ub)
    dims.bind("groups", -(-dims["K"] // group), "K / group, rounded up")
    dims.bind("padded M", -(-dims["M"] // SCALE_ALIGNMENT) * SCALE_ALIGNMENT, "M, rounded up to 4")
    out = check_result(dims, "out", out, *batch, "M", "K", dtype=E4M3)
    scales = check_result(dims, "scales", scales, *batch, "groups", "padded M", dtype=torch.float32)
    problem = Problem(*device_facts(x.device), dtype=str(x.dtype))
    checked = args._replace(group=group, scale_ub=float(args.scale_ub))
    selection.select(QUANTIZE, problem, args.backend).launch(checked, out, scales)
    return out, scales


def product_problem(args: ScaledMatmulArguments) -> Problem:
    """Describe a product to dispatch."""
    a, b = args.a, args.b
    batch = a.shape[0] if a.ndim == 3 else 1
    return Problem(
        *device_facts(a.device),
        dtype=str(args.out_dtype),
        uses=() if _has_pitch(a) and _has_pitch(b) else (Use.UNALIGNED_OPERANDS,),
        num_sms=num_sms(a.device),
        product=ProductShape(
            batch, a.shape[-2], b.shape[-2], a.shape[-1], args.n_group, args.k_group
        ),
    )


def _has_pitch(matrices: Tensor) -> bool:
    """Return whether TMA can address tiles of e4m3 matrices [..., rows, columns]."""
    if matrices.numel() == 0:
        return True
    pitches = zip(matrices.shape[:-1], matrices.stride()[:-1], strict=True)
    is_aligned = all(
        size == 1 or (stride > 0 and stride % TMA_BYTES == 0) for size, stride in pitches
    )
    return is_aligned and matrices.data_ptr() % TMA_BYTES == 0


def _empty_product(args: ScaledMatmulArguments) -> tuple[Tensor]:
    return (args.a.new_empty(*args.a.shape[:-1], args.b.shape[-2], dtype=args.out_dtype),)


@op(MATMUL, fake=_empty_product)
def _scaled_mm(args: ScaledMatmulArguments, out: Tensor | None) -> tuple[Tensor]:
    dims = Dims(MATMUL)
    a = dims.tensor("a", args.a)
    batch = _batch_axes(dims, "a", a)
    n_group = dims.integer("n_group", args.n_group, 1)
    k_group = dims.integer("k_group", args.k_group, 1)
    dims.match("a", a, *batch, "M", "K", dtypes=[E4M3])
    dims.match("b", args.b, *batch, "N", "K", dtypes=[E4M3])
    dims.rows_contiguous("a", a)
    dims.rows_contiguous("b", args.b)
    dims.bind("K groups", -(-dims["K"] // k_group), "K / k_group, rounded up")
    dims.bind("N groups", -(-dims["N"] // n_group), "N / n_group, rounded up")
    axes = (*batch, "K groups", "columns of a_scale")
    dims.match("a_scale", args.a_scale, *axes, dtypes=[torch.float32])
    dims.require(
        dims["columns of a_scale"] >= dims["M"],
        "a_scale",
        f"have a column for each of {dims['M']} rows",
        dims["columns of a_scale"],
    )
    dims.match("b_scale", args.b_scale, *batch, "N groups", "K groups", dtypes=[torch.float32])
    if args.out_dtype not in (*FLOATS, E4M3):
        got = str(args.out_dtype).removeprefix("torch.")
        arg = "out_dtype" if out is None else "out"
        raise TypeError(f"{MATMUL}: {arg} must be a float or float8_e4m3fn, got {got}")
    out = check_result(dims, "out", out, *batch, "M", "N", dtype=args.out_dtype)
    checked = args._replace(n_group=n_group, k_group=k_group)
    problem = product_problem(checked)
    selection.select(MATMUL, problem, args.backend).launch(checked, out)
    return (out,)
