"""Wrong calls over caches with scales."""

from __future__ import annotations

import torch

from mlakit.dispatch.checks import E4M3
from tests.compat.modular.calls import (
    LAYERS,
    PAGE,
    PAGES,
    TOKENS,
    Make,
    at,
    scaled_collection,
    sparse,
    unwritten,
)
from tests.compat.modular.scaled_calls import (
    group_collection,
    group_decode,
    group_fused,
    group_prefill,
    own_pages_decode,
    own_pages_fused,
    own_pages_prefill,
    rope_aware_prefill,
    row_decode,
    row_fused,
)
from tests.compat.modular.wrong_calls import A_PAGE, NO_DATA, SCALES, STRIDE_0, TABLE_OF_ZEROS
from tests.spoiling import EXPANDED, ON_META, RANK_BELOW, Wrong, doubled, of, shortened


def own_pages() -> list[Wrong]:
    """Rows for every function that reads or writes scales in pages of their own."""
    table = "scales_lookup_table"
    return [
        Wrong(f"{table}[0, 0] {A_PAGE}, got -1", scales_lookup_table=at((0, 0), -1)),
        Wrong(f"{table}[0, 1] {A_PAGE}, got 6", scales_lookup_table=at((0, 1), PAGES)),
        Wrong(f"{table}[2, 0] {A_PAGE}, got 6", scales_lookup_table=at((2, 0), PAGES)),
    ]


WRONG_SCALED_CALLS: dict[Make, list[Wrong]] = {
    scaled_collection: [
        Wrong("TypeError: scales must be float32, got float64", scales=of(torch.float64)),
        Wrong("scales must have axes ..., got shape (1, 2, 4, 1, 1)", scales=RANK_BELOW),
        Wrong(f"scales {NO_DATA}", scales=ON_META),
        Wrong("scales.shape[0] (pages) must equal blocks.shape[0], 6, got 5", scales=shortened(0)),
        Wrong("scales must have 1 scale per token, got 2", scales=doubled(5)),
        Wrong(f"scales {STRIDE_0}", scales=EXPANDED),
        Wrong(
            "scales_lookup_table.shape[1] (columns) must equal lookup_table.shape[1], 2, got 1",
            scales_lookup_table=TABLE_OF_ZEROS[:, :1],
        ),
        Wrong(
            "blocks must have rows of 16 latent bytes and whole bf16 ..., got head_size 23",
            blocks=shortened(5),
        ),
        Wrong(
            "kv_lora_rank must be a multiple of 4 for bf16 rope columns, got 18",
            kv_lora_rank=18,
            blocks=unwritten(PAGES, 1, LAYERS, PAGE, 1, 26, dtype=E4M3),
        ),
        Wrong(
            "per_token_scale_rope_aware must be None or False without scales, got True",
            scales=None,
            per_token_scale_rope_aware=True,
        ),
        Wrong(
            "blocks must have an even number of rope columns, got 7",
            blocks=shortened(5),
            per_token_scale_rope_aware=False,
        ),
    ],
    group_collection: [
        Wrong(
            "scales must have 1 scale per token, or 2 (per 32 columns), got 4",
            scales=doubled(5),
        ),
        Wrong(
            "scales must have 1 scale per token, or 18 (per 32 columns), 9 (per 64 columns), "
            "5 (per 128 columns), got 8",
            blocks=unwritten(PAGES, 1, LAYERS, PAGE, 1, 576, dtype=E4M3),
            scales=torch.ones(PAGES, 1, LAYERS, PAGE, 1, 8),
            kv_lora_rank=512,
        ),
        Wrong(
            "scales must have 1 scale per token, or 2 (per 32 columns), got 0",
            scales=torch.ones(PAGES, 1, LAYERS, PAGE, 1, 0),
        ),
        Wrong(
            "kv_lora_rank must be a multiple of 32 for one scale per 32 columns, got 30",
            kv_lora_rank=30,
        ),
        Wrong(
            "per_token_scale_rope_aware must be None or False for one scale per 32 columns, "
            "got True",
            per_token_scale_rope_aware=True,
        ),
        Wrong(
            "scales must be None unless blocks are float8_e4m3fn, got scales for torch.bfloat16",
            blocks=of(torch.bfloat16),
        ),
    ],
    row_fused: [
        Wrong("kv.shape[1] (row) must equal the cache's row width, 20, got 19", kv=shortened(1)),
    ],
    group_fused: [
        Wrong("gamma.shape[0] (latent) must equal ..., 32, got 31", gamma=shortened(0)),
        Wrong("kv_input.shape[1] (row) must equal ..., 36, got 35", kv_input=shortened(1)),
    ],
    rope_aware_prefill: [
        Wrong("freqs_cis.shape[1] (rope) must equal ..., 4, got 3", freqs_cis=shortened(1)),
    ],
    group_prefill: [
        Wrong("kv_b_proj.shape[1] (latent) must equal ..., 32, got 31", kv_b_proj=shortened(1)),
    ],
    row_decode: [
        Wrong(
            "k must hold float8 rows with one scale per token and bf16 rope columns for "
            "per_token_scale_rope_aware, got format fp8_row",
            per_token_scale_rope_aware=True,
        ),
        Wrong(
            "q_scale must be None without per_token_scale_rope_aware, got a tensor",
            q_scale=torch.ones(TOKENS),
        ),
        Wrong(
            "q.shape[2] (depth) must equal the row width of the cache, 20, got 19", q=shortened(2)
        ),
    ],
    group_decode: [
        Wrong(
            "k must hold float8 rows with one scale per token and bf16 rope columns for "
            "per_token_scale_rope_aware, got format fp8_group32",
            per_token_scale_rope_aware=True,
        ),
        Wrong("output.shape[2] (v_width) must equal ..., 32, got 31", output=shortened(2)),
    ],
    own_pages_fused: own_pages()[1:],
    own_pages_prefill: own_pages(),
    own_pages_decode: own_pages(),
    sparse: [
        Wrong(
            "kv_cache must hold bf16, f16, f32, unit-scale float8 or rope-aware rows ..., "
            f"got format {format}",
            cache={
                "blocks": unwritten(PAGES, 1, LAYERS, PAGE, 1, 576, dtype=E4M3),
                "scales": SCALES.expand(*SCALES.shape[:-1], groups).clone(),
            },
        )
        for format, groups in (
            ("fp8_row", 1),
            ("fp8_group32", 18),
            ("fp8_group64", 9),
            ("fp8_group128", 5),
        )
    ],
}
