"""Cases of `indexer_logits` and `indexer_topk`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mlakit import reference
from mlakit.dispatch.knobs import Backend
from mlakit.model.masks import Mask
from mlakit.ops import indexer_logits, indexer_topk
from mlakit.tools.testing import assert_same_bits
from mlakit.tools.workloads.case import Case, Results, Trial, assert_given, assert_logits_match
from mlakit.tools.workloads.fp8_scores import FORMATS as FP8_FORMATS
from mlakit.tools.workloads.fp8_scores import fp8_logits, uses_fp8_logits
from mlakit.tools.workloads.inputs import Inputs
from mlakit.tools.workloads.paged import (
    PagedCase,
    map_tokens,
    num_pages_for,
    seen_tokens,
    starts_of,
)


@dataclass(frozen=True, kw_only=True, repr=False)
class IndexerLogitsCase(PagedCase):
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
        inputs = Inputs(device, self.seed, padded=self.padded)
        mask, tokens, wide = Mask(self.mask, self.window), sum(self.q_lens), self.wide_indices
        q = inputs.place("q", inputs.queries(tokens, self.heads, self.row.width), self.dtype)
        weights = inputs.place("weights", inputs.normal(tokens, self.heads))
        seen = [seen_tokens(mask, *each) for each in zip(self.kv_lens, self.q_lens, strict=True)]
        pool = self.pool(inputs, "cache", num_pages_for(self.kv_lens, self.page_size))
        table, slots = map_tokens(pool, seen, flat=self.flat_table, wide=wide)
        keys, key_scales = [], []
        for own, used in zip(slots, seen, strict=True):
            stored = torch.full(
                (len(used), self.row.width), torch.nan, dtype=torch.float64, device="cpu"
            )
            rows = inputs.normal(int(used.sum()), self.row.width)
            stored[used] = pool.write(own[used], rows, power_of_two=self.power_of_two)
            keys.append(stored)
            key_scales.append(torch.ones(len(used), dtype=torch.float64, device="cpu"))
            if self.format in FP8_FORMATS:
                key_scales[-1][used] = pool.row_scales(own[used]).cpu()
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
            given = (q.cpu(), weights.cpu(), keys, results[0].cpu())
            self._check(*given, key_scales=key_scales if is_fp8[-1] else None)

        return Trial(inputs, call, check)

    def _check(
        self,
        q: Tensor,
        weights: Tensor,
        keys: list[Tensor],
        logits: Tensor,
        *,
        key_scales: list[Tensor] | None,  # where the kernel multiplies e4m3 by e4m3
    ) -> None:
        mask = Mask(self.mask, self.window)

        def oracle(dtype: torch.dtype) -> Tensor:
            seen = reference.indexer_logits(q, weights, keys, self.q_lens, mask=mask, dtype=dtype)
            beyond = logits.shape[1] - seen.shape[1]
            return torch.nn.functional.pad(seen, (0, beyond), value=-torch.inf)

        longest = max([0.0, *(float(row.norm()) for part in keys for row in part.nan_to_num())])
        sizes = (weights.double().abs() * q.double().norm(dim=-1)).sum(-1, keepdim=True)
        exact, naive = oracle(torch.float64), oracle(torch.float32)
        if key_scales is not None:
            naive = self._fp8_logits(q, weights, keys, key_scales, naive)
        assert_logits_match("logits", logits, exact, naive, sizes * longest)

    def _fp8_logits(
        self, q: Tensor, weights: Tensor, keys: list[Tensor], key_scales: list[Tensor], like: Tensor
    ) -> Tensor:
        """`like`, its finite logits with the accumulator precision of FP8 tensor cores."""
        mask, logits, token = Mask(self.mask, self.window), like.clone(), 0
        for rows, scales, q_len in zip(keys, key_scales, self.q_lens, strict=True):
            for position in range(len(rows) - q_len, len(rows)):
                seen = slice(*mask.interval(position, len(rows)))
                own = (q[token], weights[token])
                logits[token, seen] = fp8_logits(*own, rows[seen], scales[seen])
                token += 1
        return logits


@dataclass(frozen=True, kw_only=True, repr=False)
class IndexerTopkCase(Case):
    """One call of `indexer_topk`.

    with_starts, with_ends  pass row bounds; logits outside are NaN, which would rank first
    levels                  number of distinct finite logits; 0: all distinct
    specials                share of −inf, +inf, NaN, 0 and −0 among the logits
    given_results           pass out=
    """

    op = "indexer_topk"

    num_tokens: int = 4
    num_columns: int = 40
    k: int = 8
    with_starts: bool = False
    with_ends: bool = False
    levels: int = 0
    specials: float = 0.0
    wide_indices: bool = False
    given_results: bool = False

    def trial(self, device: torch.device | str) -> Trial:
        inputs = Inputs(device, self.seed, padded=self.padded)
        shape = (self.num_tokens, self.num_columns)
        logits = inputs.normal(*shape)
        if self.levels:
            logits = inputs.integers(0, self.levels, *shape).float() - self.levels / 2
        kinds = torch.tensor(
            [-torch.inf, torch.inf, torch.nan, 0.0, -0.0], dtype=torch.float32, device="cpu"
        )
        special = kinds[inputs.integers(0, len(kinds), *shape)]
        logits = torch.where(inputs.chance(self.specials, *shape), special, logits)
        bounds = {}
        column = torch.arange(self.num_columns, device="cpu")
        for name, asked in (("row_starts", self.with_starts), ("row_ends", self.with_ends)):
            if asked:
                bound = inputs.integers(0, self.num_columns + 1, self.num_tokens)
                outside = (
                    column < bound[:, None] if name == "row_starts" else column >= bound[:, None]
                )
                logits = logits.masked_fill(outside, torch.nan)
                bounds[name] = inputs.place_ints(name, bound.tolist(), wide=self.wide_indices)
        placed = inputs.place("logits", logits)
        out = None
        if self.given_results:
            out = inputs.result("out", (self.num_tokens, self.k), torch.int32)

        def call(backend: Backend) -> Results:
            return (indexer_topk(placed, self.k, out=out, backend=backend, **bounds),)

        def check(results: Results) -> None:
            assert_given("columns", results[0], out)
            on_cpu = {name: bound.cpu() for name, bound in bounds.items()}
            expected = reference.indexer_topk(logits, self.k, **on_cpu)
            assert_same_bits("columns", results[0].cpu(), expected)

        return Trial(inputs, call, check)
