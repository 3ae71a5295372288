"""The suite `compress-rows`: pools windows of one step's new tokens to rows, on a GPU.

Rows     DeepSeek-V4's: 4 tokens with overlap, and 128 without; FP8 rows of 448 + 64 columns
Decode   every request finishes a window: the step that reads most
Against  a copy of the same bytes, an empty kernel
Bytes    new kv and gate, bias and norm, earlier states that windows need, rows and states written
Check    every row and state written, against the float64 oracle
Target   at most 1.3x the time of the copy
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlakit.formats import Format, row_codec
from mlakit.model.geometry import MLAGeometry
from mlakit.tools.bench import gpu
from mlakit.tools.bench.report import COPY_SAME_BYTES
from mlakit.tools.bench.shapes import Batch, Shape
from mlakit.tools.bench.suite import BenchmarkCase, Workload
from mlakit.tools.workloads.compress_rows import CompressCase

ROW = MLAGeometry.preset("deepseek-v4-flash").row
OVERLAPPING = 4  # the rate whose windows overlap
RATES = (OVERLAPPING, 128)
DECODED = 256  # tokens of a request in decode: they end a window of either rate
PAGE = 64


@dataclass(frozen=True)
class Compress(Workload):
    """The newest tokens of each request of a batch, pooled by `rate`."""

    rate: int
    batch: Batch
    format: Format = "fp8_block64"

    op = "compress_rows"
    traffic = "copy"
    target_baseline = COPY_SAME_BYTES

    @property
    def name(self) -> str:
        label = self.batch.label(0).replace("-h0", "")
        return f"compress-{self.format}-rate{self.rate}-{label}"

    @property
    def min_speedup(self) -> float:
        return 1 / 1.3

    @property
    def case(self) -> CompressCase:
        """The call, on caches that are poisoned where it may not read."""
        return CompressCase(
            kv_lens=self.batch.kv_lens,
            q_lens=self.batch.q_lens,
            rate=self.rate,
            overlap=self.rate == OVERLAPPING,
            kv_lora_rank=ROW.kv_lora_rank,
            qk_rope_head_dim=ROW.qk_rope_head_dim,
            v_width=ROW.v_width,
            format=self.format,
            page_size=PAGE,
            state_page_size=PAGE,
        )

    @property
    def flops(self) -> int:
        """A softmax per column, and its sum."""
        return 4 * self.batch.tokens * self._columns

    @property
    def bytes(self) -> int:
        overlap, columns = self.rate == OVERLAPPING, self._columns
        row_bytes = row_codec(self.format, ROW).bytes_per_token
        total = 4 * (self.rate * columns + ROW.width)  # bias and norm
        for kv_len, q_len in zip(self.batch.kv_lens, self.batch.q_lens, strict=True):
            before = kv_len - q_len
            windows = kv_len // self.rate - before // self.rate
            first = max((before // self.rate - overlap) * self.rate, 0) if windows else before
            kept = kv_len - max((kv_len // self.rate - overlap) * self.rate, before, 0)
            # of an earlier token a window reads the columns of its own half
            total += 8 * (before - first) * columns // (1 + overlap)
            total += 4 * q_len * columns + 8 * kept * columns
            total += windows * (row_bytes + 4 * ROW.qk_rope_head_dim)
        return total

    @property
    def small(self) -> Workload:
        batch = self.batch.small
        return replace(self, batch=batch, rate=min(self.rate, 40))

    @property
    def _columns(self) -> int:
        return (1 + (self.rate == OVERLAPPING)) * ROW.width

    def build_case(self) -> BenchmarkCase:
        trial = self.case.trial(gpu.DEVICE)

        def call() -> tuple[object, ...]:
            return trial.call("auto")

        return BenchmarkCase(
            call,
            [gpu.copy_baseline(self.bytes), gpu.empty_kernel_baseline()],
            check=lambda: trial.run("auto"),
        )


def of_shape(shape: Shape) -> tuple[Workload, ...]:
    given = shape.accept("compress-rows", "format")
    return tuple(Compress(rate, shape.batch, **given) for rate in RATES)  # type: ignore[arg-type]


WORKLOADS: tuple[Workload, ...] = tuple(
    Compress(rate, batch)
    for rate in RATES
    for batch in (*(Batch.of(count, 1, DECODED) for count in (1, 16, 128)), Batch.of(1, 8192, 8192))
)
