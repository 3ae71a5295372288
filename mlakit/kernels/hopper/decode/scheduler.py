"""The tile scheduler: which work tiles a persistent CTA computes, and where each one's data is.

A work tile is ROWS heads of one query over a split of its request's keys. The plan assigns items
(splits of requests) to CTAs; program_id(1) is the CTA of the plan, and the CTAs that the kernel
launches for it (program_id(0)) share the work tiles of each item.

Lineage    own design; ideas: FlashMLA's persistent CTAs over split-KV metadata
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlakit.kernels.hopper.device.compat import record
from mlakit.kernels.hopper.device.primitives import allow_dependents


@record
class Inputs:
    """The operands of a work tile: TMA descriptors, and pointers for rows that TMA cannot load."""

    q: object  # TMA descriptors
    q_rope: object
    kv: object
    kv_rope: object
    q_token_rows: object  # rows of a descriptor from a token to the next; BY_HEAD: columns
    q_rope_token_rows: object
    Q_BY_HEAD: object  # a row of the descriptor is a head, with all tokens
    Q_ROPE_BY_HEAD: object
    page_table: object
    stride_request: object
    stride_entry: object
    PAGE_ROWS: object  # rows of the cache's descriptor from a page to the next
    PAGE: object  # rows of a page
    ROPE_COLUMN: object  # of the descriptor of rotated columns
    words: object  # the cache, if a gather producer loads its rows, or None
    row_chunks: object  # chunks of 16 bytes from a row of the cache to the next, or None


@record
class TileScheduler:
    """The requests, and the items that the plan gives to this CTA."""

    items: object
    partial_starts: object
    q_starts: object
    kv_lens: object
    stride_q_starts: object
    stride_kv_lens: object
    heads: object  # 0 in an instruction-cache warm-up: every row is masked, no key is seen
    head_tiles: object  # work tiles of a query
    ROWS: object  # heads of a work tile
    slot_rows: object
    last_item: object
    IS_CAUSAL: object
    IS_EXTERNAL_PLAN: object
    ITEM_COLUMNS: object
    HAS_WARM_UP: object  # see `first_tile_or_warm_up`


@record
class Outputs:
    """The tensors that results are written to."""

    out: object
    lse: object
    partial_out: object
    partial_lse: object
    sink: object
    stride_out_token: object
    stride_out_head: object
    stride_lse_token: object
    stride_lse_head: object
    stride_sink: object


@record
class KeyRange:
    """The keys [low, end) of a work tile, in blocks of 64."""

    pages: object  # the request's row of the page table
    first_block: object
    end_block: object
    low: object
    end: object


@record
class WorkTile:
    """The position of a work tile's queries and of its results."""

    token: object
    first_head: object
    slot: object  # −1: the result is final
    slot_row: object


