"""The documented functions against float64 oracles, row by row, with poison around what they read.

The cases (`modular_append_cases`, `modular_attention_cases`) plant NaN and garbage wherever nothing
may be looked at, and their `check` compares outputs and asserts that not one other bit was written.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from modular_append_cases import RopeCase
from modular_attention_cases import DecodeCase, PrefillCase, SparseCase
from modular_inputs import (
    BF16,
    E4M3,
    EPSILON,
    F16,
    F32,
    MASKS,
    NOTHING,
    PAGES_AND_HEADS,
    ROW,
    SEES,
    SMALL_ROW,
    Padded,
    Step,
    integers,
    make_mask,
    modular,
    normal,
    store,
    to_e4m3,
    window_of,
)
from transplant import calls_may_not_wait

from mlakit import checks, dispatch, knobs, reference
from mlakit.compat.modular import arguments, prefill
from mlakit.geometry import RowShape
from mlakit.masks import Mask
from mlakit.testing import assert_matches, assert_same_bits

pytestmark = pytest.mark.usefixtures("place")

INTEGERS = [torch.int32, torch.int64, torch.uint32]
NOBODY = Step((), ())
IDLE = Step((5, 0, 17), (0, 0, 0))

pages_and_heads = pytest.mark.parametrize(
    ("page_size", "heads"), PAGES_AND_HEADS, ids=lambda n: str(n)
)
integer_types = pytest.mark.parametrize("integer_type", INTEGERS, ids=str)
windowed_masks = pytest.mark.parametrize(
    ("mask", "window"),
    [(kind, w) for kind in MASKS for w in ([1, 6, 37] if window_of(kind, 1) else [0])],
)


def replace_launcher(monkeypatch, op, make):
    """Every kernel of `op` becomes make(kernel)."""
    for spec in dispatch.specs(op):
        monkeypatch.setitem(spec.__dict__, "launch", make(spec.launch))


@pytest.mark.on_cpu
@windowed_masks
def test_a_mask_shows_what_is_documented(mask, window):
    functor, num_keys = make_mask(mask, window), 50
    positions, keys = torch.arange(num_keys), torch.arange(num_keys)
    want = torch.tensor([[SEES[mask](q, k, window) for k in range(num_keys)] for q in positions])
    assert torch.equal(functor.visible(positions, keys), want)
    for position in range(num_keys):
        first, last = functor.interval(position, num_keys)
        assert want[position].nonzero().flatten().tolist() == list(range(first, last))


# fused_rope_rmsnorm_quantization_kernel, mla_fused_rope_rmsnorm_quantization


@pages_and_heads
def test_rope_norm_quantises_into_pages(page_size, heads):
    case = RopeCase(seed=page_size, page_size=page_size, heads=heads)
    returned = case.run()
    assert returned.data_ptr() == case.q_rope_output.data_ptr()
    case.check()


@pages_and_heads
def test_rope_norm_kernel_quantises_into_pages(page_size, heads):
    case = RopeCase(seed=heads, page_size=page_size, heads=heads, cache_dtype=E4M3, layer=2)
    returned = case.run_kernel()
    assert returned.data_ptr() == case.q_rope_output.data_ptr()
    case.check()


@pytest.mark.parametrize(
    ("dtype", "freqs", "gamma", "cache"),
    [
        (BF16, BF16, BF16, BF16),
        (BF16, F32, F32, BF16),
        (BF16, BF16, F32, E4M3),
        (BF16, F32, BF16, F32),
        (F16, F32, F32, F16),
        (F16, F16, BF16, E4M3),
        (F32, F32, F32, F32),
        (F32, BF16, BF16, E4M3),
        (F32, BF16, F32, BF16),
    ],
    ids=str,
)
def test_rope_norm_rounds_as_documented_in_every_type(dtype, freqs, gamma, cache):
    case = RopeCase(dtype=dtype, freqs_dtype=freqs, gamma_dtype=gamma, cache_dtype=cache)
    case.run()
    case.check()


@pytest.mark.parametrize(
    ("dtype", "kv"), [(BF16, F32), (F16, BF16), (F32, BF16), (BF16, F16)], ids=str
)
def test_rotated_keys_pass_through_the_types_of_the_latents_and_the_queries(dtype, kv):
    case = RopeCase(dtype=dtype, kv_dtype=kv, cache_dtype=F32)
    case.run()
    case.check()
    rotated = case.paged.pages.stored(case.paged.new_slots)[:, 512:]
    for passed in (kv, dtype):
        assert torch.equal(rotated.to(passed).float(), rotated)


@pytest.mark.parametrize("cache", [BF16, E4M3], ids=str)
@pytest.mark.parametrize(
    ("output", "out_dtype"),
    [("alias", None), ("slice", None), ("slice", E4M3), ("own", E4M3)],
    ids=str,
)
def test_rope_norm_writes_where_it_is_told(output, out_dtype, cache):
    case = RopeCase(output=output, out_dtype=out_dtype, cache_dtype=cache, heads=7)
    case.run()
    case.check()


@pytest.mark.parametrize("output", ["own", "slice"])
def test_rope_norm_saturates_float8(output):
    case = RopeCase(std=400.0, cache_dtype=E4M3, out_dtype=E4M3, output=output)
    case.gamma *= 300
    case.run()
    case.check()
    assert int((case.q_rope_output.float().abs() == 448).sum()) > 100
    stored = case.paged.pages.stored(case.paged.new_slots).float().abs()
    assert int((stored[:, :512] == 448).sum()) > 100
    assert int((stored[:, 512:] == 448).sum()) > 100


@pytest.mark.parametrize("cache", [BF16, E4M3], ids=str)
@pytest.mark.parametrize(
    "row", [SMALL_ROW, RowShape(33, 2), RowShape(64, 0), RowShape(1024, 64)], ids=str
)
def test_rope_norm_takes_other_row_shapes(row, cache):
    case = RopeCase(row=row, cache_dtype=cache, page_size=7)
    case.run()
    case.check()


def test_rope_norm_asks_a_function_for_the_latents():
    case = RopeCase(heads=1)
    asked = []

    def kv_input(rows, columns):
        asked.append((rows, columns))
        return case.kv.view[rows[:, None], columns]

    case.run(kv_input)
    case.check()
    for rows, columns in asked:
        assert rows.dtype == columns.dtype == torch.int64
        assert rows.ndim == columns.ndim == 1


@integer_types
def test_rope_norm_takes_every_integer_type(integer_type):
    case = RopeCase(integers=integer_type, page_size=7)
    case.run()
    case.check()


@pytest.mark.parametrize("launch", [{"block_size": 32, "n_rope_blocks": 3}, {"n_rms_blocks": 4}])
def test_rope_norm_launch_shape_changes_nothing(launch):
    usual, other = RopeCase(), RopeCase()
    usual.run_kernel()
    other.run_kernel(**launch)
    assert_same_bits("q_rope_output", other.buffer.base, usual.buffer.base)
    assert_same_bits("blocks", other.paged.pages.blocks.base, usual.paged.pages.blocks.base)


def test_rope_norm_run_again_leaves_the_same_cache():
    case = RopeCase(cache_dtype=E4M3)
    case.run()
    case.run()
    case.check()


@pytest.mark.parametrize("step", [NOBODY, IDLE], ids=["no-requests", "no-tokens"])
def test_rope_norm_of_nothing_writes_nothing(step):
    for run in (RopeCase.run, RopeCase.run_kernel):
        case = RopeCase(step=step)
        run(case)
        case.buffer.assert_only_written("q_rope_output", NOTHING)
        case.paged.pages.assert_only_written(case.paged.new_slots)


def test_rope_norm_writes_rows_with_a_scale_per_token():
    case = RopeCase(has_token_scales=True, gamma_dtype=F32)
    case.run()
    pages, slots = case.paged.pages, case.paged.new_slots
    arguments = (case.q_rope.remembered, case.kv.remembered, case.freqs, case.gamma)
    positions = case.paged.step.positions
    _, exact = reference.norm_rope_quant(*arguments, positions, epsilon=EPSILON)
    _, rows = reference.norm_rope_quant_stepwise(
        *arguments, positions, epsilon=EPSILON, out_dtype=BF16, cache_dtype=F32
    )
    sigma = rows[:, :512].abs().amax(-1, keepdim=True) / 448
    naive = torch.cat(
        [to_e4m3(rows[:, :512] / sigma).float(), (rows[:, 512:] / sigma).to(BF16).float()], -1
    )
    stored = pages.stored(slots).view(torch.uint8)
    content = stored[:, :512].view(E4M3).double()
    rope = stored[:, 512:].contiguous().view(BF16).double()
    meaning = torch.cat([content, rope], -1) * pages.stored_scales(slots).double()
    for part in (slice(0, 512), slice(512, 576)):
        assert_matches("row", meaning[:, part], exact[:, part], (naive * sigma)[:, part])
    pages.assert_only_written(slots)


# flare_mla_decoding, paged


@pages_and_heads
@pytest.mark.parametrize("is_ragged", [True, False], ids=["ragged", "padded"])
def test_decoding_matches_the_oracle(page_size, heads, is_ragged):
    case = DecodeCase(seed=page_size, page_size=page_size, heads=heads, is_ragged=is_ragged)
    returned = case.run()
    assert returned.data_ptr() == case.output.view.data_ptr()
    case.check()


@pytest.mark.parametrize("is_ragged", [True, False], ids=["ragged", "padded"])
@pytest.mark.parametrize(
    ("dtype", "cache"),
    [(F16, F16), (F32, F32), (BF16, E4M3), (F16, E4M3), (F32, E4M3), (E4M3, E4M3), (E4M3, BF16)],
    ids=str,
)
def test_decoding_in_every_type(dtype, cache, is_ragged):
    case = DecodeCase(dtype=dtype, cache_dtype=cache, is_ragged=is_ragged, page_size=48)
    case.run()
    case.check()


@windowed_masks
@pytest.mark.parametrize("is_ragged", [True, False], ids=["ragged", "padded"])
def test_decoding_under_every_mask(mask, window, is_ragged):
    case = DecodeCase(mask=mask, window=window, is_ragged=is_ragged, dtype=F32, cache_dtype=F32)
    case.run(num_partitions=2)
    case.check()


@pages_and_heads
@pytest.mark.parametrize("has_scale_pool", [False, True], ids=["same-pages", "own-pages"])
def test_rope_aware_decoding_matches_the_oracle(page_size, heads, has_scale_pool):
    case = DecodeCase(
        seed=heads,
        page_size=page_size,
        heads=heads,
        dtype=E4M3,
        has_token_scales=True,
        has_scale_pool=has_scale_pool,
        has_q_scale=heads != 3,
    )
    case.run()
    case.check()


@windowed_masks
@pytest.mark.parametrize("is_ragged", [True, False], ids=["ragged", "padded"])
def test_rope_aware_decoding_under_every_mask(mask, window, is_ragged):
    case = DecodeCase(
        mask=mask,
        window=window,
        is_ragged=is_ragged,
        dtype=E4M3,
        has_token_scales=True,
        has_scale_pool=True,
        page_size=7,
    )
    case.run()
    case.check()


def test_a_page_that_left_the_window_may_belong_to_another_request():
    """Its old entry in the lookup table is stale, not read, and moves no scales."""
    case = DecodeCase(
        mask="sliding_window_causal",
        window=3,
        page_size=4,
        step=Step((13, 9), (1, 1)),
        dtype=E4M3,
        has_token_scales=True,
        has_scale_pool=True,
    )
    table = case.paged.table
    table[0, 0] = table[1, 2]
    case.paged.scales_table[0, 0] = 0
    case.run()
    case.check()


@integer_types
@pytest.mark.parametrize("has_token_scales", [False, True], ids=["bf16", "rope-aware"])
@pytest.mark.parametrize("is_ragged", [True, False], ids=["ragged", "padded"])
def test_decoding_takes_every_integer_type(integer_type, has_token_scales, is_ragged):
    case = DecodeCase(
        integers=integer_type,
        is_ragged=is_ragged,
        dtype=E4M3 if has_token_scales else BF16,
        has_token_scales=has_token_scales,
        has_scale_pool=has_token_scales,
    )
    case.run()
    case.check()


@pytest.mark.parametrize("row", [SMALL_ROW, RowShape(256, 64), RowShape(512, 0)], ids=str)
@pytest.mark.parametrize("has_token_scales", [False, True], ids=["bf16", "rope-aware"])
def test_decoding_takes_other_row_shapes(row, has_token_scales):
    dtype = E4M3 if has_token_scales else BF16
    case = DecodeCase(row=row, dtype=dtype, has_token_scales=has_token_scales)
    case.run()
    case.check()


@pytest.mark.parametrize("cache_dtype", [E4M3, BF16], ids=str)
def test_decoding_takes_a_wide_latent(cache_dtype):
    case = DecodeCase(row=RowShape(1024, 64), cache_dtype=cache_dtype)
    case.run()
    case.check()


@pytest.mark.parametrize("parts", [2, 5, 74])
def test_decoding_in_parts_matches_the_oracle(parts):
    step = Step((300, 0, 64, 130, 63), (2, 3, 0, 1, 1))
    by_argument = DecodeCase(page_size=16, step=step)
    by_argument.run(torch.tensor([5, 3, 1]), num_partitions=parts, decoding_warp_split_k=True)
    by_argument.check()
    by_buffer = DecodeCase(page_size=16, step=step)
    by_buffer.run(torch.tensor([5, 3, parts]))
    by_buffer.check()
    assert_same_bits("output", by_buffer.output.base, by_argument.output.base)


@pytest.mark.parametrize(
    ("num_partitions", "buffer", "parts"),
    [(None, None, 1), (None, (5, 4, 9), 9), (3, None, 3), (3, (5, 4, 9), 3)],
)
def test_decoding_is_split_as_asked(num_partitions, buffer, parts, monkeypatch):
    asked = []

    def spy(launch):
        def launched(*args, splits, **kwargs):
            asked.append(splits.num_splits)
            launch(*args, splits=splits, **kwargs)

        return launched

    replace_launcher(monkeypatch, "mla_decode", spy)
    scalars = None if buffer is None else torch.tensor(buffer)
    DecodeCase().run(scalars, num_partitions=num_partitions)
    assert asked == [parts]


def test_decoding_twice_gives_the_same_bits():
    case = DecodeCase(heads=20)
    case.run(num_partitions=3)
    first = case.output.base.clone()
    case.run(num_partitions=3)
    assert_same_bits("output", case.output.base, first)


def test_decoding_options_that_change_nothing():
    plain, dressed = DecodeCase(), DecodeCase()
    plain.run()
    dressed.run(
        config=modular.MLAConfig(num_heads=3, depth=576),
        q_max_seq_len=9,
        kv_input_row_offsets=integers([0, *accumulate(dressed.step.after)], torch.uint32),
        decoding_warp_split_k=True,
    )
    assert_same_bits("output", dressed.output.base, plain.output.base)


@pytest.mark.parametrize("is_ragged", [True, False], ids=["ragged", "padded"])
@pytest.mark.parametrize("has_token_scales", [False, True], ids=["bf16", "rope-aware"])
@pytest.mark.parametrize("step", [NOBODY, IDLE], ids=["no-requests", "no-tokens"])
def test_decoding_of_nothing_writes_nothing(step, is_ragged, has_token_scales):
    case = DecodeCase(
        step=step,
        is_ragged=is_ragged,
        dtype=E4M3 if has_token_scales else BF16,
        has_token_scales=has_token_scales,
        has_scale_pool=has_token_scales,
    )
    case.run()
    case.output.assert_only_written("output", NOTHING)


@pytest.mark.parametrize("page_size", [7, 64, 700])
@pytest.mark.parametrize(("mask", "window"), [("causal", 0), ("sliding_window_causal", 600)])
def test_decoding_of_long_contexts(page_size, mask, window):
    step = Step((1300, 0, 699), (2, 1, 1))
    case = DecodeCase(page_size=page_size, mask=mask, window=window, step=step, heads=2)
    case.run()
    case.check()


def test_decoding_of_many_queries_and_heads():
    case = DecodeCase(heads=128, step=Step((30, 5), (18, 1)))
    case.run()
    case.check()


def test_decoding_in_a_small_workspace():
    case = DecodeCase(heads=128, step=Step((400, 170), (2, 1)), dtype=F32, cache_dtype=F32)
    with knobs.override(workspace_mib=1):  # fewer than 200 keys of 128 heads
        case.run()
    case.check()


@pytest.mark.interpreted
def test_decoding_shows_a_bad_row_only_to_those_who_see_it():
    case = DecodeCase(step=Step((40, 20), (3, 2)))
    for request in (0, 1):
        pages, slot = case.paged.pages, case.paged.slots[request][-1]
        pages.blocks.view[slot // 16, 0, case.layer, slot % 16, 0, 5] = torch.nan
        case.paged.rows[request][-1, 5] = torch.nan
    pages.remember()
    case.run()
    bad = case.output.view.isnan().all(-1).all(-1)
    assert bad.tolist() == [False, False, True, False, True]
    case.check()


def test_requests_may_share_pages():
    case = DecodeCase(step=Step((34, 34), (1, 1)), page_size=16, mask="null")
    case.paged.table[1, :2] = case.paged.table[0, :2]
    case.paged.rows[1][:32] = case.paged.rows[0][:32]
    case.run()
    case.check()


# flare_mla_decoding, contiguous


@pytest.mark.parametrize(
    ("dtype", "k_dtype", "batch", "q_len", "num_keys", "heads", "mask", "window"),
    [
        (BF16, BF16, 3, 1, 1, 1, "causal", 0),
        (BF16, BF16, 2, 4, 50, 20, "causal", 0),
        (BF16, BF16, 1, 5, 5, 3, "causal", 0),
        (F32, F32, 2, 3, 70, 7, "null", 0),
        (F16, F16, 2, 2, 129, 16, "sliding_window_causal", 9),
        (F32, F32, 2, 6, 40, 3, "sliding_window_noncausal", 2),
        (BF16, E4M3, 2, 4, 65, 128, "chunked", 16),
        (E4M3, E4M3, 3, 3, 33, 7, "chunked_causal", 8),
        (F32, E4M3, 1, 1, 300, 1, "causal", 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("parts", [None, 3])
def test_contiguous_decoding(
    dtype, k_dtype, batch, q_len, num_keys, heads, mask, window, parts, generator
):
    contiguous_decoding(
        generator, dtype, k_dtype, batch, q_len, num_keys, heads, mask, window, parts=parts
    )


def contiguous_decoding(
    generator, dtype, k_dtype, batch, q_len, num_keys, heads, mask, window, *, parts
):
    rows = store(normal(generator, batch, num_keys, 1, 576), k_dtype)
    k = Padded.holding(rows, gaps=(1, 2, 1, 8))
    queries = store(normal(generator, batch, q_len, heads, 576), dtype)
    q = Padded.holding(queries, gaps=(1, 1, 1, 8))
    out_dtype = BF16 if dtype == E4M3 else dtype
    output = Padded(batch, q_len, heads, 512, dtype=out_dtype, gaps=(1, 1, 1, 4))

    def oracle(precision):
        out, _ = reference.mla_decode(
            queries.double().flatten(0, 1),
            list(rows[:, :, 0].double()),
            [q_len] * batch,
            softmax_scale=0.137,
            v_width=512,
            mask=make_mask(mask, window),
            dtype=precision,
        )
        return out.unflatten(0, (batch, q_len))

    returned = modular.flare_mla_decoding(
        output.view, q.view, k.view, make_mask(mask, window), 0.137, None, num_partitions=parts
    )
    assert returned.data_ptr() == output.view.data_ptr()
    assert_matches("output", output.view, oracle(torch.float64), oracle(F32))
    output.assert_only_written("output", torch.tensor(True))
    for name, tensor in (("q", q), ("k", k)):
        tensor.assert_only_written(name, NOTHING)


@pytest.mark.parametrize(("batch", "q_len", "num_keys"), [(0, 2, 9), (2, 0, 9), (2, 0, 0)])
def test_contiguous_decoding_of_nothing(batch, q_len, num_keys):
    output = torch.zeros(batch, q_len, 3, 512, dtype=BF16)
    q = torch.zeros(batch, q_len, 3, 576, dtype=BF16)
    k = torch.zeros(batch, num_keys, 1, 576, dtype=BF16)
    assert modular.flare_mla_decoding(output, q, k, modular.CausalMask(), 0.1) is output


# mla_sm100_prefill_sparse


@pages_and_heads
@pytest.mark.parametrize("has_sink", [False, True], ids=["no-sink", "sink"])
def test_sparse_prefill_matches_the_oracle(page_size, heads, has_sink, generator):
    sink = normal(generator, heads, std=4.0) if has_sink else None
    case = SparseCase(seed=page_size, page_size=page_size, heads=heads, sink=sink, layer=2)
    returned = case.run()
    assert returned.data_ptr() == case.output.view.data_ptr()
    case.check()


@pytest.mark.parametrize(
    ("dtype", "cache"), [(F16, F16), (F32, F32), (BF16, E4M3), (F16, E4M3), (F32, E4M3)], ids=str
)
def test_sparse_prefill_in_every_type(dtype, cache):
    case = SparseCase(dtype=dtype, cache_dtype=cache)
    case.run()
    case.check()


def test_sparse_prefill_of_rows_with_a_scale_per_token():
    case = SparseCase(has_token_scales=True)
    case.run()
    case.check()


@integer_types
@pytest.mark.parametrize("is_flat", [True, False], ids=["1d", "2d"])
def test_sparse_prefill_takes_every_integer_type(integer_type, is_flat):
    case = SparseCase(integers=integer_type, is_flat=is_flat, page_size=7)
    case.run()
    case.check()


SINKS = [1.5, -20.0, 30.0, -1e38, -torch.inf, torch.inf]


@pytest.mark.parametrize("sink", [*SINKS, None], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_sparse_prefill_with_every_kind_of_sink(sink, dtype):
    heads = len(SINKS)
    sinks = torch.tensor(SINKS) if sink is None else torch.full((heads,), sink)
    case = SparseCase(heads=heads, sink=sinks, dtype=dtype, cache_dtype=dtype)
    case.run()
    case.check()


@pytest.mark.parametrize("stride", [1, 5, 64, 300])
def test_sparse_prefill_takes_lists_of_any_width(stride):
    case = SparseCase(stride=stride, lengths=(stride, 0, 1, stride // 2, stride, 1), page_size=64)
    case.run()
    case.check()


def test_sparse_prefill_in_a_small_workspace():
    case = SparseCase(heads=128, stride=60, lengths=(60, 0, 33, 1, 60, 8), with_invalid=False)
    with knobs.override(workspace_mib=1):  # one token at a time
        case.run()
    case.check()


@pytest.mark.parametrize("lengths", [(), (0, 0, 0)], ids=["no-tokens", "no-keys"])
def test_sparse_prefill_of_nothing(lengths, generator):
    case = SparseCase(lengths=lengths, sink=normal(generator, 3), with_invalid=False)
    case.run()
    assert bool((case.output.view == 0).all())
    case.check()


# mla_prefill_branch_fp8


@pytest.mark.parametrize(
    ("page_size", "heads", "d_n", "d_v"),
    [
        (1, 20, 128, 128),
        (7, 128, 16, 8),
        (16, 3, 128, 128),
        (48, 1, 128, 128),
        (64, 7, 128, 64),
        (128, 16, 128, 128),
    ],
)
def test_prefill_branch_matches_the_oracle(page_size, heads, d_n, d_v):
    case = PrefillCase(seed=heads, page_size=page_size, heads=heads, d_n=d_n, d_v=d_v)
    returned = case.run()
    assert returned.data_ptr() == case.output.view.data_ptr()
    case.check()


@pytest.mark.parametrize(
    ("dtype", "cache", "freqs", "gamma"),
    [
        (BF16, BF16, BF16, BF16),
        (BF16, E4M3, BF16, F32),
        (F16, F16, F32, F32),
        (F16, E4M3, F16, BF16),
        (F32, F32, F32, BF16),
        (F32, E4M3, BF16, F32),
    ],
    ids=str,
)
def test_prefill_branch_in_every_type(dtype, cache, freqs, gamma):
    case = PrefillCase(dtype=dtype, cache_dtype=cache, freqs_dtype=freqs, gamma_dtype=gamma)
    case.run()
    case.check()


@windowed_masks
@pytest.mark.parametrize("skips_hidden", [False, True], ids=["whole-buffer", "visible-buffer"])
def test_prefill_branch_under_every_mask(mask, window, skips_hidden):
    case = PrefillCase(
        mask=mask,
        window=window,
        d_n=16,
        d_v=24,
        row=SMALL_ROW,
        dtype=F32,
        page_size=7,
        step=Step((40, 0, 11, 24, 6), (1, 3, 0, 14, 9)),
        skips_hidden=skips_hidden,
    )
    case.run()
    case.check()


@pytest.mark.parametrize("mask", ["causal", "sliding_window_causal", "chunked_causal"])
@pytest.mark.parametrize("heads", [3, 8, 20])
def test_prefill_branch_with_alibi(heads, mask):
    case = PrefillCase(
        heads=heads,
        mask=mask,
        window=window_of(mask, 6),
        score_mod="alibi",
        d_n=32,
        d_v=16,
        row=SMALL_ROW,
        dtype=F32,
    )
    case.run()
    case.check()


@pytest.mark.parametrize(
    ("group", "d_n", "d_v", "row", "heads"),
    [
        (64, 192, 256, ROW, 3),
        (64, 128, 128, ROW, 1),
        (64, 40, 24, RowShape(96, 32), 7),
        (128, 128, 128, RowShape(160, 64), 3),
        (128, 16, 16, RowShape(96, 32), 5),
        (64, 24, 16, RowShape(70, 2), 3),
        (128, 1, 3, RowShape(64, 0), 2),
    ],
    ids=str,
)
def test_prefill_branch_at_every_granularity(group, d_n, d_v, row, heads):
    case = PrefillCase(group=group, d_n=d_n, d_v=d_v, row=row, heads=heads)
    case.run()
    case.check()


def test_prefill_branch_bounds_the_scale_of_large_latents():
    case = PrefillCase(std=900.0, scale=1e-4, d_n=32, d_v=32)
    case.run()
    cached = torch.cat([rows for rows, _, _ in case.quantised_rows()])
    assert float(cached[:, :512].abs().max()) > 1200
    case.check()


@integer_types
def test_prefill_branch_takes_every_integer_type(integer_type):
    case = PrefillCase(integers=integer_type, d_n=16, d_v=16, row=SMALL_ROW, layer=2)
    case.run()
    case.check()


@pytest.mark.parametrize("spare", [0, 100])
@pytest.mark.parametrize("has_last_offset", [True, False], ids=["batch+1", "batch"])
def test_prefill_branch_follows_a_plan(spare, has_last_offset):
    case = PrefillCase(d_n=16, d_v=16, row=SMALL_ROW, page_size=7)
    rows = sum(-(-after // 7) * 7 for after in case.step.after) + spare
    buffer_row_offsets, cache_offsets, buffer_lengths = modular.mla_prefill_plan(
        case.paged.row_offsets, case.paged.cache_lengths, rows, page_size=7
    )
    entries = len(case.step.new) + has_last_offset
    case.run((buffer_row_offsets[0], cache_offsets[0, :entries], int(buffer_lengths[0])))
    case.check()


def test_prefill_branch_without_a_buffer_changes_nothing():
    case = PrefillCase(d_n=16, d_v=16, row=SMALL_ROW)
    nothing = torch.zeros(len(case.step.new) + 1, dtype=torch.int32)
    case.run((nothing, nothing, 0))
    case.assert_untouched()


@pytest.mark.parametrize("step", [NOBODY, IDLE], ids=["no-requests", "no-tokens"])
def test_prefill_branch_of_nothing_writes_nothing(step):
    case = PrefillCase(step=step, d_n=16, d_v=16, row=SMALL_ROW)
    case.run()
    case.assert_untouched()


def test_prefill_branch_with_too_small_a_buffer_says_so_and_changes_nothing():
    case = PrefillCase(d_n=16, d_v=16, row=SMALL_ROW)
    starts, offsets, length = case.buffer()
    starts[-1] -= case.page_size
    with (
        knobs.override(check_values=True),
        pytest.raises(ValueError, match="buffer_row_offsets of request 4"),
    ):
        case.run((starts, offsets, length))
    case.assert_untouched()


def test_prefill_branch_in_a_small_workspace():
    step = Step((0, 90), (140, 7))  # more queries than one tile of them
    case = PrefillCase(heads=8, step=step, dtype=F32)
    with knobs.override(workspace_mib=1):  # fewer than 100 keys, one group of outputs
        case.run()
    case.check()


def test_prefill_branch_shows_a_bad_row_only_to_those_who_see_it():
    case = PrefillCase(d_n=16, d_v=16, row=SMALL_ROW, step=Step((20, 3), (3, 2)))
    pages, slot = case.paged.pages, case.paged.slots[0][-1]
    pages.blocks.view[slot // 16, 0, case.layer, slot % 16, 0, 5] = torch.nan
    case.run()
    bad = case.output.view.isnan().all(-1).all(-1)
    assert bad.tolist() == [False, False, True, False, False]
    assert_matches("output", case.output.view, case.oracle(), case.oracle(F32))


@pytest.fixture
def _lengths_on_a_gpu(monkeypatch):
    """As if the lengths could not be read without waiting."""
    for module in (checks, arguments, prefill):
        monkeypatch.setattr(module, "values_visible", lambda tensor: False)


@pytest.mark.on_cpu
@pytest.mark.usefixtures("_lengths_on_a_gpu")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("skips_hidden", [False, True], ids=["whole-buffer", "visible-buffer"])
def test_prefill_branch_where_lengths_may_not_be_read(mask, skips_hidden):
    case = PrefillCase(
        mask=mask,
        window=window_of(mask, 6),
        d_n=16,
        d_v=24,
        row=SMALL_ROW,
        dtype=F32,
        page_size=7,
        step=Step((40, 0, 11, 24, 6), (1, 3, 0, 14, 9)),
        skips_hidden=skips_hidden,
    )
    case.run()
    case.check()


# mla_prefill_plan


@integer_types
def test_prefill_plan_of_the_documented_example(integer_type):
    buffer_row_offsets, cache_offsets, buffer_lengths = modular.mla_prefill_plan(
        integers([0, 160, 360], integer_type), integers([0, 0], integer_type), 256, page_size=128
    )
    assert buffer_row_offsets.tolist() == [[0, 256, 256], [0, 0, 256], *[[0, 0, 0]] * 14]
    assert cache_offsets[:, :2].tolist() == [[0, 0], [256, 0], *[[256, 256]] * 14]
    assert buffer_lengths.tolist() == [256, 256, *[-1] * 14]
    for tensor in (buffer_row_offsets, cache_offsets, buffer_lengths):
        assert tensor.dtype == torch.int32


# every function on every backend


TINY_STEP = Step((16, 0, 5, 3), (1, 3, 0, 2))
TINY_DECODE = {"row": SMALL_ROW, "step": TINY_STEP, "page_size": 7}
TINY_PREFILL = {"row": SMALL_ROW, "step": TINY_STEP, "d_n": 16, "d_v": 24, "page_size": 7}
SMALL_CASES = {
    "rope": lambda: RopeCase(row=SMALL_ROW, step=TINY_STEP, page_size=7),
    "rope-e4m3-slice": lambda: RopeCase(
        row=SMALL_ROW, step=TINY_STEP, cache_dtype=E4M3, out_dtype=E4M3, output="slice"
    ),
    "decode": lambda: DecodeCase(**TINY_DECODE),
    "decode-padded-window": lambda: DecodeCase(
        mask="sliding_window_causal", window=3, is_ragged=False, **TINY_DECODE
    ),
    "decode-rope-aware": lambda: DecodeCase(
        dtype=E4M3, has_token_scales=True, has_scale_pool=True, **TINY_DECODE
    ),
    "sparse": lambda: SparseCase(
        lengths=(5, 0, 3), stride=6, with_invalid=False, sink=torch.ones(3)
    ),
    "sparse-scale-per-token": lambda: SparseCase(
        lengths=(5, 0, 6), stride=6, has_token_scales=True, integers=torch.int64
    ),
    "prefill": lambda: PrefillCase(**TINY_PREFILL),
    "prefill-e4m3-alibi-window": lambda: PrefillCase(
        cache_dtype=E4M3, mask="sliding_window_causal", window=4, score_mod="alibi", **TINY_PREFILL
    ),
}


@pytest.mark.interpreted
@pytest.mark.parametrize("make_case", SMALL_CASES.values(), ids=list(SMALL_CASES))
def test_a_small_case_on_every_backend(make_case):
    case = make_case()
    case.run()
    case.check()


@pytest.mark.gpu
@pytest.mark.parametrize("make_case", SMALL_CASES.values(), ids=list(SMALL_CASES))
def test_no_function_waits_for_the_gpu(make_case):
    make_case().run()  # compiles
    with calls_may_not_wait():
        make_case().run()


@pytest.mark.interpreted
def test_the_kernel_itself_on_every_backend():
    case = RopeCase(row=SMALL_ROW, step=TINY_STEP, cache_dtype=F32, dtype=F32)
    case.run_kernel()
    case.check()


@pytest.mark.interpreted
def test_contiguous_decoding_on_every_backend(generator):
    contiguous_decoding(generator, F32, E4M3, 2, 2, 19, 2, "chunked_causal", 4, parts=2)


@pytest.mark.interpreted
def test_in_parts_on_every_backend():
    case = DecodeCase(**TINY_DECODE)
    case.run(torch.tensor([4, 3, 3]))
    case.check()


# a function that does nothing fails


class OneKeyLess(Mask):
    """A causal mask that hides a query's own key from it."""

    def interval(self, position, num_keys):
        return super().interval(position - 1, num_keys)

    def visible(self, positions, keys):
        return super().visible(positions - 1, keys)


