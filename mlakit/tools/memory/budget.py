"""Bytes of a model's KV cache per token, per rank and per request, and the tokens that fit.

Each rank of tensor parallelism (TP) has all latent rows of a token, because they have no heads to
divide. Decode context parallelism (DCP) divides the tokens over `dcp` of the `tp` ranks, as
`KVShard` does; the sizes are those of rank 0, which has the most. A request occupies whole pages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from mlakit.formats import FORMATS, Format, known_format, row_codec
from mlakit.model.config import config_path, index_pool
from mlakit.model.geometry import MLAGeometry, RowShape
from mlakit.model.v4 import V4Config, is_v4
from mlakit.steps.pools import state_rows
from mlakit.tools.bench.shapes import NUMBER, parse_number
from mlakit.tools.columns import Column, fitting_table
from mlakit.tools.memory.compressed import CompressedSize, compressed_size, uncompressed_size
from mlakit.tools.memory.layers import LayerCounts, read_model
from mlakit.tools.memory.sizes import CacheSize

EXPANDED = "K/V, no MLA"
INDEX_FORMAT: Format = "fp8_token"
CHECKPOINT_INDEX = "model.safetensors.index.json"
GIB = 1 << 30


@dataclass(frozen=True)
class MemoryReport:
    """The cache of a model in several formats. Weights that are not known are not counted."""

    model: str
    layers: LayerCounts
    contexts: tuple[int, ...]
    batch: int
    gpu_bytes: int | None
    weight_bytes: int | None
    sizes: tuple[CacheSize, ...]
    unsupported: tuple[str, ...]  # why a format is left out
    index_format: str | None = None  # of index keys, where it was asked for

    @property
    def cache_bytes(self) -> int | None:
        """The memory that is left for the cache; None if the GPU's memory is not given."""
        return None if self.gpu_bytes is None else self.gpu_bytes - (self.weight_bytes or 0)

    def as_json(self) -> dict[str, Any]:
        free = self.cache_bytes
        sizes = [
            vars(size)
            | {
                "rank_bytes": {each: size.rank_bytes(each, self.batch) for each in self.contexts},
                "max_tokens": None if free is None else size.max_tokens(free),
            }
            for size in self.sizes
        ]
        layers = self.layers._asdict()
        return vars(self) | {"layers": layers, "cache_bytes": free, "sizes": sizes}


def parse_contexts(text: str) -> tuple[int, ...]:
    """The lengths in `4096,32k`, each once. Raises ValueError for other text."""
    found = [re.fullmatch(NUMBER, part.strip().lower()) for part in text.split(",")]
    contexts = tuple(dict.fromkeys(parse_number(each[0]) for each in found if each))
    if None in found or 0 in contexts:
        raise ValueError(f"context must be numbers such as 4096,32k, got {text!r}")
    return contexts


