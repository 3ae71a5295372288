"""Bytes of a model's KV cache per token, per rank and per request, and what fits on a GPU.

Each rank of tensor parallelism (TP) has all latent rows of a token, because they have no heads to
divide. Decode context parallelism (DCP) divides the tokens over `dcp` of the `tp` ranks, as
`KVShard` does; the sizes are those of rank 0, which has the most. A request occupies whole pages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from mlakit.cache import KVShard
from mlakit.formats import FORMATS, known_format, row_codec
from mlakit.model.config import config_path
from mlakit.model.geometry import MLAGeometry, RowShape
from mlakit.tools.bench.shapes import NUMBER, parse_number
from mlakit.tools.memory.gpus import GIB, gpu_bytes
from mlakit.tools.memory.layers import LayerCounts, config_fields, layer_counts

EXPANDED = "K/V without MLA"
CHECKPOINT_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class CacheSize:
    """A kind of cache: sizes of all layers together.

    token_bytes       of one token of the model, without padding of pages
    rank_token_bytes  the same on one rank, on average
    page_bytes        of one page on one rank, as a new pool allocates it
    shards            ranks that the tokens are divided over
    """

    name: str
    token_bytes: int
    rank_token_bytes: float
    page_bytes: int
    page_size: int
    shards: int

    def pages(self, context: int) -> int:
        """Pages of one request on the rank that has the most."""
        return -(-KVShard(0, self.shards).local_count(context) // self.page_size)

    def rank_bytes(self, context: int, batch: int) -> int:
        return batch * self.pages(context) * self.page_bytes


@dataclass(frozen=True)
class Budget:
    """The memory of a GPU and of the weights on it. Weights that are not known are not counted."""

    gpu: str
    gpu_bytes: int
    weight_bytes: int | None = None
    weight_source: str = ""

    @property
    def cache_bytes(self) -> int:
        """What is left for the cache, also if nothing else takes memory."""
        return self.gpu_bytes - (self.weight_bytes or 0)


@dataclass(frozen=True)
class Fit:
    """One kind of cache with requests of one length. The last three are None without a GPU.

    rank_bytes    of the whole batch, on one rank
    max_tokens    tokens of all requests that fit, if every page is full
    max_requests  requests of this length that fit
    fits          whether the batch does
    """

    context: int
    format: str
    bytes_per_token: int
    rank_bytes_per_token: float
    rank_bytes: int
    max_tokens: int | None = None
    max_requests: int | None = None
    fits: bool | None = None


@dataclass(frozen=True)
class MemoryReport:
    """The cache of a model in several formats and lengths, on one rank."""

    model: str
    layers: LayerCounts
    batch: int
    tp: int
    dcp: int
    page_size: int
    budget: Budget | None
    sizes: tuple[CacheSize, ...]
    fits: tuple[Fit, ...]
    unsupported: tuple[str, ...]  # why a format is left out

    def as_json(self) -> dict[str, Any]:
        stored = asdict(self) | {"layers": self.layers._asdict()}
        if self.budget is not None:
            stored["budget"]["cache_bytes"] = self.budget.cache_bytes
        del stored["sizes"]  # `fits` has what is in them
        return stored


def parse_contexts(text: str) -> tuple[int, ...]:
    """The lengths in `4096,32k`, each once. Raises ValueError for other text."""
    found = [re.fullmatch(NUMBER, part.strip().lower()) for part in text.split(",")]
    if any(each is None for each in found):
        raise ValueError(f"context must be numbers such as 4096,32k, got {text!r}")
    return tuple(dict.fromkeys(parse_number(each[0]) for each in found if each))


def memory_report(
    config: str,
    contexts: Sequence[int],
    *,
    batch: int = 1,
    tp: int = 1,
    dcp: int = 1,
    formats: Sequence[str] = (),
    page_size: int = 64,
    gpu: str | None = None,
    weights_gib: float | None = None,
) -> MemoryReport:
    """The cache bytes of a model. Raises ValueError for wrong arguments.

    config       as in `MLAGeometry.from_config`: a known model, a config.json or its folder
    contexts     tokens per request
    formats      cache formats; empty: all that support the model's rows
    gpu          as in `gpu_bytes`
    weights_gib  weights per rank; None: the size that the checkpoint in the folder has by its
                 index, divided by `tp`, or not counted if there is none
    """
    try:
        geometry = MLAGeometry.from_config(config)
        layers = layer_counts(config_fields(config))
    except (TypeError, OSError) as error:  # a field of another type; a file that cannot be read
        raise ValueError(str(error)) from None
    counts = {"batch": batch, "page_size": page_size, "tp": tp, "dcp": dcp}
    for name, value in (*counts.items(), *(("context", each) for each in contexts)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if geometry.num_heads % tp:
        raise ValueError(f"tp must divide the {geometry.num_heads} heads, got {tp}")
    if tp % dcp:
        raise ValueError(f"dcp must divide tp, {tp}, got {dcp}")
    sizes, unsupported = _latent_sizes(geometry, layers, dcp, page_size, formats)
    sizes += (_expanded_size(geometry, layers, tp, page_size),)
    budget = None if gpu is None else _budget(gpu, config, weights_gib, tp)
    fits = tuple(_fit(size, each, batch, budget) for each in contexts for size in sizes)
    return MemoryReport(config, layers, batch, tp, dcp, page_size, budget, sizes, fits, unsupported)


def _latent_sizes(
    geometry: MLAGeometry, layers: LayerCounts, dcp: int, page_size: int, formats: Sequence[str]
) -> tuple[tuple[CacheSize, ...], tuple[str, ...]]:
    """The size in every format, index keys included; why other formats are left out."""
    index = row_codec("fp8_token", RowShape(geometry.index_head_dim, 0)) if layers.indexer else None
    sizes, unsupported = [], []
    for name in map(known_format, dict.fromkeys(formats or FORMATS)):
        try:
            codec = row_codec(name, geometry.row)
        except ValueError as error:
            if formats:
                raise
            unsupported.append(str(error))
            continue
        parts = [(codec, layers.mla)] + ([] if index is None else [(index, layers.indexer)])
        token_bytes = sum(each.bytes_per_token * count for each, count in parts)
        page_bytes = sum(each.page_bytes(page_size) * count for each, count in parts)
        size = CacheSize(name, token_bytes, token_bytes / dcp, page_bytes, page_size, dcp)
        sizes.append(size)
    return tuple(sizes), tuple(unsupported)


def _expanded_size(
    geometry: MLAGeometry, layers: LayerCounts, tp: int, page_size: int
) -> CacheSize:
    """K and V of every head in bf16. TP divides the heads, so there is no use for DCP."""
    whole, own = (
        row_codec("bf16", RowShape(each.expanded_elements_per_token, 0))
        for each in (geometry, geometry.with_heads(geometry.num_heads // tp))
    )
    return CacheSize(
        EXPANDED,
        layers.mla * whole.bytes_per_token,
        layers.mla * own.bytes_per_token,
        layers.mla * own.page_bytes(page_size),
        page_size,
        shards=1,
    )


def _budget(gpu: str, config: str, weights_gib: float | None, tp: int) -> Budget:
    memory = gpu_bytes(gpu)
    if weights_gib is None:
        stored = checkpoint_bytes(config)
        if stored is None:
            return Budget(gpu, memory)
        budget = Budget(gpu, memory, -(-stored // tp), f"{CHECKPOINT_INDEX}, divided by TP")
    else:
        if not isfinite(weights_gib) or weights_gib < 0:
            raise ValueError(f"weights must be at least 0 GiB, got {weights_gib}")
        budget = Budget(gpu, memory, int(weights_gib * GIB), "given")
    if budget.cache_bytes <= 0:
        weights = (budget.weight_bytes or 0) / GIB
        raise ValueError(
            f"weights must be below the memory of {gpu}, {memory / GIB:g} GiB, got {weights:.1f} "
            f"GiB per rank ({budget.weight_source})"
        )
    return budget


def checkpoint_bytes(config: str) -> int | None:
    """The bytes of all weights by the index beside a config.json; None if it does not say."""
    path = config_path(config)
    index = None if path is None else path.with_name(CHECKPOINT_INDEX)
    if index is None or not index.is_file():
        return None
    try:
        found = json.loads(index.read_text("utf-8"))["metadata"]["total_size"]
    except (ValueError, KeyError, TypeError):
        return None
    return int(found) if isinstance(found, int | float) and found > 0 else None


def _fit(size: CacheSize, context: int, batch: int, budget: Budget | None) -> Fit:
    needed = size.rank_bytes(context, batch)
    shown = (context, size.name, size.token_bytes, size.rank_token_bytes, needed)
    if budget is None:
        return Fit(*shown)
    pages = budget.cache_bytes // size.page_bytes
    return Fit(
        *shown,
        max_tokens=pages * size.page_size * size.shards,
        max_requests=pages // size.pages(context),
        fits=needed <= budget.cache_bytes,
    )
