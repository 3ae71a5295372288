"""The suite `sparse-decode`: absorbed attention over listed rows of 656 bytes, on a GPU.

Rows    2048 of each query's own request, uniform, distinct, not sorted; pages shuffled
Bytes   each query's own rows, q, the lists and out
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlakit.bench import gpu
from mlakit.bench.pool import ROW, SCALE, filled_pages
from mlakit.bench.problems import SparseDecode
from mlakit.bench.row_lists import distinct_rows
from mlakit.bench.shapes import Batch, Shape
from mlakit.bench.sparse import SparseWorkload, sparse_of_shape
from mlakit.bench.suite import Baseline, Workload
from mlakit.cache import PagedLatentCache
from mlakit.formats import Format, row_codec


@dataclass(frozen=True)
class Sparse(SparseWorkload):
    format: Format = "fp8_block128"
    page_size: int = 64

    suite = "sparse-decode"

    @property
    def name(self) -> str:
        return super().name + (f"-page{self.page_size}" if self.page_size != 64 else "")

    @property
    def bytes(self) -> int:
        listed = self.topk * row_codec(self.format, ROW).bytes_per_token
        return self.batch.tokens * (listed + self.query_bytes)

    @property
    def yardsticks(self) -> Sequence[Baseline]:
        return (gpu.reading(self.bytes),)

    def listed(self, generator: torch.Generator) -> tuple[PagedLatentCache, Tensor]:
        kv_lens, page = self.batch.kv_lens, self.page_size
        cache, page_table = filled_pages(kv_lens, page, self.format, generator)
        lists = []
        for request, (q_len, kv_len) in enumerate(zip(self.batch.q_lens, kv_lens, strict=True)):
            tokens = distinct_rows(q_len, kv_len, self.topk, generator)
            lists.append(page_table[request][tokens // page] * page + tokens % page)
        return cache, torch.cat(lists).int()

    def problem(self, q: Tensor, cache: PagedLatentCache, rows: Tensor) -> SparseDecode | None:
        if self.format != "fp8_block128" or not self.batch.is_even:
            return None
        by_request = (self.batch.size, -1)
        return SparseDecode(
            q.unflatten(0, by_request),
            cache.payload[0].view(torch.uint8),
            rows.unflatten(0, by_request),
            SCALE,
        )


def of_shape(shape: Shape) -> tuple[Workload, ...]:
    return (sparse_of_shape(Sparse, shape, "page_size"),)


WORKLOADS: tuple[Workload, ...] = (
    Sparse(Batch.of(128, 1, 32768), 128, ratio=0.82),
    Sparse(Batch.of(128, 2, 32768), 128, ratio=0.82),
    Sparse(Batch.of(64, 1, 32768), 64, ratio=0.85),
    Sparse(Batch.of(8, 1, 32768), 128, ratio=0.80),
)
