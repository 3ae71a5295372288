"""The oracles against each other, against facts worked out by hand, and against transformers.

Comparisons look the oracle up as `reference.<name>` when they run, so that the last test can put an
impostor in its place and see every main comparison fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit import masks, reference
from mlakit.masks import CAUSAL, NULL, Mask

E4M3 = torch.float8_e4m3fn
INF = math.inf
SCALE = 0.4  # with the standard normal inputs below it makes weights far from uniform
MASKS = [
    NULL,
    CAUSAL,
    masks.sliding_window_causal(3),
    masks.sliding_window_noncausal(3),
    masks.chunked(3),
    masks.chunked_causal(3),
]
by_mask = pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.kind)


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def assert_same(actual: Tensor, exact: Tensor, tolerance: float = 1e-11) -> None:
    """Same NaN and inf patterns; in every row the worst error within `tolerance` of its size."""
    assert actual.shape == exact.shape
    actual, exact = actual.double(), exact.double()
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(actual), kind(exact)), kind.__name__
    error = torch.where(exact.isfinite(), actual - exact, 0.0).abs()
    size = torch.where(exact.isfinite(), exact, 0.0).abs()
    if exact.numel() > 0:
        excess = error.amax(-1) - tolerance * size.amax(-1).clamp(min=1e-3)
        assert excess.max() <= 0, f"row {int(excess.argmax())}: worst error {error.max():.3e}"


def starts(lengths: Sequence[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))


@dataclass(frozen=True)
class Batch:
    """One ragged batch of a small MLA layer, in both forms of the attention."""

    q_nope: Tensor  # [tokens, heads, D_N]
    q_rope: Tensor  # [tokens, heads, D_R]
    latent: Tensor  # [keys, D_C]
    k_rope: Tensor  # [keys, D_R]
    w_uk: Tensor  # [heads, D_N, D_C]
    w_uv: Tensor  # [heads, D_V, D_C]
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]

    def expanded(self) -> dict[str, Any]:
        """Arguments of the expanded form."""
        return {
            "q": torch.cat([self.q_nope, self.q_rope], -1),
            "k_nope": torch.einsum("jc,hnc->jhn", self.latent, self.w_uk),
            "k_rope": self.k_rope,
            "v": torch.einsum("jc,hvc->jhv", self.latent, self.w_uv),
            "q_starts": starts(self.q_lens),
            "kv_starts": starts(self.kv_lens),
        }

    def absorbed(self) -> dict[str, Any]:
        """Arguments of the absorbed form: W_UK is folded into the query."""
        q_latent = torch.einsum("thn,hnc->thc", self.q_nope, self.w_uk)
        rows = torch.cat([self.latent, self.k_rope], -1)
        return {
            "q": torch.cat([q_latent, self.q_rope], -1),
            "rows": list(rows.split(self.kv_lens)),
            "q_lens": self.q_lens,
            "v_width": self.latent.shape[-1],
        }

    def values(self, latent_out: Tensor) -> Tensor:
        """An absorbed output [tokens, heads, D_C] as values [tokens, heads, D_V]."""
        return torch.einsum("thc,hvc->thv", latent_out, self.w_uv)


def make_batch(
    q_lens: tuple[int, ...] = (3, 0, 1, 4, 3, 2), kv_lens: tuple[int, ...] = (9, 2, 6, 4, 1, 0)
) -> Batch:
    """By default: context, no query, one query, no context, more queries than keys, no key."""
    heads, d_c, d_r, d_n, d_v = 3, 8, 4, 6, 5
    tokens, keys = sum(q_lens), sum(kv_lens)
    return Batch(
        q_nope=normal(tokens, heads, d_n, seed=1),
        q_rope=normal(tokens, heads, d_r, seed=2),
        latent=normal(keys, d_c, seed=3),
        k_rope=normal(keys, d_r, seed=4),
        w_uk=normal(heads, d_n, d_c, seed=5),
        w_uv=normal(heads, d_v, d_c, seed=6),
        q_lens=q_lens,
        kv_lens=kv_lens,
    )


SINK = torch.tensor([0.3, -1.7, 2.4], dtype=torch.float64)


def sees(mask: Mask, q: int, k: int) -> bool:
    """The table of masks, row by row: is key position k visible to query position q?"""
    w = mask.window
    if mask.kind == "null":
        return True
    if mask.kind == "causal":
        return k <= q
    if mask.kind == "sliding_window_causal":
        return q - w < k <= q
    if mask.kind == "sliding_window_noncausal":
        return k + w > q
    same_chunk = math.floor(k / w) == math.floor(q / w)
    return same_chunk if mask.kind == "chunked" else same_chunk and k <= q


def visible_keys(batch: Batch, mask: Mask) -> list[list[int]]:
    """For every query token the keys of its request that it sees, counted over the whole batch."""
    lists = []
    for start, q_len, kv_len in zip(
        starts(batch.kv_lens)[:-1], batch.q_lens, batch.kv_lens, strict=True
    ):
        for position in range(kv_len - q_len, kv_len):
            lists.append([start + k for k in range(kv_len) if sees(mask, position, k)])
    return lists


def attend_by_hand(
    batch: Batch, mask: Mask, sink: Sequence[float] = (-INF,) * 3
) -> tuple[Tensor, Tensor]:
    """Expanded attention from its definition, with Python's own numbers."""
    given = batch.expanded()
    outs, lses = [], []
    for token, keys in enumerate(visible_keys(batch, mask)):
        for h, sink_logit in enumerate(sink):
            exponentials = []
            for k in keys:
                key = given["k_nope"][k, h].tolist() + given["k_rope"][k].tolist()
                dot = sum(a * b for a, b in zip(given["q"][token, h].tolist(), key, strict=True))
                exponentials.append(math.exp(dot * SCALE))
            total = sum(exponentials)
            lses.append(math.log(total) if keys else -INF)
            values = [given["v"][k, h].tolist() for k in keys] or [[0.0] * 5]
            shares = [e / (total + math.exp(sink_logit)) for e in exponentials] or [0.0]
            columns = zip(*values, strict=True)
            outs.append([sum(s * x for s, x in zip(shares, c, strict=True)) for c in columns])
    out, lse = torch.tensor(outs, dtype=torch.float64), torch.tensor(lses, dtype=torch.float64)
    return out.view(-1, 3, 5), lse.view(-1, 3)