@gluon.jit
def make_work(
    tiles, varying, records, TRAITS: gl.constexpr, HEAD_TILES, HAS_WARM_UP: gl.constexpr = False
):
    """Return (Inputs, TileScheduler, Outputs) of a kernel's arguments.

    tiles       q, q_rope, kv and kv_rope
    varying     the integers that are single arguments
    records     batch, schedule, outputs and gather
    HEAD_TILES  work tiles of a query: `schedule.head_tiles`, or a constant
    """
    q, q_rope, kv, kv_rope = tiles
    stride_table_request, q_token_rows, q_rope_token_rows, heads, slot_rows, stride_lse_token = (
        varying
    )
    batch, schedule, outputs, gather = records
    inputs = Inputs(
        q=q,
        q_rope=q_rope,
        kv=kv,
        kv_rope=kv_rope,
        q_token_rows=q_token_rows,
        q_rope_token_rows=q_rope_token_rows,
        Q_BY_HEAD=TRAITS.Q_BY_HEAD,
        Q_ROPE_BY_HEAD=TRAITS.Q_ROPE_BY_HEAD,
        page_table=batch.page_table,
        stride_request=stride_table_request,
        stride_entry=batch.stride_entry,
        PAGE_ROWS=TRAITS.PAGE_ROWS,
        PAGE=TRAITS.PAGE,
        ROPE_COLUMN=TRAITS.ROPE_COLUMN,
        words=gather.words,
        row_chunks=gather.row_chunks,
    )
    last_item = gl.load(schedule.cta_starts + gl.program_id(1) + 1)
    scheduler = TileScheduler(
        items=schedule.items,
        partial_starts=schedule.partial_starts,
        q_starts=batch.q_starts,
        kv_lens=batch.kv_lens,
        stride_q_starts=batch.stride_q_starts,
        stride_kv_lens=batch.stride_kv_lens,
        heads=heads,
        head_tiles=HEAD_TILES,
        ROWS=TRAITS.ROWS,
        slot_rows=slot_rows,
        last_item=last_item,
        IS_CAUSAL=TRAITS.IS_CAUSAL,
        IS_EXTERNAL_PLAN=TRAITS.SCORES.IS_EXTERNAL_PLAN,
        ITEM_COLUMNS=TRAITS.ITEM_COLUMNS,
        HAS_WARM_UP=HAS_WARM_UP,
    )
    outputs = Outputs(
        out=outputs.out,
        lse=outputs.lse,
        partial_out=outputs.partial_out,
        partial_lse=outputs.partial_lse,
        sink=outputs.sink,
        stride_out_token=outputs.stride_out_token,
        stride_out_head=outputs.stride_out_head,
        stride_lse_token=stride_lse_token,
        stride_lse_head=outputs.stride_lse_head,
        stride_sink=outputs.stride_sink,
    )
    return inputs, scheduler, outputs


@gluon.jit
def query_at(token, first_head, token_rows, BY_HEAD: gl.constexpr):
    """Return (row, column) of a descriptor of queries, where those of a work tile begin."""
    if BY_HEAD:
        return first_head, token * token_rows
    else:
        return token * token_rows + first_head, 0


@gluon.jit
def _load_item(scheduler, item):
    """Return (request, first key, last key, slot; of the request: first query, queries, keys)."""
    at = scheduler.items + scheduler.ITEM_COLUMNS * item
    request = gl.load(at)
    first = gl.load(at + 1)
    last = gl.load(at + 2)
    slot = gl.load(at + 3)
    if scheduler.ITEM_COLUMNS > 4:
        q_first = gl.load(at + 4)
        q_len = gl.load(at + 5)
        kv_len = gl.load(at + 6)
    else:
        starts = scheduler.q_starts + request.to(gl.int64) * scheduler.stride_q_starts
        q_first = gl.load(starts).to(gl.int32)
        q_len = gl.load(starts + scheduler.stride_q_starts).to(gl.int32) - q_first
        lengths = scheduler.kv_lens + request.to(gl.int64) * scheduler.stride_kv_lens
        kv_len = gl.load(lengths).to(gl.int32)
    return request, first, last, slot, q_first, q_len, kv_len


@gluon.jit
def _fits_slot(scheduler, q_len, slot):
    """Return whether a slot holds a split request's partials; else its first item computes all.

    Plans made for this kernel split no request that does not fit.
    """
    if scheduler.IS_EXTERNAL_PLAN:
        return (slot < 0) | (q_len * scheduler.head_tiles * scheduler.ROWS <= scheduler.slot_rows)
    else:
        return slot == slot


@gluon.jit
def _num_tiles(scheduler, item):
    """Work tiles of an item, one per head tile of each query."""
    request, _, _, slot, _, q_len, _ = _load_item(scheduler, item)
    num_tiles = q_len * scheduler.head_tiles
    if scheduler.IS_EXTERNAL_PLAN:
        is_first = slot == gl.load(scheduler.partial_starts + request)
        num_tiles = gl.where(is_first | _fits_slot(scheduler, q_len, slot), num_tiles, 0)
    return num_tiles


@gluon.jit
def next_tile(scheduler, item, index):
    """The first (item, work tile of it) from these on that exists; `last_item` past the end."""
    is_found = item >= scheduler.last_item
    while not is_found:
        is_found = index < _num_tiles(scheduler, item)
        if not is_found:
            item += 1
            index = gl.program_id(0)
            is_found = item >= scheduler.last_item
    return item, index


