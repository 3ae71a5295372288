"""Launching the prefill kernel of Hopper.

Work       a small kernel makes the tile schedule, then persistent CTAs compute the work tiles
Memory     32 bytes of schedule per 128 queries, and per request
Limits     `kernels.hopper.support` refuses what the kernel does not take
"""

from __future__ import annotations

from math import e, log2

import torch
from torch import Tensor

from mlakit.formats import SMALLEST_SCALE
from mlakit.kernels.arguments import PrefillArguments
from mlakit.kernels.decode_merge import clear_results
from mlakit.kernels.hopper.prefill.arguments import ValueArguments, output_arguments
from mlakit.kernels.hopper.prefill.bf16 import mla_prefill_kernel
from mlakit.kernels.hopper.prefill.configs import BLOCK_Q, Traits, prefill_config
from mlakit.kernels.hopper.prefill.descriptors import as_rows, row_pitch, tma_tiles
from mlakit.kernels.hopper.prefill.fp8_launch import launch_fp8
from mlakit.kernels.hopper.prefill.schedule import make_schedule
from mlakit.kernels.launch import launch, target


def mla_prefill(a: PrefillArguments, out: Tensor, lse: Tensor) -> None:
    """Launch the prefill kernel; `a.alibi_slopes` is None."""
    q, k_nope, k_rope, v = a.q, a.k_nope, a.k_rope, a.v
    softmax_scale, mask = a.softmax_scale, a.mask
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
        MASK=mask.traits,
        SIGN=(softmax_scale > 0) - (softmax_scale < 0),
    )
    if q.dtype == torch.float8_e4m3fn:
        launch_fp8(a, out, lse, traits)
        return
    config = prefill_config((d_n, d_r, d_v))
    key_bytes = (d_n + d_v) * q.element_size()
    schedule = make_schedule(
        a.q_starts, a.kv_starts, tokens=tokens, heads=heads, block_q=BLOCK_Q, key_bytes=key_bytes
    )
    width = 1 << (d_n.bit_length() - 1)
    rest = d_n - width
    q_rows, k_rows, v_rows = (as_rows(tensor) for tensor in (q, k_nope, v))
    block_k = config.BLOCK_K
    stride_lse_token, stride_lse_head = lse.stride()
    launch(
        mla_prefill_kernel,
        (min(target(q.device).num_sms, schedule.rows.shape[0] * heads),),
        q=tma_tiles(q_rows, BLOCK_Q // 2, width),
        q_rest=tma_tiles(q_rows, BLOCK_Q // 2, rest) if rest else None,
        q_rope=tma_tiles(q_rows, BLOCK_Q // 2, d_r) if d_r else None,
        k=tma_tiles(k_rows, block_k, width),
        k_rest=tma_tiles(k_rows, block_k, rest) if rest else None,
        k_rope=tma_tiles(row_pitch(k_rope), block_k, d_r) if d_r else None,
        v=tma_tiles(v_rows, block_k, d_v),
        # a scale of 0 would turn the −inf of a hidden key into NaN
        scale_log2=max(abs(softmax_scale) * log2(e), SMALLEST_SCALE),
        heads=heads,
        window=mask.window,
        stride_q_head=q.stride(1),
        stride_k_head=k_nope.stride(1),
        stride_v_head=v.stride(1),
        stride_lse_token=stride_lse_token,
        stride_lse_head=stride_lse_head,
        schedule=schedule,
        values=ValueArguments(v, v.stride(0)),
        outputs=output_arguments(out, lse, a.sink),
        TRAITS=traits,
        CONFIG=config,
        num_warps=4,
        maxnreg=config.MAX_REGISTERS,
        launch_pdl=True,
    )