@by_mask
@pytest.mark.parametrize("sink", [None, SINK], ids=["plain", "sink"])
def test_prefill_matches_its_definition(mask: Mask, sink: Tensor | None) -> None:
    batch = make_batch()
    out, lse = reference.mla_prefill(**batch.expanded(), softmax_scale=SCALE, mask=mask, sink=sink)
    logits = (-INF,) * 3 if sink is None else sink.tolist()
    exact_out, exact_lse = attend_by_hand(batch, mask, logits)
    assert_same(out, exact_out)
    assert_same(lse, exact_lse)


@by_mask
@pytest.mark.parametrize("sink", [None, SINK], ids=["plain", "sink"])
def test_absorbed_equals_expanded(mask: Mask, sink: Tensor | None) -> None:
    batch = make_batch()
    options = {"softmax_scale": SCALE, "mask": mask, "sink": sink}
    out, lse = reference.mla_prefill(**batch.expanded(), **options)
    latent_out, latent_lse = reference.mla_decode(**batch.absorbed(), **options)
    assert_same(batch.values(latent_out), out)
    assert_same(latent_lse, lse)


def test_prefill_matches_scaled_dot_product_attention() -> None:
    batch = make_batch(q_lens=(12,), kv_lens=(12,))
    given = batch.expanded()
    key = torch.cat([given["k_nope"], given["k_rope"][:, None].expand(-1, 3, -1)], -1)
    heads_first = [tensor.transpose(0, 1) for tensor in (given["q"], key, given["v"])]
    exact = torch.nn.functional.scaled_dot_product_attention(
        *heads_first, is_causal=True, scale=SCALE
    )
    out, _ = reference.mla_prefill(**given, softmax_scale=SCALE)
    assert_same(out, exact.transpose(0, 1))


@by_mask
def test_mask_shows_exactly_the_keys_of_its_table(mask: Mask) -> None:
    """Values are unit vectors, so a positive entry of the output is an attended key."""
    kv_len, q_len = 11, 11
    expected = torch.tensor([[sees(mask, q, k) for k in range(kv_len)] for q in range(kv_len)])
    out, _ = reference.mla_prefill(
        normal(q_len, 1, 4, seed=1),
        normal(kv_len, 1, 4, seed=2),
        torch.empty(kv_len, 0),
        torch.eye(kv_len)[:, None],
        [0, q_len],
        [0, kv_len],
        softmax_scale=SCALE,
        mask=mask,
    )
    assert torch.equal(out[:, 0] > 0, expected)
    out, _ = reference.mla_decode(
        normal(q_len, 1, kv_len, seed=3),
        [torch.eye(kv_len)],
        [q_len],
        softmax_scale=SCALE,
        v_width=kv_len,
        mask=mask,
    )
    assert torch.equal(out[:, 0] > 0, expected)
    logits = reference.indexer_logits(
        normal(q_len, 2, 4, seed=4),
        normal(q_len, 2, seed=5),
        [normal(kv_len, 4, seed=6)],
        [q_len],
        mask=mask,
    )
    assert torch.equal(logits > -INF, expected)


@by_mask
def test_key_that_is_not_seen_may_hold_nan(mask: Mask) -> None:
    batch = make_batch(q_lens=(1,), kv_lens=(9,))
    unseen = [k for k in range(9) if not sees(mask, 8, k)]
    assert bool(unseen) == (mask.kind not in ("null", "causal"))
    clean, poisoned = batch.expanded(), batch.expanded()
    for name in ("k_nope", "k_rope", "v"):
        poisoned[name] = poisoned[name].clone()
        poisoned[name][unseen] = torch.nan
    options = {"softmax_scale": SCALE, "mask": mask}
    for got, want in zip(
        reference.mla_prefill(**poisoned, **options),
        reference.mla_prefill(**clean, **options),
        strict=True,
    ):
        assert_same(got, want)
    clean, poisoned = batch.absorbed(), batch.absorbed()
    poisoned["rows"][0] = poisoned["rows"][0].clone()
    poisoned["rows"][0][unseen] = torch.nan
    for got, want in zip(
        reference.mla_decode(**poisoned, **options),
        reference.mla_decode(**clean, **options),
        strict=True,
    ):
        assert_same(got, want)


def test_queries_are_the_newest_tokens() -> None:
    """Token i of q_len sees kv_len - q_len + i + 1 keys, and a request without keys gives zeros."""
    batch = make_batch(q_lens=(3, 2), kv_lens=(7, 0))
    given = batch.expanded()
    given["q"], given["v"] = torch.zeros_like(given["q"]), torch.ones_like(given["v"])
    out, lse = reference.mla_prefill(**given, softmax_scale=SCALE)
    counts = torch.tensor([5.0, 6.0, 7.0, 0.0, 0.0], dtype=torch.float64)
    assert_same(lse, counts.log()[:, None].expand(-1, 3))
    assert_same(out, (counts > 0).double()[:, None, None].expand(-1, 3, 5))


def test_sink_enters_only_the_denominator_of_the_output() -> None:
    batch = make_batch()
    given = {**batch.absorbed(), "softmax_scale": SCALE}
    out, lse = reference.mla_decode(**given)
    with_sink, lse_with_sink = reference.mla_decode(**given, sink=SINK)
    assert torch.equal(lse_with_sink, lse)
    assert_same(with_sink, out * (lse.exp() / (lse.exp() + SINK.exp()))[..., None])
    for inert in (-INF, -1e38):
        same, _ = reference.mla_decode(**given, sink=torch.full((3,), inert))
        assert torch.equal(same, out)
    nothing, lse_with_sink = reference.mla_decode(**given, sink=torch.full((3,), INF))
    assert torch.equal(nothing, torch.zeros_like(out))
    assert torch.equal(lse_with_sink, lse)


