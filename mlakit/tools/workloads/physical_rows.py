"""Cases of `physical_rows`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mlakit import reference
from mlakit.cache import PageTable
from mlakit.dispatch.knobs import Backend
from mlakit.ops import physical_rows
from mlakit.tools.testing import NEVER_A_PAGE, assert_same_bits
from mlakit.tools.workloads.case import Case, Results, Trial, assert_given
from mlakit.tools.workloads.inputs import Inputs
from mlakit.tools.workloads.paged import starts_of

LARGEST = 2**31 - 1


@dataclass(frozen=True, kw_only=True, repr=False)
class PhysicalRowsCase(Case):
    """One call of `physical_rows`.

    kv_lens        tokens of each request that have a row
    padding        queries after those of all requests
    outside        share of the listed positions that are outside of their request
    given_results  pass out=
    """

    op = "physical_rows"

    kv_lens: tuple[int, ...] = (33, 0, 17)
    q_lens: tuple[int, ...] = (1, 1, 2)
    implicit_starts: bool = False
    padding: int = 0
    topk: int = 8
    page_size: int = 16
    flat_table: bool = False
    outside: float = 0.3
    wide_indices: bool = False
    given_results: bool = False

    def trial(self, device: torch.device | str) -> Trial:
        inputs = Inputs(device, self.seed, padded=self.padded)
        shape = (sum(self.q_lens) + self.padding, self.topk)
        dtype = torch.int64 if self.wide_indices else torch.int32
        table, slots = (self._flat if self.flat_table else self._paged)(inputs, dtype)
        listed = inputs.any_of([-1, -(2**31), 0, NEVER_A_PAGE], *shape)
        query = 0
        for own, q_len in zip(slots, self.q_lens, strict=True):
            within = inputs.integers(0, max(len(own), 1), q_len, self.topk)
            beyond = inputs.any_of([-1, -7, len(own), len(own) + 1, LARGEST], q_len, self.topk)
            is_outside = inputs.chance(self.outside, q_len, self.topk)
            listed[query : query + q_len] = torch.where(is_outside, beyond, within)
            query += q_len
        tokens = inputs.place("tokens", listed.to(dtype))
        starts = None
        if not self.implicit_starts:
            starts = inputs.place_ints("q_starts", starts_of(self.q_lens), wide=self.wide_indices)
        out = inputs.result("out", shape, torch.int32) if self.given_results else None

        def call(backend: Backend) -> Results:
            return (physical_rows(tokens, table, self.page_size, starts, out=out, backend=backend),)

        def check(results: Results) -> None:
            assert_given("rows", results[0], out)
            expected = reference.physical_rows(listed, slots, self.q_lens)
            assert_same_bits("rows", results[0].cpu(), expected)

        return Trial(inputs, call, check)

    def _paged(self, inputs: Inputs, dtype: torch.dtype) -> tuple[PageTable, list[Tensor]]:
        """(page table, per request int64 [tokens that its row of the table has room for])."""
        counts = [-(-kv_len // self.page_size) for kv_len in self.kv_lens]
        columns = max(counts, default=0) + 1
        largest = LARGEST // self.page_size - 1
        pages = inputs.integers(0, largest, len(counts), columns)
        used = torch.tensor(counts, dtype=torch.int64, device="cpu")
        is_used = torch.arange(columns, device="cpu") < used[:, None]
        # no page, and pages whose rows int32 cannot hold
        empty = inputs.any_of([-1, -5, LARGEST], len(counts), columns)
        if self.page_size == 1:
            empty = empty.clamp_max(-1)
        pages = torch.where(is_used, pages, empty)
        token = torch.arange(columns * self.page_size, device="cpu")
        slots = pages[:, token // self.page_size] * self.page_size + token % self.page_size
        slots = torch.where((slots < 0) | (slots > LARGEST), -1, slots)
        return inputs.place("page_table", pages.to(dtype)), list(slots)

    def _flat(self, inputs: Inputs, dtype: torch.dtype) -> tuple[PageTable, list[Tensor]]:
        slots = [inputs.integers(-1, LARGEST, kv_len) for kv_len in self.kv_lens]
        spare = torch.full((3,), 1, dtype=torch.int64, device="cpu")
        flat = inputs.place("slots", torch.cat([*slots, spare]).to(dtype))
        starts = torch.tensor(starts_of(self.kv_lens), dtype=dtype, device="cpu")
        return (inputs.place("kv_starts", starts), flat), slots
