"""Work tiles of the sparse kernels, and the lists of rows that they attend to.

A work tile is 64 heads of one token over a split of its lists. A persistent CTA computes the tiles
program_id(0), program_id(0) + num_programs(0), …; head tiles of a token are neighbours, for they
gather the same rows. A list is a sequence of blocks of 64 entries. With a second cache the blocks
of its list follow those of the first; a block has entries of one list only.

Only the producer looks at lists. It passes the number of block pairs of a tile to the consumers
(`seesaw`), which hence need no list.

Shared by all sparse kernels: everything here. A producer calls `block_range` once per tile, and for
each block `load_ids` a pair ahead, `valid_slots`, and `row_pointers` (or `split_slots`, for rows
whose scales lie elsewhere). Rotated columns in a tensor of their own are at `rope_pointers`.

Lineage    own design; ideas: FlashMLA's sparse prefill
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlakit.kernels.hopper.device.compat import record


@record
class RopeRows:
    """The rotated columns of a cache that has them in a tensor of their own."""

    payload: object
    page_chunks: object
    row_chunks: object
    PAGE: object


@record
class RowList:
    """A cache, and the lists of its rows that tokens attend to."""

    payload: object  # pointer to the cache's first row
    rows: object  # [tokens, topk] ids
    lens: object  # [tokens], or None
    num_slots: object  # rows of the cache
    topk: object
    page_chunks: object  # chunks of 16 bytes from a page to the next
    row_chunks: object  # chunks of 16 bytes from a row of a page to the next
    stride_token: object
    stride_entry: object
    stride_lens: object
    PAGE: object  # rows of a page, 0 where pages have no gap between them
    rope: object  # RopeRows; None where rows have all columns


@record
class Work:
    """The lists of all tokens, and how their work is split."""

    main: object  # RowList
    extra: object  # RowList of the second cache; None where HAS_EXTRA is False
    HAS_EXTRA: object
    num_splits: object
    head_tiles: object  # work tiles of a token and split
    num_tiles: object


@gluon.jit
def _row_list(
    arguments, lens, topk, stride_token, stride_lens, ROW_CHUNKS: gl.constexpr, PAGE: gl.constexpr
):
    """Make a RowList; ROW_CHUNKS is row_chunks, or 0 where it is not known when compiled."""
    rope: gl.constexpr = None
    if arguments.rope is not None:
        rope = RopeRows(*arguments.rope, PAGE)
    return RowList(
        payload=arguments.payload,
        rows=arguments.rows,
        lens=lens,
        num_slots=arguments.num_slots,
        topk=topk,
        page_chunks=arguments.page_chunks,
        row_chunks=arguments.row_chunks if ROW_CHUNKS == 0 else ROW_CHUNKS,
        stride_token=stride_token,
        stride_entry=arguments.stride_entry,
        stride_lens=stride_lens,
        PAGE=PAGE,
        rope=rope,
    )


@gluon.jit
def make_work(main, extra, num_splits, head_tiles, num_tiles, TRAITS: gl.constexpr):
    """Make a Work; `main` and `extra` are tuples: `arguments.ListArguments`, and what is single."""
    main_list = _row_list(*main, TRAITS.ROW_CHUNKS, TRAITS.PAGE)
    extra_list: gl.constexpr = None
    if TRAITS.HAS_EXTRA:
        extra_list = _row_list(*extra, TRAITS.EXTRA_ROW_CHUNKS, TRAITS.EXTRA_PAGE)
    return Work(
        main=main_list,
        extra=extra_list,
        HAS_EXTRA=TRAITS.HAS_EXTRA,
        num_splits=num_splits,
        head_tiles=head_tiles,
        num_tiles=num_tiles,
    )


@record
class WorkTile:
    """The position of a work tile's results."""

    row: object  # split · tokens + token, int64
    token: object
    first_head: object
    slot: object  # −1: `decode.epilogue.finish_rows` adds the sink if there is one


@record
class BlockRange:
    """The blocks [first, end) of a work tile, in the sequence of blocks of its token's lists."""

    token: object
    first: object
    end: object
    length: object  # entries of the first list that may be valid
    extra_length: object
    main_blocks: object  # blocks of the first list


@gluon.jit
def locate_tile(work, tokens, tile, HEADS: gl.constexpr = 64):
    """Locate the results of a work tile; `tokens` is the number of tokens of the call."""
    token = tile // work.head_tiles // work.num_splits
    split = tile // work.head_tiles % work.num_splits
    row = split.to(gl.int64) * tokens + token
    return WorkTile(row, token, tile % work.head_tiles * HEADS, -1)


# 128 entries, the same in every warp of a producer: reductions need no shared memory
_SCANNED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[32], [64]],
        lane_bases=[[1], [2], [4], [8], [16]],
        warp_bases=[[0], [0]],
        block_bases=[],
        shape=[128],
    )
)


@gluon.jit
def _list_length(rows, token, is_tile, IS_SCANNED: gl.constexpr):
    """Entries of a token's list; up to the last valid one if the list is scanned.

    Callers pad lists with invalid ids: blocks of nothing else are skipped at the end of a list.
    """
    length = gl.where(is_tile, rows.topk, 0)
    if rows.lens is not None:
        at = rows.lens + token.to(gl.int64) * rows.stride_lens
        token_length = gl.load(at, mask=is_tile, other=0)
        length = gl.minimum(token_length, length).to(gl.int32)
    if IS_SCANNED:
        row = rows.rows + token.to(gl.int64) * rows.stride_token
        is_found = length <= 0
        while not is_found:
            first = (length - 1) // 128 * 128
            entry = first + gl.arange(0, 128, _SCANNED)
            offset = entry.to(gl.int64) * rows.stride_entry
            slot = gl.load(row + offset, mask=entry < length, other=-1)
            is_valid = (slot >= 0) & (slot < rows.num_slots)
            last = gl.max(gl.where(is_valid, entry + 1, 0), 0)
            length = gl.where(last > 0, last, first)
            is_found = (last > 0) | (first == 0)
    return gl.maximum(length, 0)


