"""The private interfaces of torch and Triton: that each is there and does what is asked of it."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from triton.runtime import jit

from mlakit.dispatch import private
from mlakit.dispatch.private import Pointer, PreparedLaunch

ENCODE = "triton.backends.nvidia.driver.make_tensordesc_arg"


class Descriptor:
    """A TMA descriptor with the fields that a launcher reads."""

    def __init__(self, base: Tensor) -> None:
        self.base, self.shape, self.strides = base, [4, 2], [2, 1]
        self.block_shape, self.padding = [2, 2], "zero"


class Launcher:
    """Triton's, of a kernel with a descriptor and a number."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True
    gsan_enabled = False
    arg_annotations, kernel_signature = "annotations", "signature"

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> None:
        *head, box, number = arguments
        self.seen.append((*head, box.base.data_ptr(), box.shape, box.strides, box.padding, number))


def kernel_of(run: Launcher) -> SimpleNamespace:
    return SimpleNamespace(run=run, function="function", packed_metadata="metadata")


def start_again(start: PreparedLaunch, *arguments: Any) -> None:
    """On stream 5."""
    last = (arguments,) if start.arguments_are_one else arguments
    start.function(*start.before_stream, 5, *start.after_stream, *last)


class Rows(NamedTuple):
    payload: Tensor
    scales: None
    stride: int


@pytest.fixture
def triton_version(monkeypatch):
    """Sets the version of Triton whose launchers are called."""
    return lambda version: monkeypatch.setattr(private, "triton_version", lambda: version)


def test_pointers_in_named_tuples_are_marked(triton_version):
    triton_version("3.7")
    x, y = torch.arange(8.0), torch.arange(3.0)
    given = Descriptor(x), Rows(y, None, 2), ("fp8", 64)
    box, rows, config = private.prepare_launch(kernel_of(Launcher()), (3, 1, 1), given).arguments
    assert box.tensor is x
    assert rows == (Pointer(y), None, 2)
    assert config == ("fp8", 64)


def test_the_launcher_of_any_version_gets_descriptors(triton_version):
    triton_version("3.7")
    run, x = Launcher(), torch.arange(8.0)
    start = private.prepare_launch(kernel_of(run), (3, 1, 1), (Descriptor(x), 7))
    pointer, number = start.arguments
    assert pointer.tensor is x
    assert number == 7
    for address in (1024, 2048):
        start_again(start, pointer.encode[address], 7)
        head = (3, 1, 1, 5, "function", "metadata", None, None, None)
        assert run.seen.pop() == (*head, address, [4, 2], [2, 1], "zero", 7)


def wrapped_launcher(encodings: Any = ("as told",)) -> Launcher:
    """Whose descriptors a function in Python encodes before the one in C, which takes anything."""
    run = Launcher()
    launcher, tensordesc_meta = print, list(encodings)

    def inner(*arguments: Any) -> None:
        raise AssertionError(launcher, tensordesc_meta)

    run.launch = inner
    return run


HEAD = {
    "3.6": "3 2 1 5 function False True None None metadata None None None "
    "encoded as told of 1024 4 2 2 1 7\n",
    "3.9": "3 2 1 5 function False True metadata None None None None None annotations "
    "signature ('encoded as told of 1024', 4, 2, 2, 1, 7)\n",
}


@pytest.mark.parametrize("version", HEAD)
def test_a_known_launcher_gets_encoded_descriptors(monkeypatch, capsys, triton_version, version):
    encoded = []

    def encode(box: Any, encoding: Any, *more: Any) -> list[Any]:
        assert len(more) == (version == "3.9")
        encoded.append(box.base.data_ptr())
        return [f"encoded {encoding} of {box.base.data_ptr()}", *box.shape, *box.strides]

    monkeypatch.setattr(ENCODE, encode)
    triton_version(version)
    given = Descriptor(torch.arange(8.0)), 7
    start = private.prepare_launch(kernel_of(wrapped_launcher()), (3, 2, 1), given)
    pointer, *numbers = start.arguments
    assert numbers == [4, 2, 2, 1, 7]
    for _ in range(3):
        assert pointer.encode[1024] == "encoded as told of 1024"
    assert encoded == [1024]
    start_again(start, pointer.encode[1024], *numbers)
    assert capsys.readouterr().out == HEAD[version]


