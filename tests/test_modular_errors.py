"""Wrong calls of the documented functions: the error says what is wrong, and nothing was written.

A row of a table takes a call that passes and spoils one thing in it. It gives the message that must
come of it (... stands for any text), so each message is also seen to be of the house's form.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mlakit import dispatch
from mlakit.checks import E4M3, UnsupportedError
from mlakit.compat.modular import (
    CausalMask,
    ChunkedCausalMask,
    ChunkedMask,
    KVCollection,
    MLAConfig,
    NullMask,
    SlidingWindowCausalMask,
    SlidingWindowNonCausalMask,
    compute_mla_dispatch_scalars,
    flare_mla_decoding,
    fused_rope_rmsnorm_quantization_kernel,
    mla_fused_rope_rmsnorm_quantization,
    mla_prefill_branch_fp8,
    mla_prefill_plan,
    mla_sm100_prefill_sparse,
)
from mlakit.testing import (
    assert_same_bits,
    assert_unchanged,
    poison,
    shuffled_pages,
    snapshot,
)

HEADS, RANK, ROPE, NOPE, VALUE = 2, 16, 4, 40, 40
WIDTH = RANK + ROPE
PAGES, LAYERS, LAYER, PAGE = 6, 2, 1, 4
CACHED, NEW = [5, 0, 3], [2, 0, 1]
KEYS = [cached + new for cached, new in zip(CACHED, NEW, strict=True)]
UNUSED_ENTRIES = ((1, 0), (1, 1), (2, 1))  # of the page table of KEYS
TOKENS = sum(NEW)
INT_MAX = 2**31 - 1
HOUSE_FORM = re.compile(r"\S.* must \S.*, got \S.*")


@dataclass
class Call:
    """One call that is about to be made, and the tensors that its cache was made from."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    cache: dict[str, Any] = field(default_factory=dict)
    cache_argument: str = ""
    positional: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        if self.cache_argument:
            self.rebuild_cache()

    def __call__(self) -> Any:
        return self.function(*self.positional, **self.arguments)

    @property
    def name(self) -> str:
        return self.function.__qualname__

    def rebuild_cache(self, **changes: Any) -> None:
        self.cache.update(changes)
        collection = KVCollection(**self.cache)
        is_layer = self.cache_argument != "kv_collection"
        value = collection.get_key_cache(LAYER) if is_layer else collection
        self.arguments[self.cache_argument] = value

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that the call can reach."""
        reachable = {**self.cache, **self.arguments}
        return {name: value for name, value in reachable.items() if isinstance(value, Tensor)}

    def storages(self) -> dict[str, Tensor]:
        """Their bytes, those between the strides of a view too."""
        return {
            name: tensor.new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            for name, tensor in self.tensors().items()
            if tensor.device.type != "meta"
        }


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def unwritten(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return poison(torch.empty(shape, dtype=dtype))


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def int64(*values: int) -> Tensor:
    return torch.tensor(values)


def row_offsets() -> Tensor:
    return int32(0, *accumulate(NEW))


def cache_parts(width: int = WIDTH, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Rows for `KEYS` in one layer of a poisoned pool; unused entries of the table are no pages."""
    pages = [-(-keys // PAGE) for keys in KEYS]
    table = shuffled_pages(len(KEYS), pages, PAGES, torch.Generator().manual_seed(1))
    blocks = unwritten(PAGES, 1, LAYERS, PAGE, 1, width, dtype=dtype)
    for request, keys in enumerate(KEYS):
        for key in range(keys):
            page = table[request, key // PAGE]
            blocks[page, 0, LAYER, key % PAGE, 0] = drawn(width, dtype=dtype, seed=key)
    return {
        "blocks": blocks,
        "lookup_table": table,
        "cache_lengths": int32(*CACHED),
        "kv_lora_rank": RANK,
    }


def scaled_cache_parts() -> dict[str, Any]:
    """Float8 rows with bf16 rope values and one scale per token."""
    parts = cache_parts(RANK + 2 * ROPE, E4M3)
    return parts | {"scales": torch.full((PAGES, 1, LAYERS, PAGE, 1, 1), 0.5)}


def collection() -> Call:
    return Call(KVCollection, cache_parts())


def scaled_collection() -> Call:
    return Call(KVCollection, scaled_cache_parts())


def key_cache() -> Call:
    call = Call(KVCollection.get_key_cache, {"layer_idx": LAYER}, cache_parts())
    call.positional = (KVCollection(**call.cache),)
    return call


def fused_kernel() -> Call:
    arguments = {
        "q_rope_output": unwritten(TOKENS, HEADS, ROPE),
        "q_rope": drawn(TOKENS, HEADS, ROPE),
        "kv": drawn(TOKENS, WIDTH),
        "input_row_offsets": row_offsets(),
        "freqs_cis": drawn(max(KEYS), ROPE, dtype=torch.float32),
        "gamma": drawn(RANK),
        "epsilon": 1e-6,
    }
    return Call(fused_rope_rmsnorm_quantization_kernel, arguments, cache_parts(), "k_cache")


def fused() -> Call:
    arguments = fused_kernel().arguments
    del arguments["k_cache"]
    arguments |= {"layer_idx": LAYER, "kv_input": arguments.pop("kv")}
    return Call(mla_fused_rope_rmsnorm_quantization, arguments, cache_parts(), "kv_collection")


def prefill() -> Call:
    starts, offsets, lengths = mla_prefill_plan(
        row_offsets(), int32(*CACHED), 16, page_size=PAGE, max_chunks=1
    )
    rows = HEADS * (NOPE + VALUE)
    arguments = {
        "output": unwritten(TOKENS, HEADS, VALUE),
        "q": drawn(TOKENS, HEADS, NOPE + ROPE),
        "input_row_offsets": row_offsets(),
        "freqs_cis": drawn(max(KEYS), ROPE),
        "kv_norm_gamma": drawn(RANK),
        "layer_idx": LAYER,
        "scale": 0.3,
        "epsilon": 1e-6,
        "buffer_row_offsets": starts[0],
        "cache_offsets": offsets[0],
        "buffer_length": int(lengths[0]),
        "kv_b_proj": drawn(rows, RANK, dtype=E4M3),
        "kv_b_proj_scale": torch.full((-(-rows // 128), 1), 0.5),
    }
    return Call(mla_prefill_branch_fp8, arguments, cache_parts(), "kv_collection")


def ragged_decode() -> Call:
    arguments = {
        "output": unwritten(TOKENS, HEADS, RANK),
        "q": drawn(TOKENS, HEADS, WIDTH),
        "mask_functor": CausalMask(),
        "valid_length": row_offsets(),
        "scale": 0.3,
        "ragged": True,
    }
    return Call(flare_mla_decoding, arguments, cache_parts(), "k")


def padded_decode() -> Call:
    batch, q_len = len(NEW), max(NEW)
    arguments = {
        "output": unwritten(batch, q_len, HEADS, RANK),
        "q": drawn(batch, q_len, HEADS, WIDTH),
        "mask_functor": NullMask(),
        "valid_length": int32(*NEW),
        "scale": 0.3,
    }
    return Call(flare_mla_decoding, arguments, cache_parts(), "k")


def rope_aware_decode() -> Call:
    arguments = ragged_decode().arguments | {
        "q": drawn(TOKENS, HEADS, RANK + 2 * ROPE, dtype=E4M3),
        "q_scale": torch.full((TOKENS,), 0.5),
        "per_token_scale_rope_aware": True,
    }
    return Call(flare_mla_decoding, arguments, scaled_cache_parts(), "k")


def padded_rope_aware_decode() -> Call:
    batch, q_len = len(NEW), max(NEW)
    arguments = padded_decode().arguments | {
        "q": drawn(batch, q_len, HEADS, RANK + 2 * ROPE, dtype=E4M3),
        "q_scale": torch.full((batch * q_len,), 0.5),
        "per_token_scale_rope_aware": True,
    }
    return Call(flare_mla_decoding, arguments, scaled_cache_parts(), "k")


def contiguous_decode() -> Call:
    arguments = {
        "output": unwritten(2, 2, HEADS, 512),
        "q": drawn(2, 2, HEADS, 576),
        "k_tensor": drawn(2, 5, 1, 576),
        "mask_functor": CausalMask(),
        "scale": 0.1,
    }
    return Call(flare_mla_decoding, arguments)


def sparse() -> Call:
    arguments = {
        "output": unwritten(TOKENS, HEADS, 512),
        "q": drawn(TOKENS, HEADS, 576),
        "indices": int32(0, PAGES * PAGE - 1, -1, INT_MAX, *[3] * 4, *[7] * 4),
        "topk_lengths": int32(4, 0, 2),
        "attn_sink": torch.zeros(HEADS),
        "scale": 0.1,
        "num_q_heads": HEADS,
        "qk_depth": 576,
        "v_depth": 512,
        "indices_stride": 4,
    }
    parts = cache_parts(576)
    parts |= {"blocks": drawn(*parts["blocks"].shape), "kv_lora_rank": 512}
    return Call(mla_sm100_prefill_sparse, arguments, parts, "kv_cache")


def plan() -> Call:
    arguments = {
        "input_row_offsets": row_offsets(),
        "cache_lengths": int32(*CACHED),
        "buffer_size": 8,
        "page_size": PAGE,
        "max_chunks": 2,
    }
    return Call(mla_prefill_plan, arguments)


def split_scalars() -> Call:
    arguments = {
        "batch_size": 8,
        "max_cache_length": 4096,
        "q_max_seq_len": 1,
        "num_heads": 128,
        "sm_count": 148,
    }
    return Call(compute_mla_dispatch_scalars, arguments)


def sliding_window_causal() -> Call:
    return Call(SlidingWindowCausalMask, {"local_window_size": 4})


def sliding_window_noncausal() -> Call:
    return Call(SlidingWindowNonCausalMask, {"local_window_size": 4})


def chunked() -> Call:
    return Call(ChunkedMask, {"local_window_size": 4})


def chunked_causal() -> Call:
    return Call(ChunkedCausalMask, {"local_window_size": 4})


def causal() -> Call:
    return Call(CausalMask, {})


Make = Callable[[], Call]

PAGED: tuple[Make, ...] = (
    fused_kernel,
    fused,
    prefill,
    ragged_decode,
    padded_decode,
    rope_aware_decode,
    padded_rope_aware_decode,
)
WRITERS: tuple[Make, ...] = (*PAGED, contiguous_decode, sparse)
MAKERS: tuple[Make, ...] = (
    *WRITERS,
    collection,
    scaled_collection,
    key_cache,
    plan,
    split_scalars,
    sliding_window_causal,
    sliding_window_noncausal,
    chunked,
    chunked_causal,
    causal,
)


def name_of(value: Any) -> str:
    return getattr(value, "__name__", str(value))


@dataclass(frozen=True)
class Edit:
    """A change that depends on what was there."""

    changed: Callable[[Any], Any]


def at(index: Any, value: int) -> Edit:
    """Written in place: a cache that holds the tensor already sees it."""

    def changed(tensor: Tensor) -> Tensor:
        tensor[index] = value
        return tensor

    return Edit(changed)


def shortened(axis: int) -> Edit:
    return Edit(lambda tensor: tensor.narrow(axis, 0, tensor.shape[axis] - 1).clone())


def doubled(axis: int) -> Edit:
    return Edit(lambda tensor: torch.cat([tensor, tensor], axis))


def of(dtype: torch.dtype) -> Edit:
    return Edit(lambda tensor: tensor.to(dtype))


ON_META = Edit(lambda tensor: tensor.to("meta"))
STRIDED = Edit(lambda tensor: torch.stack([tensor, tensor], dim=-1).flatten(-2)[..., ::2])
EXPANDED = Edit(lambda tensor: tensor[:1].expand(tensor.shape))
RANK_BELOW = Edit(lambda tensor: tensor[0])
RANK_ABOVE = Edit(lambda tensor: tensor[None])


def spoil(call: Call, changes: dict[str, Any]) -> Call:
    """`call` with changed arguments; a change of `cache` makes a new cache of changed parts."""
    for name, change in changes.items():
        if name == "cache":
            call.rebuild_cache(**change)
        elif isinstance(change, Edit):
            holder = call.arguments if name in call.arguments else call.cache
            holder[name] = change.changed(holder[name])
        else:
            call.arguments[name] = change
    return call


class Wrong:
    """One wrong call: what it changes, and the message of its ValueError, or other if it says."""

    def __init__(self, message: str, **changes: Any) -> None:
        kind, _, text = message.rpartition("Error: ")
        self.error = {"": ValueError, "Type": TypeError}[kind]
        self.message = text
        self.changes = changes

    def pattern(self, function: str) -> str:
        return re.escape(f"{function}: {self.message}").replace(r"\.\.\.", ".*")


def a_layer() -> list[Wrong]:
    """Of every function that takes a `layer_idx`."""
    return [
        Wrong("layer_idx must be below the 2 layers, got 2", layer_idx=LAYERS),
        Wrong("layer_idx must be at least 0, got -1", layer_idx=-1),
        Wrong("TypeError: layer_idx must be an integer, got bool", layer_idx=True),
        Wrong("TypeError: layer_idx must be an integer, got float", layer_idx=1.5),
        Wrong("TypeError: layer_idx must be an integer, got NoneType", layer_idx=None),
        Wrong("TypeError: layer_idx must be an integer, got Tensor", layer_idx=torch.tensor(1.5)),
    ]


def an_output(name: str, call: Call, heads: str) -> list[Wrong]:
    """Of every function that writes `name`; `heads` is where its number of heads comes from."""
    output = call.arguments[name]
    shape, strides = tuple(output.shape), STRIDED.changed(output).stride()
    stride_0 = "stride 0 on axis 0 (an expanded tensor)"
    axis = f"{name}.shape[{output.ndim - 2}] (heads)"
    return [
        Wrong(f"TypeError: {name} must be a tensor, got list", **{name: [0.0]}),
        Wrong(f"{name} must have axes ..., got shape {shape[1:]}", **{name: RANK_BELOW}),
        Wrong(f"TypeError: {name} must be bfloat16..., got float16", **{name: of(torch.float16)}),
        Wrong(f"{name} {NO_DATA}", **{name: ON_META}),
        Wrong(f"{name} must be writable, got {stride_0}", **{name: EXPANDED}),
        Wrong(f"{name} {LAST_AXIS} {strides}", **{name: STRIDED}),
        Wrong(f"{axis} must equal {heads}, 2, got 1", **{name: shortened(-2)}),
    ]


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


NO_DATA = "must be on a device that holds data, got a meta tensor"
LAST_AXIS = "must have a contiguous last axis, got strides"
STRIDE_0 = "must be writable, got stride 0 on axis 0 (an expanded tensor)"
INTEGERS = "must be int32 or int64 or uint32"
ONE_MORE = "(batch + 1) must equal one more than the 3 requests, 4"
A_PAGE = f"must be a page id in [0, {PAGES})"
FIT = "must fit the lookup_table's 2 pages of 4"
A_COLLECTION = KVCollection(**cache_parts())
A_KEY_CACHE = A_COLLECTION.get_key_cache(LAYER)
TABLE_OF_ZEROS = torch.zeros(len(KEYS), 2, dtype=torch.int32)
SCALES = torch.ones(PAGES, 1, LAYERS, PAGE, 1, 1)

WRONG: dict[Make, list[Wrong]] = {
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
    scaled_collection: [
        Wrong("TypeError: scales must be float32, got float64", scales=of(torch.float64)),
        Wrong("scales must have axes ..., got shape (1, 2, 4, 1, 1)", scales=RANK_BELOW),
        Wrong(f"scales {NO_DATA}", scales=ON_META),
        Wrong("scales.shape[0] (pages) must equal blocks.shape[0], 6, got 5", scales=shortened(0)),
        Wrong(
            "scales.shape[5] (groups) must equal one scale per token, 1, got 2", scales=doubled(5)
        ),
        Wrong(f"scales {STRIDE_0}", scales=EXPANDED),
        Wrong(
            "scales_lookup_table.shape[1] (columns) must equal lookup_table.shape[1], 2, got 1",
            scales_lookup_table=TABLE_OF_ZEROS[:, :1],
        ),
        Wrong(
            "blocks must have rows of 16 content bytes and whole bf16 ..., got head_size 23",
            blocks=shortened(5),
        ),
        Wrong(
            "kv_lora_rank must be a multiple of 4 where there are scales, got 18",
            kv_lora_rank=18,
            blocks=unwritten(PAGES, 1, LAYERS, PAGE, 1, 26, dtype=E4M3),
        ),
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
        Wrong(
            "scales_lookup_table must be None for a cache that is written, got a tensor",
            cache=scaled_cache_parts() | {"scales_lookup_table": TABLE_OF_ZEROS},
        ),
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
        Wrong(
            "kv_collection must hold ...unit-scale float8_e4m3fn, got format fp8_token",
            cache=scaled_cache_parts(),
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
            "k_tensor must hold the 2 new tokens as well, got 1 keys",
            k_tensor=Edit(lambda t: t[:, :1]),
        ),
        Wrong(
            "k_tensor must hold the 2 new tokens as well, got 0 keys",
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
            "kv_cache must hold scales in the pages of its rows ..., got a scales_lookup_table",
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
            "cache_lengths[1] must not exceed what int32 holds, 2147483647, got 2147483648",
            cache_lengths=int64(0, INT_MAX + 1, 0),
        ),
        Wrong(f"TypeError: cache_lengths {INTEGERS}, got float32", cache_lengths=of(torch.float32)),
        Wrong("cache_lengths must have axes (batch), got shape ()", cache_lengths=RANK_BELOW),
        Wrong("page_size must be at least 1, got 0", page_size=0),
        Wrong("TypeError: page_size must be an integer, got float", page_size=4.0),
        Wrong("buffer_size must be at least 1, got 0", buffer_size=0),
        Wrong("buffer_size must be between 1 and 2147483647, got 2147483648", buffer_size=2**31),
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
ROWS = [(make, wrong) for make, wrongs in WRONG.items() for wrong in wrongs]
NAMES = [f"{make.__name__}: {wrong.message}" for make, wrong in ROWS]


@pytest.mark.parametrize("make", MAKERS, ids=name_of)
def test_the_calls_that_the_tables_spoil_pass(make):
    """Without this, a row could pass for a reason that is not its own."""
    make()()


@pytest.mark.parametrize("make", WRITERS, ids=name_of)
def test_a_call_that_passes_writes(make):
    """Without this, "nothing was written" would say nothing."""
    call = make()
    before = snapshot(**call.storages())
    call()
    with pytest.raises(AssertionError, match="was written to"):
        assert_unchanged(before)


def test_every_row_is_one_of_a_kind_and_of_the_house_form():
    assert len(NAMES) == len(set(NAMES))
    assert all(HOUSE_FORM.fullmatch(wrong.message) for _, wrong in ROWS)


@pytest.mark.parametrize(("make", "wrong"), ROWS, ids=NAMES)
def test_a_wrong_call_says_what_is_wrong_and_writes_nothing(make, wrong):
    call = spoil(make(), wrong.changes)
    before = snapshot(**call.storages())
    with pytest.raises(wrong.error) as caught:
        call()
    assert type(caught.value) is wrong.error
    assert re.fullmatch(wrong.pattern(call.name), str(caught.value))
    assert_unchanged(before)


FLAGS = ("ragged", "per_token_scale_rope_aware")  # Python takes the truth of anything


@pytest.mark.parametrize("make", MAKERS, ids=name_of)
def test_no_argument_takes_what_is_nothing_it_could_mean(make):
    for name in make().arguments.keys() - set(FLAGS):
        for nonsense in (object(), torch.zeros(1, 1, 1, 1, 1, 1, 1, dtype=torch.complex64)):
            call = spoil(make(), {name: nonsense})
            before = snapshot(**call.storages())
            with pytest.raises((TypeError, ValueError), match=rf"^{re.escape(call.name)}(:|\(\)) "):
                call()
            assert_unchanged(before)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [*WRITERS, plan], ids=name_of)
def test_tensors_of_two_devices_are_refused(make):
    names = [name for name, value in make().arguments.items() if isinstance(value, Tensor)]
    for name in names:
        call = spoil(make(), {name: Edit(lambda tensor: tensor.to("cuda"))})
        before = snapshot(**call.storages())
        two_devices = rf"^{call.name}: \w+ must be on the device of \w+, (cpu|cuda:0), got "
        with pytest.raises(ValueError, match=two_devices):
            call()
        assert_unchanged(before)


def refusal(call: Call) -> str | None:
    """The message of the ValueError that the call raises, if it does."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("make", [*WRITERS, collection, scaled_collection, plan], ids=name_of)
def test_no_number_in_an_integer_tensor_gets_past_the_checks_to_a_crash(make):
    sizes = {
        name: tensor.numel()
        for name, tensor in make().tensors().items()
        if tensor.dtype == torch.int32
    }
    for name, size in sizes.items():
        for index in range(size):
            for hostile in (-INT_MAX - 1, -1, 1, PAGES, INT_MAX):
                call = make()
                call.tensors()[name].view(-1)[index] = hostile
                before = snapshot(**call.storages())
                if message := refusal(call):
                    assert message.startswith(f"{call.name}: ")
                    assert_unchanged(before)


@dataclass(frozen=True)
class Miscall:
    """A call that Python itself refuses."""

    make: Make
    complaint: str
    without: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.make.__name__}: {self.complaint}"


def without(name: str, *makes: Make) -> list[Miscall]:
    missing = f"missing 1 required ... argument: '{name}'"
    return [Miscall(make, missing, without=name) for make in makes]


def unknown(name: str, *makes: Make, value: Any = None) -> list[Miscall]:
    unexpected = f"got an unexpected keyword argument '{name}'"
    return [Miscall(make, unexpected, extra={name: value}) for make in makes]


MISCALLS = [
    *without("scale", ragged_decode, contiguous_decode, prefill, sparse),
    *without("mask_functor", ragged_decode, contiguous_decode),
    *without("output", ragged_decode, contiguous_decode, prefill, sparse),
    *without("valid_length", ragged_decode),
    *without("k", ragged_decode),
    *without("kv", fused_kernel),
    *without("kv_input", fused),
    *without("attn_sink", sparse),
    *without("indices_stride", sparse),
    *without("page_size", plan),
    *without("sm_count", split_scalars),
    *without("cache_lengths", collection),
    *unknown("sink", ragged_decode, contiguous_decode, prefill),
    *unknown("valid_length", contiguous_decode),
    *unknown("q_scale", contiguous_decode),
    *unknown("k", contiguous_decode, value=drawn(2, 5, 1, 576)),
    *unknown("layer_idx", fused_kernel, sparse),
    *unknown("kv", fused),
    *unknown("value_blocks", collection),
    *unknown("local_window_size", causal),
]


@pytest.mark.parametrize("miscall", MISCALLS, ids=str)
def test_missing_and_unknown_arguments_name_the_function(miscall):
    call = spoil(miscall.make(), miscall.extra)
    call.arguments.pop(miscall.without, None)
    before = snapshot(**call.storages())
    with pytest.raises(TypeError) as caught:
        call()
    complaint = re.escape(miscall.complaint).replace(r"\.\.\.", ".+")
    assert re.fullmatch(
        rf"{re.escape(call.name)}(\.__init__)?\(\) {complaint}(\. Did you mean .+)?",
        str(caught.value),
    )
    assert_unchanged(before)


@pytest.mark.parametrize(
    ("make", "most"), [(ragged_decode, 7), (contiguous_decode, 6)], ids=name_of
)
def test_too_many_positional_arguments_name_the_function(make, most):
    call = make()
    order = ("output", "q", "k", "k_tensor", "mask_functor", "valid_length", "scale")
    given = [call.arguments.pop(name) for name in order if name in call.arguments]
    call.positional = (*given, None, 1)
    with pytest.raises(TypeError, match=rf"^flare_mla_decoding\(\) takes from .+ to {most} posit"):
        call()


def test_a_plan_of_too_many_chunks_says_how_many_it_needs():
    call = spoil(plan(), {"max_chunks": 1})
    before = snapshot(**call.storages())
    with pytest.raises(
        ValueError, match=r"^mla_prefill_plan: max_chunks must be at least 2 .*got 1$"
    ):
        call()
    assert_unchanged(before)


@pytest.mark.parametrize(
    ("make", "op"),
    [
        (fused_kernel, "norm_rope_quant_append"),
        (fused, "norm_rope_quant_append"),
        (prefill, "norm_rope_quant_append"),
        (prefill, "quantize_fp8"),
        (prefill, "scaled_mm_fp8"),
        (prefill, "mla_prefill"),
        (ragged_decode, "mla_decode"),
        (padded_decode, "mla_decode"),
        (contiguous_decode, "mla_decode"),
        (sparse, "sparse_mla"),
    ],
    ids=name_of,
)
def test_a_call_that_no_kernel_takes_writes_nothing(make, op, monkeypatch):
    select = dispatch.select

    def refusing(asked, problem, backend="auto"):
        if asked == op:
            raise UnsupportedError(f"{asked}: no kernel for {problem}")
        return select(asked, problem, backend)

    call = make()
    before = snapshot(**call.storages())
    monkeypatch.setattr(dispatch, "select", refusing)
    with pytest.raises(UnsupportedError, match=f"^{op}: no kernel for cpu, dtype=torch.bfloat16"):
        call()
    assert_unchanged(before)


def written_by(call: Call) -> dict[str, Tensor]:
    """What the call wrote, by name."""
    before = {name: tensor.clone() for name, tensor in call.storages().items()}
    call()
    after = call.storages()
    return {name: after[name] for name in after if not torch.equal(after[name], before[name])}


def assert_writes_the_same(odd: Call, plain: Call) -> None:
    actual, expected = written_by(odd), written_by(plain)
    assert actual.keys() == expected.keys() != set()
    for name, tensor in expected.items():
        assert_same_bits(name, actual[name], tensor)


@pytest.mark.parametrize("garbage", [-INT_MAX - 1, -1, PAGES, INT_MAX])
@pytest.mark.parametrize("make", PAGED, ids=name_of)
def test_unused_entries_of_the_page_table_may_be_anything(make, garbage):
    odd = make()
    for entry in UNUSED_ENTRIES:
        odd.cache["lookup_table"][entry] = garbage
    assert_writes_the_same(odd, make())


@pytest.mark.parametrize("make", PAGED, ids=name_of)
def test_the_page_table_may_be_wider_than_needed(make):
    odd = make()
    table = odd.cache["lookup_table"]
    odd.rebuild_cache(lookup_table=torch.cat([table, torch.full_like(table, -7)], 1))
    assert_writes_the_same(odd, make())


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint32], ids=str)
@pytest.mark.parametrize("make", WRITERS, ids=name_of)
def test_integers_may_come_in_other_types(make, dtype):
    odd = make()
    for name, value in odd.arguments.items():
        if isinstance(value, Tensor) and value.dtype == torch.int32:
            odd.arguments[name] = value.to(dtype)
    if odd.cache:
        odd.rebuild_cache(
            lookup_table=odd.cache["lookup_table"].to(dtype),
            cache_lengths=odd.cache["cache_lengths"].to(dtype),
        )
    assert_writes_the_same(odd, make())


@pytest.mark.parametrize("make", PAGED, ids=name_of)
def test_a_request_without_new_tokens_needs_no_pages(make):
    odd = make()
    odd.cache["cache_lengths"][1] = 2 * PAGE  # its table names no page at all
    assert_writes_the_same(odd, make())


WINDOW = {"mask_str": "sliding_window_causal", "local_window_size": 2}


@pytest.mark.parametrize(
    ("make", "window"),
    [
        (prefill, WINDOW),
        (ragged_decode, {"mask_functor": SlidingWindowCausalMask(2)}),
        (padded_decode, {"mask_functor": ChunkedMask(4)}),
        (rope_aware_decode, {"mask_functor": SlidingWindowCausalMask(2)}),
        (padded_rope_aware_decode, {"mask_functor": ChunkedCausalMask(4)}),
    ],
    ids=name_of,
)
def test_pages_before_the_window_may_be_gone(make, window):
    odd, plain = spoil(make(), window), spoil(make(), window)
    odd.cache["lookup_table"][0, 0] = INT_MAX
    assert_writes_the_same(odd, plain)


def test_a_buffer_may_skip_what_the_window_hides():
    odd = spoil(prefill(), WINDOW | {"cache_offsets": int32(4, 0, 2)})
    odd.arguments |= {"buffer_row_offsets": int32(0, 3, 3, 5), "buffer_length": 5}
    assert_writes_the_same(odd, spoil(prefill(), WINDOW))


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (prefill, {"cache_offsets": shortened(0)}),
        (prefill, {"buffer_length": torch.tensor(12, dtype=torch.int32)}),
        (prefill, {"buffer_length": 1000}),
        (prefill, {"layer_idx": np.int64(LAYER), "target": "cpu"}),
        (fused, {"epsilon": 0}),
        (ragged_decode, {"q_max_seq_len": 100, "kv_input_row_offsets": row_offsets()}),
        (ragged_decode, {"num_partitions": 50}),
        (ragged_decode, {"scalar_args_buf": int64(3, 8, 9)}),
        (ragged_decode, {"config": MLAConfig(HEADS, WIDTH)}),
        (rope_aware_decode, {"config": MLAConfig(HEADS, WIDTH)}),
        (contiguous_decode, {"scalar_args_buf": int64(2, 2, 3)}),
        (sparse, {"indices": Edit(lambda t: t.view(TOKENS, 4))}),
        (sparse, {"attn_sink": None}),
    ],
    ids=lambda value: name_of(value) if callable(value) else "-".join(value),
)
def test_odd_but_legal_arguments_pass(make, changes):
    assert written_by(spoil(make(), changes)).keys() == written_by(make()).keys()


def no_tokens(make: Make, requests: int) -> Call:
    """The call for `requests` requests, none of which has a new token."""
    call = make()
    call.rebuild_cache(
        lookup_table=torch.full((requests, 2), INT_MAX, dtype=torch.int32),
        cache_lengths=int32(*CACHED[:requests]),
    )
    offsets = torch.zeros(requests + 1, dtype=torch.int32)
    is_padded = make in (padded_decode, padded_rope_aware_decode)
    counts_tokens = ("q_rope_output", "q_rope", "kv", "kv_input", "output", "q", "q_scale")
    for name, value in call.arguments.items():
        if name in counts_tokens:
            call.arguments[name] = value[: requests if is_padded else 0]
        elif name.endswith("offsets") or name == "valid_length":
            call.arguments[name] = offsets
    if is_padded:
        call.arguments["valid_length"] = offsets[:-1]
        if "q_scale" in call.arguments:
            call.arguments["q_scale"] = torch.ones(requests * max(NEW))
    return call


@pytest.mark.parametrize("requests", [0, 3])
@pytest.mark.parametrize("make", PAGED, ids=name_of)
def test_no_tokens_write_nothing(make, requests):
    assert written_by(no_tokens(make, requests)) == {}


def test_a_buffer_of_length_0_writes_nothing():
    call = spoil(prefill(), {"buffer_row_offsets": int32(0, 0, 0, 0), "buffer_length": 0})
    assert written_by(call) == {}


def test_no_rows_that_count_give_zeros():
    call = spoil(sparse(), {"topk_lengths": int32(0, 0, 0)})
    assert not call().any()


def test_a_plan_of_no_requests_is_zeros():
    starts, offsets, lengths = mla_prefill_plan(int32(0), int32(), 8, page_size=PAGE, max_chunks=2)
    assert (starts.shape, offsets.shape) == ((2, 1), (2, 1))
    assert not any(tensor.any() for tensor in (starts, offsets, lengths))
