"""Process groups: their ranks, and the sum over them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch import distributed as dist


class GroupRank(NamedTuple):
    """The rank of this process in a group, and the number of ranks."""

    rank: int
    world: int


def group_rank(op: str, group: dist.ProcessGroup | None) -> GroupRank:
    """The rank of this process in `group`; None is the default group."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(f"{op} needs torch.distributed.init_process_group")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"{op}: group must include this process")
    return GroupRank(rank, dist.get_world_size(group))


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum of `x` over the ranks, in place: the end of a layer whose heads are sharded.

    x  in one shape and dtype on all ranks

    Returns x.
    """
    if group_rank("sum_over_ranks", group).world > 1 and x.numel() > 0:
        dist.all_reduce(x, group=group)
    return x


def gather_over_ranks(
    received: Tensor, mine: Tensor, group: dist.ProcessGroup | None = None
) -> None:
    """Fill `received` [world, …] with `mine` [1, …] of every rank."""
    # torch 2.13 renames the function and warns about the old name
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(received, mine, group=group)
