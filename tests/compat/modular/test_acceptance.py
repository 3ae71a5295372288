"""The acceptance list of the documented functions: eighteen statements, one test each."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mlakit import ops, reference
from mlakit.compat.modular.dispatch_scalars import BUCKETS, num_partitions
from mlakit.dispatch import selection
from mlakit.dispatch.specs import Problem
from mlakit.model.geometry import RowShape
from mlakit.tools.testing import assert_matches, assert_same_bits, poison
from tests.compat.modular.append_cases import RopeCase
from tests.compat.modular.attention_cases import DecodeCase, PrefillCase, SparseCase
from tests.compat.modular.inputs import (
    BF16,
    E4M3,
    EPSILON,
    F32,
    SCALE,
    SMALL_ROW,
    PagedStep,
    Step,
    integers,
    modular,
    normal,
    ops_there,
    to_e4m3,
)

pytestmark = pytest.mark.usefixtures("place")

B200_SMS = 148


QUANTISERS = [
    pytest.param(reference.quantize_fp8, id="oracle"),
    *(
        pytest.param(partial(ops.quantize_fp8, backend=spec.backend), id=str(spec))
        for spec in selection.specs("quantize_fp8")
        if spec.why_not(Problem("cpu", dtype=str(F32))) is None
    ),
]


@pytest.mark.slow
def test_01_rope_rotates_token_i_of_request_b_by_row_cache_length_plus_i():
    """Token i of request b is rotated by row Lc[b] + i, in pairs (0, 1), (2, 3), …; pairing the
    halves instead gives something else."""
    step = Step((37, 0, 5, 16), (1, 3, 0, 4))
    case = RopeCase(step=step, dtype=F32, cache_dtype=F32)
    # (1, 0) turned by an angle is its (cos, sin): the output is the row of the table itself
    for part in (case.q_rope.view, case.kv.view[:, 512:]):
        part[..., 0::2], part[..., 1::2] = 1.0, 0.0
    case.run()
    rows = case.freqs[[37, 0, 1, 2, 16, 17, 18, 19]]
    for head in range(case.heads):
        assert torch.equal(case.q_rope_output[:, head], rows)
    assert torch.equal(case.paged.pages.stored(case.paged.new_slots)[:, 512:], rows)

    case = RopeCase(step=step, dtype=F32, cache_dtype=F32)
    case.run()
    turned = {
        rope: torch.stack(
            [
                reference.rotate(q, case.freqs[position], rope=rope)
                for q, position in zip(case.q_rope.remembered, step.positions, strict=True)
            ]
        )
        for rope in ("interleaved", "half")
    }
    assert_matches("q", case.q_rope_output, turned["interleaved"], turned["interleaved"].float())
    with pytest.raises(AssertionError):
        assert_matches("q", case.q_rope_output, turned["half"], turned["half"].float())


def test_02_the_norm_is_rounded_to_gammas_type_before_gamma_multiplies():
    """Normalise in float32, round to gamma's type, multiply by gamma in that type."""
    case = RopeCase(gamma_dtype=BF16, cache_dtype=F32, heads=1)
    case.run()
    latent = case.paged.pages.stored(case.paged.new_slots)[:, :512]
    x = case.kv.remembered[:, :512].double()
    normalised = x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt()
    documented = normalised.to(BF16) * case.gamma
    rounded_once = (normalised * case.gamma.double()).to(BF16)
    assert torch.equal(latent.to(BF16).float(), latent), "not rounded to gamma's type"
    assert float((latent == documented.float()).double().mean()) > 0.998
    assert float((latent == rounded_once.float()).double().mean()) < 0.9


@pytest.mark.interpreted
def test_03_float8_writes_saturate():
    """10 000 becomes 448 in an FP8 cache, and −10 000 becomes −448; neither becomes NaN."""
    case = RopeCase(cache_dtype=E4M3, out_dtype=E4M3, gamma_dtype=F32)
    sign = torch.tensor([1.0, -1.0])
    case.q_rope.view.copy_(1e4 * sign.repeat(32))
    case.kv.view[:, :512] = sign.repeat(256)
    case.kv.view[:, 512:] = 1e4 * sign.repeat(32)
    case.gamma.fill_(1e4)
    case.freqs.copy_(torch.tensor([1.0, 0.0]).repeat(32))
    case.run()
    stored = case.paged.pages.stored(case.paged.new_slots).float()
    assert torch.equal(stored, 448 * sign.repeat(288).expand_as(stored))
    out = case.q_rope_output.float()
    assert torch.equal(out, 448 * sign.repeat(32).expand_as(out))


