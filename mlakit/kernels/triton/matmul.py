"""Batched matmul of 16-bit or float32 matrices, portable Triton.

Maths      out[i] = a[i] @ b[i]ᵀ, accumulated in float32 and rounded once; e4m3 saturates
Work       one program per tile of out; where torch has the same product (`library_refuses`) cuBLAS
           computes it
Memory     a, b and out may have any strides: the absorb step reads and writes slices of wider
           tensors
Limits     none
Lineage    own design; ideas: Triton's matmul tutorial (program order by groups of row tiles)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlakit.cache.layouts import bits
from mlakit.dispatch.autocast import without_autocast
from mlakit.kernels import workspace
from mlakit.kernels.arguments import BatchedMatmulArguments
from mlakit.kernels.launch import launch, target
from mlakit.kernels.triton.configs import pick_matmul_config
from mlakit.kernels.triton.primitives import narrow_e4m3

E4M3 = torch.float8_e4m3fn
TYPES_16BIT = (torch.bfloat16, torch.float16)
_SETTINGS = Lock()


def batched_matmul(args: BatchedMatmulArguments, out: Tensor) -> None:
    """out = a @ bᵀ, rounded once."""
    a, b = args.a, args.b
    if a.device.type == "cuda" and library_refuses(a, b, out) is None:
        workspace.library_call(_library_bmm, a, b, out)
        return
    (batch, rows, depth), columns = a.shape, b.shape[1]
    device = target(a.device)
    config = pick_matmul_config(
        rows=rows,
        columns=columns,
        depth=depth,
        itemsize=a.element_size(),
        shared_bytes=device.shared_bytes,
    )
    tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(columns, config.block_n)
    launch(
        _batched_matmul_kernel,
        (batch * tiles,),
        a=a,
        b=b,
        out=out.view(torch.uint8) if out.dtype == E4M3 else out,
        M=rows,
        N=columns,
        K=depth,
        a_strides=Strides(*a.stride()),
        b_strides=Strides(*b.stride()),
        out_strides=Strides(*out.stride()),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=config.group_m,
        WHOLE_STEPS=depth % config.block_k == 0,
        HAS_FP8=device.has_fp8,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def library_refuses(a: Tensor, b: Tensor, out: Tensor) -> str | None:
    """Return why `torch.bmm` cannot compute `out` in float32, rounded once, uncopied; or None.

    float32 operands are refused: the user may have set tf32 for them.
    """
    if a.dtype not in TYPES_16BIT or out.dtype != a.dtype:
        return f"needs 16-bit matrices of one dtype, got {a.dtype} for {out.dtype}"
    if 0 in (*a.shape, *b.shape):
        return "needs a product that is not empty"
    for name, matrix in (("a", a), ("b", b), ("out", out)):
        _, rows, columns = matrix.shape
        _, by_row, by_column = matrix.stride()
        is_row_major = by_column == 1 and by_row >= columns
        is_column_major = name != "out" and by_row == 1 and by_column >= rows
        if not is_row_major and not is_column_major:
            return f"needs {name} with a contiguous axis and the other beyond it, " + (
                f"got strides {tuple(matrix.stride())}"
            )
        if max(*matrix.shape, *matrix.stride()) >= 2**31:
            return f"needs sizes and strides of {name} below 2**31"
    return None


@without_autocast
def _library_bmm(a: Tensor, b: Tensor, out: Tensor) -> None:
    with _float32_sums():
        torch.bmm(a, b.mT, out=out)


@contextmanager
def _float32_sums() -> Iterator[None]:
    """Make cuBLAS accumulate in float32; by default it may add partial sums in the 16-bit type.

    The setting belongs to the process, hence the lock. A matmul of another thread in the meantime
    is only more precise.
    """
    settings = torch.backends.cuda.matmul
    names = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")]
    with _SETTINGS:
        allowed = [name for name in names if getattr(settings, name)]
        # newer versions have a pair of settings: reduced precision, and split K at all
        split = {name: getattr(settings, f"{name}_split_k", True) for name in allowed}
        for name in allowed:
            setattr(settings, name, False if split[name] else (False, False))
        try:
            yield
        finally:
            for name in allowed:
                setattr(settings, name, True if split[name] else (True, False))


class Strides(NamedTuple):
    """The strides of a batch of matrices."""

    batch: int
    row: int
    column: int


class OperandArguments(NamedTuple):
    """An operand of a block-scaled product."""

    matrix: Tensor  # [batch, M or N, K] e4m3 as uint8
    scale: Tensor  # a: [batch, K groups, at least M]; b: [batch, N groups, K groups]
    stride_batch: int
    stride_row: int
    stride_scale_batch: int
    stride_scale_row: int  # along M, or along the groups of N
    stride_scale_group: int | None  # along the groups of K; of a it is an argument of its own


class ProductArguments(NamedTuple):
    """The result of a block-scaled product."""

    out: Tensor  # [batch, M, N]; e4m3 as uint8
    stride_batch: int
    stride_row: int


def product_arguments(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor
) -> dict[str, Any]:
    """Return the tensors of a block-scaled product, and their sizes, by the arguments' names."""
    scale_batch, scale_group, scale_row = a_scale.stride()
    return {
        "M": a.shape[1],
        "N": b.shape[1],
        "K": a.shape[2],
        "stride_a_scale_group": scale_group,
        "a": OperandArguments(
            a.view(torch.uint8), a_scale, *a.stride()[:2], scale_batch, scale_row, None
        ),
        "b": OperandArguments(b.view(torch.uint8), b_scale, *b.stride()[:2], *b_scale.stride()),
        "product": ProductArguments(bits(out), *out.stride()[:2]),
    }


