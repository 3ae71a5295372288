"""Cases of `indexer_select`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mlakit.dispatch.knobs import Backend
from mlakit.model.masks import Mask
from mlakit.ops import indexer_select
from mlakit.tools.testing import assert_same_bits
from mlakit.tools.workloads.case import BatchedCase, Results, Trial, assert_given
from mlakit.tools.workloads.paged import (
    SPARE_COLUMNS,
    PagedCase,
    map_tokens,
    num_pages_for,
    seen_tokens,
    starts_of,
    write_tokens,
)


@dataclass(frozen=True, kw_only=True, repr=False)
class IndexerSelectCase(BatchedCase, PagedCase):
    """One call of `indexer_select`; a key is a whole row of the cache.

    All numbers are small integers and scales powers of two: every score is exact, many are equal,
    and the result has to be that of the oracle bit for bit.

    kv_lens        cached tokens of each request, including its q_lens queries
    spare_pages    page table columns past the longest request
    spare_columns  max_kv_len less the longest kv_len; None: no max_kv_len
    block_tokens   queries whose scores fit max_score_bytes; 0: no max_score_bytes
    specials       share of the queries of which one head is NaN, +inf or −inf
    init_tokens, local_tokens   first and last keys that are always selected
    given_results  pass out=
    """

    op = "indexer_select"

    kv_lens: tuple[int, ...] = (33, 0, 17)
    q_lens: tuple[int, ...] = (1, 1, 2)
    implicit_starts: bool = False
    heads: int = 4
    k: int = 8
    dtype: str = "bf16"
    mask: str = "causal"
    window: int = 0
    flat_table: bool = False
    spare_pages: int = 0
    spare_columns: int | None = 3
    block_tokens: int = 0
    specials: float = 0.0
    init_tokens: int = 0
    local_tokens: int = 0
    given_results: bool = False

    def trial(self, device: torch.device | str) -> Trial:
        inputs = self.inputs(device)
        mask, tokens, wide = Mask(self.mask, self.window), sum(self.q_lens), self.wide_indices
        drawn = inputs.integers(-2, 3, tokens, self.heads, self.row.width).float()
        if self.specials and tokens:
            values = [torch.nan, torch.inf, -torch.inf]
            kinds = torch.tensor(values, dtype=torch.float32, device=inputs.drawn_on)
            special = kinds[inputs.integers(0, len(kinds), tokens)]
            head = inputs.integers(0, self.heads, tokens)
            hit = inputs.chance(self.specials, tokens).nonzero().flatten()
            drawn[hit, head[hit], 0] = special[hit]
        q = inputs.place("q", drawn, self.dtype)
        weights = inputs.place("weights", inputs.integers(-1, 3, tokens, self.heads).float())
        seen = seen_tokens(mask, self.kv_lens, self.q_lens, inputs.drawn_on)
        pool = self.pool(inputs, "cache", num_pages_for(self.kv_lens, self.page_size))
        spare = SPARE_COLUMNS + self.spare_pages
        table, slots = map_tokens(pool, seen, flat=self.flat_table, wide=wide, spare_columns=spare)
        rows = inputs.integers(-2, 3, sum(self.kv_lens), self.row.width).float()
        keys = write_tokens(pool, slots, seen, rows, power_of_two=True)
        kv_lens = inputs.place_ints("kv_lens", self.kv_lens, wide=wide)
        starts = None
        if not self.implicit_starts:
            starts = inputs.place_ints("q_starts", starts_of(self.q_lens), wide=wide)
        options: dict[str, int] = {}
        columns = max(self.kv_lens, default=0)
        if self.spare_columns is not None:
            columns += self.spare_columns
            options["max_kv_len"] = columns
        else:
            last = table[1] if isinstance(table, tuple) else table
            columns = last.shape[-1] * (1 if self.flat_table else self.page_size)
        if self.block_tokens:
            options["max_score_bytes"] = max(self.block_tokens * 4 * (-(-columns // 4) * 4), 1)
        always = {"init_tokens": self.init_tokens, "local_tokens": self.local_tokens}
        out = None
        if self.given_results:
            out = inputs.result("out", (tokens, self.k), torch.int32)

        def call(backend: Backend) -> Results:
            rows = indexer_select(
                q,
                weights,
                pool.cache,
                table,
                kv_lens,
                self.k,
                q_starts=starts,
                layer=pool.layer_index,
                mask=mask,
                out=out,
                backend=backend,
                **always,
                **options,
            )
            return (rows,)

        def check(results: Results) -> None:
            assert_given("rows", results[0], out)
            own = [each.to(inputs.drawn_on) for each in (q, weights)]
            expected = self.reference.indexer_select(
                *own, keys, slots, self.q_lens, self.k, mask=mask, **always
            )
            assert_same_bits("rows", results[0].to(inputs.drawn_on), expected)

        return Trial(inputs, call, check, self.calls, ("rows",))