def test_04_a_buffer_of_length_0_changes_nothing():
    """With buffer_length = 0 the output, the queries and the cache stay as they are, bit by bit."""
    case = PrefillCase(d_n=16, d_v=16, row=SMALL_ROW)
    nothing = torch.zeros(len(case.step.new) + 1, dtype=torch.int32)
    case.run((nothing, nothing, 0))
    case.assert_untouched()


@pytest.mark.interpreted
def test_05_prefill_overwrites_only_the_rope_part_of_q():
    """Of q only the columns from D_N on are written, and those are."""
    case = PrefillCase(d_n=40, d_v=16, row=SMALL_ROW)
    case.run()
    case.q.assert_only_written("q", torch.arange(case.q.shape[-1]) >= 40)
    turned = case.q.view[..., 40:] != case.q.remembered[..., 40:]
    assert bool(turned.any(-1).all())


@pytest.mark.on_cpu
@pytest.mark.parametrize("quantise", QUANTISERS)
@pytest.mark.parametrize("group", [64, 128])
def test_06_a_group_of_zeros_and_a_group_beyond_the_bound(quantise, group):
    """Zeros: scale 0, values 0, dequantised 0. A largest magnitude of 5000 counts as 1200: the
    scale is 1200 / 448, and what is larger than 1200 saturates."""
    x = torch.zeros(3, 2 * group)
    x[1, group:] = torch.linspace(-5000, 5000, group)
    q, scales = quantise(x, group, scale_ub=1200.0)
    back = reference.dequantize_fp8(q, scales, group)
    assert scales[:, :3].tolist() == [[0, 0, 0], [0, pytest.approx(1200 / 448), 0]]
    assert bool((q[x == 0].float() == 0).all())
    assert bool((back[x == 0] == 0).all())
    assert float(back.max()) == pytest.approx(1200)
    beyond = x.abs() > 1200
    assert torch.equal(q.float()[beyond], 448 * x[beyond].sign())
    inside = ~beyond & (x.abs() > 50)
    # e4m3 keeps three bits after the leading one: half a step is 1/16 at most
    assert bool(((back / x - 1).abs()[inside] <= 1 / 16).all())


