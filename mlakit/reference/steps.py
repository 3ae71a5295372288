"""Oracles of a layer's step and of a whole layer, for some tokens over the rows that a cache holds.

    row = [norm(c) | rotate(k_rope)] of [c | k_rope] = W_kva x
    q = W_qb norm(W_qa x)
    out = (softmax([q_nope W_UK | rotate(q_rope)]·row · scale) c) W_UVᵀ
    y = W_o out

The exact oracle is float64 over dequantised weights, and serves the expanded form too: it is equal.
A naive run computes in float32 and rounds to bf16 where the step does; with FP8 weights it also
quantises the input of every product to e4m3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from mlakit.formats import E4M3_MAX
from mlakit.model.geometry import Rope
from mlakit.model.masks import NULL
from mlakit.reference.decode import mla_decode
from mlakit.reference.merge import merge_states
from mlakit.reference.norm_rope_quant import (
    norm_rope_quant,
    norm_rope_quant_stepwise,
    rms_norm,
    rotate,
    rotate_stepwise,
)
from mlakit.reference.prefill import mla_prefill

F32, F64, BF16, E4M3 = torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn
BLOCK = 128  # rows and columns of a weight, and columns of its input, that share an FP8 scale


@dataclass(frozen=True, eq=False)
class StepWeights:
    """The weights of a step without its projections."""

    w_uk: Tensor  # [heads, D_N, D_C]
    w_uv: Tensor  # [heads, D_V, D_C]
    gamma: Tensor  # [D_C]
    freqs: Tensor  # [positions, D_R]
    softmax_scale: float
    epsilon: float
    rope: Rope


@dataclass(frozen=True, eq=False)
class StepQuery:
    """One new token of a step: its projections, its position, and the rows that it sees."""

    q: Tensor  # [heads, D_N + D_R], not rotated
    kv: Tensor  # [D_C + D_R], neither normed nor rotated
    position: int
    rows: Tensor  # float64 [keys, D_C + D_R] dequantised from the cache
    cached: int  # number of these rows that precede the step


class StepOracle:
    """A step of absorbed attention in float64, or as a step computes it that stores `stored`."""

    def __init__(self, weights: StepWeights, *, is_exact: bool, stored: torch.dtype = BF16) -> None:
        self.weights, self.is_exact, self.stored = weights, is_exact, stored
        self.dtype = F64 if is_exact else F32
        self.w_uk, self.w_uv = weights.w_uk.to(self.dtype), weights.w_uv.to(self.dtype)

    def absorb(self, q: Tensor, kv: Tensor, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Absorbed queries [tokens, heads, D_C + D_R], and cache rows before they are quantised."""
        w = self.weights
        nope, rope = q.tensor_split([self.w_uk.shape[1]], -1)
        given = (w.freqs, w.gamma, positions)
        if self.is_exact:
            rotated, rows = norm_rope_quant(rope, kv, *given, epsilon=w.epsilon, rope=w.rope)
        else:
            rotated, rows = norm_rope_quant_stepwise(
                rope.to(self.stored),
                kv.to(self.stored),
                *given,
                epsilon=w.epsilon,
                rope=w.rope,
                out_dtype=self.stored,
                cache_dtype=F32,
            )
        latent = torch.einsum("thn,hnc->thc", self.up_operand(nope), self.w_uk)
        return torch.cat([self.rounded(latent), rotated.to(self.dtype)], -1), rows

    def attend(self, q: Tensor, rows: Tensor) -> Tensor:
        """[1, heads, D_V] of one absorbed query [heads, D_C + D_R] over its cache rows."""
        attended, _ = mla_decode(
            q[None],
            [rows],
            [1],
            softmax_scale=self.weights.softmax_scale,
            v_width=self.w_uv.shape[-1],
            dtype=self.dtype,
        )
        return torch.einsum("thc,hvc->thv", self.up_operand(self.rounded(attended)), self.w_uv)

    def output(self, query: StepQuery) -> Tensor:
        """[1, heads, D_V]."""
        absorbed, _ = self.absorb(query.q[None], query.kv[None], [query.position])
        return self.attend(absorbed[0], query.rows)

    def up_operand(self, x: Tensor) -> Tensor:
        """What is multiplied by W_UK and W_UV."""
        return x.to(self.dtype)

    def rounded(self, x: Tensor) -> Tensor:
        return x if self.is_exact else x.to(self.stored).to(self.dtype)


