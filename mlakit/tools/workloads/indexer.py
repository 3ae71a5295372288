"""Cases of `indexer_logits` and `indexer_topk`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mlakit.dispatch.knobs import Backend
from mlakit.model.masks import Mask
from mlakit.ops import indexer_logits, indexer_topk
from mlakit.tools.testing import assert_same_bits
from mlakit.tools.workloads.case import (
    BatchedCase,
    Results,
    Trial,
    assert_given,
    assert_logits_match,
)
from mlakit.tools.workloads.fp8_scores import FORMATS as FP8_FORMATS
from mlakit.tools.workloads.fp8_scores import fp8_logits, uses_fp8_logits
from mlakit.tools.workloads.inputs import Inputs
from mlakit.tools.workloads.paged import (
    PagedCase,
    map_tokens,
    num_pages_for,
    seen_tokens,
    spread,
    starts_of,
    used_slots,
    write_tokens,
)


@dataclass(frozen=True, kw_only=True, repr=False)
class IndexerLogitsCase(BatchedCase, PagedCase):
    """One call of `indexer_logits`; a key is a whole row of the cache.

    kv_lens        cached tokens of each request, including its q_lens queries
    spare_columns  columns of the result past the longest kv_len; None: no max_kv_len
    given_results  pass out=
    """

    op = "indexer_logits"

    kv_lens: tuple[int, ...] = (33, 0, 17)
    q_lens: tuple[int, ...] = (1, 1, 2)
    implicit_starts: bool = False
    heads: int = 4
    dtype: str = "bf16"
    mask: str = "causal"
    window: int = 0
    flat_table: bool = False
    spare_columns: int | None = 3
    given_results: bool = False

    def trial(self, device: torch.device | str) -> Trial:
        inputs = self.inputs(device)
        mask, tokens, wide = Mask(self.mask, self.window), sum(self.q_lens), self.wide_indices
        q = inputs.place("q", inputs.queries(tokens, self.heads, self.row.width), self.dtype)
        weights = inputs.place("weights", inputs.normal(tokens, self.heads))
        seen = seen_tokens(mask, self.kv_lens, self.q_lens, inputs.drawn_on)
        pool = self.pool(inputs, "cache", num_pages_for(self.kv_lens, self.page_size))
        table, slots = map_tokens(pool, seen, flat=self.flat_table, wide=wide)
        rows = inputs.normal(sum(self.kv_lens), self.row.width)
        keys = write_tokens(pool, slots, seen, rows, power_of_two=self.power_of_two)
        own = used_slots(slots, seen)
        scales = torch.ones(len(own), dtype=torch.float64, device=inputs.drawn_on)
        if self.format in FP8_FORMATS:
            scales = pool.row_scales(own).to(scales.device)
        key_scales = spread(scales, seen, 1.0)
        kv_lens = inputs.place_ints("kv_lens", self.kv_lens, wide=wide)
        starts = None
        if not self.implicit_starts:
            starts = inputs.place_ints("q_starts", starts_of(self.q_lens), wide=wide)
        columns = None
        if self.spare_columns is not None:
            columns = max(self.kv_lens, default=0) + self.spare_columns
        out = None
        if self.given_results and columns is not None:
            out = inputs.result("out", (tokens, columns), torch.float32)

        is_fp8: list[bool] = []  # the last is that of the results to check

        def call(backend: Backend) -> Results:
            logits = indexer_logits(
                q,
                weights,
                pool.cache,
                table,
                kv_lens,
                q_starts=starts,
                layer=pool.layer_index,
                mask=mask,
                max_kv_len=columns,
                out=out,
                backend=backend,
            )
            is_fp8.append(uses_fp8_logits(q, pool.layer, table, mask, backend))
            return (logits,)

        def check(results: Results) -> None:
            assert_given("logits", results[0], out)
            given = (each.to(inputs.drawn_on) for each in (q, weights, results[0]))
            self._check(tuple(given), keys, key_scales if is_fp8[-1] else None)

        return Trial(inputs, call, check, self.calls, ("logits",))

    def _check(
        self,
        tensors: tuple[Tensor, ...],  # q, weights and the logits of the call
        keys: list[Tensor],
        key_scales: list[Tensor] | None,  # where the kernel multiplies e4m3 by e4m3
    ) -> None:
        q, weights, logits = tensors
        mask = Mask(self.mask, self.window)

        def oracle(dtype: torch.dtype) -> Tensor:
            given = (q, weights, keys, self.q_lens)
            seen = self.reference.indexer_logits(*given, mask=mask, dtype=dtype)
            beyond = logits.shape[1] - seen.shape[1]
            return torch.nn.functional.pad(seen, (0, beyond), value=-torch.inf)

        norms = torch.cat([q.new_zeros(1, dtype=torch.float64), *(r.norm(dim=-1) for r in keys)])
        longest = norms.nan_to_num().amax()
        sizes = (weights.double().abs() * q.double().norm(dim=-1)).sum(-1, keepdim=True)
        exact, naive = oracle(torch.float64), oracle(torch.float32)
        if key_scales is not None:
            naive = self._fp8_logits(q, weights, keys, key_scales, naive)
        assert_logits_match("logits", logits, exact, naive, sizes * longest)

    def _fp8_logits(
        self, q: Tensor, weights: Tensor, keys: list[Tensor], key_scales: list[Tensor], like: Tensor
    ) -> Tensor:
        """`like`, its visible logits with the accumulator precision of FP8 tensor cores."""
        logits, token = like.clone(), 0
        for rows, scales, q_len in zip(keys, key_scales, self.q_lens, strict=True):
            own = slice(token, token + q_len)
            seen = logits[own, : len(rows)]
            computed = fp8_logits(q[own], weights[own], rows, scales).to(like)
            logits[own, : len(rows)] = torch.where(seen == -torch.inf, seen, computed)
            token += q_len
        return logits


@dataclass(frozen=True, kw_only=True, repr=False)
class IndexerTopkCase(BatchedCase):
    """One call of `indexer_topk`.

    with_starts, with_ends  pass row bounds; logits outside are NaN, which would rank first
    levels                  number of distinct finite logits; 0: all distinct
    order                   "", "ascending" or "descending": of the logits of a row
    rare                    share of logits that are 1 where all others are 0
    specials                share of −inf, +inf, NaN, 0 and −0 among the logits
    invisible               share of −inf
    given_results           pass out=
    """

    op = "indexer_topk"

    num_tokens: int = 4
    num_columns: int = 40
    k: int = 8
    with_starts: bool = False
    with_ends: bool = False
    levels: int = 0
    order: str = ""
    rare: float = 0.0
    specials: float = 0.0
    invisible: float = 0.0
    wide_indices: bool = False
    given_results: bool = False

    def trial(self, device: torch.device | str) -> Trial:
        inputs = self.inputs(device)
        logits = self._logits(inputs)
        bounds = {}
        column = torch.arange(self.num_columns, device=inputs.drawn_on)
        for name, asked in (("row_starts", self.with_starts), ("row_ends", self.with_ends)):
            if asked:
                bound = inputs.integers(0, self.num_columns + 1, self.num_tokens)
                outside = (
                    column < bound[:, None] if name == "row_starts" else column >= bound[:, None]
                )
                logits = logits.masked_fill(outside, torch.nan)
                dtype = torch.int64 if self.wide_indices else torch.int32
                bounds[name] = inputs.place(name, bound.to(dtype))
        placed = inputs.place("logits", logits)
        out = None
        if self.given_results:
            out = inputs.result("out", (self.num_tokens, self.k), torch.int32)

        def call(backend: Backend) -> Results:
            return (indexer_topk(placed, self.k, out=out, backend=backend, **bounds),)

        def check(results: Results) -> None:
            assert_given("columns", results[0], out)
            own = {name: bound.to(inputs.drawn_on) for name, bound in bounds.items()}
            expected = self.reference.indexer_topk(logits, self.k, **own)
            assert_same_bits("columns", results[0].to(inputs.drawn_on), expected)

        return Trial(inputs, call, check, self.calls, ("columns",))

    def _logits(self, inputs: Inputs) -> Tensor:
        shape = (self.num_tokens, self.num_columns)
        logits = inputs.normal(*shape)
        if self.levels:
            logits = inputs.integers(0, self.levels, *shape).float() - self.levels / 2
        if self.order:
            logits = logits.sort(dim=1, descending=self.order == "descending").values
        if self.rare:
            logits = inputs.chance(self.rare, *shape).float()
        if self.specials:
            values = [-torch.inf, torch.inf, torch.nan, 0.0, -0.0]
            kinds = torch.tensor(values, dtype=torch.float32, device=inputs.drawn_on)
            special = kinds[inputs.integers(0, len(kinds), *shape)]
            logits = torch.where(inputs.chance(self.specials, *shape), special, logits)
        if self.invisible:
            logits = logits.masked_fill(inputs.chance(self.invisible, *shape), -torch.inf)
        return logits
