"""Launching the prefill kernels of Blackwell.

Work       as on Hopper (`hopper.prefill.launch`): a small kernel makes the tile schedule, then
           persistent CTAs compute the work tiles
Memory     32 bytes of schedule per work tile of a head, and per request
Limits     `kernels.blackwell.support` refuses what the kernels do not take
"""

from __future__ import annotations

from math import e, log2
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mlakit.formats import SMALLEST_SCALE
from mlakit.kernels.arguments import PrefillArguments, stride_of
from mlakit.kernels.blackwell.prefill.bf16 import mla_prefill_bf16_kernel
from mlakit.kernels.blackwell.prefill.configs import (
    ATOM_BYTES,
    KEYS,
    QUERIES,
    TAIL,
    fp8_prefill_config,
    prefill_config,
)
from mlakit.kernels.blackwell.prefill.fp8 import mla_prefill_e4m3_kernel
from mlakit.kernels.decode_merge import clear_results
from mlakit.kernels.hopper.prefill.arguments import ValueArguments, output_arguments
from mlakit.kernels.hopper.prefill.configs import Traits
from mlakit.kernels.hopper.prefill.descriptors import as_rows, row_pitch, tma_tiles
from mlakit.kernels.hopper.prefill.schedule import make_schedule
from mlakit.kernels.launch import launch, target


class ScaleArguments(NamedTuple):
    """The scales of e4m3 operands, float32 or None each, and their strides; 0: one of all."""

    q: Tensor | None  # [tokens, heads]
    k: Tensor | None  # [blocks]
    v: Tensor | None  # [blocks, heads]
    stride_q_token: int
    stride_q_head: int
    stride_k: int
    stride_v_token: int
    stride_v_head: int


def mla_prefill(a: PrefillArguments, out: Tensor, lse: Tensor) -> None:
    """Launch a prefill kernel; `a.alibi_slopes` is None."""
    q, k_nope, k_rope, v = a.q, a.k_nope, a.k_rope, a.v
    tokens, heads, _ = q.shape
    if tokens == 0 or heads == 0 or a.q_starts.shape[0] == 1:
        return
    if k_nope.shape[0] == 0:  # TMA has no tile of no rows
        clear_results(out, lse, a.q_starts)
        return
    d_n, d_r, d_v = k_nope.shape[2], k_rope.shape[1], v.shape[2]
    is_fp8 = q.dtype == torch.float8_e4m3fn
    config = (fp8_prefill_config if is_fp8 else prefill_config)((d_n, d_r, d_v))
    schedule = make_schedule(
        a.q_starts,
        a.kv_starts,
        tokens=tokens,
        heads=heads,
        block_q=QUERIES * config.TILES,
        key_bytes=(d_n + d_v) * q.element_size(),
    )
    more: dict[str, Any] = {"D_V": d_v}
    if is_fp8:
        more = {
            "q_rope": tma_tiles(as_rows(q), QUERIES, TAIL) if d_r else None,
            "scales": _scale_arguments(a),
        }
    atom = ATOM_BYTES // q.element_size()
    stride_lse_token, stride_lse_head = lse.stride()
    launch(
        mla_prefill_e4m3_kernel if is_fp8 else mla_prefill_bf16_kernel,
        (min(target(q.device).num_sms, schedule.rows.shape[0] * heads),),
        q=tma_tiles(as_rows(q), QUERIES, atom),
        k=tma_tiles(as_rows(k_nope), KEYS, atom),
        k_rope=tma_tiles(row_pitch(k_rope), KEYS, TAIL) if d_r else None,
        v=tma_tiles(as_rows(v), KEYS, atom),
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
        TRAITS=Traits(
            d_n, d_r, MASK=a.mask.traits, SIGN=(a.softmax_scale > 0) - (a.softmax_scale < 0)
        ),
        CONFIG=config,
        num_warps=4,
        maxnreg=config.MAX_REGISTERS,
        launch_pdl=True,
        **more,
    )


def _scale_arguments(a: PrefillArguments) -> ScaleArguments:
    return ScaleArguments(
        a.q_scale,
        a.k_scale,
        a.v_scale,
        stride_of(a.q_scale, 0),
        stride_of(a.q_scale, 1),
        stride_of(a.k_scale, 0),
        stride_of(a.v_scale, 0),
        stride_of(a.v_scale, 1),
    )
