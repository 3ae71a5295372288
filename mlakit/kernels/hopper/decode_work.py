"""Which units a program has, and where each one's queries, keys and results are.

A unit is ROWS heads of one query over a range of its request's keys. A worker's items come from the
plan; the programs of a worker share the units of each item among them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlakit.kernels.hopper.compat import record
from mlakit.kernels.hopper.primitives import lanes_of

NO_ROW = gl.constexpr(2**30)  # past the end of every cache: reads as zeros


@record
class Inputs:
    """Where a unit's operands are."""

    q: object  # descriptors
    q_rope: object
    kv: object
    kv_rope: object
    q_token_rows: object  # rows of a descriptor from a token to the next
    q_rope_token_rows: object
    table: object
    stride_request: object
    stride_entry: object
    PAGE_ROWS: object  # rows of the cache's descriptor from a page to the next
    PAGE: object  # rows of a page
    words: object  # the cache's first, if its rows are copied one by one, or None
    row_quads: object  # four words each, from a row of the cache to the next; or None


@record
class Work:
    """What there is to do."""

    items: object
    partial_starts: object
    q_starts: object
    kv_lens: object
    stride_q_starts: object
    stride_kv_lens: object
    heads: object  # 0 in a rehearsal: masks then hide every row, and no key is seen
    head_blocks: object  # units of a query
    ROWS: object  # of a unit
    slot_rows: object
    last_item: object
    IS_CAUSAL: object
    IS_GIVEN: object  # the plan is not of this kernel
    ITEM_COLUMNS: object
    MAY_REHEARSE: object  # see `first_unit`


@record
class Results:
    """Where results go."""

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
class Keys:
    """A unit's keys [low, end)."""

    entries: object  # the request's row of the page table
    first_block: object
    end_block: object
    low: object
    end: object


@record
class Place:
    """Where a unit's queries are and its results go."""

    token: object
    first_head: object
    slot: object  # −1: the result is final
    slot_row: object


@gluon.jit
def _load_item(work, item):
    """(request, first key, last key, slot; of the request: first query, queries, keys)."""
    at = work.items + work.ITEM_COLUMNS * item
    request = gl.load(at)
    first = gl.load(at + 1)
    last = gl.load(at + 2)
    slot = gl.load(at + 3)
    if work.ITEM_COLUMNS > 4:
        q_first = gl.load(at + 4)
        q_len = gl.load(at + 5)
        kv_len = gl.load(at + 6)
    else:
        starts = work.q_starts + request.to(gl.int64) * work.stride_q_starts
        q_first = gl.load(starts).to(gl.int32)
        q_len = gl.load(starts + work.stride_q_starts).to(gl.int32) - q_first
        kv_len = gl.load(work.kv_lens + request.to(gl.int64) * work.stride_kv_lens).to(gl.int32)
    return request, first, last, slot, q_first, q_len, kv_len


@gluon.jit
def _has_room(work, q_len, slot):
    """For the partials of a request that is split. Else the first of its items does all of it.

    Plans that are made for this kernel split no request without.
    """
    if work.IS_GIVEN:
        return (slot < 0) | (q_len * work.head_blocks * work.ROWS <= work.slot_rows)
    else:  # noqa: RET505
        return slot == slot


@gluon.jit
def _num_units(work, item):
    """Units of an item, one per block of heads of each query."""
    request, _, _, slot, _, q_len, _ = _load_item(work, item)
    num_units = q_len * work.head_blocks
    if work.IS_GIVEN:
        is_first = slot == gl.load(work.partial_starts + request)
        num_units = gl.where(is_first | _has_room(work, q_len, slot), num_units, 0)
    return num_units


@gluon.jit
def next_unit(work, item, index):
    """The first (item, unit of it) from these on that exists; item is `last_item` past the end."""
    is_found = item >= work.last_item
    while not is_found:
        is_found = index < _num_units(work, item)
        if not is_found:
            item += 1
            index = gl.program_id(0)
            is_found = item >= work.last_item
    return item, index


