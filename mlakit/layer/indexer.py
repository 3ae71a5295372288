"""The lightning indexer of DeepSeek-V3.2: which cached tokens a query attends to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlakit.cache import PagedLatentCache
from mlakit.dispatch.autocast import without_autocast
from mlakit.dispatch.checks import FLOATS, Dims
from mlakit.dispatch.knobs import Backend
from mlakit.formats import Format
from mlakit.layer.config import LayerConfig
from mlakit.layer.linear import (
    Activations,
    Float32Linear,
    Linear,
    RMSNorm,
    frozen,
    keep_dtype,
)
from mlakit.layer.rotary import RopeTable
from mlakit.model.geometry import RowShape
from mlakit.ops import quantize_fp8
from mlakit.steps import CachedBatch, IndexInputs, LayerWeights, PooledKeyCache, PooledKeys
from mlakit.steps.sparse import append_index_keys

NAME = "LightningIndexer"


class KeyNorm(nn.Module):
    """LayerNorm of the index keys with a bias, computed in float32."""

    def __init__(
        self, width: int, epsilon: float, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.weight = frozen(torch.ones(width, dtype=torch.float32, device=device))
        self.bias = frozen(torch.zeros(width, dtype=torch.float32, device=device))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, width], normalised, in x's dtype."""
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), weight.shape, weight, bias, self.epsilon).to(x.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return super()._apply(lambda t: keep_dtype(fn, t), recurse)  # type: ignore[no-untyped-call]


IndexCache: TypeAlias = PagedLatentCache | PooledKeyCache


class IndexStates(NamedTuple):
    """What the indexer computes of the hidden states."""

    keys: Tensor  # [tokens, D], normalised and rotated
    weights: Tensor  # [tokens, heads] float32
    gate: Tensor | None  # [tokens, D], of keys that are pooled


class LightningIndexer(nn.Module):
    """Scores every cached token for every query; `sparse_step` attends to the best.

        q = wq_b(residual)   k = norm(wk(x))      D_R columns of them are rotated
        score = Σ_h w[h] · relu(q[h]·k) / sqrt(heads · D),   w = weights_proj(x) in float32

    residual is the query's normalised latent, q_a_layernorm(q_a_proj(x)).

    Where the cache of index keys is FP8, queries are quantised to e4m3 per token and head, and
    their scale goes into w. GLM-5.3-Flash scores pools of tokens, as `steps.pools` has them, whose
    gate is index_kpool_compress_gate · x, and whose bias is index_kpool_compress_ape.
    """

    def __init__(
        self,
        config: LayerConfig,
        *,
        is_fp8: bool = False,
        max_positions: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """An indexer with random weights.

        is_fp8         whether wq_b and wk are block-FP8
        max_positions  rows of the RoPE table; None: the config's
        """
        super().__init__()
        g = config.geometry
        dims = Dims(NAME)
        dims.require(g.has_indexer, "config", "have index_topk", 0)
        if g.q_lora_rank is None:
            dims.fail("config", "have q_lora_rank, for the indexer reads the query's latent", None)
        width = g.index_head_dim
        dims.require(
            width >= g.qk_rope_head_dim,
            "index_head_dim",
            f"be at least qk_rope_head_dim, {g.qk_rope_head_dim}",
            width,
        )
        if config.index_hadamard:
            power = width & (width - 1) == 0
            dims.require(power, "index_head_dim", "be a power of two for Hadamard", width)
        self.heads, self.width, self.topk = g.index_n_heads, width, g.index_topk
        self.rope_table = RopeTable.shared(g, config.positions(max_positions))
        self.rope, self.uses_hadamard = config.index_rope, config.index_hadamard
        rope = g.qk_rope_head_dim
        start = width - rope if config.index_rope_last else 0
        self._rotated = slice(start, start + rope)  # columns
        weights: dict[str, Any] = {"is_fp8": is_fp8, "dtype": dtype, "device": device}
        self.wq_b = Linear(g.q_lora_rank, self.heads * width, **weights)
        self.wk = Linear(g.hidden_size, width, **weights)
        self.init_tokens, self.local_tokens = config.init_tokens, config.local_tokens
        self.k_norm: KeyNorm | RMSNorm = (
            RMSNorm(width, config.index_epsilon, dtype=dtype, device=device)
            if config.index_rms_norm
            else KeyNorm(width, config.index_epsilon, device=device)
        )
        self.weights_proj = Float32Linear(g.hidden_size, self.heads, device=device)
        self.pool, self.selects_tail = config.index_pool, config.selects_tail
        if self.pool > 1:
            where: dict[str, Any] = {"dtype": dtype, "device": device}
            gate = torch.ones(width, g.hidden_size, **where)
            self.index_kpool_compress_ape = frozen(torch.zeros(self.pool, width, **where))
            self.index_kpool_compress_gate = frozen(gate)
        self._hadamard: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def allocate_index_cache(
        self,
        format: Format = "fp8_token",
        *,
        num_pages: int,
        page_size: int = 64,
        num_layers: int = 1,
        device: torch.device | str | None = None,
    ) -> IndexCache:
        """A cache of index keys for the pages of a latent cache: the same number and page size.

        Keys of pools are in a `PooledKeyCache`.
        """
        sizes: dict[str, Any] = {
            "num_pages": num_pages,
            "page_size": page_size,
            "num_layers": num_layers,
            "device": self.wk.weight.device if device is None else device,
        }
        if self.pool > 1:
            return PooledKeyCache.allocate(self.width, self.pool, format, **sizes)
        return PagedLatentCache.allocate(RowShape(self.width, 0), format, **sizes)

    @without_autocast
    def forward(
        self,
        x: Tensor | Activations,
        residual: Tensor | Activations,
        positions: Tensor,
        cache: IndexCache,
        layer: int = 0,
        *,
        backend: Backend = "auto",
    ) -> IndexInputs:
        """The indexer's inputs of `sparse_step`.

        x         [tokens, hidden]
        residual  [tokens, q_lora_rank] the query's normalised latent
        positions [tokens] of the tokens
        cache     of index keys, `allocate_index_cache` or `PagedLatentCache.wrap_index_keys`
        """
        of_states = self.of_states(x, positions, backend=backend)
        of_queries = self.of_queries(residual, positions, cache, backend=backend)
        return self.joined(of_states, of_queries, cache, layer)

    @without_autocast
    def of_states(
        self, x: Tensor | Activations, positions: Tensor, *, backend: Backend = "auto"
    ) -> IndexStates:
        """The part of x."""
        weights = self.weights_proj(x, factor=(self.heads * self.width) ** -0.5)
        return IndexStates(self._keys(x, positions, backend), weights, self._gate(x))

    @without_autocast
    def of_queries(
        self,
        residual: Tensor | Activations,
        positions: Tensor,
        cache: IndexCache,
        *,
        backend: Backend = "auto",
    ) -> tuple[Tensor, Tensor | None]:
        """(q [tokens, heads, D], scales [tokens, heads] of e4m3): the part of the residual."""
        q = self.wq_b(residual, backend).unflatten(-1, (self.heads, self.width))
        self._rotate(q, positions, backend)
        if self.uses_hadamard:
            q = q @ self._hadamard_matrix(q)
        if _keys_of(cache).payload.dtype in FLOATS:
            return q, None
        quantised, scales = quantize_fp8(q.flatten(0, 1), self.width, backend=backend)
        rows = len(quantised)
        return quantised.view_as(q), scales[0, :rows].view(q.shape[:2])

    def joined(
        self,
        of_states: IndexStates,
        of_queries: tuple[Tensor, Tensor | None],
        cache: IndexCache,
        layer: int,
    ) -> IndexInputs:
        """The inputs of both parts."""
        (keys, weights, gate), (q, scales) = of_states, of_queries
        return IndexInputs(
            q,
            keys,
            weights if scales is None else weights * scales,
            _keys_of(cache),
            layer,
            init_tokens=self.init_tokens,
            local_tokens=self.local_tokens,
            pools=self._pools(gate, cache),
        )

    def append_keys(
        self,
        x: Tensor | Activations,
        positions: Tensor,
        cache: IndexCache,
        layer: int,
        weights: LayerWeights,
        batch: CachedBatch,
        *,
        backend: Backend = "auto",
    ) -> None:
        """Append the keys of the new tokens without scoring, for a step that attends to all."""
        keys = self._keys(x, positions, backend)
        no_queries = keys.new_empty(len(keys), 0, self.width)
        pools = self._pools(self._gate(x), cache)
        inputs = IndexInputs(
            no_queries, keys, no_queries[..., 0], _keys_of(cache), layer, pools=pools
        )
        append_index_keys(inputs, weights, batch, backend=backend)

    def _gate(self, x: Tensor | Activations) -> Tensor | None:
        """The gate of keys that are pooled."""
        if self.pool == 1:
            return None
        states = x.x if isinstance(x, Activations) else x
        return F.linear(states, self.index_kpool_compress_gate)

    def _pools(self, gate: Tensor | None, cache: IndexCache) -> PooledKeys | None:
        if gate is None:
            return None
        assert isinstance(cache, PooledKeyCache)
        bias = self.index_kpool_compress_ape
        return PooledKeys(gate, bias, cache.states, selects_tail=self.selects_tail)

    def _keys(self, x: Tensor | Activations, positions: Tensor, backend: Backend) -> Tensor:
        """Normalised and rotated keys [tokens, D] of the new tokens, in x's dtype."""
        keys: Tensor = self.k_norm(self.wk(x, backend))
        self._rotate(keys[:, None], positions, backend)
        return keys @ self._hadamard_matrix(keys) if self.uses_hadamard else keys

    def _rotate(self, x: Tensor, positions: Tensor, backend: Backend) -> None:
        """Rotate x [tokens, heads, D] in place."""
        self.rope_table.rotate(x[..., self._rotated], positions, self.rope, backend=backend)

    def _hadamard_matrix(self, like: Tensor) -> Tensor:
        """Orthonormal and symmetric [D, D], on the device and in the dtype of `like`."""
        key = (like.device, like.dtype)
        matrix = self._hadamard.get(key)
        if matrix is None:
            with torch.inference_mode(False), torch.no_grad():
                matrix = hadamard_matrix(self.width).to(*key)
            self._hadamard[key] = matrix
        return matrix


def _keys_of(cache: IndexCache) -> PagedLatentCache:
    return cache.keys if isinstance(cache, PooledKeyCache) else cache


def hadamard_matrix(width: int) -> Tensor:
    """The orthonormal Walsh-Hadamard matrix [width, width] float32; width is a power of two.

    Entry (i, j) is (−1)^(bits that i and j share) / sqrt(width).
    """
    matrix = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    while len(matrix) < width:
        upper = torch.cat([matrix, matrix], dim=1)
        matrix = torch.cat([upper, torch.cat([matrix, -matrix], dim=1)])
    return matrix.mul_(width**-0.5)
