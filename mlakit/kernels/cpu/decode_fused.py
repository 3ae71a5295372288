"""`mla_decode` by few calls of torch's fused attention, each over splits of many requests.

Maths      as `decode`; a cached row is K, and V in its first columns
Work       a split is some keys of one request for all of its queries. Splits of one length are the
           batch of one call, which torch shares out among its threads. How a request is split
           depends on its own length only
Memory     the rows of a call are gathered and dequantised at once, as many splits as fit
Limits     requests of few queries that see all keys up to an end. Others, and those whose result
           may be wrong (`fused.is_finite`, `fused.has_scores`), are left to `decode`
Lineage    own design; ideas: split-KV flash decoding
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from mlakit.cache import token_slots
from mlakit.kernels.arguments import DecodeArguments, filled
from mlakit.kernels.cpu.fused import (
    MIN_KEYS,
    SMALLEST_SCALE,
    Partial,
    attend,
    compute_dtype,
    has_scores,
    is_accurate,
    is_finite,
)
from mlakit.kernels.cpu.merge import merge_partials
from mlakit.kernels.cpu.workspace import MAX_BLOCK, even_slices, rows_that_fit

MIN_SPLIT_KEYS = 512  # as many as torch multiplies at a time
MAX_SPLITS = 64  # of a request
MAX_ROWS = 512  # queries × heads of a request
MIN_CALL_KEYS = 64  # the last split of a request is padded to a power of two
RUN_ELEMENTS = 2**14  # torch gathers runs of up to so many elements on several threads
CALL_BYTES = 10 << 20  # of rows that are gathered at a time: more leave the caches


class Request(NamedTuple):
    """The queries of one request, and the local keys [low, high) that each of them sees."""

    number: int  # in the batch
    tokens: range
    seen: Sequence[tuple[int, ...]]


class _Split(NamedTuple):
    """Keys [first, first + length) of a request, of which those past its end are padding."""

    first: int
    length: int
    is_last: bool


class _Member(NamedTuple):
    """A request of a group, whose requests have the same number of queries."""

    request: Request
    splits: Sequence[_Split]


def attend_requests(
    a: DecodeArguments, requests: Sequence[Request], out: Tensor, lse: Tensor
) -> list[Request]:
    """Write the results of the requests that this way can do; returns the others."""
    left: list[Request] = []
    alike: dict[tuple[int, torch.dtype], list[_Member]] = {}
    given = compute_dtype(a.q, filled(a.q_rope), a.layer.payload)
    if a.sink is not None:  # a result of 16 bits, rounded before and after it is scaled, is too far
        given = torch.float32
    for request in requests:
        has_keys = min(high for _, high in request.seen) >= MIN_KEYS
        dtype = given if has_keys else torch.float32
        member = _Member(request, list(_splits(request)))
        if _is_possible(a, member, dtype):
            alike.setdefault((len(request.tokens), dtype), []).append(member)
        else:
            left.append(request)
    for (_, dtype), same_length in alike.items():
        for group in _groups(a, same_length):
            if not _attend_group(a, group, dtype, out, lse):
                left += [member.request for member in group]
    return left


def _is_possible(a: DecodeArguments, member: _Member, dtype: torch.dtype) -> bool:
    longest = max((split.length for split in member.splits), default=0)
    return (
        len(member.request.tokens) * a.q.shape[1] <= MAX_ROWS
        and all(low == 0 for low, _ in member.request.seen)
        and longest <= rows_that_fit(2 * _bytes_per_key(a, dtype), at_least=0)
        and abs(a.softmax_scale) >= SMALLEST_SCALE
    )


def _bytes_per_key(a: DecodeArguments, dtype: torch.dtype) -> int:
    """Return the bytes of a gathered key, dequantised if it is not stored as `dtype`."""
    copies = 1 if a.layer.payload.dtype == dtype and a.layer.rope is None else 3
    return copies * dtype.itemsize * a.layer.codec.row.width


def _groups(a: DecodeArguments, members: Sequence[_Member]) -> Iterator[list[_Member]]:
    """Requests whose partials fit half of the workspace; those of equal length are neighbours."""
    row = a.layer.codec.row
    group: list[_Member] = []
    splits = 0
    rows = a.q.shape[1] * len(members[0].request.tokens)
    most = rows_that_fit(2 * 4 * rows * (row.width + 3 * row.v_width))
    for member in sorted(members, key=lambda member: len(member.splits)):
        own = len(member.splits) + 1  # the result
        if group and splits + own > most:
            yield group
            group, splits = [], 0
        group.append(member)
        splits += own
    yield group


def _splits(request: Request) -> Iterator[_Split]:
    ends = [high for _, high in request.seen]
    last = max(ends)
    length = max(MIN_SPLIT_KEYS, _power_of_two(-(-last // MAX_SPLITS)))
    tail = min(ends) // length * length  # from here on queries may differ in the keys they see
    for first in range(0, tail, length):
        yield _Split(first, length, is_last=False)
    if tail < last:
        yield _Split(tail, max(MIN_CALL_KEYS, _power_of_two(last - tail)), is_last=True)


def _power_of_two(n: int) -> int:
    """Return the smallest power of two that is n or more."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