@gluon.jit
def first_unit(work, first_item):
    """(work, item, unit of it) that this program begins with; item is `last_item` if it has none.

    A program that would have none rehearses another's last unit, without keys or results. What is
    run at the end of a unit is no more in any cache than the rest of the code, and would come from
    memory for all programs at the same time. Now it is in L2 when they need it: 1 us of a call.
    """
    item, index = next_unit(work, first_item, gl.program_id(0))
    heads = work.heads
    if (item >= work.last_item) & (work.last_item > 0):
        last_index = _num_units(work, work.last_item - 1) - 1
        if last_index >= 0:
            item, index, heads = work.last_item - 1, last_index, 0
    work = Work(
        work.items, work.partial_starts, work.q_starts, work.kv_lens, work.stride_q_starts,
        work.stride_kv_lens, heads, work.head_blocks, work.ROWS, work.slot_rows, work.last_item,
        work.IS_CAUSAL, work.IS_GIVEN, work.ITEM_COLUMNS, work.MAY_REHEARSE,
    )  # fmt: skip
    return work, item, index


@gluon.jit
def let_merge_start(work, item):
    """Have the merge launched before this kernel ends: as soon as every program has said so.

    For that end it waits by itself. A program that begins with a part of a request does not say so:
    programs that have something to merge would crowd on the SMs that have no work here.
    """
    _, _, _, slot, _, _, _ = _load_item(work, item)
    if slot < 0:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def count_units(work, item, index):
    """Units of this program, from these on."""
    count = item * 0
    while item < work.last_item:
        item, index = next_unit(work, item, index + gl.num_programs(0))
        count += 1
    return count


