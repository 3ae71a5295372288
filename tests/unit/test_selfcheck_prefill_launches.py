"""Random launches of `mla_prefill`: the oracle, mutants, and what is drawn."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch

from mlakit import dispatch, reference
from mlakit.masks import CAUSAL, NULL, Mask
from mlakit.selfcheck import Settings, random_launches, run
from mlakit.specs import Problem
from mlakit.testing import assert_matches
from mlakit.workloads import PrefillLaunch
from mlakit.workloads.inputs import DTYPES
from mlakit.workloads.paged import starts_of
from mlakit.workloads.prefill_launch import _visible, attend
from tests.kernel_launchers import by_name, replace_launcher
from tests.mutations import Mutation, of_kernel
from tests.ops.mutations.changes import After, Before, rescaled, unmasked, without

OP = "mla_prefill"
MASKS = (CAUSAL, NULL, Mask("sliding_window_causal", 5), Mask("chunked", 4))


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_queries_attended_together_give_what_the_reference_gives(mask, has_sink, dtype):
    q_lens, kv_lens = (1, 0, 4, 2, 9), (7, 9, 3, 0, 16)
    own = torch.Generator().manual_seed(0)
    tokens, keys = sum(q_lens), sum(kv_lens)
    shapes = ((tokens, 3, 12), (keys, 3, 8), (keys, 4), (keys, 3, 5))
    tensors = tuple(torch.randn(shape, generator=own, dtype=torch.float64) for shape in shapes)
    sink = torch.tensor([0.5, -torch.inf, torch.inf]) if has_sink else None
    given = {"softmax_scale": -0.7, "sink": sink}
    visible = [
        _visible(mask, q_len, kv_len, torch.device("cpu"))
        for q_len, kv_len in zip(q_lens, kv_lens, strict=True)
    ]
    got = attend(tensors, visible, **given, dtype=dtype)
    starts = (starts_of(q_lens), starts_of(kv_lens))
    naive = reference.mla_prefill(*tensors, *starts, mask=mask, **given, dtype=dtype)
    exact = reference.mla_prefill(*tensors, *starts, mask=mask, **given)
    for name, *results in zip(("out", "lse"), got, exact, naive, strict=True):
        assert_matches(name, *results)


def test_keys_that_no_query_sees_are_poison(monkeypatch):
    seen: list[dict[str, Any]] = []
    replace_launcher(monkeypatch, OP, by_name(before=lambda a: seen.append(dict(a)) or {}))
    PrefillLaunch(
        kv_lens=(130, 70, 0), q_lens=(1, 0, 2), mask="sliding_window_causal", window=5
    ).run("cpu", "cpu")
    (call,) = seen
    for name in ("k_nope", "k_rope", "v"):
        finite = ~call[name].flatten(1).isnan().any(1)
        assert finite.nonzero().flatten().tolist() == [125, 126, 127, 128, 129]


def every_launch_is_right() -> None:
    settings = Settings((OP,), 0, "cpu", "cpu", minutes=None, launches=60)
    outcome = run(settings)
    if outcome.failure is not None:
        raise AssertionError(outcome.failure.error)


def with_one_element_off(a: dict[str, Any]) -> None:
    if 64 in a["kv_starts"].diff().tolist():
        a["out"][-1, -1, -1] += 0.1


def mutation(name: str, before: Before = lambda a: {}, after: After = lambda a: None) -> Mutation:
    return of_kernel(OP, name, by_name(before, after), every_launch_is_right)


def shifted(a: dict[str, Any]) -> dict[str, Any]:
    return {"k_nope": a["k_nope"].roll(1, 0)}


MUTATIONS = [
    mutation("takes the key before", shifted),
    mutation("scales scores by 1.02", rescaled),
    mutation("ignores the sign of the scale", lambda a: {"softmax_scale": abs(a["softmax_scale"])}),
    mutation("does not mask", unmasked),
    mutation("ignores the sink", without("sink")),
    mutation("ignores k_rope", lambda a: {"k_rope": torch.zeros_like(a["k_rope"])}),
    mutation("is off in one element where a request has 64 keys", after=with_one_element_off),
    mutation("leaves a row unwritten", after=lambda a: a["out"][-1:].fill_(torch.nan)),
    mutation("adds to lse", after=lambda a: a["lse"].add_(1e-3)),
    mutation("writes to v", after=lambda a: a["v"][:1].fill_(0.0)),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_mutant_is_killed_within_sixty_launches(mutation, monkeypatch):
    mutation.assert_killed(monkeypatch)


def drawn(backend: str, number: int, place: str = "cuda") -> list[PrefillLaunch]:
    settings = Settings((OP,), 5, place, backend, launches=1)
    return [launch for _, launch in islice(random_launches(settings), number)]


def test_lengths_are_those_where_the_kernel_goes_wrong():
    launches = drawn("hopper", 400)
    q_lens = {length for launch in launches for length in launch.q_lens}
    kv_lens = {length for launch in launches for length in launch.kv_lens}
    assert q_lens >= {0, 1, 63, 64, 65, 127, 128, 129, 256}
    assert kv_lens >= {0, 1, 64, 127, 128, 129}
    assert max(kv_lens) > 1500
    # one block of keys at most: the unmasked main loop is empty
    assert any(0 < max(launch.kv_lens) <= 64 for launch in launches)
    pairs = [
        pair for launch in launches for pair in zip(launch.q_lens, launch.kv_lens, strict=True)
    ]
    assert any(q_len > kv_len for q_len, kv_len in pairs)
    assert any(q_len < kv_len for q_len, kv_len in pairs)
    assert {launch.padded for launch in launches} == {True, False}


def test_few_kernels_are_compiled_and_all_are_hopper_ones():
    launches = drawn("hopper", 400)
    compiled = {
        (
            each.qk_nope_head_dim, each.qk_rope_head_dim, each.v_head_dim, each.dtype, each.mask,
            bool(each.sink), each.sharpness < 0,
        )
        for each in launches
    }  # fmt: skip
    assert len(compiled) == 12
    for each in launches:
        widths = (each.qk_nope_head_dim, each.qk_rope_head_dim, each.v_head_dim)
        problem = Problem(
            "cuda", 90, str(DTYPES[each.dtype]), heads=each.heads, head_widths=widths,
            mask=each.mask,
        )  # fmt: skip
        assert dispatch.select(OP, problem).backend == "hopper"


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_launches_pass_on_the_gpu(seed):
    settings = Settings((OP,), seed, "cuda", "hopper", minutes=None, launches=20)
    outcome = run(settings)
    assert outcome.failure is None, outcome.failure
    assert outcome.num_correct >= 20
