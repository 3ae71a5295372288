"""Launching the sparse kernels of Blackwell.

Work       CTAs are not persistent; with few tokens, lists are split, and `sparse_merge` combines
           the splits
Memory     float32 partials of splits, 256 MiB at most
Limits     `kernels.blackwell.support` refuses what the kernels cannot take
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mlakit.cache import CacheLayer
from mlakit.kernels.arguments import SparseArguments
from mlakit.kernels.blackwell.sparse.configs import (
    BLOCK,
    CTAS_PER_TILE,
    HALF,
    HEAD_TILE,
    MAX_REGISTERS,
)
from mlakit.kernels.blackwell.sparse.m128_bf16 import sparse_mla_m128_bf16_kernel
from mlakit.kernels.hopper.device.primitives import SMEM_16BIT
from mlakit.kernels.hopper.pool_rows import pool_rows
from mlakit.kernels.hopper.sparse.calls import (
    has_rope,
    list_arguments,
    list_lengths,
    merge,
    query_tiles,
    scale_log2,
    split_results,
    traits,
)
from mlakit.kernels.launch import launch, target


def sparse_mla(
    kernel: str, a: SparseArguments, out: Tensor, lse: Tensor, max_logits: Tensor
) -> None:
    """Launch m128_bf16, the only `kernel`."""
    tokens, heads, _ = a.q.shape
    if tokens == 0 or heads == 0:
        return
    head_tiles = tokens * triton.cdiv(heads, HEAD_TILE) * CTAS_PER_TILE
    results = out, lse, max_logits
    split = split_results(
        a, results, list_tile=BLOCK, head_tiles=head_tiles, num_sms=target(a.q.device).num_sms
    )
    q_tiles, rope_tiles = query_tiles(a.q, a.q_rope if has_rope(a) else None, HEAD_TILE, HALF)
    main, extra = list_arguments(a)
    launch(
        sparse_mla_m128_bf16_kernel,
        (head_tiles * split.num_splits,),
        q=q_tiles,
        q_rope=rope_tiles,
        kv=_gathered_rows(a.layer),
        extra_kv=None if a.extra is None else _gathered_rows(a.extra),
        tokens=tokens,
        heads=heads,
        num_splits=split.num_splits,
        **list_lengths(a),
        main=main,
        extra=extra,
        outputs=split.outputs,
        scale_log2=scale_log2(a.softmax_scale),
        TRAITS=traits(a),
        num_warps=4,
        maxnreg=MAX_REGISTERS,
    )
    merge(split, a.sink, results)


def _gathered_rows(layer: CacheLayer) -> TensorDescriptor:
    """TMA tiles of a row and a swizzle atom, of all rows from the first page to the last."""
    rows, _ = pool_rows(layer.payload)
    count, columns = rows.shape
    # a single row may have any stride: nothing is at this distance
    strides = [rows.stride(0) if count > 1 else columns, 1]
    layout: gl.NVMMASharedLayout = SMEM_16BIT.value
    return TensorDescriptor(rows, [count, columns], strides, [1, 64], layout)