@gluon.jit
def find_keys(inputs, work, item, index):
    request, low, last, slot, _, q_len, kv_len = _load_item(work, item)
    has_room = _has_room(work, q_len, slot)
    low = gl.where(has_room, low, 0)
    end = gl.where(has_room, gl.minimum(last, kv_len), kv_len)
    if work.MAY_REHEARSE:
        end = gl.where(work.heads > 0, end, 0)
    if work.IS_CAUSAL:
        end = gl.minimum(end, kv_len - q_len + index // work.head_blocks + 1)
    entries = inputs.table + request.to(gl.int64) * inputs.stride_request
    return Keys(entries, low // 64, (gl.maximum(end, 0) + 63) // 64, low, end)


@gluon.jit
def find_place(work, item, index):
    _, _, _, slot, q_first, q_len, _ = _load_item(work, item)
    slot = gl.where(_has_room(work, q_len, slot), slot, -1)
    token = q_first + index // work.head_blocks
    slot_row = slot.to(gl.int64) * work.slot_rows + index * work.ROWS
    return Place(token, index % work.head_blocks * work.ROWS, slot, slot_row)


@gluon.jit
def find_q_scale(scales, work, item, index):
    """Of a unit's query: `scales` has q_scale, float32 of each token, and stride_q_scale."""
    scale = gl.to_tensor(1.0)
    if scales.q_scale is not None:
        token = find_place(work, item, index).token.to(gl.int64)
        scale = gl.load(scales.q_scale + token * scales.stride_q_scale)
    return scale


@gluon.jit
def _load_page(inputs, keys, entry, is_there):
    """An entry of the request's row of the page table, or several; 0 where none `is_there`."""
    at = keys.entries + entry.to(gl.int64) * inputs.stride_entry
    return gl.load(at, mask=is_there, other=0).to(gl.int32)


@gluon.jit
def pages_from(inputs, keys, block, LAYOUT: gl.constexpr, COUNT: gl.constexpr):
    """The page of each of so many keys from a block's first on; past the last key page 0."""
    key = block * 64 + gl.arange(0, COUNT, LAYOUT)
    return _load_page(inputs, keys, key // inputs.PAGE, key < keys.end)


@gluon.jit
def page_of(inputs, keys, block):
    """The page of a block that is within one; past the last key page 0."""
    return _load_page(inputs, keys, block // (inputs.PAGE // 64), block < keys.end_block)


@gluon.jit
def pages_ahead(inputs, keys, block, WARPS: gl.constexpr):
    """The pages of a block that is within one and of the 31 next, in the lanes of so many warps.

    In lanes, for one number for all of them would be kept in a register that the whole warp has,
    and the warp would wait for it as soon as it is asked for.
    """
    blocks = block + gl.arange(0, 32, lanes_of(WARPS))
    return _load_page(inputs, keys, blocks // (inputs.PAGE // 64), blocks < keys.end_block)


@gluon.jit
def row_ahead(inputs, keys, pages, block, AHEAD: gl.constexpr):
    """The first row of the block that is so many after the one that these are `pages_ahead` of."""
    lane = gl.arange(0, 32, pages.type.layout)
    page = gl.sum(gl.where(lane == AHEAD, pages, 0), 0)
    return _first_row(inputs, keys, page, block + AHEAD)


@gluon.jit
def _first_row(inputs, keys, page, block):
    """Of a block within this page; past the last key there are rows of zeros."""
    row = page * inputs.PAGE_ROWS + block % (inputs.PAGE // 64) * 64
    return gl.where(block < keys.end_block, row, NO_ROW)


@gluon.jit
def pages_of(inputs, keys, block, LAYOUT: gl.constexpr):
    """The page of each key of a block, [64], or of all of them; past the last key page 0."""
    if inputs.PAGE % 64 != 0:
        return pages_from(inputs, keys, block, LAYOUT, 64)
    else:  # noqa: RET505
        return page_of(inputs, keys, block)


@gluon.jit
def row_in_page(inputs, block, offset):
    """Of the key at an offset in a block."""
    if 64 % inputs.PAGE == 0:
        return offset % inputs.PAGE
    elif inputs.PAGE % 64 != 0:  # noqa: RET505
        return (block * 64 + offset) % inputs.PAGE
    else:
        return offset + block % (inputs.PAGE // 64) * 64


@gluon.jit
def rows_of(inputs, keys, block, WARPS: gl.constexpr):
    """The first row of a block in the cache's descriptor; past the last key rows of zeros.

    Of pages that a block has several of, the first row of each, in the lanes of so many warps.
    Entries past the last key are no pages and are not read.
    """
    if inputs.PAGE < 64:
        # a page each lane: a register, however many there are
        entry = block * (64 // inputs.PAGE) + gl.arange(0, 32, lanes_of(WARPS))
        is_there = entry * inputs.PAGE < keys.end
        page = _load_page(inputs, keys, entry, is_there)
        return gl.where(is_there, page * inputs.PAGE_ROWS, NO_ROW)
    else:  # noqa: RET505
        return _first_row(inputs, keys, page_of(inputs, keys, block), block)


@gluon.jit
def rows_of_pair(inputs, keys, block):
    """`rows_of` a block and the next one for four warps; small pages of both are in either.

    Nothing where rows are copied one by one: others do that.
    """
    if inputs.words is not None:
        return block, block
    elif inputs.PAGE < 64:  # noqa: RET505
        rows = rows_of(inputs, keys, block, WARPS=4)
        return rows, rows
    else:
        rows = rows_of(inputs, keys, block, WARPS=4)
        return rows, rows_of(inputs, keys, block + 1, WARPS=4)


@gluon.jit
def find_start(inputs, work, item, index):
    """Where a unit's operands are: (token, first head, rows of its first block, of its second)."""
    token, first_head, rows = item * 0, item * 0, item * 0
    if inputs.words is None and inputs.PAGE < 64:
        rows = gl.zeros([32], gl.int32, lanes_of(4))
    next_rows = rows
    if item < work.last_item:
        keys = find_keys(inputs, work, item, index)
        place = find_place(work, item, index)
        token, first_head = place.token, place.first_head
        rows, next_rows = rows_of_pair(inputs, keys, keys.first_block)
    return token, first_head, rows, next_rows
