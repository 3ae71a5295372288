"""Launches of `mla_decode` with inputs and oracle on the device: thousands per minute.

A `DecodeCase` makes its inputs on the CPU, and its oracle loops over queries. Here the device makes
the inputs, and the oracle computes all queries of a batch at once over rows that are padded to the
longest request. Pages are shuffled, rows that no query sees are poison, and unused table entries
are garbage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlakit.dispatch.knobs import Backend
from mlakit.model.masks import Mask
from mlakit.ops import mla_decode
from mlakit.reference.softmax import attention_weights
from mlakit.tools.testing import assert_matches, poison
from mlakit.tools.workloads.case import Results, Trial, assert_given, assert_logits_match, repeated
from mlakit.tools.workloads.decode import DecodeBatch, Losses
from mlakit.tools.workloads.fp8_scores import fp8_qk_scores
from mlakit.tools.workloads.fp16_rows import rounded_rows
from mlakit.tools.workloads.inputs import Inputs
from mlakit.tools.workloads.paged import SPARE_COLUMNS, Pool, map_pages, num_pages_for, starts_of


@dataclass(frozen=True, eq=False)
class Queries:
    """The request of each query token, its index in the request, and its visible keys."""

    request: Tensor  # int64 [tokens]
    index: Tensor  # int64 [tokens], within the queries of the request
    visible: Tensor  # bool [requests, most queries, keys]

    @staticmethod
    def of(
        q_lens: Sequence[int], kv_lens: Sequence[int], mask: Mask, keys: int, device: torch.device
    ) -> Queries:
        """`keys`: at least the longest kv_len."""
        lengths = list(enumerate(zip(q_lens, kv_lens, strict=True)))
        places = [
            (request, index, kv_len - q_len + index, kv_len)
            for request, (q_len, kv_len) in lengths
            for index in range(q_len)
        ]
        columns = torch.tensor(places, dtype=torch.int64, device=device).view(-1, 4)
        request, index, position, kv_len = columns.unbind(1)
        key = torch.arange(keys, device=device)
        visible = torch.zeros(
            (len(lengths), max(q_lens, default=0), keys), dtype=torch.bool, device=device
        )
        visible[request, index] = mask.visible(position, key) & (key < kv_len[:, None])
        return Queries(request, index, visible)


def attend(
    q: Tensor,  # [tokens, heads, width]
    rows: Tensor,  # [requests, keys, width], finite
    queries: Queries,
    *,
    softmax_scale: float,
    v_width: int,
    sink: Tensor | None,
    products: Tensor | None = None,  # [requests, most queries, heads, keys], see `_fp8_products`
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """The same as `reference.mla_decode`, for all requests at once: (out, lse)."""
    requests, most, keys = queries.visible.shape
    heads = q.shape[1]
    by_request = torch.zeros(requests, most, *q.shape[1:], dtype=dtype, device=q.device)
    by_request[queries.request, queries.index] = q.to(dtype)
    rows = rows.to(dtype)
    if products is None:
        products = (by_request.flatten(1, 2) @ rows.mT).view(requests, most, heads, keys)
    scores = products.to(dtype) * softmax_scale
    scores = scores.masked_fill(~queries.visible[:, :, None], -torch.inf)
    weights, lse = attention_weights(scores, sink)
    out = (weights.flatten(1, 2) @ rows[..., :v_width]).view(requests, most, heads, v_width)
    return out[queries.request, queries.index], lse[queries.request, queries.index]


@dataclass(frozen=True, kw_only=True, repr=False)
class DecodeLaunch(DecodeBatch):
    """A call of `mla_decode`. A negative `sharpness` makes a negative softmax_scale.

    calls        consecutive calls, which must all return the same bits; the last is checked. From
                 the third on a GPU may replay the recorded launch of the second.
    spare_pages  page table columns past the longest request: kernels are selected by the table's
                 capacity
    """

    calls: int = 1
    spare_pages: int = 0
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    page_size: int = 64

    def trial(self, device: torch.device | str) -> Trial:
        inputs = Inputs(device, self.seed, padded=self.padded, draws_there=True)
        mask = Mask(self.mask, self.window)
        counts = [-(-kv_len // self.page_size) for kv_len in self.kv_lens]
        keys = max([1, *counts]) * self.page_size
        queries = Queries.of(self.q_lens, self.kv_lens, mask, keys, inputs.device)
        pool = self.pool(inputs, "cache", num_pages_for(self.kv_lens, self.page_size))
        page_table, rows, row_scales = self._fill(pool, counts, queries.visible.any(1))
        drawn = inputs.queries(sum(self.q_lens), self.heads, self.row.width)
        q = inputs.place("q", drawn, self.dtype)
        q_scale = self.q_scale(inputs)
        exact_q = q.double() if q_scale is None else q.double() * q_scale.double()[:, None, None]
        kv_lens = inputs.place_ints("kv_lens", self.kv_lens)
        starts = inputs.place_ints("q_starts", starts_of(self.q_lens))
        sink = inputs.sink(self.sink, self.heads)
        given = self.results(inputs)

        plan = self.plan(self.kv_lens)
        selected: list[Losses] = []  # the last are those of the results to check

        def call(backend: Backend) -> Results:
            results = mla_decode(
                q,
                pool.cache,
                page_table,
                kv_lens,
                softmax_scale=self.softmax_scale,
                q_scale=q_scale,
                q_starts=starts,
                layer=pool.layer_index,
                mask=mask,
                sink=sink,
                plan=plan,
                out=poison(given["out"]),
                lse=poison(given["lse"]),
                backend=backend,
            )
            rounds = self.rounds_rows(pool, page_table, backend)
            selected.append(Losses(self.uses_fp8_qk(inputs.device, backend), [rounds]))
            return results

        def check(results: Results) -> None:
            for name, result in zip(("out", "lse"), results, strict=True):
                assert_given(name, result, given[name])
            products = None
            if selected[-1].is_fp8_qk:
                products = self._fp8_products(q.double(), q_scale, rows, row_scales, queries)
            rounded = rows
            if selected[-1].rounds_rows[0]:
                rounded = rounded_rows(rows, row_scales)
            self._check(exact_q, rows, rounded, queries, sink, results, products)

        return Trial(inputs, repeated(call, self.calls, ("out", "lse")), check)

    def _fill(
        self, pool: Pool, counts: Sequence[int], seen: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(page table, rows, row_scales): rows float64 [requests, keys, width] as stored.

        Rows that no query sees are 0, and their scales 1.
        """
        spare_columns = SPARE_COLUMNS + self.spare_pages
        page_table, slots = map_pages(pool, counts, seen, spare_columns=spare_columns)
        at = seen.nonzero(as_tuple=True)
        values = pool.inputs.normal(len(at[0]), self.row.width)
        stored = pool.write(slots[at], values, power_of_two=self.power_of_two)
        rows = stored.new_zeros(*seen.shape, self.row.width)
        rows[at] = stored
        scales = self.row_scales(pool, slots[at])
        row_scales = stored.new_ones(*seen.shape, *(() if scales is None else scales.shape[1:]))
        if scales is not None:
            row_scales[at] = scales.to(row_scales.device)
        return page_table, rows, row_scales

    def _fp8_products(
        self, q: Tensor, q_scale: Tensor | None, rows: Tensor, row_scales: Tensor, queries: Queries
    ) -> Tensor:
        """Products of queries and rows, [requests, most queries, heads, keys]."""
        requests, most, keys = queries.visible.shape
        products = torch.zeros(
            requests, most, self.heads, keys, dtype=torch.float32, device=q.device
        )
        for token, (request, index) in enumerate(
            zip(queries.request.tolist(), queries.index.tolist(), strict=True)
        ):
            sums = fp8_qk_scores(
                q[token], rows[request], row_scales[request], self.row, self.format
            )
            products[request, index] = sums if q_scale is None else sums * q_scale[token]
        return products

    def _check(
        self,
        exact_q: Tensor,
        rows: Tensor,
        rounded: Tensor,
        queries: Queries,
        sink: Tensor | None,
        results: Results,
        products: Tensor | None,
    ) -> None:
        """rounded  the rows of the naive run"""
        exact, naive = (
            attend(
                exact_q,
                of_rows,
                queries,
                softmax_scale=self.softmax_scale,
                v_width=self.row.v_width,
                sink=sink,
                products=products if dtype == torch.float32 else None,
                dtype=dtype,
            )
            for of_rows, dtype in ((rows, torch.float64), (rounded, torch.float32))
        )
        out, lse = results
        assert_matches("out", out, exact[0], naive[0])
        largest = exact_q.norm(dim=-1) * rows.norm(dim=-1).amax() * abs(self.softmax_scale)
        assert_logits_match("lse", lse, exact[1], naive[1], largest)
