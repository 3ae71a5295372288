"""The suite `decode`: absorbed decode on a GPU, at the widths of DeepSeek-V3, pages shuffled.

Bytes   the KV rows once, q and out
FLOPs   2 · batch · q_len · heads · tokens · (576 + 512)
Plan    made before the clock starts; "planned in the call" has none
Gate    three requests, all their heads, against the float64 oracle
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mlakit import reference
from mlakit.bench import gpu
from mlakit.bench.suite import Baseline, Contest, Workload
from mlakit.cache import CacheLayer, PagedLatentCache, request_slots
from mlakit.formats import row_codec
from mlakit.geometry import MLAGeometry
from mlakit.ops import mla_decode
from mlakit.plan import DecodePlanTensors, plan_decode
from mlakit.testing import assert_matches

MODEL = MLAGeometry.preset("deepseek-v3")
ROW = MODEL.row
SCALE = MODEL.softmax_scale
LATENT_SIZE = 0.3  # standard deviation of cached numbers
SEED = 0


@dataclass(frozen=True)
class Decode(Workload):
    """`q_len` new tokens each of `batch` requests, each with `tokens` rows cached."""

    batch: int
    heads: int
    q_len: int
    tokens: int
    format: str = "bf16"
    page_size: int = 64

    op = "mla_decode"

    @property
    def name(self) -> str:
        queries = f"-q{self.q_len}" if self.q_len > 1 else ""
        return f"decode-{self.format}-b{self.batch}-h{self.heads}{queries}-{self.tokens}"

    @property
    def flops(self) -> int:
        rows = self.batch * self.q_len * self.heads
        return 2 * rows * self.tokens * (ROW.width + ROW.v_width)

    @property
    def bytes(self) -> int:
        cached = self.batch * self.tokens * row_codec(self.format, ROW).bytes_per_token
        return cached + 2 * self.batch * self.q_len * self.heads * (ROW.width + ROW.v_width)

    @property
    def limit(self) -> float | None:
        return None

    @property
    def small(self) -> Decode:
        return replace(self, batch=3, tokens=200)

    def contest(self) -> Contest:
        generator = torch.Generator(gpu.DEVICE).manual_seed(SEED)
        cache, page_table = self._cache(generator)
        q = torch.randn(
            self.batch * self.q_len,
            self.heads,
            ROW.width,
            generator=generator,
            device=gpu.DEVICE,
        ).to(torch.bfloat16)
        kv_lens = torch.full((self.batch,), self.tokens, dtype=torch.int32, device=gpu.DEVICE)
        starts = self.q_len * torch.arange(self.batch + 1, dtype=torch.int32, device=gpu.DEVICE)

        def attend(plan: DecodePlanTensors | None) -> tuple[Tensor, Tensor]:
            return mla_decode(
                q, cache, page_table, kv_lens, q_starts=starts, softmax_scale=SCALE, plan=plan
            )

        plan = self._plan()

        def ours() -> tuple[Tensor, Tensor]:
            return attend(plan)

        def unplanned() -> tuple[Tensor, Tensor]:
            return attend(None)

        def gate() -> None:
            out, lse = ours()
            for request in sorted({0, self.batch // 2, self.batch - 1}):
                own = slice(request * self.q_len, (request + 1) * self.q_len)
                exact, naive = (
                    self._oracle(q[own], cache.layer(0), page_table, request, dtype)
                    for dtype in (torch.float64, torch.float32)
                )
                for label, got, *judged in zip(
                    ("out", "lse"), (out, lse), exact, naive, strict=True
                ):
                    assert_matches(f"{label} of request {request}", got[own], *judged)

        baselines = [
            Baseline("planned in the call", unplanned, is_limit=False),
            gpu.reading(self.bytes),
        ]
        return Contest(ours, baselines, gate)

    def _plan(self) -> DecodePlanTensors:
        """Made once per step and used by all layers: outside of what is timed."""
        sms = torch.cuda.get_device_properties(gpu.DEVICE).multi_processor_count
        rows = self.heads * self.q_len
        together = 2 * sms if rows <= 16 else sms // -(-rows // 64)  # workers that run at once
        plan = plan_decode([self.tokens] * self.batch, num_workers=max(together, 1), tile=64)
        return plan.tensors(gpu.DEVICE)

    def _cache(self, generator: torch.Generator) -> tuple[PagedLatentCache, Tensor]:
        """A pool filled page by page, and a table of its pages in random order."""
        pages = -(-self.tokens // self.page_size)
        cache = PagedLatentCache.allocate(
            ROW,
            self.format,
            num_pages=self.batch * pages,
            page_size=self.page_size,
            device=gpu.DEVICE,
        )
        order = torch.randperm(self.batch * pages, generator=generator, device=gpu.DEVICE)
        page_table = order.int().view(self.batch, pages)
        layer, slots = cache.layer(0), pages * self.page_size
        for first in range(0, layer.num_slots, slots):
            rows = torch.randn(slots, ROW.width, generator=generator, device=gpu.DEVICE)
            own = torch.arange(first, first + slots, device=gpu.DEVICE)
            layer.write(own, LATENT_SIZE * rows)
        return cache, page_table

    def _oracle(
        self, q: Tensor, layer: CacheLayer, page_table: Tensor, request: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        slots = request_slots(page_table, self.page_size, request, 0, self.tokens)
        return reference.mla_decode(
            q,
            [layer.read(slots, torch.float64)],
            [self.q_len],
            softmax_scale=SCALE,
            v_width=ROW.v_width,
            dtype=dtype,
        )


WORKLOADS: tuple[Workload, ...] = (
    Decode(128, 128, 1, 4096),
    Decode(128, 128, 2, 4096),
    Decode(128, 64, 1, 8192),
    Decode(128, 16, 1, 8192),
    Decode(32, 16, 1, 16384),
    Decode(4, 128, 1, 32768),
    Decode(1, 128, 1, 65536),
)
