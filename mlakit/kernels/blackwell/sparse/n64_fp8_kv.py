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
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier

from mlakit.kernels.blackwell.device.dequant import Half, dequant_block
from mlakit.kernels.blackwell.device.keys_as_m import alloc
from mlakit.kernels.blackwell.sparse.n64 import (
    alloc_entries,
    issue,
    softmax_warps,
    start_tile,
    store_validity,
)
from mlakit.kernels.hopper.device.fp8_rows import KEYS as ROW_KEYS
from mlakit.kernels.hopper.sparse.arguments import VARYING
from mlakit.kernels.hopper.sparse.epilogue import Outputs
from mlakit.kernels.hopper.sparse.lists import load_ids, make_work, row_pointers, valid_slots
from mlakit.kernels.hopper.sparse.seesaw import Scale


@gluon.jit
def _half(work, blocks, block, slot):
    return Half(row_pointers(work, blocks, block, slot, 4), slot >= 0)


@gluon.jit
def dequant_producer(q, q_rope, work, tile, FORMAT: gl.constexpr, smem, barriers, entries):
    """Load the queries, and convert the blocks of a work tile."""
    blocks, num_blocks = start_tile(q, q_rope, work, tile, smem, entries)
    first_ids = load_ids(work, blocks, blocks.first, ROW_KEYS)
    second_ids = load_ids(work, blocks, blocks.first + 1, ROW_KEYS)
    for index in range(num_blocks):
        block = blocks.first + 2 * index
        first_slot = valid_slots(work, blocks, block, first_ids)
        second_slot = valid_slots(work, blocks, block + 1, second_ids)
        low = _half(work, blocks, block, first_slot)
        high = _half(work, blocks, block + 1, second_slot)
        first_ids = load_ids(work, blocks, block + 2, ROW_KEYS)
        second_ids = load_ids(work, blocks, block + 3, ROW_KEYS)
        dequant_block(low, high, index, FORMAT, smem, barriers)
        # the softmax warps have read the validity of the block before
        mbarrier.wait(barriers.probs_full, (index & 1) ^ 1)
        store_validity(entries, first_slot, second_slot)


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