def test_score_of_minus_infinity_attends_nothing() -> None:
    rows = normal(3, 6, seed=1)
    rows[:2, 5] = -INF  # a column of the key alone
    q = torch.ones(2, 1, 6)
    out, lse = reference.mla_decode(q, [rows[:2], rows], [1, 1], softmax_scale=SCALE, v_width=4)
    assert out[0].tolist() == [[0.0] * 4]
    assert lse[0].item() == -INF
    assert_same(out[1], rows[2:, :4])
    assert_same(lse[1], rows[2:].sum(-1) * SCALE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_gives_the_naive_run(dtype: torch.dtype) -> None:
    batch = make_batch()
    exact = reference.mla_prefill(**batch.expanded(), softmax_scale=SCALE)
    naive = reference.mla_prefill(**batch.expanded(), softmax_scale=SCALE, dtype=dtype)
    for got, want in zip(naive, exact, strict=True):
        assert got.dtype == dtype
        error = torch.where(want.isfinite(), got.double() - want, 0.0).abs().max()
        assert 0 < error < 30 * torch.finfo(dtype).eps


def test_alibi_matches_the_documented_form() -> None:
    """-(P - 1 - k) · slope differs from ours by a constant of the row, which softmax drops."""
    batch = make_batch(q_lens=(4,), kv_lens=(9,))
    given, slopes, longest = batch.expanded(), reference.alibi_slopes(3), 33
    out, lse = reference.mla_prefill(**given, softmax_scale=SCALE, alibi_slopes=slopes)
    for i in range(4):
        position = 9 - 4 + i
        for h in range(3):
            key = torch.cat([given["k_nope"][:, h], given["k_rope"]], -1)[: position + 1]
            bias = -(longest - 1 - torch.arange(position + 1)) * slopes[h]
            score = key @ given["q"][i, h] * SCALE + bias
            assert_same(out[i, h], score.softmax(0) @ given["v"][: position + 1, h])
            shift = (longest - 1 - position) * slopes[h]
            assert_same(lse[i, h, None], score.logsumexp(0)[None] + shift)
    plain, _ = reference.mla_prefill(**given, softmax_scale=SCALE)
    assert (plain - out).abs().max() > 0.1


def test_alibi_slopes_of_every_head_count() -> None:
    assert reference.alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    assert reference.alibi_slopes(1).tolist() == [2.0**-8]
    assert reference.alibi_slopes(3).tolist() == [2.0**-4, 2.0**-8, 2.0**-2]
    twelve = [2.0**-n for n in range(1, 9)] + [2.0 ** -(n + 0.5) for n in range(4)]
    assert_same(reference.alibi_slopes(12), torch.tensor(twelve, dtype=torch.float64))


def test_merge_by_hand() -> None:
    outs = torch.tensor([1.0, 3.0]).view(2, 1, 1, 1)
    lses = torch.tensor([1.0, 3.0], dtype=torch.float64).log().view(2, 1, 1)
    out, lse = reference.merge_states(outs, lses)
    assert_same(out.flatten(), torch.tensor([10 / 4]))
    assert_same(lse.flatten(), torch.tensor([4.0], dtype=torch.float64).log())
    out, lse = reference.merge_states(outs, lses, sink=torch.tensor([4.0]).double().log())
    assert_same(out.flatten(), torch.tensor([10 / 8]))
    assert_same(lse.flatten(), torch.tensor([4.0], dtype=torch.float64).log())
    assert reference.merge_states(outs, lses, sink=torch.tensor([INF]))[0].item() == 0


@pytest.mark.parametrize("sink", [None, SINK], ids=["plain", "sink"])
def test_split_and_merged_equals_whole(sink: Tensor | None) -> None:
    """Every third position to one part, and a part that got nothing and was never written."""
    batch = make_batch()
    given = {**batch.absorbed(), "softmax_scale": SCALE}
    whole = reference.mla_decode(**given, sink=sink)
    queries = [
        torch.arange(kv_len - q_len, kv_len)
        for q_len, kv_len in zip(batch.q_lens, batch.kv_lens, strict=True)
    ]
    outs, lses = [torch.full_like(whole[0], torch.nan)], [torch.full_like(whole[1], -INF)]
    for part in range(3):
        shared = {**given, "rows": [rows[part::3] for rows in given["rows"]]}
        positions = [torch.arange(kv_len)[part::3] for kv_len in batch.kv_lens]
        out, lse = reference.mla_decode(**shared, key_positions=positions, query_positions=queries)
        outs.append(out.masked_fill((lse == -INF)[..., None], torch.nan))
        lses.append(lse)
    out, lse = reference.merge_states(torch.stack(outs), torch.stack(lses), sink=sink)
    assert_same(out, whole[0])
    assert_same(lse, whole[1])


def test_sink_in_every_part_is_not_the_sink_of_the_whole() -> None:
    batch = make_batch(q_lens=(1,), kv_lens=(9,))
    given = {**batch.absorbed(), "softmax_scale": SCALE}
    whole, _ = reference.mla_decode(**given, sink=SINK)
    halves = []
    for rows in given["rows"][0].split([4, 5]):
        shared = {**given, "rows": [rows]}
        halves.append(reference.mla_decode(**shared, mask=NULL, sink=SINK))
    outs, lses = (torch.stack(tensors) for tensors in zip(*halves, strict=True))
    assert (reference.merge_states(outs, lses)[0] - whole).abs().max() > 0.01


def test_merge_of_merges_equals_one_merge() -> None:
    outs, lses = normal(4, 5, 3, 2, seed=1), 5 * normal(4, 5, 3, seed=2)
    lses[1, 2] = lses[:, 4] = -INF
    left = reference.merge_states(outs[:2], lses[:2])
    right = reference.merge_states(outs[2:], lses[2:])
    pairs = [torch.stack(tensors) for tensors in zip(left, right, strict=True)]
    for got, want in zip(
        reference.merge_states(*pairs), reference.merge_states(outs, lses), strict=True
    ):
        assert_same(got, want)
    assert torch.equal(reference.merge_states(outs, lses)[0][4], torch.zeros(3, 2).double())


def test_decode_wants_both_kinds_of_positions() -> None:
    given = {**make_batch(q_lens=(1,), kv_lens=(4,)).absorbed(), "softmax_scale": SCALE}
    with pytest.raises(ValueError, match="query_positions must be given together"):
        reference.mla_decode(**given, key_positions=[torch.arange(4)])


@pytest.mark.parametrize("sink", [None, SINK], ids=["plain", "sink"])
def test_chunked_prefill_equals_one_shot(sink: Tensor | None) -> None:
    """Two chunks of context that every query sees whole, then the queries' own keys, causally."""
    batch = make_batch(q_lens=(4, 2), kv_lens=(13, 7))
    given = batch.expanded()
    whole_out, whole_lse = reference.mla_prefill(**given, softmax_scale=SCALE, sink=sink)
    chunks = [([(0, 5), (13, 15)], NULL), ([(5, 9), (15, 18)], NULL), ([(9, 13), (18, 20)], CAUSAL)]
    outs, lses = [], []
    for spans, mask in chunks:
        keys = [key for first, last in spans for key in range(first, last)]
        chunk = {name: given[name][keys] for name in ("k_nope", "k_rope", "v")}
        kv_starts = starts([last - first for first, last in spans])
        out, lse = reference.mla_prefill(
            given["q"],
            **chunk,
            q_starts=given["q_starts"],
            kv_starts=kv_starts,
            softmax_scale=SCALE,
            mask=mask,
        )
        outs.append(out)
        lses.append(lse)
    out, lse = reference.merge_states(torch.stack(outs), torch.stack(lses), sink=sink)
    assert_same(out, whole_out)
    assert_same(lse, whole_lse)


@by_mask
@pytest.mark.parametrize("sink", [None, SINK], ids=["plain", "sink"])
def test_sparse_over_all_visible_rows_equals_decode(mask: Mask, sink: Tensor | None) -> None:
    """Rows lie shuffled in a pool whose other rows are NaN; lists hold invalid entries too."""
    batch = make_batch()
    given = batch.absorbed()
    cached = torch.cat(given["rows"])
    generator = torch.Generator().manual_seed(7)
    where = torch.randperm(2 * len(cached), generator=generator)[: len(cached)]
    pool = torch.full((2 * len(cached), cached.shape[1]), torch.nan, dtype=torch.float64)
    pool[where] = cached
    invalid = torch.tensor([-1, len(pool), -(2**31), 2**31 - 1], dtype=torch.int32)
    lists = visible_keys(batch, mask)
    rows = torch.empty(len(lists), max(map(len, lists)) + 4, dtype=torch.int32)
    for row, keys in zip(rows, lists, strict=True):
        slots = torch.cat([where[keys].int(), invalid.repeat(4)])[: len(row)]
        row.copy_(slots[torch.randperm(len(row), generator=generator)])
    options = {"softmax_scale": SCALE, "sink": sink}
    out, lse, max_logits = reference.sparse_mla(
        given["q"], pool, rows, v_width=given["v_width"], **options
    )
    exact_out, exact_lse = reference.mla_decode(**given, mask=mask, **options)
    assert_same(out, exact_out)
    assert_same(lse, exact_lse)
    for token, keys in enumerate(lists):
        scores = given["q"][token] @ cached[keys].T * SCALE
        want = scores.max(-1).values if keys else torch.full((3,), -INF)
        assert_same(max_logits[token], want)


def sparse_by_hand(q: Tensor, attended: Tensor, sink: Tensor, v_width: int) -> Tensor:
    """One token's output: exponentials over their sum and the sink's."""
    exponentials = (q @ attended.T * SCALE).exp()
    return exponentials @ attended[:, :v_width] / (exponentials.sum(-1) + sink.exp())[:, None]


def test_sparse_edge_cases() -> None:
    pool = normal(12, 6, seed=1)
    read = [2, 3, 7]
    unread = [row for row in range(12) if row not in read]
    pool[unread] = torch.nan
    slots = [
        ([2, 3, 5, 6], 2, [2, 3]),  # valid rows past the length are not read
        ([2, -1, 7, -1], 4, [2, 7]),  # -1 in the middle
        ([-1, 12, 7, 3], 4, [7, 3]),  # one past the last row
        ([3, 3, 2, 3], 4, [3, 3, 2, 3]),  # duplicates count as often as they are listed
        ([7, 2, 3, 0], 3, [3, 7, 2]),  # the order does not matter
        ([2, 3, 7, 0], 0, []),  # nothing listed
        ([-1, -1, -7, 99], 4, []),  # nothing valid
        ([2, 3, 7, 2], 9, [2, 3, 7, 2]),  # a length beyond the list
    ]
    rows = torch.tensor([slot[0] for slot in slots])
    lens = torch.tensor([slot[1] for slot in slots], dtype=torch.int32)
    q = normal(len(slots), 3, 6, seed=2)
    for sink in (torch.full((3,), -INF, dtype=torch.float64), SINK):
        out, lse, max_logits = reference.sparse_mla(
            q, pool, rows, softmax_scale=SCALE, v_width=4, topk_lens=lens, sink=sink
        )
        for token, (_, _, attended) in enumerate(slots):
            if not attended:
                assert torch.equal(out[token], torch.zeros(3, 4).double())
                assert torch.equal(lse[token], torch.full((3,), -INF).double())
                assert torch.equal(max_logits[token], lse[token])
                continue
            scores = q[token] @ pool[attended].T * SCALE
            assert_same(out[token], sparse_by_hand(q[token], pool[attended], sink, 4))
            assert_same(lse[token], scores.exp().sum(-1).log())
            assert_same(max_logits[token], scores.max(-1).values)


def test_sparse_extra_rows_join_the_same_softmax() -> None:
    pool, extra_pool = normal(5, 6, seed=1), normal(3, 6, seed=2)
    extra_pool[1] = torch.nan
    rows, extra_rows = torch.tensor([[4, -1, 0], [9, 9, 9]]), torch.tensor([[2, 1], [0, 2]])
    q = normal(2, 3, 6, seed=3)
    out, lse, max_logits = reference.sparse_mla(
        q,
        pool,
        rows,
        softmax_scale=SCALE,
        v_width=6,
        sink=SINK,
        extra=(extra_pool, extra_rows, [1, 2]),
    )
    attended = [torch.stack([pool[4], pool[0], extra_pool[2]]), extra_pool[[0, 2]]]
    for token, joined in enumerate(attended):
        scores = q[token] @ joined.T * SCALE
        assert_same(out[token], sparse_by_hand(q[token], joined, SINK, 6))
        assert_same(lse[token], scores.exp().sum(-1).log())
        assert_same(max_logits[token], scores.max(-1).values)


def test_indexer_takes_relu_before_the_weight() -> None:
    q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    keys = torch.tensor([[2.0, -3.0], [2.0, 1.0], [-1.0, -1.0]])
    logits = reference.indexer_logits(q, torch.tensor([[1.0, -5.0]]), [keys], [1])
    assert logits.tolist() == [[2.0, -3.0, 0.0]]


def test_indexer_logits_of_a_ragged_batch() -> None:
    q_lens, kv_lens = (2, 0, 1, 3), (5, 2, 4, 2)
    q, weights = normal(6, 4, 3, seed=1), normal(6, 4, seed=2)
    keys = [normal(kv_len, 3, seed=kv_len) for kv_len in kv_lens]
    logits = reference.indexer_logits(q, weights, keys, q_lens)
    exact = torch.full((6, 5), -INF, dtype=torch.float64)
    owners = [(0, 3), (0, 4), (2, 3), (3, -1), (3, 0), (3, 1)]
    for token, (request, position) in enumerate(owners):
        for k in range(position + 1):
            dots = [float(q[token, h] @ keys[request][k]) for h in range(4)]
            exact[token, k] = sum(
                float(w) * max(dot, 0.0) for w, dot in zip(weights[token], dots, strict=True)
            )
    assert_same(logits, exact)


def test_topk_orders_ties_nan_and_infinities() -> None:
    nan = math.nan
    logits = torch.tensor(
        [
            [1.0, 3.0, 3.0, -2.0, 3.0],
            [-INF, 0.0, -INF, -0.0, -INF],
            [INF, nan, 5.0, nan, -INF],
            [-INF, -INF, -INF, -INF, -INF],
        ]
    )
    selected = reference.indexer_topk(logits, 4)
    assert selected.dtype == torch.int32
    assert selected.tolist() == [[0, 1, 2, 4], [1, 3, -1, -1], [0, 1, 2, 3], [-1, -1, -1, -1]]
    assert reference.indexer_topk(logits, 2).tolist() == [[1, 2], [1, 3], [1, 3], [-1, -1]]
    assert reference.indexer_topk(logits, 7)[0].tolist() == [0, 1, 2, 3, 4, -1, -1]


def test_topk_counts_columns_from_the_start_of_the_row() -> None:
    logits = torch.tensor([[9.0, 1.0, 2.0, 9.0], [9.0, 9.0, 1.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    starts_, ends = torch.tensor([1, 2, 3]), torch.tensor([3, 4, 3])
    selected = reference.indexer_topk(logits, 2, row_starts=starts_, row_ends=ends)
    assert selected.tolist() == [[0, 1], [0, 1], [-1, -1]]


def test_topk_of_distinct_logits_is_torch_topk() -> None:
    logits = normal(6, 50, seed=1)
    expected = logits.topk(20).indices.sort(dim=1).values
    assert torch.equal(reference.indexer_topk(logits, 20).long(), expected)


def rope_table(positions: int, width: int, dtype: torch.dtype = torch.float64) -> Tensor:
    inverse = 100.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * inverse
    return torch.stack([angles.cos(), angles.sin()], -1).flatten(1).to(dtype)


def test_rotation_is_a_complex_product() -> None:
    x, cos_sin = normal(4, 3, 8, seed=1), rope_table(7, 8)[6]
    exact = torch.view_as_complex(x.view(4, 3, 4, 2)) * torch.view_as_complex(cos_sin.view(4, 2))
    assert_same(reference.rotate(x, cos_sin), torch.view_as_real(exact).flatten(-2))


def test_half_is_interleaved_with_the_columns_permuted() -> None:
    x, cos_sin = normal(5, 8, seed=1), rope_table(7, 8)[6]
    to_half = [0, 2, 4, 6, 1, 3, 5, 7]
    interleaved = reference.rotate(x, cos_sin, rope="interleaved")
    assert_same(reference.rotate(x[:, to_half], cos_sin, rope="half"), interleaved[:, to_half])
    assert (reference.rotate(x, cos_sin, rope="half") - interleaved).abs().max() > 0.1
    bf16, table = x.bfloat16(), cos_sin.bfloat16()
    stepwise = reference.rotate_stepwise(bf16, table)
    half = reference.rotate_stepwise(bf16[:, to_half], table, rope="half")
    assert torch.equal(half, stepwise[:, to_half])


@pytest.mark.parametrize("rotate", [reference.rotate, reference.rotate_stepwise])
def test_unknown_rope_is_refused(rotate: Callable[..., Tensor]) -> None:
    with pytest.raises(ValueError, match='rope must be "interleaved" or "half", got \'neox\''):
        rotate(torch.zeros(4), torch.zeros(4), rope="neox")


ULP = 2.0**-7  # of a bf16 number between 1 and 2


@pytest.mark.parametrize(
    ("x", "cos_sin", "y"),
    [
        # x1·sin = 1 + 4 ulp + 3·2^-14 is rounded before it is taken from 1;
        # x0·sin + x1·cos = 2 + 4 ulp
        ((1, 1 + ULP), (1, 1 + 3 * ULP), (-4 * ULP, 2 + 4 * ULP)),
        # the same product as x0·cos is not rounded: 4 ulp + 3·2^-14 rounds to 4 ulp · (1 + ulp);
        # x0·sin + x1·cos = 2 + 4 ulp
        ((1 + ULP, 1), (1 + 3 * ULP, 1), (4 * ULP * (1 + ULP), 2 + 4 * ULP)),
        # x0·cos = 259/256 is half way between two bf16 numbers and would go up, but something is
        # taken away, too little for float32 or for float64 to show; x0·sin + x1·cos is 1829 units
        # of the last digit of x1·cos, and 1829 needs three bits more than bf16 has
        ((7, 2.0**-15), (37 / 256, 2.0**-15), (1 + ULP, 1832 * 2.0**-23)),
        ((7, 2.0**-40), (37 / 256, 2.0**-40), (1 + ULP, 1832 * 2.0**-48)),
    ],
    ids=["product rounded", "fused product exact", "beyond float32", "beyond float64"],
)
def test_stepwise_rotation_by_hand(
    x: tuple[float, float], cos_sin: tuple[float, float], y: tuple[float, float]
) -> None:
    rotated = reference.rotate_stepwise(
        torch.tensor(x, dtype=torch.bfloat16), torch.tensor(cos_sin, dtype=torch.bfloat16)
    )
    assert rotated.dtype == torch.bfloat16
    assert rotated.tolist() == list(y)


def nearest(value: Fraction, dtype: torch.dtype) -> Fraction:
    """`value` rounded to a number of `dtype`, ties to even, in exact arithmetic."""
    info = torch.finfo(dtype)
    binade = max(Fraction(2) ** (math.frexp(value)[1] - 1), Fraction(info.smallest_normal))
    unit = binade * Fraction(info.eps)
    return round(value / unit) * unit  # round() of a Fraction goes to even on a tie


@pytest.mark.parametrize(
    ("dtype", "freq_dtype", "octaves"),
    [
        (torch.bfloat16, torch.bfloat16, 40),
        (torch.bfloat16, torch.float32, 40),
        (torch.float32, torch.float32, 40),
        (torch.float16, torch.float16, 3),
    ],
)
def test_stepwise_rotation_is_exact_to_the_bit(
    dtype: torch.dtype, freq_dtype: torch.dtype, octaves: int
) -> None:
    """Against exact fractions; sizes differ so much that sums lose digits, in float64 as well."""
    x = normal(300, 2, seed=1) * 2.0 ** (octaves * normal(300, 2, seed=2).clamp(-1, 1))
    for pair, cos_sin in zip(x.to(dtype), rope_table(300, 2, freq_dtype), strict=True):
        x0, x1 = map(Fraction, pair.to(freq_dtype).tolist())
        c, s = map(Fraction, cos_sin.tolist())
        y0 = nearest(x0 * c - nearest(x1 * s, freq_dtype), freq_dtype)
        y1 = nearest(x0 * s + nearest(x1 * c, freq_dtype), freq_dtype)
        exact = [float(nearest(y, dtype)) for y in (y0, y1)]
        assert reference.rotate_stepwise(pair, cos_sin).tolist() == exact


def test_stepwise_rotation_stays_close_to_the_exact_one() -> None:
    """Half an ulp (2^-8 relative) for the rounded product, and half an ulp for the sum."""
    x, table = normal(200, 64, seed=1).bfloat16(), rope_table(200, 64, torch.bfloat16)
    for row, cos_sin in zip(x, table, strict=True):
        exact = reference.rotate(row, cos_sin)
        error = (reference.rotate_stepwise(row, cos_sin).double() - exact).abs()
        sin_cos = torch.stack([cos_sin[1::2], cos_sin[0::2]], -1).flatten()
        product = (row[1::2].repeat_interleave(2).double() * sin_cos.double()).abs()
        assert (error <= 2.0**-8 * (product + exact.abs() + 2.0**-8 * product)).all()
        assert error.max() > 0 or torch.equal(cos_sin[1::2], torch.zeros(32).bfloat16())


def test_stepwise_norm_by_hand() -> None:
    # mean(x²) + epsilon = 12.5 + 3.5 = 4²; 3/4 · (1 + ulp) is half way and goes to the even side
    x, gamma = torch.tensor([3.0, 4.0]).bfloat16(), torch.tensor([1 + ULP, 1 + ULP]).bfloat16()
    y = reference.rms_norm_stepwise(x, gamma, 3.5)
    assert y.dtype == torch.bfloat16
    assert y.tolist() == [0.75 + 2 * 2.0**-8, 1 + ULP]


def test_stepwise_norm_rounds_before_gamma() -> None:
    # x is not a bf16 number and its norm is 1: rounded to 1 + ulp first, then 1.5 · (1 + ulp) is
    # half way and goes up; 1.5 · x itself would go down
    x = torch.tensor([1 + 0.75 * ULP, 0.0])
    epsilon = 1 - (1 + 0.75 * ULP) ** 2 / 2
    gamma = torch.tensor([1.5, 1.0])
    assert reference.rms_norm_stepwise(x, gamma.bfloat16(), epsilon)[0] == 1.5 + 2 * ULP
    assert reference.rms_norm(x, gamma, epsilon)[0].bfloat16() == 1.5 + ULP
    in_float32 = reference.rms_norm_stepwise(x, gamma, epsilon)
    assert in_float32.dtype == torch.float32
    assert_same(in_float32, reference.rms_norm(x, gamma, epsilon), 1e-6)


def test_stepwise_norm_stays_close_to_the_exact_one() -> None:
    """Two roundings to bf16, half an ulp (2^-8 relative) each; the float32 part is far smaller."""
    x, gamma = normal(50, 512, seed=1).bfloat16(), normal(512, seed=2).bfloat16()
    exact = reference.rms_norm(x, gamma, 1e-6)
    error = (reference.rms_norm_stepwise(x, gamma, 1e-6).double() - exact).abs()
    assert (error <= 2.01 * 2.0**-8 * exact.abs()).all()
    assert error.max() > 0


def test_norm_matches_torch() -> None:
    x, gamma = normal(5, 16, seed=1), normal(16, seed=2)
    exact = torch.nn.functional.rms_norm(x, (16,), gamma, eps=0.5)
    assert_same(reference.rms_norm(x, gamma, 0.5), exact)


def test_norm_rope_quant_takes_each_token_at_its_position() -> None:
    positions = [4, 0, 4, 7]
    q_rope, kv = normal(4, 3, 4, seed=1), normal(4, 10, seed=2)
    freqs, gamma = rope_table(9, 4), normal(6, seed=3)
    freqs[[position for position in range(9) if position not in positions]] = torch.nan
    q_out, rows = reference.norm_rope_quant(q_rope, kv, freqs, gamma, positions, epsilon=0.1)
    for token, position in enumerate(positions):
        turn = torch.view_as_complex(freqs[position].view(2, 2))
        turned = torch.view_as_complex(q_rope[token].view(3, 2, 2)) * turn
        assert_same(q_out[token], torch.view_as_real(turned).flatten(1))
        key = torch.view_as_complex(kv[token, 6:].view(2, 2).contiguous()) * turn
        latent = torch.nn.functional.rms_norm(kv[token, :6], (6,), gamma, eps=0.1)
        assert_same(rows[token], torch.cat([latent, torch.view_as_real(key).flatten()]))


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, E4M3])
def test_stepwise_rows_are_the_steps_in_the_final_dtypes(cache_dtype: torch.dtype) -> None:
    positions = [4, 0, 7]
    q_rope, kv = normal(3, 2, 4, seed=1).bfloat16(), normal(3, 10, seed=2).bfloat16()
    freqs, gamma = rope_table(9, 4, torch.float32), normal(6, seed=3).bfloat16()
    for rope in ("interleaved", "half"):
        q_out, rows = reference.norm_rope_quant_stepwise(
            q_rope,
            kv,
            freqs,
            gamma,
            positions,
            epsilon=0.1,
            rope=rope,
            out_dtype=E4M3,
            cache_dtype=cache_dtype,
        )
        assert (q_out.dtype, rows.dtype) == (E4M3, cache_dtype)
        for token, position in enumerate(positions):
            q = reference.rotate_stepwise(q_rope[token], freqs[position], rope=rope)
            key = reference.rotate_stepwise(kv[token, 6:], freqs[position], rope=rope)
            latent = reference.rms_norm_stepwise(kv[token, :6], gamma, 0.1)
            row = torch.cat([latent, key]).to(cache_dtype)
            assert torch.equal(q_out[token].float(), q.to(E4M3).float())
            assert torch.equal(rows[token].float(), row.float())


def test_stepwise_e4m3_results_saturate() -> None:
    q_rope = torch.tensor([[[1e4, -1e4]]]).bfloat16()
    kv = torch.tensor([[1.0, 1.0, -1e4, 1e4]]).bfloat16()
    freqs, gamma = torch.tensor([[1.0, 0.0]]), torch.tensor([1e4, 1.0])
    q_out, rows = reference.norm_rope_quant_stepwise(
        q_rope, kv, freqs, gamma, [0], epsilon=0.0, out_dtype=E4M3, cache_dtype=E4M3
    )
    assert q_out.float().tolist() == [[[448.0, -448.0]]]
    assert rows.float().tolist() == [[448.0, 1.0, -448.0, 448.0]]


def test_norm_without_rope_columns() -> None:
    kv, gamma = normal(3, 6, seed=1), normal(6, seed=2)
    nothing = torch.empty(3, 2, 0)
    q_out, rows = reference.norm_rope_quant(
        nothing, kv, torch.empty(9, 0), gamma, [0, 1, 2], epsilon=0.1
    )
    assert q_out.shape == (3, 2, 0)
    assert_same(rows, torch.nn.functional.rms_norm(kv, (6,), gamma, eps=0.1))


def test_quantize_scales_every_group_of_every_row() -> None:
    """A last group of two columns is quantised like the others, and padding is zero."""
    x = torch.tensor([[1.0, -2.0, 4.0, 8.0, 7.0, -14.0], [0, 0, 0, 0, 28.0, 0]])
    q, scales = reference.quantize_fp8(x, 4)
    assert (q.dtype, scales.dtype) == (E4M3, torch.float32)
    assert scales.shape == (2, 4)
    unit = torch.tensor(1.0) / 448
    want = torch.tensor([[8.0, 0.0], [14.0, 28.0]]) * unit
    assert_same(scales[:, :2], want, 1e-7)
    assert torch.equal(scales[:, 2:], torch.zeros(2, 2))
    assert q.float().tolist() == [[56, -112, 224, 448, 224, -448], [0, 0, 0, 0, 448, 0]]
    assert_same(reference.dequantize_fp8(q, scales, 4), x, 1e-6)


def test_quantize_zero_tiny_and_large_groups() -> None:
    x = torch.zeros(5, 4)
    x[1] = 1e-42  # 1 / scale is not a float32 number
    x[2] = torch.tensor([5000.0, -1300.0, 1200.0, 600.0])
    x[3] = torch.tensor([math.nan, 1.0, 2.0, 3.0])
    q, scales = reference.quantize_fp8(x, 4, scale_ub=1200.0)
    assert torch.equal(q[:2].float(), torch.zeros(2, 4))
    assert scales[0, 0] == 0
    assert torch.equal(reference.dequantize_fp8(q, scales, 4)[:2], torch.zeros(2, 4).double())
    assert scales[0, 2] == torch.tensor(1200.0) / 448
    assert q[2].float().tolist() == [448.0, -448.0, 448.0, 224.0]
    assert q[3].float().isnan().tolist() == [True, False, False, False]
    assert scales[0, 3].isnan()
    assert torch.equal(scales[0, 4:], torch.zeros(4))
    _, unbounded = reference.quantize_fp8(x, 4)
    assert unbounded[0, 2] == torch.tensor(5000.0) / 448


def test_quantize_rounds_to_the_nearest_number_of_the_format() -> None:
    x = normal(6, 40, seed=1).float() * torch.tensor([1.0, 1e-3, 1e3, 30.0, 1.0, 1.0])[:, None]
    q, scales = reference.quantize_fp8(x, 16)
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).double()
    codes = codes[codes.isfinite()]
    scaled = x.double() / scales[:, :6].repeat_interleave(16, 0)[:40].T.double()
    closest = (scaled[..., None] - codes).abs().amin(-1)
    chosen = (scaled - q.double()).abs()
    assert (chosen <= closest + 1e-4).all()  # 448 · 2^-23: the reciprocal is a float32 number


def test_scaled_product_equals_the_dequantised_one() -> None:
    """Group sizes that divide neither K nor N; the padding of the scales holds NaN."""
    m, n, k, n_group, k_group = 5, 7, 11, 3, 4
    a, a_scale = reference.quantize_fp8(normal(m, k, seed=1), k_group)
    a_scale[:, m:] = torch.nan
    b, b_scale = normal(n, k, seed=2).to(E4M3), normal(3, 3, seed=3).exp().float()
    exact = torch.zeros(m, n, dtype=torch.float64)
    for i in range(m):
        for j in range(n):
            for column in range(k):
                group = column // k_group
                scale = a_scale[group, i].double() * b_scale[j // n_group, group].double()
                exact[i, j] += a[i, column].double() * b[j, column].double() * scale
    product = reference.scaled_mm_fp8(a, a_scale, b, b_scale, n_group=n_group, k_group=k_group)
    assert_same(product, exact)


LAYERS: dict[str, dict[str, Any]] = {
    "interleaved": {"rope_interleave": True, "q_lora_rank": 24},
    "half": {"rope_interleave": False, "q_lora_rank": 24},
    "no q latent": {"rope_interleave": True, "q_lora_rank": None},
    "yarn": {
        "rope_interleave": True,
        "q_lora_rank": 24,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    },
}


def run_transformers_layer(layer: dict[str, Any], x: Tensor) -> tuple[Any, Tensor, Tensor]:
    """A random DeepseekV3Attention, its rope table [tokens, D_R] and its result on x."""
    from transformers.models.deepseek_v3 import configuration_deepseek_v3, modeling_deepseek_v3

    config = configuration_deepseek_v3.DeepseekV3Config(
        hidden_size=x.shape[1],
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=12,
        v_head_dim=10,
        max_position_embeddings=64,
        **layer,
    )
    config._attn_implementation = "sdpa"  # eager rounds the softmax to float32
    module = modeling_deepseek_v3.DeepseekV3Attention(config, layer_idx=0).double().eval()
    for seed, parameter in enumerate(module.parameters()):
        fan_in = parameter.shape[-1] if parameter.ndim == 2 else 1
        parameter.data = normal(*parameter.shape, seed=seed) * 1.5 / fan_in**0.5
    rotary = modeling_deepseek_v3.DeepseekV3RotaryEmbedding(config)
    cos, sin = rotary(x, torch.arange(len(x))[None])
    with torch.no_grad():
        out, _ = module(x[None], (cos, sin), attention_mask=None)
    pairs = cos.shape[-1] // 2  # both halves hold the same angles
    return module, torch.stack([cos[0, :, :pairs], sin[0, :, :pairs]], -1).flatten(1), out[0]


def layer_inputs(module: Any, x: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q_nope and rotated q_rope of every head, and the cache rows, from the layer's own weights."""
    config = module.config
    if config.q_lora_rank is None:
        q = module.q_proj(x)
    else:
        norm = module.q_a_layernorm
        q_latent = reference.rms_norm(module.q_a_proj(x), norm.weight, norm.variance_epsilon)
        q = module.q_b_proj(q_latent)
    q_nope, q_rope = q.view(len(x), config.num_attention_heads, -1).split(
        [config.qk_nope_head_dim, config.qk_rope_head_dim], -1
    )
    q_rope, rows = reference.norm_rope_quant(
        q_rope,
        module.kv_a_proj_with_mqa(x),
        freqs,
        module.kv_a_layernorm.weight,
        range(len(x)),
        epsilon=module.kv_a_layernorm.variance_epsilon,
        rope="interleaved" if config.rope_interleave else "half",
    )
    return q_nope, q_rope, rows


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@pytest.mark.parametrize("layer", LAYERS)
@torch.no_grad()
def test_parity_with_transformers(layer: str, form: str) -> None:
    """The norms of the module compute in float32, hence 1e-5."""
    x = normal(11, 32, seed=100)
    module, freqs, exact = run_transformers_layer(LAYERS[layer], x)
    q_nope, q_rope, rows = layer_inputs(module, x, freqs)
    latent, k_rope = rows.split([16, 8], -1)
    w_uk, w_uv = module.kv_b_proj.weight.view(4, -1, 16).split([12, 10], 1)
    batch = Batch(q_nope, q_rope, latent, k_rope, w_uk, w_uv, (11,), (11,))

    def attend(softmax_scale: float) -> Tensor:
        if form == "expanded":
            heads, _ = reference.mla_prefill(**batch.expanded(), softmax_scale=softmax_scale)
        else:
            latent_out, _ = reference.mla_decode(**batch.absorbed(), softmax_scale=softmax_scale)
            heads = batch.values(latent_out)
        return module.o_proj(heads.flatten(1))

    assert_same(attend(module.scaling), exact, 1e-5)
    uniform_average = attend(0.0)
    assert (uniform_average - exact).abs().amax(-1)[1:].min() > 0.1  # token 0 has one key


def uniform_average(real: Callable[..., Any]) -> Callable[..., Any]:
    """Attention that ignores the scores."""
    return lambda *args, **options: real(*args, **{**options, "softmax_scale": 0.0})


def does_nothing(real: Callable[..., Any]) -> Callable[..., Any]:
    """Results of the right shape and dtype, with nothing in them."""

    def impostor(*args: Any, **options: Any) -> Any:
        result = real(*args, **options)
        if isinstance(result, Tensor):
            return torch.zeros_like(result)
        return tuple(torch.zeros_like(part) for part in result)

    return impostor


def gives_back_its_input(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *args, **options: x


def gives_back_both_inputs(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda q_rope, kv, *args, **options: (q_rope, kv)


def plain_mean(real: Callable[..., Any]) -> Callable[..., Any]:
    """Merging that gives every live part the same weight."""
    return lambda outs, lses, **options: (outs.nanmean(0).nan_to_num(), lses.logsumexp(0))


ATTENTION = (uniform_average, does_nothing)
IMPOSTORS: list[tuple[Callable[[], None], str, Sequence[Callable[..., Any]]]] = [
    (partial(test_prefill_matches_its_definition, CAUSAL, None), "mla_prefill", ATTENTION),
    (partial(test_absorbed_equals_expanded, CAUSAL, None), "mla_prefill", ATTENTION),
    (partial(test_absorbed_equals_expanded, CAUSAL, SINK), "mla_decode", ATTENTION),
    (test_prefill_matches_scaled_dot_product_attention, "mla_prefill", ATTENTION),
    (test_alibi_matches_the_documented_form, "mla_prefill", ATTENTION),
    (partial(test_split_and_merged_equals_whole, SINK), "merge_states", (does_nothing, plain_mean)),
    (
        partial(test_chunked_prefill_equals_one_shot, None),
        "merge_states",
        (does_nothing, plain_mean),
    ),
    (
        partial(test_sparse_over_all_visible_rows_equals_decode, CAUSAL, None),
        "sparse_mla",
        ATTENTION,
    ),
    (
        partial(test_sparse_over_all_visible_rows_equals_decode, CAUSAL, SINK),
        "mla_decode",
        ATTENTION,
    ),
    (test_sparse_edge_cases, "sparse_mla", ATTENTION),
    (test_sparse_extra_rows_join_the_same_softmax, "sparse_mla", ATTENTION),
    (test_indexer_logits_of_a_ragged_batch, "indexer_logits", (does_nothing,)),
    (test_topk_orders_ties_nan_and_infinities, "indexer_topk", (does_nothing,)),
    (test_rotation_is_a_complex_product, "rotate", (does_nothing, gives_back_its_input)),
    (test_norm_matches_torch, "rms_norm", (does_nothing, gives_back_its_input)),
    (
        test_norm_rope_quant_takes_each_token_at_its_position,
        "norm_rope_quant",
        (does_nothing, gives_back_both_inputs),
    ),
    (
        partial(test_stepwise_rotation_is_exact_to_the_bit, torch.bfloat16, torch.bfloat16, 0),
        "rotate_stepwise",
        (does_nothing, gives_back_its_input),
    ),
    (
        test_stepwise_norm_stays_close_to_the_exact_one,
        "rms_norm_stepwise",
        (does_nothing, gives_back_its_input),
    ),
    (
        partial(test_stepwise_rows_are_the_steps_in_the_final_dtypes, E4M3),
        "norm_rope_quant_stepwise",
        (does_nothing, gives_back_both_inputs),
    ),
    (test_quantize_scales_every_group_of_every_row, "quantize_fp8", (does_nothing,)),
    (test_quantize_scales_every_group_of_every_row, "dequantize_fp8", (does_nothing,)),
    (test_scaled_product_equals_the_dequantised_one, "scaled_mm_fp8", (does_nothing,)),
    (partial(test_parity_with_transformers, "interleaved", "expanded"), "mla_prefill", ATTENTION),
    (partial(test_parity_with_transformers, "interleaved", "absorbed"), "mla_decode", ATTENTION),
    (
        partial(test_parity_with_transformers, "interleaved", "absorbed"),
        "norm_rope_quant",
        (does_nothing, gives_back_both_inputs),
    ),
]


def impostor_cases() -> list[Any]:
    cases = []
    for comparison, oracle, impostors in IMPOSTORS:
        test = getattr(comparison, "func", comparison)
        for impostor in impostors:
            name = f"{test.__name__.removeprefix('test_')}-{oracle}-{impostor.__name__}"
            cases.append(pytest.param(comparison, oracle, impostor, id=name))
    return cases


@pytest.mark.parametrize(("comparison", "oracle", "impostor"), impostor_cases())
def test_comparison_refuses_the_impostor(
    comparison: Callable[[], None],
    oracle: str,
    impostor: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comparison()
    monkeypatch.setattr(reference, oracle, impostor(getattr(reference, oracle)))
    with pytest.raises(AssertionError):
        comparison()
