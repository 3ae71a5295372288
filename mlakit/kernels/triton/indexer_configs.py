"""Tiles of the indexer's logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mlakit.formats import RowCodec
from mlakit.kernels.triton.configs import power_of_two


@dataclass(frozen=True)
class IndexerConfig:
    queries: int  # of one request, per program
    heads: int  # per dot, a power of two ≥ 16
    keys: int  # per iteration
    tiles: int  # key tiles per program, one after the other
    num_warps: int
    num_stages: int

    def shared_bytes(self, heads: int, padded_width: int, itemsize: int) -> int:
        """Queries and the keys of every stage; with several head blocks also their queries."""
        rows = self.queries * self.heads
        blocks = -(-heads // self.heads)
        if blocks > 1 and self.num_stages > 1:
            rows *= blocks * self.num_stages
        return (rows + self.num_stages * self.keys) * padded_width * itemsize


def has_fp8_dots(q_dtype: str, codec: RowCodec) -> bool:
    """Return whether the indexer multiplies e4m3 by e4m3, on GPUs that have such dots."""
    row, has_one_scale = codec.row, codec.traits.SCALED_BY in ("tensor", "row")
    is_fp8 = q_dtype == "torch.float8_e4m3fn" and codec.traits.IS_E4M3 and has_one_scale
    # a dot of e4m3 needs 32 columns
    return is_fp8 and row.qk_rope_head_dim == 0 and row.kv_lora_rank > 16


def pick_indexer_config(
    *,
    heads: int,
    padded_width: int,
    itemsize: int,  # of the operands of dots
    is_dequantised: bool,
    tokens: int,
    batch: int,
    columns: int,
    arch: int,
    num_sms: int,
    shared_bytes: int,
) -> IndexerConfig:
    """Pick tiles of several queries if most would be full.

    is_dequantised  keys are multiplied by their scales, which takes registers
    """
    if itemsize == 4:  # float32 has no tensor cores: tiles stay in registers
        return IndexerConfig(1, 16, keys=16, tiles=16, num_warps=8, num_stages=1)
    block = min(max(power_of_two(heads), 16), 64)
    most_keys = 128 if arch in (90, 100) and not is_dequantised else 64
    for queries, keys, warps, stages in _indexer_tiles(
        heads, block, padded_width, itemsize, tokens / max(batch, 1), arch, most_keys
    ):
        query_tiles = tokens // queries + batch * (queries > 1)
        tiles = _tiles_per_program(query_tiles * -(-columns // keys), num_sms)
        config = IndexerConfig(queries, block, keys, tiles, warps, stages)
        if config.shared_bytes(heads, padded_width, itemsize) <= shared_bytes - 8192:
            return config
    return IndexerConfig(1, 16, keys=16, tiles=16, num_warps=4, num_stages=1)


def _indexer_tiles(
    heads: int,
    block: int,
    padded_width: int,
    itemsize: int,
    mean_queries: float,
    arch: int,
    most_keys: int,
) -> Iterator[tuple[int, int, int, int]]:
    """Return (queries, keys, num_warps, num_stages), the fastest first."""
    most = max(128 // block, 1)
    if itemsize == 1 and arch == 90 and heads <= block:
        # e4m3 operands take no registers. 4 warps beat 8, and 5 stages 3, on an H200
        largest = max(256 // block, 1)
        queries = 1
        while queries < largest and 2 * queries <= mean_queries:
            queries *= 2
        yield queries, 64 if queries * block > 128 else 128, 4, 5
    together = most if mean_queries >= 2 * most else 1
    # dot products, converted keys and query blocks share the registers
    warps = 8 if together > 1 or heads > block or padded_width > 128 else 4
    yield together, most_keys, warps, 3
    yield together, 64, warps, 3
    yield together, 64, warps, 2
    for keys, stages in ((64, 2), (64, 1), (32, 1)):
        yield 1, keys, warps, stages


MAX_INDEXER_TILES = 32


def _tiles_per_program(tiles: int, num_sms: int) -> int:
    """Key tiles per program: three programs run on an SM at a time, and two of at least four tiles
    are as good (1.9x to 2.0x faster than programs of eight tiles, on an H200)."""
    few = min(-(-tiles // (2 * num_sms)), 4)
    return min(max(-(-tiles // (3 * num_sms)), few, 1), MAX_INDEXER_TILES)
