"""DeepGEMM among the peers: how it is called, why it is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mlakit import reference
from mlakit.cache import PagedLatentCache
from mlakit.tools.bench import correctness, gpu, indexer, peers
from mlakit.tools.bench.peers import deep_gemm
from mlakit.tools.bench.problems import IndexLogits, Problem, ScaledMatmul
from mlakit.tools.testing import shuffled_pages
from tests.tools.bench.fakes import solve
from tests.tools.bench.peer_fakes import DEEP_GEMM, dense_decode, install, normal, pretend_gpu

E4M3 = torch.float8_e4m3fn
with_gpu = pytest.fixture(pretend_gpu)


def index_logits(
    kv_lens: tuple[int, ...] = (130, 70), *, s_q: int = 2, heads: int = 64, page_size: int = 64
) -> IndexLogits:
    batch, max_pages = len(kv_lens), -(-max(kv_lens) // page_size)
    num_pages = batch * max_pages
    pages = torch.zeros(num_pages, page_size, 132, dtype=torch.uint8)
    layer = PagedLatentCache.wrap_index_keys(pages).layer(0)
    layer.write(torch.arange(num_pages * page_size), normal(num_pages * page_size, 128, seed=1))
    table = shuffled_pages(batch, max_pages, num_pages, torch.Generator().manual_seed(1))
    return IndexLogits(
        normal(batch, s_q, heads, 128).to(E4M3),
        normal(batch * s_q, heads, seed=2).float(),
        pages,
        table.int(),
        torch.tensor(kv_lens, dtype=torch.int32),
        max(kv_lens),
    )


def scaled_matmul(m: int = 5, n: int = 256, k: int = 384) -> ScaledMatmul:
    generator = torch.Generator().manual_seed(4)
    a_scale, b_scale = (
        0.5 + torch.rand(*shape, generator=generator)
        for shape in ((m, -(-k // 128)), (-(-n // 128), -(-k // 128)))
    )
    a, b = normal(m, k).to(E4M3), normal(n, k, seed=1).to(E4M3)
    return ScaledMatmul(a, a_scale, b, b_scale)


def test_few_tokens_read_pages_where_they_are(with_gpu):
    fake = install(with_gpu, "deep_gemm", DEEP_GEMM)
    deep_gemm.prepare(index_logits(s_q=4))
    assert fake.calls.pop()[1][2] == 66  # pairs of CTAs
    problem = index_logits()
    call = deep_gemm.prepare(problem)
    ((name, (ends, page_size, sms), _),) = fake.calls
    assert (name, page_size, sms) == ("plan", 64, 132)
    assert (ends.dtype, ends.tolist()) == (torch.int32, [[129, 130], [69, 70]])
    assert call() is problem.weights
    name, (q, pages, weights, lens, table, schedule, columns, clean), _ = fake.calls[-1]
    assert (name, q is problem.q, weights is problem.weights) == ("paged", True, True)
    assert (pages.shape, pages.data_ptr()) == ((6, 64, 1, 132), problem.pages.data_ptr())
    assert (lens is ends, table is problem.page_table) == (True, True)
    assert (schedule, columns, clean) == ("schedule", 130, False)
    call()
    assert [each[0] for each in fake.calls] == ["plan", "paged", "paged"]


def test_a_prompt_reads_gathered_keys(with_gpu):
    fake = install(with_gpu, "deep_gemm", DEEP_GEMM)
    problem = index_logits((150,), s_q=20, heads=32)
    call = deep_gemm.prepare(problem)
    assert fake.calls == []
    assert call() is problem.weights
    ((name, (q, (keys, scales), weights, starts, ends, clean), _),) = fake.calls
    assert (name, q.shape, weights is problem.weights) == ("ragged", (20, 32, 128), True)
    assert (keys.dtype, keys.shape, scales.shape) == (E4M3, (150, 128), (150,))
    layer = PagedLatentCache.wrap_index_keys(problem.pages).layer(0)
    slots = (problem.page_table[0].long()[:, None] * 64 + torch.arange(64)).flatten()[:150]
    assert torch.equal(keys.float() * scales[:, None], layer.read(slots))
    assert starts.tolist() == [0] * 20
    assert ends.tolist() == list(range(131, 151))
    assert clean is False


def test_a_selection_is_that_of_clean_logits(with_gpu):
    fake = install(with_gpu, "deep_gemm", DEEP_GEMM)
    problem = index_logits((150,), s_q=20, heads=32)
    (baseline,) = indexer.deep_gemm_select(problem, 5)
    assert baseline.name == "deep_gemm, torch.topk"
    assert torch.equal(baseline.call(), problem.weights.topk(5).indices)
    ((name, arguments, _),) = fake.calls
    assert (name, arguments[-1]) == ("ragged", True)
    assert indexer.deep_gemm_select(index_logits(s_q=3), 5) == []


def test_a_matmul_has_its_scales_laid_out_before_the_call(with_gpu):
    fake = install(with_gpu, "deep_gemm", DEEP_GEMM)
    problem = scaled_matmul()
    call = deep_gemm.prepare(problem)
    assert [name for name, _, _ in fake.calls] == ["layout"]
    out = call()
    assert (out.dtype, out.shape, bool((out == 3).all())) == (torch.bfloat16, (5, 256), True)
    _, ((a, a_scale), (b, b_scale), _), _ = fake.calls[-1]
    assert (a is problem.a, b is problem.b, b_scale is problem.b_scale) == (True, True, True)
    assert torch.equal(a_scale, problem.a_scale)
    assert a_scale.stride() == (1, 5)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (index_logits(page_size=16), "supports a page size of 64, not 16"),
        (index_logits(s_q=3), "needs one request for 3 new tokens, got 2"),
        (scaled_matmul(k=200), "needs a multiple of 128 for k, got 200"),
    ],
    ids=["page", "requests", "k"],
)
def test_it_refuses_with_a_reason(with_gpu, problem, reason):
    install(with_gpu, "deep_gemm", DEEP_GEMM)
    assert peers.baselines(problem) == ([], [("deep_gemm", reason)])


def test_other_suites_do_not_name_it(monkeypatch):
    monkeypatch.setattr(gpu, "why_not", lambda: "needs a card")
    assert "deep_gemm" not in dict(peers.baselines(dense_decode())[1])
    for problem in (index_logits(), scaled_matmul()):
        assert peers.baselines(problem) == ([], [("deep_gemm", "needs a card")])


def on_gpu(problem: Problem) -> Problem:
    tensors = {n: v.cuda() for n, v in vars(problem).items() if isinstance(v, Tensor)}
    return replace(problem, **tensors)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "problem",
    [
        index_logits((300, 70), s_q=1),
        index_logits(s_q=2),
        index_logits((130, 70, 500), s_q=4),
        index_logits((700,), s_q=200),
        scaled_matmul(),
        scaled_matmul(m=130, n=512, k=1024),
    ],
    ids=["one-query", "two-queries", "four-queries", "prompt", "matmul", "matmul-large"],
)
def test_it_matches_the_oracle(problem):
    if reason := deep_gemm.PEER.why_unavailable():
        pytest.skip(reason)
    (baseline,), _ = peers.baselines(on_gpu(problem))
    want = solve(problem).double()
    got = baseline.call()[:, : want.shape[1]].cpu().double()
    seen = ~want.isnan()  # it leaves the others unwritten
    want, got = (each.masked_fill(~seen, 0) for each in (want, got))
    sample = correctness.Sample("all rows", slice(0, len(want)), [want], [want])
    assert correctness.peer_error(got, [sample]) is None


def test_the_oracle_of_a_prompt_hides_later_keys():
    problem = index_logits((150,), s_q=20, heads=4)
    scores = solve(problem)
    assert scores[0, :131].isfinite().all()
    assert scores[0, 131:].isnan().all()
    first = reference.indexer_logits(
        problem.q[0, :1],
        problem.weights[:1],
        [
            PagedLatentCache.wrap_index_keys(problem.pages)
            .layer(0)
            .read((problem.page_table[0].long()[:, None] * 64 + torch.arange(64)).flatten()[:131])
        ],
        [1],
        dtype=torch.float32,
    )
    sample = correctness.Sample("the first", slice(0, 1), [first.double()], [first])
    assert correctness.peer_error(scores[:1, :131], [sample]) is None