@pytest.mark.parametrize("version", HEAD)
@pytest.mark.parametrize(
    "change",
    [
        {"global_scratch_size": 8},
        {"profile_scratch_size": 8},
        {"launch": wrapped_launcher([None]).launch},
        {"launch": lambda *arguments: None},
    ],
    ids=["scratch", "profile", "descriptors in parts", "another form"],
)
def test_launchers_of_another_form_are_called_as_triton_calls_them(triton_version, version, change):
    triton_version(version)
    run = wrapped_launcher()
    vars(run).update(change)
    given = Descriptor(torch.arange(8.0)), 7
    assert private.prepare_launch(kernel_of(run), (3, 1, 1), given).function is run


def test_an_instrumented_kernel_is_called_as_triton_calls_it(triton_version):
    triton_version("3.9")
    run = wrapped_launcher()
    run.gsan_enabled = True
    assert private.prepare_launch(kernel_of(run), (1, 1, 1), ()).function is run


def test_encoded_descriptors_are_bounded(monkeypatch):
    monkeypatch.setattr(private, "MAX_DESCRIPTORS", 3)
    boxes = private.Descriptors(Descriptor(torch.arange(8.0)))
    for address in range(10):
        assert boxes[address].data_ptr() == address
    assert len(boxes) <= 3


def test_triton_encodes_descriptors_under_this_name():
    module, _, name = ENCODE.rpartition(".")
    assert callable(getattr(import_module(module), name))


def test_tritons_launch_hooks_are_seen():
    is_hooked = private.launch_hooks()
    assert not is_hooked()
    hook = triton.knobs.runtime.launch_enter_hook

    def note(metadata: object) -> None: ...

    hook.add(note)
    try:
        assert is_hooked()
    finally:
        hook.remove(note)


def test_a_missing_interface_of_torch_is_named():
    with pytest.raises(ImportError, match=r"mlakit needs torch\._C\._gone, which torch .* lacks"):
        private._of_torch("_C._gone")
    assert private._of_torch("_C._gone.at_all", is_needed=False) is None


def test_dispatch_modes_are_counted():
    before = private.dispatch_modes()
    with FakeTensorMode():
        assert private.dispatch_modes() == before + 1


def test_tracing_is_seen():
    assert not private.is_traced()
    with FakeTensorMode():
        assert private.is_traced()
    with FlopCounterMode(display=False):  # a mode whose tensors have values
        assert private.dispatch_modes()
        assert not private.is_traced()


def test_transforms_batches_and_forward_mode_are_seen():
    x = torch.arange(3.0)
    seen = []

    def look(part: Tensor) -> Tensor:
        seen.append((private.is_transformed(), private.is_batched(part)))
        return part

    torch.vmap(look)(x)
    assert seen == [(True, True)]
    assert (private.is_transformed(), private.is_batched(x)) == (False, False)
    assert private.is_forward_mode()
    with torch.autograd.forward_ad._set_fwd_grad_enabled(False):
        assert not private.is_forward_mode()


def test_autograd_is_left_out_below_it():
    x = torch.ones(3, requires_grad=True)
    with private.below_autograd():
        assert not (x * 2).requires_grad
    assert (x * 2).requires_grad


def test_plain_tensors_have_plain_keys():
    keys = private.plain_keys("cpu")
    with torch.inference_mode():
        inferred = torch.ones(3)
    for tensor in (torch.ones(3), inferred):
        assert private.dispatch_keys(tensor).raw_repr() in keys
    assert private.dispatch_keys(torch.ones(3).to("meta")).raw_repr() not in keys
    assert private.plain_keys("meta") == frozenset()


