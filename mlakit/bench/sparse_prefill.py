"""The suite `sparse-prefill`: absorbed attention of a prompt's tokens over listed rows, on a GPU.

Rows    2048 of the token's own request, uniform, distinct, not sorted
Bytes   every cached row once, q, the lists and out
FLOPs   2 · tokens · heads · topk · (576 + 512)
Gate    some tokens, all their heads, against the float64 oracle
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from mlakit.bench import gate, gpu
from mlakit.bench.pool import ROW, SCALE, filled_cache, page_counts
from mlakit.bench.problems import SparsePrefill
from mlakit.bench.row_lists import distinct_rows
from mlakit.bench.shapes import Batch, Shape, with_topk
from mlakit.bench.sparse_decode import sampled_queries
from mlakit.bench.suite import Contest, Workload
from mlakit.formats import row_codec
from mlakit.ops import sparse_mla

PAGE_SIZE = 64


@dataclass(frozen=True)
class Sparse(Workload):
    """The new tokens of every request, each over `topk` rows of its request.

    ratio  of mlakit's time to FlashMLA's that is to be reached; None: none is set
    """

    batch: Batch
    heads: int
    topk: int = 2048
    format: str = "bf16"
    ratio: float | None = None

    op = "sparse_mla"
    rival = "flash_mla"

    @property
    def name(self) -> str:
        return f"sparse-prefill-{self.format}-{self.batch.label(self.heads)}-top{self.topk}"

    @property
    def flops(self) -> int:
        return 2 * self.batch.tokens * self.heads * self.topk * (ROW.width + ROW.v_width)

    @property
    def bytes(self) -> int:
        cached = sum(self.batch.kv_lens) * row_codec(self.format, ROW).bytes_per_token
        per_token = 4 * self.topk + 2 * self.heads * (ROW.width + ROW.v_width)
        return cached + self.batch.tokens * per_token

    @property
    def limit(self) -> float | None:
        return self.ratio

    @property
    def small(self) -> Workload:
        return replace(self, batch=self.batch.small, topk=min(self.topk, 128), ratio=None)

    def contest(self) -> Contest:
        generator = gpu.generator()
        counts = page_counts(self.batch.kv_lens, PAGE_SIZE)
        cache = filled_cache(sum(counts), PAGE_SIZE, self.format, generator)
        q = gpu.normal(generator, self.batch.tokens, self.heads, ROW.width)
        # requests lie one after the other, each from a page's first row on
        last_page = accumulate(counts)
        requests = zip(self.batch.q_lens, self.batch.kv_lens, counts, last_page, strict=True)
        lists = [
            distinct_rows(q_len, kv_len, self.topk, generator) + PAGE_SIZE * (last - count)
            for q_len, kv_len, count, last in requests
        ]
        rows = torch.cat(lists).int()

        def ours() -> tuple[Tensor, Tensor, Tensor]:
            return sparse_mla(q, cache, rows, softmax_scale=SCALE)

        def samples() -> Iterator[gate.Sample]:
            return sampled_queries(q, cache, rows)

        problem = None
        if self.format == "bf16":
            problem = SparsePrefill(q, cache.payload[0].flatten(0, 1), rows, SCALE)
        return Contest(
            ours,
            [],
            gate=lambda: gate.hold(("out", "lse"), ours()[:2], samples()),
            problem=problem,
            peer_fault=lambda output: gate.fault(output, samples()),
        )


def of_shape(shape: Shape) -> tuple[Workload, ...]:
    given = shape.accept("sparse-prefill", "heads", "format", "topk")
    batch = shape.batch
    given = {"heads": 128, **given, "topk": with_topk("sparse-prefill", batch, given.get("topk"))}
    return (Sparse(batch, **given),)  # type: ignore[arg-type]  # checked by their options


RATIOS = {
    (128, 8192): 0.865,
    (128, 32768): 0.865,
    (128, 131072): 0.875,
    (64, 8192): 0.86,
    (64, 32768): 0.87,
    (64, 131072): 0.86,
}
WORKLOADS: tuple[Workload, ...] = tuple(
    Sparse(Batch.of(1, 4096, rows), heads, ratio=ratio) for (heads, rows), ratio in RATIOS.items()
)
