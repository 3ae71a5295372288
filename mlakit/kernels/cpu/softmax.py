"""Softmax-weighted sums over keys that arrive block by block, in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class OnlineSoftmax:
    """Running (peak, total, weighted sum) of query rows over blocks of keys, updated in place.

    out = Σ_j exp(s_j − peak) v_j / (total + exp(sink − peak))       lse = peak + log(total)
    """

    peak: Tensor  # [..., rows]
    total: Tensor  # [..., rows]
    weighted: Tensor  # [..., rows, v_width]

    @classmethod
    def over(cls, *rows: int, v_width: int) -> OnlineSoftmax:
        """Nothing seen yet."""
        return cls(
            torch.full(rows, -torch.inf, device="cpu"),
            torch.zeros(rows, device="cpu"),
            torch.zeros(*rows, v_width, device="cpu"),
        )

    @classmethod
    def of(cls, scores: Tensor, values: Tensor) -> OnlineSoftmax:
        """What adding one block to nothing gives, for less."""
        peak = scores.amax(-1)
        weights = _weights(scores, _anchor(peak))
        return cls(peak, weights.sum(-1), weights @ values)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> OnlineSoftmax:
        """The same state seen from a part of the leading axes."""
        return OnlineSoftmax(self.peak[index], self.total[index], self.weighted[index])

    def unflatten(self, *rows: int) -> OnlineSoftmax:
        """The same state with its one axis of rows as several."""
        return OnlineSoftmax(
            self.peak.view(rows), self.total.view(rows), self.weighted.view(*rows, -1)
        )

    def add(self, scores: Tensor, values: Tensor, visible: Tensor | None = None) -> None:
        """Take in scores [..., rows, keys] (overwritten) and values [..., keys, v_width].

        `visible` [rows, keys] leaves keys out row by row; what it hides may be NaN. Either there
        are no leading axes, or one that scores, values and the state share.
        """
        if visible is not None:
            scores.masked_fill_(~visible, -torch.inf)
        peak = torch.maximum(self.peak, scores.amax(-1))
        anchor = _anchor(peak)
        weights = _weights(scores, anchor)
        decay = (self.peak - anchor).exp_()
        self.peak.copy_(peak)
        self.total.mul_(decay).add_(weights.sum(-1))
        self.weighted.mul_(decay[..., None])
        # a sum that is finite has finite terms; one that overflows only takes the slow way
        if visible is None or bool(values.sum().isfinite()):
            add_product = self.weighted.addmm_ if weights.ndim == 2 else self.weighted.baddbmm_
            add_product(weights, values)
        else:
            # 0 · NaN is NaN: a key hidden from some rows must be left out, not weighted by 0
            for row, seen in enumerate(visible):
                self.weighted[..., row, :] += torch.einsum(
                    "...k,...kv->...v", weights[..., row, seen], values[..., seen, :]
                )

    def finish(self, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(out, lse); `sink`, broadcast over rows, only enlarges the denominator of out."""
        lse = self.peak + self.total.log()
        empty = self.peak == -torch.inf
        denominator = self.total
        if sink is not None:
            denominator = denominator + (sink - self.peak.masked_fill(empty, 0.0)).exp()
        return self.weighted / denominator.masked_fill(empty, 1.0)[..., None], lse


def _anchor(peak: Tensor) -> Tensor:
    # where nothing was seen yet the peak is −inf, and −inf − (−inf) would be NaN
    return peak.masked_fill(peak == -torch.inf, 0.0)


def _weights(scores: Tensor, anchor: Tensor) -> Tensor:
    """exp(s − anchor) in the memory of the scores."""
    return scores.sub_(anchor[..., None]).exp_()
