"""Launching the prefill kernel of Blackwell.

Work       as on Hopper (`hopper.prefill.launch`): a small kernel makes the tile schedule, then
           persistent CTAs compute the work tiles
Memory     32 bytes of schedule per work tile of a head, and per request
Limits     `kernels.blackwell.support` refuses what the kernel does not take
"""

from __future__ import annotations

from math import e, log2

from torch import Tensor

from mlakit.formats import SMALLEST_SCALE
from mlakit.kernels.arguments import PrefillArguments
from mlakit.kernels.blackwell.prefill.bf16 import mla_prefill_bf16_kernel
from mlakit.kernels.blackwell.prefill.configs import ATOM, KEYS, QUERIES, prefill_config
from mlakit.kernels.decode_merge import clear_results
from mlakit.kernels.hopper.prefill.arguments import ValueArguments, output_arguments
from mlakit.kernels.hopper.prefill.configs import Traits
from mlakit.kernels.hopper.prefill.descriptors import as_rows, row_pitch, tma_tiles
from mlakit.kernels.hopper.prefill.schedule import make_schedule
from mlakit.kernels.launch import launch, target


def mla_prefill(a: PrefillArguments, out: Tensor, lse: Tensor) -> None:
    """Launch the prefill kernel; `a.alibi_slopes` is None."""
    q, k_nope, k_rope, v = a.q, a.k_nope, a.k_rope, a.v
    tokens, heads, _ = q.shape
    if tokens == 0 or heads == 0 or a.q_starts.shape[0] == 1:
        return
    if k_nope.shape[0] == 0:  # TMA has no tile of no rows
        clear_results(out, lse, a.q_starts)
        return
    d_n, d_r, d_v = k_nope.shape[2], k_rope.shape[1], v.shape[2]
    config = prefill_config((d_n, d_r, d_v))
    schedule = make_schedule(
        a.q_starts,
        a.kv_starts,
        tokens=tokens,
        heads=heads,
        block_q=QUERIES * config.TILES,
        key_bytes=(d_n + d_v) * q.element_size(),
    )
    stride_lse_token, stride_lse_head = lse.stride()
    launch(
        mla_prefill_bf16_kernel,
        (min(target(q.device).num_sms, schedule.rows.shape[0] * heads),),
        q=tma_tiles(as_rows(q), QUERIES, ATOM),
        k=tma_tiles(as_rows(k_nope), KEYS, ATOM),
        k_rope=tma_tiles(row_pitch(k_rope), KEYS, ATOM) if d_r else None,
        v=tma_tiles(as_rows(v), KEYS, ATOM),
        # a scale of 0 would turn the −inf of a hidden key into NaN
        scale_log2=max(abs(a.softmax_scale) * log2(e), SMALLEST_SCALE),
        heads=heads,
        window=a.mask.window,
        stride_q_head=q.stride(1),
        stride_k_head=k_nope.stride(1),
        stride_v_head=v.stride(1),
        stride_lse_token=stride_lse_token,
        stride_lse_head=stride_lse_head,
        schedule=schedule,
        values=ValueArguments(v, v.stride(0)),
        outputs=output_arguments(out, lse, a.sink),
        D_V=d_v,
        TRAITS=Traits(
            d_n, d_r, MASK=a.mask.traits, SIGN=(a.softmax_scale > 0) - (a.softmax_scale < 0)
        ),
        CONFIG=config,
        num_warps=4,
        maxnreg=config.MAX_REGISTERS,
        launch_pdl=True,
    )
