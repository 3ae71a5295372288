"""Schedules: who computes what, as frozen objects made from lengths alone.

`plan_decode` cuts the keys of a decode batch into work items so that all workers finish together.
`plan_prefill` cuts the context of a prefill batch into chunks that fit a buffer of fixed size.
`partition_ranges` is the even split of one request, where the number of parts is given.

No plan looks at a key or a query, and none remembers an earlier one: equal lengths, equal plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, count
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor

from mlakit.checks import Dims
from mlakit.reprs import shapes_repr

MAX_INT32 = 2**31 - 1
# The split heuristic's constants, for `plan_decode` here and for its twin that runs on the device,
# `kernels.triton.decode_plan`.
# An even plan may take this many tenths of the balanced share: a split costs the end of a pipeline,
# float32 partials and their merge. 128 equal requests on the 132 SMs of an H200 take 6 % longer
# balanced than whole, and 32 of them on 264 workers are fastest in 8 splits each.
EVEN_TENTHS = 11
DETERMINISTIC_SPLIT_KEYS = 2048  # of a split where results may not depend on the batch


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def partition_ranges(kv_len: int, num_partitions: int, granularity: int) -> list[tuple[int, int]]:
    """The keys [first, last) of each of `num_partitions` parts of one request.

        pages = ceil(kv_len / granularity)      per = ceil(pages / num_partitions)
        part s covers the pages [s·per, (s+1)·per), cut to kv_len

    Rounding up leaves the trailing parts short or empty; an empty part is (kv_len, kv_len).
    """
    dims = Dims("partition_ranges")
    dims.require(kv_len >= 0, "kv_len", "not be negative", kv_len)
    dims.require(num_partitions >= 1, "num_partitions", "be at least 1", num_partitions)
    dims.require(granularity >= 1, "granularity", "be at least 1", granularity)
    keys = _ceil_div(_ceil_div(kv_len, granularity), num_partitions) * granularity
    return [(min(s * keys, kv_len), min((s + 1) * keys, kv_len)) for s in range(num_partitions)]


class WorkItem(NamedTuple):
    """Keys [first_key, last_key) of one request, computed by one worker in one go.

    `partial_slot` is where the unmerged (out, lse) goes; -1 when these are all keys of the request
    and the item writes the final result itself.
    """

    worker: int
    request: int
    first_key: int
    last_key: int
    partial_slot: int


class DecodePlanTensors(NamedTuple):
    """A plan for a kernel: int32 tensors, and what a launcher must know without looking at them.

    The worker of an item is told by `worker_starts`. A plan made on a device may have room for more
    items than there are, and the last item of a request may end past its keys, with its last tile.
    """

    items: Tensor  # [max_items, 4 or more]: request, first_key, last_key, partial_slot, …
    worker_starts: Tensor  # [num_workers + 1] into items
    partial_starts: Tensor  # [batch + 1] into the partial slots
    empty_requests: Tensor  # [num_empty]: no item is theirs, yet they may have queries
    tile: int  # items begin at multiples of it
    max_partials: int  # no slot is beyond: the scratch is max_partials · slot_rows rows of out
    slot_rows: int = 0  # rows of a partial the plan was made for; 0: what the kernel finds fit
    num_tokens: int = 0  # rows of q the plan was made for; 0: it does not depend on them

    def __repr__(self) -> str:
        return shapes_repr(self)

    def host_items(self) -> list[tuple[int, int, int, int]]:
        """The items there are. Waits for the device."""
        return [tuple(item) for item in self.items[: int(self.worker_starts[-1]), :4].tolist()]


@dataclass(frozen=True)
class DecodePlan:
    """A split-KV schedule. Worker w computes `items[worker_starts[w]:worker_starts[w + 1]]`.

    kv_lens         the lengths the plan was made for
    num_workers     how many workers share the work; some may have no item
    tile            keys per tile: every item but the last of a request is a whole number of tiles
    fixed_split     keys per split, or None where the balance of the batch decides the splits
    items           every key of every request exactly once, ordered by request, then by key, which
                    is also the order of the workers
    worker_starts   [num_workers + 1] offsets into `items`
    partial_starts  [batch + 1]: request b is merged from the partial slots partial_starts[b] to
                    partial_starts[b + 1], in the order of its keys; an empty range: not split
    empty_requests  requests without keys: no item is theirs, yet out = 0 and lse = -inf are due
    """

    kv_lens: tuple[int, ...]
    num_workers: int
    tile: int
    fixed_split: int | None
    items: tuple[WorkItem, ...]
    worker_starts: tuple[int, ...]
    partial_starts: tuple[int, ...]
    empty_requests: tuple[int, ...]

    @property
    def num_partials(self) -> int:
        """Slots of scratch: at most two per worker, unless `fixed_split` decides."""
        return self.partial_starts[-1]

    def tensors(self, device: torch.device | str | None = None) -> DecodePlanTensors:
        """The plan as int32 tensors on `device`, the same ones each time: do not write to them."""
        if torch.compiler.is_compiling():  # where tensors belong to one graph
            return self._copied_to(device)
        if isinstance(device, torch.device) and device.index is not None:
            where = device
        else:  # "cuda" and None stand for one of several
            where = torch.empty(0, device=device).device
        if where not in self._on_devices:
            self._on_devices[where] = self._copied_to(device)
        return self._on_devices[where]

    @cached_property
    def _on_devices(self) -> dict[torch.device, DecodePlanTensors]:
        return {}

    def _copied_to(self, device: torch.device | str | None) -> DecodePlanTensors:
        def int32(values: Iterable[int]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.int32, device=device)

        columns = (value for item in self.items for value in item[1:])
        return DecodePlanTensors(
            items=int32(columns).reshape(len(self.items), 4),
            worker_starts=int32(self.worker_starts),
            partial_starts=int32(self.partial_starts),
            empty_requests=int32(self.empty_requests),
            tile=self.tile,
            max_partials=self.num_partials,
        )


@dataclass(frozen=True)
class EvenSplit:
    """Every request's keys in `num_splits` equal parts: a plan that needs no lengths to be made."""

    num_splits: int

    def __post_init__(self) -> None:
        Dims("EvenSplit").integer("num_splits", self.num_splits, 1)


