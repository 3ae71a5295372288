"""Peers of the benchmarks: how they are called, why they are left out."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from mlakit import reference
from mlakit.formats import row_codec
from mlakit.model.geometry import RowShape
from mlakit.model.masks import CAUSAL, NULL
from mlakit.tools.bench import gpu, peers
from mlakit.tools.bench.peers import eager, fa3, flash_mla, flashinfer, sdpa
from mlakit.tools.bench.peers.peer import Unsupported
from mlakit.tools.bench.problems import (
    DenseDecode,
    DensePrefill,
    Problem,
    SparseDecode,
    SparsePrefill,
)
from tests.tools.bench.peer_fakes import (
    FA3_OF_VLLM,
    FLASH_MLA,
    SCALE,
    dense_decode,
    install,
    normal,
    pretend_gpu,
)

ROW = RowShape(512, 64)
CODEC = row_codec("fp8_block128", ROW)
with_gpu = pytest.fixture(pretend_gpu)


def listed(*shape: int, num_rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(num_rows, shape, generator=generator).int()


def sparse_prefill(*, heads: int = 16, topk: int = 128) -> SparsePrefill:
    kv = normal(300, 576, seed=2, size=0.3)
    return SparsePrefill(normal(5, heads, 576), kv, listed(5, topk, num_rows=300), SCALE)


def sparse_decode(*, heads: int = 16, topk: int = 64) -> SparseDecode:
    # scales that bf16 holds: FlashMLA rounds them to it
    stored, _ = CODEC.encode(normal(6 * 64, 576, seed=2, size=0.3), power_of_two=True)
    pages = stored.view(6, 64, 656)
    return SparseDecode(normal(3, 2, heads, 576), pages, listed(3, 2, topk, num_rows=6 * 64), SCALE)


def dense_prefill(lens: tuple[int, ...] = (70, 70), *, causal: bool = True) -> DensePrefill:
    tokens = sum(lens)
    starts = torch.tensor([0, *lens]).cumsum(0).int()
    q, k, v = (normal(tokens, 4, width, seed=width + i) for i, width in enumerate((192, 192, 128)))
    return DensePrefill(q, k, v, starts, max(lens), SCALE, causal)


def on_gpu(problem: Problem) -> Problem:
    moved = {
        name: value.cuda() for name, value in vars(problem).items() if isinstance(value, Tensor)
    }
    return replace(problem, **moved)


def exact(problem: Problem) -> Tensor:
    """What the oracle says, float64."""
    scale = {"softmax_scale": problem.softmax_scale}
    match problem:
        case DenseDecode():
            batch, s_q, heads, _ = problem.q.shape
            rows = [
                problem.pages[pages.long()].flatten(0, 1)[:length]
                for pages, length in zip(problem.page_table, problem.kv_lens.tolist(), strict=True)
            ]
            out, _ = reference.mla_decode(
                problem.q.flatten(0, 1),
                rows,
                [s_q] * batch,
                v_width=512,
                mask=CAUSAL if problem.causal else NULL,
                **scale,
            )
            return out.view(batch, s_q, heads, 512)
        case SparsePrefill():
            return reference.sparse_mla(
                problem.q, problem.kv, problem.indices, v_width=512, **scale
            )[0]
        case SparseDecode():
            pool = CODEC.decode(problem.pages.flatten(0, 1), None, dtype=torch.float64)
            q, rows = problem.q.flatten(0, 1), problem.indices.flatten(0, 1)
            out = reference.sparse_mla(q, pool, rows, v_width=512, **scale)[0]
            return out.unflatten(0, problem.q.shape[:2])
        case DensePrefill():
            out = torch.zeros(problem.v.shape, dtype=torch.float64, device=problem.q.device)
            nothing = problem.q.new_zeros(problem.q.shape[0], 0)
            for own in (slice(*ends) for ends in pairwise(problem.starts.tolist())):
                ends = [0, own.stop - own.start]
                out[own], _ = reference.mla_prefill(
                    problem.q[own],
                    problem.k[own],
                    nothing[own],
                    problem.v[own],
                    ends,
                    ends,
                    mask=CAUSAL if problem.causal else NULL,
                    **scale,
                )
            return out


PROBLEMS = {
    "dense-decode": dense_decode(),
    "dense-decode-one-query": dense_decode((64, 64), s_q=1),
    "dense-decode-64-heads": dense_decode((300, 1), s_q=1, heads=64),
    "dense-decode-unmasked": replace(dense_decode(), causal=False),
    "sparse-prefill": sparse_prefill(),
    "sparse-decode": sparse_decode(),
    "dense-prefill": dense_prefill(),
    "dense-prefill-unmasked": dense_prefill(causal=False),
    "dense-prefill-ragged": dense_prefill((70, 3, 129)),
}


def assert_close(got: Tensor, problem: Problem) -> None:
    """Each row within 2 %: bf16 weights make 0.2, bf16 scores, as eager has them, up to 1."""
    want = exact(problem)
    assert got.shape == want.shape
    error = (got.double() - want).norm(dim=-1) / want.norm(dim=-1)
    assert error.max() < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
def test_eager_matches_the_oracle(name, monkeypatch):
    monkeypatch.setattr(gpu, "why_not", lambda: "needs a card")
    problem = PROBLEMS[name]
    (baseline,), left_out = peers.baselines(problem)
    assert baseline.name == "eager"
    assert {name for name, _ in left_out} == {"flash_mla", "fa3", "flashinfer", "sdpa"}
    assert_close(baseline.call(), problem)


def test_the_grid_asks_fast_peers_only(monkeypatch):
    monkeypatch.setattr(gpu, "why_not", lambda: "needs a card")
    ready, left_out = peers.baselines(dense_decode(), only_grid_peers=True)
    fast = {"flash_mla", "fa3", "flashinfer", "sdpa"}
    assert (ready, {name for name, _ in left_out}) == ([], fast)


@pytest.mark.parametrize("make", [sparse_prefill, sparse_decode])
def test_eager_skips_what_is_no_row(make):
    problem = make()
    problem.indices[..., ::3] = -1
    problem.indices[..., 1] = 2**31 - 1
    assert_close(eager.prepare(problem)(), problem)


def test_eager_refuses_requests_that_see_nothing():
    problem = sparse_prefill()
    problem.indices[2] = -1
    for each in (problem, replace(dense_decode(), kv_lens=torch.tensor([130, 1]).int())):
        with pytest.raises(Unsupported, match="no keys"):
            eager.prepare(each)


def test_eager_refuses_what_does_not_fit(monkeypatch):
    like = SimpleNamespace(is_cuda=True, device="cuda")
    for name, value in (
        ("memory_reserved", 3 << 30),
        ("memory_allocated", 1 << 30),
        ("mem_get_info", (5 << 30, 9 << 30)),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    eager._require_memory(like, 7 << 30)
    with pytest.raises(Unsupported, match="needs 8 GiB, and 7 are free"):
        eager._require_memory(like, 8 << 30)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PROBLEMS if name.startswith("dense-prefill")])
def test_sdpa_matches_the_oracle(name):
    problem = PROBLEMS[name]
    if name.endswith("ragged"):
        with pytest.raises(Unsupported, match=r"needs equal lengths, got \[3, 70, 129\]"):
            sdpa.dense_prefill(problem, SDPBackend.MATH)
    else:
        assert_close(sdpa.dense_prefill(problem, SDPBackend.MATH)(), problem)


def test_flash_mla_decodes_pages_where_they_are(with_gpu):
    fake = install(with_gpu, "flash_mla", FLASH_MLA)
    problem = dense_decode(heads=3)
    call = flash_mla.prepare(problem)
    assert fake.calls == [("plan", (problem.kv_lens, 2 * 3, 1), {})]
    assert torch.equal(call(), problem.q[..., :512])
    name, args, kwargs = fake.calls[1]
    q, pages, table, lens, width, schedule, splits = args
    assert (name, q is problem.q, table is problem.page_table, lens is problem.kv_lens) == (
        "decode",
        True,
        True,
        True,
    )
    assert pages.shape == (*problem.pages.shape[:2], 1, 576)
    assert pages.data_ptr() == problem.pages.data_ptr()
    assert (width, schedule, splits) == (512, "schedule", "splits")
    assert kwargs == {"softmax_scale": SCALE, "causal": True}
    call()
    assert [each[0] for each in fake.calls] == ["plan", "decode", "decode"]


@pytest.mark.parametrize(("heads", "padded"), [(16, 64), (64, 64), (65, 128), (128, 128)])
def test_flash_mla_gets_heads_it_has_a_kernel_for(with_gpu, heads, padded):
    fake = install(with_gpu, "flash_mla", FLASH_MLA)
    problem = sparse_prefill(heads=heads)
    assert torch.equal(flash_mla.prepare(problem)(), problem.q[..., :512])
    (_, (q, kv, indices, scale), _) = fake.calls[-1]
    assert (q.shape, kv.shape, indices.shape) == ((5, padded, 576), (300, 1, 576), (5, 1, 128))
    assert kv.data_ptr() == problem.kv.data_ptr()
    assert scale == SCALE
    problem = sparse_decode(heads=heads)
    assert torch.equal(flash_mla.prepare(problem)(), problem.q[..., :512])
    (_, (q, pages, *nothing, width, schedule), kwargs) = fake.calls[-1]
    assert (q.shape, pages.shape) == ((3, 2, padded, 576), (6, 64, 1, 656))
    assert (nothing, width, schedule) == ([None, None], 512, "schedule")
    assert kwargs == {"softmax_scale": SCALE, "is_fp8_kvcache": True, "indices": problem.indices}


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (dense_decode(page_size=16), "supports a page size of 64, not 16"),
        (sparse_prefill(topk=64), "needs a multiple of 128 for topk, got 64"),
        (sparse_decode(topk=65), "needs a multiple of 64 for topk, got 65"),
        (sparse_decode(heads=129), "its sparse kernels support up to 128 heads, not 129"),
        (dense_prefill(), "its dense prefill supports sm_100 only"),
    ],
    ids=str,
)
def test_flash_mla_refuses_with_a_reason(with_gpu, problem, reason):
    install(with_gpu, "flash_mla", FLASH_MLA)
    assert ("flash_mla", reason) in peers.baselines(problem)[1]


FA3 = """
def flash_attn_varlen_func(q, k, v, **kwargs):
    calls.append(("attend", (q, k, v), kwargs))
    return v.clone(), None
