"""`mla_decode` by few calls of torch's fused attention, each over splits of many requests.

Maths      as `decode`; a cached row is K, and V in its first columns
Work       a split is some keys of one request for all of its queries. Splits of one length are the
           batch of one call, which torch shares out among its threads. How a request is split
           depends on its own length only
Memory     the rows of a call are gathered and dequantised at once, as many splits as fit
Limits     requests of few queries that see all keys up to an end. Others, and those whose result
           may be wrong (`fused.is_certain`), are left to `decode`
Lineage    own design; ideas: split-KV flash decoding
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from mlakit.arguments import DecodeArguments, filled
from mlakit.cache import token_slots
from mlakit.kernels.cpu.fused import (
    MIN_KEYS,
    SMALLEST_SCALE,
    attend,
    compute_dtype,
    is_accurate,
    is_certain,
)
from mlakit.kernels.cpu.workspace import MAX_BLOCK, even_slices, rows_that_fit

MIN_SPLIT_KEYS = 512  # as many as torch multiplies at a time
MAX_SPLITS = 64  # of a request
MAX_ROWS = 512  # queries × heads of a request
MIN_CALL_KEYS = 64  # the last split of a request is padded to a power of two
RUN_ELEMENTS = 2**14  # torch gathers runs of up to so many elements on several threads


class Request(NamedTuple):
    """The queries of one request, and the local keys [low, high) that each of them sees."""

    number: int  # in the batch
    tokens: range
    seen: Sequence[tuple[int, ...]]


class _Split(NamedTuple):
    """Keys [first, first + length) of a request, of which those past its end are padding."""

    member: int  # of the group of requests
    first: int
    length: int
    is_last: bool


def attend_requests(
    a: DecodeArguments, requests: Sequence[Request], out: Tensor, lse: Tensor
) -> list[Request]:
    """Write the results of the requests that this way can do; returns the others."""
    left: list[Request] = []
    alike: dict[tuple[int, torch.dtype], list[Request]] = {}
    given = compute_dtype(a.q, filled(a.q_rope), a.layer.payload)
    for request in requests:
        has_keys = min(high for _, high in request.seen) >= MIN_KEYS
        dtype = given if has_keys else torch.float32
        if _is_possible(a, request, dtype):
            alike.setdefault((len(request.tokens), dtype), []).append(request)
        else:
            left.append(request)
    for (_, dtype), same_length in alike.items():
        for group in _groups(a, same_length):
            if not _attend_group(a, group, dtype, out, lse):
                left += group
    return left


def _is_possible(a: DecodeArguments, request: Request, dtype: torch.dtype) -> bool:
    longest = max((split.length for split in _splits(0, request)), default=0)
    return (
        len(request.tokens) * a.q.shape[1] <= MAX_ROWS
        and all(low == 0 for low, _ in request.seen)
        and longest <= rows_that_fit(2 * _bytes_per_key(a, dtype), at_least=0, by_item=False)
        and abs(a.softmax_scale) >= SMALLEST_SCALE
    )


def _bytes_per_key(a: DecodeArguments, dtype: torch.dtype) -> int:
    """Gathered, and if it is not stored as `dtype`, dequantised and concatenated."""
    copies = 1 if a.layer.payload.dtype == dtype else 3
    return copies * dtype.itemsize * a.layer.codec.row.width


def _groups(a: DecodeArguments, requests: Sequence[Request]) -> Iterator[list[Request]]:
    """Requests whose partials fit half of the workspace."""
    row = a.layer.codec.row
    group: list[Request] = []
    splits = 0
    bytes_per_split = 4 * a.q.shape[1] * len(requests[0].tokens) * (row.width + 3 * row.v_width)
    most = rows_that_fit(2 * bytes_per_split, by_item=False)
    for request in requests:
        own = sum(1 for _ in _splits(0, request)) + 1  # the result
        if group and splits + own > most:
            yield group
            group, splits = [], 0
        group.append(request)
        splits += own
    yield group


def _splits(member: int, request: Request) -> Iterator[_Split]:
    ends = [high for _, high in request.seen]
    last = max(ends)
    length = max(MIN_SPLIT_KEYS, _power_of_two(-(-last // MAX_SPLITS)))
    tail = min(ends) // length * length  # from here on queries may differ in the keys they see
    for first in range(0, tail, length):
        yield _Split(member, first, length, is_last=False)
    if tail < last:
        yield _Split(member, tail, max(MIN_CALL_KEYS, _power_of_two(last - tail)), is_last=True)


def _power_of_two(n: int) -> int:
    """The smallest one that is n or more."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


