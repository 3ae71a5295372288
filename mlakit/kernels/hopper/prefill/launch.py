"""Launching the prefill kernel of Hopper.

Work       a small kernel makes the tile schedule, then persistent CTAs compute the work tiles
Memory     32 bytes of schedule per 128 queries, and per request
Limits     `kernels.hopper.support` refuses what the kernel does not take
"""

from __future__ import annotations

from functools import lru_cache
from math import e, log2
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mlakit.arguments import PrefillArguments
from mlakit.formats import SMALLEST_SCALE
from mlakit.kernels.hopper.prefill.configs import BLOCK_Q, prefill_config
from mlakit.kernels.hopper.prefill.fp8_launch import launch_fp8
from mlakit.kernels.hopper.prefill.kernel import mla_prefill_kernel
from mlakit.kernels.hopper.prefill.schedule import make_schedule
from mlakit.kernels.hopper.primitives import smem_layout
from mlakit.kernels.triton.decode_merge import clear_results
from mlakit.kernels.triton.launch import launch, target


class Traits(NamedTuple):
    """What the kernel is compiled for."""

    D_N: int
    D_R: int
    IS_CAUSAL: bool
    IS_SLIDING: bool
    IS_CHUNKED: bool
    SIGN: int  # of softmax_scale: 1, 0 or −1


def mla_prefill(a: PrefillArguments, out: Tensor, lse: Tensor) -> None:
    """a.alibi_slopes  None"""
    q, k_nope, k_rope, v = a.q, a.k_nope, a.k_rope, a.v
    softmax_scale, mask, sink = a.softmax_scale, a.mask, a.sink
    tokens, heads, _ = q.shape
    if tokens == 0 or heads == 0 or a.q_starts.shape[0] == 1:
        return
    if k_nope.shape[0] == 0:  # TMA has no tile of no rows
        clear_results(out, lse, a.q_starts)
        return
    d_n, d_r, d_v = k_nope.shape[2], k_rope.shape[1], v.shape[2]
    traits = Traits(
        d_n,
        d_r,
        IS_CAUSAL=mask.is_causal,
        IS_SLIDING=mask.kind.startswith("sliding_window"),
        IS_CHUNKED=mask.kind.startswith("chunked"),
        SIGN=(softmax_scale > 0) - (softmax_scale < 0),
    )
    if q.dtype == torch.float8_e4m3fn:
        launch_fp8(a, out, lse, traits)
        return
    config = prefill_config((d_n, d_r, d_v))
    key_bytes = (d_n + d_v) * q.element_size()
    rows, counters = make_schedule(
        a.q_starts, a.kv_starts, tokens=tokens, heads=heads, key_bytes=key_bytes
    )
    width = 1 << (d_n.bit_length() - 1)
    rest = d_n - width
    q_rows, k_rows, v_rows = (_as_rows(tensor) for tensor in (q, k_nope, v))
    block_k = config.BLOCK_K
    launch(
        mla_prefill_kernel,
        (min(target(q.device).num_sms, rows.shape[0] * heads),),
        _tma_tiles(q_rows, BLOCK_Q // 2, width),
        _tma_tiles(q_rows, BLOCK_Q // 2, rest) if rest else None,
        _tma_tiles(q_rows, BLOCK_Q // 2, d_r) if d_r else None,
        _tma_tiles(k_rows, block_k, width),
        _tma_tiles(k_rows, block_k, rest) if rest else None,
        _tma_tiles(_row_pitch(k_rope), block_k, d_r) if d_r else None,
        _tma_tiles(v_rows, block_k, d_v),
        v,
        rows,
        counters,
        out,
        lse,
        sink,
        # a scale of 0 would turn the −inf of a hidden key into NaN
        max(abs(softmax_scale) * log2(e), SMALLEST_SCALE),
        heads,
        mask.window,
        q.stride(1),
        k_nope.stride(1),
        v.stride(1),
        v.stride(0),
        *out.stride()[:2],
        *lse.stride(),
        0 if sink is None else sink.stride(0),
        TRAITS=traits,
        CONFIG=config,
        num_warps=4,
        maxnreg=config.MAX_REGISTERS,
        launch_pdl=True,
    )


def _as_rows(heads: Tensor) -> Tensor:
    """[n, heads, columns] as [n, all columns from the first head's to the last one's]."""
    n, count, columns = heads.shape
    span = (count - 1) * heads.stride(1) + columns
    return _row_pitch(heads.as_strided((n, span), (heads.stride(0), 1)))


def _row_pitch(rows: Tensor) -> Tensor:
    """rows [n, columns]; with one row the stride says nothing, and TMA wants a possible one."""
    n, columns = rows.shape
    return rows.as_strided(rows.shape, (-(-columns // 8) * 8, 1)) if n == 1 else rows


# kept: what a layout checks of itself takes the host longer than the rest of a descriptor
_smem_layout = lru_cache(maxsize=64)(smem_layout)


def _tma_tiles(rows: Tensor, tile_rows: int, columns: int) -> TensorDescriptor:
    layout = _smem_layout(columns, 16)
    return TensorDescriptor(
        rows, list(rows.shape), list(rows.stride()), [tile_rows, columns], layout
    )
