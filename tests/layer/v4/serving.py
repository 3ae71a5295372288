"""Sequences served by a layer in steps, over a cache whose rows are NaN unless they may be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mlakit import V4Attention, V4Cache
from mlakit.layer.v4 import V4Batch, V4Sequence
from mlakit.ops.compress_rows import first_needed
from mlakit.tools.testing import poison

# prompts over several windows in uneven pieces, which end inside of windows, with steps that have
# nothing new for one of the sequences, then few tokens at a time
CHUNKS = ((20, 5), (30, 1), (0, 20), (10, 0), (2, 2), (4, 3), *[(1, 1)] * 6)


class Server:
    """A layer and a cache for it. Every sequence is known, so that all other rows are poisoned."""

    def __init__(self, layer: V4Attention, *, format: str = "fp32", **options: Any) -> None:
        device = layer.o_a_proj.weight.device
        options = {"page_size": 8, "layers": [layer.layer], "device": device} | options
        self.layer, self.cache = layer, V4Cache(layer.config, format, **options)
        self.live: list[V4Sequence] = []

    def new(self) -> V4Sequence:
        self.live.append(self.cache.reserve())
        return self.live[-1]

    def fork(self, sequence: V4Sequence) -> V4Sequence:
        self.live.append(self.cache.fork(sequence))
        return self.live[-1]

    def free(self, sequence: V4Sequence) -> None:
        self.live.remove(sequence)
        self.cache.free(sequence)

    def begin(self, sequences: Sequence[V4Sequence], counts: Sequence[int]) -> V4Batch:
        batch = self.cache.append_batch(sequences, counts)
        new = dict(zip(sequences, counts, strict=True))
        self.poison_all_but({each: each.length - new.get(each, 0) for each in self.live})
        return batch

    def step(self, sequences: Sequence[V4Sequence], parts: Sequence[Tensor]) -> list[Tensor]:
        """The layer's results for new tokens [n, hidden] of each sequence."""
        counts = [len(part) for part in parts]
        out = self.layer(torch.cat(list(parts)), self.begin(sequences, counts))
        return list(out.split(counts))

    def poison_all_but(self, lengths: dict[V4Sequence, int]) -> None:
        """Make all rows NaN that no query after these lengths may read, drafts taken back."""
        config = self.cache.config
        for name, lane in self.cache.lanes.items():
            kind = next((kind for kind in set(config.kinds) if _lane(kind) == name[:3]), None)
            size, keep = (
                lane.page_size,
                torch.zeros(lane.allocator.num_pages, lane.page_size, dtype=torch.bool),
            )
            for sequence, length in lengths.items():
                certain = max(length - self.cache.keep, 0)
                if name == "window":
                    rows = range(max(certain - config.sliding_window + 1, 0), length)
                elif name.endswith("_state"):
                    rate = config.rate(kind)
                    rows = range(first_needed(certain, rate, name == "csa_state"), length)
                else:
                    rows = range(length // config.rate(kind))
                pages = sequence.parts[name].pages
                for row in rows:
                    assert pages[row // size] >= 0
                    keep[pages[row // size], row % size] = True
            for cache in lane.caches.values():
                for stored in (cache.payload, cache.beside):
                    if stored is not None and stored.shape[1:3] == keep.shape:
                        poison(stored, keep.to(stored.device).expand(stored.shape[:3]))


def _lane(kind: str) -> str:
    return {"compressed_sparse_attention": "csa", "heavily_compressed_attention": "hca"}.get(
        kind, ""
    )


def serve(
    layer: V4Attention,
    inputs: Sequence[Tensor],
    chunks: Sequence[Sequence[int]] = CHUNKS,
    **options: Any,
) -> list[Tensor]:
    """The layer's results for whole sequences [tokens, hidden], served in chunks, then the rest."""
    server = Server(layer, **options)
    sequences = [server.new() for _ in inputs]
    found: list[list[Tensor]] = [[] for _ in inputs]
    for wanted in (*chunks, tuple(len(x) for x in inputs)):
        at = [sequence.length for sequence in sequences]
        parts = [x[a : a + n] for x, a, n in zip(inputs, at, wanted, strict=True)]
        for own, part in zip(found, server.step(sequences, parts), strict=True):
            own.append(part)
    return [torch.cat(parts) for parts in found]
