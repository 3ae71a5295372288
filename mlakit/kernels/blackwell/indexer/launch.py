"""Launching the indexer kernel of Blackwell.

Limits     `kernels.blackwell.support` refuses what the kernel does not take
"""

from __future__ import annotations

from torch import Tensor

from mlakit.kernels.arguments import LogitsArguments
from mlakit.kernels.blackwell.indexer.configs import pick_config
from mlakit.kernels.blackwell.indexer.kernel import indexer_logits_m128_kernel
from mlakit.kernels.hopper.indexer.calls import run


def indexer_logits(a: LogitsArguments, out: Tensor) -> None:
    """Launch the kernel; the arguments are those of Hopper's."""
    run(indexer_logits_m128_kernel, pick_config, a, out)
