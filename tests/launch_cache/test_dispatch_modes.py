"""Launch replay beside autograd, dispatch modes, wrapper tensors and torch.compile."""

from __future__ import annotations

import gc
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mlakit.ops import _library as library
from tests.launch_cache.recorded_calls import (
    add_both,
    complaining,
    four_times,
    multiply,
    new,
    op,
    settled,
    values,
)

__all__ = ["op"]  # a fixture


def test_parameters_are_recorded_without_grad(op):
    call = op(add_both)
    weight = torch.nn.Parameter(values(start=4.0))
    with torch.no_grad():
        for turn in range(5):
            x = values(start=float(turn))
            assert torch.equal(call(x, weight), x + 2 * weight)
    assert call.ran == 2
    call(values(), weight)
    assert call.ran == 3
    assert call.stats.refused == {"a tensor requires grad": 1}


class Wrapper(Tensor):
    """Holds its values in another tensor; its own memory is at address 0."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrapped(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapper) else value

        args, kwargs = torch.utils._pytree.tree_map(unwrapped, (args, kwargs or {}))
        return func(*args, **kwargs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Wrapper(values()),
        lambda: torch._neg_view(values()),
        lambda: values().to_sparse(),
        lambda: values().as_subclass(type("Named", (Tensor,), {})),
    ],
    ids=["wrapper", "negative", "sparse", "subclass"],
)
def test_tensors_that_are_not_plain_go_through_the_dispatcher(op, make):
    call = settled(op())
    for _ in range(3):
        call(make())
    assert (call.ran, call.dispatched) == (2, 3)
    settled_ran = call.ran
    call(values(), y=make())
    assert (call.ran, call.dispatched) == (settled_ran, 4)


def test_the_op_says_what_is_wrong_with_a_meta_tensor(op):
    call = op(complaining)
    with pytest.raises(ValueError, match="what the op says"):
        call(torch.empty(5, device="meta"))


def test_fake_tensors_and_modes_go_through_the_dispatcher(op):
    call = settled(op())
    with torch._subclasses.FakeTensorMode() as mode:
        call(torch.empty(5))
    with workspace_recorder():
        call(values())
    call(mode.from_tensor(values()))
    assert (call.ran, call.dispatched) == (2, 3)


def workspace_recorder() -> Any:
    """Some dispatch mode."""
    from mlakit.launch_cache.record import CallRecorder

    return CallRecorder([])


def test_functional_tensors_go_through_the_dispatcher(op):
    call = settled(op())

    def function(x: Tensor) -> Tensor:
        call(x)
        return x

    torch.func.functionalize(function)(values())
    torch.func.vmap(function)(torch.ones(3, 5))
    assert (call.ran, call.dispatched) == (2, 2)


def test_below_the_dispatcher_what_is_still_not_plain_does_not_run(op):
    call = op()
    assert call.recorded.call_plain((torch.empty(5, device="meta"), None, 1.0), ()) is None
    assert (call.ran, call.dispatched) == (0, 0)


@pytest.mark.slow
def test_a_named_tuple_is_taken_apart(op):
    class Table(NamedTuple):
        starts: Tensor
        slots: Tensor

    def body(table: Table, y: None, factor: float, out: None) -> tuple[Tensor]:
        result = new(5)
        multiply(table.slots, result, factor)
        return (result,)

    call = op(body)
    tables = []
    for turn in range(5):
        table = Table(values(2), values(start=float(turn)))
        tables.append(weakref.ref(table.slots))
        assert torch.equal(call(table), 2 * table.slots)
    assert call.ran == 2
    del table
    gc.collect()
    assert [each() for each in tables] == [None] * 5


class Arguments(NamedTuple):
    x: Tensor
    y: Tensor | None
    factor: float


@library.op("four_times_in_tests", fake=lambda a: (torch.empty_like(a.x),))
def four_times_op(a: Arguments, out: Tensor | None) -> tuple[Tensor]:
    return four_times(a.x, a.y, a.factor, out)


def call_op(x: Tensor, out: Tensor | None = None) -> Tensor:
    return four_times_op(Arguments(x, None, 2.0), out)[0]


@pytest.mark.slow
def test_compiled_calls_are_right_after_calls_that_were_recorded(op):
    compiled = torch.compile(call_op, fullgraph=True, backend="aot_eager")
    for turn in range(5):
        x = values(start=float(turn))
        for function in (call_op, compiled):
            assert torch.equal(function(x), 4 * x)
    assert library.OPS["four_times_in_tests"]._calls._stats.hits > 0


def test_wrappers_are_unwrapped_by_the_dispatcher(op):
    for turn in range(4):
        x = values(start=float(turn))
        assert torch.equal(call_op(Wrapper(x)), 4 * x)
        assert torch.equal(call_op(torch._neg_view(x)), -4 * x)


def test_make_fx_traces_the_op(op):
    from torch.fx.experimental.proxy_tensor import make_fx

    for _ in range(4):
        call_op(values())
    graph = make_fx(lambda x: call_op(x))(values())
    targets = [str(node.target) for node in graph.graph.nodes]
    assert "mlakit.four_times_in_tests.default" in targets
    x = values(start=5.0)
    assert torch.equal(graph(x), 4 * x)


def test_versions_of_given_results_are_bumped(op):
    for _ in range(4):
        out = torch.zeros(5)
        version = out._version
        call_op(values(), out)
        assert out._version > version


def test_the_result_of_a_functional_collective_is_waited_for(op, tmp_path):
    from torch import distributed
    from torch.distributed import _functional_collectives as functional

    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        for turn in range(4):
            x = functional.all_reduce(values(start=float(turn)), "sum", distributed.group.WORLD)
            assert type(x) is functional.AsyncCollectiveTensor
            assert torch.equal(call_op(x), 4 * values(start=float(turn)))
    finally:
        distributed.destroy_process_group()
