"""Cases of `mla_prefill`."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from mlakit import reference
from mlakit.dispatch.knobs import Backend
from mlakit.model.masks import Mask
from mlakit.ops import mla_prefill
from mlakit.tools.testing import assert_matches
from mlakit.tools.workloads.case import (
    BatchedCase,
    Results,
    Trial,
    assert_given,
    assert_logits_match,
    weights_dtype,
)
from mlakit.tools.workloads.inputs import DTYPES, Inputs
from mlakit.tools.workloads.paged import joined, seen_tokens, starts_of


@dataclass(frozen=True, kw_only=True, repr=False)
class PrefillCase(BatchedCase):
    """One call of `mla_prefill`.

    kv_lens        keys of each request; its q_lens queries are the newest
    expanded       k_nope and v are views of one tensor, as after an up-projection
    sharpness      standard deviation of the scores of a head of average magnitude; negative for a
                   negative softmax_scale
    sink           "", "finite" or "mixed" (with ±inf)
    given_results  pass out= and lse=
    """

    op = "mla_prefill"

    kv_lens: tuple[int, ...] = (9, 0, 21)
    q_lens: tuple[int, ...] = (9, 0, 4)
    heads: int = 3
    qk_nope_head_dim: int = 16
    qk_rope_head_dim: int = 8
    v_head_dim: int = 16
    dtype: str = "bf16"
    mask: str = "causal"
    window: int = 0
    alibi: bool = False
    sharpness: float = 2.0
    sink: str = ""
    expanded: bool = False
    wide_indices: bool = False
    given_results: bool = False

    @property
    def softmax_scale(self) -> float:
        """Gives the scores a standard deviation of `sharpness`."""
        return self.sharpness / sqrt(self.qk_nope_head_dim + self.qk_rope_head_dim)

    def trial(self, device: torch.device | str) -> Trial:
        inputs = self.inputs(device)
        tokens, width = sum(self.q_lens), self.qk_nope_head_dim + self.qk_rope_head_dim
        q = inputs.place("q", inputs.queries(tokens, self.heads, width), self.dtype)
        k_nope, k_rope, v = self._keys(inputs)
        starts = (
            inputs.place_ints("q_starts", starts_of(self.q_lens), wide=self.wide_indices),
            inputs.place_ints("kv_starts", starts_of(self.kv_lens), wide=self.wide_indices),
        )
        slopes = None
        if self.alibi:
            slopes = inputs.place("alibi_slopes", reference.alibi_slopes(self.heads).float())
        sink = inputs.sink(self.sink, self.heads)
        given = self._given(inputs)

        def call(backend: Backend) -> Results:
            return mla_prefill(
                q,
                k_nope,
                k_rope,
                v,
                *starts,
                softmax_scale=self.softmax_scale,
                mask=Mask(self.mask, self.window),
                alibi_slopes=slopes,
                sink=sink,
                out=given.get("out"),
                lse=given.get("lse"),
                backend=backend,
            )

        def check(results: Results) -> None:
            where = inputs.drawn_on
            tensors = tuple(tensor.to(where) for tensor in (q, k_nope, k_rope, v))
            extras = {
                name: None if tensor is None else tensor.to(where)
                for name, tensor in (("alibi_slopes", slopes), ("sink", sink))
            }
            exact = self._oracle(tensors, extras, torch.float64)
            weights = {"weights_dtype": weights_dtype(results[0], torch.float32)}
            naive = self._oracle(tensors, {**extras, **weights}, torch.float32)
            for name, result in zip(("out", "lse"), results, strict=True):
                assert_given(name, result, given.get(name))
            out, lse = results
            assert_matches("out", out.to(where), exact[0], naive[0])
            assert_logits_match("lse", lse, exact[1], naive[1], self._largest_score(*tensors[:3]))

        return Trial(inputs, call, check, self.calls, ("out", "lse"))

    def _keys(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """k_nope, k_rope and v; keys that no query sees are poison."""
        keys, unseen = sum(self.kv_lens), self._unseen(inputs.drawn_on)
        widths = [self.qk_nope_head_dim, self.v_head_dim]
        per_head = inputs.normal(keys, self.heads, sum(widths))
        k_rope = inputs.normal(keys, self.qk_rope_head_dim)
        per_head[unseen], k_rope[unseen] = torch.nan, torch.nan
        if self.expanded:
            parts = inputs.place("k_nope and v", per_head, self.dtype).split(widths, dim=-1)
        else:
            parts = tuple(
                inputs.place(name, part, self.dtype)
                for name, part in zip(("k_nope", "v"), per_head.split(widths, dim=-1), strict=True)
            )
        return parts[0], inputs.place("k_rope", k_rope, self.dtype), parts[1]

    def _unseen(self, device: torch.device) -> Tensor:
        """bool [keys]: no query sees them."""
        seen = seen_tokens(Mask(self.mask, self.window), self.kv_lens, self.q_lens, device)
        return ~joined(seen, torch.bool, device)

    def _given(self, inputs: Inputs) -> dict[str, Tensor]:
        if not self.given_results:
            return {}
        shape = (sum(self.q_lens), self.heads)
        return {
            "out": inputs.result("out", (*shape, self.v_head_dim), DTYPES[self.dtype]),
            "lse": inputs.result("lse", shape, torch.float32),
        }

    def _oracle(
        self, tensors: tuple[Tensor, ...], extras: dict[str, Any], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        q, k_nope, k_rope, v = tensors
        results: tuple[Tensor, Tensor] = self.reference.mla_prefill(
            q,
            k_nope,
            k_rope,
            v,
            starts_of(self.q_lens),
            starts_of(self.kv_lens),
            softmax_scale=self.softmax_scale,
            mask=Mask(self.mask, self.window),
            dtype=dtype,
            **extras,
        )
        return results

    def _largest_score(self, q: Tensor, k_nope: Tensor, k_rope: Tensor) -> Tensor:
        """|q| · max |key| · softmax_scale + the largest bias, [tokens, heads]."""
        squares = k_nope.double().square().sum(-1) + k_rope.double().square().sum(-1)[:, None]
        longest = squares.sqrt().nan_to_num().amax() if squares.numel() else squares.new_zeros(())
        bias = max(self.kv_lens, default=0) if self.alibi else 0
        size: Tensor = q.double().norm(dim=-1)
        return size * longest * abs(self.softmax_scale) + bias
