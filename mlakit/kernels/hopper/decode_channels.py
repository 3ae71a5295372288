"""Shared memory and barriers of `decode_kernel`, and how what they are for is loaded."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mlakit.kernels.hopper.compat import record, tma_load
from mlakit.kernels.hopper.decode_copies import copying_threads
from mlakit.kernels.hopper.decode_work import NO_ROW
from mlakit.kernels.hopper.primitives import ask_for, load_box, load_slices, new_barrier

HALF_BYTES = gl.constexpr(64 * 256 * 2)
ROPE_BYTES = gl.constexpr(64 * 64 * 2)
ROW_BYTES = gl.constexpr(576 * 2)
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@record
class Buffers:
    """Shared memory. `left` and `right` are halves of the 512 latent columns, of two blocks."""

    q_left: object
    q_right: object
    left: object
    right: object
    rope: object
    p_even: object  # q's rope part until P0 replaces it
    p_odd: object  # likewise, until P1 does
    max_even: object
    max_odd: object
    sum_even: object
    sum_odd: object


@record
class Load:
    """Barriers of a part of a block."""

    full: object
    free: object  # what the copier waits for; or None: who would say so loads the part


@record
class Arrivals:
    """Barriers: of loads, then of what one warpgroup tells the other."""

    q: object
    left_even: object  # `Load`, as all of blocks
    left_odd: object
    right_even: object
    right_odd: object
    rope_even: object
    rope_odd: object
    scores_even: object  # nearly done: it is the other's turn
    scores_odd: object
    p_even: object  # and its peaks
    p_odd: object
    sum_even: object
    sum_odd: object


@gluon.jit
def new_buffers(kv):
    """Of numbers as the cache's descriptor has, in its layout."""
    DTYPE: gl.constexpr = kv.dtype
    BOX: gl.constexpr = kv.layout
    return Buffers(
        gl.allocate_shared_memory(DTYPE, [1, 64, 256], BOX),
        gl.allocate_shared_memory(DTYPE, [1, 64, 256], BOX),
        gl.allocate_shared_memory(DTYPE, [2, 64, 256], BOX),
        gl.allocate_shared_memory(DTYPE, [2, 64, 256], BOX),
        gl.allocate_shared_memory(DTYPE, [2, 64, 64], BOX),
        gl.allocate_shared_memory(DTYPE, [64, 64], BOX),
        gl.allocate_shared_memory(DTYPE, [64, 64], BOX),
        gl.allocate_shared_memory(gl.float32, [64], VECTOR),
        gl.allocate_shared_memory(gl.float32, [64], VECTOR),
        gl.allocate_shared_memory(gl.float32, [64], VECTOR),
        gl.allocate_shared_memory(gl.float32, [64], VECTOR),
    )


@gluon.jit
def new_arrivals(words):
    """`words` of the inputs: not None where rows are copied one by one."""
    return Arrivals(
        new_barrier(), _new_load(words), _new_load(words), _new_load(words), _new_load(words),
        _new_load(words), _new_load(words), new_barrier(), new_barrier(), new_barrier(),
        new_barrier(), new_barrier(), new_barrier(),
    )  # fmt: skip


@gluon.jit
def _new_load(words):
    if words is None:
        NONE: gl.constexpr = None
        return Load(new_barrier(), NONE)
    else:  # noqa: RET505
        return Load(new_barrier(copying_threads(words)), new_barrier())


@gluon.jit
def load_part(descriptor, rows, column, load, buffers, BLOCK: gl.constexpr, BYTES: gl.constexpr):
    """Start to load some columns of the first block of a pair, or of the second (BLOCK 0 or 1).

    Or tell the copier that it may.
    """
    buffer = buffers.index(BLOCK)
    if load.free is not None:
        mbarrier.arrive(load.free, count=1)
    elif descriptor.block_shape[0] < 64:
        PAGES: gl.constexpr = 64 // descriptor.block_shape[0]
        load_slices(descriptor, rows, BLOCK * PAGES, column, load.full, buffer, BYTES)
    else:
        load_box(descriptor, rows, column, load.full, buffer, BYTES)


@gluon.jit
def ask_for_block(inputs, packed_rows, row):
    """Have a block brought to L2 that will be loaded soon, if it lies in one piece."""
    if packed_rows is not None and inputs.PAGE % 64 == 0:
        address = packed_rows.to(gl.int64) + row.to(gl.int64) * ROW_BYTES
        ask_for(address, gl.where(row < NO_ROW, 64 * ROW_BYTES, 0))


@gluon.jit
def load_even(inputs, token, first_head, rows, buffers, arrivals):
    """Start with the queries of a unit and its first block."""
    q_row = token * inputs.q_token_rows + first_head
    rope_row = token * inputs.q_rope_token_rows + first_head
    load_part(inputs.kv_rope, rows, 512, arrivals.rope_even, buffers.rope, 0, ROPE_BYTES)
    load_part(inputs.kv, rows, 0, arrivals.left_even, buffers.left, 0, HALF_BYTES)
    mbarrier.expect(arrivals.q, 2 * ROPE_BYTES + 2 * HALF_BYTES)
    tma_load(inputs.q_rope, [rope_row, 0], arrivals.q, buffers.p_even)
    tma_load(inputs.q_rope, [rope_row, 0], arrivals.q, buffers.p_odd)
    tma_load(inputs.q, [q_row, 0], arrivals.q, buffers.q_left.index(0))
    tma_load(inputs.q, [q_row, 256], arrivals.q, buffers.q_right.index(0))
    load_part(inputs.kv, rows, 256, arrivals.right_even, buffers.right, 0, HALF_BYTES)


@gluon.jit
def load_odd_left(inputs, rows, buffers, arrivals):
    """The left half of a unit's second block: it goes where the even warpgroup's result was."""
    load_part(inputs.kv, rows, 0, arrivals.left_odd, buffers.left, 1, HALF_BYTES)


@gluon.jit
def load_odd_right(inputs, rows, buffers, arrivals):
    """The rest of the second block."""
    load_part(inputs.kv_rope, rows, 512, arrivals.rope_odd, buffers.rope, 1, ROPE_BYTES)
    load_part(inputs.kv, rows, 256, arrivals.right_odd, buffers.right, 1, HALF_BYTES)
