"""The parts that the layers of both backends share: their arguments and the rows of their cache.

Nothing here imports vLLM.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from torch import Tensor

from mlakit import PagedLatentCache, RowShape, UnsupportedError
from mlakit.integrations.announce import announce
from mlakit.integrations.steps import Pools
from mlakit.integrations.vllm import calls

LOGGER = logging.getLogger("vllm.mlakit")  # vLLM gives its own loggers a handler


class CachedLayer:
    """A layer of vLLM with a cache of latent rows, in front of vLLM's class among the bases."""

    backend: ClassVar[str]  # the name that users select
    kv_lora_rank: int
    qk_rope_head_dim: int
    pools: Pools
    kv_cache_dtype: str

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: Any,
        sliding_window: Any,
        kv_cache_dtype: str,
        logits_soft_cap: Any,
        *others: Any,
        **named: Any,
    ) -> None:
        self._refuse(
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
        )
        sizes = num_heads, head_size, scale, num_kv_heads
        features = alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap
        arguments: tuple[Any, ...] = (*sizes, *features, *others)
        super().__init__(*arguments, **named)
        self.pools = Pools(RowShape(self.kv_lora_rank, self.qk_rope_head_dim))
        self.kv_cache_dtype = kv_cache_dtype  # not every class of vLLM keeps it

    def _refuse(self, **features: Any) -> None:
        """Raise for what the ops do not compute."""
        for name, value in features.items():
            if value:
                raise UnsupportedError(f"{self.backend}: {name} is not supported, got {value}")

    def announce(self, op: str, pool: PagedLatentCache) -> None:
        """Log once, after a call of an op, what serves the layers of this backend."""
        announce(LOGGER, self.backend, op, pool)

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Store this step's tokens; vLLM's own op writes the same bytes.

        skip_scale  k_scale is 1, from vLLM 0.33 on; it is read all the same
        """
        if kv_cache.numel():
            pool = self.pools.of(kv_cache, k_scale)
            calls.update_cache(kv_c_normed, k_pe, pool, slot_mapping)
