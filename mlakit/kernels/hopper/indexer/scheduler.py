"""The tile scheduler: which work tiles a persistent CTA computes.

A token block is up to TOKENS query tokens of one request. It has two kinds of work tiles: score
tiles of KEYS keys, as far as one of its tokens sees, and fill tiles of FILL_COLUMNS columns, from
the first hidden key on, which are set to −inf. All work tiles of all token blocks lie on a line,
and each CTA takes an equal share of it: logits are independent, so there is nothing to merge.

Each CTA finds its own share: sums over the token blocks of a request have a closed form, and the
first 4 warps add up those of all requests. No kernel runs before, and the host reads no length.

Walk       producer and consumers walk the same token blocks: (request, block, tile, left) is the
           request, its token block, the first work tile of it, and the work tiles left to the CTA
Single     a batch of one token block has no line: CTA c takes the score tiles c, c + num_ctas, ...,
           whose pages can be loaded before the length is known
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlakit.kernels.hopper.device.compat import record

FILL_ALIGNMENT = gl.constexpr(7)  # bits: fill tiles begin at multiples of 128 columns
REQUESTS = gl.constexpr(256)  # whose work tiles are added up together


@record
class Requests:
    """The requests, and how their work is cut."""

    q_starts: object
    kv_lens: object
    page_table: object
    stride_q_starts: object
    stride_kv_lens: object
    stride_request: object  # of the page table
    stride_entry: object
    tokens: object  # of all requests
    max_pages: object  # columns of the page table
    columns: object
    IS_CAUSAL: object
    IS_SINGLE: object  # one token block in all
    TOKENS: object
    KEYS: object
    FILL_COLUMNS: object


@record
class TokenBlock:
    """A token block, and what this CTA computes of it."""

    token: object  # the first one
    count: object  # tokens
    first_end: object  # one past the last key that the first token sees; may be below 0
    last_end: object  # the same of the last token, not below 0
    pages: object  # the request's row of the page table
    first_tile: object  # score tiles: every step-th
    end_tile: object
    step: object
    fill_first: object  # columns
    fill_end: object
    num_tiles: object  # work tiles that this CTA computes
    is_last: object  # of its request


@gluon.constexpr_function
def _bits(power):
    return power.bit_length() - 1


@gluon.jit
def _floor_sum(count, BITS: gl.constexpr):
    """Σ i >> BITS for i in range(count)."""
    whole = count >> BITS
    return (((whole * (whole - 1)) >> 1) << BITS) + whole * (count - (whole << BITS))


@gluon.jit
def _ceil_div(count, BITS: gl.constexpr):
    return (count + ((1 << BITS) - 1)) >> BITS


@gluon.jit
def tiles_before(
    block,
    q_len,
    kv_len,
    columns,
    IS_CAUSAL: gl.constexpr,
    TOKENS: gl.constexpr,
    KEYS: gl.constexpr,
    FILL_COLUMNS: gl.constexpr,
):
    """Work tiles of the first `block` token blocks of a request."""
    KEY_BITS: gl.constexpr = _bits(KEYS)
    FILL_BITS: gl.constexpr = _bits(FILL_COLUMNS)
    if IS_CAUSAL:
        TOKEN_BITS: gl.constexpr = _bits(TOKENS)
        # block i sees kv_len − q_len + (i + 1)·TOKENS keys, the last one of a request kv_len
        has_last = (block << TOKEN_BITS) >= q_len
        whole = gl.where(has_last, block - 1, block)
        start = (kv_len - q_len + (TOKENS + KEYS - 1)) >> TOKEN_BITS
        scores = _floor_sum(gl.maximum(start + whole, 0), KEY_BITS - TOKEN_BITS)
        scores -= _floor_sum(gl.maximum(start, 0), KEY_BITS - TOKEN_BITS)
        scores += gl.where(has_last, _ceil_div(kv_len, KEY_BITS), 0)
        # block i has columns − (kv_len − q_len + 1) − i·TOKENS columns from its first hidden key on
        top = ((columns - kv_len + q_len + (FILL_COLUMNS - 2)) >> TOKEN_BITS) + 1
        fills = _floor_sum(top, FILL_BITS - TOKEN_BITS)
        fills -= _floor_sum(top - block, FILL_BITS - TOKEN_BITS)
        return gl.where(block > 0, scores + fills, 0)
    else:
        return block * (_ceil_div(kv_len, KEY_BITS) + _ceil_div(columns - kv_len, FILL_BITS))


@gluon.jit
def _request_tiles(requests, q_len, kv_len, block):
    return tiles_before(
        block,
        q_len,
        kv_len,
        requests.columns,
        requests.IS_CAUSAL,
        requests.TOKENS,
        requests.KEYS,
        requests.FILL_COLUMNS,
    )


@gluon.jit
def _load_lengths(requests, request, mask=None):
    """Return (first query token, query tokens, keys) of requests."""
    at = request.to(gl.int64)
    starts = requests.q_starts + at * requests.stride_q_starts
    lens = requests.kv_lens + at * requests.stride_kv_lens
    if mask is None:
        first = gl.load(starts).to(gl.int32)
        last = gl.load(starts + requests.stride_q_starts).to(gl.int32)
        kv_len = gl.load(lens).to(gl.int32)
    else:
        first = gl.load(starts, mask=mask, other=0).to(gl.int32)
        last = gl.load(starts + requests.stride_q_starts, mask=mask, other=0).to(gl.int32)
        kv_len = gl.load(lens, mask=mask, other=0).to(gl.int32)
    # no more than there are columns to write to
    return first, last - first, gl.minimum(gl.maximum(kv_len, 0), requests.columns)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _line_ends(requests, start, batch, before, LINE: gl.constexpr):
    """Return the ends on the line of requests from `start` on, one request per element."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([REQUESTS // 128], [32], [4], [0])
    request = start + gl.arange(0, REQUESTS, LAYOUT)
    _, q_len, kv_len = _load_lengths(requests, request, mask=request < batch)
    num_blocks = _ceil_div(q_len, _bits(requests.TOKENS))
    tiles = _request_tiles(requests, q_len.to(LINE), kv_len.to(LINE), num_blocks.to(LINE))
    return before + gl.associative_scan(tiles, 0, _add)


