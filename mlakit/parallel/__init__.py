"""Attention spread over the ranks of a `torch.distributed` process group.

groups.py       rank and size of a group, collectives over its ranks
buffers.py      out and lse of several ranks in one buffer, for one collective
merge.py        merge_over_ranks: merge the partial results of all ranks
context.py      the group of a context-parallel step: its heads and its merge
decode.py       context_parallel_decode: every rank caches and reads a shard of the tokens
select.py       the best keys of all ranks, for sparse attention
sparse.py       context_parallel_sparse_step: the same for DeepSeek Sparse Attention
tensor_plan.py  tensor_parallel_plan: plans for models of transformers, attention included

All ranks of a group make the same calls in the same order. The group's backend runs the
collectives: NCCL on GPUs, gloo on CPUs.
"""

from mlakit.parallel.decode import context_parallel_decode
from mlakit.parallel.groups import sum_over_ranks
from mlakit.parallel.merge import merge_over_ranks
from mlakit.parallel.sparse import context_parallel_sparse_step
from mlakit.parallel.tensor_plan import tensor_parallel_plan

__all__ = [
    "context_parallel_decode",
    "context_parallel_sparse_step",
    "merge_over_ranks",
    "sum_over_ranks",
    "tensor_parallel_plan",
]