def memory_report(
    config: str,
    contexts: Sequence[int],
    *,
    batch: int = 1,
    tp: int = 1,
    dcp: int = 1,
    formats: Sequence[str] = (),
    page_size: int = 64,
    gpu_gib: float | None = None,
    weights_gib: float | None = None,
    index_format: str | None = None,
) -> MemoryReport:
    """The cache bytes of a model. Raises ValueError for wrong arguments.

    config       as in `MLAGeometry.from_config`: a known model, a config.json or its folder
    contexts     tokens per request
    formats      cache formats; empty: all that support the model's rows
    weights_gib  weights per rank; None: the checkpoint's by its index, divided by `tp`, or not
                 counted if there is no index
    index_format of index keys; None: fp8_token, in DeepSeek-V4 that which `V4Cache` has
    """
    fields, geometry, layers = read_model(config)
    pooled = index_pool(fields) if layers.indexer else 1
    _check_sizes(geometry, tp=tp, dcp=dcp, page_size=page_size, tokens_per_key=pooled)
    v4 = V4Config.from_config(config) if is_v4(config) else None
    if v4 is not None and dcp > 1:
        raise ValueError(f"dcp must be 1 for DeepSeek-V4, whose rows have no shards, got {dcp}")
    keys = _index_format(index_format, layers, is_v4=v4 is not None)
    sizes: list[CacheSize] = []
    unsupported = []
    for name in map(known_format, dict.fromkeys(formats or FORMATS)):
        try:
            if v4 is not None:
                sizes.append(compressed_size(v4, name, page_size))
            else:
                size = latent_size(
                    geometry,
                    layers,
                    name,
                    dcp=dcp,
                    page_size=page_size,
                    tokens_per_key=pooled,
                    index_format=keys,
                )
                sizes.append(size)
        except ValueError as error:
            if formats:
                raise
            unsupported.append(str(error))
    if v4 is not None:
        sizes.append(uncompressed_size(v4, page_size))
    else:
        sizes.append(expanded_size(geometry, layers, tp=tp, page_size=page_size))
    weights = None if weights_gib is None else int(weights_gib * GIB)
    if weights is None and (stored := checkpoint_bytes(config)) is not None:
        weights = -(-stored // tp)
    memory = None if gpu_gib is None else int(gpu_gib * GIB)
    return MemoryReport(
        model=config,
        layers=layers,
        contexts=tuple(contexts),
        batch=batch,
        gpu_bytes=memory,
        weight_bytes=weights,
        sizes=tuple(sizes),
        unsupported=tuple(unsupported),
        index_format=None if index_format is None else keys,
    )


def _check_sizes(
    geometry: MLAGeometry, *, tp: int, dcp: int, page_size: int, tokens_per_key: int
) -> None:
    if geometry.num_heads % tp:
        raise ValueError(f"tp must divide the {geometry.num_heads} heads, got {tp}")
    if tp % dcp:
        raise ValueError(f"dcp must divide tp, {tp}, got {dcp}")
    if page_size % tokens_per_key:
        must = f"be a multiple of the {tokens_per_key} tokens of an index key"
        raise ValueError(f"page_size must {must}, got {page_size}")


def _index_format(name: str | None, layers: LayerCounts, *, is_v4: bool) -> Format:
    if name is None:
        return INDEX_FORMAT
    if is_v4:
        why = "whose index keys follow the format of its rows"
        raise ValueError(f"index_format must be left out for DeepSeek-V4, {why}, got {name!r}")
    if not layers.indexer:
        raise ValueError(
            f"index_format must be left out for a model without an indexer, got {name!r}"
        )
    return known_format(name)


def latent_size(
    geometry: MLAGeometry,
    layers: LayerCounts,
    name: str,
    *,
    dcp: int,
    page_size: int,
    tokens_per_key: int = 1,
    index_format: Format = INDEX_FORMAT,
) -> CacheSize:
    """The size in one format, index keys included. Raises ValueError for unsupported rows.

    tokens_per_key  tokens of one index key; if several, their states are included, too
    """
    rows = row_codec(name, geometry.row)
    token_bytes = float(rows.bytes_per_token * layers.mla)
    page_bytes = rows.page_bytes(page_size) * layers.mla
    if layers.indexer:
        width = geometry.index_head_dim
        keys = row_codec(index_format, RowShape(width, 0))
        token_bytes += keys.bytes_per_token * layers.indexer / tokens_per_key
        page_bytes += keys.page_bytes(page_size // tokens_per_key) * layers.indexer
        if tokens_per_key > 1:  # the states of `PooledKeyCache`, whose rows are never padded
            states = row_codec("fp32", RowShape(2 * width, 0))
            state_bytes = states.page_bytes(state_rows(page_size, tokens_per_key)) * layers.indexer
            token_bytes += state_bytes / page_size
            page_bytes += state_bytes
    return CacheSize(name, round(token_bytes), token_bytes / dcp, page_bytes, page_size, dcp)


def expanded_size(
    geometry: MLAGeometry, layers: LayerCounts, *, tp: int, page_size: int
) -> CacheSize:
    """K and V of every head in bf16. TP divides the heads, so there is no use for DCP."""
    whole, own = (
        row_codec("bf16", RowShape(each.expanded_elements_per_token, 0))
        for each in (geometry, geometry.with_heads(geometry.num_heads // tp))
    )
    token_bytes, rank_bytes = (layers.mla * each.bytes_per_token for each in (whole, own))
    page_bytes = layers.mla * own.page_bytes(page_size)
    return CacheSize(EXPANDED, token_bytes, rank_bytes, page_bytes, page_size, shards=1)


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


def table(report: MemoryReport, width: int) -> Table:
    """The sizes per format, and below them what they assume.

    Where `width` has no room for every context the last ones are left out, never the tokens that
    fit.
    """
    total, mla, indexer = report.layers
    title = f"{report.model}: {mla} MLA layers" + (f" of {total}" if mla < total else "")
    keys = "" if report.index_format is None else f" in {report.index_format}"
    title += (f", {indexer} with index keys{keys}" if indexer else "") + f"; batch {report.batch}"
    free = report.cache_bytes
    columns = [
        Column("cache", is_number=False),
        Column("bytes\nper token", rank=1),
        Column("of a rank"),
    ]
    columns += [
        Column(f"GiB/rank\n{each:,}\ntokens", rank=i)
        for i, each in enumerate(report.contexts, start=2)
    ]
    columns += [] if free is None else [Column("tokens\nthat fit")]
    rows = []
    for size in report.sizes:
        needed = (size.rank_bytes(each, report.batch) / GIB for each in report.contexts)
        cells = [f"{size.token_bytes:,}", f"{size.rank_token_bytes:,.0f}"]
        cells += [f"{each:,.2f}" for each in needed]
        cells += [] if free is None else [f"{size.max_tokens(free):,}"]
        rows.append([size.name, *cells])
    notes = [f"Left out: {reason}." for reason in report.unsupported]
    if mla < total:
        notes.append("The state of linear attention is not counted: its size is constant.")
    if any(isinstance(size, CompressedSize) for size in report.sizes):
        notes.append(
            "A token adds compressed rows and index keys. GiB also count each request's window and "
            "states; tokens that fit are those of one request."
        )
    if free is not None:
        known = report.weight_bytes
        weights = "are not counted" if known is None else f"take {known / GIB:.1f} GiB per rank"
        notes.append(f"Weights {weights}; activations are not counted.")
    shown = fitting_table(columns, rows, width, caption="\n".join(notes), grouped=False)
    shown.title, shown.title_justify = title, "left"
    return shown
