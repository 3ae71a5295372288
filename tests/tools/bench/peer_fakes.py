"""Peers of the benchmarks that record their calls, and a decode for them."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from mlakit.dispatch import knobs
from mlakit.tools.bench import gpu
from mlakit.tools.bench.peers.fetched import MODULE_PREFIX
from mlakit.tools.bench.problems import DenseDecode
from mlakit.tools.testing import shuffled_pages

SCALE = 0.07
PACKAGES = (
    *("flash_mla", "flash_attn_interface", "flashinfer", "deep_gemm"),
    f"{MODULE_PREFIX}deep_gemm",
)


def normal(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (size * torch.randn(*shape, generator=generator)).bfloat16()


def dense_decode(
    kv_lens: tuple[int, ...] = (130, 70), *, s_q: int = 2, heads: int = 16, page_size: int = 64
) -> DenseDecode:
    batch, max_pages = len(kv_lens), -(-max(kv_lens) // page_size) + 1
    table = shuffled_pages(batch, max_pages, batch * max_pages, torch.Generator().manual_seed(1))
    return DenseDecode(
        normal(batch, s_q, heads, 576),
        normal(batch * max_pages, page_size, 576, seed=2, size=0.3),
        table.int(),
        torch.tensor(kv_lens, dtype=torch.int32),
        SCALE,
        causal=True,
    )


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """As if there were a GPU; installed packages are those a test puts on the path."""
    monkeypatch.setattr(gpu, "why_not", lambda: None)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in list(sys.modules):
        if name.split(".")[0] in PACKAGES:
            monkeypatch.delitem(sys.modules, name)
    with knobs.override(peers=str(tmp_path / "peers")):
        yield tmp_path
    for name in list(sys.modules):
        if name.split(".")[0] in PACKAGES:
            del sys.modules[name]


RECORDER = """
calls = []

def record(name, result):
    def call(*args, **kwargs):
        calls.append((name, args, kwargs))
        return result(*args, **kwargs)
    return call
"""


def install(site: Path, package: str, source: str) -> ModuleType:
    """Put a package on the path whose functions note how they are called."""
    path = site / Path(*package.split(".")).with_suffix(".py")
    path.parent.mkdir(exist_ok=True)
    path.write_text(RECORDER + textwrap.dedent(source), encoding="utf-8")
    return __import__(package)


FLASH_MLA = """
def _attend(q, *args, **kwargs):
    return q[..., :512].clone(), None
get_mla_metadata = record("plan", lambda *args, **kwargs: ("schedule", "splits"))
flash_mla_with_kvcache = record("decode", _attend)
flash_mla_sparse_fwd = record("sparse", lambda *args: (args[0][..., :512], None, None))
"""
FA3_OF_VLLM = """
def flash_attn_varlen_func(q, k, v, q_v=None, fa_version=2, **kwargs):
    calls.append(("attend", (q, k, v, q_v), {"fa_version": fa_version, **kwargs}))
    return v.clone() if q_v is None else q_v.clone()
get_scheduler_metadata = record("plan", lambda **kwargs: "schedule")
"""
DEEP_GEMM = """
get_num_sms = lambda: 132
get_paged_mqa_logits_metadata = record("plan", lambda *args: "schedule")
fp8_paged_mqa_logits = record("paged", lambda *args: args[2])
fp8_mqa_logits = record("ragged", lambda *args: args[2])
get_mn_major_tma_aligned_tensor = record("layout", lambda scale: scale.t().contiguous().t())
fp8_gemm_nt = record("matmul", lambda a, b, out: out.fill_(3))
"""
