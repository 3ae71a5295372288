"""Launching the FP8 prefill kernel of Hopper; see `launch`."""

from __future__ import annotations

from math import e, log2

from torch import Tensor

from mlakit.formats import SMALLEST_SCALE
from mlakit.kernels.arguments import PrefillArguments
from mlakit.kernels.hopper.prefill.configs import Traits, fp8_prefill_config
from mlakit.kernels.hopper.prefill.descriptors import as_rows, row_pitch, tma_tiles
from mlakit.kernels.hopper.prefill.fp8 import mla_prefill_fp8_kernel
from mlakit.kernels.hopper.prefill.fp8_values import rewrite_values, scale_kinds
from mlakit.kernels.hopper.prefill.schedule import make_schedule
from mlakit.kernels.launch import launch, target


def launch_fp8(a: PrefillArguments, out: Tensor, lse: Tensor, traits: Traits) -> None:
    """Launch the FP8 kernel; the caller has checked that there are queries and keys."""
    q, k_nope, k_rope, v, sink = a.q, a.k_nope, a.k_rope, a.v, a.sink
    tokens, heads, _ = q.shape
    d_n, d_r, d_v = k_nope.shape[2], k_rope.shape[1], v.shape[2]
    config = fp8_prefill_config((d_n, d_r, d_v))
    kinds = scale_kinds(a.k_scale, a.v_scale, a.keys_per_scale)
    tiles, flags, scales = rewrite_values(v, a.k_scale, a.v_scale, a.kv_starts, kinds)
    rows, counters = make_schedule(
        a.q_starts,
        a.kv_starts,
        tokens=tokens,
        heads=heads,
        block_q=config.BLOCK_Q,
        key_bytes=d_n + d_v,
    )
    q_rows, k_rows = as_rows(q), as_rows(k_nope)
    block_k = config.BLOCK_K
    launch(
        mla_prefill_fp8_kernel,
        (min(target(q.device).num_sms, rows.shape[0] * heads),),
        tma_tiles(q_rows, 64, d_n),
        tma_tiles(q_rows, 64, d_r) if d_r else None,
        tma_tiles(k_rows, block_k, d_n),
        tma_tiles(row_pitch(k_rope), block_k, d_r) if d_r else None,
        tma_tiles(tiles.view(-1, block_k), d_v, block_k),
        None if scales is None else tma_tiles(scales.flatten(0, 2), *scales.shape[2:]),
        v,
        flags,
        rows,
        counters,
        out,
        lse,
        sink,
        a.q_scale,
        None if kinds.has_blocks else a.k_scale,
        a.v_scale,
        # a scale of 0 would turn the −inf of a hidden key into NaN
        max(abs(a.softmax_scale) * log2(e), SMALLEST_SCALE),
        heads,
        a.mask.window,
        tiles.shape[1],
        q.stride(1),
        k_nope.stride(1),
        *v.stride(),
        *out.stride()[:2],
        *lse.stride(),
        0 if sink is None else sink.stride(0),
        *((0, 0) if a.q_scale is None else a.q_scale.stride()),
        0 if a.k_scale is None else a.k_scale.stride(0),
        *((0, 0) if a.v_scale is None else a.v_scale.stride()),
        HAS_KEY_SCALES=kinds.has_keys,
        HAS_VALUE_SCALES=kinds.has_values,
        HAS_BLOCK_SCALES=kinds.has_blocks,
        TRAITS=traits,
        CONFIG=config,
        num_warps=4,
        maxnreg=config.MAX_REGISTERS,
        launch_pdl=True,
    )
