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

import torch
import triton
import triton.language as tl
from torch import Tensor

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
        a,
        b,
        out.view(torch.uint8) if out.dtype == E4M3 else out,
        rows,
        columns,
        depth,
        *a.stride(),
        *b.stride(),
        *out.stride(),
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
    stride_a_b,
    stride_a_m,
    stride_a_k,
    stride_b_b,
    stride_b_n,
    stride_b_k,
    stride_out_b,
    stride_out_m,
    stride_out_n,
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
    a += batch * stride_a_b + m[:, None] * stride_a_m
    b += batch * stride_b_b + n[None, :] * stride_b_n

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = (start + within).to(tl.int64)
        a_mask, b_mask = (m < M)[:, None], (n < N)[None, :]
        if not WHOLE_STEPS:
            a_mask, b_mask = a_mask & (k < K)[None, :], b_mask & (k < K)[:, None]
        left = tl.load(a + k[None, :] * stride_a_k, mask=a_mask, other=0.0)
        right = tl.load(b + k[:, None] * stride_b_k, mask=b_mask, other=0.0)
        acc = tl.dot(left, right, acc, input_precision="ieee")

    out += batch * stride_out_b + m[:, None] * stride_out_m + n[None, :] * stride_out_n
    if out.dtype.element_ty == tl.uint8:
        acc = narrow_e4m3(acc, HAS_FP8)
    tl.store(out, acc.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
