"""Random launches of `sparse_mla`: their oracle, and what is drawn."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch

from mlakit import reference
from mlakit.dispatch import selection
from mlakit.dispatch.specs import Problem
from mlakit.tools.check import Settings, random_launches
from mlakit.tools.testing import assert_matches
from mlakit.tools.workloads import SparseLaunch
from mlakit.tools.workloads.inputs import DTYPES
from mlakit.tools.workloads.sparse_launch import attend_lists
from tests.kernel_launchers import by_name, replace_launcher


@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_tokens_attended_together_give_what_the_reference_gives(has_sink, dtype):
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(20, 12, generator=generator, dtype=torch.float64)
    q = torch.randn(6, 3, 12, generator=generator, dtype=torch.float64)
    slots = torch.randint(-3, 23, (6, 9), generator=generator)
    slots[2] = -1
    sink = torch.tensor([0.5, -torch.inf, torch.inf]) if has_sink else None
    settings = {"softmax_scale": -0.7, "v_width": 8, "sink": sink}
    counts = (slots >= 0) & (slots < 20)
    rows = torch.where(counts[..., None], pool[slots.clamp(0, 19)], 0.0)
    got = attend_lists(q, rows, counts, **settings, dtype=dtype)
    exact, naive = (
        reference.sparse_mla(q, pool, slots, **settings, dtype=each)
        for each in (torch.float64, dtype)
    )
    for name, *results in zip(("out", "lse", "max_logits"), got, exact, naive, strict=True):
        assert_matches(name, *results)


def launch(**fields: Any) -> SparseLaunch:
    return SparseLaunch(
        **{"num_tokens": 3, "topk": 70, "heads": 2, "extra_format": "bf16", **fields}
    )


def spoilt(result: str) -> Any:
    """A kernel whose last head of the last token is a little wrong."""

    def after(a: dict[str, Any]) -> None:
        a[result][-1, -1] *= 1.02

    return by_name(after=after)


@pytest.mark.parametrize("result", ["out", "lse", "max_logits"])
def test_a_wrong_result_is_noticed(monkeypatch, result):
    launch(with_lens=False).run("cpu", "cpu")
    replace_launcher(monkeypatch, "sparse_mla", spoilt(result))
    with pytest.raises(AssertionError, match=f"{result}: "):
        launch(with_lens=False).run("cpu", "cpu")


def test_several_calls_give_the_same_bits(monkeypatch):
    calls: list[int] = []

    def wrong_at_last(a: dict[str, Any]) -> None:
        calls.append(1)
        if len(calls) == 3:
            a["lse"][0, 0] += 2.0**-20

    replace_launcher(monkeypatch, "sparse_mla", by_name(after=wrong_at_last))
    with pytest.raises(AssertionError, match="lse of call 3: "):
        launch(calls=3, with_lens=False).run("cpu", "cpu")


def drawn(backend: str, number: int, place: str = "cuda") -> list[SparseLaunch]:
    settings = Settings(("sparse_mla",), 5, place, backend, launches=1)
    return [launch for _, launch in islice(random_launches(settings), number)]


def test_lists_are_those_where_kernels_go_wrong():
    launches = drawn("hopper", 400)
    assert {each.topk for each in launches} >= {1, 63, 64, 65, 127, 128, 129}
    assert max(each.topk for each in launches) > 1500
    assert {each.heads for each in launches} >= {16, 64, 128}
    assert {min(each.num_splits, 2) for each in launches} == {0, 1, 2}
    assert max(each.num_tokens for each in launches) > 132


def test_hopper_takes_its_launches_with_few_kernels():
    launches = drawn("hopper", 400)
    for each in launches:
        problem = Problem(
            "cuda", 90, str(DTYPES[each.dtype]), each.format, each.heads, each.page_size, each.row
        )
        assert selection.select("sparse_mla", problem).backend == "hopper"
        assert each.extra_format in ("", each.format)
    compiled = {
        replace(
            each, seed=0, calls=1, num_tokens=1, topk=1, extra_topk=1, num_splits=0, num_pages=1,
            heads=1, num_layers=1, given_results=False, sharpness=each.sharpness < 0,
        )
        for each in launches
    }  # fmt: skip
    assert len(compiled) == 11


def test_other_backends_are_given_more_formats():
    launches = drawn("", 200, place="cpu")
    assert {each.format for each in launches} >= {"bf16", "fp16", "fp8_block128", "fp8_token"}
