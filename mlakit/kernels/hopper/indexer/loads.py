"""Pipelines of the indexer kernel, and the producer warp that fills them by TMA.

Stages     a stage is a key tile, as pieces of 64 keys, and the scale of each key. Token blocks have
           two stages. Fill n goes to stage n % STAGES; its phase is the parity of n // STAGES. A
           consumer waits for the `full` barrier with this phase, the producer for the `empty`
           barrier with the other one
Pages      a piece lies within a page. One load brings 32 entries of the page table, one per lane;
           they are loaded one round ahead. Entries past the last key that a token block sees are
           not read: their pieces are zeros, which TMA gives for rows before the first
Deadlock   none: producer and consumers walk the same token blocks and key tiles (`scheduler`), and
           fill, wait for and release stages in the same order
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mlakit.kernels.hopper.device.compat import record, reinterpret, tma_load
from mlakit.kernels.hopper.device.primitives import alloc_barriers, lane_layout
from mlakit.kernels.hopper.indexer.scheduler import locate_block, locate_single, next_block

PIECE = gl.constexpr(64)  # keys
WIDTH = gl.constexpr(128)  # columns
LANES = gl.constexpr(32)
NO_PAGE = gl.constexpr(-1)


@record
class Sources:
    """TMA descriptors, and where pages are in them."""

    q: object  # [tokens, heads, WIDTH]
    keys: object  # [rows, WIDTH]
    scales: object  # [words]
    PAGE: object  # keys
    PAGE_ROWS: object  # rows from a page to the next
    PAGE_SCALES: object  # scales from a page to the next


@record
class Stages:
    """Smem tiles and their barriers."""

    q: object  # [2 or 1, TOKENS · HEADS, WIDTH]
    q_full: object
    q_empty: object  # unused where there is one token block
    keys: object  # [STAGES, KEYS, WIDTH]
    scales: object  # [STAGES · pieces, PIECE]
    full: object
    empty: object


@gluon.jit
def alloc_stages(
    sources,
    CONFIG: gl.constexpr,
    IS_SINGLE: gl.constexpr,
    CONSUMERS: gl.constexpr,
    Q_CONSUMERS: gl.constexpr,
):
    """Allocate stages of queries and of keys; so many arrivals say that one may be loaded again."""
    PIECES: gl.constexpr = CONFIG.KEYS // PIECE
    Q_STAGES: gl.constexpr = 1 if IS_SINGLE else 2
    q = gl.allocate_shared_memory(
        gl.float8e4nv, [Q_STAGES, CONFIG.TOKENS * CONFIG.HEADS, WIDTH], sources.keys.layout
    )
    keys = gl.allocate_shared_memory(
        gl.float8e4nv, [CONFIG.STAGES, CONFIG.KEYS, WIDTH], sources.keys.layout
    )
    scales = gl.allocate_shared_memory(
        gl.float32, [CONFIG.STAGES * PIECES, PIECE], sources.scales.layout
    )
    q_full = alloc_barriers(Q_STAGES, 1)
    q_empty = q_full
    if not IS_SINGLE:
        q_empty = alloc_barriers(Q_STAGES, Q_CONSUMERS)
    full, empty = alloc_barriers(CONFIG.STAGES, 1), alloc_barriers(CONFIG.STAGES, CONSUMERS)
    return Stages(
        q=q, q_full=q_full, q_empty=q_empty, keys=keys, scales=scales, full=full, empty=empty
    )


@gluon.jit
def _pages_of_pieces(requests, sources, work, tile, PIECES: gl.constexpr):
    """The pages of the pieces of key tile `tile` and of those that follow it, one per lane."""
    lane = gl.arange(0, LANES, lane_layout(1))
    pieces = (tile + lane // PIECES * work.step) * PIECES + lane % PIECES
    entry = pieces // (sources.PAGE // PIECE)
    at = work.pages + entry.to(gl.int64) * requests.stride_entry
    return gl.load(at, mask=pieces * PIECE < work.last_end, other=NO_PAGE).to(gl.int32)


@gluon.jit
def _first_pages(requests, sources, PIECES: gl.constexpr):
    """`_pages_of_pieces` of the first key tile of a single token block, and the pieces.

    Needs no length, so that both loads are in flight at once: pages of keys that no token sees are
    to be masked.
    """
    lane = gl.arange(0, LANES, lane_layout(1))
    tile = gl.program_id(0) + lane // PIECES * gl.num_programs(0)
    pieces = tile * PIECES + lane % PIECES
    entry = pieces // (sources.PAGE // PIECE)
    at = requests.page_table + entry.to(gl.int64) * requests.stride_entry
    pages = gl.load(at, mask=entry < requests.max_pages, other=NO_PAGE).to(gl.int32)
    return pages, pieces


@gluon.jit
def _load_queries(sources, stages, stage, token):
    """Start to load a token block: heads that there are not are zeros."""
    TOKENS: gl.constexpr = sources.q.block_shape[0]
    HEADS: gl.constexpr = sources.q.block_shape[1]
    full = stages.q_full.index(stage)
    tile = reinterpret(
        stages.q.index(stage), gl.float8e4nv, [TOKENS, HEADS, WIDTH], sources.q.layout
    )
    mbarrier.expect(full, TOKENS * HEADS * WIDTH)
    tma_load(sources.q, [token, 0, 0], full, tile)


@gluon.jit
def _load_keys(sources, stages, stage, pages, first_lane, piece):
    """Start to load a key tile, whose pages are in the lanes from `first_lane` on."""
    KEYS: gl.constexpr = stages.keys.shape[1]
    PIECES: gl.constexpr = KEYS // PIECE
    lane = gl.arange(0, LANES, lane_layout(1))
    full = stages.full.index(stage)
    mbarrier.expect(full, KEYS * (WIDTH + 4))
    for i in gl.static_range(PIECES):
        page = gl.sum(gl.where(lane == first_lane + i, pages, 0), 0)
        in_page = (piece + i) % (sources.PAGE // PIECE) * PIECE
        tma_load(
            sources.keys,
            [page * sources.PAGE_ROWS + in_page, 0],
            full,
            stages.keys.index(stage).slice(i * PIECE, PIECE, 0),
        )
        tma_load(
            sources.scales,
            [page * sources.PAGE_SCALES + in_page],
            full,
            stages.scales.index(stage * PIECES + i),
        )


@gluon.jit
def _load_key_tiles(requests, sources, stages, work, pages, stage, phase):
    """Load the key tiles of a token block; returns the next stage and its phase.

    pages  of the first key tiles
    """
    STAGES: gl.constexpr = stages.full.shape[0]
    PIECES: gl.constexpr = stages.keys.shape[1] // PIECE
    TILES: gl.constexpr = LANES // PIECES  # key tiles whose pages one load brings
    for first in range(work.first_tile, work.end_tile, TILES * work.step):
        following = first + TILES * work.step
        ahead = _pages_of_pieces(requests, sources, work, following, PIECES)
        lane = first * 0
        for key_tile in range(first, gl.minimum(following, work.end_tile), work.step):
            mbarrier.wait(stages.empty.index(stage), phase ^ 1)
            _load_keys(sources, stages, stage, pages, lane, key_tile * PIECES)
            stage, phase = next_stage(stage, phase, STAGES)
            lane += PIECES
        pages = ahead
    return stage, phase


@gluon.jit
def producer(request, block, tile, left, requests, sources, stages):
    """Run the producer warp."""
    PIECES: gl.constexpr = stages.keys.shape[1] // PIECE
    stage, phase, uses = tile * 0, tile * 0, tile * 0
    if requests.IS_SINGLE:
        pages, pieces = _first_pages(requests, sources, PIECES)
        _load_queries(sources, stages, uses, uses)
        work = locate_single(requests)
        pages = gl.where(pieces * PIECE < work.last_end, pages, NO_PAGE)
        _load_key_tiles(requests, sources, stages, work, pages, stage, phase)
    else:
        while left > 0:
            work = locate_block(requests, request, block, tile, left)
            if work.first_tile < work.end_tile:
                pages = _pages_of_pieces(requests, sources, work, work.first_tile, PIECES)
                q_stage = uses & 1
                mbarrier.wait(stages.q_empty.index(q_stage), ((uses >> 1) & 1) ^ 1)
                _load_queries(sources, stages, q_stage, work.token)
                uses += 1
                stage, phase = _load_key_tiles(requests, sources, stages, work, pages, stage, phase)
            request, block, tile, left = next_block(work, request, block, left)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)
