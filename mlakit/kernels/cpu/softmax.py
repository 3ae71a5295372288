"""Softmax-weighted sums over keys that arrive block by block, in float32."""

from __future__ import annotations

import torch
from torch import Tensor


class OnlineSoftmax:
    """Running (peak, total, weighted sum) of query rows [..., rows] over blocks of keys.

    out = Σ_j exp(s_j − peak) v_j / (total + exp(sink − peak))       lse = peak + log(total)
    """

    def __init__(self, rows: tuple[int, ...], v_width: int) -> None:
        self.peak = torch.full(rows, -torch.inf)
        self.total = torch.zeros(rows)
        self.weighted = torch.zeros(*rows, v_width)

    def add(self, scores: Tensor, values: Tensor, visible: Tensor | None = None) -> None:
        """Take in scores [..., rows, keys] and values [..., keys, v_width].

        `visible` [rows, keys] leaves keys out row by row; what it hides may be NaN.
        """
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        peak = torch.maximum(self.peak, scores.amax(-1))
        anchor = _finite_peak(peak)
        weights = (scores - anchor[..., None]).exp_()
        decay = (self.peak - anchor).exp_()
        self.peak = peak
        self.total = self.total * decay + weights.sum(-1)
        self.weighted = self.weighted * decay[..., None]
        if visible is None or bool(values.isfinite().all()):
            self.weighted += weights @ values
        else:
            # 0 · NaN is NaN: a key hidden from some rows must be left out, not weighted by 0
            for row, seen in enumerate(visible):
                self.weighted[..., row, :] += torch.einsum(
                    "...k,...kv->...v", weights[..., row, seen], values[..., seen, :]
                )

    def finish(self, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(out, lse); `sink`, broadcast over rows, only enlarges the denominator of out."""
        lse = self.peak + self.total.log()
        denominator = self.total
        if sink is not None:
            denominator = denominator + (sink - _finite_peak(self.peak)).exp()
        empty = self.peak == -torch.inf
        out = self.weighted / torch.where(empty, 1.0, denominator)[..., None]
        return out, lse


def _finite_peak(peak: Tensor) -> Tensor:
    """Where nothing was seen yet the peak is −inf, and −inf − (−inf) would be NaN."""
    return torch.where(peak == -torch.inf, 0.0, peak)
