"""The suite `decode`: absorbed decode on a GPU, DeepSeek-V3 head dimensions, shuffled pages.

Bytes   the KV rows once, q and out
FLOPs   2 · queries · heads · tokens · (576 + 512)
FP8     an FP8 cache is compared with a bf16 cache of the same problem and bf16 queries
Plan    made before the clock starts, for peers too; "planned in the call" includes it
Check   some requests, all heads, against the float64 oracle
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from mlakit import reference
from mlakit.cache import CacheLayer, PagedLatentCache, request_slots
from mlakit.formats import Format, row_codec
from mlakit.ops import mla_decode
from mlakit.ops.decode_plan import plan_mla_decode
from mlakit.plan import DecodePlanTensors
from mlakit.tools.bench import correctness, gpu
from mlakit.tools.bench.pool import ROW, SCALE, SharedPool, filled_pages
from mlakit.tools.bench.problems import DenseDecode
from mlakit.tools.bench.shapes import Batch, Shape
from mlakit.tools.bench.suite import Baseline, BenchmarkCase, Workload
from mlakit.tools.workloads.fp8_scores import fp8_qk_scores, uses_fp8_qk
from mlakit.tools.workloads.paged import scales_of

BF16_ROWS = "bf16 rows"
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Decode(Workload):
    """The newest tokens of each request attend to all its cached tokens.

    dtype           of the queries
    min_speedup     target for FlashMLA's time / mlakit's time; None: no target
    min_read_share  share of the read bandwidth that meets the target as well
    pool            a pool shared with other workloads; None: its own
    """

    batch: Batch
    heads: int
    format: Format = "bf16"
    page_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    min_speedup: float | None = None
    min_read_share: float | None = None
    pool: SharedPool | None = field(default=None, compare=False)

    op = "mla_decode"
    target_baseline: ClassVar[str | None] = "flash_mla"

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
    def small(self) -> Workload:
        return replace(self, batch=self.batch.small, min_speedup=None, min_read_share=None)

    def build_case(self) -> BenchmarkCase:
        generator = gpu.generator()
        cache, page_table = self._pages(generator)
        q = gpu.normal(generator, self.batch.tokens, self.heads, ROW.width, dtype=self.dtype)
        kv_lens = gpu.int32(self.batch.kv_lens)
        call, baselines = self.operation(q, cache, page_table, kv_lens)

        def samples() -> Iterator[correctness.Sample]:
            return self._samples(q, cache, page_table)

        return BenchmarkCase(
            call,
            baselines,
            check=lambda: correctness.assert_correct(("out", "lse"), call(), samples()),
            problem=self._problem(q, cache, page_table, kv_lens),
            peer_error=lambda output: correctness.peer_error(output, samples()),
        )

    def operation(
        self, q: Tensor, cache: PagedLatentCache, page_table: Tensor, kv_lens: Tensor
    ) -> tuple[Callable[[], tuple[Tensor, Tensor]], list[Baseline]]:
        """The call of mlakit, and its baselines."""
        starts = gpu.int32(self.batch.starts)

        def attend(plan: DecodePlanTensors | None) -> tuple[Tensor, Tensor]:
            return mla_decode(
                q, cache, page_table, kv_lens, q_starts=starts, softmax_scale=SCALE, plan=plan
            )

        # once per step, for all layers: not part of the timed call
        plan = plan_mla_decode(
            cache,
            page_table,
            kv_lens,
            heads=self.heads,
            num_tokens=self.batch.tokens,
            q_starts=starts,
            dtype=self.dtype,
        )
        planned_late = Baseline("planned in the call", lambda: attend(None), sets_target=False)
        return lambda: attend(plan), [planned_late, gpu.read_baseline(self.bytes)]

    def _pages(self, generator: torch.Generator) -> tuple[PagedLatentCache, Tensor]:
        if self.pool is not None:
            return self.pool.pages(self.batch.kv_lens, generator)
        return filled_pages(self.batch.kv_lens, self.page_size, self.format, generator)

    def _problem(
        self, q: Tensor, cache: PagedLatentCache, page_table: Tensor, kv_lens: Tensor
    ) -> DenseDecode | None:
        """For peers: they read bf16 rows, and every request has the same number of queries."""
        if self.format != "bf16" or not self.batch.is_even:
            return None
        return DenseDecode(
            q=q.unflatten(0, (self.batch.size, -1)),
            pages=cache.payload[0],
            # some peers read table entries past a request's last page
            page_table=page_table.clamp(max=cache.num_pages - 1),
            kv_lens=kv_lens,
            softmax_scale=SCALE,
            causal=True,
        )

    def _samples(
        self, q: Tensor, cache: PagedLatentCache, page_table: Tensor
    ) -> Iterator[correctness.Sample]:
        layer, starts = cache.layer(0), self.batch.starts
        for request in self.batch.checked_requests:
            own, kv_len = slice(*starts[request : request + 2]), self.batch.kv_lens[request]
            slots = request_slots(page_table, self.page_size, request, 0, kv_len)
            rows = layer.read(slots, torch.float64)
            products = self._products(q[own], rows, layer, slots)
            exact, naive = (
                reference.mla_decode(
                    q[own].float(),
                    [rows],
                    [self.batch.q_lens[request]],
                    softmax_scale=SCALE,
                    v_width=ROW.v_width,
                    products=None if dtype == torch.float64 else products,
                    dtype=dtype,
                )
                for dtype in (torch.float64, torch.float32)
            )
            yield correctness.Sample(f"request {request}", own, exact, naive)

    def _products(
        self, q: Tensor, rows: Tensor, layer: CacheLayer, slots: Tensor
    ) -> Callable[[int, int, Tensor], Tensor] | None:
        """Return the products of a kernel that multiplies e4m3 by e4m3, for its naive run."""
        q_dtype = "e4m3" if self.dtype is E4M3 else "bf16"
        if not uses_fp8_qk(q.device, "auto", format=self.format, q_dtype=q_dtype, heads=self.heads):
            return None
        scales = scales_of(layer, slots)
        return lambda token, _, seen: fp8_qk_scores(
            q[token], rows[seen], scales[seen], ROW, self.format
        )


@dataclass(frozen=True)
class Fp8Decode(Decode):
    """An FP8 cache; `min_speedup` refers to the same problem with a bf16 cache."""

    target_baseline: ClassVar[str | None] = BF16_ROWS

    def build_case(self) -> BenchmarkCase:
        case = super().build_case()
        bf16 = Decode(self.batch, self.heads, page_size=self.page_size).build_case()
        baselines = [*case.baselines, Baseline(BF16_ROWS, bf16.call)]
        return replace(case, baselines=baselines)


def of_shape(shape: Shape) -> tuple[Workload, ...]:
    given = {"heads": 128, **shape.accept("decode", "heads", "format", "page_size")}
    return (Decode(shape.batch, **given),)  # type: ignore[arg-type]  # checked by their options


WORKLOADS: tuple[Workload, ...] = (
    Decode(Batch.of(128, 1, 4096), 128, min_speedup=1.177),
    Decode(Batch.of(128, 2, 4096), 128, min_speedup=1.17),
    Decode(Batch.of(128, 1, 8192), 64, min_speedup=1.087, min_read_share=0.985),
    Decode(Batch.of(128, 1, 8192), 16, min_speedup=1.087, min_read_share=0.985),
    Decode(Batch.of(32, 1, 16384), 16, min_speedup=1.213),
    Decode(Batch.of(4, 1, 32768), 128, min_speedup=1.471),
    Decode(Batch.of(1, 1, 65536), 128, min_speedup=1.786),
    *(
        Fp8Decode(Batch.of(128, 1, tokens), heads, format, min_speedup=target)
        # compute-bound with 128 heads: 0.75x of bf16; bandwidth-bound with 16: 1.6x
        for heads, tokens, target in ((128, 4096, 0.75), (16, 8192, 1.6))
        for format in ("fp8", "fp8_token", "fp8_block128")
    ),
    Fp8Decode(Batch.of(128, 1, 8192), 16, "mxfp4_block32"),
    # e4m3 queries multiply in FP8
    Fp8Decode(Batch.of(128, 1, 4096), 128, "fp8", dtype=E4M3, min_speedup=1.0),
    Fp8Decode(Batch.of(128, 1, 4096), 128, "fp8_token", dtype=E4M3, min_speedup=1.0),
    Fp8Decode(Batch.of(128, 1, 4096), 128, "fp8_block128", dtype=E4M3, min_speedup=0.75),
)
