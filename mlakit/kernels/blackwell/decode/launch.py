"""Launching the decode kernels of Blackwell, and planning for it.

Work       as on Hopper (`hopper.decode.calls`): the CTAs of a plan, times work tiles of a request
Memory     float32 partials, as on Hopper
Limits     16-bit rows of 576/512 columns that TMA can address, in one tensor or in two, or rows of
           fp8_block128; in pages of any size. `kernels.blackwell.support` refuses the rest
"""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.cache import CacheLayer
from mlakit.kernels.arguments import DecodeArguments, DecodePlanArguments
from mlakit.kernels.blackwell.decode.n64_bf16 import mla_decode_n64_bf16_kernel
from mlakit.kernels.blackwell.decode.n64_fp8_kv import mla_decode_n64_fp8_kv_kernel
from mlakit.kernels.blackwell.device.configs import (
    D_C,
    KEYS,
    PART,
    head_rows,
    keys_as_m_config,
)
from mlakit.kernels.hopper.decode.arguments import Gather
from mlakit.kernels.hopper.decode.calls import CacheArguments, make_plan, run, tma_tiles
from mlakit.kernels.hopper.decode.configs import Tiles
from mlakit.kernels.hopper.pool_rows import pool_rows
from mlakit.plan import DecodePlanTensors

GATHERED_COLUMNS = 64  # a swizzle atom of a row


def mla_decode(kernel: str, a: DecodeArguments, out: Tensor, lse: Tensor) -> None:
    """Launch n64_bf16 or n64_fp8_kv."""
    tokens, heads, _ = a.q.shape
    if tokens == 0 or heads == 0:
        return  # nothing to write, and no tile for TMA to load
    if kernel == "n64_fp8_kv":
        run(mla_decode_n64_fp8_kv_kernel, _tiles(heads), _words(a.layer, heads), a, out, lse)
    else:
        run(mla_decode_n64_bf16_kernel, _tiles(heads), _gathered(a.layer, heads), a, out, lse)


def plan_mla_decode(kernel: str, a: DecodePlanArguments) -> DecodePlanTensors:
    """A plan, made on the device, for as many CTAs as run at the same time."""
    return make_plan(_tiles(a.heads), a)


def _tiles(heads: int) -> Tiles:
    return Tiles(head_rows(heads), q_columns=PART, kv_columns=PART, keys=KEYS, min_keys=KEYS)


def _words(layer: CacheLayer, heads: int) -> CacheArguments:
    rows, page_rows = pool_rows(layer.payload)
    words = rows.view(torch.int32)
    return CacheArguments(
        kv=words,
        kv_rope=words,
        page_rows=page_rows,
        rope_column=0,
        gather=Gather(words, words.stride(0) // 4),
        extra_arguments={},
        host_scale=1.0,
        config=keys_as_m_config(heads, has_rope=True, is_dequantised=True),
    )


def _gathered(layer: CacheLayer, heads: int) -> CacheArguments:
    rows, page_rows = pool_rows(layer.payload)
    # support takes rotated columns in a tensor of their own only with the same page_rows
    rope_rows = rows if layer.rope is None else pool_rows(layer.rope)[0]
    return CacheArguments(
        kv=tma_tiles(rows, 1, GATHERED_COLUMNS),
        kv_rope=tma_tiles(rope_rows, 1, GATHERED_COLUMNS),
        page_rows=page_rows,
        rope_column=D_C if layer.rope is None else 0,
        gather=Gather(None, None),
        extra_arguments={},
        host_scale=1.0,
        config=keys_as_m_config(heads, has_rope=True),
    )
