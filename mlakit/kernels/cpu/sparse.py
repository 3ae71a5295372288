"""Absorbed MLA attention over per-token lists of cache rows.

Maths      s = q·row · softmax_scale [· q_scale] over valid slots;  out = softmax(s) @ row
Valid      slot < topk_len and 0 ≤ row id < num_rows; the row of an invalid slot is not read
Work       tokens with lists of about the same length share each operation, and torch shares the
           operation out among its threads. A split is some entries of a list; how a list is split
           depends on that list only
Memory     the lists of as many tokens as fit are gathered at once, or tiles of the lists
Lineage    own design; ideas: FlashMLA's token-wise sparse attention and its second ("extra") cache
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlakit.cache import CacheLayer
from mlakit.kernels.arguments import SparseArguments, filled
from mlakit.kernels.cpu.softmax import OnlineSoftmax
from mlakit.kernels.cpu.workspace import MAX_BLOCK, even_slices, rows_that_fit

MIN_LENGTH = 64  # entries: lists are cut at powers of two from here on
SPLIT = 512  # entries: MKL and OpenBLAS share out longer sums, whose bits depend on the threads
MANY_HEADS = 64


@dataclass(frozen=True)
class RowList:
    """The rows of one cache that each token attends to."""

    layer: CacheLayer
    rows: Tensor
    lens: Tensor | None

    def valid(self, tokens: slice) -> Tensor:
        """Return [tokens, entries]"""
        chosen = self.rows[tokens]
        valid = (chosen >= 0) & (chosen < self.layer.num_slots)
        if self.lens is not None:
            entry = torch.arange(chosen.shape[1], device="cpu")
            valid &= entry < self.lens[tokens, None]
        return valid

    def gather(self, tokens: slice | Tensor, entries: slice, valid: Tensor) -> Tensor:
        """Rows [tokens, entries, width] float32, zeros where they are not valid."""
        chosen = self.rows[tokens, entries].long()
        invalid = (~valid).flatten().nonzero()[:, 0]
        if len(invalid):
            chosen = torch.where(valid, chosen, 0)
        gathered = self.layer.read_unchecked(chosen)
        if len(invalid):  # 0 · NaN is NaN: what row 0 holds must not be multiplied
            gathered.flatten(0, 1).index_fill_(0, invalid, 0.0)
        return gathered


def sparse_mla(a: SparseArguments, out: Tensor, lse: Tensor, max_logits: Tensor) -> None:
    lists = [RowList(a.layer, a.rows, a.topk_lens)]
    if a.extra is not None:
        lists.append(RowList(a.extra, filled(a.extra_rows), a.extra_topk_lens))
    longest = sum(each.rows.shape[1] for each in lists)
    # an eighth of the workspace is for masks and indices: ids and their comparisons
    for chunk in even_slices(len(a.q), rows_that_fit(8 * 12 * longest)):
        valid = [each.valid(chunk) for each in lists]
        for lengths, alike in _by_length(valid):
            for some in even_slices(len(alike), _tokens_at_once(a, max(lengths))):
                _attend(a, lists, valid, chunk, alike[some], lengths, (out, lse, max_logits))


def _by_length(valid: Sequence[Tensor]) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Return (entries of each list, the tokens whose last valid entries are within them)."""
    ends = []
    for each in valid:
        entry = torch.arange(1, each.shape[1] + 1, dtype=torch.int32, device="cpu")
        last = (each * entry).amax(1).tolist() if each.shape[1] else [0] * len(each)
        ends.append([_length(end, each.shape[1]) for end in last])
    alike: dict[tuple[int, ...], list[int]] = {}
    for token, lengths in enumerate(zip(*ends, strict=True)):
        alike.setdefault(lengths, []).append(token)
    yield from alike.items()


def _length(end: int, most: int) -> int:
    return min(max(MIN_LENGTH, 1 << (end - 1).bit_length()), most) if end else 0


def _entries_at_once(a: SparseArguments) -> int:
    """Entries whose rows (stored, in float16, in float32) and scores take half the workspace."""
    fit = rows_that_fit(2 * _bytes_per_entry(a), at_least=16)
    return fit // SPLIT * SPLIT or fit


