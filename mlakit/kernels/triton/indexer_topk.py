"""The k best columns of every row of logits, portable Triton; `select_rows` as physical rows.

Maths      the k-th best rank is found by a search: count the ranks above a floor, until exactly k
           are or until all that are left are equal
Work       one program per row, or per split of a row where rows are few; a second launch then
           selects from the candidates of all splits
Methods    whole: all ranks of a row stay in registers. narrow: a sample of the row gives a floor
           that a few more than k logits are above; each warp reads a run of columns and lists its
           candidates above the floor, without waiting for others. Where they are too few or too
           many, the row is read again into one buffer; wherever that is full only its k best stay.
           reread: the row is read again for every step of a bisection
Order      by column; among equal logits the lower columns win; NaN ranks above every number
Memory     narrow: for every program that runs at once a list per warp, each with room for all
           candidates of 8 bytes
Limits     none
Lineage    own design; ideas: radix select, sample select
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlakit.cache import PageTable
from mlakit.kernels import workspace
from mlakit.kernels.arguments import SelectBlockArguments, TopkArguments, stride_of
from mlakit.kernels.launch import launch, target
from mlakit.kernels.triton.arguments import LengthArguments, length_arguments, page_table_arguments
from mlakit.kernels.triton.configs import pick_topk_config, power_of_two
from mlakit.kernels.triton.primitives import mask_interval
from mlakit.kernels.triton.topk_search import (
    LOWEST,
    STRIDE,
    append,
    as_threshold,
    below,
    count_above,
    find_candidate,
    gather,
    load_logits,
    load_ranks,
    lowest_rank,
    rank_logits,
    sample_floor,
    search,
    search_again,
    split_candidates,
    split_quads,
    store_candidate,
    take_best,
)
from mlakit.model.masks import NULL, Mask, MaskTraits


def indexer_topk(a: TopkArguments, out: Tensor) -> None:
    bounds = BoundArguments(
        *(a.row_starts, a.row_ends, stride_of(a.row_starts, 0), stride_of(a.row_ends, 0))
    )
    _select(a.logits, out, bounds, None, length_arguments(None, None), NULL)


def select_rows(a: SelectBlockArguments, out: Tensor) -> None:
    """Rows are query tokens: the kernel finds what each sees, and looks its columns up."""
    _select(
        *(a.logits, out, NO_BOUNDS, a.page_table, length_arguments(a.q_starts, a.kv_lens), a.mask),
        first_token=a.first_token,
        page_size=a.page_size,
    )


def _select(
    logits: Tensor,
    out: Tensor,
    bounds: BoundArguments,
    page_table: PageTable | None,
    lengths: LengthArguments,
    mask: Mask,
    *,
    first_token: int = 0,
    page_size: int = 0,
) -> None:
    (tokens, columns), k = logits.shape, out.shape[1]
    if tokens == 0 or k == 0:
        return
    config = pick_topk_config(
        rows=tokens, columns=columns, k=k, num_sms=target(logits.device).num_sms
    )
    splits, programs = config.splits, config.programs(tokens)
    lists = counts = None
    method, warps = config.method, config.num_warps
    lists_per_row = power_of_two(splits * warps)
    if method == "narrow":
        shape = (programs, warps, config.block // 2 + STRIDE.value)
        lists = workspace.scratch(shape, torch.int64, logits.device)
        shape = (tokens, lists_per_row + 1) if splits > 1 else (programs, lists_per_row)
        counts = workspace.scratch(shape, torch.int32, logits.device)
    if splits > 1:
        method = "split"
    table, stride_table_request = page_table_arguments(page_table)
    arguments = {
        "tokens": tokens,
        "columns": columns,
        "k": k,
        "splits": splits,
        "first_token": first_token,
        "num_requests": 0 if lengths.kv_lens is None else lengths.kv_lens.shape[0],
        "window": mask.window,
        "stride_table_request": stride_table_request,
        "scores": ScoreArguments(logits, out, logits.stride(0), out.stride(0)),
        "candidates": CandidateArguments(lists, counts),
        "bounds": bounds,
        "lengths": lengths,
        "page_table": table,
    }
    is_looked_up = page_size > 0 and method == "whole"
    traits = Traits(
        PAGE=page_size,
        IS_FLAT=table.starts is not None,
        MASK=mask.traits,
        METHOD=method,
        BLOCK=config.block,
        STEP=config.step // 4 if is_looked_up else config.step,  # looking up takes registers
        SAMPLE=config.sample,
        AT_ONCE=min(config.block // 2, 256 * warps),
        WARPS=warps,
        LISTS=lists_per_row,
    )
    # without the limit of registers the compiler may spill a word
    launch(_select_kernel, (programs,), **arguments, TRAITS=traits, num_warps=warps, maxnreg=128)
    if splits > 1:
        # one program per row: most SMs are idle
        merging = traits._replace(METHOD="merge")
        launch(_select_kernel, (tokens,), **arguments, TRAITS=merging, num_warps=16, maxnreg=128)


class ScoreArguments(NamedTuple):
    """The logits, and the best of them."""

    logits: Tensor  # [tokens, columns] float32
    out: Tensor  # [tokens, k] int32: columns, or physical rows
    stride_logits: int
    stride_out: int


class CandidateArguments(NamedTuple):
    """The scratch of METHOD narrow, split and merge."""

    lists: Tensor | None  # [programs, WARPS, BLOCK // 2 + STRIDE] int64
    counts: Tensor | None  # [programs, LISTS] or, with splits, [tokens, LISTS + 1] with the floor


class BoundArguments(NamedTuple):
    """The columns of a row that may be selected, where they are given."""

    starts: Tensor | None  # [tokens]
    ends: Tensor | None  # [tokens]
    stride_starts: int
    stride_ends: int


NO_BOUNDS = BoundArguments(None, None, 0, 0)


class Best(NamedTuple):
    """Where the columns of a row's k best go, in the kernel."""

    columns: tl.tensor
    entries: tl.tensor  # of the page table, to store physical rows instead, where PAGE is not 0
    stride_entry: tl.tensor