def naive_prefill_output(query: StepQuery, weights: StepWeights) -> Tensor:
    """[1, heads, D_V] float32: K, V and the merged parts are rounded to bf16."""
    nope, rope = query.q.tensor_split([weights.w_uk.shape[1]], -1)
    rotated = rotate_stepwise(rope, weights.freqs[query.position], rope=weights.rope)
    q = torch.cat([nope, rotated], -1)[None]
    parts = [part for part in query.rows.tensor_split([query.cached]) if len(part)]
    results = [_expanded(q, part, weights) for part in parts]
    if len(results) == 1:
        return results[0][0]
    outs, lses = zip(*results, strict=True)
    return merge_states(torch.stack(outs).to(q.dtype), torch.stack(lses), dtype=F32)[0]


def _expanded(q: Tensor, rows: Tensor, weights: StepWeights) -> tuple[Tensor, Tensor]:
    """(out, lse) float32 over keys and values expanded from `rows`, rounded to q's dtype."""
    d_c = weights.w_uv.shape[-1]
    latent, k_rope = rows.to(q.dtype).tensor_split([d_c], -1)
    k_nope, v = (
        torch.einsum("tc,hnc->thn", latent.to(F32), matrices.to(F32)).to(q.dtype)
        for matrices in (weights.w_uk, weights.w_uv)
    )
    return mla_prefill(
        q,
        k_nope,
        k_rope,
        v,
        [0, 1],
        [0, len(rows)],
        softmax_scale=weights.softmax_scale,
        mask=NULL,
        dtype=F32,
    )


@dataclass(frozen=True, eq=False)
class IndexOracle:
    """The indexer's inputs of `sparse_step`; keys are not quantised."""

    q: Tensor  # [tokens, index_heads, D]
    keys: Tensor  # [tokens, D]
    weights: Tensor  # [tokens, index_heads]

    def scores(self, token: int, keys: Tensor) -> Tensor:
        """[keys] of cached keys, dequantised."""
        by_head = (self.q[token] @ keys.to(self.q.dtype).T).relu()
        return self.weights[token] @ by_head


@dataclass(frozen=True, eq=False)
class Projected:
    """Some new tokens: their absorbed and rotated queries, their cache rows."""

    q: Tensor  # [tokens, heads, D_C + D_R]
    rows: Tensor  # [tokens, D_C + D_R], not quantised
    index: IndexOracle | None