def _bytes_per_entry(a: SparseArguments) -> int:
    row, heads = a.layer.codec.row, a.q.shape[1]
    partials = 4 * 3 * heads * row.v_width // SPLIT
    return 10 * row.width + 4 * 2 * heads + partials


def _tokens_at_once(a: SparseArguments, length: int) -> int:
    row, entries = a.layer.codec.row, min(length, _entries_at_once(a))
    state = 4 * a.q.shape[1] * (2 * row.width + 4 * row.v_width)
    fit = rows_that_fit(8 * (state + entries * _bytes_per_entry(a)) // 7)
    return min(fit, max(1, MAX_BLOCK // max(4 * row.width * entries, 1)))


def _attend(
    a: SparseArguments,
    lists: Sequence[RowList],
    valid: Sequence[Tensor],  # of the tokens of the chunk
    chunk: slice,
    members: Sequence[int],  # tokens of the chunk
    lengths: Sequence[int],  # of the lists of these tokens
    results: Sequence[Tensor],
) -> None:
    """Write (out, lse, max_logits) of some tokens."""
    own = _slice_or_index(members)
    if isinstance(own, slice):
        tokens: slice | Tensor = slice(chunk.start + own.start, chunk.start + own.stop)
    else:
        tokens = own + chunk.start
    out, lse, max_logits = results
    parts = [a.q[tokens]] if a.q_rope is None else [a.q[tokens], a.q_rope[tokens]]
    q = torch.cat([part.float() for part in parts], -1).mul_(a.softmax_scale)
    if a.q_scale is not None:
        q *= a.q_scale[tokens, None, None]
    state: OnlineSoftmax | None = None
    for each, is_valid, length in zip(lists, valid, lengths, strict=True):
        for entries, splits in _tiles(length, _entries_at_once(a)):
            tile_valid = is_valid[own, entries]
            keys = each.gather(tokens, entries, tile_valid)
            tile = _attend_rows(q, keys, tile_valid, out.shape[2], splits)
            state = tile if state is None else _both(state, tile)
            del keys  # before the next ones are made
    if state is None:
        state = OnlineSoftmax.over(*q.shape[:2], v_width=out.shape[2])
    block_out, lse[tokens] = state.finish(a.sink)
    out[tokens] = block_out.to(out.dtype)
    max_logits[tokens] = state.row_max


def _tiles(length: int, most: int) -> Iterator[tuple[slice, int]]:
    """Return (entries, number of splits) of a list."""
    first = 0
    while first < length:
        last = min(first + most, length)
        if last - first > SPLIT:
            last -= (last - first) % SPLIT
        yield slice(first, last), max(1, (last - first) // SPLIT)
        first = last


def _attend_rows(
    q: Tensor,  # [tokens, heads, width], scaled
    keys: Tensor,  # [tokens, entries, width]
    valid: Tensor,  # [tokens, entries]
    v_width: int,
    splits: int,
) -> OnlineSoftmax:
    q, keys = q.repeat_interleave(splits, 0), keys.view(len(q) * splits, -1, keys.shape[2])
    if q.shape[1] < MANY_HEADS:  # a transposed right side takes longer than these copies
        scores = torch.bmm(keys, q.mT.contiguous()).mT.contiguous()
    else:
        scores = torch.bmm(q, keys.mT)
    if not bool(valid.all()):
        scores.masked_fill_(~valid.reshape(len(q), 1, -1), -torch.inf)
    state = OnlineSoftmax.of(scores, keys[..., :v_width])
    return state if splits == 1 else state.joined(splits)


def _both(one: OnlineSoftmax, other: OnlineSoftmax) -> OnlineSoftmax:
    row_max, row_sum, acc = (
        torch.stack([getattr(one, name), getattr(other, name)], 1).flatten(0, 1)
        for name in ("row_max", "row_sum", "acc")
    )
    return OnlineSoftmax(row_max, row_sum, acc).joined(2)


def _slice_or_index(members: Sequence[int]) -> slice | Tensor:
    first, last = members[0], members[-1]
    if len(members) == last + 1 - first:
        return slice(first, last + 1)
    return torch.tensor(members, dtype=torch.int64, device="cpu")
