"""The drop-in for FlashMLA: its own test problems, every form of its arguments, its metadata."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit.compat.flash_mla import (
    FlashMLASchedMeta,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)
from mlakit.formats import saturating_cast
from mlakit.testing import (
    assert_matches,
    assert_same_bits,
    assert_unchanged,
    poison,
    snapshot,
)
from tests.compat.flash_mla.dense_cases import (
    FEW_DENSE,
    HEADS,
    SERVING_DENSE,
    DenseCase,
    DenseProblem,
    as_keywords,
    dense_cases,
    dense_problem,
)
from tests.compat.flash_mla.inputs import (
    DECODE_LSE,
    DENSE_OUT,
    NOT_A_BLOCK,
    NOT_INDICES,
    PREFILL_LSE,
    PREFILL_OUT,
    SPARSE_OUT,
    VARLEN_OUT,
    Tolerance,
    assert_close,
    padded,
)
from tests.compat.flash_mla.sparse_cases import (
    FEW_PREFILL,
    FEW_SPARSE,
    LONG_PREFILL,
    SERVING_PREFILL,
    SERVING_SPARSE,
    SMALL,
    SPARSE_GROUPS,
    PrefillCase,
    PrefillProblem,
    Scope,
    SparseCase,
    SparseProblem,
    prefill_cases,
)
from tests.compat.flash_mla.varlen_cases import FEW_VARLEN, VARLEN_CASES, VarlenCase, VarlenProblem

E4M3 = torch.float8_e4m3fn


def run_dense(problem: DenseProblem, **others: Any) -> tuple[Tensor, Tensor]:
    case = problem.case
    return flash_mla_with_kvcache(
        problem.q,
        problem.k_cache,
        problem.block_table,
        problem.cache_seqlens,
        case.d_v,
        *get_mla_metadata(),
        causal=case.causal,
        **others,
    )


def run_sparse(problem: SparseProblem, **others: Any) -> tuple[Tensor, Tensor]:
    cache = problem.main.cache
    metadata = get_mla_metadata()
    return flash_mla_with_kvcache(
        problem.q, cache, None, None, 512, *metadata, *problem.arguments, **others
    )


def run_prefill(problem: PrefillProblem, **others: Any) -> tuple[Tensor, ...]:
    return flash_mla_sparse_fwd(
        problem.q,
        problem.kv,
        problem.indices,
        sm_scale=problem.scale,
        d_v=problem.case.d_v,
        attn_sink=problem.attn_sink,
        topk_length=problem.topk_length,
        **others,
    )


def run_varlen(problem: VarlenProblem, **others: Any) -> tuple[Tensor, Tensor]:
    case = problem.case
    return flash_attn_varlen_func(
        *problem.arguments,
        softmax_scale=case.scale,
        causal=case.causal,
        is_varlen=case.varlen,
        **others,
    )


KINDS: dict[type, tuple[Callable[..., Any], tuple[tuple[str, Tolerance], ...]]] = {
    DenseCase: (run_dense, (("out", DENSE_OUT), ("lse", DECODE_LSE))),
    SparseCase: (run_sparse, (("out", SPARSE_OUT), ("lse", DECODE_LSE))),
    PrefillCase: (
        run_prefill,
        (("out", PREFILL_OUT), ("max_logits", PREFILL_LSE), ("lse", PREFILL_LSE)),
    ),
    VarlenCase: (run_varlen, (("out", VARLEN_OUT), ("lse", PREFILL_LSE))),
}
FEW = [*FEW_DENSE, *FEW_SPARSE, *FEW_PREFILL, *FEW_VARLEN]


def check(problem: Any, got: tuple[Tensor, ...]) -> None:
    """By FlashMLA's rule."""
    _, rules = KINDS[type(problem.case)]
    for (name, tolerance), actual, want in zip(rules, got, problem.answer(), strict=True):
        assert_close(f"{name} of {problem.case}", actual, want, tolerance)


def check_all(listed: Iterator[Any] | list[Any], device: torch.device) -> None:
    for seed, case in enumerate(listed):
        problem = case.make(device, seed)
        check(problem, KINDS[type(case)][0](problem))


# --- FlashMLA's problems ------------------------------------------------------------------------


@pytest.mark.parametrize("case", FEW, ids=str)
def test_few_of_its_problems_and_some_beyond(case, device):
    run, rules = KINDS[type(case)]
    problem = case.make(device)
    got = run(problem)
    check(problem, got)
    naive, exact = problem.answer(torch.float32), problem.answer()
    for (name, _), actual, want, plain in zip(rules, got, exact, naive, strict=True):
        assert_matches(name, actual, want, plain)


def test_a_row_that_is_listed_twice_counts_twice(device):
    case = SparseCase(3, 2, SMALL, Scope(30, 33, 2), h_q=4, d=512, varlen=False)
    once, again = case.make(device), case.make(device)
    for source in (again.main, again.extra):
        source.indices[..., 1:4] = source.indices[..., :1]
    check(again, run_sparse(again))
    assert not torch.allclose(again.answer()[0], once.answer()[0], atol=1e-3)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize(("h_q", "h_kv"), HEADS)