def _attend_group(
    a: DecodeArguments, group: Sequence[Request], dtype: torch.dtype, out: Tensor, lse: Tensor
) -> bool:
    """Write the results of requests with the same number of queries; False if one may be wrong."""
    queries, heads, v_width = len(group[0].tokens), a.q.shape[1], a.layer.codec.row.v_width
    tokens = _indices([token for request in group for token in request.tokens])
    q = torch.cat([a.q[tokens].to(dtype), filled(a.q_rope)[tokens].to(dtype)], -1)
    if a.q_scale is not None:
        q *= a.q_scale[tokens, None, None]
    q = q.view(len(group), queries * heads, -1)
    by_kind: dict[tuple[bool, int], list[_Split]] = {}
    for number, request in enumerate(group):
        for split in _splits(number, request):
            by_kind.setdefault((split.is_last, split.length), []).append(split)
    members, outs, lses = [_indices([])], [], []
    for (_, length), splits in sorted(by_kind.items()):  # the last splits come last
        fit = rows_that_fit(2 * length * _bytes_per_key(a, dtype), by_item=False)
        most = min(fit, MAX_BLOCK // (length * q.shape[2] * dtype.itemsize))
        for some in even_slices(len(splits), most):
            member, split_out, split_lse = _attend_splits(a, group, splits[some], q)
            if not is_certain(split_out, split_lse):
                return False
            members.append(member)
            outs.append(split_out)
            lses.append(split_lse)
    merged, merged_lse = _merged(
        len(group), q.shape[1], v_width, torch.cat(members), outs, lses, _sink_rows(a, queries)
    )
    if dtype != torch.float32 and not is_accurate(merged_lse):
        return all(_is_possible(a, each, torch.float32) for each in group) and _attend_group(
            a, group, torch.float32, out, lse
        )
    out[tokens] = merged.view(len(tokens), heads, v_width).to(out.dtype)
    lse[tokens] = merged_lse.view(len(tokens), heads)
    return True


def _attend_splits(
    a: DecodeArguments,
    group: Sequence[Request],
    splits: Sequence[_Split],  # of one length, all of them last ones or none
    q: Tensor,  # [requests of the group, query rows, width]
) -> tuple[Tensor, Tensor, Tensor]:
    """(requests, out [splits, query rows, v_width], lse [splits, query rows])."""
    length, is_last = splits[0].length, splits[0].is_last
    member = _indices([split.member for split in splits])
    request = _indices([group[split.member].number for split in splits])
    first = _indices([split.first for split in splits])
    run = 1 if is_last or isinstance(a.page_table, tuple) else _run_length(a, length)
    position = first[:, None] + torch.arange(0, length, run, device="cpu")
    bias = unseen = None
    if is_last:
        ends = _indices([[high for _, high in group[s.member].seen] for s in splits])
        visible = position[:, None] < ends[:, :, None]  # [splits, queries, keys]
        heads = q.shape[1] // ends.shape[1]
        bias = torch.zeros(visible.shape, dtype=q.dtype, device="cpu")
        bias.masked_fill_(~visible, -torch.inf)
        if ends.shape[1] > 1:
            bias = bias.repeat_interleave(heads, 1)
            unseen = ~visible.any(-1).repeat_interleave(heads, 1)
        # padding repeats the last key: what lies past it may be no number
        position = torch.minimum(position, ends.amax(1, keepdim=True) - 1)
        bias = bias[:, None]
    slots = token_slots(a.page_table, a.layer.page_size, request[:, None], position)
    rows = a.layer.read_unchecked(slots, q.dtype, run=run)[:, None]
    out, lse = attend(
        q[member, None], rows, rows, a.layer.codec.row.v_width, a.softmax_scale, bias=bias
    )
    out, lse = out[:, 0], lse[:, 0]
    if unseen is not None:
        lse = lse.masked_fill(unseen, -torch.inf)
    return member, out, lse


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


def _merged(
    requests: int,
    rows: int,
    v_width: int,
    member: Tensor,  # [splits] the request of each
    outs: Sequence[Tensor],  # [some splits, rows, v_width]
    lses: Sequence[Tensor],  # [some splits, rows]
    sink: Tensor | None,  # [rows]
) -> tuple[Tensor, Tensor]:
    """out = Σ_p exp(lse_p − lse) out_p, lse = log Σ_p exp(lse_p); a sink is part of out's divisor.

    A request's partials are summed in the order of its keys.
    """
    row_max = torch.full((requests, rows), -torch.inf, device="cpu")
    if not outs:
        return torch.zeros(requests, rows, v_width, device="cpu"), row_max
    lse = torch.cat(list(lses))
    row_max.scatter_reduce_(0, member[:, None].expand(-1, rows), lse, "amax")
    anchor = row_max.masked_fill(row_max == -torch.inf, 0.0)
    weights = lse.sub_(anchor[member]).exp_()
    row_sum = torch.zeros(requests, rows, device="cpu").index_add_(0, member, weights)
    acc, start = torch.zeros(requests, rows, v_width, device="cpu"), 0
    for out in outs:
        own = slice(start, start + len(out))
        acc.index_add_(0, member[own], out * weights[own, :, None])
        start += len(out)
    merged_lse = row_max + row_sum.log()
    if sink is not None:
        row_sum = row_sum + (sink - anchor).exp()
    return acc.div_(row_sum.masked_fill(row_max == -torch.inf, 1.0)[..., None]), merged_lse


def _sink_rows(a: DecodeArguments, queries: int) -> Tensor | None:
    return None if a.sink is None else a.sink.repeat(queries)


def _indices(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")
