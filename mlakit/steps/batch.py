"""The inputs of a step: the weights of its layer, and its requests in the cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mlakit.cache import KVShard, PagedLatentCache, PageTable
from mlakit.dispatch.checks import FLOATS, Dims
from mlakit.dispatch.knobs import Backend
from mlakit.dispatch.reprs import shapes_repr
from mlakit.model.geometry import Rope
from mlakit.ops import norm_rope_quant_append
from mlakit.ops._checks import check_sink
from mlakit.ops.norm_rope_quant import check_rope
from mlakit.steps.weights import UpProjection


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """The weights of one layer, except its projections to and from the hidden size."""

    up: UpProjection
    gamma: Tensor  # [D_C] weight of the latent's RMSNorm
    freqs: Tensor  # [positions, D_R] cos0, sin0, cos1, sin1, …
    softmax_scale: float
    epsilon: float = 1e-6
    rope: Rope = "interleaved"
    sink: Tensor | None = None  # [heads] float32 logit that joins the denominator only

    __repr__ = shapes_repr

    def __post_init__(self) -> None:
        dims = Dims("LayerWeights")
        dims.instance("up", self.up, UpProjection)
        g = self.up.geometry
        dims.bind("D_C", g.kv_lora_rank, "the geometry's kv_lora_rank")
        dims.bind("D_R", g.qk_rope_head_dim, "the geometry's qk_rope_head_dim")
        dims.match("gamma", self.gamma, "D_C", dtypes=FLOATS)
        dims.match("freqs", self.freqs, "positions", "D_R", dtypes=FLOATS)
        scale = dims.finite("softmax_scale", self.softmax_scale)
        object.__setattr__(self, "softmax_scale", scale)
        check_rope(dims, self.rope, self.epsilon)
        dims.bind("heads", g.num_heads, "the geometry's num_heads")
        check_sink(dims, self.sink)


@dataclass(frozen=True, eq=False)
class CachedBatch:
    """The requests of a step, and where their tokens are cached.

    Rows of q and kv after q_starts[-1] are padding, which engines have in a CUDA graph: they are
    not cached and change no result, and their rows of a step's result hold nothing of use. The
    indexer takes no padding, so `sparse_step` takes none.
    """

    cache: PagedLatentCache
    page_table: PageTable
    kv_lens: Tensor  # [batch] int32 cached tokens, including those of this step
    q_starts: Tensor  # [batch + 1] int32 rows of q and kv per request, its newest tokens
    layer: int = 0

    __repr__ = shapes_repr


def append_tokens(
    q_rope: Tensor,
    kv: Tensor,
    weights: LayerWeights,
    batch: CachedBatch,
    *,
    q_rope_out: Tensor,
    kv_shard: KVShard | None = None,
    backend: Backend,
) -> None:
    """Append the new tokens, or those of a shard, and rotate `q_rope` into `q_rope_out`."""
    norm_rope_quant_append(
        q_rope,
        kv,
        weights.freqs,
        weights.gamma,
        batch.cache,
        batch.page_table,
        batch.kv_lens,
        batch.q_starts,
        epsilon=weights.epsilon,
        layer=batch.layer,
        rope=weights.rope,
        kv_shard=kv_shard,
        q_rope_out=q_rope_out,
        backend=backend,
    )
