"""The split heuristic of decode: which KV tiles of which request each persistent CTA attends to.

Other libraries have it as `num_splits_heuristic` (FlashAttention) and `get_mla_metadata`
(FlashMLA). This is the host twin, behind `mlakit.plan_decode`. `kernels.decode_plan` is the
device twin: one kernel that applies the same rules to lengths on the GPU. Both use the constants
below, and a property test compares their plans.

    tiles[b]         = ceil(kv_lens[b] / tile)         n requests have any
    max_tiles        = ceil(max tiles / max(num_ctas // n, 1))
    requests_per_cta = ceil(n / num_ctas)
    mean_load        = ceil(Σ tiles / num_ctas)

even       if max_tiles · requests_per_cta ≤ 1.1 · mean_load. Request b gets p = ceil(tiles[b] /
           max_tiles) splits of equal size: split i has the tiles [i·tiles[b] // p,
           (i+1)·tiles[b] // p). A CTA takes one split, or `requests_per_cta` unsplit requests if
           there are more requests than CTAs
balanced   otherwise. The tiles of all requests are concatenated, and CTA c takes the tiles
           [c·total // num_ctas, (c+1)·total // num_ctas). At most two requests of a CTA are split,
           its first and its last
fixed      if the caller gives the tiles per split. The splits of a request then depend on its own
           length alone, and whole splits are assigned to CTAs
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

from mlakit.dispatch.checks import Dims

# An even plan may load a CTA with this many tenths of the mean load: a split costs a pipeline
# drain, float32 partials and their merge. 128 equal requests on the 132 SMs of an H200 take 6 %
# longer balanced than unsplit, and 32 of them on 264 CTAs are fastest in 8 splits each.
EVEN_SPLIT_MAX_LOAD_TENTHS = 11
# keys per split if results must not depend on the rest of the batch
DETERMINISTIC_SPLIT_KEYS = 2048


class TileRange(NamedTuple):
    """KV tiles [first_tile, last_tile) of one request, assigned to one CTA."""

    cta: int
    request: int
    first_tile: int
    last_tile: int


def ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def split_tiles(
    tiles: Sequence[int], num_ctas: int, fixed_split_tiles: int | None = None
) -> Iterator[TileRange]:
    """Splits of requests with `tiles[b]` KV tiles each, ordered by request, then by tile."""
    if fixed_split_tiles is not None:
        return fixed_splits(tiles, num_ctas, fixed_split_tiles)
    active = max(sum(num_tiles > 0 for num_tiles in tiles), 1)
    max_tiles = max(ceil_div(max(tiles, default=0), max(num_ctas // active, 1)), 1)
    requests_per_cta = ceil_div(active, num_ctas)
    mean_load = ceil_div(sum(tiles), num_ctas)
    if 10 * max_tiles * requests_per_cta <= EVEN_SPLIT_MAX_LOAD_TENTHS * mean_load:
        return even_splits(tiles, max_tiles, requests_per_cta)
    return balanced_splits(tiles, num_ctas)


def even_splits(tiles: Sequence[int], max_tiles: int, splits_per_cta: int) -> Iterator[TileRange]:
    """Every request in splits of equal size, of at most `max_tiles` tiles."""
    splits = count()
    for request, num_tiles in enumerate(tiles):
        num_splits = ceil_div(num_tiles, max_tiles)
        for i in range(num_splits):
            first, last = i * num_tiles // num_splits, (i + 1) * num_tiles // num_splits
            yield TileRange(next(splits) // splits_per_cta, request, first, last)


def balanced_splits(tiles: Sequence[int], num_ctas: int) -> Iterator[TileRange]:
    """Equal loads: a split ends with its request or with the load of its CTA."""
    total = sum(tiles)
    cta, start = 0, 0
    for request, num_tiles in enumerate(tiles):
        position, end = start, start + num_tiles
        while position < end:
            load_end = (cta + 1) * total // num_ctas
            if load_end <= position:
                cta += 1
                continue
            split_end = min(end, load_end)
            yield TileRange(cta, request, position - start, split_end - start)
            position = split_end
        start = end


def fixed_splits(tiles: Sequence[int], num_ctas: int, max_tiles: int) -> Iterator[TileRange]:
    """A split every `max_tiles` tiles, assigned to the CTA whose balanced load it starts in."""
    total = sum(tiles)
    start = 0
    for request, num_tiles in enumerate(tiles):
        for first in range(0, num_tiles, max_tiles):
            cta = (start + first) * num_ctas // total
            yield TileRange(cta, request, first, min(first + max_tiles, num_tiles))
        start += num_tiles


def equal_key_ranges(kv_len: int, num_splits: int, granularity: int) -> list[tuple[int, int]]:
    """Keys [first, last) of each of `num_splits` splits of one request (`EvenSplit`).

        blocks = ceil(kv_len / granularity)      per_split = ceil(blocks / num_splits)
        split s has the blocks [s·per_split, (s+1)·per_split), clamped to kv_len

    The last splits may be short or empty; an empty split is (kv_len, kv_len).
    """
    dims = Dims("equal_key_ranges")
    dims.require(kv_len >= 0, "kv_len", "not be negative", kv_len)
    dims.require(num_splits >= 1, "num_splits", "be at least 1", num_splits)
    dims.require(granularity >= 1, "granularity", "be at least 1", granularity)
    keys = ceil_div(ceil_div(kv_len, granularity), num_splits) * granularity
    return [(min(s * keys, kv_len), min((s + 1) * keys, kv_len)) for s in range(num_splits)]
