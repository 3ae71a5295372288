"""The comparisons of the documented functions kill the mutants of the kernels that they run."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mlakit.model.masks import Mask
from tests.compat.modular.append_cases import RopeCase
from tests.compat.modular.attention_cases import DecodeCase, PrefillCase, SparseCase
from tests.compat.modular.inputs import Step
from tests.kernel_launchers import by_name, does_nothing, leaves_unwritten
from tests.mutations import of_kernel

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.hopper_too]


class OneKeyLess(Mask):
    """A causal mask that hides a query's own key from it."""

    def interval(self, position, num_keys):
        return super().interval(position - 1, num_keys)

    def visible(self, positions, keys):
        return super().visible(positions - 1, keys)


def without_weight_scale(b_scale):
    b_scale = b_scale.clone()
    b_scale[-1, -1] = 1.0
    return b_scale


def without_newest_values(v, kv_starts):
    v = v.clone()
    v[kv_starts[1:].long() - 1] = 0.0
    return v


def zero_past_the_rows(out):
    """One element further than each row: between the rows of a strided output."""
    out.as_strided(out.shape[:2], out.stride()[:2], out.storage_offset() + out.shape[2]).zero_()


def zero_last_row_of_the_page(a):
    last_used = a["page_table"][0, int(a["kv_lens"][0]) // a["layer"].page_size]
    a["layer"].payload[last_used, -1] = 0


def leaves_the_cache(launch):
    before = []
    return by_name(
        lambda a: before.append(a["layer"].payload.clone()) or {},
        lambda a: a["layer"].payload.copy_(before.pop()),
    )(launch)


CHANGES = {
    "does nothing": does_nothing,
    "writes zeros": lambda launch: lambda arguments, out, *others: out.zero_(),
    "misses the last key": by_name(lambda a: {"mask": OneKeyLess(a["mask"].kind)}),
    "misses the newest values": by_name(
        lambda a: {"v": without_newest_values(a["v"], a["kv_starts"])}
    ),
    "scales two percent too much": by_name(lambda a: {"softmax_scale": a["softmax_scale"] * 1.02}),
    "misses the last head": leaves_unwritten("out", (slice(None), -1)),
    "misses the last token": leaves_unwritten("out", -1),
    "writes past its rows": by_name(after=lambda a: zero_past_the_rows(a["out"])),
    "misses the last listed row": by_name(
        lambda a: {"topk_lens": (a["topk_lens"] - 1).clamp_min(0)}
    ),
    "counts rows past the length": by_name(lambda a: {"topk_lens": None}),
    "forgets the sink": by_name(lambda a: {"sink": None}),
    "rotates by the next position": by_name(
        lambda a: {"freqs": a["freqs"].nan_to_num(1.0).roll(-1, 0)}
    ),
    "rotates split halves": by_name(lambda a: {"rope": "half"}),
    "forgets gamma": by_name(lambda a: {"gamma": torch.ones_like(a["gamma"])}),
    "leaves the queries": by_name(lambda a: {"q_rope_out": a["q_rope_out"].clone()}),
    "leaves the cache": leaves_the_cache,
    "writes the whole page": by_name(after=zero_last_row_of_the_page),
    "quantises to zeros": by_name(after=lambda a: a["out"].zero_()),
    "misses the last column": by_name(after=lambda a: a["out"].view(torch.uint8)[:, -1].zero_()),
    "bounds no scale": by_name(lambda a: {"scale_ub": torch.inf}),
    "misses the last scale": by_name(lambda a: {"b_scale": without_weight_scale(a["b_scale"])}),
}


def decode_case():
    return DecodeCase(step=Step((70, 0, 3, 32), (1, 3, 0, 2)), heads=2)


def sparse_case():
    return SparseCase(sink=torch.full((3,), 2.0))


def prefill_case():
    return PrefillCase(d_n=32, d_v=32, heads=2, step=Step((33, 0, 3), (1, 3, 0)))


def large_prefill_case():
    return PrefillCase(d_n=32, d_v=32, heads=2, std=2000.0, scale=1e-4, step=Step((3,), (2,)))


def check(make_case):
    case = make_case()
    case.run()
    case.check()


def mutation(op, make_case, name):
    return of_kernel(op, f"{make_case.__name__} {name}", CHANGES[name], partial(check, make_case))


ATTENTION = (
    "does nothing",
    "writes zeros",
    "scales two percent too much",
    "misses the last head",
    "misses the last token",
    "writes past its rows",
)
APPEND = (
    "does nothing",
    "rotates by the next position",
    "rotates split halves",
    "forgets gamma",
    "leaves the queries",
    "leaves the cache",
    "writes the whole page",
)
MUTATIONS = [
    mutation(op, make_case, name)
    for op, make_case, name in [
        *(("mla_decode", decode_case, name) for name in (*ATTENTION, "misses the last key")),
        *(("mla_prefill", prefill_case, name) for name in (*ATTENTION, "misses the newest values")),
        *(("sparse_mla", sparse_case, name) for name in ATTENTION),
        ("sparse_mla", sparse_case, "misses the last listed row"),
        ("sparse_mla", sparse_case, "counts rows past the length"),
        ("sparse_mla", sparse_case, "forgets the sink"),
        *(("norm_rope_quant_append", RopeCase, name) for name in APPEND),
        *(("norm_rope_quant_append", prefill_case, name) for name in APPEND),
        ("quantize_fp8", prefill_case, "does nothing"),
        ("quantize_fp8", prefill_case, "quantises to zeros"),
        ("quantize_fp8", prefill_case, "misses the last column"),
        ("quantize_fp8", large_prefill_case, "bounds no scale"),
        ("scaled_mm_fp8", prefill_case, "does nothing"),
        ("scaled_mm_fp8", prefill_case, "writes zeros"),
        ("scaled_mm_fp8", prefill_case, "misses the last scale"),
    ]
]


@pytest.mark.slow
@pytest.mark.on_cpu  # changes are of the arguments that launchers of CPU kernels have
@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_mutant_is_killed(mutation, monkeypatch):
    mutation.assert_killed(monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make_case", [decode_case, prefill_case, large_prefill_case, sparse_case, RopeCase]
)
def test_the_checks_pass_without_a_mutation(make_case):
    check(make_case)
