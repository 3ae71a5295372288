"""Launches `norm_rope_quant_kernel`: RoPE, RMSNorm, quantise and append in one launch per step."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from mlakit.cache.layouts import bits
from mlakit.kernels.arguments import AppendArguments, stride_of
from mlakit.kernels.launch import launch, target
from mlakit.kernels.triton.arguments import cache_arguments, length_arguments, page_table_arguments
from mlakit.kernels.triton.configs import pick_append_config
from mlakit.kernels.triton.norm_rope_quant_kernel import (
    AngleArguments,
    LatentArguments,
    QueryArguments,
    SlotArguments,
    Traits,
    norm_rope_quant_kernel,
)
from mlakit.kernels.triton.store_rows import store_traits


def norm_rope_quant_append(a: AppendArguments, q_rope_out: Tensor) -> None:
    q_rope, kv, freqs, gamma, layer = a.q_rope, a.kv, a.freqs, a.gamma, a.layer
    page_table, kv_lens, q_starts = a.page_table, a.kv_lens, a.q_starts
    slots, positions = a.slots, a.positions
    tokens, heads, d_r = q_rope.shape
    d_c = layer.codec.row.kv_lora_rank
    device = target(q_rope.device)
    config = pick_append_config(
        tokens=tokens,
        heads=heads,
        kv_lora_rank=d_c,
        rope=d_r,
        itemsize=q_rope.element_size(),
        num_sms=device.num_sms,
    )
    q_rope_out = bits(q_rope_out)
    table, stride_table_request = page_table_arguments(page_table)
    pdl = config.pdl and device.has_pdl
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}

    norm_programs = triton.cdiv(tokens, config.rows)
    rope_programs = 0
    if d_r:
        rope_programs = tokens * triton.cdiv(heads, config.heads)
    launch(
        norm_rope_quant_kernel,
        (norm_programs + rope_programs,),
        tokens=tokens,
        heads=heads,
        num_requests=0 if kv_lens is None else kv_lens.shape[0],
        num_positions=freqs.shape[0],
        norm_programs=norm_programs,
        stride_table_request=stride_table_request,
        queries=QueryArguments(q_rope, q_rope_out, *q_rope.stride()[:2], *q_rope_out.stride()[:2]),
        latents=LatentArguments(*(kv, gamma, float(a.epsilon), kv.stride(0), stride_of(gamma, 0))),
        angles=AngleArguments(freqs, positions, *freqs.stride(), stride_of(positions, 0)),
        slots=SlotArguments(slots, stride_of(slots, 0)),
        page_table=table,
        lengths=length_arguments(q_starts, kv_lens),
        shard=a.shard,
        cache=cache_arguments(layer),
        ROW=store_traits(layer, power_of_two=a.power_of_two_scales, has_fp8=device.has_fp8),
        TRAITS=Traits(
            IS_SHARDED=a.shard.world > 1,
            INTERLEAVED=a.rope == "interleaved",
            ROWS=config.rows,
            HEADS=config.heads,
            PROBES=config.probes,
            PDL=pdl,
        ),
        num_warps=config.num_warps,
        # on sm_120 the assembler otherwise stops at 40 registers and spills two words
        **({"maxnreg": 128} if device.arch == 120 else {}),
        **options,
    )
