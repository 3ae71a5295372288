"""The third warpgroup of `decode_kernel`, where rows do not come in boxes: it copies them.

A part of a block is free when the warpgroup says so that would load it as a box. They become free
in the order in which they are copied here, and nobody waits for a part that comes after one that he
has not given back: so there is no deadlock. Where rows are in random places a copy is on its way
for longer than the others multiply: L2 is asked for a pair of blocks while the one before is on its
way, and for no more, for all programs together then have a good part of L2.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mlakit.kernels.hopper.decode_channels import ROW_BYTES
from mlakit.kernels.hopper.decode_copies import (
    arrive_when_copied,
    ask_for_rows,
    copy_rows,
    find_rows,
    look_up_next,
    look_up_rows,
)
from mlakit.kernels.hopper.decode_work import find_keys, next_unit


@gluon.jit
def _copy(inputs, descriptor, rows, column, load, phase, box):
    mbarrier.wait(load.free, phase)
    copy_rows(inputs, descriptor, rows, column, load.full, box)
    arrive_when_copied(inputs, load.full)


@gluon.jit
def copy_pairs(item, index, inputs, work, buffers, arrivals):
    """All that it does: pairs of blocks, their rotated columns, left halves and right ones."""
    rope = (arrivals.rope_even, arrivals.rope_odd)
    left = (arrivals.left_even, arrivals.left_odd)
    right = (arrivals.right_even, arrivals.right_odd)
    phase = item * 0
    while item < work.last_item:
        keys = find_keys(inputs, work, item, index)
        block = keys.first_block
        num_pairs = gl.maximum((keys.end_block - block + 1) // 2, 1)
        looked_up = look_up_rows(inputs, keys, block)
        next_pages = look_up_next(inputs, keys, block + 2)
        for _ in range(num_pairs):
            for i in gl.static_range(2):
                rows = find_rows(inputs, keys, looked_up, block)
                looked_up = look_up_rows(inputs, keys, block + 1)
                _copy(inputs, inputs.kv_rope, rows, 512, rope[i], phase, buffers.rope.index(i))
                _copy(inputs, inputs.kv, rows, 0, left[i], phase, buffers.left.index(i))
                _copy(inputs, inputs.kv, rows, 256, right[i], phase, buffers.right.index(i))
                block += 1
            # not before: asking takes a warp some 600 cycles
            ask_for_rows(inputs, keys, next_pages, block, ROW_BYTES)
            next_pages = look_up_next(inputs, keys, block + 2)
            phase ^= 1
        item, index = next_unit(work, item, index + gl.num_programs(0))
