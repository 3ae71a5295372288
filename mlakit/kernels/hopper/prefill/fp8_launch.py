"""Launching the FP8 prefill kernel of Hopper; see `launch`."""

from __future__ import annotations

from math import e, log2

from torch import Tensor

from mlakit.formats import SMALLEST_SCALE
from mlakit.kernels.arguments import PrefillArguments, stride_of
from mlakit.kernels.hopper.prefill.arguments import (
    Fp8ValueTensors,
    OutputTensors,
    ScaleTensors,
)
from mlakit.kernels.hopper.prefill.configs import Traits, fp8_prefill_config
from mlakit.kernels.hopper.prefill.descriptors import as_rows, row_pitch, tma_tiles
from mlakit.kernels.hopper.prefill.fp8 import mla_prefill_fp8_kernel
from mlakit.kernels.hopper.prefill.fp8_values import rewrite_values, scale_kinds
from mlakit.kernels.hopper.prefill.schedule import make_schedule
from mlakit.kernels.launch import launch, target


def launch_fp8(a: PrefillArguments, out: Tensor, lse: Tensor, traits: Traits) -> None:
    """Launch the FP8 kernel; the caller has checked that there are queries and keys."""
    q, k_nope, k_rope, v = a.q, a.k_nope, a.k_rope, a.v
    tokens, heads, _ = q.shape
    d_n, d_r, d_v = k_nope.shape[2], k_rope.shape[1], v.shape[2]
    config = fp8_prefill_config((d_n, d_r, d_v))
    kinds = scale_kinds(a.k_scale, a.v_scale, a.keys_per_scale)
    tiles, flags, scales = rewrite_values(v, a.k_scale, a.v_scale, a.kv_starts, kinds)
    schedule = make_schedule(
        a.q_starts,
        a.kv_starts,
        tokens=tokens,
        heads=heads,
        block_q=config.BLOCK_Q,
        key_bytes=d_n + d_v,
    )
    q_rows, k_rows = as_rows(q), as_rows(k_nope)
    block_k = config.BLOCK_K
    stride_lse_token, stride_lse_head = lse.stride()
    launch(
        mla_prefill_fp8_kernel,
        (min(target(q.device).num_sms, schedule.rows.shape[0] * heads),),
        q=tma_tiles(q_rows, 64, d_n),
        q_rope=tma_tiles(q_rows, 64, d_r) if d_r else None,
        k=tma_tiles(k_rows, block_k, d_n),
        k_rope=tma_tiles(row_pitch(k_rope), block_k, d_r) if d_r else None,
        v=tma_tiles(tiles.view(-1, block_k), d_v, block_k),
        scale_tiles=None if scales is None else tma_tiles(scales.flatten(0, 2), *scales.shape[2:]),
        heads=heads,
        window=a.mask.window,
        value_tiles=tiles.shape[1],
        stride_q_head=q.stride(1),
        stride_k_head=k_nope.stride(1),
        stride_lse_token=stride_lse_token,
        stride_lse_head=stride_lse_head,
        values=Fp8ValueTensors(v, flags),
        schedule=schedule,
        outputs=OutputTensors(out, lse, a.sink),
        scales=ScaleTensors(a.q_scale, None if kinds.has_blocks else a.k_scale, a.v_scale),
        # a scale of 0 would turn the −inf of a hidden key into NaN
        scale_log2=max(abs(a.softmax_scale) * log2(e), SMALLEST_SCALE),
        stride_v_token=v.stride(0),
        stride_v_head=v.stride(1),
        stride_v_column=v.stride(2),
        stride_out_token=out.stride(0),
        stride_out_head=out.stride(1),
        stride_sink=stride_of(a.sink, 0),
        stride_qs_token=stride_of(a.q_scale, 0),
        stride_qs_head=stride_of(a.q_scale, 1),
        stride_ks=stride_of(a.k_scale, 0),
        stride_vs_token=stride_of(a.v_scale, 0),
        stride_vs_head=stride_of(a.v_scale, 1),
        KINDS=kinds,
        TRAITS=traits,
        CONFIG=config,
        num_warps=4,
        maxnreg=config.MAX_REGISTERS,
        launch_pdl=True,
    )
