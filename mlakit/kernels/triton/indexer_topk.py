"""The k best columns of every row of logits.

Grid       parts of rows, one per program or, where each has a buffer, one after the other; the
           parts of a row meet in a second launch
Search     the k-th best rank is found bit by bit: how many ranks are at least so large? The ranks
           stay in registers meanwhile; the search ends early where exactly k are
Long rows  are narrowed down first: what beats the k best seen so far is noted in a buffer, and
           where that is full, its k best remain
Order      by column; of equal logits the lower columns are taken; NaN ranks above every number
Memory     a buffer per program that runs at once, and k candidates per part of a row
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

NOTHING = tl.constexpr(-(2**31))  # the rank of −inf, and of no column at all


def indexer_topk(a: TopkArguments, out: Tensor) -> None:
    logits = a.logits
    (tokens, columns), k = logits.shape, out.shape[1]
    if tokens == 0 or k == 0:
        return
    config = pick_topk_config(
        rows=tokens, columns=columns, k=k, num_sms=target(logits.device).num_sms
    )
    options = {
        "WAY": config.way,
        "BLOCK": config.block,
        "STEP": config.step,
        "num_warps": config.num_warps,
        "maxnreg": 128,  # with a limit of its own choice the compiler may spill a word
    }

    def int32(*shape: int) -> Tensor:
        return workspace.scratch(shape, torch.int32, logits.device)

    def buffers(programs: int) -> Tensor | None:
        """Candidates: their ranks, then their columns."""
        if config.way != "narrow":
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
    source,  # [tokens, columns] float32 logits; or [2, tokens, parts, k] int32 candidates
    source_counts,  # [tokens, parts] of candidates; None: logits
    row_starts,  # [tokens] or None
    row_ends,  # [tokens] or None
    buffers,  # [2, programs, BLOCK] int32 if WAY is narrow, else None
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
    WAY: tl.constexpr,
    BLOCK: tl.constexpr,  # columns of a search
    STEP: tl.constexpr,  # columns of what is read once: narrowing down, writing
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
        part = tl.cdiv(tl.maximum(row_end - row_start, 0), splits)
        first = row_start + (item % splits) * part
        last = tl.minimum(first + part, row_end)

        place = row * splits + item % splits
        best = found + place * k if out is None else out + row * stride_out
        # candidates' columns lie so far behind their ranks
        apart = None if source_counts is None else columns.to(tl.int64) * tokens
        best_apart = (splits * k).to(tl.int64) * tokens if out is None else None
        if WAY == "narrow":
            buffer = buffers + tl.program_id(0).to(tl.int64) * BLOCK
            buffer_apart = tl.num_programs(0).to(tl.int64) * BLOCK
            held = _narrow(
                row_source, apart, row_counts, first, last, row_start, k, buffer, buffer_apart,
                BLOCK, STEP,
            )  # fmt: skip
            floor, spare = _search(buffer, buffer_apart, None, 0, held, 0, k, True, BLOCK)
            taken = _write(
                buffer, buffer_apart, None, 0, held, 0, k, floor, spare, best, best_apart, STEP
            )
            tl.debug_barrier()  # the buffer is the next row's
        else:
            FITS: tl.constexpr = WAY == "whole"
            floor, spare = _search(
                row_source, apart, row_counts, first, last, row_start, k, FITS, BLOCK
            )
            taken = _write(
                row_source, apart, row_counts, first, last, row_start, k, floor, spare, best,
                best_apart, STEP,
            )  # fmt: skip
        if out is None:
            tl.store(counts + place, taken)
        else:
            for start in range(taken, k, STEP):
                slot = start + tl.arange(0, STEP)
                tl.store(best + slot, -1, mask=slot < k)


@triton.jit
def _narrow(
    source, apart, counts, first, last, row_start, k, buffer, buffer_apart, BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Fill the buffer with candidates, the k best of first:last among them; how many they are."""
    floor = tl.full([], NOTHING, tl.int32)
    held = k * 0
    for start in range(first, last, STEP):
        rank, column = _load_ranked(source, apart, counts, start, last, row_start, k, STEP)
        # room for a step beside the k best there always is: both are at most half a block
        if held > BLOCK - STEP:
            tl.debug_barrier()  # what was noted is there
            floor, spare = _search(buffer, buffer_apart, None, 0, held, 0, k, True, BLOCK)
            held = _write(
                buffer, buffer_apart, None, 0, held, 0, k, floor, spare, buffer, buffer_apart, STEP
            )
            tl.debug_barrier()
        # columns only rise: what equals the k-th best comes too late
        held, _ = _note(rank, column, floor, k * 0, held, buffer, buffer_apart)
    tl.debug_barrier()
    return held