def _attend_group(
    a: DecodeArguments, group: Sequence[_Member], dtype: torch.dtype, out: Tensor, lse: Tensor
) -> bool:
    """Write the results of requests with the same number of queries; False if one may be wrong."""
    heads, v_width = a.q.shape[1], a.layer.codec.row.v_width
    tokens = _tokens(group)
    q = torch.cat([a.q[tokens].to(dtype), filled(a.q_rope)[tokens].to(dtype)], -1)
    if a.q_scale is not None:
        q *= a.q_scale[tokens][:, None, None]
    q = q.view(len(group), -1, q.shape[2])
    merged = _attend_keys(a, group, q)
    if merged is None:
        return False
    if dtype != torch.float32 and not is_accurate(merged[1]):
        return all(_is_possible(a, each, torch.float32) for each in group) and _attend_group(
            a, group, torch.float32, out, lse
        )
    out[tokens] = merged[0].view(-1, heads, v_width).to(out.dtype)
    lse[tokens] = merged[1].view(-1, heads)
    return True


def _tokens(group: Sequence[_Member]) -> slice | Tensor:
    """Rows of q: a slice if they lie next to each other."""
    tokens = [token for member in group for token in member.request.tokens]
    if tokens == list(range(tokens[0], tokens[0] + len(tokens))):
        return slice(tokens[0], tokens[0] + len(tokens))
    return _indices(tokens)


def _attend_keys(a: DecodeArguments, group: Sequence[_Member], q: Tensor) -> Partial | None:
    """(out [requests, query rows, v_width], lse [requests, query rows]); None if it may be wrong.

    q  [requests, query rows, width]
    """
    by_kind: dict[tuple[bool, int], list[tuple[int, _Split]]] = {}
    for number, member in enumerate(group):
        for split in member.splits:
            by_kind.setdefault((split.is_last, split.length), []).append((number, split))
    whole: dict[bool, Partial] = {}  # of whole splits, and of last ones
    for (is_last, _), splits in sorted(by_kind.items()):
        partial = _attend_splits(a, group, splits, q)
        if not has_scores(*partial):
            return None
        numbers, part = _by_request([number for number, _ in splits], partial)
        if len(numbers) == len(group):
            whole[is_last] = part
            continue
        if is_last not in whole:
            whole[is_last] = _no_keys(q, part[0].shape[2])
        for all_requests, some in zip(whole[is_last], part, strict=True):
            all_requests[_indices(numbers)] = some
    partials = list(whole.values()) or [_no_keys(q, a.layer.codec.row.v_width)]
    merged = partials[0]
    if len(partials) > 1 or a.sink is not None:
        queries = len(group[0].request.tokens)
        merged = merge_partials(partials, None if a.sink is None else a.sink.repeat(queries))
    return merged if is_finite(merged[0]) else None


def _no_keys(q: Tensor, v_width: int) -> Partial:
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device="cpu")
    return torch.zeros(*q.shape[:2], v_width, dtype=torch.float32, device="cpu"), lse


def _attend_splits(
    a: DecodeArguments,
    group: Sequence[_Member],
    splits: Sequence[tuple[int, _Split]],  # and the request of each; all of one kind
    q: Tensor,  # [requests, query rows, width]
) -> Partial:
    """Return (out [splits, query rows, v_width], lse [splits, query rows])."""
    length, is_last = splits[0][1].length, splits[0][1].is_last
    run = 1 if is_last or isinstance(a.page_table, tuple) else _run_length(a, length)
    numbers = [number for number, _ in splits]
    first = _indices([split.first for _, split in splits])
    position = first[:, None] + torch.arange(0, length, run, device="cpu")
    bias = unseen = None
    if is_last:
        ends = _indices([[high for _, high in group[number].request.seen] for number in numbers])
        bias, unseen = _hidden(position, ends, q)
        # padding repeats the last key: what lies past it may be no number
        position = torch.minimum(position, ends.amax(1, keepdim=True) - 1)
    request = _indices([group[number].request.number for number in numbers])
    slots = token_slots(a.page_table, a.layer.page_size, request[:, None], position)
    q = q.index_select(0, _indices(numbers))[:, None]
    v_width, partials = a.layer.codec.row.v_width, list[Partial]()
    for some, rows in _gathered(a, slots, run, length, q):
        own_bias = None if bias is None else bias[some]
        partials.append(attend(q[some], rows, rows, v_width, a.softmax_scale, bias=own_bias))
    out, lse = partials[0] if len(partials) == 1 else map(torch.cat, zip(*partials, strict=True))
    out, lse = out[:, 0], lse[:, 0]
    if unseen is not None and bool(unseen.any()):
        out, lse = out.masked_fill(unseen[..., None], 0.0), lse.masked_fill(unseen, -torch.inf)
    return out, lse