def does_nothing(launch):
    return lambda *args, **kwargs: None


def writes_zeros(launch):
    return lambda *args, out, **kwargs: out.zero_()


def misses_the_last_key(launch):
    return lambda *args, mask, **kwargs: launch(*args, mask=OneKeyLess(mask.kind), **kwargs)


def scales_two_percent_too_much(launch):
    def wrong(*args, softmax_scale, **kwargs):
        launch(*args, softmax_scale=softmax_scale * 1.02, **kwargs)

    return wrong


def misses_the_last_head(launch):
    def wrong(*args, out, **kwargs):
        before = out[:, -1].clone()
        launch(*args, out=out, **kwargs)
        out[:, -1] = before

    return wrong


def misses_the_last_token(launch):
    def wrong(*args, out, **kwargs):
        before = out[-1].clone()
        launch(*args, out=out, **kwargs)
        out[-1] = before

    return wrong


def writes_past_its_rows(launch):
    def wrong(*args, out, **kwargs):
        launch(*args, out=out, **kwargs)
        # one element further than the row: between the rows of a strided output
        past = out.as_strided(out.shape[:2], out.stride()[:2], out.storage_offset() + out.shape[2])
        past.zero_()

    return wrong


def misses_the_last_listed_row(launch):
    def wrong(q, layer, rows, topk_lens, **kwargs):
        launch(q, layer, rows, (topk_lens - 1).clamp_min(0), **kwargs)

    return wrong


