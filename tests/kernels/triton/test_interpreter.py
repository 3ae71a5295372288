"""The patched interpreter, compared with torch: `triton` runs interpreted here."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from mlakit.dispatch import knobs
from mlakit.kernels.launch import launch
from mlakit.tools.testing import assert_matches, assert_same_bits

pytestmark = pytest.mark.skipif(not knobs.interpreted(), reason="kernels are compiled here")

ROUNDED = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


@triton.jit
def dot_kernel(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + m[:, None] * K + k[None, :])
    right = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(left, right))


@triton.jit
def cast_kernel(x, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


@triton.jit
def arithmetic_kernel(x, y, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    a, b = tl.load(x + i), tl.load(y + i)
    results = (-a, a + b, a - b, a * b, tl.maximum(a, b), tl.where(a < b, a, b))
    for n in tl.static_range(len(results)):
        tl.store(out + n * SIZE + i, results[n].to(out.dtype.element_ty))


@triton.jit
def count_kernel(bound, out):
    total = 0
    for i in range(tl.load(bound)):
        total += i
    tl.store(out, total)


@triton.jit
def doubled(x):
    return x + x


@triton.jit
def doubling_kernel(x, out, TIMES: tl.constexpr, SIZE: tl.constexpr):
    values = tl.load(x + tl.arange(0, SIZE))
    for _ in range(TIMES):
        values = doubled(values)
    tl.store(out + tl.program_id(0), tl.sum(values, 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_triton_dots(dtype, generator):
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((16, 64), (64, 32)))
    out = torch.empty(16, 32)
    launch(dot_kernel, (1,), a, b, out, M=16, N=32, K=64)
    assert_matches("out", out, a.double() @ b.double(), a.float() @ b.float())


@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
def test_triton_casts_round_to_nearest_even(dtype, generator):
    largest = torch.finfo(dtype).max
    numbers = torch.randn(1024, generator=generator) * torch.linspace(-20, 8, 1024).exp2()
    # ties between neighbours of the target type, and what lies beyond it
    ties = (torch.arange(32).float() * 2 + 1) * torch.finfo(dtype).eps / 2 + 1
    special = torch.tensor([0.0, -0.0, torch.nan, largest, -largest, 1e-30])
    x = torch.cat([numbers, ties, special, torch.zeros(2048 - 1024 - 32 - 6)])
    out = torch.empty(2048, dtype=dtype)
    launch(cast_kernel, (1,), x, out, SIZE=2048)
    expected = x.clamp(-largest, largest) if dtype.itemsize == 1 else x
    assert_same_bits("cast", out.view(torch.uint8), expected.to(dtype).view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_triton_arithmetic_is_of_values(dtype, generator):
    """Not of the bit patterns that stand for them."""
    x, y = (torch.randn(64, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty(6, 64, dtype=dtype)
    launch(arithmetic_kernel, (1,), x, y, out, SIZE=64)
    expected = (-x, x + y, x - y, x * y, torch.maximum(x, y), torch.minimum(x, y))
    assert_same_bits("results", out, torch.stack(expected))


def test_triton_casts_to_e4m3_saturate():
    x = torch.tensor([1e9, -1e9, 449.0, torch.inf] * 4)
    out = torch.empty(16, dtype=torch.float8_e4m3fn)
    launch(cast_kernel, (1,), x, out, SIZE=16)
    assert out.float().tolist() == [448.0, -448.0, 448.0, 448.0] * 4


def test_triton_loops_take_bounds_from_memory():
    out = torch.zeros(1, dtype=torch.int32)
    launch(count_kernel, (1,), torch.tensor([5], dtype=torch.int32), out)
    assert out.item() == 10


def test_triton_patches_its_language_once_a_launch(monkeypatch):
    """Not at each call of a device function: that is half of the time of a kernel with several."""
    patch, patched = interpreter._patch_builtin, []

    def noted(module, *args):
        patched.append(module)
        patch(module, *args)

    monkeypatch.setattr(interpreter, "_patch_builtin", noted)
    builtin = tl.arange
    for programs, times in ((1, 1), (3, 5)):
        out = torch.zeros(programs)
        launch(doubling_kernel, (programs,), torch.ones(8), out, TIMES=times, SIZE=8)
        assert out.tolist() == [8.0 * 2**times] * programs
        assert patched.count(tl) <= 2  # for the kernel, and for tl.sum, which also sees tl.core
        assert tl.arange is builtin  # restored
        patched.clear()


def test_triton_adds_once(monkeypatch):
    """Not a second time in int64 to find an overflow that is not reported."""
    added = []
    add = interpreter.InterpreterBuilder.create_add
    monkeypatch.setattr(
        interpreter.InterpreterBuilder,
        "create_add",
        lambda *args: added.append(args) or add(*args),
    )
    out = torch.zeros(1, dtype=torch.int32)
    launch(count_kernel, (1,), torch.tensor([5], dtype=torch.int32), out)
    assert len(added) == 5


def test_triton_launches_nothing_for_an_empty_grid():
    launch(count_kernel, (0,), None, None)
