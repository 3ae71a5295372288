"""Schedules that cannot go stale: the object remembers a configuration and schedules nothing.

FlashMLA fills the object at its first use with a schedule made from the lengths of that call, and
is wrong when it is used again with other lengths. Here the ops read lengths when they run, so one
object serves any lengths and any shapes, in a replayed CUDA graph too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mlakit.checks import Dims
from mlakit.reprs import shapes_repr


@dataclass
class FlashMLASchedMeta:
    """What `get_mla_metadata` returns. `config` describes the last call that was given it."""

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
    """A new, empty schedule, and None where older versions had `num_splits`.

    Every argument is accepted and ignored: the older form passed the lengths and head counts.
    """
    return FlashMLASchedMeta(), None


def check_metadata(dims: Dims, tile_scheduler_metadata: object, num_splits: object) -> None:
    """Any form of metadata, of any version, whatever is in it: it does not change a result."""
    is_schedule = hasattr(tile_scheduler_metadata, "have_initialized")
    if not (tile_scheduler_metadata is None or is_schedule or _is_tensor(tile_scheduler_metadata)):
        got = type(tile_scheduler_metadata).__name__
        raise TypeError(
            f"{dims.op}: tile_scheduler_metadata must be what get_mla_metadata returns, got {got}"
        )
    if not (num_splits is None or _is_tensor(num_splits)):
        got = type(num_splits).__name__
        raise TypeError(f"{dims.op}: num_splits must be None or a tensor, got {got}")


def remember(tile_scheduler_metadata: object, config: FlashMLASchedMeta.Config) -> None:
    if isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        tile_scheduler_metadata.have_initialized = True
        tile_scheduler_metadata.config = config


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)
