"""Online softmax over blocks of keys, in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class OnlineSoftmax:
    """(row_max, row_sum, acc) of query rows over blocks of keys, updated in place.

    out = acc / (row_sum + exp(sink − row_max))       acc = Σ_j exp(s_j − row_max) v_j
    lse = row_max + log(row_sum)
    """

    row_max: Tensor  # [..., rows]
    row_sum: Tensor  # [..., rows]
    acc: Tensor  # [..., rows, v_width]

    @classmethod
    def over(cls, *rows: int, v_width: int) -> OnlineSoftmax:
        """The state before the first block."""
        return cls(
            torch.full(rows, -torch.inf, dtype=torch.float32, device="cpu"),
            torch.zeros(rows, dtype=torch.float32, device="cpu"),
            torch.zeros(*rows, v_width, dtype=torch.float32, device="cpu"),
        )

    @classmethod
    def of(cls, scores: Tensor, values: Tensor) -> OnlineSoftmax:
        """The state after one block, cheaper than `over` and `add`."""
        row_max = scores.amax(-1)
        probs = _probs(scores, _anchor(row_max))
        return cls(row_max, probs.sum(-1), probs @ values)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> OnlineSoftmax:
        """A view of the state of some rows."""
        return OnlineSoftmax(self.row_max[index], self.row_sum[index], self.acc[index])

    def unflatten(self, *rows: int) -> OnlineSoftmax:
        """A view of the state with its axis of rows split into several."""
        return OnlineSoftmax(
            self.row_max.view(rows), self.row_sum.view(rows), self.acc.view(*rows, -1)
        )

    def add(self, scores: Tensor, values: Tensor, visible: Tensor | None = None) -> None:
        """Add a block: scores [..., rows, keys], which are overwritten, and values
        [..., keys, v_width].

        visible  [rows, keys]; scores and values of hidden keys may be NaN

        There is no leading axis, or one that scores, values and the state share.
        """
        if visible is not None:
            scores.masked_fill_(~visible, -torch.inf)
        row_max = torch.maximum(self.row_max, scores.amax(-1))
        anchor = _anchor(row_max)
        probs = _probs(scores, anchor)
        rescale = (self.row_max - anchor).exp_()
        self.row_max.copy_(row_max)
        self.row_sum.mul_(rescale).add_(probs.sum(-1))
        self.acc.mul_(rescale[..., None])
        # a finite sum has finite terms; if the sum overflows, the slow branch is also right
        if visible is None or bool(values.sum().isfinite()):
            add_product = self.acc.addmm_ if probs.ndim == 2 else self.acc.baddbmm_
            add_product(probs, values)
        else:
            # 0 · NaN is NaN: a key hidden from some rows must be left out, not multiplied by 0
            for row, seen in enumerate(visible):
                self.acc[..., row, :] += torch.einsum(
                    "...k,...kv->...v", probs[..., row, seen], values[..., seen, :]
                )

    def joined(self, splits: int) -> OnlineSoftmax:
        """The state over all keys, of states over `splits` ranges of keys next to each other on the
        first axis."""
        row_max, row_sum, acc = (
            each.unflatten(0, (-1, splits)) for each in (self.row_max, self.row_sum, self.acc)
        )
        best = row_max.amax(1)
        rescale = (row_max - _anchor(best)[:, None]).exp_()
        row_sum, acc = (row_sum * rescale).sum(1), (acc * rescale[..., None]).sum(1)
        return OnlineSoftmax(best, row_sum, acc)

    def finish(self, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(out, lse); `sink`, broadcast over rows, is added to the denominator of out only."""
        lse = self.row_max + self.row_sum.log()
        empty = self.row_max == -torch.inf
        denominator = self.row_sum
        if sink is not None:
            denominator = denominator + (sink - self.row_max.masked_fill(empty, 0.0)).exp()
        return self.acc / denominator.masked_fill(empty, 1.0)[..., None], lse


def _anchor(row_max: Tensor) -> Tensor:
    # before the first key row_max is −inf, and −inf − (−inf) would be NaN
    return row_max.masked_fill(row_max == -torch.inf, 0.0)


def _probs(scores: Tensor, anchor: Tensor) -> Tensor:
    """exp(s − anchor) in the memory of the scores."""
    return scores.sub_(anchor[..., None]).exp_()
