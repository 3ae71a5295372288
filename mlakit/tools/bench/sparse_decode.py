"""The suite `sparse-decode`: absorbed attention over top-k rows of a 656-byte FP8 cache, on a GPU.

Rows    2048 rows of the query's own request: uniform, distinct, unsorted, in shuffled pages
Bytes   the rows of each query, q, the indices and out
FP4     four-bit rows are compared with the FP8 rows of the same problem
V4      DeepSeek-V4's rows of 448 + 64 columns: a window of 128 rows and `topk` compressed rows
Peers   FlashMLA on zero-padded heads for 16 and 32, padded before the clock starts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache
from mlakit.formats import Format, row_codec
from mlakit.model.geometry import MLAGeometry, RowShape
from mlakit.tools.bench import gpu
from mlakit.tools.bench.pool import SCALE, filled_pages
from mlakit.tools.bench.problems import SparseDecode
from mlakit.tools.bench.shapes import Batch, Shape
from mlakit.tools.bench.sparse import Lists, SparseWorkload, random_tokens, sparse_of_shape
from mlakit.tools.bench.suite import Baseline, BenchmarkCase, Workload

FP8_ROWS = "FP8 rows"
V4 = MLAGeometry.preset("deepseek-v4-flash")
V4_FORMATS: tuple[Format, ...] = ("fp8_block64", "mxfp4_block32")
RATE, WINDOW = 4, 128  # tokens of a compressed row, and rows of a window


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
        listed = self.attended * row_codec(self.format, self.row).bytes_per_token
        return self.batch.tokens * (listed + self.query_bytes)

    @property
    def hardware_baselines(self) -> Sequence[Baseline]:
        return (gpu.read_baseline(self.bytes),)

    def lists(self, generator: torch.Generator) -> Lists:
        kv_lens, page = self.batch.kv_lens, self.page_size
        cache, page_table = filled_pages(kv_lens, page, self.format, generator)
        tokens, rows = [], []
        for request, (q_len, kv_len) in enumerate(zip(self.batch.q_lens, kv_lens, strict=True)):
            own = random_tokens(q_len, kv_len, self.topk, generator)
            tokens.append(own)
            rows.append(page_table[request][own // page] * page + own % page)
        return Lists(cache, torch.cat(rows).int(), torch.cat(tokens).int(), page_table)

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


@dataclass(frozen=True)
class Fp4Sparse(Sparse):
    """Four-bit rows; `min_speedup` refers to the same problem with FP8 rows."""

    format: Format = "mxfp4_block32"

    target_baseline = FP8_ROWS

    @property
    def over_fp8(self) -> Workload:
        """The same problem with FP8 rows."""
        return Sparse(self.batch, self.heads, self.topk)

    def build_case(self) -> BenchmarkCase:
        case = super().build_case()
        if self.format != "mxfp4_block32":
            return case
        fp8 = Baseline(FP8_ROWS, self.over_fp8.build_case().call)
        return replace(case, baselines=[*case.baselines, fp8])


@dataclass(frozen=True)
class V4Sparse(Fp4Sparse):
    """Decode of DeepSeek-V4: a window of rows, and selected rows of `RATE` tokens each."""

    topk: int = V4.index_topk
    format: Format = "fp8_block64"

    @property
    def name(self) -> str:
        return super().name.replace(self.suite, f"{self.suite}-v4", 1)

    @property
    def row(self) -> RowShape:
        return V4.row

    @property
    def attended(self) -> int:
        return self.topk + WINDOW

    @property
    def small(self) -> Workload:
        batch = self.batch.small
        return replace(self, batch=batch, topk=min(batch.kv_lens) // RATE, min_speedup=None)

    @property
    def over_fp8(self) -> Workload:
        return V4Sparse(self.batch, self.heads, self.topk)

    def lists(self, generator: torch.Generator) -> Lists:
        windows = self._listed([WINDOW] * self.batch.size, WINDOW, generator)
        compressed = [kv_len // RATE for kv_len in self.batch.kv_lens]
        return Lists(*windows, extra=self._listed(compressed, self.topk, generator))

    def _listed(
        self, num_rows: Sequence[int], count: int, generator: torch.Generator
    ) -> tuple[PagedLatentCache, Tensor]:
        """A cache with so many rows of each request, and `count` of them for each query."""
        page = self.page_size
        cache, page_table = filled_pages(num_rows, page, self.format, generator, self.row)
        rows = []
        for request, (q_len, stored) in enumerate(zip(self.batch.q_lens, num_rows, strict=True)):
            own = random_tokens(q_len, stored, count, generator)
            rows.append(page_table[request][own // page] * page + own % page)
        return cache, torch.cat(rows).int()


def of_shape(shape: Shape) -> tuple[Workload, ...]:
    return (sparse_of_shape(Sparse, shape, "page_size"),)


WORKLOADS: tuple[Workload, ...] = (
    Sparse(Batch.of(128, 1, 32768), 128, min_speedup=1.22),
    Sparse(Batch.of(128, 2, 32768), 128, min_speedup=1.22),
    Sparse(Batch.of(64, 1, 32768), 64, min_speedup=1.177),
    Sparse(Batch.of(8, 1, 32768), 128, min_speedup=1.25),
    # shards of tensor parallelism: FlashMLA computes 64 heads
    Sparse(Batch.of(128, 1, 32768), 32, min_speedup=1.0),
    Sparse(Batch.of(128, 1, 32768), 16, min_speedup=1.0),
    Sparse(Batch.of(8, 1, 32768), 16, min_speedup=1.0),
    Fp4Sparse(Batch.of(128, 1, 32768), 16, min_speedup=1.25),
    Fp4Sparse(Batch.of(128, 1, 32768), 32),
    Fp4Sparse(Batch.of(8, 1, 32768), 16),
    *(
        V4Sparse(Batch.of(count, 1, 32768), heads, format=format)
        for count, heads in ((128, 64), (128, 16), (8, 64))
        for format in V4_FORMATS
    ),
)
