"""The modules of DeepSeek-V4's layers that pool windows of tokens: compressors and the indexer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mlakit.dispatch.checks import FLOATS
from mlakit.dispatch.knobs import Backend
from mlakit.layer.linear import Activations, Linear, RMSNorm, frozen
from mlakit.layer.rotary import RopeTable
from mlakit.layer.v4.batch import Pooling, V4Batch
from mlakit.model.v4 import CSA, LayerKind, V4Config
from mlakit.ops import quantize_fp8


class Pool(nn.Module):
    """The weights that pool a window to one row of `width` columns.

    kv_proj, gate_proj  [columns, hidden]; columns are 2 · width in CSA, whose windows overlap
    position_bias       [rate, columns], added to the gate
    kv_norm             of the pooled row
    """

    def __init__(
        self, config: V4Config, kind: LayerKind, width: int, *, weights: dict[str, Any]
    ) -> None:
        super().__init__()
        columns = 2 * width if kind == CSA else width
        plain = weights | {"is_fp8": False}  # as released
        self.kv_proj = Linear(config.hidden_size, columns, **plain)
        self.gate_proj = Linear(config.hidden_size, columns, **plain)
        shape, where = (config.rate(kind), columns), {"device": weights["device"]}
        self.position_bias = frozen(torch.zeros(shape, dtype=torch.float32, **where))
        self.kv_norm = RMSNorm(width, config.epsilon, dtype=weights["dtype"], **where)

    def append(
        self,
        x: Activations,
        batch: V4Batch,
        layer: int,
        freqs: Tensor,
        name: str,
        *,
        backend: Backend,
    ) -> None:
        """Pool the windows that the new tokens complete, and store their rows."""
        pooling = Pooling(self.position_bias, self.kv_norm.weight, freqs, self.kv_norm.epsilon)
        kv, gate = self.kv_proj(x, backend), self.gate_proj(x, backend)
        batch.compress(layer, kv, gate, pooling, name, backend=backend)


class IndexScorer(nn.Module):
    """The weights of the indexer's heads."""

    def __init__(self, config: V4Config, *, weights: dict[str, Any]) -> None:
        super().__init__()
        plain = weights | {"is_fp8": False}
        self.weights_proj = Linear(config.hidden_size, config.index_n_heads, **plain)


class CompressedIndexer(Pool):
    """The lightning indexer over compressed keys: which compressed rows a query attends to.

        score = Σ_h w[h] · relu(q[h]·k) / sqrt(heads · D),   q = q_b_proj(residual), w of x

    q and k are rotated in their last columns, k at the first position of its window.
    """

    def __init__(self, config: V4Config, *, weights: dict[str, Any]) -> None:
        super().__init__(config, CSA, config.index_head_dim, weights=weights)
        self.heads, self.width = config.index_n_heads, config.index_head_dim
        self.rope_columns = config.qk_rope_head_dim
        self.q_b_proj = Linear(config.q_lora_rank, self.heads * self.width, **weights)
        self.scorer = IndexScorer(config, weights=weights)

    def select(
        self,
        x: Activations,
        residual: Activations,
        batch: V4Batch,
        layer: int,
        rope: RopeTable,
        *,
        backend: Backend,
    ) -> Tensor | None:
        """The rows that each new token attends to, of the keys that are stored."""
        q = self.q_b_proj(residual, backend).unflatten(-1, (self.heads, self.width))
        rotated = q[..., -self.rope_columns :]
        rope.rotate(rotated, batch.position, "interleaved", backend=backend)
        weights = self.scorer.weights_proj(x, backend)
        return select_rows(batch, layer, q, weights, backend=backend)


def select_rows(
    batch: V4Batch, layer: int, q: Tensor, weights: Tensor, *, backend: Backend
) -> Tensor | None:
    """`V4Batch.select` of rotated queries [tokens, heads, D] and of plain weights [tokens, heads].

    Where the index keys are FP8, queries are quantised to e4m3 per token and head.
    """
    heads, width = q.shape[1:]
    weights = weights.float() * float((heads * width) ** -0.5)
    if batch.cache.cache("csa", "index").payload.dtype not in FLOATS:
        codes, scales = quantize_fp8(q.flatten(0, 1), width, backend=backend)
        q, weights = codes.view_as(q), weights * scales[0, : codes.shape[0]].view(q.shape[:2])
    return batch.select(layer, q, weights, backend=backend)


class Compressor(Pool):
    """The compressor of a CSA or HCA layer, with the indexer of a CSA layer."""

    def __init__(self, config: V4Config, kind: LayerKind, *, weights: dict[str, Any]) -> None:
        super().__init__(config, kind, config.head_dim, weights=weights)
        self.indexer = CompressedIndexer(config, weights=weights) if kind == CSA else None

    def forward(
        self,
        x: Activations,
        residual: Activations,
        batch: V4Batch,
        layer: int,
        rope: RopeTable,
        *,
        backend: Backend = "auto",
    ) -> Tensor | None:
        """Store the rows of completed windows, and return those that an indexer selects."""
        freqs = rope.on(x.x.device)
        self.append(x, batch, layer, freqs, "rows", backend=backend)
        if self.indexer is None:
            return None
        self.indexer.append(x, batch, layer, freqs, "index", backend=backend)
        return self.indexer.select(x, residual, batch, layer, rope, backend=backend)
