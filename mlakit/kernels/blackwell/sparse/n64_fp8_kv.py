"""Absorbed MLA attention over lists of FP8 cache rows on Blackwell, 16, 32 or 64 heads per CTA.

Maths      s = q·row · softmax_scale over the list's valid entries ; out = softmax(s) @ row[:512]
Work       as `n64_bf16`: ROWS heads of one token over a split of its lists, 128 entries at a time
Roles      a softmax warpgroup; a warp that issues the products; a dequant warpgroup that loads rows
           of fp8_block128 to registers, two parts of 128 columns ahead of their use, multiplies
           values by their scales and stores them as bfloat16
Memory     as `n64_bf16`: rows pass through no other shared memory
Limits     rows of 656 bytes: 512 e4m3, four float32 scales, 64 bfloat16. Triton 3.9 or newer
Numbers    the product of a value and its scale is rounded to bfloat16, and P too; acc is float32
Lineage    own design; ideas: the dequantising warpgroup of FlashMLA's FP8 sparse decode
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared, mbarrier

from mlakit.kernels.blackwell.device.gathers import GATHERED
from mlakit.kernels.blackwell.device.keys_as_m import (
    D_R,
    KEYS,
    PARTS,
    alloc,
    stage_of,
    wait_for_values,
)
from mlakit.kernels.blackwell.sparse.n64 import (
    alloc_entries,
    issue,
    softmax_warps,
    start_tile,
    store_validity,
)
from mlakit.kernels.hopper.device.compat import record, reinterpret
from mlakit.kernels.hopper.device.fp8_convert import to_fp16
from mlakit.kernels.hopper.device.fp8_rows import KEYS as ROW_KEYS
from mlakit.kernels.hopper.device.fp8_rows import WORDS, load_words
from mlakit.kernels.hopper.device.primitives import smem_layout
from mlakit.kernels.hopper.sparse.arguments import VARYING
from mlakit.kernels.hopper.sparse.epilogue import Outputs
from mlakit.kernels.hopper.sparse.lists import load_ids, make_work, row_pointers, valid_slots
from mlakit.kernels.hopper.sparse.seesaw import Scale


@record
class Half:
    """Where the rows of 64 list entries are."""

    start: object  # pointers to words
    slot: object  # −1 where an entry is invalid


@gluon.jit
def _half(work, blocks, block, ids):
    slot = valid_slots(work, blocks, block, ids)
    return Half(row_pointers(work, blocks, block, slot, 4), slot)


@gluon.jit
def _load_part(half, part, FORMAT: gl.constexpr):
    """Start to load 128 columns of 64 rows and their scales; zeros for invalid entries."""
    is_valid = half.slot >= 0
    words = load_words(half.start, is_valid, part * 32, WORDS)
    scale = gl.load(half.start + (FORMAT.SCALES_AT // 4 + part), mask=is_valid, other=0)
    return words, scale


@gluon.jit
def _store_part(part, tile, HALF: gl.constexpr):
    """Store 128 columns of 64 rows, multiplied by their scales, in the rows of a tile."""
    words, scale = part
    values = to_fp16(words).to(gl.float32)
    scale = scale.to(gl.float32, bitcast=True)
    scale = gl.convert_layout(scale, gl.SliceLayout(1, values.type.layout), assert_trivial=True)
    values = (values * gl.expand_dims(scale, 1)).to(tile.dtype)
    tile.slice(HALF * GATHERED, GATHERED, 0).store(values)


@gluon.jit
def _store_block(low, high, pending, block, FORMAT: gl.constexpr, smem, barriers):
    """Store a block whose first two parts are `pending`, and load the others meanwhile."""
    for part in gl.static_range(PARTS):
        loaded = pending[part]
        if part + 2 < PARTS:
            ahead = (_load_part(low, part + 2, FORMAT), _load_part(high, part + 2, FORMAT))
            pending += (ahead,)
        stage, phase = stage_of(smem, block, part)
        mbarrier.wait(barriers.latent_empty.index(stage), phase ^ 1)
        _store_part(loaded[0], smem.latent.index(stage), 0)
        _store_part(loaded[1], smem.latent.index(stage), 1)
        fence_async_shared()
        mbarrier.arrive(barriers.latent_full.index(stage), count=1)


@gluon.jit
def _load_rope(low, high, FORMAT: gl.constexpr):
    WORD: gl.constexpr = FORMAT.ROPE_AT // 4
    first = load_words(low.start, low.slot >= 0, WORD, WORDS)
    return first, load_words(high.start, high.slot >= 0, WORD, WORDS)


@gluon.jit
def _store_rope(words, smem, barriers):
    tile = reinterpret(smem.rope, gl.int32, [1, KEYS, D_R // 2], smem_layout(32, 32)).index(0)
    tile.slice(0, GATHERED, 0).store(words[0])
    tile.slice(GATHERED, GATHERED, 0).store(words[1])
    fence_async_shared()
    mbarrier.arrive(barriers.rope_full, count=1)


@gluon.jit
def dequant_producer(q, q_rope, work, tile, FORMAT: gl.constexpr, smem, barriers, entries):
    """Load the queries, and convert the blocks of a work tile."""
    blocks, num_blocks = start_tile(q, q_rope, work, tile, smem, entries)
    first_ids = load_ids(work, blocks, blocks.first, ROW_KEYS)
    second_ids = load_ids(work, blocks, blocks.first + 1, ROW_KEYS)
    for index in range(num_blocks):
        block = blocks.first + 2 * index
        low = _half(work, blocks, block, first_ids)
        high = _half(work, blocks, block + 1, second_ids)
        first = (_load_part(low, 0, FORMAT), _load_part(high, 0, FORMAT))
        second = (_load_part(low, 1, FORMAT), _load_part(high, 1, FORMAT))
        first_ids = load_ids(work, blocks, block + 2, ROW_KEYS)
        second_ids = load_ids(work, blocks, block + 3, ROW_KEYS)
        _store_block(low, high, (first, second), index, FORMAT, smem, barriers)
        if smem.q_rope is not None:
            rope = _load_rope(low, high, FORMAT)
        # the softmax warps are done with the block before: a commit says nothing of what they did
        mbarrier.wait(barriers.probs_full, (index & 1) ^ 1)
        if smem.q_rope is not None:
            wait_for_values(index - 1, barriers)
            _store_rope(rope, smem, barriers)
        store_validity(entries, low.slot, high.slot)


@gluon.jit(do_not_specialize=VARYING)
def sparse_mla_n64_fp8_kv_kernel(
    q,  # TMA descriptors: tiles of 1 x ROWS x 128
    q_rope,  # of 1 x ROWS x 64 rotated columns, or None
    tokens,
    heads,
    num_splits,
    lens,  # [tokens], or None
    topk,
    stride_token,  # from a list to the next
    stride_lens,
    extra_lens,  # of a second cache, as all that is extra
    extra_topk,
    extra_stride_token,
    extra_stride_lens,
    main,  # `arguments.ListArguments`
    extra,  # likewise, or None
    outputs,  # `arguments.OutputArguments`
    scale_log2,  # |softmax_scale| · log2(e)
    TRAITS: gl.constexpr,  # `configs.Traits`
    CONFIG: gl.constexpr,  # `device.configs.KeysAsMConfig`
):
    """Run a CTA on a work tile."""
    head_tiles = (heads + CONFIG.ROWS - 1) // CONFIG.ROWS
    work = make_work(
        (main, lens, topk, stride_token, stride_lens),
        (extra, extra_lens, extra_topk, extra_stride_token, extra_stride_lens),
        num_splits,
        head_tiles,
        tokens * num_splits * head_tiles,
        TRAITS,
    )
    outputs = Outputs(*outputs)
    tile = gl.program_id(0)
    smem, tmem, barriers = alloc(q.dtype, TRAITS.HAS_ROPE, CONFIG)
    entries = alloc_entries()
    scale = Scale(size=scale_log2, SIGN=TRAITS.SIGN)
    gl.warp_specialize(
        [
            (
                softmax_warps,
                (work, outputs, tokens, heads, tile, smem, tmem, barriers, entries, scale),
            ),
            (dequant_producer, (q, q_rope, work, tile, TRAITS.FORMAT, smem, barriers, entries)),
            (issue, (smem, tmem, barriers, entries)),
        ],
        [4, 1],
        [CONFIG.PRODUCER_REGISTERS, CONFIG.ISSUE_REGISTERS],
    )
