"""How the warps of `decode_e4m3_kernel` hear of blocks of rows, and of what to add of them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mlakit.kernels.hopper.compat import record, reinterpret
from mlakit.kernels.hopper.decode_copies import (
    arrive_when_copied,
    copy_rows,
    copying_threads,
    expect_rows,
    find_rows,
    look_up_rows,
)
from mlakit.kernels.hopper.decode_few_rings import PARTS
from mlakit.kernels.hopper.decode_row_scales import (
    load_scales,
    new_scale_boxes,
    pages_of_scales,
    store_one,
    store_scales,
)
from mlakit.kernels.hopper.decode_work import find_keys, next_unit
from mlakit.kernels.hopper.primitives import new_barrier, new_barriers

ADDERS = gl.constexpr(2)
CHUNK = gl.constexpr(32)  # keys that an adder takes at a time
CHUNKS = gl.constexpr(2)
WEIGHTS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2))
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
BYTES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))
HALF_BYTES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2))


@record
class Blocks:
    """Rows on their way from the producer to the scorer and both adders.

    Block n of a program is in place n % PLACES in turn n // PLACES.
    """

    latent: object  # words [PLACES · PARTS, 64, 32]
    rope: object  # [PLACES, 64, 64] bfloat16, or 16 words of e4m3
    scales: object  # ScaleBoxes, if rows have any
    least_scale: object  # [PLACES, 1] float32 of each block, of those that are not 0
    full: object
    empty: object


@record
class Messages:
    """From the scorer to both adders: of block n in place n % 2, and of the end of a unit."""

    weights: object  # float16 [2 · CHUNKS, 64 heads, CHUNK keys]
    decays: object  # [2, 64] float32, of the sums before
    have_decays: object  # [2, 4] float32: 1 where a warp of the scorer has others than 1, or 0
    full: object
    empty: object
    factor: object  # [64] float32, of a unit's sums
    factor_full: object
    factor_empty: object


@gluon.jit
def new_blocks(PLACES: gl.constexpr, inputs, HAVE_SCALES: gl.constexpr):
    """Of boxes as descriptors of the cache have."""
    kv, kv_rope = inputs.kv, inputs.kv_rope
    return Blocks(
        gl.allocate_shared_memory(kv.dtype, [PLACES * PARTS, 64, kv.block_shape[1]], kv.layout),
        gl.allocate_shared_memory(
            kv_rope.dtype, [PLACES, 64, kv_rope.block_shape[1]], kv_rope.layout
        ),
        new_scale_boxes(PLACES, 1),
        gl.allocate_shared_memory(gl.float32, [PLACES, 1], VECTOR),
        new_barriers(PLACES, copying_threads(inputs.words) + (1 if HAVE_SCALES else 0)),
        new_barriers(PLACES, 1 + ADDERS),
    )


@gluon.jit
def new_messages():
    return Messages(
        gl.allocate_shared_memory(gl.float16, [2 * CHUNKS, 64, CHUNK], WEIGHTS),
        gl.allocate_shared_memory(gl.float32, [2, 64], VECTOR),
        gl.allocate_shared_memory(gl.float32, [2, 4], VECTOR),
        new_barriers(2, 1),
        new_barriers(2, ADDERS),
        gl.allocate_shared_memory(gl.float32, [64], VECTOR),
        new_barrier(),
        new_barrier(ADDERS),
    )


@gluon.jit
def next_place(blocks, place, turn):
    """The place of the next block, and the parity of its turn."""
    PLACES: gl.constexpr = blocks.full.shape[0]
    is_next_turn = place == PLACES - 1
    return gl.where(is_next_turn, 0, place + 1), gl.where(is_next_turn, turn ^ 1, turn)


@gluon.jit
def as_bytes(box):
    """Words of a box as the numbers they are."""
    if box.shape[1] == 32:
        return reinterpret(box, gl.float8e4nv, [box.shape[0], 128], BYTES)
    else:  # noqa: RET505
        return reinterpret(box, gl.float8e4nv, [box.shape[0], 64], HALF_BYTES)


@gluon.jit
def _store_scales(scales, blocks, place, found):
    (stored,) = store_scales(scales, blocks.scales, place, found)
    least = gl.min(gl.where(stored > 0, stored, float("inf")), 0)
    store_one(blocks.least_scale.index(place), least, scales.WARPS)


@gluon.jit
def produce_blocks(item, index, inputs, work, blocks, scales, ROPE_COLUMN: gl.constexpr):
    """All that the producer does."""
    WIDTH: gl.constexpr = blocks.latent.shape[2]
    BITS: gl.constexpr = (
        PARTS * WIDTH * blocks.latent.dtype.primitive_bitwidth
        + blocks.rope.shape[2] * blocks.rope.dtype.primitive_bitwidth
    )
    place, turn = item * 0, item * 0
    while item < work.last_item:
        keys = find_keys(inputs, work, item, index)
        looked_up = look_up_rows(inputs, keys, keys.first_block)
        pages = pages_of_scales(scales, inputs, keys, keys.first_block)
        for block in range(keys.first_block, keys.end_block):
            # on their way while a place is waited for
            found, pages = load_scales(scales, inputs, keys, block, pages)
            rows = find_rows(inputs, keys, looked_up, block)
            looked_up = look_up_rows(inputs, keys, block + 1)
            mbarrier.wait(blocks.empty.index(place), turn ^ 1)
            full = blocks.full.index(place)
            expect_rows(inputs, full, 64 * BITS // 8)
            copy_rows(inputs, inputs.kv_rope, rows, ROPE_COLUMN, full, blocks.rope.index(place))
            for part in gl.static_range(PARTS):
                box = blocks.latent.index(place * PARTS + part)
                copy_rows(inputs, inputs.kv, rows, part * WIDTH, full, box)
            arrive_when_copied(inputs, full)
            if scales.first is not None:
                _store_scales(scales, blocks, place, found)
                mbarrier.arrive(full, count=1)
            place, turn = next_place(blocks, place, turn)
        item, index = next_unit(work, item, index + gl.num_programs(0))
