"""Tile sizes of the portable kernels: frozen choices, and who picks which from what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PrefillConfig:
    block_q: int  # queries of a program
    block_k: int  # keys at a time
    num_warps: int
    num_stages: int  # tiles of keys in flight
    block_masked: int  # keys at a time where a mask hides some of them from some queries
    head_group: int = 8  # heads that are worked on at the same time

    def shared_bytes(self, qk_width: int, v_width: int, itemsize: int, keeps_queries: bool) -> int:
        """Every stage's keys and values, and queries where they are not kept in registers."""
        queries = itemsize * self.block_q * qk_width
        tiles = itemsize * self.num_stages * self.block_k * (qk_width + v_width)
        return tiles + queries if keeps_queries else max(tiles, queries) + 8192


_SMALLEST_QUERY_TILE = 16
# by falling size; the first that fits is taken
_PREFILL_HALF = (
    PrefillConfig(128, 128, 8, 2, 64),
    PrefillConfig(128, 64, 8, 3, 32),
    PrefillConfig(128, 64, 8, 2, 32),
    PrefillConfig(128, 32, 8, 2, 32),
    PrefillConfig(64, 64, 4, 2, 32),
    PrefillConfig(64, 32, 8, 2, 16),
    PrefillConfig(16, 64, 4, 2, 32),
    PrefillConfig(16, 32, 4, 2, 16),
    PrefillConfig(16, 16, 4, 1, 16),
)
# without tensor cores a tile lives in registers
_PREFILL_FLOAT = (
    PrefillConfig(16, 32, 8, 1, 32),
    PrefillConfig(16, 16, 8, 1, 16),
)


