"""Launching the block-scaled FP8 product of Hopper.

Work       one kernel of at most as many CTAs as there are SMs; no scratch memory
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mlakit.dispatch.specs import ProductShape
from mlakit.kernels.arguments import ScaledMatmulArguments
from mlakit.kernels.hopper.fp8.configs import STEP, pick_config
from mlakit.kernels.hopper.fp8.kernel import scaled_mm_fp8_kernel
from mlakit.kernels.launch import launch, target

MAX_GROUP = 1 << 30  # a group without end: integers of the kernel have 32 bits
# of weights: the portable product of few rows is slower with dependent launch above it
MAX_PDL_BYTES = 64 << 20


class FactorArguments(NamedTuple):
    """The scales of an operand."""

    scale: Tensor  # a: [batch, K groups, at least M]; b: [batch, N groups, K groups]
    stride_batch: int
    stride_row: int  # along M, or along the groups of N
    stride_group: int | None  # along the groups of K; of a it is an argument of its own


class ResultArguments(NamedTuple):
    """The result."""

    out: Tensor  # [batch, M, N]
    stride_batch: int
    stride_row: int


class ProductTraits(NamedTuple):
    """Constants that the kernel is compiled for."""

    N_GROUP: int
    K_GROUP: int
    PDL: bool


def scaled_mm_fp8(args: ScaledMatmulArguments, out: Tensor) -> None:
    """Launch the product; `kernels.hopper.support` refuses what the kernel cannot take."""
    a, a_scale, b, b_scale = args.a, args.a_scale, args.b, args.b_scale
    if a.ndim == 2:
        a, a_scale, b, b_scale, out = (each[None] for each in (a, a_scale, b, b_scale, out))
    (batch, rows, depth), columns = a.shape, b.shape[1]
    if 0 in (batch, rows, columns):
        return  # nothing to write, and no tile for TMA to load
    num_sms = target(a.device).num_sms
    shape = ProductShape(batch, rows, columns, depth, args.n_group, args.k_group)
    config = pick_config(shape, num_sms)
    left, right = (b, a) if config.IS_SWAPPED else (a, b)
    left_tiles = -(-left.shape[1] // config.LEFT_ROWS)
    tiles = batch * left_tiles * -(-right.shape[1] // config.COLUMNS)
    pdl = batch * columns * depth <= MAX_PDL_BYTES
    scale_batch, scale_group, scale_row = a_scale.stride()
    # a matrix of its own has any distance to the next: not one that more kernels are compiled for
    is_batched = batch > 1
    launch(
        scaled_mm_fp8_kernel,
        (min(tiles, num_sms),),
        left=_tiles(left, config.LEFT_ROWS),
        right=_tiles(right, config.COLUMNS),
        batch=batch,
        M=rows,
        N=columns,
        K=depth,
        stride_a_scale_group=scale_group,
        a=FactorArguments(a_scale, is_batched * scale_batch, scale_row, None),
        b=FactorArguments(b_scale, is_batched * b_scale.stride(0), *b_scale.stride()[1:]),
        product=ResultArguments(out, is_batched * out.stride(0), out.stride(1)),
        TRAITS=ProductTraits(*(min(each, MAX_GROUP) for each in (args.n_group, args.k_group)), pdl),
        CONFIG=config,
        num_warps=4,
        maxnreg=config.MAX_REGISTERS,
        launch_pdl=pdl,
    )


# kept: what a layout checks of itself takes the host longer than the rest of a descriptor
@lru_cache(maxsize=1)
def _layout() -> Any:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=3)


def _tiles(matrices: Tensor, rows: int) -> TensorDescriptor:
    """TMA tiles of a step of K; the stride of a dimension of one element may be anything."""
    batch, count, depth = matrices.shape
    by_row = matrices.stride(1) if count > 1 else -(-depth // 16) * 16
    by_batch = matrices.stride(0) if batch > 1 else count * by_row
    return TensorDescriptor(
        matrices, list(matrices.shape), [by_batch, by_row, 1], [1, rows, STEP], _layout()
    )
