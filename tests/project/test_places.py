"""Where tests with a `place` run, and with which kernels."""

from __future__ import annotations

import pytest

from mlakit.dispatch import knobs, selection
from mlakit.dispatch.specs import Problem
from mlakit.model.geometry import RowShape
from tests.conftest import refuse_hopper

CALL = {"dtype": "torch.bfloat16", "format": "bf16", "heads": 16, "page_size": 64, "mask": "causal"}
SMALL = Problem("cuda", 90, row=RowShape(32, 8), **CALL)
OF_A_MODEL = Problem("cuda", 90, row=RowShape(512, 64), **CALL)


def test_a_kernel_of_hopper_is_seen_where_only_portable_ones_are_expected(monkeypatch):
    with monkeypatch.context() as patch:
        refuse_hopper(patch)
        assert selection.select("mla_decode", SMALL).backend == "triton"
        with pytest.raises(AssertionError, match=r"mla_decode runs hopper:.*: mark it hopper_too"):
            selection.select("mla_decode", OF_A_MODEL)
    assert selection.select("mla_decode", OF_A_MODEL).backend == "hopper"


@pytest.mark.usefixtures("no_replay")
def test_nothing_is_replayed_or_recorded_where_a_test_asks_for_that():
    _, may_replay = knobs.for_launch_cache()
    assert not may_replay