def pick_prefill_config(
    *, qk_width: int, v_width: int, itemsize: int, mean_queries: float, arch: int, shared_bytes: int
) -> PrefillConfig:
    """Widths are padded ones; `mean_queries` of a request: a tile should not be much larger."""
    # sm_90 and sm_100 multiply from shared memory; elsewhere q and tiles of keys need registers,
    # too. Twice as many sums fit on sm_90 without a spill.
    keeps_queries = arch // 10 in (9, 10)
    sums_per_warp = 4096 if arch // 10 == 9 else 2048
    choices = [
        config
        for config in (_PREFILL_FLOAT if itemsize == 4 else _PREFILL_HALF)
        if config.block_q == _SMALLEST_QUERY_TILE
        or (
            config.block_q < 2 * mean_queries
            and config.block_q * v_width <= config.num_warps * sums_per_warp
            and (arch // 10 == 9 or config.block_k <= 64)
        )
    ]
    for config in choices:
        needed = config.shared_bytes(qk_width, v_width, itemsize, keeps_queries)
        if needed <= shared_bytes - 1024:
            return config
    return choices[-1]


@dataclass(frozen=True)
class QuantizeConfig:
    rows: int  # of one group of columns, worked on by a program
    columns: int  # of a group, at a time
    num_warps: int


def pick_quantize_config(*, rows: int, group: int) -> QuantizeConfig:
    """About 4096 numbers a program; of a wider group the rest is read twice, then from a cache."""
    columns = min(power_of_two(group), 4096)
    tile = min(max(4096 // columns, 1), 32, power_of_two(rows))
    return QuantizeConfig(tile, columns, num_warps=4 if tile * columns > 1024 else 1)


@dataclass(frozen=True)
class MatmulConfig:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8  # tiles of rows that are worked on at the same time

    def shared_bytes(self, itemsize: int) -> int:
        """Every stage's tiles of both operands."""
        return self.num_stages * (self.block_m + self.block_n) * self.block_k * itemsize


def pick_scaled_matmul_config(
    *, rows: int, columns: int, k_group: int, shared_bytes: int
) -> MatmulConfig:
    """A step of K stays within one group of scales; operands become halves in registers, of which
    there are few."""
    block_k = min(max(power_of_two(k_group), 32), 64)
    block_m = min(max(power_of_two(rows), 16), 64)
    block_n = min(max(power_of_two(columns), 16), 128 if rows > 64 else 64)
    stages = 4 if shared_bytes > 128 * 1024 else 3
    return MatmulConfig(block_m, block_n, block_k, 8 if block_m * block_n > 4096 else 4, stages)


def pick_matmul_config(
    *, rows: int, columns: int, depth: int, itemsize: int, shared_bytes: int
) -> MatmulConfig:
    if itemsize == 4:  # without tensor cores a tile lives in registers
        return MatmulConfig(32, 32, 32, num_warps=4, num_stages=2)
    block_m = min(max(power_of_two(rows), 16), 128)
    block_n = min(max(power_of_two(columns), 16), 128)
    block_k = min(max(power_of_two(depth), 16), 64)
    stages = 4 if shared_bytes > 128 * 1024 else 3
    return MatmulConfig(block_m, block_n, block_k, 8 if block_m * block_n > 8192 else 4, stages)


@dataclass(frozen=True)
class AppendConfig:
    rows: int  # tokens whose cache rows one program makes
    heads: int  # heads of a token whose queries one program rotates
    probes: int  # requests at a time that a token is looked for in
    num_warps: int = 4
    pdl: bool = False  # start before the kernel in front has ended, wait for it there


_APPEND_BYTES = 8192  # of queries in a program: 64 per thread, in pieces of 16
_APPEND_FEW_BYTES = 2048  # one piece per thread
_APPEND_LATENT_TILE = 2048  # columns


def pick_append_config(
    *, tokens: int, heads: int, kv_lora_rank: int, rope: int, itemsize: int, num_sms: int
) -> AppendConfig:
    """Few tokens are spread over many small programs; of many, each program has much in flight."""
    few = tokens * (heads * rope + kv_lora_rank) * itemsize < 4 * num_sms * _APPEND_BYTES
    tile = (_APPEND_FEW_BYTES if few else _APPEND_BYTES) // itemsize
    columns, rank = power_of_two(max(rope, 2)), power_of_two(kv_lora_rank)
    rows = 1 if few else min(max(_APPEND_LATENT_TILE // rank, 1), 4)
    block_heads = min(power_of_two(heads), max(tile // columns, 1))
    return AppendConfig(rows=rows, heads=block_heads, probes=128 if few else 32)


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


TOPK_BLOCK = 16384  # columns whose ranks one program keeps in registers


@dataclass(frozen=True)
class TopkConfig:
    splits: int  # parts of a row that are narrowed down on their own first
    block: int  # columns of a search
    way: str  # "whole": a block holds a part; "narrow": it will; "again": read for every bit
    most_programs: int  # where each has a buffer

    @property
    def step(self) -> int:
        """Columns at a time where they are only read once, by registers that this takes."""
        return min(self.block // 2, 2048)

    @property
    def num_warps(self) -> int:
        """Eight are 30 % faster than sixteen on an H200: two programs then run at once. But where
        SMs are idle, one is to be fast."""
        if self.splits > 1:
            return min(max(self.block // 1024, 4), 16)
        return 4 if self.way == "whole" and self.block <= 4096 else 8

    def programs(self, items: int) -> int:
        """Each takes its items one after the other."""
        return min(items, self.most_programs) if self.way == "narrow" else items


def pick_topk_config(*, rows: int, columns: int, k: int, num_sms: int) -> TopkConfig:
    wanted = min(k, columns)
    # a part is worth it while it halves what it reads, while there are idle SMs, and while one
    # block takes what all parts of a row have found
    kept = max(wanted, 512)
    splits = max(min(num_sms // max(rows, 1), columns // (2 * kept), TOPK_BLOCK // kept), 1)
    longest = max(-(-columns // splits), splits * wanted if splits > 1 else 0, 1)
    if longest <= TOPK_BLOCK:
        way, block = "whole", power_of_two(max(longest, 64))
    elif 2 * wanted <= TOPK_BLOCK:
        way, block = "narrow", max(power_of_two(2 * wanted), TOPK_BLOCK // 2)
    else:
        way, block = "again", TOPK_BLOCK // 4
    return TopkConfig(splits, block, way, most_programs=4 * num_sms)


MERGED_SPLITS = 8  # partials that one program of a merge reads together


@dataclass(frozen=True)
class MergeConfig:
    rows: int  # (token, head) rows of a program
    num_warps: int


def pick_merge_config(*, v_width: int) -> MergeConfig:
    """About 2048 sums a program."""
    columns = power_of_two(v_width)
    rows = min(max(2048 // columns, 1), 64)
    return MergeConfig(rows, num_warps=4 if rows * columns >= 1024 else 1)


@dataclass(frozen=True)
class DecodeMergeConfig:
    rows: int  # of a program at a time
    splits: int  # of each row that it reads together
    num_warps: int


def pick_decode_merge_config(*, v_width: int, expected_splits: int) -> DecodeMergeConfig:
    """Few requests have many splits each: these are then read in parallel."""
    if expected_splits > 4 * MERGED_SPLITS:
        return DecodeMergeConfig(1, 4 * MERGED_SPLITS, num_warps=8)
    if expected_splits > MERGED_SPLITS:
        return DecodeMergeConfig(1, 2 * MERGED_SPLITS, num_warps=4)
    return DecodeMergeConfig(max(1024 // power_of_two(v_width), 1), MERGED_SPLITS, num_warps=4)


@dataclass(frozen=True)
class RowTiles:
    """How the columns of cache rows are cut into powers of two."""

    d_c: int
    d_r: int
    v_width: int
    pieces: int  # of the latent columns
    width: int  # of a piece
    value_pieces: int  # the first ones, which hold values
    rope_width: int  # 0 where no columns are rotated

    @classmethod
    def of(cls, format: str, d_c: int, d_r: int, v_width: int, widest: int = 1024) -> RowTiles:
        """Every 128 columns apart where they have a scale of their own, else up to `widest`."""
        width = min(max(power_of_two(d_c), 16), widest)
        if format == "fp8_block128":
            width = min(width, 128)
        pieces, value_pieces = -(-d_c // width), -(-min(v_width, d_c) // width)
        rope_width = max(power_of_two(d_r), 16) if d_r else 0
        return cls(d_c, d_r, v_width, pieces, width, value_pieces, rope_width)

    @property
    def padded_width(self) -> int:
        return self.pieces * self.width + self.rope_width


@dataclass(frozen=True)
class DecodeConfig:
    block_m: int  # rows (queries × heads of a request) of a program
    block_n: int  # keys at a time
    num_warps: int
    num_stages: int  # tiles of keys in flight
    programs_per_sm: int = 1
    widest: int = 128  # columns of a piece of a row
    is_unchained: bool = False  # scores in another layout than values, see `decode.py`

    @property
    def min_tiles(self) -> int:
        """Key tiles that are worth a CTA."""
        return max(128 // self.block_n, 1)

    def shared_bytes(self, tiles: RowTiles, itemsize: int) -> int:
        """Queries and the keys of every stage; asynchronous dots need one tile more."""
        buffers = self.num_stages - (0 if self.block_m == 64 else 1)
        rows = self.block_m + max(buffers, 1) * self.block_n
        return rows * tiles.padded_width * itemsize


# By falling speed; the first that fits the shared memory is taken. H200, 2026-11-15, bf16: rows in
# pieces of 128 columns instead of one of 512 took 16 heads from 3840 to 4100 GB/s; with 64 rows it
# is the other way round (643 us against 538), and `is_unchained` takes 647 to 535 us.
_DECODE_SMALL = (
    DecodeConfig(16, 64, num_warps=4, num_stages=2, programs_per_sm=2),
    DecodeConfig(16, 32, num_warps=4, num_stages=3),
    DecodeConfig(16, 32, num_warps=4, num_stages=2),
    DecodeConfig(16, 16, num_warps=4, num_stages=1),
)
_DECODE_MEDIUM = (
    DecodeConfig(32, 64, num_warps=8, num_stages=3),
    DecodeConfig(32, 32, num_warps=8, num_stages=3),
    DecodeConfig(32, 32, num_warps=8, num_stages=2),
    *_DECODE_SMALL,
)
# the least rows that asynchronous dots take; on sm_100 they spill registers here
_DECODE_LARGE = {
    90: DecodeConfig(64, 64, num_warps=8, num_stages=2, widest=512, is_unchained=True),
}
# FP8 is converted in registers, which a tile of a 16-bit type does not pass through
_DECODE_BYTES = (
    DecodeConfig(16, 32, num_warps=8, num_stages=3),
    DecodeConfig(16, 16, num_warps=8, num_stages=1),
)
# below sm_89 e4m3 is converted by integer arithmetic, in yet more registers
_DECODE_INTEGERS = {
    "fp8": DecodeConfig(16, 32, num_warps=8, num_stages=2),
    "fp8_token": DecodeConfig(16, 16, num_warps=4, num_stages=1),
    "fp8_block128": DecodeConfig(16, 16, num_warps=4, num_stages=1),
    "fp8_block64": DecodeConfig(16, 16, num_warps=8, num_stages=1),
}
# without tensor cores a tile lives in registers
_DECODE_FLOAT = (DecodeConfig(16, 16, num_warps=4, num_stages=1),)


def pick_decode_config(
    tiles: RowTiles,
    *,
    rows: int,
    page_size: int,
    format: str,
    itemsize: int,
    arch: int,
    shared_bytes: int,
) -> DecodeConfig:
    """`rows` of a request, as far as they are known; `itemsize` of what is multiplied."""
    if itemsize == 4:
        choices: tuple[DecodeConfig, ...] = _DECODE_FLOAT
    elif format.startswith("fp8"):
        choices = _DECODE_BYTES if arch >= 89 else (_DECODE_INTEGERS[format],)
    else:
        choices = _DECODE_MEDIUM if rows > 16 else _DECODE_SMALL
        if rows > 32 and arch in _DECODE_LARGE:
            choices = (_DECODE_LARGE[arch], *choices)
        # every key of a tile has its own page then, and its own pointer
        if page_size % 64:
            choices = tuple(c for c in choices if c.block_n <= 32 and c.num_stages < 3)
    fitting = (c for c in choices if c.shared_bytes(tiles, itemsize) <= shared_bytes - 2048)
    return next(fitting, choices[-1])


@dataclass(frozen=True)
class SparseConfig:
    block_h: int  # heads of a program
    block_n: int  # listed rows at a time
    num_warps: int
    num_stages: int  # tiles of rows in flight

    def shared_bytes(self, tiles: RowTiles, itemsize: int) -> int:
        """Queries, and the rows of every stage."""
        rows = self.block_h + max(self.num_stages - 1, 1) * self.block_n
        return rows * tiles.padded_width * itemsize


# by tile of heads and falling speed; the first that fits the shared memory is taken
_SPARSE_HALF = {
    16: (
        SparseConfig(16, 64, num_warps=4, num_stages=3),
        SparseConfig(16, 32, num_warps=4, num_stages=3),
        SparseConfig(16, 32, num_warps=4, num_stages=2),
        SparseConfig(16, 16, num_warps=4, num_stages=1),
    ),
    32: (
        SparseConfig(32, 32, num_warps=8, num_stages=3),
        SparseConfig(32, 32, num_warps=8, num_stages=2),
        SparseConfig(16, 16, num_warps=4, num_stages=1),
    ),
    64: (
        SparseConfig(64, 16, num_warps=8, num_stages=3),
        SparseConfig(32, 32, num_warps=8, num_stages=2),
        SparseConfig(16, 16, num_warps=4, num_stages=1),
    ),
}
# bytes become halves in registers: that leaves room for fewer rows
_SPARSE_BYTES = {
    16: (
        SparseConfig(16, 32, num_warps=8, num_stages=2),
        SparseConfig(16, 16, num_warps=4, num_stages=1),
    ),
    32: (
        SparseConfig(32, 16, num_warps=8, num_stages=2),
        SparseConfig(16, 16, num_warps=4, num_stages=1),
    ),
}
# below sm_89 e4m3 is converted by integer arithmetic, in yet more registers
_SPARSE_INTEGERS = (SparseConfig(16, 16, num_warps=8, num_stages=1),)
# without tensor cores a tile lives in registers
_SPARSE_FLOAT = (SparseConfig(16, 16, num_warps=8, num_stages=1),)


def pick_sparse_config(
    tiles: RowTiles, *, heads: int, itemsize: int, is_bytes: bool, arch: int, shared_bytes: int
) -> SparseConfig:
    """`itemsize` of what is multiplied; `is_bytes`: rows are stored in e4m3."""
    # sums over 64 heads leave registers free only where products are read from shared memory, and
    # not for rows that are converted
    most = 64 if arch // 10 in (9, 10) and not is_bytes else 32
    block_h = min(max(power_of_two(heads), 16), most)
    choices = _SPARSE_BYTES[block_h] if is_bytes else _SPARSE_HALF[block_h]
    if itemsize == 4:
        choices = _SPARSE_FLOAT
    elif is_bytes and arch < 89 and block_h == 32:
        choices = _SPARSE_INTEGERS
    for config in choices:
        if config.shared_bytes(tiles, itemsize) <= shared_bytes - 8192:
            return config
    return choices[-1]


MOST_SPARSE_PARTS = 32
SPARSE_SCRATCH_BYTES = 256 * 2**20


def pick_sparse_splits(
    *, wanted: int | None, rows: int, head_tiles: int, list_tiles: int, num_sms: int, row_bytes: int
) -> int:
    """In how many parts lists are attended.

    rows        tokens · heads, of which each part has a partial of `row_bytes`
    head_tiles  of all tokens together: programs there are without a split
    list_tiles  of the longest list; a part of less than two is not worth a merge
    """
    parts = wanted or min(num_sms // max(head_tiles, 1), list_tiles // 2, MOST_SPARSE_PARTS)
    return max(min(parts, list_tiles, SPARSE_SCRATCH_BYTES // (rows * row_bytes)), 1)


@dataclass(frozen=True)
class IndexerConfig:
    queries: int  # of one request, scored together
    heads: int  # at a time, a power of two of at least 16
    keys: int  # at a time
    tiles: int  # of keys that a program looks at, one after the other
    num_warps: int
    num_stages: int

    def shared_bytes(self, heads: int, padded_width: int, itemsize: int) -> int:
        """Queries, and the keys of every stage; of several blocks of heads the queries as well."""
        rows = self.queries * self.heads
        blocks = -(-heads // self.heads)
        if blocks > 1 and self.num_stages > 1:
            rows *= blocks * self.num_stages
        return (rows + self.num_stages * self.keys) * padded_width * itemsize


def pick_indexer_config(
    *,
    heads: int,
    padded_width: int,
    itemsize: int,
    mean_queries: float,
    arch: int,
    shared_bytes: int,
) -> IndexerConfig:
    """`mean_queries` of a request; one query at a time unless most tiles of them are full."""
    if itemsize == 4:  # without tensor cores a tile lives in registers
        return IndexerConfig(1, 16, keys=16, tiles=16, num_warps=8, num_stages=1)
    block = min(max(power_of_two(heads), 16), 64)
    together = max(128 // block, 1) if mean_queries >= 2 * (128 // block) else 1
    # a tile of products, the keys widened and blocks of queries share the registers
    warps = 8 if together > 1 or heads > block or padded_width > 128 else 4
    widest = 128 if arch in (90, 100) else 64
    for queries, keys, stages in (
        (together, widest, 3),
        (together, 64, 3),
        (together, 64, 2),
        (1, 64, 2),
        (1, 64, 1),
        (1, 32, 1),
    ):
        config = IndexerConfig(queries, block, keys, 8, warps, stages)
        if config.shared_bytes(heads, padded_width, itemsize) <= shared_bytes - 8192:
            return config
    return IndexerConfig(1, 16, keys=16, tiles=16, num_warps=4, num_stages=1)
