"""The backends of a draft model: one for each step of its decode, whose proposals are a chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class DraftSteps:
    """All steps but the last, which takes no attention: its tokens are verified."""

    needs_cpu_seq_lens: ClassVar[bool] = False

    def __init__(self, create: Callable[[Any, int], Any], runner: Any, steps: int) -> None:
        self.attn_backends = [create(runner, step) for step in range(steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Do nothing: the metadata of all steps are made inside of the graph."""

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata_in_graph(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Do nothing: the memory of a step's metadata is that of its graph."""