@gluon.jit
def first_tile(scheduler, schedule):
    """Return (item, work tile of it) that this CTA starts with; `last_item` if it has none."""
    first_item = gl.load(schedule.cta_starts + gl.program_id(1))
    return next_tile(scheduler, first_item, gl.program_id(0))


@gluon.jit
def first_tile_or_warm_up(scheduler, schedule):
    """`first_tile`, with the scheduler in front: (scheduler, item, work tile of it).

    A CTA without work runs an instruction-cache warm-up: the last work tile of another CTA, with no
    keys and no results. The code at the end of a tile is then in L2 before all CTAs need it at the
    same time, which saves 1 us per call.
    """
    item, index = first_tile(scheduler, schedule)
    heads = scheduler.heads
    if (item >= scheduler.last_item) & (scheduler.last_item > 0):
        last_index = _num_tiles(scheduler, scheduler.last_item - 1) - 1
        if last_index >= 0:
            item, index, heads = scheduler.last_item - 1, last_index, 0
    scheduler = TileScheduler(
        items=scheduler.items,
        partial_starts=scheduler.partial_starts,
        q_starts=scheduler.q_starts,
        kv_lens=scheduler.kv_lens,
        stride_q_starts=scheduler.stride_q_starts,
        stride_kv_lens=scheduler.stride_kv_lens,
        heads=heads,
        head_tiles=scheduler.head_tiles,
        ROWS=scheduler.ROWS,
        slot_rows=scheduler.slot_rows,
        last_item=scheduler.last_item,
        IS_CAUSAL=scheduler.IS_CAUSAL,
        IS_EXTERNAL_PLAN=scheduler.IS_EXTERNAL_PLAN,
        ITEM_COLUMNS=scheduler.ITEM_COLUMNS,
        HAS_WARM_UP=scheduler.HAS_WARM_UP,
    )
    return scheduler, item, index


@gluon.jit
def launch_dependents(scheduler, item):
    """Let the merge kernel start early (PDL), once every CTA allows it; the merge kernel waits for
    this one to end.

    A CTA whose first item is a split of a request does not allow it: CTAs of the merge kernel would
    occupy SMs that are idle here.
    """
    _, _, _, slot, _, _, _ = _load_item(scheduler, item)
    if slot < 0:
        allow_dependents()


@gluon.jit
def count_tiles(scheduler, item, index):
    """Work tiles of this CTA, from these on."""
    count = item * 0
    while item < scheduler.last_item:
        item, index = next_tile(scheduler, item, index + gl.num_programs(0))
        count += 1
    return count


@gluon.jit
def key_range(inputs, scheduler, item, index):
    request, low, last, slot, _, q_len, kv_len = _load_item(scheduler, item)
    fits = _fits_slot(scheduler, q_len, slot)
    low = gl.where(fits, low, 0)
    end = gl.where(fits, gl.minimum(last, kv_len), kv_len)
    if scheduler.HAS_WARM_UP:
        end = gl.where(scheduler.heads > 0, end, 0)
    if scheduler.IS_CAUSAL:
        end = gl.minimum(end, kv_len - q_len + index // scheduler.head_tiles + 1)
    pages = inputs.page_table + request.to(gl.int64) * inputs.stride_request
    return KeyRange(
        pages=pages,
        first_block=low // 64,
        end_block=(gl.maximum(end, 0) + 63) // 64,
        low=low,
        end=end,
    )


@gluon.jit
def locate_tile(scheduler, item, index):
    _, _, _, slot, q_first, q_len, _ = _load_item(scheduler, item)
    slot = gl.where(_fits_slot(scheduler, q_len, slot), slot, -1)
    token = q_first + index // scheduler.head_tiles
    slot_row = slot.to(gl.int64) * scheduler.slot_rows + index * scheduler.ROWS
    return WorkTile(token, index % scheduler.head_tiles * scheduler.ROWS, slot, slot_row)
