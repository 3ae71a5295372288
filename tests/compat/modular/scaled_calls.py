"""Small calls that pass, over caches with scales, as `calls` has over other caches."""

from __future__ import annotations

from typing import Any

import torch

from mlakit.compat.modular import KVCollection
from mlakit.dispatch.checks import E4M3
from tests.compat.modular.calls import (
    HEADS,
    KEYS,
    LAYERS,
    NOPE,
    PAGE,
    PAGES,
    ROPE,
    TOKENS,
    VALUE,
    WIDTH,
    Call,
    Make,
    cache_parts,
    drawn,
    fused,
    fused_kernel,
    prefill,
    ragged_decode,
    scaled_cache_parts,
    unwritten,
)

GROUP = 32  # columns per scale
GROUP_WIDTH = GROUP + ROPE


def row_cache_parts() -> dict[str, Any]:
    """Rows of e4m3 with one scale each."""
    scales = torch.full((PAGES, 1, LAYERS, PAGE, 1, 1), 0.5)
    return cache_parts(WIDTH, E4M3) | {"scales": scales, "per_token_scale_rope_aware": False}


def group_cache_parts() -> dict[str, Any]:
    """Rows of 32 + 4 columns of e4m3 with one scale per 32 columns."""
    scales = torch.full((PAGES, 1, LAYERS, PAGE, 1, 2), 0.5)
    return cache_parts(GROUP_WIDTH, E4M3) | {"scales": scales, "kv_lora_rank": GROUP}


def with_own_pages(parts: dict[str, Any]) -> dict[str, Any]:
    """The same cache with scales in pages of their own."""
    table = torch.arange(2 * len(KEYS), dtype=torch.int32).view(len(KEYS), 2).flip(1)
    return parts | {"scales_lookup_table": table}


def group_collection() -> Call:
    return Call(KVCollection, group_cache_parts())


def row_fused() -> Call:
    call = fused_kernel()
    call.rebuild_cache(**row_cache_parts())
    return call


def group_fused() -> Call:
    call = fused()
    call.arguments |= {"gamma": drawn(GROUP), "kv_input": drawn(TOKENS, GROUP_WIDTH)}
    call.rebuild_cache(**group_cache_parts())
    return call


def rope_aware_prefill() -> Call:
    call = prefill()
    call.rebuild_cache(**scaled_cache_parts())
    return call


def group_prefill() -> Call:
    call = prefill()
    weight = drawn(HEADS * (NOPE + VALUE), GROUP, dtype=E4M3)
    call.arguments |= {"kv_norm_gamma": drawn(GROUP), "kv_b_proj": weight}
    call.rebuild_cache(**group_cache_parts())
    return call


def row_decode() -> Call:
    call = ragged_decode()
    call.rebuild_cache(**row_cache_parts())
    return call


def group_decode() -> Call:
    call = ragged_decode()
    call.arguments |= {
        "output": unwritten(TOKENS, HEADS, GROUP),
        "q": drawn(TOKENS, HEADS, GROUP_WIDTH),
    }
    call.rebuild_cache(**group_cache_parts())
    return call


def own_pages_fused() -> Call:
    call = row_fused()
    call.rebuild_cache(**with_own_pages(row_cache_parts()))
    return call


def own_pages_prefill() -> Call:
    call = rope_aware_prefill()
    call.rebuild_cache(**with_own_pages(scaled_cache_parts()))
    return call


def own_pages_decode() -> Call:
    call = group_decode()
    call.rebuild_cache(**with_own_pages(group_cache_parts()))
    return call


SCALED_PAGED: tuple[Make, ...] = (
    row_fused,
    group_fused,
    rope_aware_prefill,
    group_prefill,
    row_decode,
    group_decode,
)
SCALED_WRITERS: tuple[Make, ...] = (
    *SCALED_PAGED,
    own_pages_fused,
    own_pages_prefill,
    own_pages_decode,
)
SCALED_MAKERS: tuple[Make, ...] = (*SCALED_WRITERS, group_collection)
