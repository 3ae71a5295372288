"""The suite `sparse-decode`: absorbed attention over listed rows of 656 bytes, on a GPU.

Rows    2048 of each query's own request, uniform, distinct, not sorted; pages shuffled
Bytes   each query's own rows, q, the lists and out
FLOPs   2 · queries · heads · topk · (576 + 512)
Gate    some queries, all their heads, against the float64 oracle
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mlakit import reference
from mlakit.bench import gate, gpu
from mlakit.bench.pool import ROW, SCALE, filled_pages
from mlakit.bench.problems import SparseDecode
from mlakit.bench.row_lists import distinct_rows
from mlakit.bench.shapes import Batch, Shape, with_topk
from mlakit.bench.suite import Contest, Workload
from mlakit.cache import PagedLatentCache
from mlakit.formats import row_codec
from mlakit.ops import sparse_mla

MOST_JUDGED = 6  # queries


@dataclass(frozen=True)
class Sparse(Workload):
    """The newest tokens of a batch of requests, each over `topk` rows of its request.

    ratio  of mlakit's time to FlashMLA's that is to be reached; None: none is set
    """

    batch: Batch
    heads: int
    topk: int = 2048
    format: str = "fp8_block128"
    page_size: int = 64
    ratio: float | None = None

    op = "sparse_mla"
    rival = "flash_mla"

    @property
    def name(self) -> str:
        page = f"-page{self.page_size}" if self.page_size != 64 else ""
        return f"sparse-decode-{self.format}-{self.batch.label(self.heads)}-top{self.topk}{page}"

    @property
    def flops(self) -> int:
        return 2 * self.batch.tokens * self.heads * self.topk * (ROW.width + ROW.v_width)

    @property
    def bytes(self) -> int:
        listed = self.topk * (row_codec(self.format, ROW).bytes_per_token + 4)
        return self.batch.tokens * (listed + 2 * self.heads * (ROW.width + ROW.v_width))

    @property
    def limit(self) -> float | None:
        return self.ratio

    @property
    def small(self) -> Workload:
        return replace(self, batch=self.batch.small, topk=min(self.topk, 128), ratio=None)

    def contest(self) -> Contest:
        generator = gpu.generator()
        kv_lens, page = self.batch.kv_lens, self.page_size
        cache, page_table = filled_pages(kv_lens, page, self.format, generator)
        q = gpu.normal(generator, self.batch.tokens, self.heads, ROW.width)
        lists = []
        for request, (q_len, kv_len) in enumerate(zip(self.batch.q_lens, kv_lens, strict=True)):
            tokens = distinct_rows(q_len, kv_len, self.topk, generator)
            lists.append(page_table[request][tokens // page] * page + tokens % page)
        rows = torch.cat(lists).int()

        def ours() -> tuple[Tensor, Tensor, Tensor]:
            return sparse_mla(q, cache, rows, softmax_scale=SCALE)

        def samples() -> Iterator[gate.Sample]:
            return sampled_queries(q, cache, rows)

        problem = None
        if self.format == "fp8_block128" and self.batch.is_even:
            by_request = (self.batch.size, -1)
            problem = SparseDecode(
                q.unflatten(0, by_request),
                cache.payload[0].view(torch.uint8),
                rows.unflatten(0, by_request),
                SCALE,
            )
        return Contest(
            ours,
            [gpu.reading(self.bytes)],
            gate=lambda: gate.hold(("out", "lse"), ours()[:2], samples()),
            problem=problem,
            peer_fault=lambda output: gate.fault(output, samples()),
        )


def sampled_queries(q: Tensor, cache: PagedLatentCache, rows: Tensor) -> Iterator[gate.Sample]:
    """What the oracle gives for some queries, each over its own list."""
    layer = cache.layer(0)
    for token in gate.spread_out(len(q), MOST_JUDGED):
        own = slice(token, token + 1)
        listed = layer.read(rows[token].long(), torch.float64)
        place = torch.arange(len(listed), device=rows.device)[None]
        exact, naive = (
            reference.sparse_mla(
                q[own], listed, place, softmax_scale=SCALE, v_width=ROW.v_width, dtype=dtype
            )
            for dtype in (torch.float64, torch.float32)
        )
        yield gate.Sample(f"query {token}", own, exact[:2], naive[:2])


def of_shape(shape: Shape) -> tuple[Workload, ...]:
    given = shape.accept("sparse-decode", "heads", "format", "page_size", "topk")
    batch = shape.batch
    given = {"heads": 128, **given, "topk": with_topk("sparse-decode", batch, given.get("topk"))}
    return (Sparse(batch, **given),)  # type: ignore[arg-type]  # checked by their options


WORKLOADS: tuple[Workload, ...] = (
    Sparse(Batch.of(128, 1, 32768), 128, ratio=0.82),
    Sparse(Batch.of(128, 2, 32768), 128, ratio=0.82),
    Sparse(Batch.of(64, 1, 32768), 64, ratio=0.85),
    Sparse(Batch.of(8, 1, 32768), 128, ratio=0.80),
)
