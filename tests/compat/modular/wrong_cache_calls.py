"""Wrong calls of what makes a cache or appends to it, the prefill branch among them."""

from __future__ import annotations

import torch

from mlakit.dispatch.checks import E4M3
from tests.compat.modular.calls import (
    INT_MAX,
    PAGES,
    Make,
    at,
    cache_parts,
    collection,
    drawn,
    fused,
    fused_kernel,
    int32,
    key_cache,
    prefill,
)
from tests.compat.modular.wrong_calls import (
    A_COLLECTION,
    A_KEY_CACHE,
    A_PAGE,
    FIT,
    INTEGERS,
    LAST_AXIS,
    NO_DATA,
    ONE_MORE,
    SCALES,
    STRIDE_0,
    TABLE_OF_ZEROS,
    a_layer,
    an_output,
)
from tests.spoiling import (
    EXPANDED,
    ON_META,
    RANK_ABOVE,
    RANK_BELOW,
    STRIDED,
    Edit,
    Wrong,
    doubled,
    of,
    shortened,
)


def an_append(gamma: str) -> list[Wrong]:
    """Of every function that appends to the cache; the weight of its norm is called `gamma`."""
    offsets = "input_row_offsets"
    return [
        Wrong("TypeError: freqs_cis must be a tensor, got NoneType", freqs_cis=None),
        Wrong("freqs_cis must have axes (positions, rope), got shape (4,)", freqs_cis=RANK_BELOW),
        Wrong("TypeError: freqs_cis must be bfloat16..., got float64", freqs_cis=of(torch.float64)),
        Wrong(f"freqs_cis {NO_DATA}", freqs_cis=ON_META),
        Wrong(f"freqs_cis {LAST_AXIS} (8, 2)", freqs_cis=STRIDED),
        Wrong("freqs_cis.shape[1] (rope) must equal ..., 4, got 3", freqs_cis=shortened(1)),
        Wrong("freqs_cis must have a row for position 6, got 6 rows", freqs_cis=shortened(0)),
        Wrong(f"{gamma}.shape[0] (latent) must equal ..., 16, got 15", **{gamma: shortened(0)}),
        Wrong(f"TypeError: {gamma} must be bfloat16..., got int32", **{gamma: of(torch.int32)}),
        Wrong(f"{gamma} must have axes (latent), got shape (1, 16)", **{gamma: RANK_ABOVE}),
        Wrong(f"{gamma} {LAST_AXIS} (2,)", **{gamma: STRIDED}),
        Wrong("epsilon must not be negative, got -1e-06", epsilon=-1e-6),
        Wrong("epsilon must be finite, got nan", epsilon=float("nan")),
        Wrong("TypeError: epsilon must be a number, got str", epsilon="1e-6"),
        Wrong(f"{offsets}[2] must not be below {offsets}[1] = 2, got 1", **{offsets: at(2, 1)}),
        Wrong(f"{offsets}[0] must be 0, got 1", **{offsets: at(0, 1)}),
        Wrong(f"{offsets}[-1] must equal ..., 3, got 2", **{offsets: int32(0, 1, 1, 2)}),
        Wrong(f"{offsets}.shape[0] {ONE_MORE}, got 3", **{offsets: shortened(0)}),
        Wrong(f"{offsets}.shape[0] {ONE_MORE}, got 0", **{offsets: int32()}),
        Wrong(f"TypeError: {offsets} {INTEGERS}, got float32", **{offsets: of(torch.float32)}),
        Wrong(f"{offsets} {NO_DATA}", **{offsets: ON_META}),
        Wrong("cache_lengths[2] must not be negative, got -1", cache_lengths=at(2, -1)),
        Wrong(f"cache_lengths + new tokens of request 0 {FIT}, got 9", cache_lengths=at(0, 7)),
        Wrong(
            f"cache_lengths + new tokens of request 2 {FIT}, got {INT_MAX + 1}",
            cache_lengths=at(2, INT_MAX),
        ),
        Wrong(f"lookup_table[0, 1] {A_PAGE}, got -1", lookup_table=at((0, 1), -1)),
        Wrong(f"lookup_table[0, 1] {A_PAGE}, got 6", lookup_table=at((0, 1), PAGES)),
        Wrong(f"lookup_table[2, 0] {A_PAGE}, got {INT_MAX}", lookup_table=at((2, 0), INT_MAX)),
    ]


