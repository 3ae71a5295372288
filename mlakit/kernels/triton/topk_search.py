"""Device functions of `indexer_topk`: ranks of logits, and the search for the k-th best.

A rank is an int32 in the order of logits: NaN highest, 0 and −0 equal, LOWEST for −inf and padding.
A buffer of SIZE candidates is their float32 logits as int32, then their columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**31))  # the rank of −inf, and of padding
SMALLEST = tl.constexpr(-(2**31) + 0x800000)  # of the smallest finite number
INFINITE = tl.constexpr(0x7F800000)  # of +inf
NAN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def rank_logits(logits):
    """int32 ranks of float32 logits."""
    bits = logits.to(tl.int32, bitcast=True)
    bits = tl.where(logits == 0.0, 0, bits)
    bits = tl.where(logits != logits, NAN, bits)
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative numbers descend with their magnitude
    return tl.where(logits == -float("inf"), LOWEST, rank)


@triton.jit
def as_threshold(floor):
    """A float32 t such that `not (x <= t)` holds for every logit x that ranks above `floor`.

    No logit has rank −1, whose bits are those of −0, nor a rank between −inf and finite numbers.
    """
    rank = tl.where(floor == -1, -2, floor)
    bits = rank ^ ((rank >> 31) & 0x7FFFFFFF)
    threshold = bits.to(tl.float32, bitcast=True)
    threshold = tl.where(rank >= INFINITE, float("inf"), threshold)
    return tl.where(rank < SMALLEST, -float("inf"), threshold)


@triton.jit
def below(floor):
    """The next rank, where there is one."""
    return tl.maximum(floor, LOWEST + 1) - 1


@triton.jit
def load_logits(source, start, first, last, BLOCK: tl.constexpr):
    """float32 [BLOCK] from column `start` on, a multiple of 4; −inf outside [first, last)."""
    index = start + tl.arange(0, BLOCK)
    if (start >= first) & (start + BLOCK <= last):
        logits = tl.load(source + index)  # without a mask: 16 bytes at a time
    else:
        exists = (index >= first) & (index < last)
        logits = tl.load(source + index, mask=exists, other=-float("inf"))
    return logits


@triton.jit
def load_ranks(at, exists):
    """int32 ranks of candidates, LOWEST where there is none."""
    bits = tl.load(at, mask=exists, other=0)
    return tl.where(exists, rank_logits(bits.to(tl.float32, bitcast=True)), LOWEST)


@triton.jit
def store_candidate(at, logits, column, is_taken, SIZE: tl.constexpr):
    tl.store(at, logits.to(tl.int32, bitcast=True), mask=is_taken)
    tl.store(at + SIZE, column, mask=is_taken)


@triton.jit
def count_above(ranks, floor):
    return tl.sum((ranks > floor).to(tl.int32), 0)


@triton.jit
def lowest_rank(ranks):
    """The lowest but LOWEST."""
    return tl.min(tl.where(ranks == LOWEST, NAN, ranks), 0)


@triton.jit
def guess(low, high, above_low, above_high, wanted):
    """A rank between `low` and `high` that about `wanted` ranks are above, if logits between them
    are evenly spread."""
    start, end = as_threshold(low), as_threshold(high)
    share = (above_low - wanted).to(tl.float32) / (above_low - above_high).to(tl.float32)
    middle = rank_logits(start + share * (end - start))
    return tl.minimum(tl.maximum(middle, low + 1), high - 1)


@triton.jit
def find_floor(ranks, least, most, low, above_low, high):
    """Look for a floor that `least` to `most` ranks are above, between `low`, which `above_low` and
    too many are above, and `high`, which none is above.

    Two guesses, then a bisection of the interval, and so on. Returns (is_found, floor, low, high);
    where none is found, high is low + 1.
    """
    is_found = low > NAN  # false
    floor = low
    above_high = least * 0
    step = least * 0
    while (low + 1 < high) & (not is_found):
        if step % 3 < 2:
            floor = guess(low, high, above_low, above_high, (least + most) // 2)
        else:
            floor = (low & high) + ((low ^ high) >> 1)  # the mean, without overflow
        above = count_above(ranks, floor)
        is_found = (above >= least) & (above <= most)
        above_low = tl.where(above > most, above, above_low)
        low = tl.where(above > most, floor, low)
        above_high = tl.where(above < least, above, above_high)
        high = tl.where(above < least, floor, high)
        step += 1
    return is_found, floor, low, high


@triton.jit
def search(ranks, k, low, above_low):
    """(floor, num_equal): the k best are the ranks above the floor and the first `num_equal` equal
    to it.

    low  all ranks but LOWEST are above, which are `above_low`
    """
    num_equal = k * 0
    floor = low
    if above_low > k:
        is_found, floor, low, high = find_floor(ranks, k, k, low, above_low, tl.max(ranks, 0))
        if not is_found:
            floor = high
            num_equal = k - count_above(ranks, high)
    return floor, num_equal


@triton.jit
def search_again(source, candidates, first, last, k, low, BLOCK: tl.constexpr):
    """`search` of logits or candidates that are read again for every step of the bisection."""
    num_equal = k * 0
    floor = low
    high = tl.full([], NAN, tl.int32)
    is_exact = _count_again(source, candidates, first, last, low, BLOCK) <= k
    while (low + 1 < high) & (not is_exact):
        floor = (low & high) + ((low ^ high) >> 1)
        above = _count_again(source, candidates, first, last, floor, BLOCK)
        is_exact = above == k
        low = tl.where(above > k, floor, low)
        high = tl.where(above < k, floor, high)
    if not is_exact:
        floor = high
        num_equal = k - _count_again(source, candidates, first, last, high, BLOCK)
    return floor, num_equal


@triton.jit
def _count_again(source, candidates, first, last, floor, BLOCK: tl.constexpr):
    begin = first // 4 * 4
    above = begin * 0
    for step in range(tl.cdiv(last - begin, BLOCK)):
        if source is not None:
            ranks = rank_logits(load_logits(source, step * BLOCK + begin, first, last, BLOCK))
        else:
            index = step * BLOCK + tl.arange(0, BLOCK)
            ranks = load_ranks(candidates + index, index < last)
        above += count_above(ranks, floor)
    return above


@triton.jit
def sample_floor(source, first, last, k, ROOM: tl.constexpr, SAMPLE: tl.constexpr):
    """A rank that a few more than k logits of [first, last) are above, most likely; LOWEST where
    ROOM holds them all.

    The sample is of columns at one distance, four at a time. Its k-th best by proportion has a
    standard deviation of less than its square root; the floor is four of them below.
    """
    floor = tl.full([], LOWEST, tl.int32)
    width = last - first
    size = tl.minimum(width, SAMPLE)
    expected = k.to(tl.float32) * size.to(tl.float32) / tl.maximum(width, 1).to(tl.float32)
    least = (expected + 4.0 * tl.sqrt(expected) + 4.0).to(tl.int32)
    if (width > ROOM) & (least < size):
        index = tl.arange(0, SAMPLE)
        distance = 4 * tl.maximum(width // SAMPLE, 1)
        column = first // 4 * 4 + index // 4 * distance + index % 4
        exists = (column >= first) & (column < last)
        ranks = rank_logits(tl.load(source + column, mask=exists, other=-float("inf")))
        high = tl.max(ranks, 0)
        low = tl.minimum(lowest_rank(ranks), high) - 1
        if high > LOWEST:
            is_found, found, low, _ = find_floor(ranks, least, least + least // 16, low, size, high)
            floor = tl.where(is_found, found, low)
    return floor


@triton.jit
def split_quads(x):
    """[N] as four tensors [N / 4]: every fourth element from the first, second, third, fourth on.

    A thread loads four neighbours at a time. Prefix sums over quads take a quarter of the shuffles
    of those over single elements, and stores of single elements move nothing between threads.
    """
    QUADS: tl.constexpr = x.shape[0] // 4
    even, odd = tl.split(tl.reshape(x, [QUADS, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def append(logits, column, threshold, num_held, buffer, SIZE: tl.constexpr):
    """Store candidates for the logits [N] above the threshold after `num_held` others; returns how
    many there are.

    column  of the first
    """
    column += 4 * tl.arange(0, logits.shape[0] // 4)
    a, b, c, d = split_quads(logits)
    # NaN ranks above every number
    is_a, is_b, is_c, is_d = (
        ~(a <= threshold),
        ~(b <= threshold),
        ~(c <= threshold),
        ~(d <= threshold),
    )
    count = is_a.to(tl.int32) + is_b.to(tl.int32) + is_c.to(tl.int32) + is_d.to(tl.int32)
    at = buffer + (num_held - count + tl.cumsum(count, 0))
    store_candidate(at, a, column, is_a, SIZE)
    at += is_a.to(tl.int32)
    store_candidate(at, b, column + 1, is_b, SIZE)
    at += is_b.to(tl.int32)
    store_candidate(at, c, column + 2, is_c, SIZE)
    at += is_c.to(tl.int32)
    store_candidate(at, d, column + 3, is_d, SIZE)
    return num_held + tl.sum(count, 0)


@triton.jit
def take_best(ranks, floor, num_equal, taken):
    """Which ranks [N] are among the best, and where they go after `taken` others: a tuple of
    (is_taken, index) [N / 4] for each of `split_quads`, then taken and num_equal after them."""
    a, b, c, d = split_quads(ranks)
    a, b, c, d = _compare(a, floor), _compare(b, floor), _compare(c, floor), _compare(d, floor)
    count = a + b + c + d
    before = tl.cumsum(count, 0) - count
    quads = (
        _place(a, before, num_equal, taken),
        _place(b, before + a, num_equal, taken),
        _place(c, before + a + b, num_equal, taken),
        _place(d, before + a + b + c, num_equal, taken),
    )
    total = tl.sum(count, 0)
    equals_taken = tl.minimum(total >> 16, num_equal)
    return quads, taken + (total & 0xFFFF) + equals_taken, num_equal - equals_taken


@triton.jit
def _compare(rank, floor):
    """1 for a rank above the floor, 2**16 for an equal one: a block has fewer than 2**15 columns,
    so that one sum has both counts."""
    return tl.where(rank > floor, 1, tl.where(rank == floor, 65536, 0))


@triton.jit
def _place(packed, before, num_equal, taken):
    """(is_taken, index)"""
    equals_before = before >> 16
    index = taken + (before & 0xFFFF) + tl.minimum(equals_before, num_equal)
    is_taken = (packed == 1) | ((packed > 1) & (equals_before < num_equal))
    return is_taken, index
