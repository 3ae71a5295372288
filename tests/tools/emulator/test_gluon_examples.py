"""Upstream's Blackwell examples in the emulator, where GLUON_EXAMPLES names the folder of them.

They are no part of this repository: they are `python/examples/gluon` of Triton's source tree.
"""

from __future__ import annotations

import os
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton", minversion="3.9", reason="the examples need Triton 3.9")
FOLDER = os.environ.get("GLUON_EXAMPLES")
pytestmark = pytest.mark.skipif(
    FOLDER is None, reason="GLUON_EXAMPLES names no folder with upstream's examples"
)
BLACKWELL = SimpleNamespace(multi_processor_count=2, major=10, minor=0)


def example(name: str) -> ModuleType:
    """Import an example, as on a GPU of Blackwell with two SMs."""
    assert FOLDER is not None
    spec = spec_from_file_location(f"example_{name[:2]}", Path(FOLDER, f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("cga_layout", [(), ((1, 0),)], ids=["1 CTA", "2 CTAs"])
def test_attention(in_emulator, cga_layout, is_causal, seed):
    error, limit = in_emulator(attention_error, cga_layout, is_causal, seed)
    assert error < limit


def test_a_peer_may_arrive_at_an_mbarrier_that_the_attention_invalidates(in_emulator):
    fault = in_emulator(fault_at_invalidation)
    assert re.search(r"barrier .* of CTA 0.* is invalidated, and its use by .* of CTA 1", fault)


def valid(text: str) -> str:
    """Return the IR of a kernel that leaves its mbarriers valid."""
    return re.sub(r"\n *ttng\.inval_barrier .*", "", text)


def fault_at_invalidation() -> str:
    """Run the attention of two CTAs as it is, and return the fault.

    CTA 0 ends by invalidating the mbarriers that it has for both, and nobody waits for the last
    arrivals of CTA 1. It is harmless where nothing else gets their memory.
    """
    from mlakit.tools.emulator.faults import Race

    try:
        attention_error(((1, 0),), is_causal=False, seed=0, invalidates=True)
    except Race as fault:
        return str(fault)
    return ""


def attention_error(
    cga_layout: tuple[tuple[int, int], ...], is_causal: bool, seed: int, invalidates: bool = False
) -> tuple[float, float]:
    """Return the largest error of an output, and the largest that bfloat16 makes."""
    from mlakit.dispatch import private  # not in the process of the tests
    from mlakit.tools.emulator.frontend import NoDriver, emulating

    # a cluster has tiles of 512 queries: with fewer, the tiles of two heads would overlap
    shape, scale = (1, 1 if cga_layout else 2, 512, 64), 0.5
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(shape, generator=generator).div(2).bfloat16() for _ in range(3))
    with (
        patch.object(torch.cuda, "get_device_capability", lambda *_: (10, 0)),
        patch.object(torch.cuda, "get_device_properties", lambda *_: BLACKWELL),
        private.driver_replaced_by(NoDriver(100)),
        emulating(seed=seed, arch=100, mutate=None if invalidates else lambda _, text: valid(text)),
    ):
        attention = example("01-attention-forward").attention_forward
        out, _ = attention(q, k, v, is_causal, scale, cga_layout=cga_layout)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), scale=scale, is_causal=is_causal
    )
    return (out - expected).abs().max().item(), 2**-8 * expected.abs().max().item()
