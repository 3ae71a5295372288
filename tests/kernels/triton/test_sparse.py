"""Which kernels `sparse_mla` asks a compiler for."""

from __future__ import annotations

from typing import Any

import pytest

from mlakit import knobs
from mlakit.workloads import SparseCase

if not knobs.interpreted():
    pytest.skip("kernels are compiled here", allow_module_level=True)

from mlakit.kernels.triton import sparse


def constants(monkeypatch: pytest.MonkeyPatch, **pages: int) -> dict[str, Any]:
    """What the attention of a call is compiled for, which is right."""
    asked: list[dict[str, Any]] = []
    launch = sparse.launch

    def watch(kernel, grid, *args, **options):
        asked.append(options)
        launch(kernel, grid, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(sparse, "launch", watch)
        SparseCase(**pages, num_pages=3, topk=20, extra_format="bf16", extra_topk=9).run(
            "cpu", "triton"
        )
    return asked[0]


def test_one_kernel_serves_all_unusual_pages(monkeypatch):
    odd = constants(monkeypatch, page_size=7, extra_page_size=2)
    assert constants(monkeypatch, page_size=61, extra_page_size=576) == odd


def test_usual_pages_are_constants(monkeypatch):
    asked = constants(monkeypatch, page_size=64, extra_page_size=16)
    assert (asked["PAGE"], asked["EXTRA_PAGE"]) == (64, 16)
