"""The attention of one layer between its projections: append, attend, project up.

`prefill_branch` expands the latents to K and V and attends to them. `decode_branch` absorbs the
up-projection into the query and attends to the cache rows. `mla_step` splits a mixed batch into
requests for one and for the other. `sparse_step` attends to the cached tokens that the lightning
indexer of DeepSeek-V3.2 selects. All four first append the new tokens to the cache, and attend to
them as the cache stores them. `decode_attend` and `prefill_attend` are the branches without the
append, for engines that fill the cache themselves.

Arguments are checked and kernels are selected before the first write: a refused step changes
nothing and can be repeated.
"""

from mlakit.steps.batch import CachedBatch, LayerWeights
from mlakit.steps.decode import decode_attend, decode_branch
from mlakit.steps.pools import PooledKeyCache, PooledKeys
from mlakit.steps.prefill import prefill_attend, prefill_branch
from mlakit.steps.sparse import IndexInputs, sparse_step
from mlakit.steps.step import StepPlan, mla_step, plan_step

__all__ = [
    "CachedBatch",
    "IndexInputs",
    "LayerWeights",
    "PooledKeyCache",
    "PooledKeys",
    "StepPlan",
    "decode_attend",
    "decode_branch",
    "mla_step",
    "plan_step",
    "prefill_attend",
    "prefill_branch",
    "sparse_step",
]
