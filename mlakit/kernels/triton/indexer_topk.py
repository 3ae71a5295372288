"""The k best columns of every row of logits, portable Triton.

Maths      the k-th best rank is found bit by bit: count the ranks that are at least as large. The
           search ends early where exactly k are
Work       one program per split of a row; with "narrow" as many programs as run at once take splits
           one after the other. A second launch merges the splits of a row
Methods    whole: all ranks of a split stay in registers. narrow: long rows are narrowed down first,
           candidates that beat the k best so far go to a buffer, and when it is full only its k
           best stay. reread: the row is read again for every bit
Order      by column; among equal logits the lower columns win; NaN ranks above every number
Memory     a buffer per program that runs at once, and k candidates per split of a row
Limits     none
Lineage    own design; ideas: radix select
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlakit.arguments import TopkArguments
from mlakit.kernels.triton.configs import pick_topk_config
from mlakit.kernels.triton.launch import launch, target
from mlakit.replay import workspace

LOWEST = tl.constexpr(-(2**31))  # the rank of −inf, and of padding


def indexer_topk(a: TopkArguments, out: Tensor) -> None:
    logits = a.logits
    (tokens, columns), k = logits.shape, out.shape[1]
    if tokens == 0 or k == 0:
        return
    config = pick_topk_config(
        rows=tokens, columns=columns, k=k, num_sms=target(logits.device).num_sms
    )
    options = {
        "METHOD": config.method,
        "BLOCK": config.block,
        "STEP": config.step,
        "num_warps": config.num_warps,
        "maxnreg": 128,  # without this limit the compiler may spill a word
    }

    def int32(*shape: int) -> Tensor:
        return workspace.scratch(shape, torch.int32, logits.device)

    def buffers(programs: int) -> Tensor | None:
        """Candidates: their ranks, then their columns."""
        if config.method != "narrow":
            return None
        return int32(2, programs, config.block)

    bounds = (a.row_starts, a.row_ends)
    bound_strides = [0 if each is None else each.stride(0) for each in bounds]
    splits = config.splits
    found = int32(2, tokens, splits, k) if splits > 1 else None
    counts = int32(tokens, splits) if splits > 1 else None
    programs = config.programs(tokens * splits)
    launch(
        _select_kernel,
        (programs,),
        logits,
        None,
        *bounds,
        buffers(programs),
        found,
        counts,
        None if splits > 1 else out,
        tokens,
        columns,
        k,
        splits,
        logits.stride(0),
        *bound_strides,
        out.stride(0),
        **options,
    )
    if found is None:
        return
    programs = config.programs(tokens)
    launch(
        _select_kernel,
        (programs,),
        found,
        counts,
        None,
        None,
        buffers(programs),
        None,
        None,
        out,
        tokens,
        splits * k,
        k,
        1,
        found.stride(1),
        0,
        0,
        out.stride(0),
        **options,
    )


@triton.jit(do_not_specialize=["tokens", "columns", "k", "splits", "stride_starts", "stride_ends"])
def _select_kernel(
    source,  # [tokens, columns] float32 logits; or [2, tokens, splits, k] int32 candidates
    source_counts,  # [tokens, splits] candidates; None: logits
    row_starts,  # [tokens] or None
    row_ends,  # [tokens] or None
    buffers,  # [2, programs, BLOCK] int32 if METHOD is narrow, else None
    found,  # [2, tokens, splits, k] int32 candidates; None: this is the last launch
    counts,  # [tokens, splits]
    out,  # [tokens, k] int32 columns; None: candidates are written
    tokens,
    columns,
    k,
    splits,
    stride_source,
    stride_starts,
    stride_ends,
    stride_out,
    METHOD: tl.constexpr,
    BLOCK: tl.constexpr,  # columns of a search
    STEP: tl.constexpr,  # columns per iteration where ranks are read once: narrowing down, storing
):
    for item in range(tl.program_id(0), tokens * splits, tl.num_programs(0)):
        row = (item // splits).to(tl.int64)
        row_source = source + row * stride_source
        row_counts = None
        if source_counts is not None:
            row_counts = source_counts + row * (columns // k)
        row_start, row_end = columns * 0, columns
        if row_starts is not None:
            row_start = tl.maximum(tl.load(row_starts + row * stride_starts).to(tl.int32), 0)
        if row_ends is not None:
            row_end = tl.minimum(tl.load(row_ends + row * stride_ends).to(tl.int32), columns)
        width = tl.cdiv(tl.maximum(row_end - row_start, 0), splits)
        first = row_start + (item % splits) * width
        last = tl.minimum(first + width, row_end)

        slot = row * splits + item % splits
        best = found + slot * k if out is None else out + row * stride_out
        # offset from the ranks of candidates to their columns
        offset = None if source_counts is None else columns.to(tl.int64) * tokens
        best_offset = (splits * k).to(tl.int64) * tokens if out is None else None
        if METHOD == "narrow":
            buffer = buffers + tl.program_id(0).to(tl.int64) * BLOCK
            buffer_offset = tl.num_programs(0).to(tl.int64) * BLOCK
            num_held = _narrow(
                row_source, offset, row_counts, first, last, row_start, k, buffer, buffer_offset,
                BLOCK, STEP,
            )  # fmt: skip
            floor, num_equal = _search(buffer, buffer_offset, None, 0, num_held, 0, k, True, BLOCK)
            taken = _store_best(
                buffer,
                buffer_offset,
                None,
                0,
                num_held,
                0,
                k,
                floor,
                num_equal,
                best,
                best_offset,
                STEP,
            )
            tl.debug_barrier()  # before the next row reuses the buffer
        else:
            FITS: tl.constexpr = METHOD == "whole"
            floor, num_equal = _search(
                row_source, offset, row_counts, first, last, row_start, k, FITS, BLOCK
            )
            taken = _store_best(
                row_source, offset, row_counts, first, last, row_start, k, floor, num_equal, best,
                best_offset, STEP,
            )  # fmt: skip
        if out is None:
            tl.store(counts + slot, taken)
        else:
            for start in range(taken, k, STEP):
                index = start + tl.arange(0, STEP)
                tl.store(best + index, -1, mask=index < k)


@triton.jit
def _narrow(
    source, offset, counts, first, last, row_start, k, buffer, buffer_offset, BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Fill the buffer with candidates, among them the k best of [first, last); returns how many."""
    floor = tl.full([], LOWEST, tl.int32)
    num_held = k * 0
    for start in range(first, last, STEP):
        rank, column = _load_ranked(source, offset, counts, start, last, row_start, k, STEP)
        # the buffer always has room for a step beside the k best: each is at most half a block
        if num_held > BLOCK - STEP:
            tl.debug_barrier()  # appended candidates are visible
            floor, num_equal = _search(buffer, buffer_offset, None, 0, num_held, 0, k, True, BLOCK)
            num_held = _store_best(
                buffer,
                buffer_offset,
                None,
                0,
                num_held,
                0,
                k,
                floor,
                num_equal,
                buffer,
                buffer_offset,
                STEP,
            )
            tl.debug_barrier()
        # columns ascend: a logit equal to the k-th best comes too late
        num_held, _ = _append_best(rank, column, floor, k * 0, num_held, buffer, buffer_offset)
    tl.debug_barrier()
    return num_held


