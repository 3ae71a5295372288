"""The attention of one step of a serving engine, on mlakit's ops. Nothing here imports an engine.

Engines keep one tensor of cache rows per layer, [blocks, block_size, row]: 16-bit or float32 rows,
e4m3 rows with one scale for the layer (fp8), or the 656 bytes of DeepSeek-V3.2 (fp8_block128).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import mlakit
from mlakit import KVShard, PagedLatentCache, RowShape
from mlakit.model.masks import Mask
from mlakit.plan import DecodePlanTensors, EvenSplit


class Pools:
    """The tensor of a layer as a pool, made once: engines hand over a tensor at every call."""

    def __init__(self, row: RowShape) -> None:
        self.row = row
        self._key: tuple[object, ...] = ()
        self._pool: PagedLatentCache | None = None

    def of(self, kv_cache: Tensor, k_scale: Tensor | None) -> PagedLatentCache:
        """The pool in the memory of `kv_cache`; `k_scale` counts for fp8 rows only."""
        key = (
            kv_cache.data_ptr(),
            kv_cache.shape,
            kv_cache.stride(),
            kv_cache.dtype,
            None if k_scale is None else k_scale.data_ptr(),
        )
        if self._pool is None or key != self._key:
            self._key, self._pool = key, wrap(kv_cache, self.row, k_scale)
        return self._pool


def wrap(kv_cache: Tensor, row: RowShape, k_scale: Tensor | None) -> PagedLatentCache:
    """An engine's cache tensor of one layer as a pool, in the same memory."""
    is_packed = kv_cache.dtype.itemsize > 1 or kv_cache.shape[-1] != row.width
    if is_packed:
        return PagedLatentCache.wrap(kv_cache, row)
    scale = 1.0 if k_scale is None else k_scale
    return PagedLatentCache.wrap(kv_cache, row, format="fp8", tensor_scale=scale)


@dataclass
class DecodeBatch:
    """The decode requests of one step, for all layers; `plan` is made by the first that attends.

    is_batch_invariant  a request's result has the same bits whatever other requests are there: its
                        keys are cut by its own length, and no plan is made
    num_splits          parts that they are cut in then; None: as many as the op takes
    """

    block_table: Tensor
    kv_lens: Tensor  # of this rank's shard, or the global ones where `shard` is given
    q_starts: Tensor | None = None  # None: one query per request
    shard: KVShard | None = None
    mask: Mask = mlakit.CAUSAL
    is_batch_invariant: bool = False
    num_splits: int | None = None
    plan: DecodePlanTensors | EvenSplit | None = None


def decode(
    q: Tensor | tuple[Tensor, Tensor],
    pool: PagedLatentCache,
    batch: DecodeBatch,
    softmax_scale: float,
    q_scale: Tensor | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [tokens, heads, D_C], lse [tokens, heads]) of the absorbed attention of one layer.

    q        [tokens, heads, D_C + D_R] or its two parts, absorbed with W_UK
    q_scale  of one element, for e4m3 queries
    sink     [heads] float32

    The first layer makes the plan. In a CUDA graph that is inside of it, so that every replay plans
    anew from the lengths at that time.
    """
    q_latent, q_rope = q if isinstance(q, tuple) else (q, None)
    several = batch.q_starts is not None
    if batch.is_batch_invariant:
        batch.plan = None if batch.num_splits is None else EvenSplit(batch.num_splits)
    elif batch.plan is None:
        batch.plan = mlakit.plan_mla_decode(
            pool,
            batch.block_table,
            batch.kv_lens,
            heads=q_latent.shape[1],
            num_tokens=q_latent.shape[0] if several else None,
            q_starts=batch.q_starts,
            dtype=q_latent.dtype,
            mask=batch.mask,
            kv_shard=batch.shard,
        )
    return mlakit.mla_decode(
        q_latent,
        pool,
        batch.block_table,
        batch.kv_lens,
        q_rope=q_rope,
        q_scale=_per_token(q_scale, q_latent),
        q_starts=batch.q_starts,
        softmax_scale=softmax_scale,
        sink=sink,
        kv_shard=batch.shard,
        plan=batch.plan,
        mask=batch.mask,
        deterministic=batch.is_batch_invariant,
    )


def _per_token(q_scale: Tensor | None, q: Tensor) -> Tensor | None:
    if q_scale is None or q.dtype != torch.float8_e4m3fn:
        return None
    return q_scale.reshape(1).expand(q.shape[0])


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: Tensor,
    kv_starts: Tensor,
    nope_width: int,
    softmax_scale: float,
    *,
    is_causal: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out [tokens, heads, D_V], lse [tokens, heads]) of expanded attention.

    k  [keys, heads, D_N + D_R] as engines concatenate it: its rope columns are the same key in
       every head, of which the op takes one
    """
    return mlakit.mla_prefill(
        q,
        k[..., :nope_width],
        k[:, 0, nope_width:],
        v,
        q_starts,
        kv_starts,
        softmax_scale=softmax_scale,
        mask=mlakit.CAUSAL if is_causal else mlakit.NULL,
        out=out,
    )


def starts_of(lengths: Tensor) -> Tensor:
    """Return [requests + 1] int32: 0, lengths[0], lengths[0] + lengths[1], …"""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
