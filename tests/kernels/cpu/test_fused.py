"""torch's fused attention in `mla_decode` and `mla_prefill`: where it is used, and where not.

Whether a CPU has 16-bit products decides speed only: these tests also pretend that this one has.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mlakit import reference
from mlakit.cache import PagedLatentCache
from mlakit.kernels.cpu import decode, decode_fused, fused, prefill, prefill_fused
from mlakit.model.geometry import RowShape
from mlakit.model.masks import CAUSAL
from mlakit.ops import mla_decode, mla_prefill
from mlakit.tools.testing import assert_matches
from mlakit.tools.workloads import DecodeCase, PrefillCase

WIDE = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "page_size": 64}
EITHER_WAY = pytest.mark.parametrize("has_products", [False, True], ids=["float32", "16-bit"])


@pytest.fixture(autouse=True)
def products(request, monkeypatch):
    """The CPU has products of every 16-bit type, or of none, if the test says so."""
    if "has_products" in request.fixturenames:
        found = request.getfixturevalue("has_products")
        monkeypatch.setattr(fused, "has_products", lambda dtype: found and dtype.itemsize == 2)


@pytest.fixture
def left(monkeypatch):
    """The requests that fused attention left to the other way."""
    seen = []
    attend_requests, attend_request = decode.attend_requests, prefill.attend_request

    def of_decode(*args):
        seen.extend(rest := attend_requests(*args))
        return rest

    def of_prefill(a, request, *results):
        is_done = attend_request(a, request, *results)
        if not is_done:
            seen.append(request)
        return is_done

    monkeypatch.setattr(decode, "attend_requests", of_decode)
    monkeypatch.setattr(prefill, "attend_request", of_prefill)
    return seen


@pytest.fixture
def types(monkeypatch):
    """The types that fused attention multiplied in, call by call."""
    seen = []

    def noted(q, *args, **kwargs):
        seen.append(q.dtype)
        return fused.attend(q, *args, **kwargs)

    for module in (decode_fused, prefill_fused):
        monkeypatch.setattr(module, "attend", noted)
    return seen


DECODES = {
    "real widths": DecodeCase(kv_lens=(300, 64, 1), q_lens=(1, 1, 1), heads=16, **WIDE),
    "several splits": DecodeCase(kv_lens=(2600, 1024), q_lens=(1, 1), heads=4, page_size=48),
    "multi-token": DecodeCase(kv_lens=(1030, 515), q_lens=(4, 4), heads=3),
    "queries without keys": DecodeCase(kv_lens=(2, 600), q_lens=(3, 3), heads=3),
    "mixed lengths": DecodeCase(kv_lens=(90, 700, 40), q_lens=(1, 3, 1), sink="mixed"),
    "nothing cached": DecodeCase(kv_lens=(0, 5), q_lens=(1, 1), sink="finite"),
    "no queries": DecodeCase(kv_lens=(20, 5), q_lens=(0, 1)),
    "sharp": DecodeCase(kv_lens=(1500,), q_lens=(1,), heads=3, sharpness=4.0),
    "negative scale": DecodeCase(kv_lens=(600,), q_lens=(2,), sharpness=-2.0),
    "flat table": DecodeCase(kv_lens=(900, 40), q_lens=(1, 1), flat_table=True),
    "padded": DecodeCase(kv_lens=(900, 40), q_lens=(1, 1), page_size=256, padded=True),
    "fp8": DecodeCase(kv_lens=(1100, 40), q_lens=(1, 1), format="fp8_block128", page_size=64),
    "fp16": DecodeCase(kv_lens=(700,), q_lens=(1,), dtype="fp16", format="fp16"),
    "fp32": DecodeCase(kv_lens=(700,), q_lens=(1,), dtype="fp32", format="fp32"),
    "no mask": DecodeCase(kv_lens=(700,), q_lens=(3,), mask="null"),
}


@EITHER_WAY
@pytest.mark.parametrize("case", DECODES.values(), ids=DECODES.keys())
def test_decode(case, has_products, left):
    case.run("cpu", "cpu")
    assert left == []


DECODES_LEFT = {
    "a window": {"mask": "sliding_window_causal", "window": 9},
    "many rows": {"q_lens": (40,), "heads": 16},
    "little memory": {"workspace_mib": 1, "kv_lens": (700,), **WIDE, "format": "fp8_block128"},
}


@pytest.mark.parametrize("change", DECODES_LEFT.values(), ids=DECODES_LEFT.keys())
def test_decode_in_the_other_way(change, left):
    DecodeCase(**{"kv_lens": (50,), "q_lens": (1,), **change}).run("cpu", "cpu")
    assert len(left) == 1


PREFILLS = {
    "prompts": PrefillCase(kv_lens=(140, 29), q_lens=(140, 29), heads=2),
    "with context": PrefillCase(kv_lens=(560, 40), q_lens=(300, 7), heads=1, sink="mixed"),
    "no mask": PrefillCase(kv_lens=(60, 160), q_lens=(20, 40), heads=2, mask="null", sink="finite"),
    "real widths": PrefillCase(
        kv_lens=(150,),
        q_lens=(20,),
        heads=8,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
    "fp16": PrefillCase(kv_lens=(70,), q_lens=(50,), heads=2, dtype="fp16"),
    "negative scale": PrefillCase(kv_lens=(70,), q_lens=(50,), heads=2, sharpness=-2.0),
    "few heads at a time": PrefillCase(kv_lens=(400,), q_lens=(300,), heads=9, workspace_mib=1),
    "key tiles": PrefillCase(kv_lens=(9000,), q_lens=(40,), heads=2, workspace_mib=1),
    # of real widths, so that few tokens exceed the workspace
    "query tiles": PrefillCase(
        kv_lens=(620,),
        q_lens=(610,),
        heads=1,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        workspace_mib=1,
    ),
}


@pytest.mark.slow
@EITHER_WAY
@pytest.mark.parametrize("case", PREFILLS.values(), ids=PREFILLS.keys())
def test_prefill(case, has_products, left):
    case.run("cpu", "cpu")
    assert left == []


PREFILLS_LEFT = {
    "a window": {"mask": "sliding_window_causal", "window": 9},
    "ALiBi": {"alibi": True},
    "wide values": {"v_head_dim": 64},
    "queries before the first key": {"q_lens": (60,), "kv_lens": (40,)},
}


@pytest.mark.parametrize("change", PREFILLS_LEFT.values(), ids=PREFILLS_LEFT.keys())
def test_prefill_in_the_other_way(change, left):
    PrefillCase(**{"kv_lens": (50,), "q_lens": (50,), "heads": 2, **change}).run("cpu", "cpu")
    assert len(left) == 1


@EITHER_WAY
def test_a_hidden_value_that_is_not_finite_reaches_no_query(has_products, left):
    generator = torch.Generator().manual_seed(0)
    q, k_nope, k_rope, v = (
        torch.randn(shape, generator=generator).to(torch.bfloat16)
        for shape in ((40, 2, 24), (40, 2, 16), (40, 8), (40, 2, 20))
    )
    v[30, 1, 3] = torch.nan
    starts = torch.tensor([0, 40], dtype=torch.int32)
    got = mla_prefill(q, k_nope, k_rope, v, starts, starts, softmax_scale=0.3, backend="cpu")
    assert len(left) == 1
    options = {"softmax_scale": 0.3, "mask": CAUSAL}
    exact, naive = (
        reference.mla_prefill(q, k_nope, k_rope, v, [0, 40], [0, 40], **options, dtype=dtype)
        for dtype in (torch.float64, torch.float32)
    )
    for name, result, want, plain in zip(("out", "lse"), got, exact, naive, strict=True):
        assert_matches(name, result, want, plain)


LONG = DecodeCase(kv_lens=(2600, 300), q_lens=(1, 1), heads=4)
PROMPT = PrefillCase(kv_lens=(300,), q_lens=(280,), heads=2)
TYPES = {  # the case, and the types of the calls where there are 16-bit products
    "long": (LONG, [torch.bfloat16] * 3),  # whole splits, last ones of two lengths
    "short": (replace(LONG, kv_lens=(100, 127)), [torch.float32]),
    "mixed": (replace(LONG, kv_lens=(100, 300)), [torch.float32, torch.bfloat16]),
    # lse is near log(keys): its tolerance is too small
    "flat": (replace(LONG, kv_lens=(140, 150), sharpness=0.01), [torch.bfloat16, torch.float32]),
    "other rows": (replace(LONG, format="fp8_block128"), [torch.float32] * 3),
    # all queries, then over their own keys and the 20 before the first 108 again
    "prompt": (PROMPT, [torch.bfloat16] + [torch.float32] * 2),
    "short prompt": (replace(PROMPT, kv_lens=(100,), q_lens=(100,)), [torch.float32]),
    "context": (replace(PROMPT, kv_lens=(400,), q_lens=(9,)), [torch.bfloat16]),
    "no mask": (replace(PROMPT, mask="null"), [torch.bfloat16]),
    "a sink": (replace(LONG, sink="finite"), [torch.float32] * 3),
    "a sink of a prompt": (replace(PROMPT, sink="finite"), [torch.float32] * 2),
}


@pytest.mark.parametrize("has_products", [True])
@pytest.mark.parametrize("name", TYPES)
def test_16_bit_products_are_used_where_lse_is_accurate(name, has_products, types):
    case, expected = TYPES[name]
    case.run("cpu", "cpu")
    assert types == expected


HEADS = PrefillCase(heads=16, kv_lens=(131,), q_lens=(127,))
ROUNDED = {  # outside the tolerance where partials of 16 bits are merged, or scaled by a sink
    "few keys before": replace(HEADS, seed=142957, dtype="fp16", sharpness=4.0),
    "many": replace(HEADS, seed=439991, kv_lens=(197,), q_lens=(56,), sharpness=1.5),
    "fp16": replace(HEADS, seed=809333, dtype="fp16", kv_lens=(153,), q_lens=(100,), sharpness=1.5),
    "sink": replace(
        HEADS, seed=586082, kv_lens=(136, 141), q_lens=(66, 141), sharpness=4.0, sink="finite"
    ),
}


@pytest.mark.parametrize("has_products", [True])
@pytest.mark.parametrize("case", ROUNDED.values(), ids=ROUNDED.keys())
def test_16_bit_results_are_rounded_twice_at_most(case, has_products, left):
    case.run("cpu", "cpu")
    assert left == []


@pytest.mark.parametrize("has_products", [False])
@pytest.mark.parametrize("case", [LONG, PROMPT], ids=["decode", "prefill"])
def test_without_16_bit_products_all_is_float32(case, has_products, types):
    case.run("cpu", "cpu")
    assert set(types) == {torch.float32}


def attended(q, rows, scale=0.1):
    out, lse = fused.attend(q[None, None], rows[None, None], rows[None, None], 16, scale)
    return out, lse


def is_certain(out, lse):
    return fused.is_finite(out) and fused.has_scores(out, lse)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_results_of_numbers_that_are_not_finite_are_not_certain(value):
    q, rows = torch.ones(2, 32), torch.ones(5, 32)
    assert is_certain(*attended(q, rows))
    rows[3, 5] = value
    assert not is_certain(*attended(q, rows))


def test_a_row_of_scores_of_minus_infinity_is_not_certain():
    q, rows = torch.ones(2, 32), torch.ones(5, 32)
    rows[:, 20] = -torch.inf  # of no column of V
    assert not is_certain(*attended(q, rows))


def test_an_lse_of_zero_is_certain_where_there_is_a_result():
    q, rows = torch.zeros(2, 32), torch.ones(1, 32)
    out, lse = attended(q, rows)
    assert not lse.any()
    assert is_certain(out, lse)


def test_splits_depend_on_the_request_alone():
    request = decode_fused.Request(0, range(1), [(0, 70_000)])
    splits = list(decode_fused._splits(request))
    assert [split.first for split in splits] == list(range(0, 70_000, 2048))
    assert [split.length for split in splits] == [2048] * 34 + [512]
    assert [split.is_last for split in splits] == [False] * 34 + [True]


def test_a_scale_of_zero_weighs_all_keys_alike():
    cache = PagedLatentCache.allocate(RowShape(16, 8), "fp32", num_pages=1, page_size=16)
    cache.layer(0).write(torch.arange(16), torch.randn(16, 24))
    table = torch.zeros(1, 1, dtype=torch.int32)
    lens = torch.tensor([10], dtype=torch.int32)
    out, _ = mla_decode(torch.ones(1, 2, 24), cache, table, lens, softmax_scale=0.0)
    values = cache.layer(0).read(torch.arange(10))[:, :16].expand(2, -1, -1)
    assert_matches("out", out[0], values.double().mean(1), values.mean(1))


def test_products_are_those_of_the_cpu(monkeypatch):
    fused.has_products.cache_clear()
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    try:
        assert fused.has_products(torch.bfloat16)
        assert not fused.has_products(torch.float16)
        assert not fused.has_products(torch.float32)
    finally:
        fused.has_products.cache_clear()
