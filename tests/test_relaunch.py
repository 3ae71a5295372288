"""Launches once more: what launchers are handed, the known one and others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor

from mlakit.kernels.triton import relaunch


class Descriptor:
    """As much of one for TMA as a launcher reads."""

    def __init__(self, base: Tensor) -> None:
        self.base, self.shape, self.strides = base, [4, 2], [2, 1]
        self.block_shape, self.padding = [2, 2], "zero"


class Launcher:
    """Triton's, of a kernel with a descriptor `box` and a number."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> None:
        *head, box, number = arguments
        self.seen.append((*head, box.base.data_ptr(), box.shape, box.strides, box.padding, number))


def start_again(prepared: relaunch.Prepared, *arguments: Any) -> None:
    """On stream 5."""
    prepared.start(*prepared.before_stream, 5, *prepared.after_stream, *arguments)


def test_a_launcher_that_is_not_known_gets_descriptors(monkeypatch):
    monkeypatch.setattr(relaunch, "KNOWN_LAUNCHERS", ("no such version",))
    run = Launcher()
    kernel = SimpleNamespace(run=run, function="function", packed_metadata="metadata")
    x = torch.arange(8.0)
    prepared = relaunch.Launch(kernel, (3,), (Descriptor(x), 7)).prepare()
    box, number = prepared.arguments
    assert box.tensor is x
    assert number == 7
    for address in (1024, 2048):
        start_again(prepared, box.taken_as[address], 7)
        head = (3, 1, 1, 5, "function", "metadata", None, None, None)
        assert run.seen.pop() == (*head, address, [4, 2], [2, 1], "zero", 7)


def test_the_launcher_that_is_known_gets_encoded_descriptors(monkeypatch, capsys):
    monkeypatch.setattr(relaunch, "KNOWN_LAUNCHERS", (triton.__version__,))
    encoded = []

    def encode(box: Any, encoding: Any) -> list[Any]:
        encoded.append(box.base.data_ptr())
        return [f"map {encoding} of {box.base.data_ptr()}", *box.shape, *box.strides]

    monkeypatch.setattr("triton.backends.nvidia.driver.make_tensordesc_arg", encode)
    run = Launcher()
    launcher, tensordesc_meta = print, ["as told"]  # a function in C that takes anything

    def inner(*arguments: Any) -> None:
        raise AssertionError(launcher, tensordesc_meta)

    run.launch = inner
    kernel = SimpleNamespace(run=run, function="function", packed_metadata="metadata")
    prepared = relaunch.Launch(kernel, (3, 2), (Descriptor(torch.arange(8.0)), 7)).prepare()
    box, *numbers = prepared.arguments
    assert numbers == [4, 2, 2, 1, 7]
    for _ in range(3):
        assert box.taken_as[1024] == "map as told of 1024"
    assert encoded == [1024]
    start_again(prepared, box.taken_as[1024], *numbers)
    head = "3 2 1 5 function False True None None metadata None None None"
    assert capsys.readouterr().out == f"{head} map as told of 1024 4 2 2 1 7\n"


def test_maps_are_bounded(monkeypatch):
    monkeypatch.setattr(relaunch, "MAX_MAPS", 3)
    boxes = relaunch.Boxes(Descriptor(torch.arange(8.0)))
    for address in range(10):
        assert boxes[address].data_ptr() == address
    assert len(boxes) <= 3