@triton.jit
def _search(
    source, offset, counts, first, last, row_start, k, FITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """(floor, num_equal): the k best are the ranks above the floor and the first `num_equal` equal
    to it.

    FITS  all ranks fit one block and stay in registers; otherwise they are read for every bit
    """
    ranks = None
    if FITS:
        ranks, _ = _load_ranked(source, offset, counts, first, last, row_start, k, BLOCK)
    known = tl.full([], LOWEST, tl.int32)  # at least k ranks are as large
    floor = known
    above = _count_above(ranks, source, offset, counts, first, last, row_start, k, floor, BLOCK)
    is_exact = above <= k
    bit = tl.full([], 31, tl.int32)
    while (bit >= 0) & (not is_exact):
        bound = known + (tl.full([], 1, tl.int32) << bit)  # bit 31 makes the lowest number 0
        reached = _count_above(
            ranks, source, offset, counts, first, last, row_start, k, bound - 1, BLOCK
        )
        known = tl.where(reached >= k, bound, known)
        is_exact = reached == k
        floor = tl.where(is_exact, bound - 1, known)
        bit -= 1
    num_equal = k * 0
    if not is_exact:
        above = _count_above(ranks, source, offset, counts, first, last, row_start, k, floor, BLOCK)
        num_equal = k - above
    return floor, num_equal


@triton.jit
def _count_above(
    ranks, source, offset, counts, first, last, row_start, k, floor, BLOCK: tl.constexpr
):  # fmt: skip
    if ranks is not None:
        return tl.sum((ranks > floor).to(tl.int32), 0)
    else:  # noqa: RET505
        above = k * 0
        for start in range(first, last, BLOCK):
            rank, _ = _load_ranked(source, offset, counts, start, last, row_start, k, BLOCK)
            above += tl.sum((rank > floor).to(tl.int32), 0)
        return above


@triton.jit
def _store_best(
    source, offset, counts, first, last, row_start, k, floor, num_equal, best, best_offset,
    STEP: tl.constexpr,
):  # fmt: skip
    """Store the k best in their order; returns how many. `best` may be the source itself."""
    taken = k * 0
    for start in range(first, last, STEP):
        rank, column = _load_ranked(source, offset, counts, start, last, row_start, k, STEP)
        if offset is not None:
            tl.debug_barrier()  # every thread has read what may be overwritten
        taken, num_equal = _append_best(rank, column, floor, num_equal, taken, best, best_offset)
    return taken


@triton.jit
def _append_best(rank, column, floor, num_equal, taken, best, best_offset):
    """Store the selected ranks of a block after `taken` others; returns (taken, num_equal).

    best_offset  from the ranks of candidates to their columns; None: only columns are stored
    """
    is_better = rank > floor
    is_equal = rank == floor
    # both counts in one sum: a block has fewer than 2**15 columns
    packed = is_better.to(tl.int32) + (is_equal.to(tl.int32) << 16)
    before = tl.cumsum(packed, 0) - packed
    equals_before = before >> 16
    index = taken + (before & 0xFFFF) + tl.minimum(equals_before, num_equal)
    is_taken = is_better | (is_equal & (equals_before < num_equal))
    if best_offset is not None:
        tl.store(best + index, rank, mask=is_taken)
        tl.store(best + best_offset + index, column, mask=is_taken)
    else:
        tl.store(best + index, column, mask=is_taken)
    counts = tl.sum(packed, 0)
    equals_taken = tl.minimum(counts >> 16, num_equal)
    return taken + (counts & 0xFFFF) + equals_taken, num_equal - equals_taken


@triton.jit
def _load_ranked(source, offset, counts, start, last, row_start, k, BLOCK: tl.constexpr):
    """int32 (ranks, columns) [BLOCK] from index `start` on, of logits or, with `offset`, of
    candidates."""
    index = start + tl.arange(0, BLOCK)
    exists = index < last
    if offset is None:
        logits = tl.load(source + index, mask=exists, other=-float("inf"))
        return _rank(logits), index - row_start
    else:  # noqa: RET505
        if counts is not None:
            count = tl.load(counts + index // k, mask=exists, other=0)
            exists = index % k < count
        rank = tl.load(source + index, mask=exists, other=LOWEST)
        return rank, tl.load(source + offset + index, mask=exists, other=0)


@triton.jit
def _rank(logits):
    """int32 ranks in the order of the logits: NaN highest, 0 and −0 equal, LOWEST for −inf only."""
    bits = logits.to(tl.int32, bitcast=True)
    bits = tl.where(logits == 0.0, 0, bits)
    bits = tl.where(logits != logits, 0x7FFFFFFF, bits)
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative numbers descend with their magnitude
    return tl.where(logits == -float("inf"), LOWEST, rank)
