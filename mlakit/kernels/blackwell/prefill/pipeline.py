"""Stages, tensor memory and barriers of the prefill kernel, and the order in which stages are used.

A stage has 128 columns of a block of keys or values: a part. Parts are loaded, multiplied and
released in one order. A work tile of two query tiles (TILES = 2) loads K0 V0 K1 V1 ..., and
multiplies, where QK₁(0) is Q·Kᵀ of the second query tile and block 0,

    QK₀(0), QK₁(0), PV₀(0), QK₀(1), PV₁(0), QK₁(1), PV₀(1) ...

With one query tile (TILES = 1) the keys of the next block come before the values of a block, in
both: K0 K1 V0 K2 V1 ..., so that QK of the next block runs beside the softmax of a block.

Counters   `fill` counts parts through all work tiles of a CTA: it gives the stage of a part.
           `block` counts blocks likewise. Block and query tile together give one of two places for
           scores (`slot_of`)
Barriers   a wait names a phase by its parity, so whoever waits for a barrier waits for each of its
           phases. Those of stages that are full are therefore numbered by parts of keys, which the
           issuing warp waits for, and by parts of values, which the masking warps wait for
Deadlock   none: producer, masking warps and issuing warp keep to the order above, and products wait
           only for loads and probabilities that come before them in it
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
)

from mlakit.kernels.blackwell.prefill import configs
from mlakit.kernels.hopper.device.compat import record
from mlakit.kernels.hopper.device.pipeline import two_stages
from mlakit.kernels.hopper.device.primitives import (
    SMEM_VECTOR,
    alloc_barrier,
    alloc_barriers,
    lane_layout,
    smem_layout,
)

QUERIES = gl.constexpr(configs.QUERIES)
KEYS = gl.constexpr(configs.KEYS)
PART = gl.constexpr(configs.PART)
TAIL = gl.constexpr(configs.TAIL)
TMEM_TILE = gl.constexpr(TensorMemoryLayout((configs.QUERIES, 128), col_stride=1))


@record
class Sizes:
    """Constants of a kernel."""

    TILES: object  # query tiles of a work tile
    D_N: object
    D_R: object
    KEY_PARTS: object  # whole parts of a key
    VALUE_PARTS: object
    HAS_TAIL: object  # a key has 64 columns more
    AHEAD: object  # of the config
    IS_ALIGNED: object  # blocks begin at multiples of 128 keys of a request


@record
class Smem:
    """Shared memory."""

    q: object  # [TILES · KEY_PARTS, 128, 128]
    q_tails: object  # [TILES, 128, 64], or None
    parts: object  # [stages, 128, 128] of keys and values
    tails: object  # [AHEAD, 128, 64] of keys, or None
    flags: object  # [2, 32] int32: the newest work tile with values that are not finite


@record
class Tmem:
    """Tensor memory, float32: all 512 columns."""

    scores: object  # [2, 128, 128]; probabilities replace them
    acc: object  # [TILES · VALUE_PARTS, 128, 128]


@record
class Barriers:
    """Barriers: arrays, but for `q_empty`."""

    q_full: object  # by query tile
    q_empty: object
    empty: object  # by stage
    keys_full: object  # by part of keys, with their tail
    values_full: object  # by part of values
    clean: object  # by block: the masking warps are done with its values
    scores_full: object  # by slot
    probs_full: object  # by slot
    values_done: object  # by query tile: acc has a block's values


@gluon.jit
def sizes_of(
    TRAITS: gl.constexpr, D_V: gl.constexpr, CONFIG: gl.constexpr, IS_ALIGNED: gl.constexpr
):
    """Return the `Sizes` of a kernel."""
    return Sizes(
        TILES=CONFIG.TILES,
        D_N=TRAITS.D_N,
        D_R=TRAITS.D_R,
        KEY_PARTS=(TRAITS.D_N + TRAITS.D_R) // PART,
        VALUE_PARTS=D_V // PART,
        HAS_TAIL=(TRAITS.D_N + TRAITS.D_R) % PART > 0,
        AHEAD=CONFIG.AHEAD,
        IS_ALIGNED=IS_ALIGNED,
    )


@gluon.jit
def alloc(DTYPE: gl.constexpr, SIZES, STAGES: gl.constexpr):
    """Allocate everything: (Smem, Tmem, Barriers)."""
    TILES: gl.constexpr = SIZES.TILES
    BITS: gl.constexpr = DTYPE.primitive_bitwidth
    PARTS: gl.constexpr = smem_layout(PART, BITS)
    TAILS: gl.constexpr = smem_layout(TAIL, BITS)
    q_tails: gl.constexpr = None
    tails: gl.constexpr = None
    if SIZES.HAS_TAIL:
        q_tails = gl.allocate_shared_memory(DTYPE, [TILES, QUERIES, TAIL], TAILS)
        tails = gl.allocate_shared_memory(DTYPE, [SIZES.AHEAD, KEYS, TAIL], TAILS)
    Q_PARTS: gl.constexpr = TILES * SIZES.KEY_PARTS
    ACC_PARTS: gl.constexpr = TILES * SIZES.VALUE_PARTS
    smem = Smem(
        q=gl.allocate_shared_memory(DTYPE, [Q_PARTS, QUERIES, PART], PARTS),
        q_tails=q_tails,
        parts=gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, PART], PARTS),
        tails=tails,
        flags=gl.allocate_shared_memory(gl.int32, [2, 32], SMEM_VECTOR),
    )
    for i in gl.static_range(2):
        smem.flags.index(i).store(gl.full([32], -1, gl.int32, lane_layout(4)))
    tmem = Tmem(
        scores=allocate_tensor_memory(gl.float32, [2, QUERIES, KEYS], TMEM_TILE),
        acc=allocate_tensor_memory(gl.float32, [ACC_PARTS, QUERIES, PART], TMEM_TILE),
    )
    barriers = Barriers(
        q_full=alloc_barriers(TILES, 1),
        q_empty=alloc_barrier(),
        empty=alloc_barriers(STAGES, 1),
        keys_full=alloc_barriers(STAGES, 1),
        values_full=alloc_barriers(STAGES, 1),
        clean=alloc_barriers(STAGES, 1),
        scores_full=alloc_barriers(2, 1),
        probs_full=alloc_barriers(2, 1),
        values_done=alloc_barriers(TILES, 1),
    )
    return smem, tmem, barriers


@gluon.jit
def turn(smem, number):
    """Return (index, phase) of use `number` of an array with an element per stage.

    No more parts and blocks are on their way than there are stages.
    """
    STAGES: gl.constexpr = smem.parts.shape[0]
    return number % STAGES, number // STAGES & 1


@gluon.jit
def tail_of(SIZES, smem, block):
    """The tail of a block of keys."""
    return smem.tails.index(block & (SIZES.AHEAD - 1))


@gluon.jit
def slot_of(SIZES, block, TILE: gl.constexpr):
    """Return (slot, phase) of the scores of a block and query tile."""
    return two_stages(block * SIZES.TILES + TILE)
