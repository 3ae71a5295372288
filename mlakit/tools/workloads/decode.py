"""Cases of `mla_decode`, whole and context parallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mlakit import reference
from mlakit.cache import UNSHARDED, PageTable, select_requests
from mlakit.dispatch import selection
from mlakit.dispatch.knobs import Backend
from mlakit.kernels.arguments import DecodePlanArguments
from mlakit.model.masks import Mask
from mlakit.ops import merge_states, mla_decode
from mlakit.ops.decode import decode_problem
from mlakit.plan import DecodePlan, EvenSplit, plan_decode
from mlakit.tools.testing import assert_matches, assert_same_bits
from mlakit.tools.workloads import fp16_rows
from mlakit.tools.workloads.absorbed import AbsorbedCase, Query
from mlakit.tools.workloads.case import (
    Results,
    Trial,
    assert_given,
    assert_logits_match,
    weights_dtype,
)
from mlakit.tools.workloads.fp8_scores import FORMATS as FP8_QK_FORMATS
from mlakit.tools.workloads.fp8_scores import fp8_qk_scores, uses_fp8_qk
from mlakit.tools.workloads.inputs import DTYPES, Inputs
from mlakit.tools.workloads.paged import (
    SPARE_COLUMNS,
    Pool,
    map_tokens,
    num_pages_for,
    seen_tokens,
    spread,
    starts_of,
    used_slots,
    write_tokens,
)

NOT_ASKED = torch.empty(0, dtype=torch.int32, device="cpu")  # lengths decide nothing in dispatch
Products: TypeAlias = Callable[[int, int, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Rank:
    """The cache of one rank of a context-parallel group; a single rank holds everything."""

    pool: Pool
    page_table: PageTable
    positions: list[Tensor]  # per request, of the tokens cached here
    rows: list[Tensor]  # per request [tokens, width] float64 as stored, NaN where never seen
    row_scales: list[Tensor]  # per request, 1 where never seen: see `DecodeCase.row_scales`
    plan: DecodePlan | EvenSplit | None
    given: dict[str, Tensor]  # results to write to


@dataclass(frozen=True)
class Losses:
    """The precision that the selected kernel gives up; its naive run gives up the same."""

    is_fp8_qk: bool  # see `DecodeCase.uses_fp8_qk`
    row_bits: list[int]  # per rank, see `DecodeCase.row_bits`


@dataclass(frozen=True, kw_only=True, repr=False)
class DecodeCase(AbsorbedCase):
    """One call of `mla_decode`; with `world` > 1 one per rank, and the merge of their results.

    kv_lens        cached tokens of each request, including its q_lens queries
    spare_pages    page table columns past the longest request: kernels are selected by the table's
                   capacity
    num_splits     an EvenSplit; num_ctas, tile and fixed_split are arguments of `plan_decode`
    deterministic  then, as with fixed_split, a request alone gives the same bits
    """

    op = "mla_decode"

    kv_lens: tuple[int, ...] = (33, 0, 17)
    q_lens: tuple[int, ...] = (1, 1, 1)
    implicit_starts: bool = False
    mask: str = "causal"
    window: int = 0
    flat_table: bool = False
    spare_pages: int = 0
    world: int = 1
    interleave: int = 1
    num_splits: int = 0
    num_ctas: int = 0
    tile: int = 16
    fixed_split: int = 0
    deterministic: bool = False

    def plan(self, counts: Sequence[int]) -> DecodePlan | EvenSplit | None:
        """A plan for requests with so many cached tokens."""
        if self.num_splits:
            return EvenSplit(self.num_splits)
        if self.num_ctas:
            split = self.fixed_split or None
            return plan_decode(counts, num_ctas=self.num_ctas, tile=self.tile, fixed_split=split)
        return None

    def uses_fp8_qk(self, device: torch.device, backend: str) -> bool:
        """Whether this call may use the kernel `m64_fp8_qk`."""
        return uses_fp8_qk(
            device, backend, format=self.format, q_dtype=self.dtype, heads=self.heads
        )

    def row_bits(self, pool: Pool, page_table: PageTable, backend: str) -> int:
        """The bits that this call may round products of values and scales to; else 0.

        With little work another kernel is chosen, which does not, unless its choice must not depend
        on the batch.
        """
        bits = fp16_rows.row_bits(
            pool.layer.payload.device, backend, format=self.format, heads=self.heads
        )
        if bits != fp16_rows.BITS:
            return bits
        problem = decode_problem(
            DecodePlanArguments(
                layer=pool.layer,
                page_table=page_table,
                kv_lens=NOT_ASKED,
                q_starts=NOT_ASKED,
                shard=UNSHARDED,
                mask=Mask(self.mask, self.window),
                heads=self.heads,
                num_tokens=sum(self.q_lens),
                dtype=DTYPES[self.dtype],
            ),
            is_batch_invariant=self.is_batch_invariant,
        )
        selected = selection.select(self.op, problem, backend).name
        return bits if selected in fp16_rows.KERNELS else 0

    @property
    def is_batch_invariant(self) -> bool:
        """Whether the kernel is chosen whatever the work in the batch."""
        return bool(self.num_splits or self.num_ctas or self.deterministic)

    def row_scales(self, pool: Pool, slots: Tensor) -> Tensor:
        """The scales of rows that the naive run of a kernel needs: float64 [n], [n, groups] where
        rows hold them; 1 for other formats."""
        if self.format in FP8_QK_FORMATS:
            return pool.row_scales(slots)
        if self.row == fp16_rows.ROW and fp16_rows.holds_scales(self.format):
            return fp16_rows.block_scales(pool.payload(slots))
        return torch.ones(len(slots), dtype=torch.float64, device=slots.device)

    def trial(self, device: torch.device | str) -> Trial:
        inputs = self.inputs(device)
        query = self._query(inputs)
        whole = inputs.normal(sum(self.kv_lens), self.row.width).split(list(self.kv_lens))
        ranks = [self._rank(inputs, rank, whole) for rank in range(self.world)]
        kv_lens = inputs.place_ints("kv_lens", self.kv_lens, wide=self.wide_indices)
        selected: list[Losses] = []  # the last are those of the results to check

        def call(backend: Backend) -> Results:
            sink = query.sink if self.world == 1 else None
            results = [
                self._attend(query.arguments, kv_lens, rank, index, sink, backend)
                for index, rank in enumerate(ranks)
            ]
            if self.world > 1:
                outs, lses = zip(*results, strict=True)
                results.append(merge_states(outs, lses, sink=query.sink))
            if self._is_independent:
                results.append(self._attend_alone(query, kv_lens, ranks[0], sink, backend))
            selected.append(self._losses(ranks, inputs.device, backend))
            return tuple(result for pair in results for result in pair)

        def check(results: Results) -> None:
            self._check(query, ranks, results, selected[-1])

        return Trial(inputs, call, check, self.calls, ("out", "lse"))

    def _query(self, inputs: Inputs) -> Query:
        query = self.query(inputs, sum(self.q_lens))
        starts = None
        if not self.implicit_starts:
            starts = inputs.place_ints("q_starts", starts_of(self.q_lens), wide=self.wide_indices)
        arguments = {"q_starts": starts, **query.arguments}
        return replace(query, arguments=arguments, sink=inputs.sink(self.sink, self.heads))

    def _rank(self, inputs: Inputs, rank: int, whole: Sequence[Tensor]) -> Rank:
        mask = Mask(self.mask, self.window)
        positions, seen = [], []
        for tokens in seen_tokens(mask, self.kv_lens, self.q_lens, inputs.drawn_on):
            position = torch.arange(len(tokens), device=inputs.drawn_on)
            position = position[position // self.interleave % self.world == rank]
            positions.append(position)
            seen.append(tokens[position])
        counts = [len(position) for position in positions]
        name = f"cache of rank {rank}"
        pool = self.pool(inputs, name, num_pages_for(counts, self.page_size))
        table, slots = map_tokens(
            pool,
            seen,
            flat=self.flat_table,
            wide=self.wide_indices,
            spare_columns=SPARE_COLUMNS + self.spare_pages,
        )
        parts = [rows[position] for rows, position in zip(whole, positions, strict=True)]
        drawn = torch.cat([inputs.normal(0, self.row.width), *parts])
        stored = write_tokens(pool, slots, seen, drawn, power_of_two=self.power_of_two)
        scales = self.row_scales(pool, used_slots(slots, seen)).to(inputs.drawn_on)
        row_scales = spread(scales, seen, 1.0)
        given = self.results(inputs, sum(self.q_lens), "lse", of=f" of rank {rank}")
        return Rank(pool, table, positions, stored, row_scales, self.plan(counts), given)

    def _attend(
        self,
        query: dict[str, Any],
        kv_lens: Tensor,
        rank: Rank,
        index: int,
        sink: Tensor | None,
        backend: Backend,
    ) -> tuple[Tensor, Tensor]:
        return mla_decode(
            query["q"],
            rank.pool.cache,
            rank.page_table,
            kv_lens,
            softmax_scale=self.softmax_scale,
            layer=rank.pool.layer_index,
            mask=Mask(self.mask, self.window),
            sink=sink,
            kv_shard=(index, self.world, self.interleave) if self.world > 1 else None,
            plan=rank.plan,
            deterministic=self.deterministic,
            backend=backend,
            **{name: value for name, value in query.items() if name != "q"},
            **rank.given,
        )

    @property
    def _is_independent(self) -> bool:
        """Whether a request's result is independent of the rest of the batch."""
        fixed = bool(self.fixed_split) or (self.deterministic and not self.num_ctas)
        return fixed and len(self.kv_lens) > 0

    @property
    def _alone(self) -> tuple[int, slice]:
        """The request that is also run alone, and its query tokens."""
        request = self.seed % len(self.kv_lens)
        ends = list(accumulate(self.q_lens))
        return request, slice(ends[request] - self.q_lens[request], ends[request])

    def _attend_alone(
        self, query: Query, kv_lens: Tensor, rank: Rank, sink: Tensor | None, backend: Backend
    ) -> tuple[Tensor, Tensor]:
        request, tokens = self._alone
        arguments = {
            name: value[tokens] for name, value in query.arguments.items() if name != "q_starts"
        }
        arguments["q_starts"] = None
        if query.arguments["q_starts"] is not None:
            lengths = [0, tokens.stop - tokens.start]
            arguments["q_starts"] = torch.tensor(lengths, dtype=torch.int32, device=kv_lens.device)
        counts = [len(rank.positions[request])]
        table = select_requests(rank.page_table, [request])
        single = Rank(rank.pool, table, [], [], [], self.plan(counts), {})
        lens = kv_lens[request : request + 1]
        return self._attend(arguments, lens, single, 0, sink, backend)

    def _losses(self, ranks: Sequence[Rank], device: torch.device, backend: str) -> Losses:
        return Losses(
            self.uses_fp8_qk(device, backend),
            [self.row_bits(rank.pool, rank.page_table, backend) for rank in ranks],
        )

    def _check(
        self,
        query: Query,
        ranks: Sequence[Rank],
        results: Results,
        losses: Losses,
    ) -> None:
        pairs = list(zip(results[::2], results[1::2], strict=True))
        if self._is_independent:
            _, tokens = self._alone
            for name, alone, batched in zip(("out", "lse"), pairs.pop(), pairs[0], strict=True):
                assert_same_bits(f"{name} of a request alone", alone, batched[tokens])
        exact = [
            self._check_rank(
                f" of rank {index}" if self.world > 1 else "",
                query,
                rank,
                pair,
                is_fp8_qk=losses.is_fp8_qk,
                row_bits=losses.row_bits[index],
            )
            for index, (rank, pair) in enumerate(zip(ranks, pairs, strict=False))
        ]
        if self.world > 1:
            self._check_merged(query, ranks, exact, pairs)

    def _check_rank(
        self,
        label: str,
        query: Query,
        rank: Rank,
        results: tuple[Tensor, Tensor],
        *,
        is_fp8_qk: bool,
        row_bits: int,
    ) -> tuple[Tensor, Tensor]:
        """Check the results of a rank; returns its exact results."""
        sink = query.sink if self.world == 1 else None
        exact = self._oracle(query, rank.rows, rank.positions, sink, torch.float64)
        products = self._fp8_products(query, rank) if is_fp8_qk else None
        weights = weights_dtype(results[0], torch.float32)
        rows = rank.rows
        if row_bits:
            parts = 1 if is_fp8_qk else 2
            rows = [
                fp16_rows.rounded_rows(each, scales, parts, row_bits)
                for each, scales in zip(rows, rank.row_scales, strict=True)
            ]
        naive = self._oracle(query, rows, rank.positions, sink, torch.float32, products, weights)
        for name, result in zip(("out", "lse"), results, strict=True):
            assert_given(f"{name}{label}", result, rank.given.get(name))
        out, lse = results
        assert_matches(f"out{label}", out.to(exact[0].device), exact[0], naive[0])
        assert_logits_match(
            f"lse{label}", lse, exact[1], naive[1], self._largest_score(query, rank.rows)
        )
        return exact

    def _check_merged(
        self,
        query: Query,
        ranks: Sequence[Rank],
        exact: Sequence[tuple[Tensor, Tensor]],
        results: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        """Check the merge of all ranks.

        The partial results are checked per rank. Here the merge is compared with the oracle's merge
        of the same parts, and the exact parts must merge to attention over all keys.
        """
        positions = [torch.cat(each) for each in zip(*(r.positions for r in ranks), strict=True)]
        rows = [torch.cat(each) for each in zip(*(r.rows for r in ranks), strict=True)]
        device = query.exact.device
        sink = None if query.sink is None else query.sink.to(device)
        whole = self._oracle(query, rows, positions, query.sink, torch.float64)
        together = reference.merge_states(*_stacked(exact), sink=sink)
        torch.testing.assert_close(together, whole, rtol=1e-9, atol=1e-9, equal_nan=True)

        *parts, (out, lse) = results
        given = tuple(each.to(device) for each in _stacked(parts))
        want = reference.merge_states(*given, sink=sink)
        naive = reference.merge_states(*given, sink=sink, dtype=torch.float32)
        assert_matches("merged out", out.to(device), want[0], naive[0])
        assert_logits_match("merged lse", lse, want[1], naive[1], self._largest_score(query, rows))

    def _oracle(
        self,
        query: Query,
        rows: Sequence[Tensor],
        positions: Sequence[Tensor],
        sink: Tensor | None,
        dtype: torch.dtype,
        products: Products | None = None,
        weights: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        queries = [
            torch.arange(kv_len - q_len, kv_len, device=query.exact.device)
            for kv_len, q_len in zip(self.kv_lens, self.q_lens, strict=True)
        ]
        results: tuple[Tensor, Tensor] = self.reference.mla_decode(
            query.exact,
            rows,
            self.q_lens,
            softmax_scale=self.softmax_scale,
            v_width=self.row.v_width,
            mask=Mask(self.mask, self.window),
            sink=None if sink is None else sink.to(query.exact.device),
            key_positions=positions,
            query_positions=queries,
            products=products,
            weights_dtype=weights,
            dtype=dtype,
        )
        return results

    def _fp8_products(self, query: Query, rank: Rank) -> Products:
        q_scale = query.arguments.get("q_scale")

        def products(token: int, request: int, seen: Tensor) -> Tensor:
            sums = fp8_qk_scores(
                query.stored[token],
                rank.rows[request][seen],
                rank.row_scales[request][seen],
                self.row,
                self.format,
            )
            return sums if q_scale is None else sums * q_scale[token].item()

        return products

    def _largest_score(self, query: Query, rows: Sequence[Tensor]) -> Tensor:
        """|q| · max |row| · softmax_scale, [tokens, heads]."""
        sizes = [part.norm(dim=-1).nan_to_num().amax() for part in rows if len(part)]
        largest = torch.stack([query.exact.new_zeros(()), *sizes]).amax()
        size: Tensor = query.exact.norm(dim=-1)
        return size * largest * abs(self.softmax_scale)


def _stacked(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    """All outs, and all lses."""
    return tuple(torch.stack(each) for each in zip(*parts, strict=True))
