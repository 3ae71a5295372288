"""Batches for the oracles, attention worked out by hand, and the comparison of results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit.model import masks
from mlakit.model.masks import CAUSAL, NULL, Mask
from tests.seen_keys import sees

E4M3 = torch.float8_e4m3fn
INF = math.inf
SCALE = 0.4  # with the standard normal inputs below it makes weights far from uniform
MASKS = [
    NULL,
    CAUSAL,
    masks.sliding_window_causal(3),
    masks.sliding_window_noncausal(3),
    masks.chunked(3),
    masks.chunked_causal(3),
]
by_mask = pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.kind)


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def assert_same(actual: Tensor, exact: Tensor, tolerance: float = 1e-11) -> None:
    """Same NaN and inf patterns; in every row the worst error within `tolerance` of its size."""
    assert actual.shape == exact.shape
    actual, exact = actual.double(), exact.double()
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(actual), kind(exact)), kind.__name__
    error = torch.where(exact.isfinite(), actual - exact, 0.0).abs()
    size = torch.where(exact.isfinite(), exact, 0.0).abs()
    if exact.numel() > 0:
        excess = error.amax(-1) - tolerance * size.amax(-1).clamp(min=1e-3)
        assert excess.max() <= 0, f"row {int(excess.argmax())}: worst error {error.max():.3e}"


def starts(lengths: Sequence[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))


@dataclass(frozen=True)
class Batch:
    """One ragged batch of a small MLA layer, in both forms of the attention."""

    q_nope: Tensor  # [tokens, heads, D_N]
    q_rope: Tensor  # [tokens, heads, D_R]
    latent: Tensor  # [keys, D_C]
    k_rope: Tensor  # [keys, D_R]
    w_uk: Tensor  # [heads, D_N, D_C]
    w_uv: Tensor  # [heads, D_V, D_C]
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]

    def expanded(self) -> dict[str, Any]:
        """Arguments of the expanded form."""
        return {
            "q": torch.cat([self.q_nope, self.q_rope], -1),
            "k_nope": torch.einsum("jc,hnc->jhn", self.latent, self.w_uk),
            "k_rope": self.k_rope,
            "v": torch.einsum("jc,hvc->jhv", self.latent, self.w_uv),
            "q_starts": starts(self.q_lens),
            "kv_starts": starts(self.kv_lens),
        }

    def absorbed(self) -> dict[str, Any]:
        """Arguments of the absorbed form: W_UK is folded into the query."""
        q_latent = torch.einsum("thn,hnc->thc", self.q_nope, self.w_uk)
        rows = torch.cat([self.latent, self.k_rope], -1)
        return {
            "q": torch.cat([q_latent, self.q_rope], -1),
            "rows": list(rows.split(self.kv_lens)),
            "q_lens": self.q_lens,
            "v_width": self.latent.shape[-1],
        }

    def values(self, latent_out: Tensor) -> Tensor:
        """An absorbed output [tokens, heads, D_C] as values [tokens, heads, D_V]."""
        return torch.einsum("thc,hvc->thv", latent_out, self.w_uv)


def make_batch(
    q_lens: tuple[int, ...] = (3, 0, 1, 4, 3, 2), kv_lens: tuple[int, ...] = (9, 2, 6, 4, 1, 0)
) -> Batch:
    """By default: context, no query, one query, no context, more queries than keys, no key."""
    heads, d_c, d_r, d_n, d_v = 3, 8, 4, 6, 5
    tokens, keys = sum(q_lens), sum(kv_lens)
    return Batch(
        q_nope=normal(tokens, heads, d_n, seed=1),
        q_rope=normal(tokens, heads, d_r, seed=2),
        latent=normal(keys, d_c, seed=3),
        k_rope=normal(keys, d_r, seed=4),
        w_uk=normal(heads, d_n, d_c, seed=5),
        w_uv=normal(heads, d_v, d_c, seed=6),
        q_lens=q_lens,
        kv_lens=kv_lens,
    )


SINK = torch.tensor([0.3, -1.7, 2.4], dtype=torch.float64)


def visible_keys(batch: Batch, mask: Mask) -> list[list[int]]:
    """For every query token the keys of its request that it sees, counted over the whole batch."""
    lists = []
    for start, q_len, kv_len in zip(
        starts(batch.kv_lens)[:-1], batch.q_lens, batch.kv_lens, strict=True
    ):
        for position in range(kv_len - q_len, kv_len):
            lists.append([start + k for k in range(kv_len) if sees(mask, position, k)])
    return lists


def attend_by_hand(
    batch: Batch, mask: Mask, sink: Sequence[float] = (-INF,) * 3
) -> tuple[Tensor, Tensor]:
    """Expanded attention from its definition, with Python's own numbers."""
    given = batch.expanded()
    outs, lses = [], []
    for token, keys in enumerate(visible_keys(batch, mask)):
        for h, sink_logit in enumerate(sink):
            exponentials = []
            for k in keys:
                key = given["k_nope"][k, h].tolist() + given["k_rope"][k].tolist()
                dot = sum(a * b for a, b in zip(given["q"][token, h].tolist(), key, strict=True))
                exponentials.append(math.exp(dot * SCALE))
            total = sum(exponentials)
            lses.append(math.log(total) if keys else -INF)
            values = [given["v"][k, h].tolist() for k in keys] or [[0.0] * 5]
            shares = [e / (total + math.exp(sink_logit)) for e in exponentials] or [0.0]
            columns = zip(*values, strict=True)
            outs.append([sum(s * x for s, x in zip(shares, c, strict=True)) for c in columns])
    out, lse = torch.tensor(outs, dtype=torch.float64), torch.tensor(lses, dtype=torch.float64)
    return out.view(-1, 3, 5), lse.view(-1, 3)
