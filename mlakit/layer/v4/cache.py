"""The cache of DeepSeek-V4's layers: window rows, compressed rows, index keys, in pages.

    lane       rows                                       one row is       kept
    window     of all layers                              1 token          the window of new tokens
    csa        compressed rows and index keys             csa_rate tokens  for ever
    hca        compressed rows                            hca_rate tokens  for ever
    csa_state  float32 gates and values of both           1 token          until windows are pooled
    hca_state  float32 gates and values                   1 token          until windows are pooled

A lane has pages of its own, since its rows stand for other numbers of tokens and live shorter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache, from_host, token_requests
from mlakit.cache.pages import PagedSequence
from mlakit.dispatch.checks import Dims
from mlakit.formats import Format, known_format
from mlakit.layer.v4.batch import V4Batch
from mlakit.layer.v4.lanes import Advance, Lane
from mlakit.model.geometry import RowShape
from mlakit.model.v4 import CSA, HCA, SLIDING, LayerKind, V4Config
from mlakit.ops.compress_rows import first_needed

NAME = "V4Cache"
WINDOW = "window"
STATE_PAGE = 8  # tokens; states are large and few
LANE = {CSA: "csa", HCA: "hca"}
STATE = {CSA: "csa_state", HCA: "hca_state"}


@dataclass(eq=False)
class V4Sequence:
    """The rows of one request in all lanes: a handle that only its cache changes."""

    parts: dict[str, PagedSequence]
    length: int = 0  # tokens
    floor: int = 0  # it can be cut to this length, and to 0


class V4Cache:
    """The rows of the attention layers of a DeepSeek-V4 model, which grow as sequences do.

    A step of a serving loop:

        batch = cache.append_batch(sequences, new_tokens)
        for attention in layers:
            x = attention(x, batch)
    """

    def __init__(
        self,
        config: Any,
        format: Format = "bf16",
        *,
        layers: Sequence[int] | None = None,
        page_size: int = 64,
        keep: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """Make an empty cache.

        config     what `V4Config.from_config` takes
        format     of window rows and compressed rows. Index keys are fp8_token where it is FP8,
                   else of the same format: 68 bytes in mxfp4_block32
        layers     numbers of the layers whose rows it holds; None: all layers of the model
        page_size  rows of a page; states have pages of their own size
        keep       newest tokens that `truncate` can take back, such as rejected drafts
        """
        dims = Dims(NAME)
        self.config = V4Config.from_config(config)
        self.format: Format = known_format(format)
        self.keep = dims.integer("keep", keep, 0)
        dims.integer("page_size", page_size, 1)
        kinds = self.config.kinds
        numbers = range(len(kinds)) if layers is None else dims.integers("layers", layers, 0)
        for layer in numbers:
            must = f"be numbers of the model's {len(kinds)} layers"
            dims.require(layer < len(kinds), "layers", must, layer)
        self.layers = tuple(sorted(set(numbers)))
        # "cuda" means the current device
        self.device = torch.empty(0, dtype=torch.uint8, device=device).device
        self.kinds: dict[int, LayerKind] = {layer: kinds[layer] for layer in self.layers}
        members: dict[str, list[int]] = {kind: [] for kind in (SLIDING, CSA, HCA)}
        for layer, kind in self.kinds.items():
            members[kind].append(layer)
        self._number = {layer: i for i, layer in enumerate(self.layers)}
        self._number_in_kind = {
            layer: i for group in members.values() for i, layer in enumerate(group)
        }
        self.lanes = {WINDOW: Lane(page_size, self.device)}
        self.lanes[WINDOW].add("rows", self.config.row, self.format, len(self.layers))
        keys: Format = "fp8_token" if self.format.startswith("fp8") else self.format
        width, index = self.config.head_dim, self.config.index_head_dim
        for kind in (CSA, HCA):
            count = len(members[kind])
            if not count:
                continue
            series = 2 if kind == CSA else 1
            rows = self.lanes[LANE[kind]] = Lane(page_size, self.device)
            state = self.lanes[STATE[kind]] = Lane(STATE_PAGE, self.device)
            rows.add("rows", self.config.row, self.format, count)
            state.add("rows", RowShape(2 * series * width, 0), "fp32", count)
            if kind == CSA:
                rows.add("index", RowShape(index, 0), keys, count)
                state.add("index", RowShape(2 * series * index, 0), "fp32", count)

    def __repr__(self) -> str:
        return f"V4Cache({self.format}, {len(self.layers)} layers, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Bytes of the rows of all lanes, of pages in use and of free ones."""
        return sum(lane.nbytes for lane in self.lanes.values())

    @property
    def pages_in_use(self) -> dict[str, int]:
        """The pages of live sequences, by lane."""
        return {
            name: lane.allocator.num_pages - lane.allocator.num_free_pages
            for name, lane in self.lanes.items()
        }

    @property
    def token_bytes(self) -> float:
        """Bytes that each further token adds for ever: compressed rows and index keys."""
        return sum(
            cache.codec.bytes_per_token * cache.num_layers / self._tokens(name)
            for name, lane in self.lanes.items()
            if name in LANE.values()
            for cache in lane.caches.values()
        )

    @property
    def caches(self) -> list[PagedLatentCache]:
        """The rows of all lanes."""
        return [cache for lane in self.lanes.values() for cache in lane.caches.values()]

    def cache(self, lane: str, name: str = "rows") -> PagedLatentCache:
        """The rows of a lane; those of index keys by the name "index"."""
        return self.lanes[lane].caches[name]

    def number(self, layer: int) -> int:
        """The number of a layer among all layers, as in the lane `window`."""
        return self._number[layer]

    def number_in_kind(self, layer: int) -> int:
        """The number of a layer among those of its kind, as in the other lanes."""
        return self._number_in_kind[layer]

    def reserve(self) -> V4Sequence:
        """A new sequence without tokens."""
        return V4Sequence({name: lane.allocator.reserve(0) for name, lane in self.lanes.items()})

    def fork(self, sequence: V4Sequence) -> V4Sequence:
        """A new sequence with the tokens of another. It shares the pages, copy on write."""
        self._check(Dims(f"{NAME}.fork"), "sequence", sequence)
        parts = {
            name: lane.allocator.fork(sequence.parts[name]) for name, lane in self.lanes.items()
        }
        return V4Sequence(parts, sequence.length, sequence.floor)

    def free(self, sequence: V4Sequence) -> None:
        """Free the pages of a sequence; the handle is invalid afterwards."""
        self._check(Dims(f"{NAME}.free"), "sequence", sequence)
        for name, lane in self.lanes.items():
            lane.allocator.free(sequence.parts[name])
        sequence.parts = {}

    def truncate(self, sequence: V4Sequence, length: int) -> None:
        """Keep the first `length` tokens: at most `keep` tokens are taken back, or all."""
        dims = Dims(f"{NAME}.truncate")
        self._check(dims, "sequence", sequence)
        kept, floor = dims.integer("length", length, 0), sequence.floor
        within = kept == 0 or floor <= kept <= sequence.length
        dims.require(within, "length", f"be 0 or in [{floor}, {sequence.length}]", kept)
        self._cut(sequence, kept, floor if kept else 0)

    def append_batch(self, sequences: Iterable[V4Sequence], counts: Iterable[int]) -> V4Batch:
        """Append counts[i] tokens to each of several different sequences: the batch of a step.

        Rows that neither this step nor a later one reads are freed, before any row is taken.
        """
        dims = Dims(f"{NAME}.append_batch")
        members = list(sequences)
        for i, sequence in enumerate(members):
            self._check(dims, f"sequences[{i}]", sequence)
            first = members.index(sequence)
            dims.require(first == i, f"sequences[{i}]", "appear once", f"sequences[{first}] again")
        new = dims.integers("counts", counts, 0)
        must = f"have one entry per sequence, {len(members)}"
        dims.require(len(new) == len(members), "counts", must, len(new))
        before = [(sequence.length, sequence.floor) for sequence in members]
        steps = {
            name: [self._advance(name, s.length, n) for s, n in zip(members, new, strict=True)]
            for name in self.lanes
        }
        for name, lane in self.lanes.items():
            lane.make_room([sequence.parts[name] for sequence in members], steps[name])
        for name, lane in self.lanes.items():
            lane.advance([sequence.parts[name] for sequence in members], steps[name])
        for sequence, count in zip(members, new, strict=True):
            sequence.length += count
            sequence.floor = max(sequence.floor, sequence.length - self.keep, 0)
        return self._batch(members, new, before)

    def roll_back(self, batch: V4Batch) -> None:
        """Take back the tokens of the newest step of its sequences, such as one that failed."""
        for sequence, (length, floor) in zip(batch.sequences, batch.before, strict=True):
            self._cut(sequence, length, floor)

    def _check(self, dims: Dims, arg: str, sequence: object) -> None:
        dims.instance(arg, sequence, V4Sequence)
        assert isinstance(sequence, V4Sequence)
        dims.require(bool(sequence.parts), arg, "be live", "a freed sequence")
        own = sequence.parts[WINDOW]._allocator is self.lanes[WINDOW].allocator
        dims.require(own, arg, "belong to this cache", "a sequence of another one")

    def _cut(self, sequence: V4Sequence, length: int, floor: int) -> None:
        for name, lane in self.lanes.items():
            lane.allocator.truncate(sequence.parts[name], length // self._tokens(name))
        sequence.length, sequence.floor = length, floor

    def _tokens(self, lane: str) -> int:
        """The tokens of one row of a lane."""
        return {LANE[CSA]: self.config.csa_rate, LANE[HCA]: self.config.hca_rate}.get(lane, 1)

    def _advance(self, lane: str, before: int, count: int) -> Advance:
        after, tokens = before + count, self._tokens(lane)
        if tokens > 1 or lane in LANE.values():
            return Advance(after // tokens - before // tokens)
        if lane == WINDOW:
            return Advance(count, self._first_in_window(before))
        kind = next(kind for kind, name in STATE.items() if name == lane)
        return Advance(
            count,
            self._first_state(kind, before),
            self._first_state(kind, after) if count else 0,
        )

    def _first_in_window(self, length: int) -> int:
        """The oldest token in the window of tokens after `length`, drafts taken back."""
        return self._first_kept(length, length - self.keep - self.config.sliding_window + 1)

    def _first_state(self, kind: LayerKind, length: int) -> int:
        """The oldest token whose state is needed after `length` tokens, drafts taken back."""
        certain = max(length - self.keep, 0)
        return self._first_kept(length, first_needed(certain, self.config.rate(kind), kind == CSA))

    def _first_kept(self, length: int, needed: int) -> int:
        """`needed`, or the newest token that no `truncate` takes back: a cut needs its page."""
        return max(min(needed, length - self.keep - 1), 0)

    def _batch(
        self,
        sequences: list[V4Sequence],
        counts: Sequence[int],
        before: list[tuple[int, int]],
    ) -> V4Batch:
        device = self.device
        lengths = [sequence.length for sequence in sequences]
        q_starts = from_host([0, *accumulate(counts)], torch.int32, device)
        request, index = token_requests(q_starts, sum(counts))
        first = from_host([length for length, _ in before], torch.int64, device)
        tables: dict[str, Tensor] = {
            name: lane.page_table([sequence.parts[name] for sequence in sequences])
            for name, lane in self.lanes.items()
        }
        return V4Batch(
            cache=self,
            sequences=tuple(sequences),
            before=tuple(before),
            lengths=tuple(lengths),
            counts=tuple(counts),
            tables=tables,
            kv_lens=from_host(lengths, torch.int32, device),
            q_starts=q_starts,
            request=request,
            position=first[request] + index,
        )
