"""`get_mla_metadata` and `FlashMLASchedMeta`: accepted for compatibility, without a schedule.

FlashMLA stores a schedule for the lengths of the first call in the object, and is wrong if it is
used again with other lengths. Here the ops read the lengths when they run: one object works for any
lengths and shapes, also in a replayed CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mlakit.dispatch.checks import Dims
from mlakit.dispatch.reprs import shapes_repr


@dataclass
class FlashMLASchedMeta:
    """The result of `get_mla_metadata`; `config` describes the last call that used it."""

    @dataclass
    class Config:
        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int
        causal: bool
        is_fp8_kvcache: bool
        topk: int | None
        extra_page_block_size: int | None
        extra_topk: int | None

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None

    __repr__ = shapes_repr


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """(a new FlashMLASchedMeta, None); older versions return `num_splits` as the second value.

    All arguments are ignored: older versions take the lengths and head counts.
    """
    return FlashMLASchedMeta(), None


def check_metadata(dims: Dims, tile_scheduler_metadata: object, num_splits: object) -> None:
    """Accept metadata of any FlashMLA version; its content has no effect."""
    is_schedule = hasattr(tile_scheduler_metadata, "have_initialized")
    if not (tile_scheduler_metadata is None or is_schedule or _is_tensor(tile_scheduler_metadata)):
        got = type(tile_scheduler_metadata).__name__
        raise TypeError(
            f"{dims.op}: tile_scheduler_metadata must be what get_mla_metadata returns, got {got}"
        )
    if not (num_splits is None or _is_tensor(num_splits)):
        got = type(num_splits).__name__
        raise TypeError(f"{dims.op}: num_splits must be None or a tensor, got {got}")


def set_config(tile_scheduler_metadata: object, config: FlashMLASchedMeta.Config) -> None:
    """Store `config` in a FlashMLASchedMeta, as FlashMLA does."""
    if isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        tile_scheduler_metadata.have_initialized = True
        tile_scheduler_metadata.config = config


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)
