"""The suites for GPUs, on the CPU at small sizes: their targets, their checks, their peers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mlakit.cache import PagedLatentCache
from mlakit.dispatch.specs import pretending
from mlakit.steps import sparse
from mlakit.tools.bench import GPU_SUITES, command, correctness, indexer
from mlakit.tools.bench.pool import LATENT_STD, ROW, SharedPool
from mlakit.tools.bench.problems import (
    DenseDecode,
    DensePrefill,
    IndexLogits,
    ScaledMatmul,
    SparseDecode,
    SparsePrefill,
)
from mlakit.tools.bench.report import SELECT
from mlakit.tools.bench.shapes import Batch
from mlakit.tools.bench.sparse import sampled_queries
from mlakit.tools.bench.suite import Workload
from tests.kernel_launchers import Arguments, by_name, replace_launcher
from tests.tools.bench.fakes import pretend_gpu, solve

PROBLEMS = {
    "decode": DenseDecode,
    "sparse-prefill": SparsePrefill,
    "sparse-decode": SparseDecode,
    "prefill": DensePrefill,
    "prefill-grid": DensePrefill,
    "indexer": IndexLogits,
    "fp8": ScaledMatmul,
    "vllm": DenseDecode,
}
SEPARATE_STAGES = ("absorb", "append", "logits", "top-k", "attend", "up-project")
RESULTS = {"prefill": 128, "prefill-grid": 128, "indexer": 200, "fp8": 256}  # columns; others 512


def workloads(suite: str) -> tuple[Workload, ...]:
    return tuple(command._workloads(suite, None, 0))


SMALL = [
    pytest.param(each, id=each.name)
    for suite in GPU_SUITES
    for each in dict.fromkeys(workload.small for workload in workloads(suite))
]


@pytest.fixture(autouse=True)
def cpu_as_gpu(monkeypatch):
    pretend_gpu(monkeypatch)


@pytest.mark.slow
def test_points_of_the_grid_share_a_pool():
    first, second = (workloads("grid")[i] for i in (0, 1))
    pool = SharedPool(num_pages=8)
    small = [
        replace(each, batch=Batch.of(2, 1, 200), heads=2, pool=pool) for each in (first, second)
    ]
    pages = [each.build_case().problem.pages for each in small]
    assert pages[0].data_ptr() == pages[1].data_ptr()
    assert pages[0].shape == (8, 64, 576)
    small[0].build_case().check()


def test_workloads_have_names_of_their_own():
    names = [each.name for suite in GPU_SUITES for each in workloads(suite)]
    assert len(set(names)) == len(names)


def test_flops_and_bytes_are_counted_as_promised():
    counted = {each.name: each for suite in GPU_SUITES for each in workloads(suite)}
    decode = counted["decode-bf16-b128-h128-q2-4096"]
    assert decode.flops == 2 * 128 * 2 * 128 * 4096 * 1088
    assert decode.bytes == 2 * (128 * 4096 * 576 + 128 * 2 * 128 * 1088)
    sparse = counted["sparse-decode-fp8_block128-b64-h64-32768-top2048"]
    assert sparse.flops == 2 * 64 * 64 * 2048 * 1088
    assert sparse.bytes == 64 * (2048 * (656 + 4) + 2 * 64 * 1088)
    narrow = counted["sparse-decode-v4-mxfp4_block32-b128-h64-32768-top512"]
    assert narrow.flops == 2 * 128 * 64 * 640 * 1024
    assert narrow.bytes == 128 * (640 * (368 + 4) + 2 * 64 * 1024)
    decode = counted["compress-fp8_block64-rate128-b16-256"]
    states = 127 * 2 * 512 * 4  # the last token ends a window: no later one needs a state
    once = 4 * (128 * 512 + 512)
    assert decode.bytes == once + 16 * (states + 2 * 512 * 2 + 584 + 4 * 64)
    prompt = counted["compress-fp8_block64-rate4-b1-q8192-8192"]
    written = 2048 * (584 + 4 * 64) + 4 * 2 * 1024 * 4
    assert prompt.bytes == 4 * (4 * 1024 + 512) + 8192 * 2 * 1024 * 2 + written
    assert counted["prefill-bf16-b4-h128-4096-full"].flops == 2 * 4 * 128 * 4096**2 * 320
    assert counted["prefill-bf16-b4-h128-4096-causal"].flops == 4 * 128 * 4096**2 * 320
    assert counted["indexer-topk-64x8192-k2048"].bytes == 4 * 64 * (8192 + 2048)
    assert counted["scaled-mm-4096x4096x4096"].flops == 2 * 4096**3


# the ops of a step whose kernels write what its check compares
OPS_OF_STEPS = {
    "mla_step": ("mla_prefill", "mla_decode"),
    "sparse_step": ("sparse_mla",),
    "MLAAttention": ("mla_decode", "sparse_mla"),
    "generate": ("mla_decode", "sparse_mla"),
}


@pytest.mark.slow
@pytest.mark.parametrize("workload", SMALL)
def test_a_wrong_kernel_does_not_pass_the_check(workload, monkeypatch):
    case = workload.build_case()
    case.check()
    for name in OPS_OF_STEPS.get(workload.op, (workload.op,)):
        mutate_kernel(monkeypatch, name)
    with pytest.raises(AssertionError):
        case.check()


@pytest.mark.parametrize("op", ["sparse_mla", "indexer_logits", "indexer_select", "batched_matmul"])
def test_a_sparse_step_checks_every_stage(op, monkeypatch):
    case = workloads("sparse-step")[1].small.build_case()
    case.check()
    mutate_kernel(monkeypatch, op)
    with pytest.raises(AssertionError):
        case.check()


def test_a_sparse_step_that_appends_no_index_key_is_wrong(monkeypatch):
    case = workloads("sparse-step")[1].small.build_case()
    monkeypatch.setattr(sparse, "append_index_keys", lambda *args, **options: None)
    with pytest.raises(AssertionError, match="index key of query"):
        case.check()


def test_the_steps_of_sparse_attention_share_their_pools():
    steps = workloads("sparse-step")
    sizes = {(each.batch.size, each.batch.kv_lens[0], each.heads, each.topk) for each in steps}
    assert sizes == {
        (b, s, 128, 2048) for b in (1, 8, 64, 128) for s in (8 << 10, 32 << 10, 128 << 10)
    }
    assert len({id(each.pool) for each in steps}) == 1
    assert steps[0].pool.latents.num_pages == 128 * 131072 // 64


def test_the_stages_of_a_step_add_up():
    step = workloads("sparse-step")[0]
    works = {name: step.work_of(name) for name in (*SEPARATE_STAGES, SELECT)}
    assert works["logits"].flops == 2 * 8192 * 64 * 128
    assert works["attend"].flops == 2 * 128 * 2048 * 1088
    assert works["absorb"].flops == works["up-project"].flops == 2 * 128 * 128 * 512
    assert works[SELECT].bytes == works["logits"].bytes + works["top-k"].bytes
    assert step.flops == sum(each.flops for name, each in works.items() if name != SELECT)
    seconds = {"read same bytes": [1.0], SELECT: [5.0, 3.0], "logits": [3.0, 4.0], "mlakit": [9.0]}
    derived = step.with_derived(seconds)
    assert list(derived) == ["mlakit", "logits", "top-k", "read same bytes"]
    assert derived["top-k"] == [2.0, 1e-9]
    del seconds["logits"]
    assert list(step.with_derived(seconds)) == ["mlakit", SELECT, "read same bytes"]


def mutate_kernel(monkeypatch, op: str) -> None:
    """The CPU kernel of an op writes zeros to the last row of its result."""

    def zero_last_row(a: Arguments) -> None:
        if op == "append_rows":  # its result is the cache
            a["layer"].payload.flatten(0, 1)[a["slots"][-1]] = 0
        elif op == "compress_rows":
            a["layer"].payload.zero_()
        else:
            a["out" if "out" in a else "q_rope_out"][-1] = 0

    replace_launcher(monkeypatch, op, by_name(after=zero_last_row), backend="cpu")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("workload", SMALL)
def test_every_baseline_can_be_called(workload):
    case = workload.build_case()
    for each in case.baselines:
        if each.name != "separate torch.compile":
            each.call()


@pytest.mark.slow
@pytest.mark.parametrize("suite", PROBLEMS)
def test_peers_are_given_the_problem_and_checked(suite):
    workload = workloads(suite)[0].small
    case = workload.build_case()
    problem = case.problem
    assert isinstance(problem, PROBLEMS[suite])
    right = solve(problem)
    width = RESULTS.get(suite, 512)
    if suite not in ("indexer", "fp8"):
        assert right.shape == (*problem.q.shape[:-1], width)
    assert case.peer_error(right) is None
    assert case.peer_error(1.0001 * right.float()) is None
    last = right.clone()
    last.view(-1, width)[-1] = 0
    assert "is wrong on" in case.peer_error(last)
    assert "is wrong on" in case.peer_error(right * torch.nan)
    assert "returned shape" in case.peer_error(right[..., :64])
    assert "returned shape" in case.peer_error(
        (right if right.ndim == 2 else right.flatten(0, -3))[:1]
    )
    assert "returned tuple" in case.peer_error((right,))


def test_a_peers_selection_is_compared_by_its_scores():
    workload = next(each for each in workloads("indexer") if each.op == "indexer_select").small
    case = workload.build_case()
    inputs = indexer.IndexerInputs.of(workload.batch, workload.heads)  # the same seed
    right = torch.topk(inputs.logits(), workload.k).indices
    assert case.peer_error(right) is None
    worst = torch.topk(inputs.logits(), workload.k, largest=False).indices
    assert "twice, or one that it does not see" in case.peer_error(worst)
    last = right.clone()
    last[-1] = inputs.logits()[-1].argsort()[: workload.k]
    assert "is wrong on" in case.peer_error(last)
    twice = right.clone()
    twice[-1, 0] = twice[-1, 1]
    assert "twice" in case.peer_error(twice)
    assert "returned tuple" in case.peer_error((right,))


def test_logits_of_a_kernel_that_multiplies_e4m3_are_compared(monkeypatch):
    monkeypatch.setattr(indexer, "uses_fp8_logits", lambda *call: True)
    workload = next(each for each in workloads("indexer") if each.op == "indexer_logits").small
    inputs = indexer.IndexerInputs.of(workload.batch, workload.heads)
    logits = inputs.logits()
    for query in inputs.queries():
        assert query.key_scales is not None
        query.assert_correct(logits)
        with pytest.raises(AssertionError, match=f"logits of {query.label}"):
            query.assert_correct(1.01 * logits)


def test_a_peer_with_a_common_error_is_wrong():
    exact = torch.randn(4, 8, 16, dtype=torch.float64)
    sample = correctness.Sample("all", slice(0, 4), [exact], [exact])
    assert correctness.peer_error(exact, [sample]) is None
    assert "cosine difference" in correctness.peer_error(exact.clamp(-0.5, 0.5), [sample])
    one_wrong = exact.clone()
    one_wrong[0, 0, 0] += 0.1 * exact.abs().max()
    assert "largest error 1.0e-01" in correctness.peer_error(one_wrong, [sample])


def test_naive_runs_of_sparse_decode_round_rows_as_the_kernel_does():
    """Rounding to float16 moves lse by more than a float32 run over exact rows allows."""
    generator = torch.Generator().manual_seed(0)
    cache = PagedLatentCache.allocate(ROW, "fp8_block128", num_pages=3, page_size=64)
    slots = torch.arange(3 * 64)
    cache.layer(0).write(slots, LATENT_STD * torch.randn(192, ROW.width, generator=generator))
    q = torch.randn(1, 128, ROW.width, generator=generator).bfloat16()
    rows = torch.randperm(192, generator=generator)[None, :128].int()
    losses = []
    for arch in (80, 90):
        with pretending(arch):
            (sample,) = sampled_queries(q, cache, rows)
        losses.append(float((sample.naive[1].double() - sample.exact[1]).abs().max()))
    assert losses[0] < 2e-6
    assert 2e-5 < losses[1] < 3e-4