def _gathered(
    a: DecodeArguments, slots: Tensor, run: int, length: int, q: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Yield some splits at a time, and their rows [splits, 1, length, width], valid until the next.

    slots  [splits, length / run]
    """
    dtype, width, payload = q.dtype, a.layer.codec.row.width, a.layer.payload
    fit = rows_that_fit(2 * length * _bytes_per_key(a, dtype))
    split_bytes = length * width * dtype.itemsize
    call_bytes = min(max(CALL_BYTES, torch.get_num_threads() * split_bytes), MAX_BLOCK)
    most = min(fit, max(1, call_bytes // split_bytes))
    parts = even_slices(len(slots), most)
    if payload.dtype != dtype or not payload.is_contiguous() or a.layer.rope is not None:
        for some in parts:
            yield some, a.layer.read_unchecked(slots[some], dtype, run=run)[:, None]
        return
    # one buffer: memory that is not returned between the calls costs no page faults
    runs, index = payload.view(-1, run * width), slots if run == 1 else slots // run
    buffer = torch.empty(min(most, len(slots)), 1, length, width, dtype=dtype, device="cpu")
    for some in parts:
        rows = buffer[: some.stop - some.start]
        torch.index_select(runs, 0, index[some].flatten(), out=rows.view(-1, run * width))
        yield some, rows


def _hidden(position: Tensor, ends: Tensor, q: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return (bias [splits, 1, query rows or 1, keys], rows of queries that see no key of a split).

    position  [splits, keys]
    ends      [splits, queries]: each sees the keys before its own
    """
    visible = position[:, None] < ends[:, :, None]  # [splits, queries, keys]
    bias = torch.zeros(visible.shape, dtype=q.dtype, device="cpu").masked_fill_(
        ~visible, -torch.inf
    )
    if ends.shape[1] == 1:
        return bias[:, None], None
    heads = q.shape[1] // ends.shape[1]
    unseen = ~visible.any(-1)
    bias.masked_fill_(unseen[..., None], 0.0)  # not a row of −inf alone: their results are not used
    return bias.repeat_interleave(heads, 1)[:, None], unseen.repeat_interleave(heads, 1)


def _by_request(numbers: Sequence[int], partial: Partial) -> tuple[list[int], Partial]:
    """Return the requests, and the sum of the partials of each, in the order of its keys."""
    counts = [(number, len(list(own))) for number, own in groupby(numbers)]
    sums, start = [], 0
    for splits, alike in groupby(counts, key=lambda item: item[1]):
        stop = start + splits * len(list(alike))
        out, lse = (each[start:stop].unflatten(0, (-1, splits)) for each in partial)
        start = stop
        sums.append((out[:, 0].float(), lse[:, 0]) if splits == 1 else _summed(out, lse))
    merged = sums[0] if len(sums) == 1 else tuple(map(torch.cat, zip(*sums, strict=True)))
    return [number for number, _ in counts], (merged[0], merged[1])


def _summed(out: Tensor, lse: Tensor) -> Partial:
    """out = Σ_p exp(lse_p − lse) out_p, lse = log Σ_p exp(lse_p).

    out  [requests, splits, query rows, v_width]
    lse  [requests, splits, query rows], above −inf
    """
    row_max = lse.amax(1, keepdim=True)
    weights = (lse - row_max).exp_()
    row_sum = weights.sum(1)
    acc = (out * weights[..., None]).sum(1)
    return acc.div_(row_sum[..., None]), row_max[:, 0] + row_sum.log_()


def _run_length(a: DecodeArguments, length: int) -> int:
    """Rows that lie next to each other in a page, and are gathered together."""
    payload = a.layer.payload
    if not payload.is_contiguous():
        return 1
    common = gcd(a.layer.page_size, length)
    return next(
        run
        for run in range(common, 0, -1)
        if common % run == 0 and run * payload.shape[2] <= max(RUN_ELEMENTS, payload.shape[2])
    )


def _indices(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")