@dataclass(frozen=True)
class ContextPlan:
    """How a prefill step goes through its cached context in pieces of bounded size.

    kv_lens  tokens of each request, those of the step included
    q_lens   new tokens of the step, per request
    chunks   per chunk, the keys [first, last) it takes of the kv_len − q_len older ones of every
             request
    """

    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, int], ...], ...]


def plan_context(
    kv_lens: Sequence[int], q_lens: Sequence[int], *, max_rows: int | None = None
) -> ContextPlan:
    """Cut the cached context of a prefill batch into chunks of at most `max_rows` rows.

    The context of a request is what it had before the step: all but the q_len newest of its kv_len
    tokens. The requests are laid end to end on one line, and the line is cut every `max_rows` rows
    (None: not at all). Requests without new tokens attend nothing and are left out.
    """
    dims = Dims("plan_context")
    whole = tuple(dims.integer(f"kv_lens[{b}]", n, 0) for b, n in enumerate(kv_lens))
    new = tuple(dims.integer(f"q_lens[{b}]", n, 0) for b, n in enumerate(q_lens))
    dims.require(len(whole) == len(new), "q_lens", f"have {len(whole)} entries", len(new))
    dims.new_tokens_counted(whole, new)
    attended = [kv_len - q_len if q_len else 0 for kv_len, q_len in zip(whole, new, strict=True)]
    total = sum(attended)
    rows = dims.integer("max_rows", max_rows, 1) if max_rows is not None else max(total, 1)
    starts = list(accumulate(attended, initial=0))
    chunks = tuple(
        tuple(
            (min(max(low - start, 0), length), min(max(low + rows - start, 0), length))
            for start, length in zip(starts, attended, strict=False)
        )
        for low in range(0, total, rows)
    )
    return ContextPlan(whole, new, chunks)


