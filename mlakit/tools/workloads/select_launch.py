"""Launches of `indexer_topk` and `indexer_select` with inputs and oracle on the device: thousands
per minute.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mlakit.dispatch.knobs import Backend
from mlakit.model.masks import Mask
from mlakit.ops import indexer_select, indexer_topk
from mlakit.tools.testing import assert_same_bits, poison
from mlakit.tools.workloads.case import Case, Results, Trial, assert_given, repeated
from mlakit.tools.workloads.decode_launch import Queries
from mlakit.tools.workloads.inputs import Inputs
from mlakit.tools.workloads.paged import (
    SPARE_COLUMNS,
    PagedCase,
    map_pages,
    num_pages_for,
    starts_of,
)

# distinct numbers; many equal ones; almost all equal; best at the end, or at the start; infinities
# and NaN; almost all −inf
KINDS = ("normal", "levels", "two", "ascending", "descending", "special", "invisible")


def best_columns(logits: Tensor, k: int) -> Tensor:
    """The same as `reference.indexer_topk`, for all rows at once."""
    columns = logits.shape[1]
    # a stable sort keeps equal logits in the order of columns, and puts NaN first
    ordered, order = logits.sort(dim=1, descending=True, stable=True)
    found = ordered[:, :k] != -torch.inf
    best = torch.where(found, order[:, :k], columns).sort(dim=1).values
    rows = logits.new_full((len(logits), k), -1, dtype=torch.int32)
    rows[:, : best.shape[1]] = torch.where(best < columns, best, -1).int()
    return rows


@dataclass(frozen=True, kw_only=True, repr=False)
class IndexerTopkLaunch(Case):
    """A call of `indexer_topk`.

    kind       of logits: one of `KINDS`
    calls      consecutive calls, which must all return the same bits; the last is checked
    """

    op = "indexer_topk"

    num_tokens: int = 4
    num_columns: int = 40
    k: int = 8
    kind: str = "normal"
    with_starts: bool = False
    with_ends: bool = False
    calls: int = 1

    def trial(self, device: torch.device | str) -> Trial:
        inputs = Inputs(device, self.seed, padded=self.padded, draws_there=True)
        logits = self._logits(inputs)
        column = torch.arange(self.num_columns, device=inputs.device)
        bounds = {}
        outside = torch.zeros(logits.shape, dtype=torch.bool, device=inputs.device)
        first = torch.zeros(self.num_tokens, dtype=torch.int64, device=inputs.device)
        for name, asked in (("row_starts", self.with_starts), ("row_ends", self.with_ends)):
            if asked:
                bound = inputs.integers(0, self.num_columns + 1, self.num_tokens)
                if name == "row_starts":
                    first = bound
                    outside |= column < bound[:, None]
                else:
                    outside |= column >= bound[:, None]
                bounds[name] = inputs.place(name, bound.int())
        placed = inputs.place("logits", logits.masked_fill(outside, torch.nan))
        out = inputs.result("out", (self.num_tokens, self.k), torch.int32)

        def call(backend: Backend) -> Results:
            return (indexer_topk(placed, self.k, out=poison(out), backend=backend, **bounds),)

        def check(results: Results) -> None:
            assert_given("columns", results[0], out)
            best = best_columns(logits.masked_fill(outside, -torch.inf), self.k)
            expected = torch.where(best >= 0, best - first[:, None].int(), -1)
            assert_same_bits("columns", results[0], expected)

        return Trial(inputs, repeated(call, self.calls, ("columns",)), check)

    def _logits(self, inputs: Inputs) -> Tensor:
        shape = (self.num_tokens, self.num_columns)
        if self.kind == "levels":
            return (inputs.integers(0, 50, *shape).float() - 25) / 3
        if self.kind == "two":
            return inputs.chance(0.01, *shape).float()
        logits = inputs.normal(*shape)
        if self.kind in ("ascending", "descending"):
            return logits.sort(dim=1, descending=self.kind == "descending").values
        if self.kind == "invisible":
            return logits.masked_fill(inputs.chance(0.97, *shape), -torch.inf)
        if self.kind == "special":
            values = [-torch.inf, torch.inf, torch.nan, 0.0, -0.0]
            kinds = torch.tensor(values, dtype=torch.float32, device=inputs.device)
            special = kinds[inputs.integers(0, len(values), *shape)]
            return torch.where(inputs.chance(0.5, *shape), special, logits)
        return logits


@dataclass(frozen=True, kw_only=True, repr=False)
class IndexerSelectLaunch(PagedCase):
    """A call of `indexer_select` with small integers: every score is exact, many are equal.

    block_tokens  queries whose scores fit max_score_bytes; 0: all
    spare_pages   page table columns past the longest request
    calls         consecutive calls, which must all return the same bits; the last is checked
    """

    op = "indexer_select"

    kv_lens: tuple[int, ...] = (33, 0, 17)
    q_lens: tuple[int, ...] = (1, 1, 2)
    heads: int = 64
    k: int = 16
    dtype: str = "bf16"
    mask: str = "causal"
    block_tokens: int = 0
    spare_pages: int = 0
    calls: int = 1
    kv_lora_rank: int = 128
    qk_rope_head_dim: int = 0
    page_size: int = 64
    power_of_two: bool = True

    def trial(self, device: torch.device | str) -> Trial:
        inputs = Inputs(device, self.seed, padded=self.padded, draws_there=True)
        mask, tokens = Mask(self.mask), sum(self.q_lens)
        counts = [-(-kv_len // self.page_size) for kv_len in self.kv_lens]
        keys = max([1, *counts]) * self.page_size
        queries = Queries.of(self.q_lens, self.kv_lens, mask, keys, inputs.device)
        seen = queries.visible.any(1)
        pool = self.pool(inputs, "cache", num_pages_for(self.kv_lens, self.page_size))
        spare = SPARE_COLUMNS + self.spare_pages
        table, slots = map_pages(pool, counts, seen, spare_columns=spare)
        at = seen.nonzero(as_tuple=True)
        drawn = inputs.integers(-2, 3, len(at[0]), self.row.width).float()
        stored = pool.write(slots[at], drawn, power_of_two=self.power_of_two)
        rows = stored.new_zeros(*seen.shape, self.row.width)
        rows[at] = stored
        q = inputs.place(
            "q", inputs.integers(-2, 3, tokens, self.heads, self.row.width).float(), self.dtype
        )
        weights = inputs.place("weights", inputs.integers(-1, 3, tokens, self.heads).float())
        kv_lens = inputs.place_ints("kv_lens", self.kv_lens)
        starts = inputs.place_ints("q_starts", starts_of(self.q_lens))
        limit = {}
        if self.block_tokens:
            limit["max_score_bytes"] = self.block_tokens * 4 * table.shape[1] * self.page_size
        out = inputs.result("out", (tokens, self.k), torch.int32)

        def call(backend: Backend) -> Results:
            chosen = indexer_select(
                q,
                weights,
                pool.cache,
                table,
                kv_lens,
                self.k,
                q_starts=starts,
                layer=pool.layer_index,
                mask=mask,
                out=poison(out),
                backend=backend,
                **limit,
            )
            return (chosen,)

        def check(results: Results) -> None:
            assert_given("rows", results[0], out)
            logits = q.new_full((tokens, keys), -torch.inf, dtype=torch.float64)
            for token, request in enumerate(queries.request.tolist()):
                dots = (q[token].double() @ rows[request].mT).relu()
                logits[token] = weights[token].double() @ dots
            visible = queries.visible[queries.request, queries.index]
            best = best_columns(logits.masked_fill(~visible, -torch.inf), self.k)
            chosen = slots[queries.request].gather(1, best.clamp_min(0).long())
            expected = torch.where(best >= 0, chosen, -1).int()
            assert_same_bits("rows", results[0], expected)

        return Trial(inputs, repeated(call, self.calls, ("rows",)), check)
