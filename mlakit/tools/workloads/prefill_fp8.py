"""Cases of `mla_prefill` of e4m3 queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mlakit.formats import SCALE_BLOCK
from mlakit.kernels.arguments import filled
from mlakit.model.masks import Mask
from mlakit.reference.hopper_fp8_mma import fp8_mma
from mlakit.reference.prefill import scales_of_keys
from mlakit.reference.softmax import attention_weights
from mlakit.tools.workloads.inputs import Inputs
from mlakit.tools.workloads.paged import starts_of
from mlakit.tools.workloads.prefill import Given, PrefillCase

# half of the largest error of rounding a probability to e4m3: the tolerance is twice the error of a
# run whose probabilities are wrong by so much
HALF_ROUNDING = 1 / 32
# of their signs: in a row of two or three large probabilities the errors of one draw may cancel
DRAWS = 4
PITCH = 16  # keys of a transposed v are padded to a multiple, as TMA wants it


Product = Callable[[Tensor, Tensor], Tensor]


def _exact_mma(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ bᵀ in float32."""
    return a.float() @ b.float().T


# how the tensor cores of a backend add up scores, if it rounds probabilities to e4m3
FP8_SUMS: dict[str, Product] = {"hopper": fp8_mma, "blackwell": _exact_mma}


@dataclass(frozen=True, kw_only=True, repr=False)
class PrefillFp8Case(PrefillCase):
    """One call of `mla_prefill` of e4m3.

    scaled          pass q_scale, k_scale and v_scale
    uniform_keys    all keys have the same k_scale, a stride of 0
    uniform_values  all values of a head have the same v_scale, a stride of 0
    block_scales    each 128 keys of a request have a k_scale, and a v_scale for each head
    transposed      the keys of v are contiguous
    """

    dtype: str = "e4m3"
    scaled: bool = True
    uniform_keys: bool = False
    uniform_values: bool = False
    block_scales: bool = False
    transposed: bool = True

    @property
    def _keys_per_scale(self) -> int:
        return SCALE_BLOCK if self.block_scales else 1

    def _keys(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """k_nope, k_rope and v; keys that no query sees are poison."""
        keys, unseen = sum(self.kv_lens), self._unseen(inputs.drawn_on)
        k_nope = inputs.normal(keys, self.heads, self.qk_nope_head_dim)
        k_rope = inputs.normal(keys, self.qk_rope_head_dim)
        v = inputs.normal(keys, self.heads, self.v_head_dim)
        for each in (k_nope, k_rope, v):
            each[unseen] = torch.nan
        placed = [inputs.place("k_nope", k_nope, "e4m3"), inputs.place("k_rope", k_rope, "e4m3")]
        if not self.transposed:
            return placed[0], placed[1], inputs.place("v", v, "e4m3")
        padded = v.new_full((self.heads, self.v_head_dim, -(-keys // PITCH) * PITCH), torch.nan)
        padded[..., :keys] = v.permute(1, 2, 0)
        return placed[0], placed[1], inputs.place("v", padded, "e4m3").permute(2, 0, 1)[:keys]

    def _scales(self, inputs: Inputs) -> dict[str, Any]:
        return {"keys_per_scale": self._keys_per_scale, **self._placed_scales(inputs)}

    def _key_scales(self, extras: dict[str, Any]) -> tuple[Tensor | None, ...]:
        return () if self.block_scales else (extras.get("k_scale"), extras.get("v_scale"))

    def _placed_scales(self, inputs: Inputs) -> dict[str, Tensor]:
        if not self.scaled:
            return {}
        tokens, keys = sum(self.q_lens), sum(self.kv_lens)
        unseen = self._unseen(inputs.drawn_on)
        q_scale = inputs.uniform(-1, 1, tokens, self.heads).exp2()
        if self.block_scales:
            return {"q_scale": inputs.place("q_scale", q_scale), **self._block_scales(inputs)}
        k_scale = inputs.uniform(-1, 1, keys).exp2()
        v_scale = inputs.uniform(-3, 3, keys, self.heads).exp2()
        placed = {"q_scale": inputs.place("q_scale", q_scale)}
        if self.uniform_keys:
            sign = -1 if self.seed % 2 else 1
            placed["k_scale"] = inputs.place("k_scale", k_scale[:1] * sign).expand(keys)
        else:
            k_scale[unseen] = torch.nan
            placed["k_scale"] = inputs.place("k_scale", k_scale)
        if self.uniform_values:
            placed["v_scale"] = inputs.place("v_scale", v_scale[:1]).expand(keys, -1)
        else:
            v_scale[unseen] = torch.nan
            placed["v_scale"] = inputs.place("v_scale", v_scale.T).T
        return placed

    def _block_scales(self, inputs: Inputs) -> dict[str, Tensor]:
        """k_scale with both signs, and v_scale; what belongs to no key that is seen is poison."""
        blocks = sum(self.kv_lens) // SCALE_BLOCK + len(self.kv_lens)
        own = torch.arange(blocks, device=inputs.drawn_on)
        rows = filled(scales_of_keys(own, starts_of(self.kv_lens), SCALE_BLOCK))
        unseen = torch.ones(blocks, dtype=torch.bool, device=inputs.drawn_on)
        unseen[rows[~self._unseen(inputs.drawn_on)]] = False
        k_scale = inputs.uniform(-1, 1, blocks).exp2()
        k_scale[1::3] *= -1
        v_scale = inputs.uniform(-3, 3, blocks, self.heads).exp2()
        v_scale[::4] *= -1
        k_scale[unseen], v_scale[unseen] = torch.nan, torch.nan
        return {
            "k_scale": inputs.place("k_scale", k_scale),
            "v_scale": inputs.place("v_scale", v_scale.T).T,
        }

    def _naive(
        self, given: Given, exact: Tensor, out: Tensor, backend: str
    ) -> tuple[Tensor, Tensor]:
        if backend not in FP8_SUMS:
            where = given.to(exact.device)
            return self._oracle(where, torch.float32, weights_dtype=torch.bfloat16)
        sink, product = given.extras.get("sink"), FP8_SUMS[backend]
        draws, lse = self._fp8_run(given.tensors, self._of_keys(given), sink, product)
        return _worst_rows(draws.to(exact.device), exact), lse

    def _largest_score(self, given: Given) -> Tensor:
        scales = self._of_keys(given)
        names = ("q_scale", "k_scale", "k_scale", "v_scale")
        dequantised = (
            _dequantised(each, scales.get(name))
            for name, each in zip(names, given.tensors, strict=True)
        )
        return super()._largest_score(Given(tuple(dequantised), {}))

    def _of_keys(self, given: Given) -> dict[str, Tensor]:
        """The scales, with a k_scale and v_scale of each key."""
        starts, per_scale = starts_of(self.kv_lens), self._keys_per_scale
        return {
            name: each if name == "q_scale" else filled(scales_of_keys(each, starts, per_scale))
            for name, each in given.extras.items()
            if name.endswith("_scale") and name != "keys_per_scale"
        }

    def _fp8_run(
        self,
        tensors: tuple[Tensor, ...],
        scales: dict[str, Tensor],
        sink: Tensor | None,
        product: Product,
    ) -> tuple[Tensor, Tensor]:
        """Run attention as a kernel with probabilities of e4m3 loses digits, in float32.

        Scores are those of `product`, and probabilities are wrong by `HALF_ROUNDING`. Returns
        (out of each draw of signs, lse).
        """
        q, k_nope, k_rope, v = tensors
        values = _dequantised(v, scales.get("v_scale")).float().nan_to_num()
        own = torch.Generator("cpu").manual_seed(0)
        draws = (DRAWS, *values.shape[:2])
        signs = torch.randint(0, 2, draws, generator=own, device="cpu") * 2 - 1
        values = values * (1 + HALF_ROUNDING * signs[..., None].to(values.device))
        outs, lses = [], []
        starts = zip(
            pairwise(starts_of(self.q_lens)), pairwise(starts_of(self.kv_lens)), strict=True
        )
        for (q_start, q_end), (kv_start, kv_end) in starts:
            position = torch.arange(q_start, q_end, device=q.device) - q_end + kv_end - kv_start
            key = torch.arange(kv_end - kv_start, device=q.device)
            visible = Mask(self.mask, self.window).visible(position, key)
            keys, queries = slice(kv_start, kv_end), slice(q_start, q_end)
            scores = q.new_empty(q_end - q_start, self.heads, len(key), dtype=torch.float32)
            for head in range(self.heads):
                key_rows = torch.cat([k_nope[keys, head].float(), k_rope[keys].float()], dim=-1)
                scores[:, head] = product(q[queries, head], key_rows.nan_to_num())
            if self.scaled:
                scores *= scales["q_scale"][queries, :, None]
                scores *= scales["k_scale"][keys].nan_to_num()
            scores = (scores * self.softmax_scale).masked_fill(~visible[:, None], -torch.inf)
            weights, lse = attention_weights(scores, sink)
            outs.append(torch.einsum("qhk,nkhd->nqhd", weights, values[:, keys]))
            lses.append(lse)
        out, lse = torch.cat(outs, 1), torch.cat(lses)
        return torch.where(lse.isneginf()[..., None], 0.0, out), lse


def _worst_rows(draws: Tensor, exact: Tensor) -> Tensor:
    """Take each row from the draw with the largest error in it; [draws, tokens, heads, D_V]."""
    worst = (draws - exact).square().sum(-1).nan_to_num().argmax(0)
    return draws.gather(0, worst[None, ..., None].expand(1, *draws.shape[1:]))[0]


def _dequantised(x: Tensor, scale: Tensor | None) -> Tensor:
    """x [n, heads, columns] or [n, columns] times its scale [n, heads] or [n], float64."""
    if scale is None:
        return x.double()
    return x.double() * scale.double().reshape(*scale.shape, *[1] * (x.ndim - scale.ndim))
