"""The oracles of attention and of merging, against each other and against facts by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mlakit import reference
from mlakit.model.masks import CAUSAL, NULL, Mask
from tests.reference.inputs import (
    INF,
    SCALE,
    SINK,
    assert_same,
    attend_by_hand,
    by_mask,
    make_batch,
    normal,
    starts,
)
from tests.seen_keys import sees


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
    """Every third position is one split's; one split has no position and is never written."""
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


def test_a_sink_in_every_split_is_not_the_sink_of_the_whole() -> None:
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