flash_attn_with_kvcache = record("attend", lambda q, k, v, qv, **kwargs: qv.clone())
get_scheduler_metadata = record("plan", lambda **kwargs: "schedule")
"""
PLAN = {
    "batch_size": 2,
    "max_seqlen_q": 2,
    "num_heads_q": 16,
    "num_heads_kv": 1,
    "headdim": 64,
    "headdim_v": 512,
    "qkv_dtype": torch.bfloat16,
    "page_size": 64,
    "causal": True,
}


def views(problem: DenseDecode, k: Tensor, v: Tensor) -> bool:
    """Are keys and values the two kinds of columns of the pages, where they are?"""
    pages = problem.pages
    shapes = (k.shape, v.shape) == ((*pages.shape[:2], 1, 64), (*pages.shape[:2], 1, 512))
    starts = (k.data_ptr(), v.data_ptr()) == (pages[..., 512:].data_ptr(), pages.data_ptr())
    return shapes and starts and k.stride(0) == v.stride(0) == pages.stride(0)


def test_fa3_of_vllm_decodes_pages_where_they_are(with_gpu):
    fake = install(with_gpu, "flash_attn_interface", FA3_OF_VLLM)
    problem = dense_decode()
    call = fa3.prepare(problem)
    (_, _, plan) = fake.calls[0]
    assert plan.pop("cache_seqlens") is problem.kv_lens
    assert plan.pop("cu_seqlens_q").tolist() == [0, 2, 4]
    assert plan == {**PLAN, "max_seqlen_k": 130}
    assert torch.equal(call(), problem.q[..., :512])
    (_, (q, k, v, q_v), kwargs) = fake.calls[1]
    assert views(problem, k, v)
    assert torch.equal(torch.cat([q_v, q], -1), problem.q.flatten(0, 1))
    assert q.data_ptr() == problem.q[..., 512:].data_ptr()
    assert kwargs.pop("cu_seqlens_q").tolist() == [0, 2, 4]
    assert kwargs.pop("seqused_k") is problem.kv_lens
    assert kwargs.pop("block_table") is problem.page_table
    assert kwargs == {
        "max_seqlen_q": 2,
        "max_seqlen_k": 130,
        "softmax_scale": SCALE,
        "causal": True,
        "scheduler_metadata": "schedule",
        "fa_version": 3,
    }


def test_fa3_of_upstream_decodes_pages_where_they_are(with_gpu):
    fake = install(with_gpu, "flash_attn_interface", FA3)
    problem = dense_decode()
    call = fa3.prepare(problem)
    assert torch.equal(call(), problem.q[..., :512])
    (_, _, plan), (_, (q, k, v), kwargs) = fake.calls
    assert plan.pop("cache_seqlens") is problem.kv_lens
    assert plan == {**PLAN, "max_seqlen_k": 64 * problem.page_table.shape[1]}
    assert views(problem, k, v)
    assert torch.equal(torch.cat([kwargs.pop("qv"), q], -1), problem.q)
    assert kwargs.pop("cache_seqlens") is problem.kv_lens
    assert kwargs.pop("page_table") is problem.page_table
    assert kwargs == {"softmax_scale": SCALE, "causal": True, "scheduler_metadata": "schedule"}


def test_fa3_reads_lists_as_pages_of_one_row(with_gpu):
    fake = install(with_gpu, "flash_attn_interface", FA3_OF_VLLM)
    problem = sparse_prefill()
    assert torch.equal(fa3.prepare(problem)(), problem.q[..., :512])
    ((_, (_, k, v, _), kwargs),) = fake.calls
    assert (k.shape, v.shape) == ((300, 1, 1, 64), (300, 1, 1, 512))
    assert kwargs["scheduler_metadata"] is None
    assert kwargs["block_table"] is problem.indices
    assert kwargs["seqused_k"].tolist() == [128] * 5
    problem.indices[0, 0] = -1
    with pytest.raises(Unsupported, match="invalid indices"):
        fa3.prepare(problem)


@pytest.mark.slow
def test_fa3_is_scheduled_outside_only_for_as_many_requests_as_it_can(with_gpu):
    fake = install(with_gpu, "flash_attn_interface", FA3_OF_VLLM)
    problem = dense_decode()
    many = replace(
        problem,
        q=problem.q[:1].expand(993, -1, -1, -1),
        page_table=problem.page_table[:1].expand(993, -1),
        kv_lens=problem.kv_lens[:1].expand(993),
    )
    fa3.prepare(many)()
    assert [(name, kwargs["scheduler_metadata"]) for name, _, kwargs in fake.calls] == [
        ("attend", None)
    ]


@pytest.mark.parametrize(("source", "version"), [(FA3, None), (FA3_OF_VLLM, 3)])
def test_fa3_prefills(with_gpu, source, version):
    fake = install(with_gpu, "flash_attn_interface", source)
    problem = dense_prefill((70, 3))
    assert torch.equal(fa3.prepare(problem)(), problem.v)
    (_, (q, k, v, *_), kwargs) = fake.calls[-1]
    assert (q is problem.q, k is problem.k, v is problem.v) == (True, True, True)
    assert kwargs.pop("cu_seqlens_q") is problem.starts
    assert kwargs.pop("cu_seqlens_k") is problem.starts
    assert kwargs.pop("fa_version", None) == version
    lengths = {"max_seqlen_q": 70, "max_seqlen_k": 70}
    assert kwargs == {**lengths, "softmax_scale": SCALE, "causal": True}


FLASHINFER = """
import sys
from types import SimpleNamespace

