"""Group quantisation to e4m3 and the block-scaled matmul over it, portable Triton.

Maths      quantise: s = min(amax, bound) / 448, q = e4m3(x · 1/s), 0 where 1/s is not finite
           matmul: out[m, n] = Σ_g a_scale[g, m] b_scale[n/h, g] Σ_{k in g} a[m, k] b[n, k]
Work       quantise: one program per (row tile, group); matmul: one per tile of out. Where torch has
           the same product (`library_refuses`) cuBLAS computes it
Memory     x, a and b are read without a copy, every group of x once
Precision  operands are converted to fp16, exactly, and accumulated in float32. FP8 tensor cores of
           sm_90 keep about 14 bits of a sum: with 128 columns per step the error shows in the
           results of a whole layer
Limits     none: any group, any strides with a contiguous last axis
Lineage    own design; ideas: DeepSeek-V3's scales per 128 columns and 128x128 blocks
"""

from __future__ import annotations

from functools import lru_cache
from math import isinf

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mlakit.dispatch.architectures import arch_name
from mlakit.dispatch.autocast import without_autocast
from mlakit.kernels import workspace
from mlakit.kernels.arguments import QuantizeArguments, ScaledMatmulArguments
from mlakit.kernels.launch import launch, target
from mlakit.kernels.triton.configs import (
    pick_quantize_config,
    pick_scaled_matmul_config,
    power_of_two,
)
from mlakit.kernels.triton.fp8_small_m import refuses as few_rows_refuses
from mlakit.kernels.triton.fp8_small_m import scaled_mm_few_rows
from mlakit.kernels.triton.fp8_small_m_configs import pick_few_rows_config
from mlakit.kernels.triton.matmul import product_arguments, tile_of_program
from mlakit.kernels.triton.primitives import narrow_e4m3, widen_e4m3

E4M3 = torch.float8_e4m3fn
LIBRARY_GROUP = 128


def _within(group: int, size: int) -> int:
    """A group no larger than an axis of `size` needs; it still holds whole tiles.

    Kernels loop over whole groups, and their integers have 32 bits.
    """
    return min(group, power_of_two(max(size, LIBRARY_GROUP)))


def quantize_fp8(args: QuantizeArguments, out: Tensor, scales: Tensor) -> None:
    x, group, scale_ub = args.x, args.group, args.scale_ub
    if x.ndim == 2:
        x, out, scales = x[None], out[None], scales[None]
    batch, rows, columns = x.shape
    groups, padded_rows = scales.shape[1:]
    group = _within(group, columns)
    config = pick_quantize_config(rows=padded_rows, group=group)
    device = target(x.device)
    launch(
        _quantize_fp8_kernel,
        (batch * groups * triton.cdiv(padded_rows, config.rows),),
        x,
        out.view(torch.uint8),
        scales,
        rows,
        padded_rows,
        columns,
        groups,
        None if isinf(scale_ub) else scale_ub,
        *x.stride()[:2],
        *out.stride()[:2],
        *scales.stride()[:2],
        GROUP=group,
        ROWS=config.rows,
        COLUMNS=config.columns,
        HAS_FP8=device.has_fp8,
        PDL=device.has_pdl,
        num_warps=config.num_warps,
        **({"launch_pdl": True} if device.has_pdl else {}),
    )