def test_all_of_its_dense_problems(h_q, h_kv, device):
    check_all(dense_cases(h_q, h_kv), device)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("group", SPARSE_GROUPS, ids=str)
def test_all_of_its_sparse_decode_problems(group, device):
    check_all(group.cases(), device)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("h_q", [64, 128])
@pytest.mark.parametrize("d", [512, 576])
def test_all_of_its_sparse_prefill_problems(d, h_q, device):
    check_all(prefill_cases(d, h_q), device)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("case", VARLEN_CASES, ids=str)
def test_all_of_its_varlen_problems(case, device):
    check_all([case], device)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize(
    "listed",
    [SERVING_DENSE, SERVING_SPARSE, SERVING_PREFILL],
    ids=["dense", "sparse", "prefill"],
)
def test_the_problems_it_measures_speed_on(listed, device):
    check_all(listed, device)


@pytest.mark.gpu
@pytest.mark.large
def test_more_queries_than_a_grid_axis_has(device):
    check_all([LONG_PREFILL], device)


def test_the_lists_are_as_long_as_flash_mlas():
    assert len(HEADS) == 16
    assert sum(1 for heads in HEADS for _ in dense_cases(*heads)) == 16 * 146
    assert len(SPARSE_GROUPS) == 14
    assert len(SERVING_SPARSE) == 4 + 24 + 4


@pytest.mark.parametrize("spoil", [0.0, torch.nan, torch.inf])
def test_the_rule_of_comparison_sees_one_wrong_number(spoil):
    want = torch.linspace(-1, 1, 1000).view(10, 100)
    assert_close("same", want.bfloat16(), want, DENSE_OUT)
    wrong = want.clone()
    wrong[3, 0] = spoil
    with pytest.raises(AssertionError):
        assert_close("wrong", wrong, want, DENSE_OUT)
    with pytest.raises(AssertionError, match="cosine"):
        assert_close("all a little", want * 1.01, want, DENSE_OUT)


# --- nothing but the answer ---------------------------------------------------------------------

SOME = [
    DenseCase(3, 2, 70, True, True, zeros=True, h_q=6, h_kv=2),
    SparseCase(3, 2, Scope(60, 20, 5, True), Scope(90, 17, 61, True), h_q=3, d=512, zeros=True),
    SparseCase(3, 2, SMALL, h_q=3, zeros=True),
    PrefillCase(13, 40, 64, 4, 512, True, True),
    VarlenCase(20, 50, 3, h=4, h_k=2, causal=True),
]


def tensors_of(problem: Any) -> dict[str, Tensor]:
    found = {}
    for owner, prefix in (
        (problem, ""),
        *((getattr(problem, n, None), n) for n in ("main", "extra")),
    ):
        for name, value in vars(owner).items() if owner is not None else ():
            if isinstance(value, Tensor):
                found[f"{prefix} {name}"] = value
    return found


@pytest.mark.parametrize("case", SOME, ids=str)
def test_inputs_stay_as_they_are_and_two_runs_are_equal(case, device):
    problem = case.make(device)
    before = snapshot(**tensors_of(problem))
    run = KINDS[type(case)][0]
    for first, second in zip(run(problem), run(problem), strict=True):
        assert_same_bits(str(case), first, second)
    assert_unchanged(before)


@pytest.mark.parametrize("case", SOME[:4], ids=str)
@pytest.mark.parametrize("strides", ["packed", "padded"])
def test_out_is_written_and_returned(case, strides, device):
    problem = case.make(device)
    run = KINDS[type(case)][0]
    want = run(problem)
    out = poison(torch.empty_like(want[0]))
    if strides == "padded":
        out = padded(out)
    got = run(problem, out=out)
    assert got[0] is out
    for name, mine, other in zip(("out", "lse", "more"), got, want, strict=False):
        assert_same_bits(name, mine, other)


@pytest.mark.parametrize("h_kv", [1, 2])
def test_no_cache_is_copied(h_kv):
    """A cache of 2**34 rows that all lie in one page: no copy of it would fit."""
    cache = torch.randn(1, 64, h_kv, 576).bfloat16().expand(2**28, 64, h_kv, 576)
    q = torch.randn(2, 1, 2, 576).bfloat16()
    table = torch.tensor([[2**28 - 1, 5], [3, 7]], dtype=torch.int32)
    lengths = torch.tensor([100, 30], dtype=torch.int32)
    got = flash_mla_with_kvcache(q, cache, table, lengths, 512)
    small = flash_mla_with_kvcache(q, cache[:1], torch.zeros_like(table), lengths, 512)
    for mine, other in zip(got, small, strict=True):
        assert_same_bits("result", mine, other)


def test_keys_of_shared_heads_are_not_copied():
    k = torch.randn(1, 1, 192).expand(2**31, 4, 192)
    q = torch.randn(1, 8, 192)
    starts = (torch.tensor([0, 1]), torch.tensor([0, 3]))
    out, _ = flash_attn_varlen_func(q, k[:3], k[:3, :, :128], *starts, 1, 3)
    v = k[:1, 0, :128].expand(8, 128)  # the values of all three keys, so that of their mean
    assert_matches("out", out[0], v.double(), v)