class Wrapper:
    def __init__(self, workspace, *layout):
        calls.append(("make", (workspace, *layout), {}))
        self.plan = record("plan", lambda *args, **kwargs: None)
        self.run = record("run", lambda q, *args: args[-1] if q.shape[-1] == 192 else q.clone())
mla = SimpleNamespace(BatchMLAPagedAttentionWrapper=Wrapper)
sys.modules["flashinfer.mla"] = mla
BatchPrefillWithRaggedKVCacheWrapper = Wrapper
"""


@pytest.mark.slow
def test_flashinfer_decodes_pages_where_they_are(with_gpu):
    fake = install(with_gpu, "flashinfer", FLASHINFER)
    problem = dense_decode()
    call = flashinfer.prepare(problem)
    (_, (workspace,), _), (_, plan, _) = fake.calls
    assert (workspace.dtype, workspace.numel()) == (torch.uint8, 128 << 20)
    q_starts, starts, pages, lens, *rest = plan
    assert (q_starts.tolist(), starts.tolist()) == ([0, 2, 4], [0, 3, 5])
    assert pages.tolist() == [
        *problem.page_table[0, :3].tolist(),
        *problem.page_table[1, :2].tolist(),
    ]
    assert (starts.dtype, pages.dtype, lens is problem.kv_lens) == (torch.int32, torch.int32, True)
    bf16 = torch.bfloat16
    assert rest == [16, 512, 64, 64, True, SCALE, bf16, bf16]
    assert torch.equal(call(), problem.q[..., :512])
    (_, (q_latent, q_rope, latent, rope), _) = fake.calls[-1]
    assert torch.equal(torch.cat([q_latent, q_rope], -1), problem.q.flatten(0, 1))
    assert views(problem, rope.unsqueeze(2), latent.unsqueeze(2))


@pytest.mark.slow
def test_flashinfer_prefills(with_gpu):
    fake = install(with_gpu, "flashinfer", FLASHINFER)
    problem = dense_prefill((70, 3))
    assert torch.equal(flashinfer.prepare(problem)(), problem.v)
    (_, (_, layout), _), (_, plan, kwargs), (_, run, _) = fake.calls
    assert layout == "NHD"
    assert plan[0] is plan[1] is problem.starts
    assert plan[2:] == (4, 4, 192)
    assert kwargs == {
        "head_dim_vo": 128,
        "causal": True,
        "sm_scale": SCALE,
        "q_data_type": torch.bfloat16,
        "kv_data_type": torch.bfloat16,
    }
    assert run[2] is problem.v


def test_a_peer_that_breaks_is_left_out_with_what_it_said(with_gpu):
    install(
        with_gpu,
        "flash_mla",
        FLASH_MLA
        + """
