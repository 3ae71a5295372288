"""Wrong calls of what reads a cache, and of the plans and masks that such a call takes."""

from __future__ import annotations

import torch

from mlakit.compat.modular import CausalMask, MLAConfig
from mlakit.dispatch.checks import E4M3
from tests.compat.modular.calls import (
    INT_MAX,
    LAYERS,
    NEW,
    PAGE,
    PAGES,
    TOKENS,
    WIDTH,
    Make,
    at,
    cache_parts,
    chunked,
    chunked_causal,
    contiguous_decode,
    int32,
    int64,
    padded_decode,
    padded_rope_aware_decode,
    plan,
    ragged_decode,
    rope_aware_decode,
    row_offsets,
    sliding_window_causal,
    sliding_window_noncausal,
    sparse,
    split_scalars,
    unwritten,
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
    TABLE_OF_ZEROS,
    an_output,
)
from tests.spoiling import (
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


def a_decode() -> list[Wrong]:
    """Of both overloads of `flare_mla_decoding`."""
    three = "scalar_args_buf"
    return [
        Wrong("TypeError: q must be a tensor, got NoneType", q=None),
        Wrong(f"q {NO_DATA}", q=ON_META),
        Wrong("TypeError: mask_functor must be a mask object, got type", mask_functor=CausalMask),
        Wrong("TypeError: mask_functor must be a mask object, got str", mask_functor="causal"),
        Wrong("scale must be finite, got nan", scale=float("nan")),
        Wrong("TypeError: scale must be a number, got NoneType", scale=None),
        Wrong("TypeError: scale must be a number, got Tensor", scale=int32(2, 2)),
        Wrong("TypeError: config must be an MLAConfig, got tuple", config=(2, 20)),
        Wrong("config.num_heads must equal q's, 2, got 3", config=MLAConfig(3, 20)),
        Wrong("config.depth must equal the row width, ..., got 640", config=MLAConfig(2, 640)),
        Wrong("num_partitions must be at least 1, got 0", num_partitions=0),
        Wrong("TypeError: num_partitions must be an integer, got float", num_partitions=2.0),
        Wrong(f"TypeError: {three} must be a tensor, got list", scalar_args_buf=[3, 2, 1]),
        Wrong(f"TypeError: {three} must be int64, got int32", scalar_args_buf=int32(3, 2, 1)),
        Wrong(f"{three} must have 3 entries, got shape (2,)", scalar_args_buf=int64(3, 2)),
        Wrong(f"{three} {NO_DATA}", scalar_args_buf=int64(3, 2, 1).to("meta")),
        Wrong(f"{three}[0] must equal the batch, ..., got 9", scalar_args_buf=int64(9, 2, 1)),
        Wrong(
            f"{three}[0] must equal the batch, ..., got 8",
            scalar_args_buf=int64(8, 2, 1),
            num_partitions=2,
        ),
    ]


def a_paged_decode() -> list[Wrong]:
    new_tokens = "cache_lengths + new tokens of request"
    longest = "must not be below the longest request, 2, got 1"
    kv_offsets = "kv_input_row_offsets"
    return [
        *a_decode(),
        Wrong("TypeError: k must be a KeyCache, got NoneType", k=None),
        Wrong("TypeError: k must be a KeyCache, got KVCollection", k=A_COLLECTION),
        Wrong(f"scalar_args_buf[1] {longest}", scalar_args_buf=int64(3, 1, 1)),
        Wrong("scalar_args_buf[2] must be at least 1, got 0", scalar_args_buf=int64(3, 2, 0)),
        Wrong(f"q_max_seq_len {longest}", q_max_seq_len=1),
        Wrong("q_max_seq_len must be at least 0, got -1", q_max_seq_len=-1),
        Wrong(f"{kv_offsets}.shape[0] {ONE_MORE}, got 2", kv_input_row_offsets=int32(0, 1)),
        Wrong(
            f"{kv_offsets}[2] must not be below {kv_offsets}[1] = 2, got 1",
            kv_input_row_offsets=int32(0, 2, 1, 3),
        ),
        Wrong("cache_lengths[1] must not be negative, got -1", cache_lengths=at(1, -1)),
        Wrong(f"{new_tokens} 2 {FIT}, got 9", cache_lengths=at(2, 8)),
        Wrong(f"lookup_table[0, 0] {A_PAGE}, got -1", lookup_table=at((0, 0), -1)),
        Wrong(f"lookup_table[0, 1] {A_PAGE}, got 6", lookup_table=at((0, 1), PAGES)),
        Wrong(f"lookup_table[2, 0] {A_PAGE}, got {INT_MAX}", lookup_table=at((2, 0), INT_MAX)),
    ]


WRONG_ATTENTION_CALLS: dict[Make, list[Wrong]] = {
    ragged_decode: [
        *a_paged_decode(),
        *an_output("output", ragged_decode(), "q.shape[1]"),
        Wrong("output.shape[2] (v_width) must equal ..., 16, got 15", output=shortened(2)),
        Wrong("q must have axes (tokens, heads, depth), got shape (1, 3, 2, 20)", q=RANK_ABOVE),
        Wrong(
            "q.shape[2] (depth) must equal the row width of the cache, 20, got 19", q=shortened(2)
        ),
        Wrong("TypeError: q must be bfloat16 or float8_e4m3fn, got float16", q=of(torch.float16)),
        Wrong(f"q {LAST_AXIS} (80, 40, 2)", q=STRIDED),
        Wrong("valid_length[0] must be 0, got 1", valid_length=at(0, 1)),
        Wrong(
            "valid_length[2] must not be below valid_length[1] = 2, got 1", valid_length=at(2, 1)
        ),
        Wrong("valid_length[-1] must equal the number of tokens, 3, got 4", valid_length=at(3, 4)),
        Wrong(f"valid_length.shape[0] {ONE_MORE}, got 3", valid_length=int32(*NEW)),
        Wrong(f"valid_length.shape[0] {ONE_MORE}, got 0", valid_length=int32()),
        Wrong(f"TypeError: valid_length {INTEGERS}, got float64", valid_length=of(torch.float64)),
        Wrong(
            "q_scale must be None without per_token_scale_rope_aware, got a tensor",
            q_scale=torch.ones(TOKENS),
        ),
        Wrong(
            "k must hold float8 rows with one scale per token ..., got format bf16",
            per_token_scale_rope_aware=True,
        ),
    ],
    padded_decode: [
        *a_paged_decode(),
        *an_output("output", padded_decode(), "q.shape[2]"),
        Wrong("q must have axes (batch, q_len, heads, depth), got shape (2, 2, 20)", q=RANK_BELOW),
        Wrong("q.shape[0] (batch) must equal the batch of k, 3, got 2", q=shortened(0)),
        Wrong("valid_length[1] must not be negative, got -1", valid_length=at(1, -1)),
        Wrong(
            "valid_length[2] must not exceed q's rows per request, 2, got 3", valid_length=at(2, 3)
        ),
        Wrong(
            "valid_length.shape[0] (batch) must equal the batch of k, 3, got 4",
            valid_length=row_offsets(),
        ),
    ],
    rope_aware_decode: [
        Wrong(
            "per_token_scale_rope_aware must be True for a cache with ... scale..., got False",
            per_token_scale_rope_aware=False,
        ),
        Wrong("TypeError: q must be float8_e4m3fn, got bfloat16", q=of(torch.bfloat16)),
        Wrong("q.shape[2] (depth) must equal ..., 24, got 20", q=Edit(lambda t: t[..., :WIDTH])),
        Wrong("TypeError: output must be bfloat16, got float32", output=of(torch.float32)),
        Wrong("q_scale.shape[0] (tokens) must equal q.shape[0], 3, got 2", q_scale=shortened(0)),
        Wrong("TypeError: q_scale must be float32, got float16", q_scale=of(torch.float16)),
        Wrong(
            f"scales_lookup_table[0, 0] {A_PAGE}, got 6",
            cache={"scales_lookup_table": torch.full_like(TABLE_OF_ZEROS, PAGES)},
        ),
    ],
    padded_rope_aware_decode: [
        Wrong("q_scale.shape[0] (tokens) must equal batch · q_len, 6, got 5", q_scale=shortened(0)),
        Wrong("q_scale must have axes (tokens), got shape (1, 6)", q_scale=RANK_ABOVE),
    ],
    contiguous_decode: [
        *a_decode(),
        *an_output("output", contiguous_decode(), "q.shape[2]"),
        Wrong("TypeError: k_tensor must be a tensor, got NoneType", k_tensor=None),
        Wrong("TypeError: k_tensor must be a tensor, got KeyCache", k_tensor=A_KEY_CACHE),
        Wrong("k_tensor must have axes ..., got shape (5, 1, 576)", k_tensor=RANK_BELOW),
        Wrong("TypeError: k_tensor must be bfloat16..., got int32", k_tensor=of(torch.int32)),
        Wrong("TypeError: q must be float16 or ..., got bfloat16", k_tensor=of(torch.float16)),
        Wrong(f"k_tensor {NO_DATA}", k_tensor=ON_META),
        Wrong(f"k_tensor {LAST_AXIS} (5760, 1152, 1152, 2)", k_tensor=STRIDED),
        Wrong(
            "k_tensor.shape[3] (depth) must equal the documented depth, 576, got 575",
            k_tensor=shortened(3),
        ),
        Wrong("k_tensor.shape[2] (kv_heads) must equal ..., 1, got 2", k_tensor=doubled(2)),
        Wrong(
            "k_tensor must include the 2 new tokens, got 1 keys",
            k_tensor=Edit(lambda t: t[:, :1]),
        ),
        Wrong(
            "k_tensor must include the 2 new tokens, got 0 keys",
            k_tensor=Edit(lambda t: t[:, :0]),
        ),
        Wrong("q.shape[0] (batch) must equal k_tensor.shape[0], 2, got 1", q=shortened(0)),
        Wrong("scalar_args_buf[1] must not be below ..., 2, got 1", scalar_args_buf=int64(2, 1, 1)),
    ],
    sparse: [
        *an_output("output", sparse(), "num_q_heads"),
        Wrong("output.shape[2] (v) must equal v_depth, 512, got 511", output=shortened(2)),
        Wrong("TypeError: kv_cache must be a KeyCache, got NoneType", kv_cache=None),
        Wrong(
            "kv_cache must have rows of 576 with 512 value columns, got (20, 16)",
            cache=cache_parts(),
        ),
        Wrong(
            "kv_cache must have rows of 576 with 512 value columns, got (576, 448)",
            cache={"kv_lora_rank": 448},
        ),
        Wrong(
            "kv_cache must have scales in the pages of its rows ..., got a scales_lookup_table",
            cache={
                "blocks": unwritten(PAGES, 1, LAYERS, PAGE, 1, 640, dtype=E4M3),
                "scales": SCALES,
                "scales_lookup_table": TABLE_OF_ZEROS,
            },
        ),
        Wrong("TypeError: q must be bfloat16..., got float8_e4m3fn", q=of(E4M3)),
        Wrong(f"q {NO_DATA}", q=ON_META),
        Wrong(f"q {LAST_AXIS} (2304, 1152, 2)", q=STRIDED),
        Wrong("q.shape[2] (qk) must equal qk_depth, 576, got 575", q=shortened(2)),
        Wrong("q.shape[1] (heads) must equal num_q_heads, 128, got 2", num_q_heads=128),
        Wrong("num_q_heads must be at least 1, got 0", num_q_heads=0),
        Wrong("TypeError: num_q_heads must be an integer, got float", num_q_heads=2.0),
        Wrong("qk_depth must be 576, got 512", qk_depth=512),
        Wrong("v_depth must be 512, got 128", v_depth=128),
        Wrong("TypeError: v_depth must be an integer, got str", v_depth="512"),
        Wrong("indices must have 3 tokens × 4 entries..., got shape (11,)", indices=shortened(0)),
        Wrong("indices must have 3 tokens × 3 entries..., got shape (12,)", indices_stride=3),
        Wrong(
            "indices must have 3 tokens × 4 entries..., got shape (4, 3)",
            indices=Edit(lambda t: t.view(3, 4).T),
        ),
        Wrong(f"TypeError: indices {INTEGERS}, got float32", indices=of(torch.float32)),
        Wrong(f"indices {NO_DATA}", indices=ON_META),
        Wrong("TypeError: indices must be a tensor, got list", indices=[0]),
        Wrong("indices_stride must be at least 1, got 0", indices_stride=0),
        Wrong("topk_lengths[1] must not exceed indices_stride, 4, got 5", topk_lengths=at(1, 5)),
        Wrong("topk_lengths[2] must not be negative, got -1", topk_lengths=at(2, -1)),
        Wrong("topk_lengths.shape[0] (tokens) must equal ..., 3, got 2", topk_lengths=shortened(0)),
        Wrong("TypeError: topk_lengths must be a tensor, got NoneType", topk_lengths=None),
        Wrong(
            "attn_sink.shape[0] (heads) must equal num_q_heads, 2, got 1", attn_sink=shortened(0)
        ),
        Wrong("TypeError: attn_sink must be float32, got float16", attn_sink=of(torch.float16)),
        Wrong("TypeError: attn_sink must be a tensor, got float", attn_sink=0.0),
        Wrong(f"attn_sink {NO_DATA}", attn_sink=ON_META),
        Wrong("scale must be finite, got inf", scale=float("inf")),
    ],
    plan: [
        Wrong("TypeError: input_row_offsets must be a tensor, got list", input_row_offsets=[0]),
        Wrong(f"input_row_offsets.shape[0] {ONE_MORE}, got 0", input_row_offsets=int32()),
        Wrong(
            "input_row_offsets.shape[0] (batch + 1) must equal ..., 1, got 0",
            input_row_offsets=int32(),
            cache_lengths=int32(),
        ),
        Wrong("input_row_offsets[2] must not be below ... = 3, got 2", input_row_offsets=at(1, 3)),
        Wrong("input_row_offsets[0] must be 0, got -1", input_row_offsets=at(0, -1)),
        Wrong(f"input_row_offsets {NO_DATA}", input_row_offsets=ON_META),
        Wrong("cache_lengths[0] must not be negative, got -5", cache_lengths=at(0, -5)),
        Wrong(
            "cache_lengths[1] must not exceed the int32 maximum, 2147483647, got 2147483648",
            cache_lengths=int64(0, INT_MAX + 1, 0),
        ),
        Wrong(f"TypeError: cache_lengths {INTEGERS}, got float32", cache_lengths=of(torch.float32)),
        Wrong("cache_lengths must have axes (batch), got shape ()", cache_lengths=RANK_BELOW),
        Wrong("page_size must be at least 1, got 0", page_size=0),
        Wrong("TypeError: page_size must be an integer, got float", page_size=4.0),
        Wrong("buffer_size must be at least 1, got 0", buffer_size=0),
        Wrong("buffer_size must not exceed 2147483647, got 2147483648", buffer_size=2**31),
        Wrong("max_chunks must be at least 1, got 0", max_chunks=0),
    ],
    split_scalars: [
        Wrong("batch_size must not be negative, got -1", batch_size=-1),
        Wrong("max_cache_length must not be negative, got -1", max_cache_length=-1),
        Wrong("TypeError: q_max_seq_len must be an integer, got 1.5", q_max_seq_len=1.5),
        Wrong("num_heads must be at least 1, got 0", num_heads=0),
        Wrong("TypeError: num_heads must be an integer, got True", num_heads=True),
        Wrong("sm_count must be at least 1, got 0", sm_count=0),
        Wrong("indices_stride must not be negative, got -1", indices_stride=-1),
    ],
    sliding_window_causal: [
        Wrong("local_window_size must be at least 1, got 0", local_window_size=0),
    ],
    sliding_window_noncausal: [
        Wrong("local_window_size must be at least 1, got -4", local_window_size=-4),
    ],
    chunked: [
        Wrong(
            "TypeError: local_window_size must be an integer, got NoneType", local_window_size=None
        ),
    ],
    chunked_causal: [
        Wrong("TypeError: local_window_size must be an integer, got float", local_window_size=4.0),
    ],
}
