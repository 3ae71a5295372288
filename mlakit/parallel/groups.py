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


def are_heads_sharded(
    op: str, tp_group: dist.ProcessGroup | None, cp_group: dist.ProcessGroup
) -> bool:
    """Return whether the ranks of `cp_group` have different heads, those of `tp_group`.

    The two groups have the same ranks, or no rank but this one in common; a third case would mix
    different heads in one merge.
    """
    if tp_group is None or tp_group is cp_group:
        return tp_group is not None
    tp_ranks, cp_ranks = (dist.get_process_group_ranks(each) for each in (tp_group, cp_group))
    if tp_ranks != cp_ranks and len(set(tp_ranks) & set(cp_ranks)) != 1:
        raise ValueError(
            f"{op}: cp_group must have the ranks of tp_group, {tp_ranks}, or only this one of them,"
            f" got {cp_ranks}"
        )
    return tp_ranks == cp_ranks


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
