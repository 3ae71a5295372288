"""The attention of a layer over dequantised rows, computed exactly or as the branches compute it.

The exact run is float64 throughout. The naive run is float32 and rounds what a branch stores
between two kernels; it determines the tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlakit import reference
from mlakit.model.geometry import MLAGeometry
from mlakit.model.masks import CAUSAL, NULL, Mask
from mlakit.steps import LayerWeights


@dataclass(frozen=True)
class Precision:
    """The dtype of an oracle, and the dtype of its stored tensors (None: not rounded)."""

    dtype: torch.dtype
    stored: torch.dtype | None = None

    def keep(self, x: Tensor) -> Tensor:
        """`x` as a branch stores it between two kernels."""
        return x.to(self.stored or self.dtype).to(self.dtype)


EXACT = Precision(torch.float64)


@dataclass(frozen=True, eq=False)
class Oracle:
    """The weights of a layer, of some or all of its heads."""

    geometry: MLAGeometry
    kv_b: Tensor  # [all heads · (D_N + D_V), D_C]
    layer: LayerWeights
    heads: slice

    def attend(
        self,
        q: Tensor,
        rows: Tensor,
        precision: Precision,
        *,
        seen: Tensor | None = None,
        is_prefill: bool = False,
    ) -> Tensor:
        """Attention of the last len(q) tokens of one sequence over its rows, all or those `seen`.

        q     [q_len, heads, D_N + D_R] not rotated
        rows  [kv_len, D_C + D_R] float64
        """
        g, first = self.geometry, len(rows) - len(q)
        nope, rope = q.split([g.qk_nope_head_dim, g.qk_rope_head_dim], -1)
        rotate = reference.rotate if precision.stored is None else reference.rotate_stepwise
        freqs = self.layer.freqs[first : len(rows)].cpu()
        turned = [rotate(x, f, rope=self.layer.rope) for x, f in zip(rope, freqs, strict=True)]
        nope, rope = nope.to(precision.dtype), torch.stack(turned).to(precision.dtype)
        by_head = self.kv_b.cpu().unflatten(0, (g.num_heads, -1))[self.heads]
        keys, values = by_head.to(precision.dtype).split([g.qk_nope_head_dim, g.v_head_dim], 1)
        if is_prefill:
            return self._expanded(torch.cat([nope, rope], -1), rows, keys, values, precision)
        return self._absorbed(nope, rope, rows, seen, keys, values, precision)

    def _expanded(
        self, q: Tensor, rows: Tensor, keys: Tensor, values: Tensor, precision: Precision
    ) -> Tensor:
        g, before = self.geometry, len(rows) - len(q)
        latent, k_rope = precision.keep(rows).split([g.kv_lora_rank, g.qk_rope_head_dim], -1)
        k_nope, v = (
            precision.keep(torch.einsum("sc,hnc->shn", latent, each)) for each in (keys, values)
        )

        def over(first: int, last: int, mask: Mask) -> tuple[Tensor, Tensor]:
            arguments: list[Any] = [each[first:last] for each in (k_nope, k_rope, v)]
            arguments += [[0, len(q)], [0, last - first]]
            options: Any = {
                "softmax_scale": g.softmax_scale,
                "mask": mask,
                "dtype": precision.dtype,
            }
            return reference.mla_prefill(q, *arguments, **options)

        if precision.stored is None or before == 0:
            return over(0, len(rows), CAUSAL)[0]
        # the branch attends to its context and to the new tokens separately, and stores both
        both = [over(0, before, NULL), over(before, len(rows), CAUSAL)]
        outs, lses = (torch.stack(each) for each in zip(*both, strict=True))
        return reference.merge_states(precision.keep(outs), lses, dtype=precision.dtype)[0]

    def _absorbed(
        self,
        nope: Tensor,
        rope: Tensor,
        rows: Tensor,
        seen: Tensor | None,
        keys: Tensor,
        values: Tensor,
        precision: Precision,
    ) -> Tensor:
        g = self.geometry
        latent = precision.keep(torch.einsum("thn,hnc->thc", nope, keys))
        q = torch.cat([latent, rope], -1)
        options: Any = {"softmax_scale": g.softmax_scale, "v_width": g.row.v_width}
        options["dtype"] = precision.dtype
        if seen is None:
            out = reference.mla_decode(q, [rows], [len(q)], **options)[0]
        else:
            out = reference.sparse_mla(q, rows, seen[None], **options)[0]
        return torch.einsum("thc,hvc->thv", precision.keep(out), values)