@gluon.jit
def block_range(work, tile, IS_SCANNED: gl.constexpr = True):
    """The blocks of a work tile; none past the last tile.

    IS_SCANNED  False: of lists that are not padded, which is known without a look at them
    """
    is_tile = tile < work.num_tiles
    token = tile // work.head_tiles // work.num_splits
    split = tile // work.head_tiles % work.num_splits
    length = _list_length(work.main, token, is_tile, IS_SCANNED)
    main_blocks = (length + 63) // 64
    num_blocks = main_blocks
    extra_length = length
    if work.HAS_EXTRA:
        extra_length = _list_length(work.extra, token, is_tile, IS_SCANNED)
        num_blocks += (extra_length + 63) // 64
    # whole pairs, as the consumers take them
    split_pairs = ((num_blocks + 1) // 2 + work.num_splits - 1) // work.num_splits
    first = 2 * split_pairs * split
    end = gl.minimum(first + 2 * split_pairs, num_blocks)
    return BlockRange(
        token=token,
        first=first,
        end=end,
        length=length,
        extra_length=extra_length,
        main_blocks=main_blocks,
    )


@gluon.jit
def choose_blocks(is_first, first, second):
    """Choose one of two ranges; at a branch around `load_ids` the producer might wait."""
    return BlockRange(
        token=gl.where(is_first, first.token, second.token),
        first=gl.where(is_first, first.first, second.first),
        end=gl.where(is_first, first.end, second.end),
        length=gl.where(is_first, first.length, second.length),
        extra_length=gl.where(is_first, first.extra_length, second.extra_length),
        main_blocks=gl.where(is_first, first.main_blocks, second.main_blocks),
    )


@gluon.jit
def num_pairs(blocks):
    """Return the pairs of blocks; at least 1, for consumers write the results of empty tiles."""
    return gl.maximum((blocks.end - blocks.first + 1) // 2, 1)


@gluon.jit
def load_ids(work, blocks, block, LAYOUT: gl.constexpr):
    """The row ids of a block as the list has them, [64]; −1 past the end of the list.

    Nothing is computed from them here: a producer loads them a pair ahead of their use, and would
    wait for the load.
    """
    rows, length = work.main.rows, blocks.length
    stride_token, stride_entry = work.main.stride_token, work.main.stride_entry
    first = block * 64
    if work.HAS_EXTRA:
        is_extra = block >= blocks.main_blocks
        rows = gl.where(is_extra, work.extra.rows, rows)
        length = gl.where(is_extra, blocks.extra_length, length)
        stride_token = gl.where(is_extra, work.extra.stride_token, stride_token)
        stride_entry = gl.where(is_extra, work.extra.stride_entry, stride_entry)
        first = gl.where(is_extra, (block - blocks.main_blocks) * 64, first)
    entry = first + gl.arange(0, 64, LAYOUT)
    row = rows + blocks.token.to(gl.int64) * stride_token
    at = row + entry.to(gl.int64) * stride_entry
    return gl.load(at, mask=entry < gl.where(block < blocks.end, length, 0), other=-1)


@gluon.jit
def valid_slots(work, blocks, block, ids):
    """The ids of a block as int32; −1 where an entry is invalid."""
    num_slots = work.main.num_slots
    if work.HAS_EXTRA:
        num_slots = gl.where(block >= blocks.main_blocks, work.extra.num_slots, num_slots)
    return gl.where((ids >= 0) & (ids < num_slots), ids, -1).to(gl.int32)


@gluon.jit
def split_slots(rows, slot):
    """Return int64 (page, row in the page) of valid slots; page 0, row 0 of invalid ones."""
    slot = gl.maximum(slot, 0)
    PAGE: gl.constexpr = rows.PAGE
    if PAGE == 0:
        return (slot * 0).to(gl.int64), slot.to(gl.int64)
    else:
        return (slot // PAGE).to(gl.int64), (slot % PAGE).to(gl.int64)


@gluon.jit
def row_offsets(rows, slot):
    """Return where rows begin, int64 in chunks of 16 bytes; 0 for invalid slots."""
    page, in_page = split_slots(rows, slot)
    offset = in_page * rows.row_chunks
    if rows.PAGE > 0:
        offset += page * rows.page_chunks
    return offset


@gluon.jit
def row_pointers(work, blocks, block, slot, CHUNK: gl.constexpr):
    """Pointers to the rows of a block; any of invalid slots, which are not to be read.

    CHUNK  elements of 16 bytes: the factor shows the compiler the alignment
    """
    offset = row_offsets(work.main, slot)
    if work.HAS_EXTRA:
        # add the distance between the caches: a choice between pointers has no known alignment
        apart = (work.extra.payload.to(gl.int64) - work.main.payload.to(gl.int64)) // 16
        is_extra = block >= blocks.main_blocks
        offset = gl.where(is_extra, row_offsets(work.extra, slot) + apart, offset)
    return work.main.payload + offset * CHUNK


@gluon.jit
def rope_pointers(rope, slot, CHUNK: gl.constexpr):
    """`row_pointers` of rotated columns in a tensor of their own.

    rope  `RopeRows` of the first cache: support refuses a second one
    """
    return rope.payload + row_offsets(rope, slot) * CHUNK
