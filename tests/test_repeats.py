"""Calls like earlier ones: what is started again is what the whole way would have started."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit import PagedLatentCache, knobs
from mlakit.geometry import RowShape
from mlakit.kernels.triton import launch as launching
from mlakit.kernels.triton import relaunch
from mlakit.ops import _recording, _repeats
from mlakit.ops._library import Op
from mlakit.ops._repeats import Repeats
from mlakit.plan import DecodePlanTensors
from mlakit.workloads import CASES

TYPES = {"x": Tensor, "y": Tensor | None, "factor": float}


def floats(address: int, count: int) -> Any:
    return (ctypes.c_float * count).from_address(address)


class Multiply:
    """Stands in for a kernel, y[i] = x[i] · factor, as Triton lets one be started."""

    arg_names = ("x", "y", "factor", "COUNT")

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def first(x: Tensor, y: Tensor, factor: float, *, COUNT: int, num_warps: int) -> Any:
            run(*grid, 1, 1, 0, "function", "metadata", None, None, None,
                x.data_ptr(), y.data_ptr(), factor, COUNT)  # fmt: skip
            return SimpleNamespace(run=run, function="function", packed_metadata="metadata")

        def run(*arguments: Any) -> None:
            assert arguments[3:9] == (0, "function", "metadata", None, None, None)
            x, y, factor, count = arguments[9:]
            source, target = floats(x, count), floats(y, count)
            for i in range(count):
                target[i] = source[i] * factor

        return first


MULTIPLY = Multiply()


def multiply(x: Tensor, y: Tensor, factor: float) -> None:
    launching.launch(MULTIPLY, (1,), x, y, factor, COUNT=x.numel(), num_warps=4)


def four_times(x: Tensor, y: Tensor | None, factor: float, out: Tensor | None) -> tuple[Tensor]:
    """factor² · x, by way of scratch."""
    between = torch.empty_like(x)
    other = torch.empty(3)
    multiply(x, between, factor)
    multiply(x[:3], other, 0.0)
    out = torch.empty_like(x) if out is None else out
    multiply(between, out, factor)
    return (out,)


@dataclass
class Calls:
    """An op of these bodies, on the CPU as if it were a GPU; counts how often one runs."""

    body: Callable[..., tuple[Tensor, ...]]
    repeats: Repeats
    ran: int = 0

    def __call__(
        self, x: Tensor, y: Tensor | None = None, factor: float = 2.0, out: Tensor | None = None
    ) -> Tensor:
        def body() -> tuple[Tensor, ...]:
            self.ran += 1
            return self.body(x, y, factor, out)

        return self.repeats.run(body, {"x": x, "y": y, "factor": factor}, (out,))[0]


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Calls]:
    monkeypatch.setattr(_repeats, "_starts_kernels", lambda device: True)
    monkeypatch.setattr(_repeats, "_current_device", lambda: None)  # the index of every CPU device
    monkeypatch.setattr(_recording, "_current_stream", lambda device: 0)
    monkeypatch.setattr(relaunch, "KNOWN_LAUNCHERS", ("no such version",))  # `Multiply` is no such
    monkeypatch.setattr(_repeats, "ALIGNMENT", 64)  # as torch allocates in host memory
    return lambda body=four_times: Calls(body, Repeats(TYPES))


def values(n: int = 5, start: float = 1.0) -> Tensor:
    return torch.arange(n, dtype=torch.float32) + start


def test_the_third_call_runs_no_body_and_gives_its_own_results(op):
    call = op()
    results = []
    for turn in range(6):
        x = values(start=float(turn))
        results.append((call(x), x))
    assert call.ran == 2
    for result, x in results:
        assert torch.equal(result, 4 * x)
    assert len({result.data_ptr() for result, _ in results}) == 6


def test_given_results_are_written_and_returned(op):
    call = op()
    for turn in range(4):
        out, x = torch.zeros(5), values(start=float(turn))
        assert call(x, out=out) is out
        assert torch.equal(out, 4 * x)
    assert call.ran == 2


@pytest.mark.parametrize(
    "other",
    [
        lambda call: call(values(6)),
        lambda call: call(values(10)[::2]),
        lambda call: call(values(), factor=3.0),
        lambda call: call(values(), factor=2),
        lambda call: call(values(), y=values()),
        lambda call: call(values(6)[1:]),
        lambda call: call(values(), out=torch.empty(5)),
    ],
    ids=["size", "stride", "number", "type of a number", "argument", "alignment", "given result"],
)
def test_other_facts_are_another_call(op, other):
    call = op()
    for _ in range(3):
        call(values())
    assert call.ran == 2
    other(call)
    assert call.ran == 3


def test_true_is_not_one(op):
    call = op()
    for _ in range(3):
        call(values(), factor=1.0)
    call(values(), factor=True)
    assert call.ran == 3


@pytest.mark.parametrize(
    "extra",
    [lambda x: x + 1, lambda x: x.tolist(), lambda x: x.zero_(), lambda x: x.sum().item()],
    ids=["computes", "reads", "writes", "asks"],
)
def test_a_body_with_other_torch_ops_runs_each_time(op, extra):
    def body(x: Tensor, *others: Any) -> tuple[Tensor, ...]:
        extra(torch.ones(2))
        return four_times(x, *others)

    call = op(body)
    for turn in range(8):
        x = values(start=float(turn))
        assert torch.equal(call(x), 4 * x)
    assert call.ran == 8


def test_a_view_is_found_in_the_tensor_it_is_of(op):
    def body(x: Tensor, y: Tensor, factor: float, out: None) -> tuple[Tensor]:
        result = torch.empty(2)
        multiply(x.view(-1)[3:5], result, factor)
        multiply(y[1:].select(0, 0)[None], result[:1], 1.0)
        return (result,)

    call = op(body)
    for turn in range(4):
        x, y = values(8, float(turn)).view(2, 4), values(3, -float(turn))
        assert call(x, y).tolist() == [y[1], 2 * x.view(-1)[4]]
    assert call.ran == 2


class Add:
    """y[i] = Σ xs[i], of a tuple of tensors."""

    arg_names = ("xs", "y")

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def first(xs: tuple[Tensor, ...], y: Tensor) -> Any:
            run(*[None] * 9, tuple(x.data_ptr() for x in xs), y.data_ptr())
            return SimpleNamespace(run=run, function=None, packed_metadata=None)

        def run(*arguments: Any) -> None:
            xs, y = arguments[9:]
            sources, target = [floats(x, 5) for x in xs], floats(y, 5)
            for i in range(5):
                target[i] = sum(source[i] for source in sources)

        return first


def test_tensors_in_tuples_are_those_of_the_call(op):
    def body(x: Tensor, y: Tensor, factor: float, out: None) -> tuple[Tensor]:
        result = torch.empty_like(x)
        launching.launch(Add(), (1,), (x, y, x), result)
        return (result,)

    call = op(body)
    for turn in range(5):
        x, y = values(start=float(turn)), values(start=-3.0 * turn)
        assert torch.equal(call(x, y), 2 * x + y)
    assert call.ran == 2


def test_tensors_in_other_things_are_not_looked_for(op):
    def body(x: Tensor, y: None, factor: float, out: None) -> tuple[Tensor]:
        result = torch.empty_like(x)
        launching.launch(Add(), (1,), [x, x], result)
        return (result,)

    call = op(body)
    for turn in range(5):
        x = values(start=float(turn))
        assert torch.equal(call(x), 2 * x)
    assert call.ran == 5


def test_a_pointer_that_two_tensors_share_is_not_guessed(op):
    def body(x: Tensor, y: Tensor, factor: float, out: None) -> tuple[Tensor]:
        result = torch.empty(2)
        multiply(y[:2], result, factor)
        return (result,)

    call = op(body)
    for turn in range(5):
        x = values(start=float(turn))
        assert torch.equal(call(x, x), 2 * x[:2])
    assert call.ran == 5


def test_a_pointer_into_the_rest_of_a_storage_is_not_taken_for_a_constant(op):
    base = values(8)

    def body(x: Tensor, y: None, factor: float, out: None) -> tuple[Tensor]:
        result = torch.empty(2)
        multiply(base[:2], result, factor)
        return (result,)

    call = op(body)
    for _ in range(5):
        call(base[4:])
    assert call.ran == 5


def test_constants_are_kept(op):
    made = []

    def body(x: Tensor, y: None, factor: float, out: None) -> tuple[Tensor]:
        if not made:
            made.append(torch.full((2,), 7.0))
        result = torch.empty(2)
        multiply(made[0], result, factor)
        return (result,)

    call = op(body)
    for _ in range(2):
        call(values())
    kept = weakref.ref(made.pop())
    gc.collect()
    assert kept() is not None
    assert call(values()).tolist() == [14, 14]
    assert call.ran == 2


def test_who_watches_launches_sees_them(op, monkeypatch):
    call = op()
    for _ in range(3):
        call(values())
    runtime = launching.triton.knobs.runtime
    monkeypatch.setattr(runtime.launch_enter_hook, "calls", [print])
    call(values())
    assert call.ran == 3


def test_gradients_and_dispatch_modes_take_the_whole_way(op):
    call = op()
    for _ in range(3):
        call(values())
    call(values().requires_grad_())
    with _recording.Observer():
        call(values())
    assert call.ran == 4


def test_a_known_call_is_found_without_a_look_at_each_tensor(op, monkeypatch):
    call = op()
    for _ in range(3):
        call(values())
    monkeypatch.setattr(_repeats, "facts_of", None)
    x = values(start=7.0)
    assert torch.equal(call(x), 4 * x)
    out = torch.zeros(5)
    with pytest.raises(TypeError, match="not callable"):
        call(x, out=out)


def settled(call: Calls) -> Calls:
    """Whose recording is the one that was used last."""
    for _ in range(4):
        call(values())
    assert call.ran == 2
    return call


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.resize_(3),
        lambda x: x.set_(values(6)),
        lambda x: x.as_strided_((5,), (0,)),
        lambda x: x.unsqueeze_(0),
        lambda x: setattr(x, "data", x.data.double()),
        lambda x: x.requires_grad_(),
    ],
    ids=["resized", "set", "strided", "another axis", "dtype", "grad"],
)
def test_a_tensor_that_is_changed_in_place_is_another(op, change):
    call, x = settled(op()), values()
    call(x)
    assert call.ran == 2
    change(x)
    with torch.no_grad():
        call(x)
    assert call.ran == 3


def test_other_memory_of_the_same_tensor_is_read(op):
    call, x = settled(op()), values()
    call(x)
    x.set_(values(start=9.0))
    assert torch.equal(call(x), 4 * x)
    assert call.ran == 2


def test_another_dtype_or_type_is_another_call(op):
    call = settled(op())
    call(torch.nn.Parameter(values(), requires_grad=False))
    assert call.ran == 3
    call(values().view(torch.int32))
    assert call.ran == 4


def test_on_another_device_than_the_current_one_the_body_runs(op, monkeypatch):
    call = settled(op())
    monkeypatch.setattr(_repeats, "_current_device", lambda: 1)
    monkeypatch.setattr(_repeats, "_starts_kernels", lambda device: False)
    call(values())
    assert call.ran == 3


@pytest.mark.parametrize("knob", [{"check_values": True}, {"backend": "triton"}], ids=str)
def test_knobs_are_asked_at_every_call(op, knob):
    call = settled(op())
    with knobs.override(**knob):
        call(values())
    assert call.ran == 3
    call(values())
    assert call.ran == 3


def test_inference_tensors_are_results_where_they_would_be(op):
    call = settled(op())
    for _ in range(3):
        with torch.inference_mode():
            x = values(start=2.0)
            got = call(x)
        assert got.is_inference()
        assert torch.equal(got, 4 * x)
    assert not call(values()).is_inference()
    assert call.ran == 2


def test_calls_of_many_kinds_in_turn_are_all_known(op):
    call = op()
    sizes = range(1, _repeats.MAX_RECENT + 3)
    for turn in range(5):
        for size in sizes:
            x = values(size, float(turn))
            assert torch.equal(call(x), 4 * x)
    assert call.ran == 2 * len(sizes)


def test_other_alignment_is_told_from_the_recording_used_last(op):
    call = settled(op())
    for turn in range(4):
        x = values(6, float(turn))[1:]
        assert torch.equal(call(x), 4 * x)
        assert torch.equal(call(values()), 4 * values())
    assert call.ran == 4


def test_a_tensor_may_be_two_arguments(op):
    ones = torch.ones(2)

    def body(x: Tensor, y: Tensor, factor: float, out: None) -> tuple[Tensor]:
        result = torch.empty(2)
        multiply(ones, result, factor)
        return (result,)

    call, x = op(body), values()
    for _ in range(5):
        assert call(x, x).tolist() == [2, 2]
    assert call.ran == 2


def test_without_help_of_torch_calls_are_known_all_the_same(op, monkeypatch):
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    call = op()
    for turn in range(6):
        x = values(start=float(turn))
        assert torch.equal(call(x), 4 * x)
    assert call.ran == 2
    assert not call.repeats._recent


def test_memory_is_filled_where_that_was_asked_for(op):
    """By torch.utils.deterministic, which these tests use: nothing here writes to `rest`."""

    def body(x: Tensor, y: None, factor: float, out: None) -> tuple[Tensor, Tensor]:
        result, rest = torch.empty_like(x), torch.empty(100)
        multiply(x, result, factor)
        return (rest, result)

    call = op(body)
    for _ in range(5):
        assert call(values()).isnan().all()
    assert call.ran == 2


@dataclass(frozen=True, eq=False)
class Arguments:
    x: Tensor
    y: Tensor | None
    factor: float


FOUR_TIMES = Op(
    "four_times_in_tests",
    Arguments,
    lambda a, out: four_times(a.x, a.y, a.factor, out),
    lambda a: (torch.empty_like(a.x),),
    ("out",),
)


def test_compiled_calls_are_right_after_calls_that_were_recorded(op):
    def call(x: Tensor) -> Tensor:
        return FOUR_TIMES.call((None,), {"x": x, "y": None, "factor": 2.0})[0]

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for turn in range(5):
        x = values(start=float(turn))
        for function in (call, compiled):
            assert torch.equal(function(x), 4 * x)
    assert len(FOUR_TIMES._repeats._recent) == 1


@pytest.fixture
def unfilled() -> Iterator[None]:
    """New memory as users get it, past the dispatcher where a call is known."""
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True, warn_only=True)


def test_memory_that_is_not_filled_is_taken_past_the_dispatcher(op, unfilled, monkeypatch):
    def body(x: Tensor, y: None, factor: float, out: None) -> tuple[Tensor]:
        result = torch.empty_strided((5, 1), (1, 7))
        multiply(x, result, factor)
        return (result,)

    call = op(body)
    for _ in range(2):
        call(values())
    monkeypatch.setattr(torch, "empty_strided", None)
    for start in (2.0, 3.0, 4.0):
        x = values(start=start)
        got = call(x)
        assert torch.equal(got, 2 * x[:, None])
        assert (got.stride(), got.dtype) == ((1, 7), torch.float32)
    assert call.ran == 2


def complaining(*arguments: Any) -> tuple[Tensor, ...]:
    raise ValueError("what the body says")


@pytest.mark.parametrize(
    "wrong",
    [{"factor": [2.0]}, {"x": torch.eye(3).to_sparse()}, {"y": torch.eye(3).to_sparse_csr()}],
    ids=["a list for a number", "sparse", "compressed"],
)
def test_what_is_wrong_with_an_argument_the_body_says(op, wrong):
    call = op(complaining)
    for _ in range(4):
        with pytest.raises(ValueError, match="what the body says"):
            call(**{"x": values(), **wrong})


def test_tensors_that_are_given_other_memory_are_seen_there(op):
    types = {"x": DecodePlanTensors}
    repeats = Repeats(types)
    items = values()
    plan = DecodePlanTensors(items, values(2), values(3), values(0), 1, 2)
    for start in (1.0, 2.0, 3.0, 4.0):
        items.set_(values(start=start))

        def body() -> tuple[Tensor]:
            result = torch.empty(5)
            multiply(plan.items, result, 2.0)
            return (result,)

        assert torch.equal(repeats.run(body, {"x": plan}, ())[0], 2 * items)


def test_plans_are_told_apart_by_their_numbers_and_followed_to_their_tensors(op):
    repeats, ran = Repeats({"x": DecodePlanTensors}), []

    def doubled_items(plan: DecodePlanTensors) -> Tensor:
        def body() -> tuple[Tensor]:
            ran.append(plan)
            result = torch.empty(5)
            multiply(plan.items, result, 2.0)
            return (result,)

        return repeats.run(body, {"x": plan}, ())[0]

    for start in range(5):
        plan = DecodePlanTensors(values(5, float(start)), values(2), values(3), values(0), 1, 2)
        assert torch.equal(doubled_items(plan), 2 * plan.items)
    assert len(ran) == 2
    doubled_items(plan._replace(max_partials=3))
    assert len(ran) == 3
    plan.worker_starts.resize_(1)
    doubled_items(plan)
    assert len(ran) == 4


def test_no_pool_is_kept_alive(op):
    repeats = Repeats({"x": "CacheLayer"})
    cache = PagedLatentCache.allocate(RowShape(4, 2, 4), "fp32", num_pages=2, page_size=2)
    pool = weakref.ref(cache.payload)
    for _ in range(5):
        repeats.run(lambda: (torch.empty(1),), {"x": cache.layer(0)}, ())
    del cache
    gc.collect()
    assert pool() is None


def test_what_is_known_is_bounded(op, monkeypatch):
    monkeypatch.setattr(_repeats, "MAX_KNOWN", 4)
    call = op()
    for size in range(1, 20):
        for _ in range(3):
            x = values(size)
            assert torch.equal(call(x), 4 * x)
    assert len(call.repeats._known) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)
def test_ops_on_a_gpu_are_right_each_time_in_memory_that_is_not_filled(case, device, unfilled):
    for seed in range(5):
        replace(case(), seed=seed).run(device)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)
def test_ops_on_a_gpu_are_right_each_time(case, device):
    """New values of the same shapes: lengths, page tables, everything but the facts."""
    for seed in range(5):
        replace(case(), seed=seed).run(device)