def counts_rows_past_the_length(launch):
    def wrong(q, layer, rows, topk_lens, **kwargs):
        launch(q, layer, rows, None, **kwargs)

    return wrong


def forgets_the_sink(launch):
    def wrong(*args, sink, **kwargs):
        launch(*args, sink=None, **kwargs)

    return wrong


def rotates_by_the_next_position(launch):
    def wrong(q_rope, kv, freqs, *args, **kwargs):
        launch(q_rope, kv, freqs.nan_to_num(1.0).roll(-1, 0), *args, **kwargs)

    return wrong


def rotates_split_halves(launch):
    return lambda *args, rope, **kwargs: launch(*args, rope="half", **kwargs)


def forgets_gamma(launch):
    def wrong(q_rope, kv, freqs, gamma, *args, **kwargs):
        launch(q_rope, kv, freqs, torch.ones_like(gamma), *args, **kwargs)

    return wrong


def leaves_the_queries(launch):
    def wrong(*args, q_rope_out, **kwargs):
        launch(*args, q_rope_out=q_rope_out.clone(), **kwargs)

    return wrong


def leaves_the_cache(launch):
    def wrong(q_rope, kv, freqs, gamma, layer, *args, **kwargs):
        before = layer.payload.clone()
        launch(q_rope, kv, freqs, gamma, layer, *args, **kwargs)
        layer.payload.copy_(before)

    return wrong