def test_deterministic_algorithms_are_seen():
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for is_asked_for in (True, False):
            torch.use_deterministic_algorithms(is_asked_for)
            assert private.is_deterministic() == is_asked_for
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize(
    ("other", "is_alike"),
    [
        (torch.ones(2, 3), True),
        (torch.ones(3, 2), False),
        (torch.ones(3, 2).t(), False),
        (torch.ones(2, 3, dtype=torch.float64), False),
        (torch.ones(2, 3, requires_grad=True), False),
    ],
    ids=["alike", "shape", "strides", "dtype", "needs a gradient"],
)
def test_tensors_are_compared_in_one_call(other, is_alike):
    compare = private.comparison_with([torch.zeros(2, 3), torch.zeros(4)])
    assert compare is not None
    assert compare(other, torch.zeros(4)) is is_alike


def test_tensors_are_allocated_past_the_dispatcher():
    allocate = private.quick_allocator("cpu")
    assert allocate is not None
    made = allocate((2, 3), (1, 2), torch.bfloat16)
    assert (made.shape, made.stride(), made.dtype) == ((2, 3), (1, 2), torch.bfloat16)


@pytest.mark.gpu
def test_the_current_device_and_stream_are_those_of_torch():
    assert private.current_device() == torch.cuda.current_device()
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        assert private.current_stream(0) == torch.cuda.current_stream(0).cuda_stream
    assert private.quick_allocator("cuda") is not None


def test_tritons_driver_is_replaced_for_a_scope():
    before = triton.runtime.driver._active
    stand_in = SimpleNamespace(get_current_device=lambda: 7)
    with private.driver_replaced_by(stand_in):
        assert triton.runtime.driver.active.get_current_device() == 7
    assert triton.runtime.driver._active is before


def test_the_entry_of_a_kernel_in_tritons_cache_is_found_without_a_compiler(tmp_path):
    def compile_kernel() -> None:
        found = triton.runtime.cache.get_cache_manager("ab" * 32).get_group("add_kernel.json")
        raise AssertionError(f"the compiler would start, or load {found}")

    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        own = triton.knobs.cache.manager_class
        entry = private.cache_entry(compile_kernel)
        assert triton.knobs.cache.manager_class is own
        assert (entry.kernel, entry.exists) == ("add_kernel", False)
        manager = triton.runtime.cache.get_cache_manager("ab" * 32)
        assert manager.key == entry.key
        manager.put_group("add_kernel.json", {"x": manager.put("text", "x")})
        assert private.cache_entry(compile_kernel).exists
        assert private.cache_folder() == str(tmp_path)
    with pytest.raises(RuntimeError, match="compiled earlier in this process"):
        private.cache_entry(lambda: None)


class Sizes(NamedTuple):
    kind: tl.dtype
    sizes: tuple[int, tuple[int, float]]
    name: str
    absent: None


def test_constants_in_tuples_are_described_to_listeners():
    import_module("mlakit.kernels.launch")
    constants = {(0,): Sizes(tl.int32, (1, (2, 3.0)), "x", None), (1,): 4, (2,): tl.float32}
    own = inspect.signature(inspect.unwrap(jit.serialize_specialization_data)).parameters
    options = target = SimpleNamespace()
    last = (target,) if "target" in own else ()
    text = jit.serialize_specialization_data("k", {}, constants, {}, options, "key", *last)
    assert json.loads(text)["constant_vals"] == [["int32", [1, [2, 3.0]], "x", None], 4, "fp32"]


def test_compilations_of_this_package_are_counted_and_other_listeners_hear_of_them(monkeypatch):
    heard: list[str] = []
    knobs = triton.knobs.compilation
    monkeypatch.setattr(knobs, "listener", lambda src, **others: heard.append(src.name))
    monkeypatch.setattr(private, "KERNEL_COUNTS", private.KernelCounts())
    private.count_compilations()

    def report(module: str, name: str, *, is_loaded: bool) -> None:
        function = SimpleNamespace(__module__=module)
        knobs.listener(
            src=SimpleNamespace(fn=function, name=name),
            metadata={},
            metadata_group={},
            times=None,
            cache_hit=is_loaded,
        )

    report("mlakit.kernels.x", "add", is_loaded=False)
    report("mlakit.kernels.x", "add", is_loaded=True)
    report("vllm.x", "other", is_loaded=False)
    counts = private.KERNEL_COUNTS
    assert (counts.compiled, counts.loaded) == (Counter(add=1), Counter(add=1))
    assert heard == ["add", "add", "other"]