@triton.jit
def tile_of_program(
    program,
    M,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Return (batch int64, row tile, column tile) of a program.

    Neighbouring programs have GROUP_M row tiles and few column tiles, which then stay in L2.
    """
    m_tiles = tl.cdiv(M, BLOCK_M)
    n_tiles = tl.cdiv(N, BLOCK_N)
    batch = program // (m_tiles * n_tiles)
    tile = program % (m_tiles * n_tiles)
    first = tile // (GROUP_M * n_tiles) * GROUP_M
    height = tl.minimum(m_tiles - first, GROUP_M)
    within = tile % (GROUP_M * n_tiles)
    return batch.to(tl.int64), first + within % height, within // height


@triton.jit(do_not_specialize=["M"])
def _batched_matmul_kernel(
    a,  # [batch, M, K]
    b,  # [batch, N, K]
    out,  # [batch, M, N]; e4m3 as uint8
    M,
    N,
    K,
    a_strides,  # `Strides`
    b_strides,
    out_strides,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    WHOLE_STEPS: tl.constexpr,  # BLOCK_K divides K
    HAS_FP8: tl.constexpr,
):
    batch, m_tile, n_tile = tile_of_program(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    m = m_tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = n_tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    within = tl.arange(0, BLOCK_K)
    a += batch * a_strides.batch + m[:, None] * a_strides.row
    b += batch * b_strides.batch + n[None, :] * b_strides.row

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = (start + within).to(tl.int64)
        a_mask, b_mask = (m < M)[:, None], (n < N)[None, :]
        if not WHOLE_STEPS:
            a_mask, b_mask = a_mask & (k < K)[None, :], b_mask & (k < K)[:, None]
        left = tl.load(a + k[None, :] * a_strides.column, mask=a_mask, other=0.0)
        right = tl.load(b + k[:, None] * b_strides.column, mask=b_mask, other=0.0)
        acc = tl.dot(left, right, acc, input_precision="ieee")

    row_at = batch * out_strides.batch + m[:, None] * out_strides.row
    out += row_at + n[None, :] * out_strides.column
    if out.dtype.element_ty == tl.uint8:
        acc = narrow_e4m3(acc, HAS_FP8)
    tl.store(out, acc.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
