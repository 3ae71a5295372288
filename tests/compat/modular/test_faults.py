"""The comparisons that tests of the documented functions make find a faulty kernel."""

from __future__ import annotations

import pytest
import torch

from mlakit.masks import Mask
from tests.compat.modular.append_cases import RopeCase
from tests.compat.modular.attention_cases import DecodeCase, PrefillCase, SparseCase
from tests.compat.modular.inputs import Step
from tests.replaced_launchers import replace_launcher

pytestmark = pytest.mark.usefixtures("place")


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
