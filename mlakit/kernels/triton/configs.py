"""Tile sizes, warps and stages of the portable kernels: frozen configs and pure pickers.

Sizes are in elements unless a name ends in `_bytes`. A change is checked by `mlakit support
--compile` (shared memory, spills).
"""

from __future__ import annotations

from dataclasses import dataclass

from mlakit.dispatch.architectures import has_fp8
from mlakit.formats import FormatTraits


@dataclass(frozen=True)
class PrefillConfig:
    block_q: int  # queries per program
    block_k: int  # keys per iteration
    num_warps: int
    num_stages: int  # key tiles in flight
    block_masked: int  # keys per iteration where the mask hides some of them from some queries
    head_group: int = 8  # heads whose programs run at the same time

    def shared_bytes(self, qk_width: int, v_width: int, itemsize: int, keeps_queries: bool) -> int:
        """Keys and values of every stage; also queries, unless they stay in registers."""
        queries = itemsize * self.block_q * qk_width
        tiles = itemsize * self.num_stages * self.block_k * (qk_width + v_width)
        return tiles + queries if keeps_queries else max(tiles, queries) + 8192


_MIN_QUERY_TILE = 16
# descending size; the first that fits is taken
_PREFILL_16BIT = (
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
# float32 has no tensor cores: tiles stay in registers
_PREFILL_FP32 = (
    PrefillConfig(16, 32, 8, 1, 32),
    PrefillConfig(16, 16, 8, 1, 16),
)
# e4m3 is converted to bf16 in registers: sm_90 spills some with 64 queries
_PREFILL_FP8 = (
    PrefillConfig(32, 32, 4, 2, 16),
    PrefillConfig(16, 32, 4, 2, 16),
    PrefillConfig(16, 16, 4, 1, 16),
)
_PREFILL = {1: _PREFILL_FP8, 2: _PREFILL_16BIT, 4: _PREFILL_FP32}


def pick_prefill_config(
    *, qk_width: int, v_width: int, itemsize: int, mean_queries: float, arch: int, shared_bytes: int
) -> PrefillConfig:
    """Pick a config for padded widths. A query tile is less than twice as large as `mean_queries`,
    the queries per request."""
    # tensor cores of sm_90 and sm_100 read operands from shared memory; elsewhere q and key tiles
    # also need registers. sm_90 has room for twice as many accumulators without a spill.
    keeps_queries = arch // 10 in (9, 10)
    acc_per_warp = 4096 if arch // 10 == 9 else 2048
    choices = [
        config
        for config in _PREFILL[itemsize]
        if config.block_q == _MIN_QUERY_TILE
        or (
            config.block_q < 2 * mean_queries
            and config.block_q * v_width <= config.num_warps * acc_per_warp
            and (arch // 10 == 9 or config.block_k <= 64)
        )
    ]
    for config in choices:
        needed = config.shared_bytes(qk_width, v_width, max(itemsize, 2), keeps_queries)
        if needed <= shared_bytes - 1024:
            return config
    return choices[-1]


QUANTIZE_TILE = 4096  # elements per program


@dataclass(frozen=True)
class QuantizeConfig:
    rows: int  # per program, of one group of columns
    columns: int  # of a group, per iteration
    num_warps: int


def pick_quantize_config(*, rows: int, group: int) -> QuantizeConfig:
    """A wider group than a tile is read twice, the second time from L2."""
    columns = min(power_of_two(group), QUANTIZE_TILE)
    tile = min(max(QUANTIZE_TILE // columns, 1), 32, power_of_two(rows))
    return QuantizeConfig(tile, columns, num_warps=4 if tile * columns > 1024 else 1)


@dataclass(frozen=True)
class MatmulConfig:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8  # row tiles whose programs run at the same time

    def shared_bytes(self, itemsize: int) -> int:
        """Tiles of both operands of every stage."""
        return self.num_stages * (self.block_m + self.block_n) * self.block_k * itemsize


FOUR_STAGES_BYTES = 128 * 1024  # of shared memory: with more, a matmul has four stages


def pick_scaled_matmul_config(
    *, rows: int, columns: int, k_group: int, shared_bytes: int
) -> MatmulConfig:
    """A step of K stays within one group of scales. Tiles are small: operands are converted to a
    16-bit type in registers."""
    block_k = min(max(power_of_two(k_group), 32), 64)
    block_m = min(max(power_of_two(rows), 16), 64)
    block_n = min(max(power_of_two(columns), 16), 128 if rows > 64 else 64)
    stages = 4 if shared_bytes > FOUR_STAGES_BYTES else 3
    return MatmulConfig(block_m, block_n, block_k, 8 if block_m * block_n > 4096 else 4, stages)


def pick_matmul_config(
    *, rows: int, columns: int, depth: int, itemsize: int, shared_bytes: int
) -> MatmulConfig:
    if itemsize == 4:  # float32 has no tensor cores: tiles stay in registers
        return MatmulConfig(32, 32, 32, num_warps=4, num_stages=2)
    block_m = min(max(power_of_two(rows), 16), 128)
    block_n = min(max(power_of_two(columns), 16), 128)
    block_k = min(max(power_of_two(depth), 16), 64)
    stages = 4 if shared_bytes > FOUR_STAGES_BYTES else 3
    if 2 * stages * (block_m + block_n) * block_k > shared_bytes:
        stages = 2
    return MatmulConfig(block_m, block_n, block_k, 8 if block_m * block_n > 8192 else 4, stages)


@dataclass(frozen=True)
class AppendConfig:
    rows: int  # tokens whose cache rows one program writes
    heads: int  # heads of a token whose queries one program rotates
    probes: int  # requests per iteration of the search for a token's request
    num_warps: int = 4
    pdl: bool = False  # programmatic dependent launch


_APPEND_TILE_BYTES = 8192  # queries of a program: 64 bytes per thread, in loads of 16
_APPEND_SMALL_TILE_BYTES = 2048  # one load of 16 bytes per thread
_APPEND_SMALL_TILES_PER_SM = 4  # with less work than this many full tiles, tiles are small
_APPEND_LATENT_TILE = 2048  # columns


def pick_append_config(
    *, tokens: int, heads: int, kv_lora_rank: int, rope: int, itemsize: int, num_sms: int
) -> AppendConfig:
    """Pick many small programs for few tokens, and many bytes in flight per program for many."""
    small_work_bytes = _APPEND_SMALL_TILES_PER_SM * num_sms * _APPEND_TILE_BYTES
    is_small = tokens * (heads * rope + kv_lora_rank) * itemsize < small_work_bytes
    tile = (_APPEND_SMALL_TILE_BYTES if is_small else _APPEND_TILE_BYTES) // itemsize
    columns, rank = power_of_two(max(rope, 2)), power_of_two(kv_lora_rank)
    rows = 1 if is_small else min(max(_APPEND_LATENT_TILE // rank, 1), 4)
    block_heads = min(power_of_two(heads), max(tile // columns, 1))
    return AppendConfig(rows=rows, heads=block_heads, probes=128 if is_small else 32, pdl=is_small)


@dataclass(frozen=True)
class CompressConfig:
    tokens: int  # of a program
    block: int  # tokens of a window that are loaded together
    state_columns: int  # of a tile of states
    probes: int  # requests per iteration of the search for a token's request
    num_warps: int


_COMPRESS_PROGRAMS_PER_SM = 4  # with fewer, each has fewer tokens
_COMPRESS_BLOCK = 8  # a whole window of DeepSeek-V4 with overlap
_COMPRESS_STATE_TILE = 4096  # elements


def pick_compress_config(*, tokens: int, rate: int, columns: int, num_sms: int) -> CompressConfig:
    """Pick one program per token in decode, and one per window, about, in a long prefill."""
    share = max(tokens // (_COMPRESS_PROGRAMS_PER_SM * num_sms), 1)
    each = min(power_of_two(rate), 1 << (share.bit_length() - 1), 128)
    tile = min(power_of_two(columns), max(_COMPRESS_STATE_TILE // each, 1))
    return CompressConfig(each, _COMPRESS_BLOCK, tile, probes=32, num_warps=8)


PHYSICAL_ROWS_BLOCK = 1024  # entries of a list per program
PHYSICAL_ROWS_PROBES = 128  # requests per iteration of the search for a query's request


def power_of_two(n: int) -> int:
    """The smallest power of two ≥ n."""
    return 1 << (n - 1).bit_length()


TOPK_BLOCK = 16384  # columns whose ranks one program keeps in registers
TOPK_WHOLE = 8192  # columns of a row that is not worth narrowing down
TOPK_SPLIT = 4096  # columns of a split of a row, at least
TOPK_SPLITS_PER_SM = 2
TOPK_WARPS_PER_SM = 16  # of 128 registers per thread


@dataclass(frozen=True)
class TopkConfig:
    splits: int  # of a row, each of which is narrowed down on its own
    block: int  # candidates of a buffer, or columns of a search
    method: str  # "whole", "narrow" or "reread", see `indexer_topk.py`
    max_programs: int  # of "narrow", where each has a buffer
    step: int  # columns per iteration
    sample: int  # columns that estimate the k-th best logit; of long rows several times as many
    num_warps: int

    def programs(self, rows: int) -> int:
        """Programs for `rows` rows; without splits, each takes its rows one after the other."""
        if self.splits > 1 or self.method != "narrow":
            return rows * self.splits
        return min(rows, self.max_programs)


def pick_topk_config(*, rows: int, columns: int, k: int, num_sms: int) -> TopkConfig:
    wanted = min(k, columns)
    if columns <= TOPK_WHOLE or (4 * wanted > columns and columns <= TOPK_BLOCK):
        block = power_of_two(max(columns, 64))
        return TopkConfig(1, block, "whole", 0, block, 0, num_warps=max(block // 1024, 1))
    if 2 * wanted > TOPK_BLOCK:
        return TopkConfig(1, 4096, "reread", 0, 4096, 0, 8)
    block = min(max(2 * power_of_two(wanted + wanted // 4), 4096), TOPK_BLOCK)
    splits = max(min(TOPK_SPLITS_PER_SM * num_sms // max(rows, 1), columns // TOPK_SPLIT), 1)
    warps = max(block // 2048, 4)
    return TopkConfig(
        splits,
        block,
        "narrow",
        max_programs=TOPK_WARPS_PER_SM // warps * num_sms,
        step=1024,
        sample=min(max(power_of_two(columns) // 16, 1024), 512 * warps),
        num_warps=warps,
    )


MERGED_SPLITS = 8  # partials that a merge program reads at the same time


MERGE_TILE = 2048  # accumulators per program


@dataclass(frozen=True)
class MergeConfig:
    rows: int  # (token, head) rows per program
    num_warps: int


def pick_merge_config(*, v_width: int) -> MergeConfig:
    columns = power_of_two(v_width)
    rows = min(max(MERGE_TILE // columns, 1), 64)
    return MergeConfig(rows, num_warps=4 if rows * columns >= 1024 else 1)


@dataclass(frozen=True)
class DecodeMergeConfig:
    rows: int  # per program and iteration
    splits: int  # of each row, read at the same time
    num_warps: int


def pick_decode_merge_config(*, v_width: int, expected_splits: int) -> DecodeMergeConfig:
    """Pick how many splits are read at once: more with few requests, which have many splits."""
    if expected_splits > 4 * MERGED_SPLITS:
        return DecodeMergeConfig(1, 4 * MERGED_SPLITS, num_warps=8)
    if expected_splits > MERGED_SPLITS:
        return DecodeMergeConfig(1, 2 * MERGED_SPLITS, num_warps=4)
    return DecodeMergeConfig(max(1024 // power_of_two(v_width), 1), MERGED_SPLITS, num_warps=4)


@dataclass(frozen=True)
class RowTiles:
    """The split of a cache row's columns into tiles whose widths are powers of two."""

    d_c: int
    d_r: int
    v_width: int
    pieces: int  # column tiles of the latent
    width: int  # columns of a piece
    value_pieces: int  # the first pieces, which hold values
    rope_width: int  # d_r padded; 0 where no columns are rotated

    @classmethod
    def of(cls, d_c: int, d_r: int, v_width: int, widest: int = 1024) -> RowTiles:
        """Pieces of at most `widest` columns."""
        width = min(max(power_of_two(d_c), 16), widest)
        pieces, value_pieces = -(-d_c // width), -(-min(v_width, d_c) // width)
        rope_width = max(power_of_two(d_r), 16) if d_r else 0
        return cls(d_c, d_r, v_width, pieces, width, value_pieces, rope_width)

    @property
    def padded_width(self) -> int:
        return self.pieces * self.width + self.rope_width


MIN_KEYS_PER_CTA = 128


@dataclass(frozen=True)
class DecodeConfig:
    block_m: int  # heads per row tile
    block_n: int  # keys per iteration
    num_warps: int
    num_stages: int  # key tiles in flight
    programs_per_sm: int = 1
    widest: int = 128  # columns of a piece of a row
    is_unchained: bool = False  # P in another layout than the scores, see `decode_kernel.py`

    @property
    def min_tiles(self) -> int:
        """Key tiles that are worth a CTA."""
        return max(MIN_KEYS_PER_CTA // self.block_n, 1)

    def shared_bytes(self, tiles: RowTiles, itemsize: int) -> int:
        """Queries and the keys of every stage; asynchronous dots (64 rows) need one more tile."""
        buffers = self.num_stages - (0 if self.block_m == 64 else 1)
        rows = self.block_m + max(buffers, 1) * self.block_n
        return rows * tiles.padded_width * itemsize


# Descending speed; the first that fits shared memory is taken. H200, 2026-11-15, bf16: with 16
# heads pieces of 128 columns reach 4100 GB/s, one piece of 512 columns 3840 GB/s. With 64 heads one
# piece is faster (538 us, not 643 us), and so is `is_unchained` (535 us, not 647 us).
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
# 64 rows are the minimum of asynchronous dots; on sm_100 this config spills registers
_DECODE_LARGE = {
    90: DecodeConfig(64, 64, num_warps=8, num_stages=2, widest=512, is_unchained=True),
}
# FP8 is converted in registers; 16-bit tiles go from shared memory to the tensor cores
_DECODE_FP8 = (
    DecodeConfig(16, 32, num_warps=8, num_stages=3),
    DecodeConfig(16, 16, num_warps=8, num_stages=1),
)
# the accumulators of many narrow pieces (fp8_group32) take more registers than those of wide ones
_DECODE_FP8_MANY_PIECES = (DecodeConfig(16, 16, num_warps=8, num_stages=2),)
MANY_PIECES = 16
# below sm_89 and on AMD's e4m3 is converted by integer arithmetic, which takes more registers
_DECODE_FP8_SM80_TENSOR_SCALE = DecodeConfig(16, 32, num_warps=8, num_stages=2)
_DECODE_FP8_SM80_E8M0_SCALES = DecodeConfig(16, 16, num_warps=8, num_stages=1)
_DECODE_FP8_SM80 = DecodeConfig(16, 16, num_warps=4, num_stages=1)
# float32 has no tensor cores: tiles stay in registers
_DECODE_FP32 = (DecodeConfig(16, 16, num_warps=4, num_stages=1),)


def _decode_fp8_sm80(format: FormatTraits) -> DecodeConfig:
    if format.SCALED_BY == "tensor":
        return _DECODE_FP8_SM80_TENSOR_SCALE
    return _DECODE_FP8_SM80_E8M0_SCALES if format.HAS_E8M0_SCALES else _DECODE_FP8_SM80


def pick_decode_config(
    tiles: RowTiles,
    *,
    rows: int,
    page_size: int,
    format: FormatTraits,
    itemsize: int,
    arch: int,
    shared_bytes: int,
) -> DecodeConfig:
    """Pick a config for `rows` heads of a query and operands of `itemsize` bytes."""
    if itemsize == 4:
        choices: tuple[DecodeConfig, ...] = _DECODE_FP32
    elif format.IS_E4M3 or format.IS_E2M1:
        choices = _DECODE_FP8_MANY_PIECES if tiles.pieces > MANY_PIECES else _DECODE_FP8
        if not has_fp8(arch):
            choices = (_decode_fp8_sm80(format),)
    else:
        choices = _DECODE_MEDIUM if rows > 16 else _DECODE_SMALL
        if rows > 32 and arch in _DECODE_LARGE:
            choices = (_DECODE_LARGE[arch], *choices)
        # each key of a tile may be in another page: one pointer per key takes registers
        if page_size % 64:
            choices = tuple(c for c in choices if c.block_n <= 32 and c.num_stages < 3)
    fitting = (c for c in choices if c.shared_bytes(tiles, itemsize) <= shared_bytes - 2048)
    return next(fitting, choices[-1])


@dataclass(frozen=True)
class SparseConfig:
    block_h: int  # heads per program
    block_n: int  # listed rows per iteration
    num_warps: int
    num_stages: int  # row tiles in flight
    is_unchained: bool = False  # as in DecodeConfig

    def shared_bytes(self, tiles: RowTiles, itemsize: int) -> int:
        """Queries and the rows of every stage."""
        rows = self.block_h + max(self.num_stages - 1, 1) * self.block_n
        return rows * tiles.padded_width * itemsize


# By head tile, in descending speed; the first that fits shared memory is taken. H200, 2026-11-16,
# heads x keys. Prefill of 32 heads over bf16 rows: 64 x 64, half empty, 1.88 ms, 32 x 64 1.95 ms,
# 32 x 32 3.08 ms. 128 heads without asynchronous dots, as on most other architectures: 32 x 64
# 2.06 ms, 64 x 32 2.48 ms, 32 x 32 3.03 ms; over FP8 rows 32 x 32 2.30 ms, 32 x 16 3.80 ms.
_SPARSE_SM90 = SparseConfig(64, 64, num_warps=8, num_stages=2, is_unchained=True)
_SPARSE_16BIT = {
    16: (
        SparseConfig(16, 64, num_warps=4, num_stages=3),
        SparseConfig(16, 32, num_warps=4, num_stages=3),
        SparseConfig(16, 32, num_warps=4, num_stages=2),
        SparseConfig(16, 16, num_warps=4, num_stages=1),
    ),
    32: (
        SparseConfig(32, 64, num_warps=8, num_stages=3),
        SparseConfig(32, 64, num_warps=8, num_stages=2),
        SparseConfig(32, 32, num_warps=8, num_stages=2),
        SparseConfig(16, 16, num_warps=4, num_stages=1),
    ),
}
_SPARSE_16BIT_SM100 = SparseConfig(64, 32, num_warps=8, num_stages=2)
# FP8 is converted in registers, which leaves room for fewer rows
_SPARSE_FP8 = {
    16: (
        SparseConfig(16, 32, num_warps=8, num_stages=2),
        SparseConfig(16, 16, num_warps=4, num_stages=1),
    ),
    32: (
        SparseConfig(32, 16, num_warps=8, num_stages=2),
        SparseConfig(16, 16, num_warps=4, num_stages=1),
    ),
}
# spills registers with two lists, and on sm_100 and sm_120
_SPARSE_FP8_SM89_ONE_LIST = SparseConfig(32, 32, num_warps=8, num_stages=2)
# below sm_89 and on AMD's e4m3 is converted by integer arithmetic, which takes more registers
_SPARSE_FP8_SM80 = SparseConfig(16, 16, num_warps=8, num_stages=1)
_SPARSE_FP8_SM80_ONE_LIST = SparseConfig(32, 16, num_warps=8, num_stages=2)
# float32 has no tensor cores: tiles stay in registers
_SPARSE_FP32 = (SparseConfig(16, 16, num_warps=8, num_stages=1),)


def pick_sparse_config(
    tiles: RowTiles,
    *,
    heads: int,
    itemsize: int,
    is_fp8: bool,
    has_extra: bool,
    arch: int,
    shared_bytes: int,
) -> SparseConfig:
    """Pick a config for operands of `itemsize` bytes. If `is_fp8` some rows are stored as e4m3; if
    `has_extra` a token has a second list."""
    block_h = min(max(power_of_two(heads), 16), 32)
    choices: tuple[SparseConfig, ...] = (_SPARSE_FP8 if is_fp8 else _SPARSE_16BIT)[block_h]
    if itemsize == 4:
        choices = _SPARSE_FP32
    elif arch == 90 and (is_fp8 or heads > 16):
        choices = (_SPARSE_SM90, *choices)
    elif arch // 10 == 10 and heads > 32 and not is_fp8:
        choices = (_SPARSE_16BIT_SM100, *choices)
    elif is_fp8 and block_h == 32 and not has_fp8(arch):
        choices = (_SPARSE_FP8_SM80 if has_extra else _SPARSE_FP8_SM80_ONE_LIST,)
    elif is_fp8 and block_h == 32 and arch == 89 and not has_extra:
        choices = (_SPARSE_FP8_SM89_ONE_LIST, *choices)
    for config in choices:
        if config.shared_bytes(tiles, itemsize) <= shared_bytes - 8192:
            return config
    return choices[-1]


MAX_SPARSE_SPLITS = 32
MIN_SPARSE_TILES_PER_SPLIT = 2  # list tiles: fewer are not worth a merge
# costs of a program besides its list tiles, in list tiles
SPARSE_PROGRAM_TILES = 2  # load queries, store results
SPARSE_PARTIAL_TILES = 2  # store float32 partials instead, load and merge them
SPARSE_SCRATCH_BYTES = 256 * 2**20


def pick_sparse_splits(
    *, wanted: int | None, rows: int, head_tiles: int, list_tiles: int, num_sms: int, row_bytes: int
) -> int:
    """The number of splits of each token's lists.

    wanted      by the caller, or None
    rows        tokens · heads; a split has a partial of `row_bytes` for each
    head_tiles  of all tokens: the number of programs without splits
    list_tiles  of the longest list
    """
    most = min(list_tiles // MIN_SPARSE_TILES_PER_SPLIT, MAX_SPARSE_SPLITS)

    def list_tiles_in_sequence(splits: int) -> int:
        """Return the list tiles of the busiest SM, with its other costs in the same unit."""
        waves = -(-head_tiles * splits // num_sms)
        tiles = -(-list_tiles // splits) + SPARSE_PROGRAM_TILES
        return waves * (tiles + (SPARSE_PARTIAL_TILES if splits > 1 else 0))

    splits = wanted or min(range(1, max(most, 1) + 1), key=list_tiles_in_sequence)
    return max(min(splits, list_tiles, SPARSE_SCRATCH_BYTES // (rows * row_bytes)), 1)