@triton.jit(do_not_specialize=["rows", "padded_rows", "scale_ub", "stride_scales_g"])
def _quantize_fp8_kernel(
    x,  # [batch, rows, columns]
    out,  # [batch, rows, columns] e4m3 as uint8
    scales,  # [batch, groups, padded_rows]
    rows,
    padded_rows,
    columns,
    groups,
    scale_ub,  # None: no bound
    stride_x_b,
    stride_x_m,
    stride_out_b,
    stride_out_m,
    stride_scales_b,
    stride_scales_g,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()  # the matmul prefetches weights meanwhile
        gdc_wait()
    program = tl.program_id(0)
    group = program % groups
    tiles = tl.cdiv(padded_rows, ROWS)
    batch = (program // groups // tiles).to(tl.int64)
    row = (program // groups % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    within = tl.arange(0, COLUMNS)
    x += batch * stride_x_b + row[:, None] * stride_x_m + group.to(tl.int64) * GROUP
    out += batch * stride_out_b + row[:, None] * stride_out_m + group.to(tl.int64) * GROUP
    width = tl.minimum(columns - group * GROUP, GROUP)
    row_mask = (row < rows)[:, None]

    # as integers, magnitudes have the same order, with NaN above infinity
    values = _load_group(x, within, row_mask, width)
    amax_bits = tl.max(_magnitude_bits(values), 1)
    for start in range(COLUMNS, GROUP, COLUMNS):
        more = _load_group(x, start + within, row_mask, width)
        amax_bits = tl.maximum(amax_bits, tl.max(_magnitude_bits(more), 1))
    amax = amax_bits.to(tl.float32, bitcast=True)  # [ROWS]
    if scale_ub is not None:
        amax = tl.where(amax > scale_ub, scale_ub, amax)
    scale = tl.div_rn(amax, tl.full([ROWS], 448.0, tl.float32))
    inverse = tl.div_rn(tl.full([ROWS], 1.0, tl.float32), scale)
    # a scale too small to have a reciprocal: the group becomes zeros
    inverse = tl.where(inverse == float("inf"), 0.0, inverse)

    _store_group(out, values, inverse, within, row_mask, width, HAS_FP8)
    for start in range(COLUMNS, GROUP, COLUMNS):
        more = _load_group(x, start + within, row_mask, width)
        _store_group(out, more, inverse, start + within, row_mask, width, HAS_FP8)
    # rows from `rows` on were read as zeros: their scale is 0, as the padding must be
    scales += batch * stride_scales_b + group.to(tl.int64) * stride_scales_g
    tl.store(scales + row, scale, mask=row < padded_rows)


@triton.jit
def _load_group(x, within, row_mask, width):
    mask = row_mask & (within < width)[None, :]
    return tl.load(x + within[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _magnitude_bits(values):
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _store_group(out, values, inverse, within, row_mask, width, HAS_FP8: tl.constexpr):
    quantised = narrow_e4m3(values * inverse[:, None], HAS_FP8)
    tl.store(out + within[None, :], quantised, mask=row_mask & (within < width)[None, :])


def scaled_mm_fp8(args: ScaledMatmulArguments, out: Tensor) -> None:
    """out[m, n] = Σ_k a[m, k] b[n, k] a_scale[k/g, m] b_scale[n/g, k/g], float32, rounded once."""
    a, a_scale, b, b_scale = args.a, args.a_scale, args.b, args.b_scale
    n_group, k_group = map(_within, (args.n_group, args.k_group), b.shape[-2:])
    args = args._replace(n_group=n_group, k_group=k_group)
    device = target(a.device)
    if few_rows_refuses(a.shape[-2], n_group, k_group) is None:
        config = pick_few_rows_config(
            batch=a.shape[0] if a.ndim == 3 else 1,
            rows=a.shape[-2],
            columns=b.shape[-2],
            n_group=n_group,
            k_group=k_group,
            k_groups=triton.cdiv(a.shape[-1], k_group),
            num_sms=device.num_sms,
            shared_bytes=device.shared_bytes,
            has_fp8=device.has_fp8,
        )
        scaled_mm_few_rows(args, out, config)
        return
    on_cuda = a.device.type == "cuda"
    groups = {"n_group": n_group, "k_group": k_group, "arch": device.arch if on_cuda else 0}
    if library_refuses(a, a_scale, b, b_scale, out, **groups) is None:
        workspace.library_call(_library_scaled_mm, a, a_scale, b, b_scale, out)
        return
    if a.ndim == 2:
        a, a_scale, b, b_scale, out = (each[None] for each in (a, a_scale, b, b_scale, out))
    (batch, rows, depth), columns = a.shape, b.shape[1]
    config = pick_scaled_matmul_config(
        rows=rows, columns=columns, k_group=k_group, shared_bytes=device.shared_bytes
    )
    tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(columns, config.block_n)
    launch(
        _scaled_mm_fp8_kernel,
        (batch * tiles,),
        **product_arguments(a, a_scale, b, b_scale, out),
        N_GROUP=n_group,
        K_GROUP=k_group,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=config.group_m,
        WHOLE_STEPS=depth % k_group == 0 and k_group % config.block_k == 0,
        HAS_FP8=device.has_fp8,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def library_refuses(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    *,
    n_group: int,
    k_group: int,
    arch: int,
) -> str | None:
    """Return why torch's block-scaled product cannot write this `out` without a copy, or None.

    arch  of the GPU, 90 for sm_90; 0 where there is none
    """
    if arch != 90:
        return f"needs sm_90, got {arch_name(arch)}"
    if not _library_has_scaled_mm():
        return "needs a torch with scaled_mm"
    if a.ndim != 2:
        return "has no batch"
    if (n_group, k_group) != (LIBRARY_GROUP, LIBRARY_GROUP):
        return f"needs groups of {LIBRARY_GROUP}, got {n_group} and {k_group}"
    if out.dtype != torch.bfloat16:
        return f"needs a bfloat16 result, got {out.dtype}"
    (rows, depth), columns = a.shape, b.shape[0]
    # the library pads rows of scales to 16 bytes: ours must have no padding there
    if rows == 0 or rows % 4 or columns == 0 or columns % 16 or depth == 0 or depth % 512:
        return f"needs M % 4 = N % 16 = K % 512 = 0, none 0, got {rows}, {columns}, {depth}"
    tensors = {"a": a, "b": b, "b_scale": b_scale, "out": out, "a_scale": a_scale}
    for name, tensor in tensors.items():
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            return f"needs a contiguous, aligned {name}"
    if a_scale.shape[1] != rows:
        return f"needs one column of a_scale per row, got {a_scale.shape[1]} for {rows}"
    return None


@lru_cache(maxsize=1)
def _library_has_scaled_mm() -> bool:
    packet = getattr(torch.ops.aten, "_scaled_mm_v2", None)
    return packet is not None and "out" in packet.overloads()


@without_autocast
def _library_scaled_mm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """`torch.nn.functional.scaled_mm`, which has no `out`."""
    from torch.nn.functional import ScalingType

    by_row, by_block = ScalingType.BlockWise1x128.value, ScalingType.BlockWise128x128.value
    torch.ops.aten._scaled_mm_v2.out(
        a,
        b.t(),
        [a_scale.t()],
        [by_row],
        [],
        [b_scale.t()],
        [by_block],
        [],
        None,
        out.dtype,
        out=out,
    )


@triton.jit(do_not_specialize=["M", "stride_a_scale_group"])
def _scaled_mm_fp8_kernel(
    M,
    N,
    K,
    stride_a_scale_group,
    a,  # `OperandArguments`
    b,
    product,  # `ProductArguments`
    N_GROUP: tl.constexpr,
    K_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    WHOLE_STEPS: tl.constexpr,  # every step of K has BLOCK_K columns
    HAS_FP8: tl.constexpr,
):
    batch, m_tile, n_tile = tile_of_program(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    within = tl.arange(0, BLOCK_K)
    a_rows = a.matrix + (batch * a.stride_batch + m[:, None].to(tl.int64) * a.stride_row)
    b_rows = b.matrix + (batch * b.stride_batch + n[None, :].to(tl.int64) * b.stride_row)
    a_scale = a.scale + (batch * a.stride_scale_batch + m.to(tl.int64) * a.stride_scale_row)
    if N_GROUP % BLOCK_N == 0:
        group_of_n = n_tile * BLOCK_N // N_GROUP  # one for the whole tile
        n_mask = n_tile >= 0
    else:
        group_of_n = n // N_GROUP
        n_mask = n < N
    scale_at = batch * b.stride_scale_batch + group_of_n.to(tl.int64) * b.stride_scale_row
    b_scale = b.scale + scale_at

    STEPS: tl.constexpr = (K_GROUP + BLOCK_K - 1) // BLOCK_K  # within a group
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(tl.cdiv(K, K_GROUP) * STEPS):
        group = step // STEPS
        k = group * K_GROUP + (step % STEPS) * BLOCK_K + within
        a_mask, b_mask = (m < M)[:, None], (n < N)[None, :]
        if not WHOLE_STEPS:
            k_mask = k < tl.minimum((group + 1) * K_GROUP, K)
            a_mask, b_mask = a_mask & k_mask[None, :], b_mask & k_mask[:, None]
        left = tl.load(a_rows + k[None, :], mask=a_mask, other=0)
        right = tl.load(b_rows + k[:, None], mask=b_mask, other=0)
        left = widen_e4m3(left, tl.float16, HAS_FP8)
        right = widen_e4m3(right, tl.float16, HAS_FP8)
        is_row = m < M
        by_row_at = a_scale + group.to(tl.int64) * stride_a_scale_group
        by_row = tl.load(by_row_at, mask=is_row, other=0.0)
        by_column_at = b_scale + group.to(tl.int64) * b.stride_scale_group
        by_column = tl.load(by_column_at, mask=n_mask, other=0.0)
        products = tl.dot(left, right) * by_row[:, None]
        if N_GROUP % BLOCK_N == 0:
            acc += products * by_column
        else:
            acc += products * by_column[None, :]

    row_at = batch * product.stride_batch + m[:, None].to(tl.int64) * product.stride_row
    out_at = product.out + (row_at + n[None, :])
    if product.out.dtype.element_ty == tl.uint8:
        acc = narrow_e4m3(acc, HAS_FP8)
    tl.store(out_at, acc.to(product.out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
