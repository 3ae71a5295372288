"""`mlakit check --launches --op indexer_logits`: its oracle, what it finds, what it draws."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from mlakit import dispatch, reference
from mlakit.geometry import RowShape
from mlakit.masks import CAUSAL, NULL, Mask
from mlakit.selfcheck import Settings, random_launches, run
from mlakit.specs import Problem
from mlakit.testing import assert_matches
from mlakit.workloads import IndexerLaunch
from mlakit.workloads.decode_launch import Queries
from mlakit.workloads.fp8_scores import fp8_logits
from mlakit.workloads.indexer_launch import score
from tests.kernel_launchers import by_name
from tests.mutations import Mutation, of_kernel
from tests.ops.mutations.changes import After, Before, keyless, unmasked, with_a_stray_write

OP = "indexer_logits"


@pytest.mark.parametrize("mask", [CAUSAL, NULL, Mask("sliding_window_causal", 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_requests_scored_together_give_what_the_reference_gives(mask, dtype):
    q_lens, kv_lens, keys = (1, 0, 4, 2, 1), (7, 9, 3, 0, 16), 16
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, keys, 12, generator=generator, dtype=torch.float64)
    q = torch.randn(sum(q_lens), 3, 12, generator=generator, dtype=torch.float64)
    weights = torch.randn(sum(q_lens), 3, generator=generator, dtype=torch.float64)
    queries = Queries.of(q_lens, kv_lens, mask, keys, torch.device("cpu"))
    got = score(q, weights, rows, queries, dtype=dtype)
    own = [part[:kv_len] for part, kv_len in zip(rows, kv_lens, strict=True)]
    exact, naive = (
        reference.indexer_logits(q, weights, own, q_lens, mask=mask, dtype=each)
        for each in (torch.float64, dtype)
    )
    assert_matches("logits", got[:, : exact.shape[1]], exact, naive)


def test_the_naive_run_accumulates_fp8_products():
    generator = torch.Generator().manual_seed(0)
    e4m3 = torch.randn(4, 70, 128, generator=generator).to(torch.float8_e4m3fn).double()
    q, stored, weights = e4m3[:2, :5], e4m3[2:], torch.randn(2, 5, generator=generator)
    scales = torch.rand(2, 70, generator=generator, dtype=torch.float64)
    queries = Queries.of((1, 1), (70, 70), NULL, 70, torch.device("cpu"))
    keys = stored * scales[..., None]
    got = score(q, weights, keys, queries, key_scales=scales, dtype=torch.float32)
    for i in range(2):
        want = fp8_logits(q[i], weights[i], keys[i], scales[i])
        assert torch.allclose(got[i], want, rtol=1e-5, atol=1e-4)
    assert not torch.allclose(got, score(q, weights, keys, queries).float(), rtol=1e-5, atol=1e-4)


def every_launch_is_right() -> None:
    outcome = run(Settings((OP,), seed=0, launches=100, device="cpu", backend="cpu", minutes=None))
    if outcome.failure is not None:
        raise AssertionError(outcome.failure.error)


def mutation(name: str, before: Before = lambda a: {}, after: After = lambda a: None) -> Mutation:
    return of_kernel(OP, name, by_name(before, after), every_launch_is_right)


def with_one_logit_off(a) -> None:
    if 65 in a["kv_lens"].tolist():
        a["out"][-1, 0] += 0.01


MUTATIONS = [
    mutation("drops the last key", keyless),
    mutation("does not mask the tail", unmasked),
    mutation("scales weights by 1.02", lambda a: {"weights": a["weights"] * 1.02}),
    mutation("is off in one logit where a request has 65 keys", after=with_one_logit_off),
    mutation("leaves a row unwritten", after=lambda a: a["out"][-1:].fill_(torch.nan)),
    mutation("leaves the last column unwritten", after=lambda a: a["out"][:, -1:].fill_(0.0)),
    mutation("writes to the cache", after=with_a_stray_write),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_mutant_is_killed_within_a_hundred_launches(mutation, monkeypatch):
    mutation.assert_killed(monkeypatch)


@pytest.mark.parametrize("wrong_call", [2, 3])
def test_several_calls_give_the_same_bits(monkeypatch, wrong_call):
    from tests.kernel_launchers import replace_launcher

    calls: list[int] = []

    def wrong_once(a) -> None:
        calls.append(1)
        if len(calls) == wrong_call:
            a["out"][0, 0] *= 1 + 2.0**-20

    replace_launcher(monkeypatch, OP, by_name(after=wrong_once))
    with pytest.raises(AssertionError, match=f"logits of call {wrong_call}: "):
        IndexerLaunch(calls=3, heads=2).run("cpu", "cpu")


def drawn(number: int) -> list[IndexerLaunch]:
    settings = Settings((OP,), 5, "cuda", "hopper", launches=1)
    return [launch for _, launch in islice(random_launches(settings), number)]


def test_launches_are_those_where_kernels_go_wrong():
    launches = drawn(600)
    lengths = {kv_len for launch in launches for kv_len in launch.kv_lens}
    assert lengths >= {0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257}
    assert max(lengths) > 3000
    assert {0, 1, 2, 3, 4, 8, 9, 30} == {n for launch in launches for n in launch.q_lens}
    assert {len(launch.kv_lens) for launch in launches} >= {1, 2, 32}
    pairs = (max(each.kv_lens) * len(each.kv_lens) * max(each.q_lens) for each in launches)
    assert max(pairs) <= 48_000
    # a batch of one token block, and batches in which a request has more queries than keys
    assert any(len(each.kv_lens) == 1 and each.q_lens[0] <= 4 for each in launches)
    assert any(
        kv_len < q_len
        for each in launches
        for kv_len, q_len in zip(each.kv_lens, each.q_lens, strict=True)
    )


def test_few_kernels_are_compiled_and_all_are_hoppers():
    launches = drawn(600)
    assert len({(each.heads, each.page_size, each.mask) for each in launches}) <= 9
    for each in launches:
        problem = Problem(
            "cuda", 90, "torch.float8_e4m3fn", each.format, each.heads, each.page_size,
            RowShape(128, 0), mask=each.mask,
        )  # fmt: skip
        assert dispatch.select(OP, problem).backend == "hopper"


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("seed", range(2))
def test_launches_pass_on_the_gpu(seed, backend):
    outcome = run(Settings((OP,), seed, device="cuda", backend=backend, minutes=None, launches=20))
    assert outcome.failure is None, outcome.failure
    assert outcome.num_correct + sum(t.unsupported for t in outcome.tallies.values()) >= 20
