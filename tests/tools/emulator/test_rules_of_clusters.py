"""Every rule of clusters: tiny kernels of two CTAs, right and broken."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", minversion="3.9", reason="Blackwell's kernels need Triton 3.9")
Run = Callable[..., Any]
# operations that Triton adds after TTGIR
FENCE = r"ttng\.fence_mbarrier_init_release_cluster"
RELAXED = r"ttng\.cluster_barrier {relaxed = true}"
LAST = r"ttng\.cluster_barrier loc\(#loc\)(?=\n    tt.return)"


@pytest.fixture(scope="module")
def run(in_emulator: Callable[..., Any]) -> Run:
    return lambda *args: in_emulator(_run, *args)


def _run(
    kernel: str, broken: str, seed: int, dropped: str = ""
) -> tuple[str, str, torch.Tensor, torch.Tensor]:
    """Return the class of the fault and its message, "" if there is none; x, and the results.

    dropped  what is taken from the IR
    """
    from mlakit.tools.emulator.faults import Fault
    from mlakit.tools.emulator.frontend import emulating
    from tests.tools.emulator import tiny_clusters

    def mutate(_: str, text: str) -> str:
        if not dropped:
            return text
        mutant = re.sub(rf"\n *{dropped}.*", "", text)
        assert mutant != text
        return mutant

    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    operands, out = _operands(kernel, x)
    fault = message = ""
    with emulating(seed=seed, arch=100, mutate=mutate):
        try:
            getattr(tiny_clusters, kernel)[(1,)](
                *operands, out, BREAK=broken, num_warps=4, num_ctas=2
            )
        except Fault as found:
            fault, message = type(found).__name__, str(found)
    return fault, message, x.float(), out


def _operands(kernel: str, x: torch.Tensor) -> tuple[list[Any], torch.Tensor]:
    """Return what a kernel reads, and what it writes."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    def tiles(of: torch.Tensor, block: list[int], basis: list[int]) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16, cga_layout=[basis])
        return TensorDescriptor.from_tensor(of, block, layout)

    wide = torch.zeros(256, 128)
    if kernel in ("pair", "multicast_product"):
        basis = [0, 1] if kernel == "pair" else [0, 0]
        right = x[:128].T.contiguous()
        return [tiles(x, [256, 32], [1, 0]), tiles(right, [32, 128], basis)], wide
    if kernel == "pair_of_stored":
        return [x], wide
    if kernel == "multicast":
        return [tiles(x, [128, 64], [0, 0]), x], torch.zeros(128, 64)
    if kernel == "stored_tiles":
        out = torch.zeros(256, 64, dtype=torch.bfloat16)
        return [tiles(out, [128, 64], [1, 0]), x], out
    return [x], torch.zeros(128, 64)


RIGHT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "multicast": lambda x: x[:128] + x[128:],
    "pair": lambda x: x @ x[:128].T,
    "pair_of_stored": lambda x: x @ x[:128].T,
    "multicast_product": lambda x: x @ x[:128].T,
    "peer_read": lambda x: 2 * x[:128],
    "announced": lambda x: 2 * x[:128],
    "stored_tiles": lambda x: x,
}
ALSO_RIGHT = [
    ("pair_of_stored", "right: fence of the cluster"),
    ("peer_read", "right: written after a barrier"),
]
BROKEN = [
    ("multicast", "the peer's stage is not empty", "Race"),
    ("multicast", "fewer bytes", "BarrierMisuse Deadlock"),
    ("multicast", "no wait", "Race"),
    ("multicast", "no fence", "MissingFence"),
    ("pair", "the peer's part is not waited for", "Race"),
    ("pair", "no wait", "Race BarrierMisuse"),
    ("pair_of_stored", "no barrier", "Race"),
    ("pair_of_stored", "relaxed barrier", "Race"),
    ("pair_of_stored", "fence of a CTA for both", "MissingFence"),
    ("multicast_product", "commit to one CTA", "Race"),
    ("peer_read", "no barrier", "Race"),
    ("peer_read", "relaxed barrier", "Race"),
    ("peer_read", "written too soon", "Race"),
    ("announced", "arrives at its own", "Race"),
    ("announced", "arrives twice", "BarrierMisuse Deadlock"),
    ("stored_tiles", "tiles overlap", "Race"),
]
DROPPED = [
    ("multicast", FENCE, "Race"),  # that mbarriers are initialised
    ("pair", FENCE, "Race"),
    ("announced", FENCE, "Race"),
    ("announced", RELAXED, "Race"),
    ("pair", RELAXED, "Race"),
    ("peer_read", LAST, "UnfinishedAtExit"),  # before a peer has read
    ("announced", LAST, "UnfinishedAtExit"),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("kernel", "variant"), [*((each, "") for each in RIGHT), *ALSO_RIGHT])
def test_a_kernel_that_is_right_runs(run: Run, kernel: str, variant: str, seed: int) -> None:
    fault, message, x, out = run(kernel, variant, seed)
    assert not fault, message
    torch.testing.assert_close(out.float(), RIGHT[kernel](x), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("kernel", "broken", "faults"), BROKEN)
def test_a_broken_kernel_is_reported(
    run: Run, kernel: str, broken: str, faults: str, seed: int
) -> None:
    fault, message, _, _ = run(kernel, broken, seed)
    assert fault in faults.split(), message or "no fault"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("kernel", "dropped", "faults"), DROPPED)
def test_what_triton_adds_is_needed(
    run: Run, kernel: str, dropped: str, faults: str, seed: int
) -> None:
    fault, message, _, _ = run(kernel, "", seed, dropped)
    assert fault in faults.split(), message or "no fault"
