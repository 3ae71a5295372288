"""A GPU for `mlakit bench` where there is none: CPU tensors, a wall clock, peers by the oracle."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from mlakit import reference
from mlakit.cache import PagedLatentCache, request_slots
from mlakit.model.geometry import MLAGeometry
from mlakit.model.masks import CAUSAL, NULL
from mlakit.tools.bench import ceilings, gpu, gpu_timers, peers
from mlakit.tools.bench.ceilings import Ceilings
from mlakit.tools.bench.measure import Spread, WallClock
from mlakit.tools.bench.problems import (
    DenseDecode,
    DensePrefill,
    IndexLogits,
    Problem,
    ScaledMatmul,
    SparseDecode,
    SparsePrefill,
)
from mlakit.tools.bench.report import LeftOut, Report, Row
from mlakit.tools.bench.suite import Baseline

CEILINGS = Ceilings(read_gb_s=4000.0, copy_gb_s=3500.0, bf16_tflops=700.0, fp8_tflops=1200.0)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of GPU suites on the CPU, where the CPU backend takes them."""
    monkeypatch.setattr(gpu, "why_not", lambda: None)
    monkeypatch.setattr(gpu, "DEVICE", torch.device("cpu"))
    nothing = Baseline("empty kernel", lambda: None, sets_target=False)
    monkeypatch.setattr(gpu, "empty_kernel_baseline", lambda: nothing)
    monkeypatch.setattr(gpu_timers, "timer_for", lambda mode: WallClock())
    monkeypatch.setattr(gpu_timers, "captured", lambda call: call)
    monkeypatch.setattr(ceilings, "measure", lambda timer, after_one: CEILINGS)
    monkeypatch.setattr(peers, "baselines", peers_by_oracle)
    monkeypatch.setattr(peers, "origins", lambda: {"flash_mla": "the wheel"})


def peers_by_oracle(
    problem: Problem, only_grid_peers: bool = False
) -> tuple[list[Baseline], list[tuple[str, str]]]:
    """A right peer, a wrong one, one that fails when it is called, one that is not there."""

    def right() -> torch.Tensor:
        return solve(problem)

    def failing() -> torch.Tensor:
        raise RuntimeError("no kernel\nfor this")

    names = {DensePrefill: "fa3", IndexLogits: "deep_gemm", ScaledMatmul: "deep_gemm"}
    present = [
        Baseline(names.get(type(problem), "flash_mla"), right),
        Baseline("sdpa", lambda: 1.1 * right()),
        Baseline("eager", failing),
    ]
    asked = present[:1] if only_grid_peers else present
    return asked, [("flashinfer", "is not installed")]


def solve(problem: Problem) -> torch.Tensor:
    """What a peer returns, by the oracle in float32, from nothing but the problem."""
    if isinstance(problem, IndexLogits):
        return solve_logits(problem)
    if isinstance(problem, ScaledMatmul):
        return reference.scaled_mm_fp8(
            problem.a, problem.a_scale.t(), problem.b, problem.b_scale, n_group=128, k_group=128
        ).bfloat16()
    options = {"softmax_scale": problem.softmax_scale, "dtype": torch.float32}
    q = problem.q
    if isinstance(problem, DensePrefill):
        starts = problem.starts.tolist()
        d_n = q.shape[-1] - 64
        mask = CAUSAL if problem.causal else NULL
        heads = problem.k[:, 0, d_n:], problem.v  # the rope part is one for all heads
        out, _ = reference.mla_prefill(
            q, problem.k[..., :d_n], *heads, starts, starts, mask=mask, **options
        )
        assert problem.max_len == max(b - a for a, b in pairwise(starts))
        return out
    if isinstance(problem, DenseDecode):
        rows = problem.pages.flatten(0, 1)
        page_size = problem.pages.shape[1]
        requests = []
        for table, kv_len in zip(problem.page_table, problem.kv_lens.tolist(), strict=True):
            position = torch.arange(kv_len)
            slots = table.long()[position // page_size] * page_size + position % page_size
            requests.append(rows[slots])
        lengths = [q.shape[1]] * q.shape[0]
        flat = q.flatten(0, 1)
        out, _ = reference.mla_decode(flat, requests, lengths, v_width=512, **options)
        return out.view(*q.shape[:-1], 512)
    if isinstance(problem, SparsePrefill):
        out, *_ = reference.sparse_mla(q, problem.kv, problem.indices, v_width=512, **options)
        return out
    assert isinstance(problem, SparseDecode)
    row = MLAGeometry.preset("deepseek-v3").row
    layer = PagedLatentCache.wrap(problem.pages, row, format="fp8_block128").layer(0)
    pool = layer.read(torch.arange(layer.num_slots))
    lists = problem.indices.flatten(0, 1)
    out, *_ = reference.sparse_mla(q.flatten(0, 1), pool, lists, v_width=512, **options)
    return out.view(*q.shape[:-1], 512)


def solve_logits(problem: IndexLogits) -> torch.Tensor:
    """The scores of visible keys; the others are NaN, as a peer may leave them unwritten."""
    layer = PagedLatentCache.wrap_index_keys(problem.pages).layer(0)
    batch, s_q = problem.q.shape[:2]
    requests = zip(range(batch), problem.kv_lens.tolist(), strict=True)
    keys = [layer.read(request_slots(problem.page_table, 64, b, 0, n)) for b, n in requests]
    scores = reference.indexer_logits(
        problem.q.flatten(0, 1), problem.weights, keys, [s_q] * batch, dtype=torch.float32
    )
    out = torch.full((batch * s_q, problem.max_kv_len), torch.nan)
    out[:, : scores.shape[1]] = scores.masked_fill(scores == -torch.inf, torch.nan)
    return out


def row(
    workload: str, implementation: str, us: float, share: float = 0.01, **others: object
) -> Row:
    """A row of a report whose rounds lie within `share` around `us`."""
    facts: dict[str, object] = {
        "op": "mla_decode",
        "rounds": 30,
        "us": around(us, share),
        "flops": 10**9,
        "bytes": 10**7,
        "speedup": None,
        "min_speedup": None,
    }
    return Row(workload=workload, implementation=implementation, **(facts | others))  # type: ignore[arg-type]


def around(value: float, share: float = 0.01) -> Spread:
    return Spread(value * (1 - share), value, value * (1 + share))


def report(*rows: Row, suite: str = "decode", **others: object) -> Report:
    facts: dict[str, object] = {
        "command": "mlakit bench decode --peers",
        "environment": {"gpu": "H200 <test>", "cpu": "a CPU", "cpu_features": ["avx2"]},
        "left_out": [LeftOut("w", "eager", "is too slow & old")],
        "mode": "cold",
        "ceilings": CEILINGS,
    }
    return Report(suite=suite, rows=list(rows), **(facts | others))  # type: ignore[arg-type]
