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
    """Return int32 ranks of float32 logits."""
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
    """Return int32 ranks of candidates, LOWEST where there is none."""
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
def guess(low, high, above_low, above_high, wanted, IS_TAIL: tl.constexpr):
    """A rank between `low` and `high` that about `wanted` ranks are above, if logits between them
    are evenly spread; with IS_TAIL, if they become exponentially fewer, as above a mean."""
    start, end = as_threshold(low), as_threshold(high)
    if IS_TAIL:
        most = above_low.to(tl.float32)
        least = tl.maximum(above_high.to(tl.float32), 0.5)
        share = tl.log2(most / tl.maximum(wanted, 1).to(tl.float32)) / tl.log2(most / least)
    else:
        share = (above_low - wanted).to(tl.float32) / (above_low - above_high).to(tl.float32)
    middle = rank_logits(start + share * (end - start))
    return tl.minimum(tl.maximum(middle, low + 1), high - 1)


@triton.jit
def find_floor(ranks, least, most, low, above_low, high, IS_TAIL: tl.constexpr):
    """Look for a floor that `least` to `most` ranks are above, between `low`, which `above_low` and
    too many are above, and `high`, which none is above.

    Some guesses, then a bisection of the interval, and so on. Returns (is_found, floor, low, high);
    where none is found, high is low + 1.

    IS_TAIL  few are wanted
    """
    EVERY: tl.constexpr = 8 if IS_TAIL else 3
    is_found = low > NAN  # false
    floor = low
    above_high = least * 0
    step = least * 0
    while (low + 1 < high) & (not is_found):
        if step % EVERY < EVERY - 1:
            floor = guess(low, high, above_low, above_high, (least + most) // 2, IS_TAIL)
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
    """Return (floor, num_equal): the k best are the ranks above the floor and the first `num_equal`
    equal to it.

    low  all ranks but LOWEST are above, which are `above_low`
    """
    num_equal = k * 0
    floor = low
    if above_low > k:
        is_found, floor, low, high = find_floor(
            ranks, k, k, low, above_low, tl.max(ranks, 0), False
        )
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

    The sample is of columns evenly spread, four at a time. Its k-th best by proportion has a
    standard deviation of less than its square root; the floor is four of them below. A long row
    has a sample of several times SAMPLE columns, of which registers hold the highest of each group:
    few are wanted, so that two of a group are among them only rarely, and then the floor is lower.
    """
    floor = tl.full([], LOWEST, tl.int32)
    width = tl.maximum(last - first, 0)
    times = tl.minimum(tl.maximum(width // (12 * SAMPLE), 1), 32)
    size = tl.minimum(width, times * SAMPLE)
    num_held = tl.minimum(width, SAMPLE)
    expected = k.to(tl.float32) * size.to(tl.float32) / tl.maximum(width, 1).to(tl.float32)
    least = (expected + 4.0 * tl.sqrt(expected) + 4.0).to(tl.int32)
    if (width > ROOM) & (least < num_held):
        quad = tl.arange(0, SAMPLE) // 4
        distance = width.to(tl.float32) / size.to(tl.float32)  # a fraction: up to the last columns
        ranks = _load_sample(source, quad, distance, first, last)
        for _ in range(1, times):
            quad += SAMPLE // 4
            ranks = tl.maximum(ranks, _load_sample(source, quad, distance, first, last))
        num_found = count_above(ranks, LOWEST)
        most = least + least // 16
        if num_found > most:  # else a row of few numbers: all are candidates
            low, high = lowest_rank(ranks) - 1, tl.max(ranks, 0)
            is_found, found, low, _ = find_floor(ranks, least, most, low, num_found, high, True)
            floor = tl.where(is_found, found, low)
    return floor


@triton.jit
def _load_sample(source, quad, distance, first, last):
    """Ranks of four neighbours of each quad of the sample; LOWEST outside [first, last)."""
    column = first // 4 * 4 + (quad.to(tl.float32) * distance).to(tl.int32) * 4
    column += tl.arange(0, quad.shape[0]) % 4
    exists = (column >= first) & (column < last)
    return rank_logits(tl.load(source + column, mask=exists, other=-float("inf")))


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


TILE = tl.constexpr(128)  # columns: four for each thread of a warp
TILES = tl.constexpr(4)  # of an iteration of `gather`
STRIDE = tl.constexpr(512)  # TILE * TILES columns


@triton.jit
def _load_tiles(at, column, first, last, is_inside):
    """Four tiles [LISTS, TILE], −inf outside [first, last)."""
    if is_inside:
        a, b = tl.load(at), tl.load(at + TILE)
        c, d = tl.load(at + 2 * TILE), tl.load(at + 3 * TILE)
    else:
        none = -float("inf")
        a = tl.load(at, mask=(column >= first) & (column < last), other=none)
        column += TILE
        b = tl.load(at + TILE, mask=(column >= first) & (column < last), other=none)
        column += TILE
        c = tl.load(at + 2 * TILE, mask=(column >= first) & (column < last), other=none)
        column += TILE
        d = tl.load(at + 3 * TILE, mask=(column >= first) & (column < last), other=none)
    return a, b, c, d


@triton.jit
def _count_tile(quads, threshold):
    a, b, c, d = quads
    # NaN ranks above every number
    count = (~(a <= threshold)).to(tl.int32) + (~(b <= threshold)).to(tl.int32)
    return count + (~(c <= threshold)).to(tl.int32) + (~(d <= threshold)).to(tl.int32)


@triton.jit
def _store_tile(quads, threshold, column, at):
    for i in tl.static_range(4):
        is_above = ~(quads[i] <= threshold)
        bits = quads[i].to(tl.int32, bitcast=True).to(tl.int64) << 32
        tl.store(at, bits | (column + i).to(tl.int64), mask=is_above)
        at += is_above.to(tl.int32)


@triton.jit
def _spread(of_list):
    """Return [LISTS] as [LISTS * TILE / 4]: for each quad that of its list."""
    LISTS: tl.constexpr = of_list.shape[0]
    return tl.reshape(tl.broadcast_to(of_list[:, None], [LISTS, TILE // 4]), [LISTS * TILE // 4])


@triton.jit
def gather(source, first, last, origin, floor, lists, ROOM: tl.constexpr, LISTS: tl.constexpr):
    """Store candidates for the logits of [first, last) above `floor` into LISTS lists, each of a
    run of columns, in their order. Returns how many each list has, int32 [LISTS]; those after
    ROOM - STRIDE are lost.

    lists  [LISTS, ROOM] int64: a logit's bits above its column

    A list for each warp: no warp waits for another. The counts of four tiles are bytes of one
    number, so that one prefix sum within the warp is of all of them.
    """
    QUADS: tl.constexpr = LISTS * TILE // 4
    threshold = as_threshold(floor)
    which = tl.arange(0, LISTS)
    begin = first // 4 * 4
    width = tl.maximum(last - first, 0) + (first - begin)
    length = tl.cdiv(width, LISTS * STRIDE) * STRIDE
    column = begin + which[:, None] * length + tl.arange(0, TILE)[None, :]
    at = source + column
    quad = _spread(begin - origin + which * length) + 4 * (tl.arange(0, QUADS) % (TILE // 4))
    held = which * 0
    end = begin + (LISTS - 1) * length + STRIDE  # of the last list's first stride
    a, b, c, d = _load_tiles(at, column, first, last, (begin >= first) & (end <= last))
    for start in range(0, length, STRIDE):
        after = start + STRIDE
        e, f, g, h = _load_tiles(
            at + after, column + after, first, last, (after < length) & (end + after <= last)
        )
        # keep vectors: the compiler might store a matrix by columns
        a, b = split_quads(tl.reshape(a, [4 * QUADS])), split_quads(tl.reshape(b, [4 * QUADS]))
        c, d = split_quads(tl.reshape(c, [4 * QUADS])), split_quads(tl.reshape(d, [4 * QUADS]))
        count = _count_tile(a, threshold) + (_count_tile(b, threshold) << 8)
        count += (_count_tile(c, threshold) << 16) + (_count_tile(d, threshold) << 24)
        counts = tl.reshape(count, [LISTS, TILE // 4])
        before = tl.reshape(tl.cumsum(counts, 1), [QUADS]) - count
        total = tl.sum(counts, 1)
        to = which * ROOM + tl.minimum(held, ROOM - STRIDE)
        _store_tile(a, threshold, quad, lists + _spread(to) + (before & 0xFF))
        to += total & 0xFF
        _store_tile(b, threshold, quad + TILE, lists + _spread(to) + ((before >> 8) & 0xFF))
        to += (total >> 8) & 0xFF
        _store_tile(c, threshold, quad + 2 * TILE, lists + _spread(to) + ((before >> 16) & 0xFF))
        to += (total >> 16) & 0xFF
        _store_tile(d, threshold, quad + 3 * TILE, lists + _spread(to) + ((before >> 24) & 0xFF))
        held += (total & 0xFF) + ((total >> 8) & 0xFF)
        held += ((total >> 16) & 0xFF) + ((total >> 24) & 0xFF)
        quad += STRIDE
        a, b, c, d = e, f, g, h
    return held


@triton.jit
def find_candidate(index, lists, starts, ROOM: tl.constexpr, LISTS: tl.constexpr):
    """Return the position of a candidate as if all lists were one.

    starts  [LISTS]: the index of the first candidate of each list
    """
    if LISTS <= 8:
        at = index
        before = tl.zeros([], tl.int32)
        for i in tl.static_range(1, LISTS):
            start = tl.load(starts + i)
            at += tl.where(index >= start, ROOM - (start - before), 0)  # past the list before
            before = start
        found = lists + at
    else:
        which = index * 0
        for i in tl.static_range(1, 16):
            if (LISTS >> i) > 0:
                later = which + (LISTS >> i)
                which = tl.where(index >= tl.load(starts + later), later, which)
        found = lists + which.to(tl.int64) * ROOM + (index - tl.load(starts + which))
    return found


@triton.jit
def split_candidates(packed, exists):
    """Return (ranks, columns) of candidates of `gather`; LOWEST where there is none."""
    logits = (packed >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(exists, rank_logits(logits), LOWEST), packed.to(tl.int32)


@triton.jit
def take_best(ranks, floor, num_equal, taken):
    """Find which ranks [N] are among the best, and their positions after `taken` earlier ones.
    Return a tuple of (is_taken, index) [N / 4] for each of `split_quads`, then taken and num_equal
    after them."""
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
    """Return (is_taken, index)"""
    equals_before = before >> 16
    index = taken + (before & 0xFFFF) + tl.minimum(equals_before, num_equal)
    is_taken = (packed == 1) | ((packed > 1) & (equals_before < num_equal))
    return is_taken, index
