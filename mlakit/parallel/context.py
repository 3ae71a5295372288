"""The ranks of context-parallel steps, the heads of their queries, and the merge."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch import distributed as dist

from mlakit.cache import KVShard
from mlakit.dispatch.checks import Dims
from mlakit.dispatch.knobs import Backend
from mlakit.ops._checks import check_shard
from mlakit.parallel.groups import gather_over_ranks, group_rank
from mlakit.parallel.merge import (
    MergeMethod,
    check_divided_heads,
    check_method,
    merge_over_ranks,
)
from mlakit.steps import LayerWeights


class ContextGroup(NamedTuple):
    """A process group whose ranks share the cached tokens, and how they merge."""

    group: dist.ProcessGroup | None
    shard: KVShard  # this rank's tokens
    method: MergeMethod
    is_head_sharded: bool

    @classmethod
    def checked(
        cls,
        dims: Dims,
        group: dist.ProcessGroup | None,
        interleave: int,
        method: MergeMethod | None,
        *,
        is_head_sharded: bool,
    ) -> ContextGroup:
        rank, world = group_rank(dims.op, group)
        if method is None:
            method = "all_to_all" if is_head_sharded else "all_gather"
        check_method(dims, method)
        if is_head_sharded:
            must = "be all_to_all with sharded heads"
            dims.require(method == "all_to_all", "method", must, method)
        shard = KVShard(rank, world, interleave)
        check_shard(dims, shard)
        return cls(group, shard, method, is_head_sharded)

    def attending_heads(self, dims: Dims) -> int:
        """The heads of the queries that this rank attends with, of `dims`' heads of q."""
        heads, world = dims["heads"], self.shard.world
        if self.is_head_sharded:
            return heads * world
        if self.method == "all_to_all":
            check_divided_heads(dims, "q", heads, world)
        return heads

    def attend(
        self,
        absorbed: Tensor,
        attend: Callable[[Tensor], tuple[Tensor, Tensor]],
        weights: LayerWeights,
        backend: Backend,
        *,
        sink: Tensor | None = None,
    ) -> Tensor:
        """The attention over the keys of all ranks, projected up: [tokens, heads, D_V].

        absorbed  [tokens, heads, D_C + D_R] with the heads of q
        attend    this rank's attention: absorbed queries to latents [tokens, heads, D_C] and lse
        sink      [heads of q]; None: that of the weights
        """
        sink = weights.sink if sink is None else sink
        if self.is_head_sharded:  # a rank has W_UV of its own heads only
            latents, lse = attend(self._all_heads(absorbed))
            merged = self._merged(latents, lse, sink, backend)
            return _projected(merged, weights, backend)
        if sink is not None and self.method == "all_to_all":
            sink = sink.chunk(self.shard.world)[self.shard.rank]
        latents, lse = attend(absorbed)
        return self._merged(_projected(latents, weights, backend), lse, sink, backend)

    def _merged(self, out: Tensor, lse: Tensor, sink: Tensor | None, backend: Backend) -> Tensor:
        return merge_over_ranks(
            out, lse, self.group, method=self.method, sink=sink, backend=backend
        )[0]

    def _all_heads(self, absorbed: Tensor) -> Tensor:
        """Absorbed queries of all ranks' heads, rank after rank, from those of this rank."""
        world = self.shard.world
        if world == 1 or absorbed.numel() == 0:
            return absorbed.repeat(1, world, 1)
        by_rank = absorbed.new_empty(world, *absorbed.shape)
        gather_over_ranks(by_rank, absorbed[None], self.group)
        return by_rank.transpose(0, 1).flatten(1, 2)


def _projected(latents: Tensor, weights: LayerWeights, backend: Backend) -> Tensor:
    """Latents [tokens, heads, D_C] times W_UV: [tokens, heads, D_V]."""
    out = latents.new_empty(*latents.shape[:2], weights.up.geometry.v_head_dim)
    return weights.up.w_uv.apply(latents, out=out, backend=backend)
