"""Small calls of the documented functions that pass, and ways to make one thing in them wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mlakit.compat.modular import (
    CausalMask,
    ChunkedCausalMask,
    ChunkedMask,
    KVCollection,
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
from mlakit.dispatch.checks import E4M3
from mlakit.tools.testing import poison, shuffled_pages
from tests.spoiling import Edit

HEADS, RANK, ROPE, NOPE, VALUE = 2, 16, 4, 40, 40
WIDTH = RANK + ROPE
PAGES, LAYERS, LAYER, PAGE = 6, 2, 1, 4
CACHED, NEW = [5, 0, 3], [2, 0, 1]
KEYS = [cached + new for cached, new in zip(CACHED, NEW, strict=True)]
UNUSED_ENTRIES = ((1, 0), (1, 1), (2, 1))  # of the page table of KEYS
TOKENS = sum(NEW)
INT_MAX = 2**31 - 1


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


def at(index: Any, value: int) -> Edit:
    """Written in place: a cache that holds the tensor already sees it."""

    def changed(tensor: Tensor) -> Tensor:
        tensor[index] = value
        return tensor

    return Edit(changed)


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
