"""Launching the sparse kernels of Hopper.

Work       a persistent CTA per SM; with few tokens, lists are split, and `sparse_merge` combines
           the splits. Of many tokens the last few may get a launch of their own (`tail_start`)
Memory     float32 partials of splits, 256 MiB at most
Limits     `kernels.hopper.support` refuses what the kernels cannot take
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from mlakit.kernels.arguments import SparseArguments
from mlakit.kernels.hopper.sparse.arguments import ScaleArguments
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
from mlakit.kernels.hopper.sparse.configs import (
    BLOCK,
    D_V,
    HEAD_TILE,
    PAIR,
    head_tile,
    m64_bf16_config,
    m64_fp8_kv_config,
    small_m_fp4_kv_config,
    small_m_fp8_kv_config,
    tail_start,
)
from mlakit.kernels.hopper.sparse.fp8_scales import row_scale_arguments
from mlakit.kernels.hopper.sparse.m64_bf16 import sparse_mla_m64_bf16_kernel
from mlakit.kernels.hopper.sparse.m64_fp8_kv import sparse_mla_m64_fp8_kv_kernel
from mlakit.kernels.hopper.sparse.small_m_fp4_kv import sparse_mla_small_m_fp4_kv_kernel
from mlakit.kernels.hopper.sparse.small_m_fp8_kv import sparse_mla_small_m_fp8_kv_kernel
from mlakit.kernels.launch import launch, target

# a kernel, and the configuration that it is compiled with
KERNELS: dict[str, tuple[Any, Any]] = {
    "m64_bf16": (sparse_mla_m64_bf16_kernel, m64_bf16_config),  # by a second cache
    "m64_fp8_kv": (sparse_mla_m64_fp8_kv_kernel, m64_fp8_kv_config),
    # by the format of rows, and heads
    "small_m_fp8_kv": (sparse_mla_small_m_fp8_kv_kernel, small_m_fp8_kv_config),
    "small_m_fp4_kv": (sparse_mla_small_m_fp4_kv_kernel, small_m_fp4_kv_config),  # by heads
}
# list entries of the tiles that `pick_sparse_splits` counts: a split has two of them or more
LIST_TILES = {
    "m64_bf16": PAIR,
    "m64_fp8_kv": BLOCK,
    "small_m_fp8_kv": PAIR,
    "small_m_fp4_kv": PAIR,
}


def sparse_mla(
    kernel: str, a: SparseArguments, out: Tensor, lse: Tensor, max_logits: Tensor
) -> None:
    """Launch one of `KERNELS`."""
    tokens, heads, _ = a.q.shape
    if tokens == 0 or heads == 0:
        return
    topk = a.rows.shape[1] + (0 if a.extra_rows is None else a.extra_rows.shape[1])
    first = tokens
    if a.splits is None:
        head_tiles = triton.cdiv(heads, head_tile(kernel, heads))
        first = tail_start(tokens, head_tiles, topk, target(a.q.device).num_sms)
    if first == tokens:
        _launch(kernel, a, out, lse, max_logits)
        return
    for some in (slice(0, first), slice(first, tokens)):
        _launch(kernel, _of_tokens(a, some), out[some], lse[some], max_logits[some])


def _of_tokens(a: SparseArguments, some: slice) -> SparseArguments:
    """Return the call for some of its tokens."""

    def part(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[some]

    return a._replace(
        q=a.q[some],
        q_rope=part(a.q_rope),
        rows=a.rows[some],
        topk_lens=part(a.topk_lens),
        extra_rows=part(a.extra_rows),
        extra_topk_lens=part(a.extra_topk_lens),
    )


def _launch(kernel: str, a: SparseArguments, out: Tensor, lse: Tensor, max_logits: Tensor) -> None:
    tokens, heads, _ = a.q.shape
    num_sms = target(a.q.device).num_sms
    tile = head_tile(kernel, heads)
    head_tiles = tokens * triton.cdiv(heads, tile)
    split = split_results(
        a,
        (out, lse, max_logits),
        list_tile=LIST_TILES[kernel],
        head_tiles=head_tiles,
        num_sms=num_sms,
    )
    function, pick_config = KERNELS[kernel]
    config = pick_config(*_config_arguments(kernel, a, heads))
    columns = D_V // 2 if tile == HEAD_TILE else D_V // 4
    q_tiles, rope_tiles = query_tiles(a.q, a.q_rope if has_rope(a) else None, tile, columns)
    main, extra = list_arguments(a)
    launch(
        function,
        (min(num_sms, head_tiles * split.num_splits),),
        q=q_tiles,
        q_rope=rope_tiles,
        tokens=tokens,
        heads=heads,
        num_splits=split.num_splits,
        **list_lengths(a),
        main=main,
        extra=extra,
        outputs=split.outputs,
        scales=_scale_arguments(kernel, a),
        TRAITS=traits(a),
        CONFIG=config,
        num_warps=4,
        maxnreg=config.MAX_REGISTERS,
    )
    merge(split, a.sink, (out, lse, max_logits))


def _config_arguments(kernel: str, a: SparseArguments, heads: int) -> tuple[object, ...]:
    if kernel == "m64_bf16":
        return (a.extra is not None,)
    if kernel == "small_m_fp4_kv":
        return (heads,)
    has_rope = a.layer.codec.row.qk_rope_head_dim > 0
    return (a.layer.codec.traits, heads, has_rope) if kernel == "small_m_fp8_kv" else (has_rope,)


def _scale_arguments(kernel: str, a: SparseArguments) -> ScaleArguments:
    scale = scale_log2(a.softmax_scale)
    if kernel in ("m64_bf16", "small_m_fp4_kv"):  # no scales, or inside of rows
        return ScaleArguments(scale, None, None)
    extra = None if a.extra is None else row_scale_arguments(a.extra)
    return ScaleArguments(scale, row_scale_arguments(a.layer), extra)
