"""Cases of `mla_prefill`."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from mlakit import reference
from mlakit.dispatch import selection
from mlakit.dispatch.knobs import Backend
from mlakit.model.masks import Mask
from mlakit.ops import mla_prefill
from mlakit.ops.prefill import prefill_problem
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


@dataclass(frozen=True, eq=False)
class Given:
    """What the op and its oracles are given."""

    tensors: tuple[Tensor, ...]  # q, k_nope, k_rope, v
    extras: dict[str, Any]  # by the names of their arguments

    def to(self, where: torch.device) -> Given:
        extras = {
            name: each.to(where) if isinstance(each, Tensor) else each
            for name, each in self.extras.items()
        }
        return Given(tuple(each.to(where) for each in self.tensors), extras)


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
        tensors = (q, k_nope, k_rope, v)
        extras = self._scales(inputs)
        q_starts, kv_starts = (
            inputs.place_ints(name, starts_of(lengths), wide=self.wide_indices)
            for name, lengths in (("q_starts", self.q_lens), ("kv_starts", self.kv_lens))
        )
        if self.alibi:
            slopes = reference.alibi_slopes(self.heads).float()
            extras["alibi_slopes"] = inputs.place("alibi_slopes", slopes)
        if self.sink:
            extras["sink"] = inputs.sink(self.sink, self.heads)
        given = Given(tensors, extras)
        mask = Mask(self.mask, self.window)
        results_given: dict[str, Any] = self._given(inputs)
        backends: list[str] = []  # the last is that of the results to check

        def call(backend: Backend) -> Results:
            results = mla_prefill(
                q,
                k_nope,
                k_rope,
                v,
                q_starts,
                kv_starts,
                softmax_scale=self.softmax_scale,
                mask=mask,
                backend=backend,
                **extras,
                **results_given,
            )
            problem = prefill_problem(*tensors, mask=mask, key_scales=self._key_scales(extras))
            backends.append(selection.select(self.op, problem, backend).backend)
            return results

        def check(results: Results) -> None:
            for name, result in zip(("out", "lse"), results, strict=True):
                assert_given(name, result, results_given.get(name))
            where = inputs.drawn_on
            exact = self._oracle(given.to(where), torch.float64)
            out, lse = results
            naive = self._naive(given, exact[0], out, backends[-1])
            assert_matches("out", out.to(where), exact[0], naive[0].to(where))
            largest = self._largest_score(given).to(where)
            assert_logits_match("lse", lse.to(where), exact[1], naive[1].to(where), largest)

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
        dtype = torch.bfloat16 if self.dtype == "e4m3" else DTYPES[self.dtype]
        return {
            "out": inputs.result("out", (*shape, self.v_head_dim), dtype),
            "lse": inputs.result("lse", shape, torch.float32),
        }

    def _scales(self, inputs: Inputs) -> dict[str, Any]:
        """The scales of e4m3 tensors, as arguments."""
        return {}

    def _key_scales(self, extras: dict[str, Any]) -> tuple[Tensor | None, ...]:
        """The scales that each key may have its own of, as `prefill_problem` wants them."""
        return ()

    def _oracle(self, given: Given, dtype: torch.dtype, **more: Any) -> tuple[Tensor, Tensor]:
        results: tuple[Tensor, Tensor] = self.reference.mla_prefill(
            *given.tensors,
            starts_of(self.q_lens),
            starts_of(self.kv_lens),
            softmax_scale=self.softmax_scale,
            mask=Mask(self.mask, self.window),
            dtype=dtype,
            **given.extras,
            **more,
        )
        return results

    def _naive(
        self, given: Given, exact: Tensor, out: Tensor, backend: str
    ) -> tuple[Tensor, Tensor]:
        """The run that determines the tolerance of `out`; `exact` is the oracle's."""
        weights = weights_dtype(out, torch.float32)
        return self._oracle(given.to(exact.device), torch.float32, weights_dtype=weights)

    def _largest_score(self, given: Given) -> Tensor:
        """|q| · max |key| · softmax_scale + the largest bias, [tokens, heads]."""
        q, k_nope, k_rope, _ = given.tensors
        squares = k_nope.double().square().sum(-1) + k_rope.double().square().sum(-1)[:, None]
        longest = squares.sqrt().nan_to_num().amax() if squares.numel() else squares.new_zeros(())
        bias = max(self.kv_lens, default=0) if self.alibi else 0
        size: Tensor = q.double().norm(dim=-1)
        return size * longest * abs(self.softmax_scale) + bias
