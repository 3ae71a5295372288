"""What decode kernels for few heads share: rings of copies, their producer, queries and results.

Keys lie on the side of the dots that is 64 rows wide: scores are [64 keys, heads], sums of values
[columns, heads] for each of four PARTS of 128 latent columns.

Phases     a place has room for BOXES, which come and go together: fewer barriers, coarser places.
           Fill n of a ring goes to place n % PLACES in turn n // PLACES. A reader waits for the
           phase of `full` that has the turn's parity; the producer for the one of `empty` before,
           which on a fresh barrier counts as over. Either barrier is completed once a turn
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mlakit.kernels.hopper.compat import record, tma_load
from mlakit.kernels.hopper.decode_copies import (
    arrive_when_copied,
    copy_rows,
    expect_rows,
    find_rows,
    look_up_rows,
)
from mlakit.kernels.hopper.decode_row_scales import load_scales, pages_of_scales, store_scales
from mlakit.kernels.hopper.decode_work import find_keys, find_place, next_unit
from mlakit.kernels.hopper.primitives import new_barriers

PARTS = gl.constexpr(4)  # of the latent columns
COLUMNS = gl.constexpr(128)  # of a part


@record
class Ring:
    """Boxes of one kind on their way from the producer to those who read them."""

    boxes: object  # [places · BOXES, 64, columns]
    full: object  # barriers
    empty: object
    BOXES: object  # of a place


@record
class Channels:
    latent: object
    rope: object
    scales: object  # ScaleBoxes, whose places go with those of `rope`; or None


@record
class Queries:
    latent: object  # [PARTS, ROWS, COLUMNS], or words, a quarter as many, of e4m3
    rope: object  # [1, ROWS, 64], likewise
    arrival: object


@gluon.jit
def new_ring(
    PLACES: gl.constexpr, WIDTH: gl.constexpr, descriptor, READERS: gl.constexpr,
    BOXES: gl.constexpr = 1, ARRIVALS: gl.constexpr = 1,
):  # fmt: skip
    boxes = gl.allocate_shared_memory(
        descriptor.dtype, [PLACES * BOXES, 64, WIDTH], descriptor.layout
    )
    return Ring(boxes, new_barriers(PLACES, ARRIVALS), new_barriers(PLACES, READERS), BOXES)


@gluon.jit
def after(ring, place, turn, STEPS: gl.constexpr = 1):
    """The place so many on, less than a turn, and the parity of its turn."""
    PLACES: gl.constexpr = ring.full.shape[0]
    is_next_turn = place >= PLACES - STEPS
    place = gl.where(is_next_turn, place + STEPS - PLACES, place + STEPS)
    return place, gl.where(is_next_turn, turn ^ 1, turn)


@gluon.jit
def message_place(number):
    """Of the message of a program's block: its place among two, and the parity of its turn."""
    return number & 1, (number >> 1) & 1


@gluon.jit
def release(ring, place):
    """Say that a reader is done with a place: once what it read is on its way through a dot.

    Not before: what waits in registers may not even have come there. No barrier of threads waits
    for that, and a copy of the next box could be quicker.
    """
    mbarrier.arrive(ring.empty.index(place), count=1)


@gluon.jit
def _send(inputs, ring, place, turn, descriptor, rows, column):
    """Fill a place, once it is free; `rows` as of `find_rows`."""
    BOXES: gl.constexpr = ring.BOXES
    WIDTH: gl.constexpr = ring.boxes.shape[2]
    BYTES: gl.constexpr = 64 * WIDTH * ring.boxes.dtype.primitive_bitwidth // 8
    mbarrier.wait(ring.empty.index(place), turn ^ 1)
    full = ring.full.index(place)
    expect_rows(inputs, full, BOXES * BYTES)
    for box in gl.static_range(BOXES):
        target = ring.boxes.index(place * BOXES + box)
        copy_rows(inputs, descriptor, rows, column + box * WIDTH, full, target)
    arrive_when_copied(inputs, full)
    return after(ring, place, turn)


@gluon.jit
def produce(item, index, inputs, work, channels, scales, ROPE_COLUMN: gl.constexpr):
    """Copy the boxes of every block: the rotated columns, then each part of the latent ones.

    With the rotated columns come the rows' scales, if they have any.
    """
    latent, rope = channels.latent, channels.rope
    WIDTH: gl.constexpr = latent.boxes.shape[2] * latent.BOXES
    place, turn, rope_place, rope_turn = item * 0, item * 0, item * 0, item * 0
    while item < work.last_item:
        keys = find_keys(inputs, work, item, index)
        looked_up = look_up_rows(inputs, keys, keys.first_block)
        pages = pages_of_scales(scales, inputs, keys, keys.first_block)
        for block in range(keys.first_block, keys.end_block):
            # on their way while places are waited for
            found, pages = load_scales(scales, inputs, keys, block, pages)
            rows = find_rows(inputs, keys, looked_up, block)
            looked_up = look_up_rows(inputs, keys, block + 1)
            own_place = rope_place
            rope_place, rope_turn = _send(
                inputs, rope, rope_place, rope_turn, inputs.kv_rope, rows, ROPE_COLUMN
            )
            for fill in gl.static_range(PARTS // latent.BOXES):
                place, turn = _send(inputs, latent, place, turn, inputs.kv, rows, fill * WIDTH)
            if scales.first is not None:
                store_scales(scales, channels.scales, own_place, found)
                mbarrier.arrive(rope.full.index(own_place), count=1)
        item, index = next_unit(work, item, index + gl.num_programs(0))


@gluon.jit
def load_queries(inputs, work, item, index, queries):
    unit = find_place(work, item, index)
    row = unit.token * inputs.q_token_rows + unit.first_head
    rope_row = unit.token * inputs.q_rope_token_rows + unit.first_head
    WIDTH: gl.constexpr = queries.latent.shape[2]
    BITS: gl.constexpr = (
        PARTS * WIDTH * queries.latent.dtype.primitive_bitwidth
        + queries.rope.shape[2] * queries.rope.dtype.primitive_bitwidth
    )
    mbarrier.expect(queries.arrival, work.ROWS * BITS // 8)
    tma_load(inputs.q_rope, [rope_row, 0], queries.arrival, queries.rope.index(0))
    for part in gl.static_range(PARTS):
        tma_load(inputs.q, [row, part * WIDTH], queries.arrival, queries.latent.index(part))


@gluon.jit
def store(unit, results, heads, sums, scale, column, FIRST: gl.constexpr = 0):
    """Write a unit's result, or its partial in float32: sums · scale, from part FIRST on.

    column  [COLUMNS] of each row of the sums, within a part
    """
    column += FIRST * COLUMNS
    row = gl.arange(0, scale.shape[0], scale.type.layout)
    head = unit.first_head + row
    if unit.slot < 0:
        token = results.out + unit.token.to(gl.int64) * results.stride_out_token
        # int64: where heads come first, each is all tokens apart
        starts = head.to(gl.int64) * results.stride_out_head
        _store_sums(token, starts, sums, scale, column, head < heads)
    else:
        slot = results.partial_out + unit.slot_row * 512
        _store_sums(slot, row * 512, sums, scale, column, head < heads)


@gluon.jit
def _store_sums(first, row_starts, sums, scale, column, is_row):
    at = gl.expand_dims(row_starts, 0) + gl.expand_dims(column, 1)
    for part in gl.static_range(len(sums)):
        values = (sums[part] * gl.expand_dims(scale, 0)).to(first.dtype.element_ty)
        gl.store(first + part * COLUMNS + at, values, mask=gl.expand_dims(is_row, 0))
