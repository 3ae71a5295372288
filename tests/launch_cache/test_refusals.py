"""Calls that launch replay runs in full: what is not recorded, and which reason is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from mlakit.dispatch import knobs
from mlakit.kernels import launch as launching
from mlakit.kernels import workspace
from mlakit.launch_cache import calls
from tests.launch_cache.recorded_calls import Add, four_times, multiply, new, op, settled, values

__all__ = ["op"]  # a fixture


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (lambda x: x + 1, "the call runs aten::add"),
        (lambda x: x[0].item(), "the call runs aten::item|_local_scalar_dense"),
        (lambda x: x.zero_(), "the call runs aten::zero_"),
        (lambda x: x.sum().item(), "the call runs aten::sum"),
        (lambda x: torch.empty(3), "the call runs aten::empty"),
    ],
    ids=["computes", "reads", "writes", "asks", "allocates"],
)
def test_a_call_with_other_torch_ops_runs_in_full(op, extra, reason):
    constant = torch.ones(2)

    def body(x: Tensor, *others: Any) -> tuple[Tensor, ...]:
        extra(constant)
        return four_times(x, *others)

    call = op(body)
    for turn in range(8):
        x = values(start=float(turn))
        assert torch.equal(call(x), 4 * x)
    assert call.ran == 8
    (refusal,) = call.stats.refused
    assert any(part in refusal for part in reason.split("|"))
    assert call.stats.refused[refusal] == 7


def test_a_library_call_beside_kernels_runs_in_full(op):
    def body(x: Tensor, *others: Any) -> tuple[Tensor, ...]:
        (result,) = four_times(x, *others)
        workspace.library_call(lambda a: a.add_(1), result)
        return (result,)

    call = op(body)
    for _ in range(4):
        assert torch.equal(call(values()), 4 * values() + 1)
    assert call.ran == 4
    assert set(call.stats.refused) == {"the call launches kernels beside those of torch"}


def test_a_library_call_over_a_view_runs_in_full(op):
    def body(x: Tensor, *others: Any) -> tuple[Tensor, ...]:
        result = new(5)
        workspace.library_call(lambda a, b: torch.mul(a, 2, out=b), x.view(-1), result)
        return (result,)

    call = op(body)
    for _ in range(4):
        assert torch.equal(call(values()), 2 * values())
    assert call.ran == 4
    assert set(call.stats.refused) == {"a library call takes a tensor that is not the call's"}


def test_memory_of_unknown_origin_is_refused(op):
    elsewhere = values(2)

    def body(x: Tensor, y: None, factor: float, out: None) -> tuple[Tensor]:
        result = new(2)
        multiply(elsewhere, result, factor)
        return (result,)

    call = op(body)
    for _ in range(5):
        assert call(values()).tolist() == [2, 4]
    assert call.ran == 5
    assert call.stats.refused["a kernel points to memory that is not the call's"] == 4


def test_tensors_in_lists_are_refused(op):
    def body(x: Tensor, y: None, factor: float, out: None) -> tuple[Tensor]:
        result = new(5)
        launching.launch(Add(), (1,), [x, x], result)
        return (result,)

    call = op(body)
    for turn in range(5):
        x = values(start=float(turn))
        assert torch.equal(call(x), 2 * x)
    assert call.ran == 5


def test_a_refused_recording_is_tried_again(op):
    """As where a constant is still being made: recorded soon after nothing stands in the way."""
    busy = True

    def body(x: Tensor, *others: Any) -> tuple[Tensor, ...]:
        if busy:
            torch.arange(3)
        return four_times(x, *others)

    call = op(body)
    for _ in range(40):
        call(values())
    assert call.ran == 40
    busy = False
    for _ in range(calls.MAX_WAIT + 1):
        call(values())
    assert call.ran <= 40 + calls.MAX_WAIT
    assert call.stats.hits > 0
    ran = call.ran
    call(values())
    assert call.ran == ran


def test_calls_while_a_graph_is_captured_do_not_stand_in_the_way(op, monkeypatch):
    call = op()
    call(values())
    with monkeypatch.context() as patch:
        patch.setattr(calls, "_is_capturing", lambda: True)
        for _ in range(5):
            call(values())
    assert call.stats.refused == {"a CUDA graph is being captured": 5}
    for _ in range(3):
        call(values())
    assert call.ran == 7
    assert call.stats.hits == 2


def test_a_launch_hook_is_called_at_every_launch(op, monkeypatch):
    call = op()
    for _ in range(4):
        call(values())
    runtime = triton.knobs.runtime
    monkeypatch.setattr(runtime.launch_enter_hook, "calls", [print])
    call(values())
    assert call.ran == 3
    assert call.stats.refused == {"a launch hook of Triton is set": 1}


@pytest.mark.parametrize(
    ("knob", "reason"),
    [
        ({"check_values": True}, "MLAKIT_CHECK_VALUES is on"),
        ({"launch_cache": False}, "MLAKIT_LAUNCH_CACHE is off"),
        ({"backend": "triton"}, None),
    ],
    ids=str,
)
def test_knobs_are_read_at_every_call(op, knob, reason):
    call = settled(op())
    with knobs.override(**knob):
        call(values())
    assert call.ran == 3
    assert list(call.stats.refused) == ([reason] if reason else [])
    call(values())
    assert call.ran == 3


def test_the_environment_turns_replay_off(op, monkeypatch):
    monkeypatch.setenv("MLAKIT_LAUNCH_CACHE", "0")
    call = op()
    for _ in range(5):
        call(values())
    assert call.ran == 5
