"""Launches of `sparse_mla` with an oracle on the device: thousands per minute.

A `SparseCase` computes its oracle on the CPU, token by token. Here the device computes it for all
tokens at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlakit.reference.softmax import attention_weights
from mlakit.tools.testing import assert_matches
from mlakit.tools.workloads.case import Results, Trial, assert_logits_match, repeated
from mlakit.tools.workloads.sparse import Lists, SparseCase

NAMES = ("out", "lse", "max_logits")


def attend_lists(
    q: Tensor,  # [tokens, heads, width]
    rows: Tensor,  # [tokens, entries, width], finite
    counts: Tensor,  # bool [tokens, entries]
    *,
    softmax_scale: float,
    v_width: int,
    sink: Tensor | None,
    dtype: torch.dtype = torch.float64,
) -> Results:
    """The same as `reference.sparse_mla`, for all tokens at once: (out, lse, max_logits)."""
    rows = rows.to(dtype)
    scores = q.to(dtype) @ rows.mT * softmax_scale
    scores = scores.masked_fill(~counts[:, None], -torch.inf)
    weights, lse = attention_weights(scores, sink)
    return weights @ rows[..., :v_width], lse, scores.amax(-1)


@dataclass(frozen=True, kw_only=True, repr=False)
class SparseLaunch(SparseCase):
    """A call of `sparse_mla`. A negative `sharpness` makes a negative softmax_scale.

    calls  consecutive calls, which must all return the same bits; the last is checked. From the
           third on a GPU may replay the recorded launch of the second.
    """

    calls: int = 1
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    page_size: int = 64

    def trial(self, device: torch.device | str) -> Trial:
        trial = super().trial(device)
        return Trial(trial.inputs, repeated(trial.call, self.calls, NAMES), trial.check)

    def _check(
        self,
        q: Tensor,
        main: Lists,
        extra: Lists | None,
        sink: Tensor | None,
        results: Results,
        *,
        rounds: bool,
    ) -> None:
        device = results[0].device
        lists = [main] if extra is None else [main, extra]
        rows, counts = _listed(lists, device)
        rounded = rows
        if rounds:
            rounded, _ = _listed([each.rounded(self.row.kv_lora_rank) for each in lists], device)
        q = q.to(device, torch.float64)
        exact, naive = (
            attend_lists(
                q,
                of_rows,
                counts,
                softmax_scale=self.softmax_scale,
                v_width=self.row.v_width,
                sink=None if sink is None else sink.to(device),
                dtype=dtype,
            )
            for of_rows, dtype in ((rows, torch.float64), (rounded, torch.float32))
        )
        assert_matches("out", results[0], exact[0], naive[0])
        largest = q.norm(dim=-1) * rows.norm(dim=-1).amax() * abs(self.softmax_scale)
        for i in (1, 2):
            assert_logits_match(NAMES[i], results[i], exact[i], naive[i], largest)


def _listed(lists: Sequence[Lists], device: torch.device) -> tuple[Tensor, Tensor]:
    """(rows, counts) of all lists: float64 [tokens, entries, width], bool [tokens, entries]."""
    parts = [_listed_of_one(each, device) for each in lists]
    rows, counts = (torch.cat(each, 1) for each in zip(*parts, strict=True))
    return rows, counts


def _listed_of_one(lists: Lists, device: torch.device) -> tuple[Tensor, Tensor]:
    """As `_listed`; a row is 0 where its entry does not count."""
    slots, stored = lists.rows.long(), lists.stored.to(device)
    counts = (slots >= 0) & (slots < len(stored))
    if lists.lens is not None:
        counts &= torch.arange(slots.shape[1], device=device) < lists.lens[:, None]
    rows = stored[torch.where(counts, slots, 0)]
    return torch.where(counts[..., None], rows, 0.0), counts
