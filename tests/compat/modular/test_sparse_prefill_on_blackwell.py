"""`mla_sm100_prefill_sparse` on the kernel of the GPU that it is named after, in the emulator."""

from __future__ import annotations

import pytest
import torch

from mlakit.dispatch import knobs
from tests.compat.modular.attention_cases import SparseCase
from tests.compat.modular.inputs import normal
from tests.tools.emulator.processes import compiling_process

pytest.importorskip("triton", minversion="3.9", reason="Blackwell's kernels need Triton 3.9")


def kernels_of(heads: int) -> list[str]:
    """Run and check a case, and return the kernels that it launched."""
    from mlakit.tools.compile.configurations import BLACKWELL_ARCHS
    from mlakit.tools.emulator.frontend import emulating_mlakit

    sink = normal(torch.Generator().manual_seed(heads), heads, std=4.0)
    case = SparseCase(heads=heads, layer=1, sink=sink)
    with (
        emulating_mlakit(arch=BLACKWELL_ARCHS[0]) as emulation,
        knobs.override(backend="blackwell"),
    ):
        case.run()
    case.check()
    return [launch.kernel for launch in emulation.launches]


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kernel"), [(70, "m128_bf16"), (9, "n64_bf16")])
def test_it_launches_a_kernel_of_sm_100(heads, kernel):
    with compiling_process() as pool:
        launched = pool.submit(kernels_of, heads).result()
    assert launched[0] == f"sparse_mla_{kernel}_kernel"
