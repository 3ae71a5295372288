"""Absorbed MLA attention over lists of 16-bit cache rows on Blackwell, 16, 32 or 64 heads per CTA.

Maths      s = q·row · softmax_scale over the list's valid entries ; out = softmax(s) @ row[:512]
Work       a work tile is ROWS heads of one token over a split of its lists, two blocks of 64
           entries at a time, which are the M side of both products (`device.keys_as_m`)
Roles      a softmax warpgroup; a warp that issues the products; a producer warpgroup that gathers
           rows with TMA, four per instruction
Memory     64 heads: 222 KB of shared memory, of which the queries are 72 KB and the four stages of
           latent columns 128 KB; 16 heads have five. Tensor memory: five times ROWS columns.
           Splits write float32 partials (`kernels.sparse_merge`)
Limits     rows of 576/512 or 512/512 columns at multiples of 16 bytes, pages at multiples of a
           row's distance. Triton 3.9 or newer
Numbers    P is rounded to the cache's dtype, acc is float32. Rows of invalid entries are zeros in
           shared memory: a gather reads zeros for row −1
Lineage    own design; ideas: swapped operands for few heads, TMA gathers as FlashMLA's
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlakit.kernels.blackwell.device.gathers import ENTRIES
from mlakit.kernels.blackwell.device.keys_as_m import PART, PARTS, alloc, gather_block
from mlakit.kernels.blackwell.sparse.n64 import (
    alloc_entries,
    issue,
    softmax_warps,
    start_tile,
    store_validity,
)
from mlakit.kernels.blackwell.sparse.rows import listed_rows
from mlakit.kernels.hopper.sparse.arguments import VARYING
from mlakit.kernels.hopper.sparse.epilogue import Outputs
from mlakit.kernels.hopper.sparse.lists import load_ids, make_work, valid_slots
from mlakit.kernels.hopper.sparse.seesaw import Scale


@gluon.jit
def producer(q, q_rope, caches, work, tile, smem, barriers, entries):
    """Load the queries, and gather the blocks of a work tile."""
    blocks, num_blocks = start_tile(q, q_rope, work, tile, smem, entries)
    first_ids = load_ids(work, blocks, blocks.first, ENTRIES)
    second_ids = load_ids(work, blocks, blocks.first + 1, ENTRIES)
    for index in range(num_blocks):
        block = blocks.first + 2 * index
        first_slot = valid_slots(work, blocks, block, first_ids)
        second_slot = valid_slots(work, blocks, block + 1, second_ids)
        first_ids = load_ids(work, blocks, block + 2, ENTRIES)
        second_ids = load_ids(work, blocks, block + 3, ENTRIES)
        first = listed_rows(caches, work, blocks, block, first_slot)
        second = listed_rows(caches, work, blocks, block + 1, second_slot)
        gather_block((first, second), (first, second), index, PARTS * PART, smem, barriers)
        store_validity(entries, first_slot, second_slot)


@gluon.jit(do_not_specialize=VARYING)
def sparse_mla_n64_bf16_kernel(
    q,  # TMA descriptors: tiles of 1 x ROWS x 128
    q_rope,  # of 1 x ROWS x 64 rotated columns, or None
    caches,  # (rows of 64 columns, likewise of a second cache or None)
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
            (producer, (q, q_rope, caches, work, tile, smem, barriers, entries)),
            (issue, (smem, tmem, barriers, entries)),
        ],
        [4, 1],
        [CONFIG.PRODUCER_REGISTERS, CONFIG.ISSUE_REGISTERS],
    )
