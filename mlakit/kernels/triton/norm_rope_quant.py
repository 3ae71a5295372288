"""Launches `norm_rope_quant_kernel`: RoPE, RMSNorm, quantise and append in one launch per step."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from mlakit.kernels.arguments import AppendArguments
from mlakit.kernels.launch import launch, target
from mlakit.kernels.triton.arguments import as_bytes, stride_of
from mlakit.kernels.triton.configs import pick_append_config
from mlakit.kernels.triton.norm_rope_quant_kernel import norm_rope_quant_kernel
from mlakit.kernels.triton.store_rows import row_options, tensor_scale_of


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
    q_rope_out, payload = as_bytes(q_rope_out), as_bytes(layer.payload)
    flat = isinstance(page_table, tuple)
    kv_starts, pages = page_table if isinstance(page_table, tuple) else (None, page_table)
    scales = layer.scales
    pdl = config.pdl and device.has_pdl
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}

    norm_programs = triton.cdiv(tokens, config.rows)
    rope_programs = 0
    if d_r:
        rope_programs = tokens * triton.cdiv(heads, config.heads)
    launch(
        norm_rope_quant_kernel,
        (norm_programs + rope_programs,),
        q_rope,
        kv,
        freqs,
        gamma,
        payload,
        scales,
        *tensor_scale_of(layer),
        kv_starts,
        pages,
        kv_lens,
        q_starts,
        slots,
        positions,
        q_rope_out,
        tokens,
        heads,
        0 if kv_lens is None else kv_lens.shape[0],
        freqs.shape[0],
        float(a.epsilon),
        *a.shard,
        norm_programs,
        q_rope.stride(0),
        q_rope.stride(1),
        kv.stride(0),
        freqs.stride(0),
        freqs.stride(1),
        stride_of(gamma, 0),
        payload.stride(0),
        payload.stride(1),
        stride_of(scales, 0),
        stride_of(scales, 1),
        stride_of(kv_starts, 0),
        0 if flat else stride_of(pages, 0),
        stride_of(pages, -1),
        stride_of(kv_lens, 0),
        stride_of(q_starts, 0),
        stride_of(slots, 0),
        stride_of(positions, 0),
        q_rope_out.stride(0),
        q_rope_out.stride(1),
        IS_SHARDED=a.shard.world > 1,
        INTERLEAVED=a.rope == "interleaved",
        ROWS=config.rows,
        HEADS=config.heads,
        PROBES=config.probes,
        PDL=pdl,
        num_warps=config.num_warps,
        **row_options(layer, power_of_two=a.power_of_two_scales, has_fp8=device.has_fp8),
        # on sm_120 the assembler otherwise stops at 40 registers and spills two words
        **({"maxnreg": 128} if device.arch == 120 else {}),
        **options,
    )
