"""Launches of `mla_prefill` with inputs and oracle on the device: thousands per minute.

A `PrefillCase` makes its inputs on the CPU, and its oracle loops over queries. Here the device
makes the inputs, and the oracle computes all queries of a request at once. Keys that no query sees
are poison.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mlakit.dispatch.knobs import Backend
from mlakit.model.masks import Mask
from mlakit.ops import mla_prefill
from mlakit.reference.softmax import attention_weights
from mlakit.tools.testing import assert_matches, poison
from mlakit.tools.workloads.case import Results, Trial, assert_given, assert_logits_match, repeated
from mlakit.tools.workloads.inputs import DTYPES, Inputs
from mlakit.tools.workloads.paged import starts_of
from mlakit.tools.workloads.prefill import PrefillCase
from mlakit.tools.workloads.random_cases import Draw


def attend(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],  # q, k_nope, k_rope, v
    visible: list[Tensor],  # bool [q_len, kv_len] of each request
    *,
    softmax_scale: float,
    sink: Tensor | None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """The same as `reference.mla_prefill`, for all queries of a request at once: (out, lse).

    Values that a query does not see are multiplied by 0, so they must be finite.
    """
    q, k_nope, k_rope, v = (each.to(dtype) for each in tensors)
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=dtype, device=q.device)
    q_starts, kv_starts = (starts_of([each.shape[i] for each in visible]) for i in (0, 1))
    requests = zip(visible, pairwise(q_starts), pairwise(kv_starts), strict=True)
    for seen, (q_start, q_end), (kv_start, kv_end) in requests:
        own, rows = slice(q_start, q_end), slice(kv_start, kv_end)
        shared = k_rope[rows, None].expand(-1, q.shape[1], -1)
        keys = torch.cat([k_nope[rows], shared], dim=-1)
        scores = torch.einsum("qhd,khd->qhk", q[own], keys) * softmax_scale
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        weights, lse[own] = attention_weights(scores, sink)
        out[own] = torch.einsum("qhk,khd->qhd", weights, v[rows])
    return out, lse


@dataclass(frozen=True, kw_only=True, repr=False)
class PrefillLaunch(PrefillCase):
    """A call of `mla_prefill`. A negative `sharpness` makes a negative softmax_scale.

    calls  consecutive calls, which must all return the same bits; the last is checked. From the
           third on a GPU may replay the recorded launches of the second.
    """

    calls: int = 1
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128

    def trial(self, device: torch.device | str) -> Trial:
        inputs = Inputs(device, self.seed, padded=self.padded, draws_there=True)
        mask = Mask(self.mask, self.window)
        visible = [
            _visible(mask, q_len, kv_len, inputs.device)
            for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True)
        ]
        q = self._queries(inputs)
        k_nope, k_rope, v = self._poisoned_keys(inputs, visible)
        starts = [
            inputs.place_ints(name, starts_of(lens))
            for name, lens in (("q_starts", self.q_lens), ("kv_starts", self.kv_lens))
        ]
        sink = inputs.sink(self.sink, self.heads)
        shape = (sum(self.q_lens), self.heads)
        out = inputs.result("out", (*shape, self.v_head_dim), DTYPES[self.dtype])
        lse = inputs.result("lse", shape, torch.float32)

        def call(backend: Backend) -> Results:
            return mla_prefill(
                *(q, k_nope, k_rope, v, *starts),
                softmax_scale=self.softmax_scale,
                mask=mask,
                sink=sink,
                out=poison(out),
                lse=poison(lse),
                backend=backend,
            )

        def check(results: Results) -> None:
            for name, result, given in zip(("out", "lse"), results, (out, lse), strict=True):
                assert_given(name, result, given)
            finite = (q, *(each.nan_to_num() for each in (k_nope, k_rope, v)))
            self._check(finite, visible, sink, results)

        return Trial(inputs, repeated(call, self.calls, ("out", "lse")), check)

    def _queries(self, inputs: Inputs) -> Tensor:
        width = self.qk_nope_head_dim + self.qk_rope_head_dim
        return inputs.place("q", inputs.queries(sum(self.q_lens), self.heads, width), self.dtype)

    def _poisoned_keys(
        self, inputs: Inputs, visible: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """k_nope, k_rope and v, NaN where no query sees a key."""
        seen = torch.cat([each.any(0) for each in visible])
        per_head = inputs.normal(len(seen), self.heads, self.qk_nope_head_dim + self.v_head_dim)
        k_rope = inputs.normal(len(seen), self.qk_rope_head_dim)
        per_head[~seen], k_rope[~seen] = torch.nan, torch.nan
        parts = inputs.place("k_nope and v", per_head, self.dtype)
        k_nope, v = parts.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        return k_nope, inputs.place("k_rope", k_rope, self.dtype), v

    def _check(
        self,
        tensors: tuple[Tensor, ...],
        visible: list[Tensor],
        sink: Tensor | None,
        results: Results,
    ) -> None:
        q, k_nope, k_rope, v = tensors
        exact, naive = (
            attend(
                (q, k_nope, k_rope, v),
                visible,
                softmax_scale=self.softmax_scale,
                sink=sink,
                dtype=dtype,
            )
            for dtype in (torch.float64, torch.float32)
        )
        assert_matches("out", results[0], exact[0], naive[0])
        squares = k_nope.double().square().sum(-1) + k_rope.double().square().sum(-1)[:, None]
        longest = squares.sqrt().amax() if squares.numel() else squares.new_zeros(())
        largest = q.double().norm(dim=-1) * longest * abs(self.softmax_scale)
        assert_logits_match("lse", results[1], exact[1], naive[1], largest)


def _visible(mask: Mask, q_len: int, kv_len: int, device: torch.device) -> Tensor:
    position = torch.arange(q_len, device=device) + (kv_len - q_len)
    return mask.visible(position, torch.arange(kv_len, device=device))


EDGES = (0, 1, 63, 64, 65, 127, 128, 129, 256)
LONGEST = 1500
MOST_SCORES = 3_000_000  # a GPU checks so many in milliseconds
MOST_CPU_SCORES = 60_000
BATCHES = (1, 2, 3, 5, 20)
# D_N, D_R and D_V, dtype, mask, window, sink, sign of softmax_scale
CONFIGURATIONS = (
    ((128, 64, 128), "bf16", "causal", 0, "", 1),
    ((128, 64, 128), "bf16", "null", 0, "", 1),
    ((128, 64, 128), "fp16", "causal", 0, "mixed", -1),
    ((128, 64, 128), "bf16", "sliding_window_causal", 100, "finite", 1),
    ((128, 64, 128), "bf16", "sliding_window_noncausal", 300, "", 1),
    ((128, 64, 128), "bf16", "chunked", 90, "", 1),
    ((128, 64, 128), "bf16", "chunked_causal", 260, "", 1),
    ((192, 64, 256), "bf16", "causal", 0, "finite", 1),
    ((192, 64, 256), "fp16", "null", 0, "", 1),
    ((128, 0, 128), "bf16", "causal", 0, "", 1),
    ((64, 32, 64), "bf16", "causal", 0, "", 1),
    ((64, 32, 64), "fp16", "null", 0, "finite", -1),
)


def prefill_launch(draw: Draw, backend: str, device: str) -> PrefillLaunch:
    """A launch of one of few configurations: thousands of launches compile few kernels."""
    widths, dtype, mask, window, sink, sign = draw.choice(CONFIGURATIONS)
    batch, heads = draw.choice(BATCHES), draw.integer(1, 4)
    most = (MOST_SCORES if device != "cpu" else MOST_CPU_SCORES) // (batch * heads)
    longest = min(LONGEST, int(most**0.5))
    q_lens = [_length(draw, longest) for _ in range(batch)]
    kv_lens = [draw.choice((n, n, n + _length(draw, longest), max(n - 3, 0))) for n in q_lens]
    return PrefillLaunch(
        seed=draw.integer(0, 2**31),
        calls=draw.choice((1, 1, 1, 3)),
        padded=draw.flip(),
        q_lens=tuple(q_lens),
        kv_lens=tuple(kv_lens),
        heads=heads,
        qk_nope_head_dim=widths[0],
        qk_rope_head_dim=widths[1],
        v_head_dim=widths[2],
        dtype=dtype,
        mask=mask,
        window=window,
        sink=sink,
        sharpness=sign * draw.choice((0.5, 1.5, 4.0)),
    )


def _length(draw: Draw, longest: int) -> int:
    drawn = draw.integer(0, longest)
    return draw.choice((min(draw.choice(EDGES), longest), drawn // 128 * 128, drawn, drawn))
