"""Block-scaled e4m3 matmul of up to 32 rows, portable Triton: bound by reading the weights.

Maths      out[m, n] = Σ_g a_scale[g, m] b_scale[n/h, g] Σ_{k in g} a[m, k] b[n, k]
Work       one program per tile of up to 32 rows and BLOCK_N columns of out, over the whole of K.
           LANES groups of K are multiplied side by side, by different warps, and added at the end:
           split K within a program, without partials in memory and always in the same order
Memory     b once, in a pipeline that keeps the loads of several steps in flight; a from L2 by every
           program
Precision  as `fp8`: operands are converted to fp16, exactly, and accumulated in float32
Limits     groups of K that are powers of two from 16 to 128; groups of N in whole tiles
Numbers    docs/notes/steps.md
Lineage    own design; ideas: split K within a CTA (CUTLASS's sliced K)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mlakit.kernels.arguments import ScaledMatmulArguments
from mlakit.kernels.launch import launch, target
from mlakit.kernels.triton.configs import power_of_two
from mlakit.kernels.triton.fp8_small_m_configs import FewRowsConfig
from mlakit.kernels.triton.matmul import product_arguments
from mlakit.kernels.triton.primitives import narrow_e4m3, widen_e4m3

E4M3 = torch.float8_e4m3fn
MAX_ROWS = 32
# Of weights. The kernel then starts while activations are quantised, which hides its launch. With
# 117 MB of weights it takes 43 us instead of 38 so, with 4 to 38 MB 1 to 2 us less (H200, one row).
MAX_PDL_BYTES = 64 << 20
MMA_ROWS = 16  # the least rows that tensor cores multiply


def refuses(rows: int, n_group: int, k_group: int) -> str | None:
    """Return why the kernel does not take a product with these sizes; None if it does."""
    if not 1 <= rows <= MAX_ROWS:
        return f"takes 1 to {MAX_ROWS} rows, got {rows}"
    if k_group != power_of_two(k_group) or not 16 <= k_group <= 128:
        return f"takes groups of K that are powers of two from 16 to 128, got {k_group}"
    return None if n_group % 16 == 0 else f"takes groups of N in 16s, got {n_group}"


def scaled_mm_few_rows(args: ScaledMatmulArguments, out: Tensor, config: FewRowsConfig) -> None:
    """out[m, n] = Σ_k a[m, k] b[n, k] a_scale[k/g, m] b_scale[n/g, k/g], float32, rounded once."""
    a, a_scale, b, b_scale = args.a, args.a_scale, args.b, args.b_scale
    if a.ndim == 2:
        a, a_scale, b, b_scale, out = (each[None] for each in (a, a_scale, b, b_scale, out))
    (batch, rows, depth), columns = a.shape, b.shape[1]
    row_tiles = triton.cdiv(rows, config.rows)
    device = target(a.device)
    pdl = device.has_pdl and batch * columns * depth <= MAX_PDL_BYTES
    launch(
        _scaled_mm_few_rows_kernel,
        (batch * triton.cdiv(columns, config.block_n) * row_tiles,),
        **product_arguments(a, a_scale, b, b_scale, out),
        N_GROUP=args.n_group,
        K_GROUP=args.k_group,
        ROWS=config.rows,
        BLOCK_M=max(config.rows, MMA_ROWS),
        ROW_TILES=row_tiles,
        BLOCK_N=config.block_n,
        LANES=config.lanes,
        WHOLE_STEPS=depth % (config.lanes * args.k_group) == 0,
        HAS_FP8=device.has_fp8,
        PDL=pdl,
        num_warps=config.lanes,
        num_stages=config.num_stages,
        **({"launch_pdl": True} if pdl else {}),
    )


@triton.jit(do_not_specialize=["M", "stride_a_scale_group"])
def _scaled_mm_few_rows_kernel(
    M,
    N,
    K,
    stride_a_scale_group,
    a,  # `OperandArguments`
    b,
    product,  # `ProductArguments`
    N_GROUP: tl.constexpr,
    K_GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # of a tile, a power of two
    BLOCK_M: tl.constexpr,  # ROWS, at least 16: rows of the tensor cores' tile
    ROW_TILES: tl.constexpr,  # ROW_TILES · ROWS is at least M
    BLOCK_N: tl.constexpr,
    LANES: tl.constexpr,
    WHOLE_STEPS: tl.constexpr,  # K is a multiple of LANES groups
    HAS_FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    n_tiles = tl.cdiv(N, BLOCK_N)
    # the row tiles of the same weights follow each other: they are read from memory once
    first_m = tl.program_id(0) % ROW_TILES * ROWS
    tile = tl.program_id(0) // ROW_TILES
    batch = (tile // n_tiles).to(tl.int64)
    n_tile = tile % n_tiles
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = first_m + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    within = lane[:, None] * K_GROUP + tl.arange(0, K_GROUP)[None, :]  # [LANES, K_GROUP]
    a_rows = a.matrix + (batch * a.stride_batch + m.to(tl.int64)[None, :, None] * a.stride_row)
    a_scale_at = batch * a.stride_scale_batch + m.to(tl.int64)[None, :] * a.stride_scale_row
    a_scale = a.scale + a_scale_at
    group_of_n = (n_tile * BLOCK_N // N_GROUP).to(tl.int64)
    b_scale = b.scale + (batch * b.stride_scale_batch + group_of_n * b.stride_scale_row)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()  # for the activations
    b_rows = b.matrix + (batch * b.stride_batch + n.to(tl.int64)[None, None, :] * b.stride_row)
    is_row = (m < M)[None, :, None]
    is_column = (n < N)[None, None, :]

    groups = tl.cdiv(K, K_GROUP)
    acc = tl.zeros([LANES, BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, groups, LANES):
        k = first * K_GROUP + within
        a_mask, b_mask = is_row, is_column
        if not WHOLE_STEPS:
            a_mask, b_mask = a_mask & (k < K)[:, None, :], b_mask & (k < K)[:, :, None]
        right = tl.load(b_rows + k[:, :, None], mask=b_mask, other=0)
        left = tl.load(a_rows + k[:, None, :], mask=a_mask, other=0)  # [LANES, ROWS, K_GROUP]
        group = first + lane
        is_group = group < groups
        by_block = tl.load(b_scale + group * b.stride_scale_group, mask=is_group, other=0.0)
        by_row = tl.load(
            a_scale + group.to(tl.int64)[:, None] * stride_a_scale_group,
            mask=is_group[:, None] & (m < M)[None, :],
            other=0.0,
        )  # [LANES, ROWS]
        values = _repeat_rows(widen_e4m3(left, tl.float16, HAS_FP8), BLOCK_M)
        by_row = tl.reshape(_repeat_rows(by_row[:, :, None], BLOCK_M), [LANES, BLOCK_M])
        products = tl.dot(values, widen_e4m3(right, tl.float16, HAS_FP8))
        acc += products * by_row[:, :, None] * by_block[:, None, None]

    total = tl.sum(acc, 0)  # [BLOCK_M, BLOCK_N]
    # rows are repeated where there are fewer than the tensor cores take
    REPEATS: tl.constexpr = BLOCK_M // ROWS
    row = tl.arange(0, BLOCK_M)
    out_row = first_m + row // REPEATS
    is_stored = (row % REPEATS == 0) & (out_row < M)
    row_at = batch * product.stride_batch + out_row.to(tl.int64)[:, None] * product.stride_row
    out_at = product.out + (row_at + n[None, :])
    if product.out.dtype.element_ty == tl.uint8:
        total = narrow_e4m3(total, HAS_FP8)
    tl.store(
        out_at, total.to(product.out.dtype.element_ty), mask=is_stored[:, None] & (n < N)[None, :]
    )


@triton.jit
def _repeat_rows(x, BLOCK_M: tl.constexpr):
    """x [LANES, rows, columns] as [LANES, BLOCK_M, columns]: each row BLOCK_M / rows times."""
    LANES: tl.constexpr = x.shape[0]
    ROWS: tl.constexpr = x.shape[1]
    COLUMNS: tl.constexpr = x.shape[2]
    if ROWS == BLOCK_M:
        return x
    wide = tl.broadcast_to(x[:, :, None, :], [LANES, ROWS, BLOCK_M // ROWS, COLUMNS])
    return tl.reshape(wide, [LANES, BLOCK_M, COLUMNS])
