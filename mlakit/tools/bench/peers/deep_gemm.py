"""DeepGEMM: an installed `deep_gemm`, or the one in vLLM's wheel. nvcc compiles at the first use.

Few new tokens per request read the pages of keys as they are. Longer ones (a prompt) read gathered
keys, as in vLLM; they are gathered before the clock starts. Scores of keys that are not visible are
left unwritten, as in vLLM, unless asked for. Scales are brought into the layout of its matmul
before the clock starts.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache, request_slots
from mlakit.tools.bench.peers import fetched
from mlakit.tools.bench.peers.peer import Call, Peer, Unsupported, installed_or_fetched
from mlakit.tools.bench.problems import IndexLogits, ScaledMatmul

# new tokens per request that the paged kernel supports: CTAs that share the keys of a request
PAGED_QUERIES = {1: 1, 2: 1, 4: 2}
PAGE_SIZE = 64  # of the paged kernel on Hopper
GROUP = 128  # columns per scale


def load() -> ModuleType:
    return installed_or_fetched("deep_gemm", fetched.DEEP_GEMM, _load_fetched)


def _load_fetched(folder: Path) -> ModuleType:
    return fetched.load_package(folder / fetched.DEEP_GEMM, "deep_gemm")


def prepare(problem: IndexLogits | ScaledMatmul, *, clean: bool = False) -> Call:
    """clean  scores of keys that are not visible are −inf"""
    match problem:
        case IndexLogits():
            if problem.q.shape[1] in PAGED_QUERIES:
                return _paged_logits(load(), problem, clean)
            return _ragged_logits(load(), problem, clean)
        case ScaledMatmul():
            return _scaled_matmul(load(), problem)


def _paged_logits(library: ModuleType, problem: IndexLogits, clean: bool) -> Call:
    page_size = problem.pages.shape[1]
    if page_size != PAGE_SIZE:
        raise Unsupported(f"supports a page size of {PAGE_SIZE}, not {page_size}")
    pages = problem.pages.unsqueeze(2)  # [pages, page_size, 1, 132]
    ends = _ends(problem).unflatten(0, problem.q.shape[:2])
    num_clusters = library.get_num_sms() // PAGED_QUERIES[problem.q.shape[1]]
    schedule = library.get_paged_mqa_logits_metadata(ends, page_size, num_clusters)

    def call() -> Tensor:
        logits: Tensor = library.fp8_paged_mqa_logits(
            problem.q,
            pages,
            problem.weights,
            ends,
            problem.page_table,
            schedule,
            problem.max_kv_len,
            clean,
        )
        return logits

    return call


def _ragged_logits(library: ModuleType, problem: IndexLogits, clean: bool) -> Call:
    batch, s_q = problem.q.shape[:2]
    if batch > 1:
        # its columns are the keys of all requests
        raise Unsupported(f"needs one request for {s_q} new tokens, got {batch}")
    layer = PagedLatentCache.wrap_index_keys(problem.pages).layer(0)
    slots = request_slots(problem.page_table, layer.page_size, 0, 0, int(problem.kv_lens[0]))
    page, offset = slots // layer.page_size, slots % layer.page_size
    assert layer.scales is not None
    keys = layer.payload.view(torch.uint8)[page, offset].view(torch.float8_e4m3fn)
    scales = layer.scales[page, offset].squeeze(-1)
    ends = _ends(problem)
    starts = torch.zeros_like(ends)
    q = problem.q.flatten(0, 1)

    def call() -> Tensor:
        logits: Tensor = library.fp8_mqa_logits(
            q, (keys, scales), problem.weights, starts, ends, clean
        )
        return logits

    return call


def _ends(problem: IndexLogits) -> Tensor:
    """int32 [b * s_q]: one past the last key that each query sees."""
    s_q = problem.q.shape[1]
    newest = torch.arange(1 - s_q, 1, dtype=torch.int32, device=problem.q.device)
    return (problem.kv_lens[:, None] + newest).int().flatten()


def _scaled_matmul(library: ModuleType, problem: ScaledMatmul) -> Call:
    m, k = problem.a.shape
    n = problem.b.shape[0]
    if k % GROUP:
        raise Unsupported(f"needs a multiple of {GROUP} for k, got {k}")
    a_scale = library.get_mn_major_tma_aligned_tensor(problem.a_scale)
    a, b = (problem.a, a_scale), (problem.b, problem.b_scale)

    def call() -> Tensor:
        out = problem.a.new_empty(m, n, dtype=torch.bfloat16)
        library.fp8_gemm_nt(a, b, out)
        return out

    return call


PEER = Peer(
    "deep_gemm",
    "DeepGEMM",
    load,
    prepare,
    packages=("deep_gemm",),
    problems=(IndexLogits, ScaledMatmul),
)
