"""Argument checks that the functions share."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from mlakit.compat.modular.collection import KeyCache, KVCollection
from mlakit.dispatch.checks import INTEGERS, Dims, as_signed, values_visible


def check_used_pages(
    dims: Dims, cache: KeyCache, first: list[int], last: list[int], what: str
) -> None:
    """The pages of tokens [first, last) of every request are in the tables and in the pools."""
    tables = {"lookup_table": (cache.lookup_table, cache.layer.payload.shape[0])}
    if cache.scales_lookup_table is not None and cache.layer.scales is not None:
        scale_pages = cache.layer.scales.shape[0]
        tables["scales_lookup_table"] = (cache.scales_lookup_table, scale_pages)
    page_size, columns = cache.page_size, cache.lookup_table.shape[1]
    for request, (low, high) in enumerate(zip(first, last, strict=True)):
        dims.require(
            high <= columns * page_size,
            f"{what} of request {request}",
            f"fit the lookup_table's {columns} pages of {page_size}",
            high,
        )
        if low >= high:
            continue
        used = slice(low // page_size, (high - 1) // page_size + 1)
        for name, (table, num_pages) in tables.items():
            for column, page in enumerate(table[request, used].tolist(), used.start):
                dims.require(
                    0 <= page < num_pages,
                    f"{name}[{request}, {column}]",
                    f"be a page id in [0, {num_pages})",
                    page,
                )


def check_key_cache(dims: Dims, arg: str, value: object) -> KeyCache:
    if not isinstance(value, KeyCache):
        raise TypeError(f"{dims.op}: {arg} must be a KeyCache, got {type(value).__name__}")
    dims.same_device(arg, value.layer.payload)
    dims.bind("batch", value.cache_lengths.shape[0], f"the batch of {arg}")
    dims.bind("latent", value.row.kv_lora_rank, "the cache's kv_lora_rank")
    dims.bind("rope", value.row.qk_rope_head_dim, "the cache's rope width")
    return value


def check_collection(dims: Dims, collection: object, layer_idx: int) -> KeyCache:
    if not isinstance(collection, KVCollection):
        raise TypeError(
            f"{dims.op}: kv_collection must be a KVCollection, got {type(collection).__name__}"
        )
    return check_key_cache(dims, "kv_collection", collection.key_cache(dims, layer_idx))


def step_lengths(
    dims: Dims, cache: KeyCache, row_offsets: Tensor
) -> tuple[list[int], list[int]] | None:
    """(tokens before, tokens after) the step of every request; None if not `values_visible`."""
    if not (values_visible(row_offsets) and values_visible(cache.cache_lengths)):
        return None
    before = cache.cache_lengths.tolist()
    starts = as_signed(row_offsets).tolist()
    for request, length in enumerate(before):
        # checked in KVCollection, but an engine may have changed it in place since
        dims.require(length >= 0, f"cache_lengths[{request}]", "not be negative", length)
    new = [high - low for low, high in pairwise(starts)]
    return before, [length + tokens for length, tokens in zip(before, new, strict=True)]


def check_row_offsets(dims: Dims, arg: str, offsets: Tensor, num_tokens: int | None) -> Tensor:
    """Row offsets [batch + 1] of a ragged batch of `num_tokens`, as a signed tensor."""
    batch = dims["batch"]
    dims.bind("batch + 1", batch + 1, f"one more than the {batch} requests")
    dims.match(arg, offsets, "batch + 1", dtypes=INTEGERS)
    dims.starts(arg, offsets, num_tokens, "the number of tokens")
    return as_signed(offsets)


def check_target(dims: Dims, target: str | None, tensor: Tensor) -> None:
    """`target`, if given, is the device of the tensors: "cpu", or "gpu" / "cuda"."""
    if target is None:
        return
    here = ("cpu",) if tensor.device.type == "cpu" else ("gpu", tensor.device.type)
    dims.require(
        target in here, "target", f"be None or {here[0]!r} for these tensors", repr(target)
    )