def writes_the_whole_page(launch):
    def wrong(q_rope, kv, freqs, gamma, layer, table, kv_lens, *args, **kwargs):
        launch(q_rope, kv, freqs, gamma, layer, table, kv_lens, *args, **kwargs)
        last_used = table[0, int(kv_lens[0]) // layer.page_size]
        layer.payload[last_used, -1] = 0

    return wrong


def quantises_to_zeros(launch):
    def wrong(*args, out, **kwargs):
        launch(*args, out=out, **kwargs)
        out.zero_()

    return wrong


def misses_the_last_column(launch):
    def wrong(*args, out, **kwargs):
        launch(*args, out=out, **kwargs)
        out.view(torch.uint8)[:, -1] = 0

    return wrong


def bounds_no_scale(launch):
    return lambda *args, scale_ub, **kwargs: launch(*args, scale_ub=torch.inf, **kwargs)


def misses_the_last_scale(launch):
    def wrong(a, a_scale, b, b_scale, **kwargs):
        unscaled = b_scale.clone()
        unscaled[-1, -1] = 1.0
        launch(a, a_scale, b, unscaled, **kwargs)

    return wrong


def decode_case():
    return DecodeCase(step=Step((70, 0, 3, 32), (1, 3, 0, 2)), heads=2)


def sparse_case():
    return SparseCase(sink=torch.full((3,), 2.0))


def prefill_case():
    return PrefillCase(d_n=32, d_v=32, heads=2, step=Step((33, 0, 3), (1, 3, 0)))


def large_prefill_case():
    return PrefillCase(d_n=32, d_v=32, heads=2, std=2000.0, scale=1e-4, step=Step((3,), (2,)))


ATTENTION_FAULTS = (
    does_nothing,
    writes_zeros,
    scales_two_percent_too_much,
    misses_the_last_head,
    misses_the_last_token,
    writes_past_its_rows,
)
APPEND_FAULTS = (
    does_nothing,
    rotates_by_the_next_position,
    rotates_split_halves,
    forgets_gamma,
    leaves_the_queries,
    leaves_the_cache,
    writes_the_whole_page,
)
FAULTS = [
    *(("mla_decode", decode_case, fault) for fault in (*ATTENTION_FAULTS, misses_the_last_key)),
    *(("mla_prefill", prefill_case, fault) for fault in (*ATTENTION_FAULTS, misses_the_last_key)),
    *(("sparse_mla", sparse_case, fault) for fault in ATTENTION_FAULTS),
    ("sparse_mla", sparse_case, misses_the_last_listed_row),
    ("sparse_mla", sparse_case, counts_rows_past_the_length),
    ("sparse_mla", sparse_case, forgets_the_sink),
    *(("norm_rope_quant_append", RopeCase, fault) for fault in APPEND_FAULTS),
    *(("norm_rope_quant_append", prefill_case, fault) for fault in APPEND_FAULTS),
    ("quantize_fp8", prefill_case, does_nothing),
    ("quantize_fp8", prefill_case, quantises_to_zeros),
    ("quantize_fp8", prefill_case, misses_the_last_column),
    ("quantize_fp8", large_prefill_case, bounds_no_scale),
    ("scaled_mm_fp8", prefill_case, does_nothing),
    ("scaled_mm_fp8", prefill_case, writes_zeros),
    ("scaled_mm_fp8", prefill_case, misses_the_last_scale),
]


@pytest.mark.on_cpu  # where faults know the arguments of a launcher
@pytest.mark.parametrize(
    ("op", "make_case", "fault"),
    FAULTS,
    ids=[f"{op}-{make.__name__}-{fault.__name__}" for op, make, fault in FAULTS],
)
def test_a_faulty_kernel_is_found(op, make_case, fault, monkeypatch):
    replace_launcher(monkeypatch, op, fault)
    case = make_case()
    case.run()
    with pytest.raises(AssertionError):
        case.check()


@pytest.mark.parametrize(
    "make_case", [decode_case, prefill_case, large_prefill_case, sparse_case, RopeCase]
)
def test_a_sound_kernel_is_not(make_case):
    case = make_case()
    case.run()
    case.check()
