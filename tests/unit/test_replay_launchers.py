"""What launch functions are handed when a kernel is started again: of known Triton versions, and of
others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
from torch import Tensor

from mlakit.launch_cache import launchers
from mlakit.launch_cache.launchers import (
    RecordedLaunch,
    any_version,
    descriptors,
    triton_3_6,
    triton_3_9,
)
from mlakit.launch_cache.launchers.prepared import Pointer, PreparedLaunch

ENCODE = "triton.backends.nvidia.driver.make_tensordesc_arg"


class Descriptor:
    """As much of a TMA descriptor as a launcher reads."""

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


def test_pointers_in_named_tuples_are_marked():
    x, y = torch.arange(8.0), torch.arange(3.0)
    start = RecordedLaunch(
        kernel_of(Launcher()), (3,), (Descriptor(x), Rows(y, None, 2), ("fp8", 64))
    )
    box, rows, config = any_version.prepare(start.kernel, (3, 1, 1), start.arguments).arguments
    assert box.tensor is x
    assert rows == (Pointer(y), None, 2)
    assert config == ("fp8", 64)


def test_the_launcher_of_any_version_gets_descriptors(monkeypatch):
    monkeypatch.setattr(launchers, "BY_VERSION", {})
    run, x = Launcher(), torch.arange(8.0)
    start = RecordedLaunch(kernel_of(run), (3,), (Descriptor(x), 7)).prepare()
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
    triton_3_6: "3 2 1 5 function False True None None metadata None None None "
    "encoded as told of 1024 4 2 2 1 7\n",
    triton_3_9: "3 2 1 5 function False True metadata None None None None None annotations "
    "signature ('encoded as told of 1024', 4, 2, 2, 1, 7)\n",
}


@pytest.mark.parametrize("version", HEAD, ids=lambda module: module.__name__.split(".")[-1])
def test_a_known_launcher_gets_encoded_descriptors(monkeypatch, capsys, version):
    encoded = []

    def encode(box: Any, encoding: Any, *_: Any) -> list[Any]:
        encoded.append(box.base.data_ptr())
        return [f"encoded {encoding} of {box.base.data_ptr()}", *box.shape, *box.strides]

    monkeypatch.setattr(ENCODE, encode)
    monkeypatch.setattr(launchers, "BY_VERSION", {triton.__version__: version})
    launch = RecordedLaunch(
        kernel_of(wrapped_launcher()), (3, 2), (Descriptor(torch.arange(8.0)), 7)
    )
    start = launch.prepare()
    pointer, *numbers = start.arguments
    assert numbers == [4, 2, 2, 1, 7]
    for _ in range(3):
        assert pointer.encode[1024] == "encoded as told of 1024"
    assert encoded == [1024]
    start_again(start, pointer.encode[1024], *numbers)
    assert capsys.readouterr().out == HEAD[version]


@pytest.mark.parametrize("version", [triton_3_6, triton_3_9])
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
def test_launchers_of_another_form_are_called_as_triton_calls_them(monkeypatch, version, change):
    monkeypatch.setattr(launchers, "BY_VERSION", {triton.__version__: version})
    run = wrapped_launcher()
    vars(run).update(change)
    start = RecordedLaunch(kernel_of(run), (3,), (Descriptor(torch.arange(8.0)), 7)).prepare()
    assert start.function is run


def test_an_instrumented_kernel_is_called_as_triton_calls_it():
    run = wrapped_launcher()
    run.gsan_enabled = True
    assert triton_3_9.prepare(kernel_of(run), (1, 1, 1), ()) is None


def test_the_installed_triton_has_a_file_or_takes_the_slow_way():
    known = triton.__version__.startswith(tuple(launchers.BY_VERSION))
    assert known or not triton.__version__.startswith(("3.6.", "3.9."))


def test_encoded_descriptors_are_bounded(monkeypatch):
    monkeypatch.setattr(descriptors, "MAX_DESCRIPTORS", 3)
    boxes = descriptors.Descriptors(Descriptor(torch.arange(8.0)))
    for address in range(10):
        assert boxes[address].data_ptr() == address
    assert len(boxes) <= 3