class Traits(NamedTuple):
    """The constants that the kernel is compiled for."""

    PAGE: int  # 0: columns are stored, not rows
    IS_FLAT: bool  # the page table is
    MASK: MaskTraits
    METHOD: str
    BLOCK: int  # candidates of a buffer, or columns whose ranks are in registers
    STEP: int  # columns per iteration
    SAMPLE: int  # columns
    AT_ONCE: int  # candidates stored per iteration
    WARPS: int  # lists of each program of METHOD narrow and split
    LISTS: int  # lists of a row, a power of two: all splits have WARPS of them at most


# differ from call to call: specialised, each would compile further kernels
VARYING = [
    *("tokens", "columns", "k", "splits", "first_token", "num_requests", "window"),
    "stride_table_request",
]


@triton.jit(do_not_specialize=VARYING)
def _select_kernel(
    tokens,
    columns,
    k,
    splits,
    first_token,
    num_requests,
    window,
    stride_table_request,
    scores,  # `ScoreArguments`
    candidates,  # `CandidateArguments`
    bounds,  # `BoundArguments`
    lengths,  # `LengthArguments`: rows are query tokens, from `first_token` on; or None
    page_table,  # `PageTableArguments`, with lengths
    TRAITS: tl.constexpr,
):
    MASK: tl.constexpr = TRAITS.MASK
    METHOD: tl.constexpr = TRAITS.METHOD
    BLOCK: tl.constexpr = TRAITS.BLOCK
    STEP: tl.constexpr = TRAITS.STEP
    SAMPLE: tl.constexpr = TRAITS.SAMPLE
    WARPS: tl.constexpr = TRAITS.WARPS
    LISTS: tl.constexpr = TRAITS.LISTS
    IS_FLAT: tl.constexpr = TRAITS.IS_FLAT
    IS_MERGED: tl.constexpr = METHOD == "merge"
    items = tokens
    if METHOD == "split":
        items = tokens * splits
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = tl.zeros([], tl.int64) + item
        if METHOD == "split":
            row = row // splits
        source = scores.logits + row * scores.stride_logits
        first, last, origin = columns * 0, columns, columns * 0
        if bounds.starts is not None:
            start = tl.load(bounds.starts + row * bounds.stride_starts)
            first = tl.maximum(start.to(tl.int32), 0)
            origin = first
        if bounds.ends is not None:
            last = tl.load(bounds.ends + row * bounds.stride_ends).to(tl.int32)
        entries = scores.out  # not read
        if lengths.q_starts is not None:
            request, first, last = find_visible(
                first_token + row, lengths, num_requests, window, MASK
            )
            entries = page_table.entries + request * stride_table_request
            if IS_FLAT:
                first_entry = tl.load(page_table.starts + request * page_table.stride_starts)
                entries += first_entry.to(tl.int64) * page_table.stride_entry
        last = tl.minimum(last, columns)
        best = Best(scores.out + row * scores.stride_out, entries, page_table.stride_entry)

        if METHOD == "narrow" or METHOD == "split" or IS_MERGED:
            ROOM: tl.constexpr = BLOCK // 2 + STRIDE
            if METHOD == "narrow":
                row_counts = candidates.counts + tl.program_id(0) * LISTS
                at_row = tl.program_id(0).to(tl.int64)
            else:
                row_counts = candidates.counts + row * (LISTS + 1)
                at_row = row * splits
            row_lists = candidates.lists + at_row * (WARPS * ROOM)
            if IS_MERGED:
                each = tl.arange(0, LISTS)
                held = tl.load(row_counts + each, mask=each < splits * WARPS, other=0)
                sampled = tl.load(row_counts + LISTS)
                tl.debug_barrier()  # before they are overwritten
            else:
                sampled = sample_floor(source, first, last, k, BLOCK // 2, SAMPLE)
                if METHOD == "split":
                    split = item % splits
                    width = tl.cdiv(tl.maximum(last - first, 0), splits)
                    first += split * width
                    last = tl.minimum(first + width, last)
                    row_lists += split.to(tl.int64) * (WARPS * ROOM)
                    tl.store(row_counts + LISTS, sampled)
                    row_counts += split * WARPS
                held = gather(source, first, last, origin, sampled, row_lists, ROOM, WARPS)
            if METHOD == "split":
                tl.store(row_counts + tl.arange(0, WARPS), held)
            else:
                total = tl.sum(held, 0)
                is_enough = (total >= k) | (sampled == LOWEST)
                if is_enough & (total <= BLOCK // 2):
                    tl.store(row_counts + tl.arange(0, LISTS), tl.cumsum(held, 0) - held)
                    tl.debug_barrier()
                    _store_gathered(row_lists, row_counts, total, k, sampled, best, TRAITS)
                else:  # an unlucky sample, or many equal logits
                    tl.debug_barrier()
                    lowest = tl.full([], LOWEST, tl.int32)
                    buffer = row_lists.to(tl.pointer_type(tl.int32))
                    floor = tl.where(is_enough, sampled, lowest)
                    num_held, floor = _narrow(
                        source, first, last, origin, k, floor, buffer, BLOCK, STEP
                    )
                    _store_candidates(buffer, num_held, k, floor, best, TRAITS)
                tl.debug_barrier()  # before the next row reuses the lists
        else:
            IN_REGISTERS: tl.constexpr = METHOD == "whole"
            begin = first // 4 * 4
            lowest = tl.full([], LOWEST, tl.int32)
            taken = k * 0
            if IN_REGISTERS:
                ranks = rank_logits(load_logits(source, begin, first, last, BLOCK))
                floor, num_equal = search(
                    ranks, k, lowest_rank(ranks) - 1, count_above(ranks, LOWEST)
                )
            else:
                floor, num_equal = search_again(source, None, first, last, k, lowest, BLOCK)
            if IN_REGISTERS and STEP == BLOCK:
                column = begin - origin + tl.arange(0, BLOCK)
                taken, num_equal = _store_best(ranks, column, floor, num_equal, taken, best, TRAITS)
            else:
                for step in range(tl.cdiv(last - begin, STEP)):
                    start = step * STEP + begin
                    some = rank_logits(load_logits(source, start, first, last, STEP))
                    column = start - origin + tl.arange(0, STEP)
                    taken, num_equal = _store_best(
                        some, column, floor, num_equal, taken, best, TRAITS
                    )
            _fill(best, taken, k, STEP)


@triton.jit
def _narrow(source, first, last, origin, k, floor, buffer, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Fill the buffer with candidates that rank above `floor`, among them the k best of those in
    [first, last). Returns (number of candidates, at most BLOCK // 2; a floor that none is below).
    """
    num_held = k * 0
    # whole steps of aligned columns: the compiler then loads 16 bytes at a time
    begin = first // 4 * 4
    steps = tl.where(last > first, tl.cdiv(last - begin, STEP), 0)
    logits = load_logits(source, begin, first, last, STEP)
    for step in range(steps + 1):
        # room for a step beside the k best: each is at most half a block
        if num_held > tl.where(step < steps, BLOCK - STEP, BLOCK // 2):
            tl.debug_barrier()  # appended candidates are visible
            floor, num_held = _keep_best(buffer, num_held, k, floor, BLOCK, STEP // 2)
            tl.debug_barrier()
        if step < steps:
            start = step * STEP + begin
            following = load_logits(source, start + STEP, first, last, STEP)  # while this waits
            # columns ascend: a logit equal to the k-th best comes too late
            num_held = append(logits, start - origin, as_threshold(floor), num_held, buffer, BLOCK)
            logits = following
    tl.debug_barrier()
    return num_held, floor


@triton.jit
def _store_gathered(lists, starts, total, k, floor, best, TRAITS: tl.constexpr):
    """`_store_candidates` of lists of candidates."""
    BLOCK: tl.constexpr = TRAITS.BLOCK
    AT_ONCE: tl.constexpr = TRAITS.AT_ONCE
    LISTS: tl.constexpr = TRAITS.LISTS
    ROOM: tl.constexpr = BLOCK // 2 + STRIDE
    index = tl.arange(0, BLOCK // 2)
    exists = index < total
    packed = tl.load(find_candidate(index, lists, starts, ROOM, LISTS), mask=exists, other=0)
    ranks, column = split_candidates(packed, exists)
    floor, num_equal = search(ranks, k, below(floor), total)
    taken = k * 0
    if BLOCK // 2 == AT_ONCE:
        taken, num_equal = _store_best(ranks, column, floor, num_equal, taken, best, TRAITS)
    else:
        for start in range(0, total, AT_ONCE):
            some = start + tl.arange(0, AT_ONCE)
            at = find_candidate(some, lists, starts, ROOM, LISTS)
            found = split_candidates(tl.load(at, mask=some < total, other=0), some < total)
            taken, num_equal = _store_best(*found, floor, num_equal, taken, best, TRAITS)
    _fill(best, taken, k, TRAITS.STEP)


@triton.jit
def _keep_best(buffer, num_held, k, floor, SIZE: tl.constexpr, STEP: tl.constexpr):
    """Leave the k best of SIZE candidates, at most; returns (floor, number of candidates).

    It is rare: short steps leave its registers to the loop that it interrupts.
    """
    floor, num_equal = search_again(None, buffer, k * 0, num_held, k, below(floor), STEP)
    taken = k * 0
    for start in range(0, num_held, STEP):
        index = start + tl.arange(0, STEP)
        bits = tl.load(buffer + index, mask=index < num_held, other=0)
        column = tl.load(buffer + SIZE + index, mask=index < num_held, other=0)
        ranks = load_ranks(buffer + index, index < num_held)
        tl.debug_barrier()  # every thread has read what may be overwritten
        places, taken, num_equal = take_best(ranks, floor, num_equal, taken)
        logits, columns = split_quads(bits.to(tl.float32, bitcast=True)), split_quads(column)
        for i in tl.static_range(4):
            store_candidate(buffer + places[i][1], logits[i], columns[i], places[i][0], SIZE)
    return floor, taken


@triton.jit
def _store_candidates(buffer, num_held, k, floor, best, TRAITS: tl.constexpr):
    """Store the columns of the k best candidates, and −1 after them; as rare as `_keep_best`."""
    STEP_AGAIN: tl.constexpr = TRAITS.STEP // 2
    floor, num_equal = search_again(None, buffer, k * 0, num_held, k, below(floor), STEP_AGAIN)
    taken = k * 0
    for start in range(0, num_held, STEP_AGAIN):
        some = start + tl.arange(0, STEP_AGAIN)
        ranks = load_ranks(buffer + some, some < num_held)
        column = tl.load(buffer + TRAITS.BLOCK + some, mask=some < num_held, other=0)
        taken, num_equal = _store_best(ranks, column, floor, num_equal, taken, best, TRAITS)
    _fill(best, taken, k, TRAITS.STEP)


@triton.jit
def _store_best(ranks, column, floor, num_equal, taken, best, TRAITS: tl.constexpr):
    """Store the selected columns of a block after `taken` others; returns (taken, num_equal)."""
    PAGE: tl.constexpr = TRAITS.PAGE
    IS_FLAT: tl.constexpr = TRAITS.IS_FLAT
    places, taken, num_equal = take_best(ranks, floor, num_equal, taken)
    columns = split_quads(column)
    for i in tl.static_range(4):
        found = columns[i]
        if PAGE > 0:
            entry = found if IS_FLAT else found // PAGE
            at = best.entries + entry.to(tl.int64) * best.stride_entry
            named = tl.load(at, mask=places[i][0], other=0)
            found = (named if IS_FLAT else named * PAGE + found % PAGE).to(tl.int32)
        tl.store(best.columns + places[i][1], found, mask=places[i][0])
    return taken, num_equal


@triton.jit
def _fill(best, taken, k, STEP: tl.constexpr):
    for start in range(taken, k, STEP):
        index = start + tl.arange(0, STEP)
        tl.store(best.columns + index, -1, mask=index < k)


@triton.jit
def find_visible(token, lengths, num_requests, window, MASK: tl.constexpr):
    """Return (request, first, last): the keys [first, last) of a request that a query token sees.

    token  int64
    """
    request = _find_request(token, lengths, num_requests)
    end_at = lengths.q_starts + (request + 1) * lengths.stride_q_starts
    q_end = tl.load(end_at).to(tl.int32)
    kv_len = tl.load(lengths.kv_lens + request * lengths.stride_kv_lens).to(tl.int32)
    first, last = mask_interval(kv_len - q_end + token.to(tl.int32), kv_len, window, MASK)
    return request, first, last


@triton.jit
def _find_request(token, lengths, num_requests):
    """The request of a query token, int64: the last one that starts at or before it."""
    low, high = tl.zeros([], tl.int64), tl.zeros([], tl.int64) + num_requests
    while high - low > 1:
        middle = (low + high) // 2
        start_at = lengths.q_starts + middle * lengths.stride_q_starts
        start = tl.load(start_at).to(tl.int64)
        low, high = tl.where(start <= token, middle, low), tl.where(start <= token, high, middle)
    return low
