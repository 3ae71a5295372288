"""Launching the indexer kernel of Hopper."""

from __future__ import annotations

from torch import Tensor

from mlakit.kernels.arguments import LogitsArguments
from mlakit.kernels.hopper.indexer.calls import run
from mlakit.kernels.hopper.indexer.configs import pick_config
from mlakit.kernels.hopper.indexer.kernel import indexer_logits_kernel


def indexer_logits(a: LogitsArguments, out: Tensor) -> None:
    """a.q is e4m3, a.page_table has a row per request; out [tokens, columns] float32"""
    run(indexer_logits_kernel, pick_config, a, out)
