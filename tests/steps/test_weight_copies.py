"""Copies of weights: what refreshes them, and which writes are found."""

from __future__ import annotations

import copy
import io
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mlakit.steps.weight_copies import GPU_INTERVAL, SAMPLE, WeightCopies, WeightCopy
from mlakit.tools.testing import assert_same_bits

BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
SHAPES = [(300,), (96, 50), (4, 24, 40), (1, 7, 513), (3, 3)]


def matrix(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def copies_of(source: Tensor, **how: Any) -> tuple[WeightCopies, Tensor]:
    made = WeightCopy("kv_b_proj", source, **how)
    return WeightCopies("UpProjection", [made]), made.values


def uses_until_found(copies: WeightCopies, limit: int) -> int:
    """The uses before the one that raises, which must be one of `limit`."""
    used = []

    def use() -> None:
        for i in range(limit):
            copies.ensure_current()
            used.append(i)
            if torch.cuda.is_available():
                torch.cuda.synchronize()

    with pytest.raises(RuntimeError, match=r"UpProjection: kv_b_proj must.*refresh_weights\(\)"):
        use()
    return len(used)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_samples_reach_every_element(shape):
    """Each sample is small, and together they have every element once."""
    made = WeightCopy("kv_b_proj", matrix(*shape))
    seen = torch.zeros(shape, dtype=torch.int64)
    for _ in range(prod(made.steps)):
        at = made._next_sample()
        assert seen[at].numel() <= SAMPLE
        seen[at] += 1
    assert bool((seen == 1).all())


@pytest.mark.parametrize("dtype", [BF16, torch.float16, E4M3], ids=str)
def test_a_write_of_the_whole_weight_is_found_at_once(dtype, device):
    source = matrix(64, 200, dtype=dtype).to(device)
    copies, values = copies_of(source, dtype=F32 if dtype != E4M3 else None)
    copies.ensure_current()
    source.data.copy_(matrix(64, 200, dtype=dtype, seed=1))
    found = uses_until_found(copies, 2 * GPU_INTERVAL + 1)
    assert found <= (0 if device.type == "cpu" else GPU_INTERVAL + 1)
    with pytest.raises(RuntimeError, match="must equal the copy"):  # until it is refreshed
        copies.ensure_current()
    where = values.data_ptr()
    copies.refresh()
    for _ in range(2 * GPU_INTERVAL):
        copies.ensure_current()
    assert values.data_ptr() == where
    assert_same_bits("values", values.cpu(), source.to(values.dtype).cpu())


@pytest.mark.parametrize("at", [(0, 0), (63, 199), (17, 101)], ids=str)
def test_a_write_of_one_element_is_found_when_a_sample_reaches_it(at, device):
    source = matrix(64, 200).to(device)
    copies, _ = copies_of(source, dtype=F32)
    source.data[at] += 1
    samples = prod(copies.copies[0].steps)
    assert samples > 1
    interval = 1 if device.type == "cpu" else GPU_INTERVAL
    assert uses_until_found(copies, (samples + 1) * interval) < (samples + 1) * interval


def test_counted_writes_refresh_the_copy():
    source = matrix(64, 200)
    copies, values = copies_of(source, dtype=F32)
    for seed in (1, 2):
        source.copy_(matrix(64, 200, seed=seed))
        copies.ensure_current()
        assert_same_bits("values", values, source.float())


@pytest.mark.parametrize("is_inference", [False, True])
def test_inference_tensors(is_inference):
    """Torch counts no write to them; a copy made of one is refreshed in any mode."""
    with torch.inference_mode(is_inference):
        copies, values = copies_of(matrix(64, 200), dtype=F32)
    with torch.inference_mode():
        copies.copies[0].source.copy_(matrix(64, 200, seed=1))
    if is_inference:
        assert uses_until_found(copies, 2) == 0
    copies.refresh()
    copies.ensure_current()
    assert_same_bits("values", values, matrix(64, 200, seed=1).float())


def test_a_weight_with_nan_is_equal_to_its_copy():
    source = matrix(16, 16)
    source[3] = torch.nan
    copies, _ = copies_of(source, dtype=F32)
    for _ in range(4):
        copies.ensure_current()


def test_blocks_and_a_factor():
    source = matrix(4, 3, dtype=F32)
    index = (torch.tensor([[0], [2], [3]]), torch.tensor([2, 2, 0, 1]))
    copies, values = copies_of(source, index=index, factor=2.5)
    assert_same_bits("values", values, source[[0, 2, 3]][:, [2, 2, 0, 1]] * 2.5)
    source.data[1] = 0.0  # no block of it is copied
    copies.ensure_current()
    source.data[2] = 0.0
    assert uses_until_found(copies, 2) == 0
    copies.refresh()
    assert_same_bits("values", values, source[[0, 2, 3]][:, [2, 2, 0, 1]] * 2.5)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_copied_with_their_weights(how):
    copies, _ = copies_of(matrix(64, 200), dtype=F32)
    if how == "deepcopy":
        other = copy.deepcopy(copies)
    else:
        buffer = io.BytesIO()
        torch.save(copies, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    other.ensure_current()
    other.copies[0].source.data.zero_()
    assert uses_until_found(other, 2) == 0
    copies.ensure_current()


def test_nothing_is_compared_where_tensors_have_no_values():
    """A fake tensor has no values."""
    source = matrix(64, 200)
    copies, _ = copies_of(source, dtype=F32)
    source.data.zero_()
    with FakeTensorMode():
        copies.ensure_current()


class Passing(TorchDispatchMode):
    """A mode that watches operations, as profilers have it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_writes_are_seen_under_a_mode_that_only_watches():
    source = matrix(64, 200)
    copies, values = copies_of(source, dtype=F32)
    with Passing():
        source.copy_(matrix(64, 200, seed=1))
        copies.ensure_current()
        assert_same_bits("values", values, source.float())
        source.data.zero_()
        assert uses_until_found(copies, 2) == 0


def test_a_batch_of_vmap_is_left_to_the_op_that_refuses_it():
    def use(source: Tensor) -> Tensor:
        copies, values = copies_of(source, dtype=F32)
        copies.ensure_current()
        return values

    source = matrix(3, 8, 20)
    assert_same_bits("values", torch.func.vmap(use)(source), source.float())


@pytest.mark.gpu
def test_no_use_on_a_gpu_waits():
    copies, _ = copies_of(matrix(64, 200).cuda(), dtype=F32)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3 * GPU_INTERVAL):
            copies.ensure_current()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_cuda_graph_compares_nothing_and_sees_a_refresh():
    source = matrix(64, 200).cuda()
    copies, values = copies_of(source, dtype=F32)
    for _ in range(GPU_INTERVAL):
        copies.ensure_current()
    torch.cuda.synchronize()
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(values)
    with torch.cuda.graph(graph):
        for _ in range(2 * GPU_INTERVAL):
            copies.ensure_current()
        out.copy_(values)
    source.data.copy_(matrix(64, 200, seed=1))
    copies.refresh()
    graph.replay()
    assert_same_bits("out", out.cpu(), source.float().cpu())