@gluon.jit
def first_work_tile(requests, batch, LINE: gl.constexpr):
    """Return (request, block, tile, left) that this CTA starts with; called by four warps."""
    ends = _line_ends(requests, 0, batch, gl.to_tensor(0).to(LINE), LINE)
    chunk_end = gl.max(ends, 0)
    total = chunk_end
    for start in range(REQUESTS, batch, REQUESTS):
        total = gl.max(_line_ends(requests, start, batch, total, LINE), 0)
    share = total // gl.num_programs(0)
    rest = (total - share * gl.num_programs(0)).to(gl.int32)
    cta = gl.program_id(0)
    first = share * cta + gl.minimum(cta, rest)
    left = share.to(gl.int32) + (cta < rest).to(gl.int32)

    # requests that end at or before the share's start, and where the last of them ends
    request = gl.sum((ends <= first).to(gl.int32), 0)
    before = gl.max(gl.where(ends <= first, ends, 0), 0)
    for start in range(REQUESTS, batch, REQUESTS):
        ends = _line_ends(requests, start, batch, chunk_end, LINE)
        chunk_end = gl.max(ends, 0)
        request += gl.sum((ends <= first).to(gl.int32), 0)
        before = gl.maximum(before, gl.max(gl.where(ends <= first, ends, 0), 0))
    request = gl.minimum(request, batch - 1)  # without a share: any that exists
    tile = first - before
    _, q_len, kv_len = _load_lengths(requests, request)
    q_len, kv_len = q_len.to(LINE), kv_len.to(LINE)
    low = gl.to_tensor(0)
    high = _ceil_div(q_len, _bits(requests.TOKENS)).to(gl.int32)
    while high - low > 1:
        middle = (low + high) >> 1
        is_past = _request_tiles(requests, q_len, kv_len, middle.to(LINE)) > tile
        low, high = gl.where(is_past, low, middle), gl.where(is_past, middle, high)
    tile -= _request_tiles(requests, q_len, kv_len, low.to(LINE))
    return request, low, tile.to(gl.int32), left


