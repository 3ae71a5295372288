"""FlashMLA's test problems of dense decode: its shapes, its corner cases."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tests.compat.flash_mla.inputs import (
    NOT_A_BLOCK,
    padded,
    random_lengths,
    scattered_blocks,
    softmax_over,
)
from tests.pairs import with_every_pair


@dataclass(frozen=True)
class DenseCase:
    b: int
    s_q: int
    s_k: int
    varlen: bool = False
    causal: bool = False
    zeros: bool = False
    h_q: int = 128
    h_kv: int = 1
    page: int = 64
    d: int = 576
    d_v: int = 512
    dtype: torch.dtype = torch.bfloat16

    def make(self, device: torch.device | str, seed: int = 0) -> DenseProblem:
        generator = torch.Generator().manual_seed(seed)
        lengths = random_lengths(
            self.b, self.s_k, self.s_q, varlen=self.varlen, zeros=self.zeros, generator=generator
        )
        table = scattered_blocks(lengths, self.page, -(-256 // self.page), generator)
        drawn = torch.Generator(device).manual_seed(seed)
        # in place: the largest cache takes 11 GB, and several tests share a GPU
        q, k_cache = (
            torch.empty(shape, dtype=self.dtype, device=device)
            .normal_(0.0, 0.1, generator=drawn)
            .clamp_(-1, 1)
            for shape in (
                (self.b, self.s_q, self.h_q, self.d),
                (table.numel(), self.page, self.h_kv, self.d),
            )
        )
        table = table.to(device)
        ends = torch.tensor(lengths, dtype=torch.int32, device=device)
        positions = torch.arange(table.shape[1] * self.page, device=device)
        used = (positions < ends[:, None]).view(self.b, -1, self.page)
        keep = torch.zeros(k_cache.shape[:2], dtype=torch.bool, device=device)
        keep[table.long()] = used
        k_cache.masked_fill_(~keep[:, :, None, None], torch.nan)
        table = torch.where(used.any(2), table, NOT_A_BLOCK)
        return DenseProblem(self, padded(q), k_cache, padded(table), ends)


@dataclass(frozen=True, eq=False)
class DenseProblem:
    case: DenseCase
    q: Tensor
    k_cache: Tensor
    block_table: Tensor
    cache_seqlens: Tensor

    def answer(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """(out [b, s_q, h_q, d_v], lse [b, h_q, s_q])."""
        case, outs, lses = self.case, [], []
        for request, length in enumerate(self.cache_seqlens.tolist()):
            blocks = self.block_table[request, : -(-length // case.page)].long()
            rows = self.k_cache[blocks].flatten(0, 1)[:length].transpose(0, 1).to(dtype)
            seen = torch.ones(case.s_q, length, dtype=torch.bool, device=rows.device)
            if case.causal:
                seen = seen.tril(length - case.s_q)
            # the queries of all heads of a group stand below each other: [h_kv, group · s_q, d]
            queries = self.q[request].transpose(0, 1).reshape(case.h_kv, -1, case.d).to(dtype)
            scores = (queries @ rows.mT) * case.d**-0.5
            scores.masked_fill_(~seen.repeat(case.h_q // case.h_kv, 1), -torch.inf)
            out, lse = softmax_over(scores, rows[:, :, : case.d_v])
            outs.append(out.reshape(case.h_q, case.s_q, case.d_v).transpose(0, 1))
            lses.append(lse.reshape(case.h_q, case.s_q))
        return torch.stack(outs), torch.stack(lses)


HEADS = [
    (h_q, h_kv)
    for h_q, h_kv in product((1, 3, 9, 63, 64, 126, 128), (1, 2, 3, 8))
    if h_q % h_kv == 0
]


def dense_cases(h_q: int, h_kv: int) -> Iterator[DenseCase]:
    """FlashMLA's list for one pair of head counts."""
    for b, s_q, s_k in product((1, 2, 6, 64), (1, 2, 4), (20, 140, 4096)):
        for varlen, causal in product((False, True), repeat=2):
            yield DenseCase(b, s_q, s_k, varlen, causal, h_q=h_q, h_kv=h_kv)
    for causal in (False, True):
        yield DenseCase(128, 2, 4096, True, causal, zeros=True, h_q=h_q, h_kv=h_kv)


@lru_cache(maxsize=1)
def dense_pairs() -> list[DenseCase]:
    """Return cases of FlashMLA's lists that have every pair of the features in them."""

    def features(case: DenseCase) -> tuple[Hashable, ...]:
        heads = case.h_q, case.h_kv
        return heads, case.b, case.s_q, case.s_k, case.varlen, case.causal, case.zeros

    return with_every_pair([case for heads in HEADS for case in dense_cases(*heads)], features)


SERVING_DENSE = [
    DenseCase(128, s_q, s_k, True, causal)
    for causal, s_q, s_k in product((False, True), (1, 2), (4096, 8192, 16384, 32768))
]
FEW_DENSE = [
    DenseCase(1, 1, 20, h_q=1),
    DenseCase(2, 2, 140, True, True, h_q=3),
    DenseCase(6, 4, 20, True, True, h_q=9, h_kv=3),
    DenseCase(2, 4, 140, True, False, h_q=8, h_kv=8),
    DenseCase(2, 1, 140, False, True, h_q=63),
    DenseCase(5, 2, 70, True, True, zeros=True, h_q=6, h_kv=2),
    DenseCase(4, 2, 70, True, False, zeros=True, h_q=3),
    DenseCase(2, 2, 140, True, True, h_q=4, dtype=torch.float16),
    # beyond FlashMLA
    DenseCase(3, 3, 50, True, True, h_q=5, page=1),
    DenseCase(3, 2, 70, True, True, h_q=7, page=37),
    DenseCase(2, 2, 40, True, True, h_q=5, h_kv=5, d=512),
    DenseCase(2, 2, 40, True, False, h_q=4, d=320, d_v=256),
    DenseCase(2, 1, 40, True, False, h_q=2, d=33, d_v=20),
    DenseCase(2, 2, 40, True, True, h_q=4, dtype=torch.float32),
]


def dense_problem(device: torch.device | str = "cpu", **others: Any) -> DenseProblem:
    return DenseCase(**{"b": 3, "s_q": 2, "s_k": 50, "varlen": True, "h_q": 4, **others}).make(
        device
    )


def as_keywords(problem: DenseProblem) -> dict[str, Any]:
    names = ("q", "k_cache", "block_table", "cache_seqlens")
    keywords = {name: getattr(problem, name) for name in names}
    return {**keywords, "head_dim_v": problem.case.d_v, "tile_scheduler_metadata": None}