@triton.jit
def _search(
    source, apart, counts, first, last, row_start, k, FITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """(floor, spare): the k best are those above the floor and the first `spare` that equal it.

    FITS  into one block, whose ranks stay in registers; else they are read again for every bit
    """
    ranks = None
    if FITS:
        ranks, _ = _load_ranked(source, apart, counts, first, last, row_start, k, BLOCK)
    known = tl.full([], NOTHING, tl.int32)  # k ranks or more are as large
    floor = known
    above = _count_above(ranks, source, apart, counts, first, last, row_start, k, floor, BLOCK)
    is_exact = above <= k
    bit = tl.full([], 31, tl.int32)
    while (bit >= 0) & (not is_exact):
        bound = known + (tl.full([], 1, tl.int32) << bit)  # of the least number bit 31 makes 0
        reached = _count_above(
            ranks, source, apart, counts, first, last, row_start, k, bound - 1, BLOCK
        )
        known = tl.where(reached >= k, bound, known)
        is_exact = reached == k
        floor = tl.where(is_exact, bound - 1, known)
        bit -= 1
    spare = k * 0
    if not is_exact:
        above = _count_above(ranks, source, apart, counts, first, last, row_start, k, floor, BLOCK)
        spare = k - above
    return floor, spare


@triton.jit
def _count_above(
    ranks, source, apart, counts, first, last, row_start, k, floor, BLOCK: tl.constexpr
):  # fmt: skip
    if ranks is not None:
        return tl.sum((ranks > floor).to(tl.int32), 0)
    else:  # noqa: RET505
        above = k * 0
        for start in range(first, last, BLOCK):
            rank, _ = _load_ranked(source, apart, counts, start, last, row_start, k, BLOCK)
            above += tl.sum((rank > floor).to(tl.int32), 0)
        return above


@triton.jit
def _write(
    source, apart, counts, first, last, row_start, k, floor, spare, best, best_apart,
    STEP: tl.constexpr,
):  # fmt: skip
    """Write the k best in their order; how many there are. `best` may be the source itself."""
    taken = k * 0
    for start in range(first, last, STEP):
        rank, column = _load_ranked(source, apart, counts, start, last, row_start, k, STEP)
        if apart is not None:
            tl.debug_barrier()  # all have read what may be overwritten
        taken, spare = _note(rank, column, floor, spare, taken, best, best_apart)
    return taken


@triton.jit
def _note(rank, column, floor, spare, taken, best, best_apart):
    """Write what is chosen of a block after `taken` others; (taken, spare) afterwards.

    As candidates, whose columns are `best_apart` behind their ranks; or None: columns only.
    """
    is_better = rank > floor
    is_equal = rank == floor
    # both counts in one sum: a block has fewer than 2**15 columns
    packed = is_better.to(tl.int32) + (is_equal.to(tl.int32) << 16)
    before = tl.cumsum(packed, 0) - packed
    equals_before = before >> 16
    place = taken + (before & 0xFFFF) + tl.minimum(equals_before, spare)
    is_taken = is_better | (is_equal & (equals_before < spare))
    if best_apart is not None:
        tl.store(best + place, rank, mask=is_taken)
        tl.store(best + best_apart + place, column, mask=is_taken)
    else:
        tl.store(best + place, column, mask=is_taken)
    total = tl.sum(packed, 0)
    equals_taken = tl.minimum(total >> 16, spare)
    return taken + (total & 0xFFFF) + equals_taken, spare - equals_taken


@triton.jit
def _load_ranked(source, apart, counts, start, last, row_start, k, BLOCK: tl.constexpr):
    """(ranks, columns) int32 [BLOCK] from index `start` on; of candidates if `apart`."""
    index = start + tl.arange(0, BLOCK)
    exists = index < last
    if apart is None:
        logits = tl.load(source + index, mask=exists, other=-float("inf"))
        return _rank(logits), index - row_start
    else:  # noqa: RET505
        if counts is not None:
            count = tl.load(counts + index // k, mask=exists, other=0)
            exists = index % k < count
        rank = tl.load(source + index, mask=exists, other=NOTHING)
        return rank, tl.load(source + apart + index, mask=exists, other=0)


@triton.jit
def _rank(logits):
    """int32 in the order of the logits: NaN above all, 0 and −0 alike, NOTHING for −inf only."""
    bits = logits.to(tl.int32, bitcast=True)
    bits = tl.where(logits == 0.0, 0, bits)
    bits = tl.where(logits != logits, 0x7FFFFFFF, bits)
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # larger negative numbers have larger magnitudes
    return tl.where(logits == -float("inf"), NOTHING, rank)
