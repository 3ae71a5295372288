"""`BatchMLAPagedAttentionWrapper` against the oracle, with FlashInfer's conventions."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit.compat.flashinfer import BatchMLAPagedAttentionWrapper, mla
from mlakit.dispatch.checks import UnsupportedError
from mlakit.tools.testing import assert_same_bits, assert_unchanged, poison, snapshot
from tests.compat.flash_mla.inputs import padded
from tests.compat.flashinfer.inputs import E4M3, Case, Problem, starts_of
from tests.pairs import pairwise


def wrapper_of(problem: Problem, **options: Any) -> BatchMLAPagedAttentionWrapper:
    workspace = torch.empty(16, dtype=torch.uint8, device=problem.ckv.device)
    return BatchMLAPagedAttentionWrapper(workspace, **options)


def run(problem: Problem, **options: Any) -> tuple[Tensor, Tensor]:
    wrapper = wrapper_of(problem)
    wrapper.plan(**problem.plan())
    got = wrapper.run(*problem.tensors, return_lse=True, **options)
    assert isinstance(got, tuple)
    return got


@pairwise(
    page_size=[1, 7, 16],
    causal=[False, True],
    kpe=[16, 0],
    dtype=[torch.bfloat16, torch.float16, torch.float32],
    is_padded=[False, True],
    graph=[False, True],
)
@pytest.mark.slow
def test_it_matches_the_oracle(page_size, causal, kpe, dtype, is_padded, graph, device):
    case = Case(page_size=page_size, causal=causal, kpe=kpe, dtype=dtype, is_padded=is_padded)
    problem = case.make(device)
    wrapper = wrapper_of(problem, **(problem.buffers() if graph else {}))
    wrapper.plan(**problem.plan())
    got = wrapper.run(*problem.tensors, return_lse=True)
    assert got[0].dtype == dtype
    problem.check(*got)
    only_out = wrapper.run(*problem.tensors)
    assert isinstance(only_out, Tensor)
    assert_same_bits("out", only_out, got[0])


@pytest.mark.parametrize("backend", ["auto", "fa2", "fa3"])
def test_the_widths_of_deepseek(backend, device):
    problem = Case(kv_lens=(130, 3), q_lens=(1, 1), ckv=512, kpe=64, sm_scale=192**-0.5).make(
        device
    )
    wrapper = wrapper_of(problem, backend=backend)
    wrapper.plan(*problem.plan().values())
    problem.check(*wrapper.run(*problem.tensors, return_lse=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(causal=True),
        Case(page_size=1, kv_lens=(9, 0), q_lens=(2, 1)),
        Case(kpe=0, dtype=torch.float16),
        Case(ckv_scale=0.5, kpe_scale=0.25),
    ],
    ids=["causal", "pages of 1", "no kpe", "e4m3"],
)
def test_every_backend_matches_the_oracle(case, place):
    problem = case.make(place.device)
    problem.check(*run(problem, ckv_scale=case.ckv_scale, kpe_scale=case.kpe_scale))


def test_columns_of_one_tensor_are_a_cache_too(device):
    problem = Case().make(device)
    joined = torch.cat([problem.ckv.float(), problem.kpe.float()], dim=-1).bfloat16()
    ckv, kpe = joined.split([64, 16], dim=-1)
    problem.check(*run(replace(problem, ckv=ckv, kpe=kpe)))


def test_lse_is_base_2_or_natural(device):
    problem = Case(causal=True).make(device)
    problem.check(*run(problem, return_lse_base_on_e=True), base=1.0)
    _, lse = run(problem)
    assert torch.isneginf(lse[2]).all()  # a request without tokens


def test_results_are_written_to_what_is_given(device):
    problem = Case().make(device)
    wrapper = wrapper_of(problem)
    wrapper.plan(**problem.plan())
    want = wrapper.run(*problem.tensors, return_lse=True)
    out, lse = padded(torch.empty_like(want[0])), poison(torch.empty_like(want[1]))
    before = snapshot(**{str(i): each for i, each in enumerate(problem.tensors)})
    got = wrapper.run(*problem.tensors, out, lse)
    assert got is out
    assert_same_bits("out", out, want[0])
    assert_same_bits("lse", lse, want[1])
    assert_unchanged(before)


def test_plans_on_the_host_are_copied_and_extra_starts_are_not_read(device):
    problem = Case().make(device)
    longer = torch.cat([problem.kv_indptr.cpu(), torch.tensor([-7], dtype=torch.int32)])
    on_host = problem.plan(
        kv_indptr=longer,
        qo_indptr=problem.qo_indptr.cpu().long(),
        kv_indices=problem.kv_indices.cpu(),
    )
    wrapper = wrapper_of(problem)
    wrapper.plan(**on_host)
    problem.check(*wrapper.run(*problem.tensors, return_lse=True))


def test_what_a_graph_reads_stays_in_place(device):
    """A captured `run` sees another plan: the same memory, whatever the batch."""
    small = Case(kv_lens=(0, 0), q_lens=(1, 2)).make(device)
    large = Case(kv_lens=(77, 33), q_lens=(2, 1), causal=True).make(device, seed=1)
    wrapper = wrapper_of(small, **large.buffers())
    wrapper.plan(**small.plan())
    first = wrapper._batch
    small.check(*wrapper.run(*small.tensors, return_lse=True))
    wrapper.plan(**large.plan())
    second = wrapper._batch
    for name in ("q_starts", "page_table", "kv_lens"):
        assert getattr(first, name) is getattr(second, name)
    large.check(*wrapper.run(*large.tensors, return_lse=True))


def test_the_table_of_graphs_is_bounded(monkeypatch):
    monkeypatch.setattr(mla, "GRAPH_TABLE_ENTRIES", 8)
    small, large = (Case(kv_lens=(n, 3), q_lens=(1, 1)).make() for n in (17, 90))
    wrapper = wrapper_of(small, **large.buffers(pages=100))
    wrapper.plan(**small.plan())
    with pytest.raises(ValueError, match=r"kv_indptr must give no request more than 4 pages"):
        wrapper.plan(**large.plan())
    small.check(*wrapper.run(*small.tensors, return_lse=True))


@pytest.mark.gpu
def test_a_captured_run_sees_the_next_plan():
    device = torch.device("cuda")
    small = Case(kv_lens=(16, 1), q_lens=(2, 1), ckv=512, kpe=64).make(device)
    large = Case(kv_lens=(770, 333), q_lens=(2, 1), ckv=512, kpe=64).make(device, seed=1)
    tensors = tuple(each.clone() for each in large.tensors)
    wrapper = wrapper_of(small, **large.buffers())
    wrapper.plan(**small.plan())
    wrapper.run(*tensors, return_lse=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = wrapper.run(*tensors, return_lse=True)
    wrapper.plan(**large.plan())
    graph.replay()
    large.check(out, lse)


@pytest.mark.parametrize("kpe_scale", [0.125, 1.0, 0.4])
def test_e4m3_caches_with_a_scale_for_each_tensor(kpe_scale, device):
    problem = Case(ckv_scale=0.5, kpe_scale=kpe_scale, causal=True).make(device)
    got = run(problem, ckv_scale=0.5, kpe_scale=kpe_scale)
    # q_pe is rounded once more, unless the scales differ by a power of two
    ratio = kpe_scale / 0.5
    scaled = (problem.q_pe.cpu().float() * ratio).bfloat16().double() / ratio
    naive_q = torch.cat([problem.q_nope.cpu().double(), scaled], dim=-1)
    problem.check(*got, naive_q=naive_q)


@pytest.mark.slow
def test_e4m3_rows_with_scales_of_128_columns(device):
    case = Case(ckv=512, kpe=0, ckv_scale=1.0, kpe_scale=1.0, sm_scale=512**-0.5)
    problem = case.make(device)
    generator = torch.Generator().manual_seed(3)
    scales = torch.rand(*problem.ckv.shape[:2], 4, generator=generator) + 0.01
    for request, (length, rows) in enumerate(zip(case.kv_lens, problem.rows, strict=True)):
        first = problem.kv_indptr[request]
        for token in range(length):
            page = int(problem.kv_indices[int(first) + token // case.page_size])
            own = scales[page, token % case.page_size].double()
            rows[token] *= own.repeat_interleave(128)
    is_read = ~problem.ckv.cpu().float().isnan().any(-1)
    poison(scales, is_read)
    problem.check(*run(problem, ckv_scale_arr=scales.to(device), kpe_scale=1.0))


def test_cutlass_needs_no_plan(device):
    case = Case(kv_lens=(37, 5), q_lens=(1, 1), sm_scale=192**-0.5)
    problem = case.make(device)
    table = torch.full((2, 3), 2**31 - 1, dtype=torch.int32)
    listed = problem.kv_indices.cpu()
    table[0], table[1, 0] = listed[:3], listed[3]
    wrapper = wrapper_of(problem, backend="cutlass")
    out = wrapper.run(*problem.tensors, kv_len=problem.kv_len_arr, page_table=table.to(device))
    problem.check(out)


def test_no_cache_is_copied():
    """Caches of 2**32 rows that all lie in one page: no copy of them would fit."""
    ckv = torch.randn(1, 16, 64).bfloat16().expand(2**28, 16, 64)
    kpe = torch.randn(1, 16, 16).bfloat16().expand(2**28, 16, 16)
    problem = Case(kv_lens=(30, 7), q_lens=(1, 1)).make()
    got = run(replace(problem, ckv=ckv, kpe=kpe))
    few = run(replace(problem, ckv=ckv[:20], kpe=kpe[:20]))
    for name, mine, other in zip(("out", "lse"), got, few, strict=True):
        assert_same_bits(name, mine, other)


def test_the_scales_are_keywords():
    parameters = inspect.signature(BatchMLAPagedAttentionWrapper.run).parameters
    for name in ("ckv_scale", "ckv_scale_arr", "kpe_scale"):
        assert parameters[name].kind == inspect.Parameter.KEYWORD_ONLY


NOTHING = torch.zeros(5, dtype=torch.int32)
PLAN_ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"num_heads": 0}, ValueError, "num_heads must be at least 1, got 0"),
    ({"head_dim_kpe": -2}, ValueError, "head_dim_kpe must be at least 0"),
    ({"page_size": 16.0}, TypeError, "page_size must be an integer"),
    ({"sm_scale": torch.inf}, ValueError, "sm_scale must be finite"),
    ({"qo_indptr": NOTHING}, ValueError, r"qo_indptr must have batch \+ 1 entries, 6, got 5"),
    ({"kv_indptr": NOTHING}, ValueError, r"kv_indptr must have batch \+ 1 entries, 6, got 5"),
    ({"kv_indptr": starts_of([9] * 5)}, ValueError, "kv_indptr.* must not exceed the entries of"),
    ({"qo_indptr": starts_of([1, -1, 0, 0, 0])}, ValueError, "qo_indptr.2. must not be below"),
    ({"kv_len_arr": NOTHING + 33}, ValueError, r"kv_len_arr\[1\] must be 0 to 0, the tokens of"),
    ({"kv_len_arr": NOTHING - 1}, ValueError, r"kv_len_arr\[0\] must be 0 to 48"),
    ({"kv_indices": NOTHING.float()}, TypeError, "kv_indices must be int32 or int64"),
    ({"kv_data_type": torch.uint8}, ValueError, "kv_data_type must be one of"),
    ({"kv_data_type": torch.float16}, ValueError, "q_data_type must be kv_data_type, torch.float1"),
    (
        {"kv_data_type": E4M3, "q_data_type": torch.float16},
        ValueError,
        "must come with q_data_type=torch.bfloat16, got q_data_type=torch.float16",
    ),
    ({"use_profiler": True}, UnsupportedError, "use_profiler must be False, got True"),
    ({"window_left": 3}, TypeError, "unexpected keyword argument 'window_left'"),
]


@pytest.mark.parametrize(("change", "kind", "message"), PLAN_ERRORS)
def test_a_wrong_plan_is_refused_by_name(change, kind, message):
    problem = Case().make()
    with pytest.raises(kind, match=message):
        wrapper_of(problem).plan(**{**problem.plan(), **change})


RUN_ERRORS: list[tuple[str, Any, type[Exception], str]] = [
    ("q_nope", lambda t: t.half(), ValueError, "q_nope.dtype must match the planned q_data_type"),
    ("q_pe", lambda t: t.half(), ValueError, "q_pe.dtype must match the planned q_data_type"),
    ("ckv_cache", lambda t: t.half(), ValueError, "ckv_cache.dtype must match the planned kv_data"),
    ("kpe_cache", lambda t: t.half(), ValueError, "kpe_cache.dtype must match the planned kv_data"),
    ("q_nope", lambda t: t[:, :2], ValueError, r"q_nope.shape\[1\] \(num_heads\) must equal"),
    ("q_pe", lambda t: t[1:], ValueError, r"q_pe.shape\[0\] \(tokens\) must equal q_nope"),
    ("ckv_cache", lambda t: t[:, :8], ValueError, "page_size of the plan, 16, got 8"),
    ("kpe_cache", lambda t: t[..., :8], ValueError, "kpe of the plan, 16, got 8"),
    ("kpe_cache", lambda t: t[1:], ValueError, r"kpe_cache.shape\[0\] \(pages\) must equal"),
    ("ckv_cache", lambda t: None, TypeError, "ckv_cache must be a tensor, got NoneType"),
]


@pytest.mark.parametrize(("name", "change", "kind", "message"), RUN_ERRORS)
def test_a_wrong_tensor_is_refused_by_name(name, change, kind, message):
    problem = Case().make()
    wrapper = wrapper_of(problem)
    wrapper.plan(**problem.plan())
    names = ("q_nope", "q_pe", "ckv_cache", "kpe_cache")
    tensors = dict(zip(names, problem.tensors, strict=True))
    tensors[name] = change(tensors[name])
    with pytest.raises(kind, match=message):
        wrapper.run(**tensors)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"o_scale": 1.0}, UnsupportedError, "o_scale must be None, got 1.0"),
        ({"profiler_buffer": NOTHING}, UnsupportedError, "profiler_buffer must be None, got a ten"),
        ({"page_table": NOTHING}, UnsupportedError, "page_table must be None, got a tensor"),
        ({"ckv_scale": 1.0}, ValueError, "ckv_scale must be None for caches of torch.bfloat16"),
        ({"kpe_scale": 1.0}, ValueError, "kpe_scale must be None for caches of torch.bfloat16"),
        ({"lse": torch.zeros(7, 2)}, ValueError, r"lse.shape\[1\] \(heads\) must equal"),
        ({"sinks": NOTHING}, TypeError, "unexpected keyword argument 'sinks'"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options, kind, message):
    problem = Case().make()
    wrapper = wrapper_of(problem)
    wrapper.plan(**problem.plan())
    with pytest.raises(kind, match=message):
        wrapper.run(*problem.tensors, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Exactly one of ckv_scale or ckv_scale_arr must be given.*got neither"),
        (
            {"ckv_scale": 1.0, "ckv_scale_arr": torch.ones(11, 16, 1)},
            "Exactly one of ckv_scale or ckv_scale_arr must be given.*got both",
        ),
        ({"ckv_scale": 1.0, "kpe_scale": None}, "kpe_scale must be given for e4m3 caches"),
        ({"ckv_scale": 0.0}, "ckv_scale must be positive and a normal float32, got 0.0"),
        ({"ckv_scale": 1.0, "kpe_scale": torch.nan}, "kpe_scale must be finite"),
        ({"ckv_scale_arr": torch.ones(11, 16, 2)}, r"Invalid shape of ckv_scale_arr: must be"),
    ],
)
def test_wrong_scales_are_refused_by_name(options, message):
    problem = Case(ckv_scale=1.0, kpe_scale=1.0, kpe=0).make()
    wrapper = wrapper_of(problem)
    wrapper.plan(**problem.plan())
    with pytest.raises(ValueError, match=message):
        wrapper.run(*problem.tensors, **{"kpe_scale": 1.0, **options})


def test_scales_of_columns_are_for_caches_without_kpe():
    problem = Case(ckv_scale=1.0, kpe_scale=1.0).make()
    scales = torch.ones(*problem.ckv.shape[:2], 1)
    with pytest.raises(UnsupportedError, match="ckv_scale_arr must come with a kpe_cache of 0"):
        run(problem, ckv_scale_arr=scales, kpe_scale=1.0)


@pytest.mark.parametrize("graph", [False, True])
def test_a_refused_plan_leaves_the_last_one(graph):
    problem = Case().make()
    wrapper = wrapper_of(problem, **(problem.buffers() if graph else {}))
    wrapper.plan(**problem.plan())
    wrong = {"num_heads": 7, "sm_scale": 9.0, "q_data_type": torch.float16, "page_size": 1}
    with pytest.raises(ValueError, match="q_data_type must be kv_data_type"):
        wrapper.plan(**problem.plan(**wrong))
    with pytest.raises(ValueError, match="kv_len_arr"):
        wrapper.plan(**problem.plan(num_heads=7, kv_len_arr=NOTHING + 99))
    problem.check(*wrapper.run(*problem.tensors, return_lse=True))


def test_run_needs_a_plan_and_buffers_their_batch():
    problem = Case().make()
    with pytest.raises(ValueError, match="plan must be called before run"):
        wrapper_of(problem).run(*problem.tensors)
    with pytest.raises(ValueError, match="backend must be one of auto, fa2, fa3, cutlass"):
        wrapper_of(problem, backend="fa4")
    with pytest.raises(TypeError, match="kv_len_arr must be a tensor, got NoneType"):
        wrapper_of(problem, use_cuda_graph=True)
    wrapper = wrapper_of(problem, **problem.buffers())
    with pytest.raises(ValueError, match="kv_len_arr must have the buffers' batch, 5, got 2"):
        wrapper.plan(**Case(kv_lens=(3, 3), q_lens=(1, 1)).make().plan())