# --- forms of the arguments ---------------------------------------------------------------------


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


def test_compiled_calls_give_the_same():
    problem = dense_problem(causal=True, h_kv=2)
    keywords = as_keywords(problem)

    def step(**arguments: Any) -> tuple[Tensor, Tensor]:
        return flash_mla_with_kvcache(**arguments, causal=True)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    for mine, other in zip(compiled(**keywords), step(**keywords), strict=True):
        assert_same_bits("result", mine, other)


# --- metadata -----------------------------------------------------------------------------------


def test_metadata_takes_arguments_of_every_version():
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    for made in (
        get_mla_metadata(),
        get_mla_metadata(lengths, 128, 1),
        get_mla_metadata(lengths, 128, 1, num_heads_q=128, is_fp8_kvcache=True, topk=2048),
        get_mla_metadata(cache_seqlens=lengths, num_q_tokens_per_head_k=1, num_heads_k=1),
    ):
        schedule, num_splits = made
        assert schedule == FlashMLASchedMeta()
        assert not schedule.have_initialized
        assert num_splits is None


OLD_METADATA = (torch.full((132, 8), -7, dtype=torch.int32), torch.full((4,), 99).int())


@pytest.mark.parametrize("metadata", [(None, None), OLD_METADATA, (OLD_METADATA[0], None)])
def test_old_metadata_is_accepted_whatever_is_in_it(metadata):
    problem = dense_problem()
    keywords = {**as_keywords(problem)}
    keywords.pop("tile_scheduler_metadata")
    got = flash_mla_with_kvcache(*keywords.values(), *metadata)
    assert_same_bits("out", got[0], run_dense(problem)[0])


def test_metadata_of_another_package_is_accepted():
    class Foreign:
        have_initialized = True

    problem = dense_problem()
    keywords = {**as_keywords(problem), "tile_scheduler_metadata": Foreign()}
    assert_same_bits("out", flash_mla_with_kvcache(**keywords)[0], run_dense(problem)[0])


def test_a_schedule_remembers_the_call():
    schedule, _ = get_mla_metadata()
    problem = dense_problem(h_kv=2, page=16, causal=True)
    keywords = {**as_keywords(problem), "tile_scheduler_metadata": schedule}
    flash_mla_with_kvcache(**keywords, causal=True)
    assert schedule.have_initialized
    assert schedule.config == FlashMLASchedMeta.Config(3, 2, 4, 16, 2, True, False, *[None] * 3)
    sparse = FEW_SPARSE[8].make("cpu")
    flash_mla_with_kvcache(
        sparse.q, sparse.main.cache, None, None, 512, schedule, None, *sparse.arguments
    )
    assert schedule.config == FlashMLASchedMeta.Config(3, 2, 3, 5, 1, False, True, 20, 61, 17)


def test_a_schedule_serves_lengths_that_grow_and_shrink(device):
    """FlashMLA's own object would be stale: it is made from the lengths of the first call."""
    schedule, _ = get_mla_metadata()
    grown = DenseCase(4, 2, 300, causal=True, h_q=4).make(device)
    for lengths in ([3, 5, 2, 4], [300, 0, 257, 64], [1, 300, 0, 2]):
        ends = torch.tensor(lengths, dtype=torch.int32, device=device)
        problem = DenseProblem(grown.case, grown.q, grown.k_cache, grown.block_table, ends)
        got = flash_mla_with_kvcache(
            problem.q, problem.k_cache, problem.block_table, ends, 512, schedule, causal=True
        )
        check(problem, got)


def test_a_schedule_serves_other_shapes(device):
    schedule, _ = get_mla_metadata()
    for case in FEW_DENSE[:6]:
        problem = case.make(device)
        got = flash_mla_with_kvcache(
            *(problem.q, problem.k_cache, problem.block_table, problem.cache_seqlens),
            *(case.d_v, schedule),
            causal=case.causal,
        )
        check(problem, got)


@pytest.mark.gpu
def test_a_graph_is_replayed_with_new_lengths(device):
    problem = DenseCase(4, 2, 300, causal=True, h_q=4, h_kv=2).make(device)
    ends = problem.cache_seqlens.clone()
    schedule, _ = get_mla_metadata()

    def run() -> tuple[Tensor, Tensor]:
        return flash_mla_with_kvcache(
            problem.q, problem.k_cache, problem.block_table, ends, 512, schedule, causal=True
        )

    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for lengths in ([300, 0, 257, 64], [1, 300, 0, 2]):
        ends.copy_(torch.tensor(lengths))
        graph.replay()
        changed = DenseProblem(problem.case, problem.q, problem.k_cache, problem.block_table, ends)
        check(changed, got)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SOME, ids=str)
def test_no_call_waits_for_the_gpu(case, device):
    problem = case.make(device)
    run = KINDS[type(case)][0]
    run(problem)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(problem)
    finally:
        torch.cuda.set_sync_debug_mode("default")
