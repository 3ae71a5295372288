"""Launching the sparse kernels of Blackwell.

Work       CTAs are not persistent; with few tokens, lists are split, and `sparse_merge` combines
           the splits
Memory     float32 partials of splits, 256 MiB at most
Limits     `kernels.blackwell.support` refuses what the kernels cannot take
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mlakit.cache import CacheLayer
from mlakit.kernels.arguments import SparseArguments
from mlakit.kernels.blackwell.device.configs import KEYS, PART, keys_as_m_config
from mlakit.kernels.blackwell.sparse.configs import (
    BLOCK,
    CTAS_PER_TILE,
    HALF,
    HEAD_TILE,
    MAX_REGISTERS,
)
from mlakit.kernels.blackwell.sparse.m128_bf16 import sparse_mla_m128_bf16_kernel
from mlakit.kernels.blackwell.sparse.n64_bf16 import sparse_mla_n64_bf16_kernel
from mlakit.kernels.blackwell.sparse.n64_fp8_kv import sparse_mla_n64_fp8_kv_kernel
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
    """Launch m128_bf16, n64_bf16 or n64_fp8_kv."""
    tokens, heads, _ = a.q.shape
    if tokens == 0 or heads == 0:
        return
    tiles = _tiles(kernel, heads, has_rope(a))
    head_tiles = tokens * triton.cdiv(heads, tiles.rows) * tiles.ctas
    results = out, lse, max_logits
    split = split_results(
        a, results, list_tile=tiles.keys, head_tiles=head_tiles, num_sms=target(a.q.device).num_sms
    )
    q_rope = a.q_rope if has_rope(a) else None
    q_tiles, rope_tiles = query_tiles(a.q, q_rope, tiles.rows, tiles.q_columns)
    main, extra = list_arguments(a)
    launch(
        tiles.kernel,
        (head_tiles * split.num_splits,),
        q=q_tiles,
        q_rope=rope_tiles,
        **(_gathered_rows(a) if tiles.is_gathered else {}),
        tokens=tokens,
        heads=heads,
        num_splits=split.num_splits,
        **list_lengths(a),
        main=main,
        extra=extra,
        outputs=split.outputs,
        scale_log2=scale_log2(a.softmax_scale),
        TRAITS=traits(a),
        **tiles.options,
        num_warps=4,
    )
    merge(split, a.sink, results)


class _Tiles(NamedTuple):
    """A kernel and its tile sizes."""

    kernel: Any
    rows: int  # heads of a work tile
    ctas: int  # of a work tile
    keys: int  # of a list at a time
    q_columns: int  # of a TMA tile of queries
    is_gathered: bool  # TMA gathers rows
    options: dict[str, Any]  # constants and registers


def _tiles(kernel: str, heads: int, has_rope: bool) -> _Tiles:
    if kernel == "m128_bf16":
        return _Tiles(
            sparse_mla_m128_bf16_kernel,
            HEAD_TILE,
            CTAS_PER_TILE,
            BLOCK,
            HALF,
            True,
            {"maxnreg": MAX_REGISTERS},
        )
    is_gathered = kernel == "n64_bf16"
    config = keys_as_m_config(heads, has_rope=has_rope, is_dequantised=not is_gathered)
    options = {"CONFIG": config, "maxnreg": config.MAX_REGISTERS}
    function = sparse_mla_n64_bf16_kernel if is_gathered else sparse_mla_n64_fp8_kv_kernel
    return _Tiles(function, config.ROWS, 1, KEYS, PART, is_gathered, options)


def _gathered_rows(a: SparseArguments) -> dict[str, Any]:
    extra = None if a.extra is None else _row_tiles(a.extra)
    return {"caches": (_row_tiles(a.layer), extra)}


def _row_tiles(layer: CacheLayer) -> TensorDescriptor:
    """TMA tiles of a row and a swizzle atom, of all rows from the first page to the last."""
    rows, _ = pool_rows(layer.payload)
    count, columns = rows.shape
    # a single row may have any stride: nothing is at this distance
    strides = [rows.stride(0) if count > 1 else columns, 1]
    layout: gl.NVMMASharedLayout = SMEM_16BIT.value
    return TensorDescriptor(rows, [count, columns], strides, [1, 64], layout)
