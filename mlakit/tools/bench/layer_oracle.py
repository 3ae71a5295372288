"""The oracle of a whole layer for some tokens, from the rows that the caches hold afterwards.

    q = W_qb norm(W_qa x)          row = [norm(c) | rotate(k_rope)] of [c | k_rope] = W_kva x
    y = W_o (softmax([q_nope W_UK | rotate(q_rope)]·row · scale) c) W_UVᵀ

`exact` is float64 over dequantised weights. `naive` computes in float32 and rounds to bf16 where
the layer does; with FP8 weights it also quantises the input of every product to e4m3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlakit import reference
from mlakit.formats import E4M3_MAX
from mlakit.layer import MLAAttention
from mlakit.layer.indexer import hadamard_matrix
from mlakit.layer.linear import Linear
from mlakit.steps.weights import BLOCK

F32, F64, BF16, E4M3 = torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn


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


class LayerOracle:
    """A layer in float64, or in the precision of its tensors."""

    def __init__(self, layer: MLAAttention, *, is_exact: bool) -> None:
        self.layer, self.is_exact = layer, is_exact
        self.dtype = F64 if is_exact else F32
        g = layer.config.geometry
        up = self.weight(layer.kv_b_proj).unflatten(0, (g.num_heads, -1))
        self.w_uk, self.w_uv = up.split([g.qk_nope_head_dim, g.v_head_dim], dim=1)
        self.freqs = layer.rope_table.on(up.device)

    def project(self, x: Tensor, positions: Sequence[int]) -> Projected:
        """x [tokens, hidden] at these positions."""
        layer, g = self.layer, self.layer.config.geometry
        residual = self.linear(layer.q_a_proj, x)
        norm = layer.q_a_layernorm
        residual = self.rounded(reference.rms_norm(residual, norm.weight, norm.epsilon, self.dtype))
        q = self.linear(layer.q_b_proj, residual).unflatten(-1, (g.num_heads, g.qk_head_dim))
        kv = self.linear(layer.kv_a_proj_with_mqa, x)
        nope, rope = q.split([g.qk_nope_head_dim, g.qk_rope_head_dim], dim=-1)
        rotated, rows = self._rotated(rope, kv, positions)
        latent = torch.einsum("thn,hnc->thc", self.operand(layer.kv_b_proj, nope), self.w_uk)
        absorbed = torch.cat([self.rounded(latent), rotated.to(self.dtype)], dim=-1)
        index = None if layer.indexer is None else self._index(x, residual, positions)
        return Projected(absorbed, rows, index)

    def output(self, q: Tensor, rows: Tensor) -> Tensor:
        """[1, hidden] of one absorbed query [heads, D_C + D_R] over its cache rows."""
        c, up = self.layer.config, self.layer.kv_b_proj
        attended, _ = reference.mla_decode(
            q[None],
            [rows],
            [1],
            softmax_scale=c.scale,
            v_width=c.geometry.kv_lora_rank,
            dtype=self.dtype,
        )
        values = self.operand(up, self.rounded(attended))
        heads = self.rounded(torch.einsum("thc,hvc->thv", values, self.w_uv))
        return self.linear(self.layer.o_proj, heads.flatten(1))

    def _index(self, x: Tensor, residual: Tensor, positions: Sequence[int]) -> IndexOracle:
        indexer = self.layer.indexer
        assert indexer is not None
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
            turned[token, ..., :width] = reference.rotate(
                x[token, ..., :width],
                self.freqs[position],
                rope=self.layer.config.index_rope,
                dtype=self.dtype,
            )
        turned = self.rounded(turned)
        if not self.layer.config.index_hadamard:
            return turned
        matrix = self.rounded(hadamard_matrix(x.shape[-1]).to(turned))
        return self.rounded(turned @ matrix)

    def _rotated(
        self, q_rope: Tensor, kv: Tensor, positions: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """(rotated queries, cache rows before they are quantised)."""
        norm, rope = self.layer.kv_a_layernorm, self.layer.config.geometry.rope
        weights = (self.freqs, norm.weight, positions)
        if self.is_exact:
            return reference.norm_rope_quant(q_rope, kv, *weights, epsilon=norm.epsilon, rope=rope)
        return reference.norm_rope_quant_stepwise(
            q_rope.to(BF16),
            kv.to(BF16),
            *weights,
            epsilon=norm.epsilon,
            rope=rope,
            out_dtype=BF16,
            cache_dtype=F32,
        )

    def linear(self, module: Linear, x: Tensor) -> Tensor:
        return self.rounded(self.operand(module, x) @ self.weight(module).T)

    def weight(self, module: Linear) -> Tensor:
        """Dequantised."""
        weight: Tensor = module.weight.to(self.dtype)
        scale = module.weight_scale_inv
        if scale is None:
            return weight
        blocks = scale.repeat_interleave(BLOCK, dim=0).repeat_interleave(BLOCK, dim=1)
        return weight * blocks[: weight.shape[0], : weight.shape[1]].to(self.dtype)

    def operand(self, module: Linear, x: Tensor) -> Tensor:
        """What the module multiplies by its weight."""
        x = x.to(self.dtype)
        return through_e4m3(x, BLOCK) if module.is_fp8 and not self.is_exact else x

    def rounded(self, x: Tensor) -> Tensor:
        return x if self.is_exact else x.to(BF16).to(self.dtype)


def through_e4m3(x: Tensor, group: int) -> Tensor:
    """x quantised with one scale per `group` columns, and dequantised."""
    groups = x.unflatten(-1, (-1, group))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-20) / E4M3_MAX
    codes = (groups / scales).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    values: Tensor = codes.to(x.dtype) * scales
    return values.flatten(-2)