@pytest.mark.slow
@pytest.mark.on_cpu
@pytest.mark.parametrize("quantise", QUANTISERS)
def test_07_scales_lie_transposed_and_padded(quantise, generator):
    """Scales are [K / G, M rounded up to 4], the rows of a group side by side."""
    for rows in range(1, 10):
        x = normal(generator, rows, 384)
        q, scales = quantise(x, 128, scale_ub=1200.0)
        assert scales.shape == (3, -(-rows // 4) * 4)
        assert scales.dtype == F32
        assert q.shape == (rows, 384)
        largest = x.view(rows, 3, 128).abs().amax(-1)
        assert_matches("scales", scales[:, :rows], largest.T.double() / 448, largest.T / 448)


def test_08_the_plan_of_the_documented_example():
    """Prompts of 160 and 200, nothing cached, pages of 128, buffers of 256: two full chunks."""
    buffer_row_offsets, cache_offsets, buffer_lengths = modular.mla_prefill_plan(
        integers([0, 160, 360]), integers([0, 0]), 256, page_size=128, max_chunks=4
    )
    assert buffer_row_offsets.tolist() == [[0, 256, 256], [0, 0, 256], [0, 0, 0], [0, 0, 0]]
    assert cache_offsets[:, :2].tolist() == [[0, 0], [256, 0], [256, 256], [256, 256]]
    assert buffer_lengths.tolist() == [256, 256, -1, -1]


@pytest.mark.slow
def test_09_decode_does_not_depend_on_the_number_of_splits():
    """1 to 74 splits give one result, also where there are more splits than pages."""
    step = Step((330, 40, 0, 63), (1, 2, 1, 1))  # 6, 1, 1 and 1 pages of 64 keys
    rope_aware = {"dtype": E4M3, "has_token_scales": True}
    for kinds, all_parts in (({}, range(1, 75)), (rope_aware, (*BUCKETS, 74))):
        case = DecodeCase(step=step, page_size=64, heads=2, **kinds)
        exact, naive = case.oracle(), case.oracle(F32)
        for parts in all_parts:
            poison(case.output.base)
            case.run(num_partitions=parts)
            assert_matches(f"output of {parts} parts", case.output.view, exact, naive)


def clean_up(paged):
    """Zeros instead of NaN, and page 0 instead of garbage."""
    paged.pages.blocks.view.view(torch.uint8).masked_fill_(
        ~paged.pages.at_slots(paged.pages.blocks, torch.cat(paged.slots)), 0
    )
    tables = [(paged.table, paged.pages.blocks)]
    if paged.pages.scales is not None:
        paged.pages.scales.view.nan_to_num_(0.0)
        tables.append((paged.scales_table, paged.pages.scales))
    for table, pool in tables:
        table[(table < 0) | (table >= pool.shape[0])] = 0


@pytest.mark.slow
def test_10_what_is_not_read_may_be_anything():
    """NaN in page tails, in other pages, in unused scales and in the results of empty splits, and
    huge numbers in unused table entries, change not one bit of the output."""
    for kinds in ({}, {"dtype": E4M3, "has_token_scales": True, "has_scale_pool": True}):
        poisoned, clean = DecodeCase(**kinds), DecodeCase(**kinds)
        clean_up(clean.paged)
        for case in (poisoned, clean):
            case.run(num_partitions=74)
        assert bool(poisoned.output.view.isfinite().all())
        assert_same_bits("output", poisoned.output.base, clean.output.base)


@pytest.mark.slow
def test_11_a_ragged_batch_with_an_empty_request():
    """S = [1, 3, 0, 4] works in the append, in decode and in prefill; the empty request writes
    nothing."""
    step = Step((20, 0, 30, 7), (1, 3, 0, 4))
    append = RopeCase(step=step)
    decode = DecodeCase(step=step)
    padded = DecodeCase(step=step, is_ragged=False)
    prefill = PrefillCase(step=step, d_n=16, d_v=16, row=SMALL_ROW)
    for case in (append, decode, padded, prefill):
        case.run()
        case.check()
    assert bool(padded.output.view[2].isnan().all()), "the rows of the empty request"


@pytest.mark.slow
@pytest.mark.parametrize("is_ragged", [True, False], ids=["ragged", "padded"])
def test_12_a_causal_query_sees_the_cache_and_the_new_tokens_up_to_itself(is_ragged):
    """With several queries, query i sees exactly Lc + i + 1 keys."""
    step = Step((37, 0, 100), (4, 3, 2))
    case = DecodeCase(step=step, is_ragged=is_ragged, dtype=F32, cache_dtype=F32, heads=2)
    case.q.view.zero_()  # every seen key weighs the same
    for slots in case.paged.slots:
        rows = torch.zeros(len(slots), 576)
        rows[torch.arange(len(slots)), torch.arange(len(slots))] = 1.0  # key j is column j
        case.paged.pages.blocks.view[case.paged.pages.at(slots)] = rows
    case.run()
    for out, position in zip(case.output.view[case.where], step.positions, strict=True):
        seen = position + 1
        mean = torch.full((2, seen), 1 / seen, dtype=torch.float64)
        assert_matches("out", out[:, :seen], mean, mean.float())
        assert bool((out[:, seen:] == 0).all())


def sparse_outputs(**changes):
    case = SparseCase(dtype=F32, cache_dtype=F32, with_invalid=False, **changes)
    case.run()
    case.check()
    return case


@pytest.mark.slow
def test_13_sparse_prefill(generator):
    """No valid row gives zeros, sink or not. A sink of −inf is none; a finite one adds exp(sink)
    to the denominator. The order of a list does not matter beyond rounding; a duplicate counts
    twice; layer 2 of 3 is read when asked for."""
    sink = normal(generator, 3)
    plain = sparse_outputs(lengths=(24, 0, 9, 24))
    assert bool((plain.output.view[1] == 0).all())
    with_sink = sparse_outputs(lengths=(24, 0, 9, 24), sink=sink)
    assert bool((with_sink.output.view[1] == 0).all())
    no_sink = sparse_outputs(lengths=(24, 0, 9, 24), sink=torch.full((3,), -torch.inf))
    assert_same_bits("sink of -inf", no_sink.output.base, plain.output.base)

    # Σ w v / (Σ w + exp sink) = (Σ w v / Σ w) · Σ w / (Σ w + exp sink)
    rows = plain.pool[plain.lists[2, :9]]
    total = (plain.q.view[2].double() @ rows.T * SCALE).exp().sum(-1)
    share = total / (total + sink.double().exp())
    exact, naive = plain.oracle(), plain.oracle(F32)
    by_formula = [each[2] * share[:, None] for each in (exact, naive)]
    assert_matches("with a sink", with_sink.output.view[2], *by_formula)

    plain.lists[0] = plain.lists[0, torch.randperm(24, generator=generator)]
    plain.run()
    assert_matches("permuted", plain.output.view, exact, naive)
    plain.lists[3] = -1
    plain.run()
    assert bool((plain.output.view[3] == 0).all())

    twice = SparseCase(dtype=F32, cache_dtype=F32, with_invalid=False, lengths=(3,), stride=3)
    a, b = twice.pool_live()[:2].tolist()
    twice.lists = torch.tensor([[a, b, a]])
    twice.run()
    score = twice.q.view[0].double() @ twice.pool[[a, b]].T * SCALE
    weight = score.exp() * torch.tensor([2.0, 1.0])
    by_hand = weight / weight.sum(-1, keepdim=True) @ twice.pool[[a, b], :512]
    assert_matches("duplicate", twice.output.view[0], by_hand, by_hand.float())

    for layer in range(3):
        sparse_outputs(layer=layer)


@pytest.mark.slow
@pytest.mark.interpreted
def test_14_sparse_attention_over_all_keys_is_dense_attention():
    """Lists of all keys give the dense result; lists longer than the keys count what there is."""
    step = Step((40, 0, 16), (1, 1, 1))
    dense = DecodeCase(step=step, page_size=16, dtype=F32, cache_dtype=F32)
    dense.run()
    longest = max(dense.step.after)
    for stride in (longest, longest + 23):
        lists = torch.full((3, stride), -1)
        for token, slots in enumerate(dense.paged.slots):
            lists[token, : len(slots)] = slots
        sparse = torch.empty_like(dense.output.view)
        modular.mla_sm100_prefill_sparse(
            sparse,
            dense.q.view,
            dense.paged.key_cache(),
            integers(lists),
            integers([stride] * 3),
            None,
            SCALE,
            num_q_heads=dense.heads,
            qk_depth=576,
            v_depth=512,
            indices_stride=stride,
        )
        for name, output in (("dense", dense.output.view), ("sparse", sparse)):
            assert_matches(name, output, dense.oracle(), dense.oracle(F32))


def test_15_rope_aware_rows_with_a_scale_per_token(generator):
    """Content and rope are stored divided by the token's scale, a power of two; the result is that
    of the true rows. NaN scales past the end do no harm."""
    case = DecodeCase(
        step=Step((40, 0, 16), (1, 2, 1)), dtype=E4M3, has_token_scales=True, page_size=16
    )
    pages = case.paged.pages
    for request, slots in enumerate(case.paged.slots):
        sigma = 2.0 ** torch.randint(-5, 4, (len(slots), 1), generator=generator)
        # numbers of four bits after the leading one, so that dividing by sigma loses nothing
        true_rows = to_e4m3(normal(generator, len(slots), 576, std=4.0)).float()
        content = to_e4m3(true_rows[:, :512] / sigma)
        rope = (true_rows[:, 512:] / sigma).to(BF16)
        stored = torch.cat([content.view(torch.uint8), rope.view(torch.uint8)], -1)
        pages.blocks.view.view(torch.uint8)[pages.at(slots)] = stored
        pages.scales.view[pages.at(slots)] = sigma
        kept = content.double() * sigma.double()  # what e4m3 underflows is format, not kernel
        case.paged.rows[request] = torch.cat([kept, true_rows[:, 512:].double()], -1)
    pages.remember()
    assert bool(pages.scales.view.isnan().any())
    case.run()
    assert bool(case.output.view.isfinite().all())
    case.check()


@pytest.mark.slow
@pytest.mark.interpreted
def test_16_the_indexer(generator):
    """relu comes before the weight, so a negative weight can only lower a score; slots without a
    key hold −1; no query is given a key after itself."""
    step = Step((5, 2), (4, 1))
    paged = PagedStep(step, [0, 0], generator, page_size=4, row=RowShape(32, 0), dtype=F32)
    q, weights = normal(generator, 5, 4, 32), normal(generator, 5, 4)

    def logits_with(weights):
        return ops_there.indexer_logits(
            q,
            weights,
            paged.collection().cache,
            paged.table,
            integers(step.after),
            q_starts=paged.row_offsets,
            layer=paged.layer,
            max_kv_len=9,
        )

    logits = logits_with(weights)
    exact, naive = (
        reference.indexer_logits(q, weights, paged.rows, step.new, dtype=dtype)
        for dtype in (torch.float64, F32)
    )
    assert_matches("logits", logits, exact, naive)
    visible = [6, 7, 8, 9, 3]
    owner = [0, 0, 0, 0, 1]
    for token, count in enumerate(visible):
        dots = (q[token].double() @ paged.rows[owner[token]].T).clamp_min(0)
        by_hand = (weights[token].double()[:, None] * dots).sum(0)[:count]
        assert_matches("logits by hand", logits[token, :count], by_hand, naive[token, :count])
        assert bool((logits[token, count:] == -torch.inf).all())
    lowered = logits_with(-weights.abs())
    assert bool((lowered[logits.isfinite()] <= 0).all())

    for chosen in (ops_there.indexer_topk(logits, 7), reference.indexer_topk(logits, 7)):
        for token, count in enumerate(visible):
            best = sorted(logits[token, :count].argsort(descending=True)[:7].tolist())
            assert chosen[token].tolist() == best + [-1] * (7 - len(best))


@pytest.mark.slow
def test_17_absorbed_and_expanded_attention_agree():
    """Folding the up-projection into the query changes nothing but rounding: the prefill branch and
    decode over the same cache, queries and weights agree within the noise of FP8 latents."""
    case = PrefillCase(heads=5, d_n=64, d_v=32, page_size=16, step=Step((30, 0, 17), (1, 6, 3)))
    case.run()
    weight = reference.dequantize_fp8(
        case.weight, case.weight_scale.repeat_interleave(128, 0).T, 128
    )
    w_k, w_v = weight.unflatten(0, (5, 96)).split([64, 32], dim=1)
    q = case.q.view.double()
    absorbed = torch.cat([torch.einsum("thn,hnc->thc", q[..., :64], w_k), q[..., 64:]], -1)

    decoded = torch.empty(len(q), 5, 512, dtype=BF16)
    modular.flare_mla_decoding(
        decoded,
        absorbed.to(BF16),
        case.paged.key_cache(),
        modular.CausalMask(),
        case.paged.row_offsets,
        SCALE,
        ragged=True,
    )
    by_decode = torch.einsum("thc,hvc->thv", decoded.double(), w_v)
    by_prefill = case.output.view

    rows = [case.paged.pages.stored(slots).double() for slots in case.paged.slots]
    latent_out, _ = reference.mla_decode(
        absorbed, rows, case.step.new, softmax_scale=SCALE, v_width=512
    )
    exact = torch.einsum("thc,hvc->thv", latent_out, w_v)
    # what quantising the latents costs, in float64: the noise the branch is allowed
    assert_matches("prefill", by_prefill, exact, case.oracle())
    noise = (case.oracle() - exact).square().mean(-1).sqrt()
    distance = (by_decode - by_prefill.double()).square().mean(-1).sqrt()
    size = exact.square().mean(-1).sqrt()
    # 2 %: the absorbed query and the latent output of decode are rounded to bf16
    assert bool((distance <= 2 * noise + 0.02 * size).all())
    assert bool((noise <= 0.1 * size).all())


@pytest.mark.on_cpu
def test_18_the_number_of_splits_follows_the_policy():
    """A handful of the pinned values, dense and sparse, on a GPU of 148 SMs."""
    dense = {
        (128, 1, 512): 8,
        (128, 1, 4096): 37,
        (128, 1, 131072): 74,
        (128, 8, 65536): 18,
        (128, 64, 128): 1,
        (128, 128, 131072): 1,
        (64, 1, 16384): 32,
        (64, 64, 128): 1,
        (64, 64, 131072): 2,
    }
    for (heads, batch, cache), parts in dense.items():
        scalars = modular.compute_mla_dispatch_scalars(batch, cache, 1, heads, sm_count=B200_SMS)
        assert scalars.tolist() == [batch, 1, parts], (heads, batch, cache)
    sparse = {(1, 6): 20, (2, 6): 9, (4, 6): 4, (128, 6): 1, (8, 2): 9, (8, 3): 4, (8, 8): 2}
    for (batch, q_len), parts in sparse.items():
        scalars = modular.compute_mla_dispatch_scalars(
            batch, 8192, q_len, 8, sm_count=B200_SMS, is_fp8_kv=True, indices_stride=2048
        )
        assert scalars.tolist() == [batch, q_len, parts], (batch, q_len)
    without_cost_model = num_partitions(
        8, 8192, 6, 8, sm_count=B200_SMS, is_fp8_kv=True, indices_stride=2048, _cost_model=False
    )
    assert without_cost_model == 8