def plan_decode(
    kv_lens: Sequence[int], *, num_workers: int, tile: int = 64, fixed_split: int | None = None
) -> DecodePlan:
    """Share the keys of a decode batch among `num_workers`.

        tiles[b] = ceil(kv_lens[b] / tile)       n requests have any
        split = ceil(max tiles / max(num_workers // n, 1))       each = ceil(n / num_workers)

    Evenly, if split · each is at most 1.1 times the balanced share ceil(Σ tiles / num_workers):
    request b in p = ceil(tiles[b] / split) equal splits, split i its tiles [i·tiles[b] // p,
    (i+1)·tiles[b] // p); a worker takes one split, or `each` whole requests where there are more
    requests than workers. Otherwise balanced: the requests are laid end to end on one line of
    tiles, and worker w takes its tiles [w·total // num_workers, (w+1)·total // num_workers).

    So no load exceeds 1.1 times the balanced share, and requests of one length are cut alike. A
    worker holds at most two requests in part (its first and its last), so the scratch is bounded by
    2·num_workers slots.

    With `fixed_split` (keys, a multiple of `tile`) a request is cut every `fixed_split` keys, so
    its splits, and with them the rounding of its result, depend on nothing but its own length. A
    split is never cut, only handed out: loads stay within one split of the even share.

    Raises ValueError for a negative length and for sizes below 1.
    """
    lengths = tuple(index(kv_len) for kv_len in kv_lens)
    _check_decode(lengths, num_workers, tile, fixed_split)
    tiles = [_ceil_div(kv_len, tile) for kv_len in lengths]
    runs = (
        _shared_runs(tiles, num_workers)
        if fixed_split is None
        else _fixed_runs(tiles, num_workers, fixed_split // tile)
    )
    ranges = [
        (worker, request, first * tile, min(last * tile, lengths[request]))
        for worker, request, first, last in runs
    ]
    splits = Counter(request for _, request, _, _ in ranges)
    slots = count()
    items = tuple(
        WorkItem(*keys, partial_slot=next(slots) if splits[keys[1]] > 1 else -1) for keys in ranges
    )
    per_worker = Counter(item.worker for item in items)
    partials = [splits[b] if splits[b] > 1 else 0 for b in range(len(lengths))]
    return DecodePlan(
        kv_lens=lengths,
        num_workers=num_workers,
        tile=tile,
        fixed_split=fixed_split,
        items=items,
        worker_starts=tuple(accumulate((per_worker[w] for w in range(num_workers)), initial=0)),
        partial_starts=tuple(accumulate(partials, initial=0)),
        empty_requests=tuple(b for b, kv_len in enumerate(lengths) if kv_len == 0),
    )


def _check_decode(
    kv_lens: Sequence[int], num_workers: int, tile: int, fixed_split: int | None
) -> None:
    dims = Dims("plan_decode")
    dims.require(num_workers >= 1, "num_workers", "be at least 1", num_workers)
    dims.require(tile >= 1, "tile", "be at least 1", tile)
    if fixed_split is not None:
        multiple = fixed_split >= 1 and fixed_split % tile == 0
        dims.require(multiple, "fixed_split", f"be a multiple of tile, {tile}", fixed_split)
    for request, kv_len in enumerate(kv_lens):
        dims.require(kv_len >= 0, f"kv_lens[{request}]", "not be negative", kv_len)


def _shared_runs(tiles: Sequence[int], num_workers: int) -> Iterator[tuple[int, int, int, int]]:
    """(worker, request, first tile, last tile) of an even plan, or else of a balanced one."""
    active = max(sum(num_tiles > 0 for num_tiles in tiles), 1)
    split_tiles = max(_ceil_div(max(tiles, default=0), max(num_workers // active, 1)), 1)
    requests_each = _ceil_div(active, num_workers)
    share = _ceil_div(sum(tiles), num_workers)
    if 10 * split_tiles * requests_each <= EVEN_TENTHS * share:
        return _even_runs(tiles, split_tiles, requests_each)
    return _balanced_runs(tiles, num_workers)


def _even_runs(
    tiles: Sequence[int], split_tiles: int, items_each: int
) -> Iterator[tuple[int, int, int, int]]:
    """(worker, request, first tile, last tile), every request in equal splits of its own."""
    items = count()
    for request, num_tiles in enumerate(tiles):
        splits = _ceil_div(num_tiles, split_tiles)
        for split in range(splits):
            first, last = split * num_tiles // splits, (split + 1) * num_tiles // splits
            yield next(items) // items_each, request, first, last


def _balanced_runs(tiles: Sequence[int], num_workers: int) -> Iterator[tuple[int, int, int, int]]:
    """(worker, request, first tile, last tile), cut where a request or a worker's share ends."""
    total = sum(tiles)
    worker, start = 0, 0
    for request, num_tiles in enumerate(tiles):
        position, end = start, start + num_tiles
        while position < end:
            share_end = (worker + 1) * total // num_workers
            if share_end <= position:
                worker += 1
                continue
            cut = min(end, share_end)
            yield worker, request, position - start, cut - start
            position = cut
        start = end


def _fixed_runs(
    tiles: Sequence[int], num_workers: int, split_tiles: int
) -> Iterator[tuple[int, int, int, int]]:
    """(worker, request, first tile, last tile); a split belongs to the share it starts in."""
    total = sum(tiles)
    start = 0
    for request, num_tiles in enumerate(tiles):
        for first in range(0, num_tiles, split_tiles):
            worker = (start + first) * num_workers // total
            yield worker, request, first, min(first + split_tiles, num_tiles)
        start += num_tiles


@dataclass(frozen=True, eq=False)
class PrefillPlan:
    """Chunks of context, each of which fits the buffer. Request b in chunk c has the buffer rows
    `buffer_row_offsets[c, b]` to `buffer_row_offsets[c, b + 1]`, filled from its cache rows from
    `cache_offsets[c, b]` on; rows past its last token (up to a whole page) are padding.

    buffer_row_offsets  [max_chunks, batch + 1] int32, on the device of the lengths
    cache_offsets       [max_chunks, batch + 1] int32, likewise; the last column is 0
    buffer_lengths      [max_chunks] int32 on the CPU: rows in use, -1 for a chunk not needed
    """

    buffer_row_offsets: Tensor
    cache_offsets: Tensor
    buffer_lengths: Tensor

    __repr__ = shapes_repr


def plan_prefill(
    kv_lens: Tensor,
    buffer_size: int,
    *,
    page_size: int,
    max_chunks: int = 16,
    op: str = "plan_prefill",
) -> PrefillPlan:
    """Cut the context of a ragged batch into chunks of `buffer_size` rows.

        rows[b]  = align_up(kv_lens[b], page_size)
        start[b] = Σ rows[<b]                 the requests laid end to end on one line
        chunk c is the line's rows [c·buffer_size, (c+1)·buffer_size)

        buffer_row_offsets[c, b] = clamp(start[b] - c·buffer_size, 0, buffer_size)
        cache_offsets[c, b]      = clamp(c·buffer_size - start[b], 0, rows[b])

    kv_lens  [batch] int; tokens of each request, those of the step included

    A batch of no rows has one chunk of length 0; a batch of no requests gives zeros throughout.
    Raises ValueError, under the name `op`, when `max_chunks` are too few. Synchronises once, for
    the length of the line.
    """
    _check_prefill(Dims(op), buffer_size, page_size, max_chunks)
    if len(kv_lens) == 0:
        empty = torch.zeros(max_chunks, 1, dtype=torch.int32, device=kv_lens.device)
        return PrefillPlan(
            empty, empty.clone(), torch.zeros(max_chunks, dtype=torch.int32, device="cpu")
        )

    rows = (kv_lens.to(torch.int64) + (page_size - 1)) // page_size * page_size  # [batch]
    line = torch.nn.functional.pad(rows.cumsum(0), (1, 0))  # [batch + 1]
    total = int(line[-1])
    buffer_lengths = _chunk_lengths(op, total, buffer_size, max_chunks)

    chunk_starts = torch.arange(max_chunks, device=rows.device)[:, None] * buffer_size
    consumed = (chunk_starts - line[:-1]).clamp(min=0).minimum(rows)  # [max_chunks, batch]
    return PrefillPlan(
        buffer_row_offsets=(line - chunk_starts).clamp(0, buffer_size).to(torch.int32),
        cache_offsets=torch.nn.functional.pad(consumed, (0, 1)).to(torch.int32),
        buffer_lengths=buffer_lengths,
    )


def _check_prefill(dims: Dims, buffer_size: int, page_size: int, max_chunks: int) -> None:
    in_range = 1 <= buffer_size <= MAX_INT32
    dims.require(in_range, "buffer_size", f"be between 1 and {MAX_INT32}", buffer_size)
    dims.require(page_size >= 1, "page_size", "be at least 1", page_size)
    dims.require(max_chunks >= 1, "max_chunks", "be at least 1", max_chunks)


def _chunk_lengths(op: str, total: int, buffer_size: int, max_chunks: int) -> Tensor:
    num_chunks = max(_ceil_div(total, buffer_size), 1)
    Dims(op).require(
        num_chunks <= max_chunks,
        "max_chunks",
        f"be at least {num_chunks} for {total} rows in whole pages and buffer_size {buffer_size}",
        max_chunks,
    )
    lengths = [min(total - chunk * buffer_size, buffer_size) for chunk in range(num_chunks)]
    return torch.tensor(lengths + [-1] * (max_chunks - num_chunks), dtype=torch.int32, device="cpu")