def flash_mla_with_kvcache(*args, **kwargs):
    raise RuntimeError("no kernel for this device\\nmore of it")
""",
    )
    ready, left_out = peers.baselines(dense_decode())
    assert [each.name for each in ready] == ["eager"]
    assert ("flash_mla", "RuntimeError: no kernel for this device") in left_out


def test_the_build_of_what_is_here_is_named(with_gpu):
    install(with_gpu, "flash_mla", FLASH_MLA + '__version__ = "1.0.0"')
    assert peers.origins()["flash_mla"] == "installed, flash_mla 1.0.0"
    assert peers.origins()["eager"] == f"torch {torch.__version__}"
    assert "fa3" not in peers.origins()


def test_without_a_gpu_only_eager_is_present(monkeypatch):
    monkeypatch.setattr(gpu, "why_not", lambda: "needs a card")
    names = ("flash_mla", "fa3", "deep_gemm", "flashinfer", "sdpa")
    assert peers.present() == {**dict.fromkeys(names, "needs a card"), "eager": None}


@pytest.mark.usefixtures("with_gpu")
def test_what_is_not_installed_says_how_to_get_it():
    why = peers.present()
    assert why["flash_mla"].startswith("ModuleNotFoundError: No module named 'flash_mla', and it")
    assert why["fa3"].endswith(": run mlakit bench --fetch-peers")
    assert why["flashinfer"] == "ModuleNotFoundError: No module named 'flashinfer'"


def test_the_drop_in_is_no_peer(with_gpu):
    from mlakit.compat.flash_mla import install, uninstall

    install(force=True)
    try:
        assert "the installed flash_mla is mlakit's drop-in, and" in peers.present()["flash_mla"]
    finally:
        uninstall()


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_peer_here_matches_the_oracle(name):
    """Those that are installed, and those that were fetched."""
    problem = on_gpu(PROBLEMS[name])
    ready, left_out = peers.baselines(problem)
    assert "eager" in {each.name for each in ready}
    refusals = ("its ", "does not support", "supports ", "needs ")
    absent = {peer for peer, reason in peers.present().items() if reason}
    broken = [
        each for each in left_out if each[0] not in absent and not each[1].startswith(refusals)
    ]
    assert not broken
    for each in ready:
        assert_close(each.call(), problem)