class LayerOracle(StepOracle):
    """A layer in float64, or in the precision of its tensors.

    layer  an `mlakit.MLAAttention`; of its modules only weights and settings are read
    """

    def __init__(self, layer: Any, *, is_exact: bool) -> None:
        self.layer, self.dtype = layer, F64 if is_exact else F32
        c, g, norm = layer.config, layer.config.geometry, layer.kv_a_layernorm
        up = self.weight(layer.kv_b_proj).unflatten(0, (g.num_heads, -1))
        w_uk, w_uv = up.split([g.qk_nope_head_dim, g.v_head_dim], dim=1)
        freqs = layer.rope_table.on(up.device)
        given = (w_uk, w_uv, norm.weight, freqs, c.scale, norm.epsilon, g.rope)
        super().__init__(StepWeights(*given), is_exact=is_exact)

    def project(self, x: Tensor, positions: Sequence[int]) -> Projected:
        """x [tokens, hidden] at these positions."""
        layer, g = self.layer, self.layer.config.geometry
        residual = self.linear(layer.q_a_proj, x)
        norm = layer.q_a_layernorm
        residual = self.rounded(rms_norm(residual, norm.weight, norm.epsilon, self.dtype))
        q = self.linear(layer.q_b_proj, residual).unflatten(-1, (g.num_heads, g.qk_head_dim))
        kv = self.linear(layer.kv_a_proj_with_mqa, x)
        absorbed, rows = self.absorb(q, kv, positions)
        index = None if layer.indexer is None else self._index(x, residual, positions)
        return Projected(absorbed, rows, index)

    def result(self, q: Tensor, rows: Tensor) -> Tensor:
        """[1, hidden] of one absorbed query [heads, D_C + D_R] over its cache rows."""
        return self.linear(self.layer.o_proj, self.rounded(self.attend(q, rows)).flatten(1))

    def _index(self, x: Tensor, residual: Tensor, positions: Sequence[int]) -> IndexOracle:
        indexer = self.layer.indexer
        q = self.linear(indexer.wq_b, residual).unflatten(-1, (indexer.heads, indexer.width))
        norm, keys = indexer.k_norm, self.linear(indexer.wk, x)
        keys = keys - keys.mean(-1, keepdim=True)
        keys = keys * (keys.square().mean(-1, keepdim=True) + norm.epsilon).rsqrt()
        keys = self.rounded(keys * norm.weight.to(self.dtype) + norm.bias.to(self.dtype))
        q, keys = (self._index_rotated(each, positions) for each in (q, keys))
        if not self.is_exact:
            q = through_e4m3(q, indexer.width)
        scale = (indexer.heads * indexer.width) ** -0.5
        weights = x.to(self.dtype) @ self.weight(indexer.weights_proj).T * scale
        return IndexOracle(q, keys, weights)

    def _index_rotated(self, x: Tensor, positions: Sequence[int]) -> Tensor:
        """x [tokens, ..., D] with its first D_R columns rotated, times the Hadamard matrix."""
        width = self.layer.config.geometry.qk_rope_head_dim
        turned = x.clone()
        for token, position in enumerate(positions):
            turned[token, ..., :width] = rotate(
                x[token, ..., :width],
                self.weights.freqs[position],
                rope=self.layer.config.index_rope,
                dtype=self.dtype,
            )
        turned = self.rounded(turned)
        if not self.layer.config.index_hadamard:
            return turned
        return self.rounded(turned @ self.rounded(_hadamard(x.shape[-1]).to(turned)))

    def linear(self, module: Any, x: Tensor) -> Tensor:
        return self.rounded(self.operand(module, x) @ self.weight(module).T)

    def weight(self, module: Any) -> Tensor:
        """Dequantised."""
        weight: Tensor = module.weight.to(self.dtype)
        scale = module.weight_scale_inv
        if scale is None:
            return weight
        blocks = scale.repeat_interleave(BLOCK, dim=0).repeat_interleave(BLOCK, dim=1)
        dequantised: Tensor = weight * blocks[: weight.shape[0], : weight.shape[1]].to(self.dtype)
        return dequantised

    def operand(self, module: Any, x: Tensor) -> Tensor:
        """What the module multiplies by its weight."""
        x = x.to(self.dtype)
        return through_e4m3(x, BLOCK) if module.is_fp8 and not self.is_exact else x

    def up_operand(self, x: Tensor) -> Tensor:
        return self.operand(self.layer.kv_b_proj, x)


def through_e4m3(x: Tensor, group: int) -> Tensor:
    """x quantised with one scale per `group` columns, and dequantised."""
    groups = x.unflatten(-1, (-1, group))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-20) / E4M3_MAX
    codes = (groups / scales).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    values: Tensor = codes.to(x.dtype) * scales
    return values.flatten(-2)


def _hadamard(width: int) -> Tensor:
    """The orthonormal Walsh-Hadamard matrix: H_2n = [[H_n, H_n], [H_n, -H_n]], H_1 = 1."""
    like: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    two, matrix = torch.tensor([[1.0, 1.0], [1.0, -1.0]], **like), torch.ones(1, 1, **like)
    while len(matrix) < width:
        matrix = torch.kron(two, matrix)
    return matrix / sqrt(width)
