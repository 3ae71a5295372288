"""Every rule of tcgen05, tensor memory and TMA gathers: a tiny kernel, right and broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", minversion="3.9", reason="Blackwell's kernels need 3.9")
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def run(in_emulator: Callable[..., Any]) -> Run:
    return lambda *args: in_emulator(_run, *args)


def _run(kernel: str, broken: str, seed: int) -> tuple[str, str, torch.Tensor, torch.Tensor]:
    """Return the class of the fault and its message, "" if there is none; x, and the results."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from mlakit.tools.emulator.faults import Fault
    from mlakit.tools.emulator.frontend import emulating
    from tests.tools.emulator import tiny_tensor

    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    rows = TensorDescriptor(x, [128, 64], [64, 1], [1, 64], tiny_tensor.SMEM.value)
    out = torch.zeros(128, 128 if kernel in WIDE else 64)
    fault = message = ""
    with emulating(seed=seed, arch=100):
        try:
            getattr(tiny_tensor, kernel)[(1,)](rows, x, INDEX, out, BREAK=broken, num_warps=4)
        except Fault as found:
            fault, message = type(found).__name__, str(found)
    return fault, message, x.float(), out


WIDE = ("tensor_product", "reloaded", "reused_columns")
INDEX = torch.cat([torch.tensor([-1, 128, 2**31 - 1]), torch.arange(3, 128).flip(0)]).int()
RIGHT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tensor_product": lambda x: x @ x.T,
    "tensor_operand": lambda x: 4 * x @ x[:64],
    "tensor_copy": lambda x: x,
    "gathered": lambda x: torch.cat([torch.zeros(3, 64), x[3:].flip(0)]),
    "reused_columns": lambda x: x @ x.T,
    "reloaded": lambda x: 2 * RIGHT["gathered"](x) @ RIGHT["gathered"](x).T,
}
BROKEN = [
    ("tensor_product", "no fence", "MissingFence"),
    ("tensor_product", "no first value", "Race"),
    ("tensor_product", "commits too soon", "Race"),
    ("tensor_product", "no commit", "Deadlock"),
    ("tensor_product", "operand overwritten", "Race"),
    ("tensor_product", "no wait", "Race"),
    ("tensor_product", "not loaded", "UnfinishedAtExit"),
    ("tensor_operand", "P read too soon", "Race"),
    ("tensor_operand", "P written too soon", "Race Deadlock"),
    ("tensor_operand", "O scaled too soon", "Race Deadlock"),
    ("tensor_operand", "O used too soon", "Race Deadlock"),
    ("tensor_operand", "O read too soon", "Race"),
    ("tensor_copy", "no fence", "MissingFence"),
    ("tensor_copy", "no wait", "Race"),
    ("gathered", "fewer bytes", "Deadlock"),
    ("gathered", "unaligned column", "IllegalCopy"),
    ("gathered", "no wait", "Race"),
    ("reloaded", "loaded too soon", "Race BarrierMisuse"),
    ("reused_columns", "used before it is released", "Race"),
    ("reused_columns", "released too late", "OutOfBounds"),
    ("reused_columns", "value of the last tile", "Race"),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kernel", RIGHT)
def test_a_kernel_that_is_right_runs(run: Run, kernel: str, seed: int) -> None:
    fault, message, x, out = run(kernel, "", seed)
    assert not fault, message
    torch.testing.assert_close(out, RIGHT[kernel](x), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("kernel", "broken", "faults"), BROKEN)
def test_a_broken_kernel_is_reported(
    run: Run, kernel: str, broken: str, faults: str, seed: int
) -> None:
    fault, message, _, _ = run(kernel, broken, seed)
    assert fault in faults.split(), message or "no fault"