@gluon.jit
def _fill_column(requests, first_end, fill, num_fills):
    """The first column of a fill tile; the end of the row past the last one."""
    column = first_end + fill * requests.FILL_COLUMNS
    column = gl.maximum((column >> FILL_ALIGNMENT) << FILL_ALIGNMENT, 0)
    return gl.where(fill >= num_fills, requests.columns, column)


@gluon.jit
def locate_block(requests, request, block, tile, left):
    q_first, q_len, kv_len = _load_lengths(requests, request)
    index = block * requests.TOKENS
    count = gl.minimum(q_len - index, requests.TOKENS)
    first_end = kv_len
    last_end = kv_len
    if requests.IS_CAUSAL:
        first_end = kv_len - q_len + index + 1
        last_end = gl.maximum(first_end + count - 1, 0)
    num_scores = _ceil_div(last_end, _bits(requests.KEYS))
    num_fills = _ceil_div(requests.columns - first_end, _bits(requests.FILL_COLUMNS))
    end = gl.minimum(num_scores + num_fills, tile + left)
    end = gl.where(count > 0, end, tile)  # a request without query tokens has no work
    first_fill = gl.maximum(tile - num_scores, 0)
    end_fill = gl.maximum(end - num_scores, 0)
    fill_end = _fill_column(requests, first_end, end_fill, num_fills)
    return TokenBlock(
        token=q_first + index,
        count=count,
        first_end=first_end,
        last_end=last_end,
        pages=requests.page_table + request.to(gl.int64) * requests.stride_request,
        first_tile=tile,
        end_tile=gl.minimum(end, num_scores),
        step=1,
        fill_first=_fill_column(requests, first_end, first_fill, num_fills),
        fill_end=gl.where(end_fill > first_fill, fill_end, 0),
        num_tiles=end - tile,
        is_last=index + requests.TOKENS >= q_len,
    )


@gluon.jit
def locate_single(requests):
    """Locate this CTA's part of a batch of one token block, which padding rows may follow."""
    _, q_len, kv_len = _load_lengths(requests, gl.to_tensor(0))
    count = gl.minimum(q_len, requests.tokens)
    cta, num_ctas = gl.program_id(0), gl.num_programs(0)
    first_end = kv_len
    if requests.IS_CAUSAL:
        first_end = kv_len - count + 1
    # equal ranges of columns, of which the ones before first_end are skipped
    fill_start = gl.maximum((first_end >> FILL_ALIGNMENT) << FILL_ALIGNMENT, 0)
    blocks = _ceil_div(requests.columns - fill_start, FILL_ALIGNMENT)
    width = ((blocks + num_ctas - 1) // num_ctas) << FILL_ALIGNMENT
    fill_first = fill_start + cta * width
    return TokenBlock(
        token=kv_len * 0,
        count=count,
        first_end=first_end,
        last_end=kv_len,
        pages=requests.page_table,
        first_tile=cta,
        end_tile=_ceil_div(kv_len, _bits(requests.KEYS)),
        step=num_ctas,
        fill_first=fill_first,
        fill_end=gl.minimum(fill_first + width, requests.columns),
        num_tiles=1,
        is_last=True,
    )


@gluon.jit
def next_block(work, request, block, left):
    """Return (request, block, tile, left) after a token block."""
    return (
        gl.where(work.is_last, request + 1, request),
        gl.where(work.is_last, 0, block + 1),
        block * 0,
        left - work.num_tiles,
    )
