"""Quantise finished rows and store them at their slots: one kernel for every cache format.

Maths      `store_rows` has the equations
Work       one program per ROWS tokens
Memory     reads latent, k_rope and slots; writes one cache row per token with a slot in the pool
Limits     none: widths are padded to powers of two, rows may have any stride and alignment
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from mlakit.kernels.arguments import AppendRowsArguments, stride_of
from mlakit.kernels.launch import launch, target
from mlakit.kernels.triton.arguments import cache_arguments
from mlakit.kernels.triton.configs import pick_append_config
from mlakit.kernels.triton.rope import load_pairs
from mlakit.kernels.triton.store_rows import store_latent, store_rope, store_traits


def append_rows(a: AppendRowsArguments) -> None:
    latent, k_rope, layer = a.latent, a.k_rope, a.layer
    tokens = latent.shape[0]
    device = target(latent.device)
    config = pick_append_config(
        tokens=tokens,
        heads=1,
        kv_lora_rank=latent.shape[1],
        rope=layer.codec.row.qk_rope_head_dim,
        itemsize=latent.element_size(),
        num_sms=device.num_sms,
    )
    launch(
        append_rows_kernel,
        (triton.cdiv(tokens, config.rows),),
        tokens=tokens,
        num_slots=layer.num_slots,
        rows=RowArguments(
            *(latent, k_rope, a.slots),
            *(latent.stride(0), stride_of(k_rope, 0), a.slots.stride(0)),
        ),
        cache=cache_arguments(layer),
        ROW=store_traits(layer, power_of_two=a.power_of_two_scales, has_fp8=device.has_fp8),
        ROWS=config.rows,
        num_warps=config.num_warps,
        # the choices of `norm_rope_quant_kernel`
        **({"maxnreg": 128} if device.arch == 120 else {}),
    )


class RowArguments(NamedTuple):
    """The finished rows, and where they go."""

    latent: Tensor  # [tokens, D_C]
    k_rope: Tensor | None  # [tokens, D_R]; None where D_R is 0
    slots: Tensor  # [tokens]; outside of [0, num_slots): no row is written
    stride_latent_token: int
    stride_rope_token: int
    stride_slots: int


@triton.jit(do_not_specialize=["tokens", "num_slots"])
def append_rows_kernel(
    tokens,
    num_slots,
    rows,  # `RowArguments`
    cache,  # `CacheArguments`
    ROW: tl.constexpr,  # `StoreTraits`
    ROWS: tl.constexpr,
):
    """Cache rows of ROWS tokens."""
    D_R: tl.constexpr = ROW.D_R
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_token = token < tokens
    slot_at = rows.slots + token * rows.stride_slots
    slot = tl.load(slot_at, mask=is_token, other=-1).to(tl.int64)
    is_stored = (slot >= 0) & (slot < num_slots)
    column = tl.arange(0, ROW.LATENT_TILE)
    # rows without a slot are not read: they may lie in memory that holds nothing
    mask = is_stored[:, None] & (column < ROW.D_C)[None, :]
    x_at = rows.latent + token[:, None] * rows.stride_latent_token + column[None, :]
    x = tl.load(x_at, mask=mask, other=0.0)
    if D_R > 0:
        rope_rows = (rows.k_rope + token * rows.stride_rope_token)[:, None, None]
        k0, k1 = load_pairs(rope_rows, is_stored[:, None, None], D_R, ROW.PAIRS, True)
    page, offset = slot // ROW.PAGE_SIZE, slot % ROW.PAGE_SIZE
    row = cache.payload + page * cache.stride_page + offset * cache.stride_row  # [T]
    rope = None
    if D_R > 0:
        rope = (k0.to(tl.float32), k1.to(tl.float32))
    rope_scale = store_latent(x.to(tl.float32), rope, row, page, offset, is_stored, cache, ROW)
    if D_R > 0:
        store_rope(rope[0], rope[1], row, is_stored, rope_scale, ROW, True)
