"""The drop-in for FlashMLA takes every form of FlashMLA's arguments."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit.compat.flash_mla import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
)
from mlakit.formats import saturating_cast
from mlakit.tools.testing import assert_matches, assert_same_bits, poison
from tests.compat.flash_mla.dense_cases import DenseProblem, as_keywords, dense_problem
from tests.compat.flash_mla.inputs import (
    DECODE_LSE,
    DENSE_OUT,
    NOT_A_BLOCK,
    NOT_INDICES,
    PREFILL_LSE,
    assert_close,
)
from tests.compat.flash_mla.running import check, run_dense, run_prefill, run_sparse, run_varlen
from tests.compat.flash_mla.sparse_cases import FEW_PREFILL, SMALL, PrefillCase, Scope, SparseCase
from tests.compat.flash_mla.varlen_cases import VarlenCase

E4M3 = torch.float8_e4m3fn


SIGNATURES = {
    flash_mla_with_kvcache: (
        "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits "
        "softmax_scale causal is_fp8_kvcache indices attn_sink extra_k_cache "
        "extra_indices_in_kvcache topk_length extra_topk_length",
        {"num_splits": None, "softmax_scale": None, "causal": False, "is_fp8_kvcache": False},
    ),
    flash_mla_sparse_fwd: (
        "q kv indices sm_scale d_v attn_sink topk_length",
        {"d_v": 512, "attn_sink": None, "topk_length": None},
    ),
    flash_attn_varlen_func: (
        "q k v cu_seqlens_qo cu_seqlens_kv max_seqlen_qo max_seqlen_kv dropout_p softmax_scale "
        "causal deterministic is_varlen",
        {"dropout_p": 0.0, "softmax_scale": None, "causal": False, "is_varlen": True},
    ),
    flash_attn_varlen_qkvpacked_func: (
        "qkv cu_seqlens max_seqlen head_dim_qk dropout_p softmax_scale causal deterministic "
        "is_varlen",
        {"dropout_p": 0.0, "causal": False, "deterministic": False},
    ),
    flash_attn_varlen_kvpacked_func: (
        "q kv cu_seqlens_qo cu_seqlens_kv max_seqlen_qo max_seqlen_kv head_dim_qk dropout_p "
        "softmax_scale causal deterministic is_varlen",
        {"dropout_p": 0.0, "causal": False, "deterministic": False},
    ),
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_arguments_stand_where_flash_mla_has_them(function):
    names, defaults = SIGNATURES[function]
    parameters = inspect.signature(function).parameters
    positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional[: len(names.split())] == names.split()
    assert {name: parameters[name].default for name in defaults} == defaults


def test_positions_and_keywords_mean_the_same():
    problem = dense_problem(causal=True)
    keywords = as_keywords(problem)
    by_keyword = flash_mla_with_kvcache(**keywords, causal=True)
    by_position = flash_mla_with_kvcache(*keywords.values(), None, 576**-0.5, True, False)
    for mine, other in zip(by_keyword, by_position, strict=True):
        assert_same_bits("result", mine, other)


def test_the_default_scale_is_that_of_the_row():
    problem = dense_problem()
    default = run_dense(problem)
    assert_same_bits("out", default[0], run_dense(problem, softmax_scale=576**-0.5)[0])
    assert not torch.equal(default[1], run_dense(problem, softmax_scale=192**-0.5)[1])


def test_shapes_and_types_of_results():
    out, lse = run_dense(dense_problem(dtype=torch.float16))
    assert (out.shape, out.dtype) == ((3, 2, 4, 512), torch.float16)
    assert (lse.shape, lse.dtype) == ((3, 4, 2), torch.float32)
    assert lse.is_contiguous()
    problem = PrefillCase(5, 50, 17, 3).make("cpu")
    assert [tuple(r.shape) for r in run_prefill(problem)] == [(5, 3, 512), (5, 3), (5, 3)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_of_either_size(dtype):
    problem = dense_problem()
    keywords = as_keywords(problem)
    for name in ("block_table", "cache_seqlens"):
        keywords[name] = keywords[name].to(dtype)
    assert_same_bits("out", flash_mla_with_kvcache(**keywords)[0], run_dense(problem)[0])


def test_a_nan_that_is_attended_stays_one():
    problem = dense_problem(b=2, varlen=False)
    problem.k_cache[problem.block_table[1, 0], 7] = torch.nan
    out, lse = run_dense(problem)
    assert out[1].isnan().all()
    assert lse[1].isnan().all()
    assert out[0].isfinite().all()


def test_an_empty_batch_and_empty_lists():
    problem = dense_problem()
    keywords = as_keywords(problem)
    nothing = {name: keywords[name][:0] for name in ("q", "block_table", "cache_seqlens")}
    out, lse = flash_mla_with_kvcache(**{**keywords, **nothing})
    assert (out.shape, lse.shape) == ((0, 2, 4, 512), (0, 4, 2))
    no_indices = torch.empty(3, 2, 0, dtype=torch.int32)
    out, lse = flash_mla_with_kvcache(**keywords, indices=no_indices)
    assert not out.any()
    assert lse.isposinf().all()
    q, kv = torch.randn(0, 4, 576), torch.randn(5, 1, 576)
    results = flash_mla_sparse_fwd(q, kv, torch.empty(0, 1, 3, dtype=torch.int32), 1.0)
    assert [tuple(r.shape) for r in results] == [(0, 4, 512), (0, 4), (0, 4)]
    starts = torch.zeros(1, dtype=torch.int32)
    out, lse = flash_attn_varlen_func(q, kv[:0], kv[:0, :, :128], starts, starts, 0, 0)
    assert (out.shape, lse.shape) == ((0, 4, 128), (0, 4))


def test_rows_in_the_type_of_the_queries_in_sparse_decode(device):
    """All of a dense problem's tokens listed, backwards: the same attention."""
    problem = dense_problem(device, page=7, varlen=False)
    tokens = torch.arange(50, device=device).flip(0)
    rows = problem.block_table[:, tokens // 7] * 7 + tokens % 7
    indices = rows[:, None].expand(3, 2, 50)
    got = flash_mla_with_kvcache(problem.q, problem.k_cache, None, None, 512, None, indices=indices)
    check(problem, got)


def test_indices_of_any_value_that_is_no_row():
    problem = SparseCase(2, 2, Scope(40, 16, 8), h_q=3).make("cpu")
    indices = problem.main.indices
    hostile = torch.tensor((*NOT_INDICES, problem.main.cache.shape[0] * 8))
    places = torch.arange(16) % len(hostile)
    worse = torch.cat([indices, hostile[places].int().expand(2, 2, 16)], 2)
    arguments = list(problem.arguments)
    arguments[3] = worse
    got = flash_mla_with_kvcache(
        problem.q, problem.main.cache, None, None, 512, None, None, *arguments
    )
    check(problem, got)


def test_a_block_table_may_be_given_with_indices():
    problem = SparseCase(2, 1, SMALL, h_q=3).make("cpu")
    lengths = torch.zeros(2, dtype=torch.int32)
    table = torch.full((2, 1), NOT_A_BLOCK, dtype=torch.int32)
    got = flash_mla_with_kvcache(
        problem.q, problem.main.cache, table, lengths, 512, None, None, *problem.arguments
    )
    assert_same_bits("out", got[0], run_sparse(problem)[0])


def test_sinks_in_dense_decode(device):
    problem = dense_problem(device)
    sink = torch.tensor([0.5, torch.inf, -torch.inf, -2.0], device=device)
    out, lse = run_dense(problem, attn_sink=sink)
    exact, exact_lse = problem.answer()
    share = 1 / (1 + (sink.double()[:, None] - exact_lse).exp())  # [b, h_q, s_q]
    assert_close("out", out, exact * share.transpose(1, 2)[..., None], DENSE_OUT)
    assert_close("lse", lse, exact_lse, DECODE_LSE)


def test_block_scaled_rows_in_dense_decode():
    """What FlashMLA reads by index only may be attended to as a whole."""
    problem = SparseCase(2, 2, Scope(16, 16, 4), h_q=3, varlen=False, has_sink=False).make("cpu")
    indices = problem.main.indices
    blocks = indices[:, 0].sort(1).values[:, ::4] // 4
    lengths = torch.full((2,), 16, dtype=torch.int32)
    got = flash_mla_with_kvcache(
        problem.q, problem.main.cache, blocks, lengths, 512, softmax_scale=problem.scale,
        is_fp8_kvcache=True,
    )  # fmt: skip
    check(problem, got)


@pytest.mark.slow
@pytest.mark.parametrize("scale_type", ["number", "scalar", "vector"])
@pytest.mark.parametrize("is_q_fp8", [True, False])
def test_dense_fp8_with_a_scale_per_tensor(scale_type, is_q_fp8, device):
    problem = dense_problem(device, causal=True)
    scales = {"descale_q": 0.03, "descale_k": 0.02}
    half = (problem.q, torch.nan_to_num(problem.k_cache))
    q8, k8 = (
        saturating_cast(tensor.float() / scale, E4M3)
        for tensor, scale in zip(half, scales.values(), strict=True)
    )
    real_k = k8.float().mul(scales["descale_k"]).masked_fill(problem.k_cache.isnan(), torch.nan)
    real_q = q8.float() * scales["descale_q"] if is_q_fp8 else problem.q
    same = DenseProblem(problem.case, real_q, real_k, problem.block_table, problem.cache_seqlens)
    k8 = poison(k8, ~problem.k_cache[:, :, 0, 0].isnan())
    if scale_type != "number":
        shape = () if scale_type == "scalar" else (1,)
        scales = {name: torch.full(shape, value, device=device) for name, value in scales.items()}
    if not is_q_fp8:
        scales.pop("descale_q")
    out, lse = flash_mla_with_kvcache(
        q8 if is_q_fp8 else problem.q,
        k8,
        problem.block_table,
        problem.cache_seqlens,
        512,
        None,
        causal=True,
        is_fp8_kvcache=True,
        **scales,
    )
    assert out.dtype == torch.bfloat16
    exact, naive = same.answer(), same.answer(torch.float32)
    assert_matches("out", out, exact[0], naive[0])
    assert_matches("lse", lse, exact[1], naive[1])


@pytest.mark.slow
def test_a_plain_fp8_cache_needs_no_flag_and_may_be_listed():
    problem = dense_problem(page=8, varlen=False)
    k8 = saturating_cast(problem.k_cache.float(), E4M3)
    keywords = {**as_keywords(problem), "k_cache": k8}
    want = flash_mla_with_kvcache(**keywords, is_fp8_kvcache=True)[0]
    assert_same_bits("no flag", flash_mla_with_kvcache(**keywords)[0], want)
    assert_same_bits("unit", flash_mla_with_kvcache(**keywords, descale_k=1.0)[0], want)
    tokens = torch.arange(50)
    rows = (problem.block_table[:, tokens // 8] * 8 + tokens % 8)[:, None].expand(3, 2, 50)
    listed = flash_mla_with_kvcache(**keywords, indices=rows, descale_k=1.0)[0]
    # equal up to two roundings to bf16, of float32 sums in another order
    assert_matches("listed", listed, want.double(), want)


@pytest.mark.parametrize("case", FEW_PREFILL[2:5], ids=str)
@pytest.mark.parametrize("indexer_topk", [1, 20, 10**6])
def test_the_lse_of_an_indexer_is_over_the_first_entries(case, indexer_topk, device):
    problem = case.make(device)
    *three, prefix_lse = run_prefill(problem, indexer_topk=indexer_topk)
    for mine, other in zip(three, run_prefill(problem), strict=True):
        assert_same_bits("first three", mine, other)
    assert_close("lse", prefix_lse, problem.answer(entries=indexer_topk)[2], PREFILL_LSE)


def test_packed_forms_are_the_unpacked_one():
    case = VarlenCase(20, 20, varlen=False, h=4, h_k=4, causal=True)
    problem = case.make("cpu")
    want = run_varlen(problem)
    q, k, v, starts, kv_starts, longest, longest_kv = problem.arguments
    rest = (192, 0.0, case.scale, True, False, False)
    packed = flash_attn_varlen_kvpacked_func(
        q, torch.cat([k, v], 2), starts, kv_starts, longest, longest_kv, *rest
    )
    all_packed = flash_attn_varlen_qkvpacked_func(torch.cat([q, k, v], 2), starts, longest, *rest)
    for got in (packed, all_packed):
        assert_same_bits("out", got[0], want[0])
        assert_same_bits("lse", got[1], want[1])


def test_varlen_flags_that_change_nothing():
    problem = VarlenCase(20, 30, h=4, h_k=2).make("cpu")
    want = run_varlen(problem)
    assert_same_bits("out", run_varlen(problem, deterministic=True)[0], want[0])
    default = flash_attn_varlen_func(*problem.arguments)
    explicit = flash_attn_varlen_func(*problem.arguments, softmax_scale=192**-0.5)
    assert_same_bits("lse", default[1], explicit[1])


def test_a_request_without_keys_in_a_ragged_batch():
    q, k = torch.randn(3, 2, 128), torch.randn(4, 2, 128)
    starts = (torch.tensor([0, 2, 3]), torch.tensor([0, 0, 4]))
    out, lse = flash_attn_varlen_func(q, k, k, *starts, 2, 4)
    assert not out[:2].any()
    assert lse[:2].isneginf().all()
    assert lse[2].isfinite().all()


@pytest.mark.slow
def test_compiled_calls_give_the_same():
    problem = dense_problem(causal=True, h_kv=2)
    keywords = as_keywords(problem)

    def step(**arguments: Any) -> tuple[Tensor, Tensor]:
        return flash_mla_with_kvcache(**arguments, causal=True)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    for mine, other in zip(compiled(**keywords), step(**keywords), strict=True):
        assert_same_bits("result", mine, other)
