"""The oracle of a whole step for one query, from the rows that the cache holds afterwards.

    exact = (softmax([q_nope W_UK | q_rope]·row · scale) c) W_UVᵀ

in float64 for both branches: the expanded form is mathematically equal. The naive run computes in
float32 and rounds to bf16 where the branch does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mlakit import reference
from mlakit.formats import RowCodec
from mlakit.model.masks import NULL
from mlakit.steps import LayerWeights
from mlakit.tools.bench.correctness import Sample, assert_correct
from mlakit.tools.testing import assert_matches

F32, F64 = torch.float32, torch.float64


@dataclass(frozen=True, eq=False)
class Query:
    """One new token of a step: its projections, its position, and its visible rows."""

    q: Tensor  # [heads, D_N + D_R], not rotated
    position: int
    rows: Tensor  # float64 [position + 1, D_C + D_R] dequantised from the cache
    cached: int  # number of these rows that precede the step


def exact(query: Query, weights: LayerWeights) -> Tensor:
    """[1, heads, D_V] float64."""
    absorb, values = (each.weight.to(F64) for each in (weights.up.w_uk_t, weights.up.w_uv))
    nope, rope = _parts(query, weights)
    turned = reference.rotate(rope, weights.freqs[query.position], rope=weights.rope)
    latent = torch.einsum("hi,hoi->ho", nope.to(F64), absorb)
    attended = _absorbed_attention(torch.cat([latent, turned], -1), query, weights, F64)
    return torch.einsum("thi,hoi->tho", attended, values)


def naive_decode(query: Query, weights: LayerWeights) -> Tensor:
    """[1, heads, D_V] float32: absorbed queries and the latent result are rounded to bf16."""
    absorb, values = (each.weight.to(F32) for each in (weights.up.w_uk_t, weights.up.w_uv))
    nope, rope = _parts(query, weights)
    turned = reference.rotate_stepwise(rope, weights.freqs[query.position], rope=weights.rope)
    latent = torch.einsum("hi,hoi->ho", nope.to(F32), absorb).to(query.q.dtype)
    attended = _absorbed_attention(torch.cat([latent, turned], -1), query, weights, F32)
    return torch.einsum("thi,hoi->tho", attended.to(query.q.dtype).to(F32), values)


def naive_prefill(query: Query, weights: LayerWeights) -> Tensor:
    """[1, heads, D_V] float32: K, V and the merged parts are rounded to bf16."""
    nope, rope = _parts(query, weights)
    turned = reference.rotate_stepwise(rope, weights.freqs[query.position], rope=weights.rope)
    q = torch.cat([nope, turned], -1)[None]
    parts = [part for part in query.rows.tensor_split([query.cached]) if len(part)]
    results = [_expanded_attention(q, part, weights) for part in parts]
    if len(results) == 1:
        return results[0][0]
    outs, lses = zip(*results, strict=True)
    rounded = torch.stack(outs).to(q.dtype)
    return reference.merge_states(rounded, torch.stack(lses), dtype=F32)[0]


def assert_output_correct(
    out: Tensor, token: int, query: Query, weights: LayerWeights, *, is_decode: bool
) -> None:
    """Assert that row `token` of a step's output matches the oracle of its branch."""
    naive = naive_decode if is_decode else naive_prefill
    sample = Sample(
        f"token {token}",
        slice(token, token + 1),
        [exact(query, weights)],
        [naive(query, weights)],
    )
    assert_correct(("out",), [out], [sample])


def assert_row_appended(query: Query, kv: Tensor, weights: LayerWeights, codec: RowCodec) -> None:
    """Assert that the token's own row, the last visible one, is its latent normed and rotated."""
    _, rope = _parts(query, weights)
    given = (rope[None], kv[None], weights.freqs, weights.gamma, [query.position])
    options = {"epsilon": weights.epsilon, "rope": weights.rope}
    _, want = reference.norm_rope_quant(*given, **options)  # type: ignore[arg-type]
    _, plain = reference.norm_rope_quant_stepwise(
        *given,
        **options,  # type: ignore[arg-type]
        out_dtype=query.q.dtype,
        cache_dtype=F32,
    )
    stored = codec.decode(*codec.encode(plain))
    assert_matches(f"row {query.position}", query.rows[-1:].to(F32), want, stored)


def _parts(query: Query, weights: LayerWeights) -> tuple[Tensor, Tensor]:
    g = weights.up.geometry
    nope, rope = query.q.split([g.qk_nope_head_dim, g.qk_rope_head_dim], -1)
    return nope, rope


def _absorbed_attention(
    q: Tensor, query: Query, weights: LayerWeights, dtype: torch.dtype
) -> Tensor:
    attended, _ = reference.mla_decode(
        q[None],
        [query.rows],
        [1],
        softmax_scale=weights.softmax_scale,
        v_width=weights.up.geometry.kv_lora_rank,
        dtype=dtype,
    )
    return attended


def _expanded_attention(q: Tensor, rows: Tensor, weights: LayerWeights) -> tuple[Tensor, Tensor]:
    """(out, lse) float32 over keys and values expanded from `rows`, rounded to q's dtype."""
    g = weights.up.geometry
    latent, k_rope = rows.to(q.dtype).split([g.kv_lora_rank, g.qk_rope_head_dim], -1)
    both = (latent.to(F32) @ weights.up.kv_b_proj.weight[0].to(F32).T).to(q.dtype)
    by_head = both.unflatten(-1, (g.num_heads, -1))
    k_nope, v = by_head.split([g.qk_nope_head_dim, g.v_head_dim], -1)
    return reference.mla_prefill(
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
