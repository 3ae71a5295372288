"""Launch replay: a replayed call starts what a call in full would have started."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mlakit import PagedLatentCache
from mlakit.cache import CacheLayer
from mlakit.dispatch import private
from mlakit.kernels import launch as launching
from mlakit.kernels import workspace
from mlakit.launch_cache import calls, key
from mlakit.model.geometry import RowShape
from mlakit.plan import DecodePlanTensors
from mlakit.tools.workloads import CASES
from tests.launch_cache.recorded_calls import (
    Add,
    add_both,
    complaining,
    floats,
    four_times,
    multiply,
    new,
    op,
    settled,
    values,
)

__all__ = ["op"]  # a fixture


def test_the_third_call_is_replayed_and_gives_its_own_results(op):
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


def test_a_library_call_is_made_again_with_the_tensors_of_each_call(op):
    def body(x: Tensor, y: Tensor, factor: float, out: Tensor | None) -> tuple[Tensor]:
        out = new(5) if out is None else out
        workspace.library_call(lambda a, b, c: torch.add(b, a, alpha=2, out=c), x, y, out)
        return (out,)

    call = op(body)
    for turn in range(5):
        x, y, out = values(start=float(turn)), values(start=7.0 * turn), torch.zeros(5)
        assert torch.equal(call(x, y), 2 * x + y)
        assert call(x, y, out=out) is out
        assert torch.equal(out, 2 * x + y)
    assert call.ran == 4  # twice with out, twice without
    assert call.stats.hits == 6


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
def test_another_key_is_another_call(op, other):
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


# --- where pointers come from -------------------------------------------------------------------


def test_a_view_is_followed_to_the_tensor_it_is_of(op):
    def body(x: Tensor, y: Tensor, factor: float, out: None) -> tuple[Tensor]:
        result = new(2)
        multiply(x.view(-1)[3:5], result, factor)
        multiply(y[1:].select(0, 0)[None], result[:1], 1.0)
        return (result,)

    call = op(body)
    for turn in range(4):
        x, y = values(8, float(turn)).view(2, 4), values(3, -float(turn))
        assert call(x, y).tolist() == [y[1], 2 * x.view(-1)[4]]
    assert call.ran == 2


def test_tensors_in_tuples_are_those_of_the_call(op):
    def body(x: Tensor, y: Tensor, factor: float, out: None) -> tuple[Tensor]:
        result = new(5)
        launching.launch(Add(), (1,), (x, y, x), result)
        return (result,)

    call = op(body)
    for turn in range(5):
        x, y = values(start=float(turn)), values(start=-3.0 * turn)
        assert torch.equal(call(x, y), 2 * x + y)
    assert call.ran == 2


class Rows(NamedTuple):
    """As kernels take their arguments: pointers, None, numbers, and tuples of them."""

    first: Tensor
    scale: None
    stride: int
    more: tuple[Tensor, ...]


class Config(NamedTuple):
    FORMAT: str
    COUNT: int
    LIMIT: None


class AddRows:
    """y[i] = rows.first[i] + Σ rows.more[i] · rows.stride"""

    arg_names = ("rows", "y", "CONFIG")

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def first(rows: Rows, y: Tensor, *, CONFIG: Config, **options: object) -> Any:
            more = tuple(each.data_ptr() for each in rows.more)
            run(*[None] * 9, (rows.first.data_ptr(), *rows[1:3], more), y.data_ptr(), CONFIG)
            return SimpleNamespace(run=run, function=None, packed_metadata=None)

        def run(*arguments: Any) -> None:
            (at, scale, stride, more), y, config = arguments[9:]
            assert (scale, tuple(config)) == (None, ("fp8", 5, None))
            count = config[1]
            sources, target = [floats(each, count) for each in more], floats(y, count)
            for i in range(count):
                others = sum(source[i] for source in sources)
                target[i] = floats(at, count)[i] + others * stride

        return first


def test_tensors_in_named_tuples_of_a_kernel_are_those_of_the_call(op):
    def body(x: Tensor, y: Tensor, factor: float, out: None) -> tuple[Tensor]:
        result = new(5)
        config = Config("fp8", 5, None)
        launching.launch(AddRows(), (1,), Rows(x, None, 3, (y, x)), result, CONFIG=config)
        return (result,)

    call = op(body)
    for turn in range(5):
        x, y = values(start=float(turn)), values(start=-3.0 * turn)
        assert torch.equal(call(x, y), 4 * x + 3 * y)
    assert call.ran == 2


def test_an_argument_that_starts_inside_another_is_read_where_it_is(op):
    """Recorded with y inside x, replayed with y elsewhere, and the other way round."""
    call = op(add_both)
    for turn in range(5):
        base = values(32, float(turn))
        x, y = base[:24], base[16:21]  # y is 64 bytes into x
        assert torch.equal(call(x, y), x[:5] + 2 * y)
    assert call.ran == 2
    x, y = values(24, 7.0), values(5, -9.0)
    assert torch.equal(call(x, y), x[:5] + 2 * y)
    assert call.ran == 2


def test_overlap_of_other_calls_does_not_matter(op):
    call = op(add_both)
    for turn in range(5):
        x, y = values(24, float(turn)), values(5, -float(turn))
        assert torch.equal(call(x, y), x[:5] + 2 * y)
    base = values(32, 3.0)
    assert torch.equal(call(base[:24], base[16:21]), base[:5] + 2 * base[16:21])
    assert call.ran == 2


def test_one_tensor_as_two_arguments_is_recorded_by_itself(op):
    call = op(add_both)
    for turn in range(5):
        x = values(start=float(turn))
        assert torch.equal(call(x, x), 3 * x)
    assert call.ran == 2
    for turn in range(5):  # these facts are not held against others
        x, y = values(start=float(turn)), values(start=-float(turn))
        assert torch.equal(call(x, y), x + 2 * y)
    assert call.ran == 4


def test_results_in_place_of_an_argument_are_recorded(op):
    call = op(add_both)
    for turn in range(5):
        x, y = values(start=float(turn)), values(start=2.0)
        want = x + 2 * y
        assert call(x, y, out=x) is x
        assert torch.equal(x, want)
    assert call.ran == 2
    for turn in range(5):
        x, y, out = values(start=float(turn)), values(start=2.0), torch.zeros(5)
        assert torch.equal(call(x, y, out=out), x + 2 * y)
    assert call.ran == 4


@pytest.mark.slow
def test_constants_are_kept(op):
    made = []

    def body(x: Tensor, y: None, factor: float, out: None) -> tuple[Tensor]:
        if not made:
            made.append(torch.full((2,), 7.0))
        result = new(2)
        multiply(workspace.constant(made[0])[:2], result, factor)
        return (result,)

    call = op(body)
    for _ in range(2):
        call(values())
    kept = weakref.ref(made.pop())
    gc.collect()
    assert kept() is not None
    assert call(values()).tolist() == [14, 14]
    assert call.ran == 2


@pytest.mark.parametrize("body", [four_times, add_both])
def test_a_recording_keeps_no_tensor_of_its_call(op, body):
    def tensors() -> int:
        gc.collect()
        return sum(type(each) is Tensor for each in gc.get_objects())

    call = op(body)
    before = tensors()
    for _ in range(2):
        call(values(), values())
    assert call.ran == 2
    assert tensors() == before


# --- tensors that change, devices, torch's help -------------------------------------------------


def test_a_known_call_is_found_without_a_look_at_each_tensor(op, monkeypatch):
    call = op()
    for _ in range(3):
        call(values())
    monkeypatch.setattr(calls, "tensor_key", None)
    x = values(start=7.0)
    assert torch.equal(call(x), 4 * x)
    out = torch.zeros(5)
    with pytest.raises(TypeError, match="not callable"):
        call(x, out=out)


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


def test_kernels_start_on_the_device_of_the_tensors(monkeypatch):
    """Two GPUs, of which the current one is not that of the tensors."""
    entered = []

    class Device:
        type, index = "cuda", 1

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device))
    calls.made_current(Device())
    assert entered[0].index == 1
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with calls.made_current(Device()):
        assert len(entered) == 1


def test_on_another_device_than_the_current_one_nothing_recent_is_replayed(op, monkeypatch):
    call = settled(op())
    monkeypatch.setattr(private, "current_device", lambda: 1)
    monkeypatch.setattr(calls, "_has_kernels", lambda device: False)
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


def test_calls_of_many_kinds_are_all_recorded(op):
    call = op()
    sizes = range(1, calls.MAX_RECENT + 3)
    for turn in range(5):
        for size in sizes:
            x = values(size, float(turn))
            assert torch.equal(call(x), 4 * x)
    assert call.ran == 2 * len(sizes)


def test_other_alignment_is_not_the_recording_used_last(op):
    call = settled(op())
    for turn in range(4):
        x = values(6, float(turn))[1:]
        assert torch.equal(call(x), 4 * x)
        assert torch.equal(call(values()), 4 * values())
    assert call.ran == 4


def test_without_help_of_torch_calls_are_known_all_the_same(op, monkeypatch):
    monkeypatch.setattr(private, "_TensorGuards", None)
    call = op()
    for turn in range(6):
        x = values(start=float(turn))
        assert torch.equal(call(x), 4 * x)
    assert call.ran == 2
    assert not call.recorded._recent


# --- memory -------------------------------------------------------------------------------------


def test_memory_is_filled_where_that_was_asked_for(op):
    """By torch.utils.deterministic, which these tests use: nothing here writes to `rest`."""

    def body(x: Tensor, y: None, factor: float, out: None) -> tuple[Tensor, Tensor]:
        result, rest = new(5), new(100)
        multiply(x, result, factor)
        return (rest, result)

    call = op(body)
    for _ in range(5):
        assert call(values()).isnan().all()
    assert call.ran == 2


@pytest.fixture
def unfilled() -> Iterator[None]:
    """New memory as users get it, past the dispatcher where a call is known."""
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True, warn_only=True)


def test_memory_that_is_not_filled_is_taken_past_the_dispatcher(op, unfilled, monkeypatch):
    def body(x: Tensor, y: None, factor: float, out: None) -> tuple[Tensor]:
        result = new(5, 1)
        multiply(x, result, factor)
        return (result,)

    call = op(body)
    for _ in range(2):
        call(values())
    monkeypatch.setattr(torch, "empty_strided", None)
    for start in (2.0, 3.0, 4.0):
        x = values(start=start)
        assert torch.equal(call(x), 2 * x[:, None])
    assert call.ran == 2


def test_tensors_that_are_given_other_memory_are_read_there(op):
    items = values()
    plan = DecodePlanTensors(items, values(2), values(3), values(0), 1, 2)

    def body(plan: DecodePlanTensors, out: None) -> tuple[Tensor]:
        result = new(5)
        multiply(plan.items, result, 2.0)
        return (result,)

    call = op(body, 1)
    for start in (1.0, 2.0, 3.0, 4.0):
        items.set_(values(start=start))
        assert torch.equal(call(plan), 2 * items)
    assert call.ran == 2


def test_plans_are_distinguished_by_their_numbers(op):
    def body(plan: DecodePlanTensors, out: None) -> tuple[Tensor]:
        result = new(5)
        multiply(plan.items, result, 2.0)
        return (result,)

    call = op(body, 1)
    for start in range(5):
        plan = DecodePlanTensors(values(5, float(start)), values(2), values(3), values(0), 1, 2)
        assert torch.equal(call(plan), 2 * plan.items)
    assert call.ran == 2
    call(plan._replace(max_partials=3))
    assert call.ran == 3
    plan.cta_starts.resize_(1)
    call(plan)
    assert call.ran == 4


def small_pool(tensor_scale: float = 1.0) -> PagedLatentCache:
    return PagedLatentCache.allocate(
        RowShape(4, 2, 4), "fp8", num_pages=2, page_size=2, tensor_scale=tensor_scale
    )


@pytest.mark.slow
def test_no_pool_is_kept_alive(op):
    call = op(lambda layer, out: (new(1),), 1)
    cache = small_pool()
    pool = weakref.ref(cache.payload)
    for _ in range(5):
        call(cache.layer(0))
    assert call.ran == 2
    del cache
    gc.collect()
    assert pool() is None


def test_scales_of_more_kinds_than_are_remembered_in_threads(monkeypatch):
    """Layers with other host scales are other kinds; forgetting one must not fail another."""
    monkeypatch.setattr(key, "MAX_LAYER_KINDS", 3)
    monkeypatch.setattr(key, "_LAYER_KINDS", OrderedDict())
    layers = [small_pool(1.0 + i).layer(0) for i in range(400)]
    failed: list[BaseException] = []

    def split(part: list[CacheLayer]) -> None:
        try:
            for layer in part:
                key.split((layer,))
        except BaseException as error:  # noqa: BLE001  # whatever it is, the test has failed
            failed.append(error)

    threads = [threading.Thread(target=split, args=(layers[i::8],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(key._LAYER_KINDS) <= 3


def test_what_is_known_is_bounded(op, monkeypatch):
    monkeypatch.setattr(calls, "MAX_KNOWN", 4)
    call = op()
    for size in range(1, 20):
        for _ in range(3):
            x = values(size)
            assert torch.equal(call(x), 4 * x)
    assert len(call.recorded._known) == 4


@pytest.mark.parametrize("wrong", [{"factor": [2.0]}, {"y": object()}], ids=["a list", "an object"])
def test_the_op_says_what_is_wrong_with_an_argument(op, wrong):
    call = op(complaining)
    for _ in range(4):
        with pytest.raises(ValueError, match="what the op says"):
            call(**{"x": values(), **wrong})
    assert not call.recorded._known  # what was wrong is not kept alive


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
