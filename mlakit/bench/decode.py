"""The suite `decode`: absorbed decode on a GPU, at the widths of DeepSeek-V3, pages shuffled.

Bytes   the KV rows once, q and out
FLOPs   2 · queries · heads · tokens · (576 + 512)
FP8     rows are timed beside bf16 rows of the same problem, which has queries of bf16 then
Plan    made before the clock starts, for peers too; "planned in the call" has none
Gate    some requests, all their heads, against the float64 oracle
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from mlakit import reference
from mlakit.bench import gate, gpu
from mlakit.bench.pool import ROW, SCALE, SharedPool, filled_pages
from mlakit.bench.problems import DenseDecode
from mlakit.bench.shapes import Batch, Shape
from mlakit.bench.suite import Baseline, Contest, Workload
from mlakit.cache import PagedLatentCache, request_slots
from mlakit.formats import Format, row_codec
from mlakit.ops import mla_decode
from mlakit.ops.decode_plan import plan_mla_decode
from mlakit.plan import DecodePlanTensors

RIVAL = "flash_mla"
HALVES = "bf16 rows"
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Decode(Workload):
    """The newest tokens of a batch of requests over all that is cached of them.

    dtype  of the queries
    ratio  of mlakit's time to FlashMLA's that is to be reached; None: none is set
    share  of the read bandwidth that is as good
    pool   where the pages come from; None: a pool of its own
    """

    batch: Batch
    heads: int
    format: Format = "bf16"
    page_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    ratio: float | None = None
    share: float | None = None
    pool: SharedPool | None = field(default=None, compare=False)

    op = "mla_decode"
    rival: ClassVar[str | None] = RIVAL

    @property
    def name(self) -> str:
        page = f"-page{self.page_size}" if self.page_size != 64 else ""
        queries = "-e4m3-queries" if self.dtype is E4M3 else ""
        return f"decode-{self.format}-{self.batch.label(self.heads)}{page}{queries}"

    @property
    def flops(self) -> int:
        lengths = zip(self.batch.q_lens, self.batch.kv_lens, strict=True)
        pairs = sum(q_len * kv_len for q_len, kv_len in lengths)
        return 2 * self.heads * pairs * (ROW.width + ROW.v_width)

    @property
    def bytes(self) -> int:
        cached = sum(self.batch.kv_lens) * row_codec(self.format, ROW).bytes_per_token
        row_bytes = self.dtype.itemsize * ROW.width + 2 * ROW.v_width  # of a query and its result
        return cached + self.batch.tokens * self.heads * row_bytes

    @property
    def limit(self) -> float | None:
        return self.ratio

    @property
    def read_share(self) -> float | None:
        return self.share

    @property
    def small(self) -> Workload:
        return replace(self, batch=self.batch.small, ratio=None, share=None)

    def contest(self) -> Contest:
        generator = gpu.generator()
        cache, page_table = self._pages(generator)
        q = gpu.normal(generator, self.batch.tokens, self.heads, ROW.width).to(self.dtype)
        kv_lens, starts = gpu.int32(self.batch.kv_lens), gpu.int32(self.batch.starts)

        def attend(plan: DecodePlanTensors | None) -> tuple[Tensor, Tensor]:
            return mla_decode(
                q, cache, page_table, kv_lens, q_starts=starts, softmax_scale=SCALE, plan=plan
            )

        # once per step, for all layers: outside of what is timed
        plan = plan_mla_decode(
            cache,
            page_table,
            kv_lens,
            heads=self.heads,
            num_tokens=self.batch.tokens,
            q_starts=starts,
            dtype=self.dtype,
        )

        def ours() -> tuple[Tensor, Tensor]:
            return attend(plan)

        def samples() -> Iterator[gate.Sample]:
            return self._samples(q, cache, page_table)

        return Contest(
            ours,
            [
                Baseline("planned in the call", lambda: attend(None), is_limit=False),
                gpu.reading(self.bytes),
            ],
            gate=lambda: gate.hold(("out", "lse"), ours(), samples()),
            problem=self._problem(q, cache, page_table, kv_lens),
            peer_fault=lambda output: gate.fault(output, samples()),
        )

    def _pages(self, generator: torch.Generator) -> tuple[PagedLatentCache, Tensor]:
        if self.pool is not None:
            return self.pool.pages(self.batch.kv_lens, generator)
        return filled_pages(self.batch.kv_lens, self.page_size, self.format, generator)

    def _problem(
        self, q: Tensor, cache: PagedLatentCache, page_table: Tensor, kv_lens: Tensor
    ) -> DenseDecode | None:
        """For peers: they read bf16 rows, of requests with equally many queries."""
        if self.format != "bf16" or not self.batch.is_even:
            return None
        return DenseDecode(
            q=q.unflatten(0, (self.batch.size, -1)),
            pages=cache.payload[0],
            # beyond a request's last page some of them look at an entry all the same
            page_table=page_table.clamp(max=cache.num_pages - 1),
            kv_lens=kv_lens,
            softmax_scale=SCALE,
            causal=True,
        )

    def _samples(
        self, q: Tensor, cache: PagedLatentCache, page_table: Tensor
    ) -> Iterator[gate.Sample]:
        layer, starts = cache.layer(0), self.batch.starts
        for request in self.batch.judged:
            own, kv_len = slice(*starts[request : request + 2]), self.batch.kv_lens[request]
            slots = request_slots(page_table, self.page_size, request, 0, kv_len)
            rows = layer.read(slots, torch.float64)
            exact, naive = (
                reference.mla_decode(
                    q[own].bfloat16(),
                    [rows],
                    [self.batch.q_lens[request]],
                    softmax_scale=SCALE,
                    v_width=ROW.v_width,
                    dtype=dtype,
                )
                for dtype in (torch.float64, torch.float32)
            )
            yield gate.Sample(f"request {request}", own, exact, naive)


@dataclass(frozen=True)
class BytesDecode(Decode):
    """Over rows of FP8, beside the same problem over rows of bf16, which `ratio` is of."""

    rival: ClassVar[str | None] = HALVES

    def contest(self) -> Contest:
        contest = super().contest()
        halves = Decode(self.batch, self.heads, page_size=self.page_size).contest()
        baselines = [*contest.baselines, Baseline(HALVES, halves.ours)]
        return replace(contest, baselines=baselines)


def of_shape(shape: Shape) -> tuple[Workload, ...]:
    given = {"heads": 128, **shape.accept("decode", "heads", "format", "page_size")}
    return (Decode(shape.batch, **given),)  # type: ignore[arg-type]  # checked by their options


WORKLOADS: tuple[Workload, ...] = (
    Decode(Batch.of(128, 1, 4096), 128, ratio=0.85),
    Decode(Batch.of(128, 2, 4096), 128, ratio=0.855),
    Decode(Batch.of(128, 1, 8192), 64, ratio=0.92, share=0.985),
    Decode(Batch.of(128, 1, 8192), 16, ratio=0.92, share=0.985),
    Decode(Batch.of(32, 1, 16384), 16, ratio=0.825),
    Decode(Batch.of(4, 1, 32768), 128, ratio=0.68),
    Decode(Batch.of(1, 1, 65536), 128, ratio=0.56),
    *(
        BytesDecode(Batch.of(128, 1, tokens), heads, format, ratio=ratio)
        # at least three quarters as fast as bf16 where products are the limit, 1.6 times elsewhere
        for heads, tokens, ratio in ((128, 4096, 1 / 0.75), (16, 8192, 1 / 1.6))
        for format in ("fp8", "fp8_token", "fp8_block128")
    ),
    # queries of one byte need no wider products
    BytesDecode(Batch.of(128, 1, 4096), 128, "fp8", dtype=E4M3, ratio=1.0),
    BytesDecode(Batch.of(128, 1, 4096), 128, "fp8_token", dtype=E4M3, ratio=1.0),
    BytesDecode(Batch.of(128, 1, 4096), 128, "fp8_block128", dtype=E4M3, ratio=1 / 0.75),
)
