"""Cases of `sparse_mla`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from mlakit.dispatch.knobs import Backend
from mlakit.formats import Format
from mlakit.ops import ExtraRows, sparse_mla
from mlakit.plan import EvenSplit
from mlakit.tools.testing import NEVER_A_PAGE, assert_matches
from mlakit.tools.workloads.absorbed import AbsorbedCase
from mlakit.tools.workloads.case import (
    Results,
    Trial,
    assert_given,
    assert_logits_match,
    weights_dtype,
)
from mlakit.tools.workloads.fp16_rows import block_scales, rounded_rows, row_bits
from mlakit.tools.workloads.inputs import Inputs
from mlakit.tools.workloads.paged import Pool

NAMES = ("out", "lse", "max_logits")


@dataclass(frozen=True, eq=False)
class Lists:
    """One cache of a call and the listed rows; half of its rows are poison."""

    pool: Pool
    stored: Tensor  # [num_slots, width] float64, NaN where poison
    rows: Tensor  # [tokens, topk]
    lens: Tensor | None

    @property
    def of_oracle(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The arguments of the oracle."""
        where = self.stored.device
        return self.stored, self.rows.to(where), None if self.lens is None else self.lens.to(where)

    def rounded(self, bits: int) -> Lists:
        """With the stored rows as `fp16_rows` says."""
        slots = torch.arange(len(self.stored), device="cpu")
        scales = block_scales(self.pool.payload(slots)).to(self.stored.device)
        return replace(self, stored=rounded_rows(self.stored, scales, bits=bits))


@dataclass(frozen=True, kw_only=True, repr=False)
class SparseCase(AbsorbedCase):
    """One call of `sparse_mla`. Lists have repeated, invalid and, past their length, poisoned rows.

    topk           entries of a list; `with_lens` bounds each, `extra_with_lens` those of the extra
    extra_format   of a second cache, "" for none, with pages of extra_page_size
    num_splits     an EvenSplit
    """

    op = "sparse_mla"

    num_pages: int = 4
    num_tokens: int = 5
    topk: int = 12
    with_lens: bool = True
    extra_format: Format | Literal[""] = ""
    extra_page_size: int = 4
    extra_topk: int = 7
    extra_with_lens: bool = True
    num_splits: int = 0

    def trial(self, device: torch.device | str) -> Trial:
        inputs = self.inputs(device)
        query = self.query(inputs, self.num_tokens)
        main = self._lists(inputs, "cache", self.format, self.page_size, self.topk, self.with_lens)
        extra = None
        if self.extra_format:
            sizes = (self.extra_page_size, self.extra_topk, self.extra_with_lens)
            extra = self._lists(inputs, "extra", self.extra_format, *sizes)
        sink = inputs.sink(self.sink, self.heads)
        given = self.results(inputs, self.num_tokens, *NAMES[1:])

        bits: list[int] = []  # the last is that of the results to check

        def call(backend: Backend) -> Results:
            second = None
            if extra is not None:
                pool = extra.pool
                second = ExtraRows(pool.cache, extra.rows, extra.lens, pool.layer_index)
            results = sparse_mla(
                cache=main.pool.cache,
                rows=main.rows,
                softmax_scale=self.softmax_scale,
                topk_lens=main.lens,
                sink=sink,
                extra=second,
                layer=main.pool.layer_index,
                plan=EvenSplit(self.num_splits) if self.num_splits else None,
                backend=backend,
                **query.arguments,
                **given,
            )
            format, heads = self.format, self.heads
            bits.append(row_bits(inputs.device, backend, format=format, heads=heads))
            return results

        def check(results: Results) -> None:
            for name, result in zip(NAMES, results, strict=True):
                assert_given(name, result, given.get(name))
            own = None if sink is None else sink.to(inputs.drawn_on)
            self._check(query.exact, main, extra, own, results, bits=bits[-1])

        return Trial(inputs, call, check, self.calls, NAMES)

    def _lists(
        self, inputs: Inputs, name: str, format: Format, page_size: int, topk: int, with_lens: bool
    ) -> Lists:
        pool = self.pool(inputs, name, self.num_pages, format=format, page_size=page_size)
        num_slots, where = pool.layer.num_slots, inputs.drawn_on
        shuffled = torch.randperm(num_slots, generator=inputs.generator, device=where)
        live, dead = shuffled[: -(-num_slots // 2)], shuffled[num_slots // 2 :]
        stored = torch.full(
            (num_slots, self.row.width), torch.nan, dtype=torch.float64, device=where
        )
        values = inputs.normal(len(live), self.row.width)
        stored[live] = pool.write(live, values, power_of_two=self.power_of_two)

        shape = (self.num_tokens, topk)
        rows = live[inputs.integers(0, len(live), *shape)]
        invalid = [-1, -2, -num_slots, num_slots, num_slots + 5, NEVER_A_PAGE]
        rows = torch.where(inputs.chance(0.2, *shape), inputs.any_of(invalid, *shape), rows)
        lens = None
        if with_lens:
            lens = inputs.integers(0, topk + 1, self.num_tokens)
            past = torch.arange(topk, device=where) >= lens[:, None]
            poisoned = inputs.any_of(dead.tolist(), *shape)
            rows = torch.where(past & inputs.chance(0.7, *shape), poisoned, rows)
        dtype = torch.int64 if self.wide_indices else torch.int32
        return Lists(
            pool,
            stored,
            inputs.place(f"{name} rows", rows.to(dtype)),
            None if lens is None else inputs.place(f"{name} topk_lens", lens.to(dtype)),
        )

    def _check(
        self,
        q: Tensor,
        main: Lists,
        extra: Lists | None,
        sink: Tensor | None,
        results: Results,
        *,
        bits: int,
    ) -> None:
        """bits  `fp16_rows.row_bits`"""

        def oracle(dtype: torch.dtype) -> Results:
            lists = [main] if extra is None else [main, extra]
            if bits and dtype != torch.float64:
                lists = [each.rounded(bits) for each in lists]
            pool, rows, lens = lists[0].of_oracle
            computed: Results = self.reference.sparse_mla(
                q,
                pool,
                rows,
                softmax_scale=self.softmax_scale,
                v_width=self.row.v_width,
                topk_lens=lens,
                sink=sink,
                extra=None if extra is None else lists[1].of_oracle,
                weights_dtype=weights_dtype(results[0], dtype),
                dtype=dtype,
            )
            return computed

        exact, naive = oracle(torch.float64), oracle(torch.float32)
        assert_matches("out", results[0].to(q.device), exact[0], naive[0])
        pools = [main.stored] if extra is None else [main.stored, extra.stored]
        longest = torch.cat(pools).norm(dim=-1).nan_to_num().amax()
        largest = q.double().norm(dim=-1) * longest * abs(self.softmax_scale)
        for i in (1, 2):
            assert_logits_match(NAMES[i], results[i], exact[i], naive[i], largest)