WRONG_CACHE_CALLS: dict[Make, list[Wrong]] = {
    collection: [
        Wrong("TypeError: blocks must be a tensor, got NoneType", blocks=None),
        Wrong(
            "blocks must have axes (pages, kv, layers, page_size, kv_heads, head_size), "
            "got shape (1, 2, 4, 1, 20)",
            blocks=RANK_BELOW,
        ),
        Wrong("TypeError: blocks must be ...float8_e4m3fn, got float64", blocks=of(torch.float64)),
        Wrong(f"blocks {NO_DATA}", blocks=ON_META),
        Wrong(
            "blocks.shape[1] (kv) must equal the one latent row of MLA, 1, got 2", blocks=doubled(1)
        ),
        Wrong(
            "blocks.shape[4] (kv_heads) must equal the one KV head of MLA, 1, got 2",
            blocks=doubled(4),
        ),
        Wrong(f"blocks {LAST_AXIS} (320, 320, 160, 40, 40, 2)", blocks=STRIDED),
        Wrong(f"blocks {STRIDE_0}", blocks=EXPANDED),
        Wrong("blocks must have at least one layer, got 0", blocks=Edit(lambda t: t[:, :, :0])),
        Wrong(
            "blocks must have a page_size of at least 1, got 0",
            blocks=Edit(lambda t: t[:, :, :, :0]),
        ),
        Wrong("blocks must have an even number of rope columns, got 3", blocks=shortened(5)),
        Wrong("kv_lora_rank must be at least 1, got 0", kv_lora_rank=0),
        Wrong("TypeError: kv_lora_rank must be an integer, got bool", kv_lora_rank=True),
        Wrong("kv_lora_rank must not exceed head_size 20, got 21", kv_lora_rank=21),
        Wrong(
            "lookup_table must have axes (batch, columns), got shape (2,)", lookup_table=RANK_BELOW
        ),
        Wrong(f"TypeError: lookup_table {INTEGERS}, got float32", lookup_table=of(torch.float32)),
        Wrong(f"lookup_table {NO_DATA}", lookup_table=ON_META),
        Wrong("TypeError: cache_lengths must be a tensor, got list", cache_lengths=[5, 0, 3]),
        Wrong(
            "cache_lengths.shape[0] (batch) must equal ..., 3, got 2", cache_lengths=shortened(0)
        ),
        Wrong("cache_lengths[1] must not be negative, got -2", cache_lengths=at(1, -2)),
        Wrong(
            "cache_lengths[0] must not exceed what the lookup_table holds, 8, got 9",
            cache_lengths=at(0, 9),
        ),
        Wrong(
            "scales must be None unless blocks are float8_e4m3fn, got scales for torch.bfloat16",
            scales=SCALES,
        ),
        Wrong(
            "scales_lookup_table must come with scales, got no scales",
            scales_lookup_table=TABLE_OF_ZEROS,
        ),
        Wrong("max_prompt_length must be at least 0, got -1", max_prompt_length=-1),
        Wrong("TypeError: max_cache_length must be an integer, got float", max_cache_length=8.0),
    ],
    key_cache: a_layer(),
    fused_kernel: [
        *an_output("q_rope_output", fused_kernel(), "q_rope.shape[1]"),
        *an_append("gamma"),
        Wrong("TypeError: q_rope must be a tensor, got NoneType", q_rope=None),
        Wrong("q_rope must have axes (tokens, heads, rope), got shape (2, 4)", q_rope=RANK_BELOW),
        Wrong("TypeError: q_rope must be bfloat16..., got float64", q_rope=of(torch.float64)),
        Wrong(f"q_rope {NO_DATA}", q_rope=ON_META),
        Wrong(f"q_rope {LAST_AXIS} (16, 8, 2)", q_rope=STRIDED),
        Wrong(
            "q_rope.shape[2] (rope) must equal the cache's rope width, 4, got 3",
            q_rope=shortened(2),
        ),
        Wrong("kv.shape[0] (tokens) must equal q_rope.shape[0], 3, got 2", kv=shortened(0)),
        Wrong("kv.shape[1] (row) must equal the cache's row width, 20, got 19", kv=shortened(1)),
        Wrong("TypeError: kv must be bfloat16..., got int32", kv=of(torch.int32)),
        Wrong(f"kv {NO_DATA}", kv=ON_META),
        Wrong(f"kv {LAST_AXIS} (40, 2)", kv=STRIDED),
        Wrong("TypeError: k_cache must be a KeyCache, got KVCollection", k_cache=A_COLLECTION),
        Wrong("block_size must be at least 1, got 0", block_size=0),
        Wrong("n_rope_blocks must be at least 1, got 0", n_rope_blocks=0),
        Wrong("TypeError: n_rms_blocks must be an integer, got float", n_rms_blocks=1.0),
    ],
    fused: [
        *a_layer(),
        *an_output("q_rope_output", fused(), "q_rope.shape[1]"),
        *an_append("gamma"),
        Wrong(
            "TypeError: kv_collection must be a KVCollection, got KeyCache",
            kv_collection=A_KEY_CACHE,
        ),
        Wrong("TypeError: kv_input must be a tensor, got NoneType", kv_input=None),
        Wrong("kv_input.shape[1] (row) must equal ..., 20, got 19", kv_input=shortened(1)),
        Wrong(
            "kv_input.shape[0] (tokens) must equal q_rope.shape[0], 3, got 20",
            kv_input=lambda rows, columns: drawn(len(columns), len(rows)),
        ),
        Wrong(
            "TypeError: kv_input must be a tensor, got list",
            kv_input=lambda rows, columns: [0.0] * len(rows),
        ),
        Wrong(
            "TypeError: kv_input must be bfloat16..., got int64",
            kv_input=lambda rows, columns: rows[:, None] + columns,
        ),
    ],
    prefill: [
        *a_layer(),
        *an_output("output", prefill(), "q.shape[1]"),
        *an_append("kv_norm_gamma"),
        Wrong("q must have axes (tokens, heads, qk), got shape (2, 44)", q=RANK_BELOW),
        Wrong("TypeError: q must be bfloat16..., got float8_e4m3fn", q=of(E4M3)),
        Wrong(f"q {NO_DATA}", q=ON_META),
        Wrong(f"q {LAST_AXIS} (176, 88, 2)", q=STRIDED),
        Wrong(f"q {STRIDE_0}", q=EXPANDED),
        Wrong("q must have more columns than its 4 rope ones, got 4", q=Edit(lambda t: t[..., :4])),
        Wrong(
            "q must have at least one head, got 0",
            q=Edit(lambda t: t[:, :0]),
            output=Edit(lambda t: t[:, :0]),
            score_mod_str="alibi",
        ),
        Wrong(
            "kv_collection must hold rows of q's dtype, ..., got format fp16",
            cache=cache_parts(dtype=torch.float16),
        ),
        Wrong("scale must be finite, got nan", scale=float("nan")),
        Wrong("scale must be finite, got -inf", scale=-float("inf")),
        Wrong("TypeError: scale must be a number, got Tensor", scale=torch.tensor(1.0)),
        Wrong("TypeError: scale must be a number, got bool", scale=True),
        Wrong("mask_str must be one of null, causal, ..., got 'casual'", mask_str="casual"),
        Wrong("mask_str must be one of null, causal, ..., got None", mask_str=None),
        Wrong("local_window_size must be None for mask_str='causal', got 4", local_window_size=4),
        Wrong("TypeError: local_window_size must be an integer, got NoneType", mask_str="chunked"),
        Wrong(
            "local_window_size must be at least 1, got 0",
            mask_str="sliding_window_causal",
            local_window_size=0,
        ),
        Wrong("score_mod_str must be one of no_pos, alibi, got 'rope'", score_mod_str="rope"),
        Wrong(
            "mask_str must be a causal mask for alibi, got 'null'",
            score_mod_str="alibi",
            mask_str="null",
        ),
        Wrong("m_scale_granularity must be 1, got 128", m_scale_granularity=128),
        Wrong("n_scale_granularity must be 64 or 128, got 32", n_scale_granularity=32),
        Wrong(
            "k_scale_granularity must equal n_scale_granularity, 128, got 64",
            k_scale_granularity=64,
        ),
        Wrong(
            "TypeError: n_scale_granularity must be an integer, got str",
            n_scale_granularity="128",
        ),
        Wrong(
            "TypeError: kv_b_proj must be float8_e4m3fn, got bfloat16", kv_b_proj=of(torch.bfloat16)
        ),
        Wrong(
            "kv_b_proj.shape[0] (heads · (D_N + D_V)) must equal ..., 160, got 159",
            kv_b_proj=shortened(0),
        ),
        Wrong("kv_b_proj.shape[1] (latent) must equal ..., 16, got 15", kv_b_proj=shortened(1)),
        Wrong(f"kv_b_proj {LAST_AXIS} (32, 2)", kv_b_proj=STRIDED),
        Wrong(
            "kv_b_proj_scale.shape[0] (row groups) must equal ... / 128, rounded up, 2, got 1",
            kv_b_proj_scale=shortened(0),
        ),
        Wrong(
            "kv_b_proj_scale.shape[0] (row groups) must equal ... / 64, rounded up, 3, got 2",
            n_scale_granularity=64,
            k_scale_granularity=64,
        ),
        Wrong(
            "kv_b_proj_scale.shape[1] (column groups) must equal ... / 128, rounded up, 1, got 2",
            kv_b_proj_scale=doubled(1),
        ),
        Wrong(
            f"kv_b_proj_scale {LAST_AXIS} (4, 2)",
            cache=cache_parts(width=140) | {"kv_lora_rank": 136},
            kv_b_proj=drawn(160, 136, dtype=E4M3),
            kv_b_proj_scale=torch.ones(2, 4)[:, ::2],
        ),
        Wrong(
            "TypeError: kv_b_proj_scale must be float32, got bfloat16",
            kv_b_proj_scale=of(torch.bfloat16),
        ),
        Wrong("buffer_length must be at least 0, got -1", buffer_length=-1),
        Wrong("TypeError: buffer_length must be an integer, got float", buffer_length=12.0),
        Wrong(
            "buffer_length must not be below buffer_row_offsets[-1], 12, got 11", buffer_length=11
        ),
        Wrong(
            "buffer_row_offsets of request 0 must leave room for its 7 keys, got 6 rows",
            buffer_row_offsets=int32(0, 6, 6, 10),
        ),
        Wrong(
            "buffer_row_offsets[2] must not be below buffer_row_offsets[1] = 8, got 7",
            buffer_row_offsets=at(2, 7),
        ),
        Wrong(f"buffer_row_offsets.shape[0] {ONE_MORE}, got 3", buffer_row_offsets=shortened(0)),
        Wrong(
            "cache_offsets[0] must not skip key 0, which the queries see, got 1",
            cache_offsets=at(0, 1),
        ),
        Wrong(
            "cache_offsets[0] must not skip key 4, which the queries see, got 5",
            cache_offsets=at(0, 5),
            mask_str="sliding_window_causal",
            local_window_size=2,
        ),
        Wrong("cache_offsets[2] must not be negative, got -4", cache_offsets=at(2, -4)),
        Wrong("cache_offsets must have 3 or 4 entries, got 2", cache_offsets=int32(0, 0)),
        Wrong(f"lookup_table[0, 0] {A_PAGE}, got 6", lookup_table=at((0, 0), PAGES)),
        Wrong("target must be None or 'cpu' for these tensors, got 'gpu'", target="gpu"),
    ],
}
