"""The suite `cpu`: decode against torch.matmul, prefill against torch's SDPA, on the CPU.

Decode   the baseline is q·Kᵀ and P·V by torch.matmul, on contiguous K in the dtype of q, with P
         given: no softmax, no pages. The target, 0.67x of the fastest variant (at most 1.5 times
         its time), does not apply to quantised rows, which torch.matmul cannot read.
Prefill  the baseline is scaled_dot_product_attention, causal, with k_rope repeated for every head.
         Its fused kernel needs V as wide as K: padded V is a second baseline. The target is 0.83x
         of the faster one (at most 1.2 times its time).

Contiguous K, expanded K and padding are prepared before the clock starts. mlakit is timed as it is
called: the public op with its checks, and for decode with shuffled pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from mlakit import reference
from mlakit.cache import PagedLatentCache, request_slots
from mlakit.formats import Format, row_codec
from mlakit.model.geometry import MLAGeometry
from mlakit.ops import mla_decode, mla_prefill
from mlakit.tools.bench.correctness import Sample, assert_correct, token_sample
from mlakit.tools.bench.suite import Baseline, BenchmarkCase, Workload
from mlakit.tools.testing import shuffled_pages

MODEL = MLAGeometry.preset("deepseek-v3")
ROW = MODEL.row
D_N, D_R, D_V = MODEL.qk_nope_head_dim, MODEL.qk_rope_head_dim, MODEL.v_head_dim
SCALE = MODEL.softmax_scale
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SEED = 0


@dataclass(frozen=True)
class Decode(Workload):
    """`batch` requests with one new token each and `tokens` rows cached in shuffled pages."""

    dtype: str
    format: Format
    batch: int = 4
    heads: int = 16
    tokens: int = 4096
    page_size: int = 64

    op = "mla_decode"

    @property
    def name(self) -> str:
        return f"decode-{self.format}-b{self.batch}-h{self.heads}-{self.tokens}"

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.heads * self.tokens * (ROW.width + ROW.v_width)

    @property
    def bytes(self) -> int:
        rows = self.batch * self.tokens * row_codec(self.format, ROW).bytes_per_token
        elements = self.batch * self.heads * (ROW.width + ROW.v_width)
        return rows + elements * DTYPES[self.dtype].itemsize

    @property
    def min_speedup(self) -> float | None:
        return 1 / 1.5 if self.format in DTYPES else None

    @property
    def small(self) -> Decode:
        return replace(self, batch=2, heads=2, tokens=100)

    def build_case(self) -> BenchmarkCase:
        generator = torch.Generator().manual_seed(SEED)
        pages = -(-self.tokens // self.page_size)
        page_table = shuffled_pages(self.batch, pages, self.batch * pages, generator)
        cache = PagedLatentCache.allocate(
            ROW, self.format, num_pages=self.batch * pages, page_size=self.page_size
        )
        layer, dtype = cache.layer(0), DTYPES[self.dtype]
        k = torch.randn(self.batch, self.tokens, ROW.width, generator=generator).to(dtype)
        q = torch.randn(self.batch, self.heads, ROW.width, generator=generator).to(dtype)
        slots = [
            request_slots(page_table, self.page_size, request, 0, self.tokens)
            for request in range(self.batch)
        ]
        for own, rows in zip(slots, k, strict=True):
            layer.write(own, rows)
        kv_lens = torch.full((self.batch,), self.tokens, dtype=torch.int32)

        def call() -> tuple[Tensor, Tensor]:
            return mla_decode(q, cache, page_table, kv_lens, softmax_scale=SCALE, backend="cpu")

        def oracle(precision: torch.dtype) -> tuple[Tensor, Tensor]:
            return reference.mla_decode(
                q,
                [layer.read(own, torch.float64) for own in slots],
                [1] * self.batch,
                softmax_scale=SCALE,
                v_width=ROW.v_width,
                dtype=precision,
            )

        def check() -> None:
            sample = Sample.of("all requests", slice(None), oracle)
            assert_correct(("out", "lse"), call(), [sample])

        variants = _products(q, k)
        # without a target one baseline is enough
        return BenchmarkCase(call, variants if self.min_speedup else variants[:1], check)


def _products(q: Tensor, k: Tensor) -> list[Baseline]:
    """Variants of q·Kᵀ and P·V: q [batch, heads, width] and k [batch, tokens, width] contiguous."""
    v = k[..., : ROW.v_width]
    p = torch.softmax(q.float() @ k.float().mT * SCALE, dim=-1).to(q.dtype)

    def batched() -> tuple[Tensor, Tensor]:
        return torch.matmul(q, k.mT), torch.matmul(p, v)

    def keys_first() -> tuple[Tensor, Tensor]:
        return torch.matmul(k, q.mT), torch.matmul(p, v)

    def by_request() -> list[tuple[Tensor, Tensor]]:
        requests = zip(q, k, p, v, strict=True)
        return [(torch.matmul(q_, k_.T), torch.matmul(p_, v_)) for q_, k_, p_, v_ in requests]

    return [
        Baseline("matmul q·Kᵀ", batched),
        Baseline("matmul K·qᵀ", keys_first),
        Baseline("matmul by request", by_request),
    ]


@dataclass(frozen=True)
class Prefill(Workload):
    """`batch` prompts of `tokens` tokens each, causal, expanded."""

    dtype: str
    batch: int
    tokens: int
    heads: int = 16

    op = "mla_prefill"

    @property
    def name(self) -> str:
        return f"prefill-{self.dtype}-b{self.batch}-h{self.heads}-{self.tokens}"

    @property
    def flops(self) -> int:
        seen = self.tokens * (self.tokens + 1) // 2
        return 2 * self.batch * self.heads * seen * (D_N + D_R + D_V)

    @property
    def bytes(self) -> int:
        per_head = (D_N + D_R) + D_N + 2 * D_V
        elements = self.batch * self.tokens * (self.heads * per_head + D_R)
        return elements * DTYPES[self.dtype].itemsize

    @property
    def min_speedup(self) -> float | None:
        return 1 / 1.2

    @property
    def small(self) -> Prefill:
        return replace(self, heads=2, tokens=50)

    def build_case(self) -> BenchmarkCase:
        generator = torch.Generator().manual_seed(SEED)
        total = self.batch * self.tokens

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(DTYPES[self.dtype])

        q, k_nope = normal(total, self.heads, D_N + D_R), normal(total, self.heads, D_N)
        k_rope, v = normal(total, D_R), normal(total, self.heads, D_V)
        starts = torch.arange(0, total + 1, self.tokens, dtype=torch.int32)

        def call() -> tuple[Tensor, Tensor]:
            return mla_prefill(
                q, k_nope, k_rope, v, starts, starts, softmax_scale=SCALE, backend="cpu"
            )

        def samples() -> Iterator[Sample]:
            for token in _some_tokens(self.batch, self.tokens):
                keys = slice(token - token % self.tokens, token + 1)
                yield token_sample(token, keys, q, k_nope, k_rope, v, SCALE)

        def check() -> None:
            assert_correct(("out", "lse"), call(), samples())

        return BenchmarkCase(call, self._sdpa(q, k_nope, k_rope, v), check)

    def _sdpa(self, q: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor) -> list[Baseline]:
        k = torch.cat([k_nope, k_rope[:, None].expand(-1, self.heads, -1)], dim=-1)

        def heads_first(tensor: Tensor) -> Tensor:
            return tensor.view(self.batch, self.tokens, self.heads, -1).transpose(1, 2).contiguous()

        def attention(values: Tensor) -> Callable[[], Tensor]:
            tensors = heads_first(q), heads_first(k), heads_first(values)
            return partial(scaled_dot_product_attention, *tensors, is_causal=True, scale=SCALE)

        return [
            Baseline("SDPA", attention(v)),
            Baseline("SDPA, V padded", attention(pad(v, (0, D_N + D_R - D_V)))),
        ]


def _some_tokens(batch: int, tokens: int) -> list[int]:
    """Tokens of the first and the last request: both ends, and both sides of tile boundaries."""
    places = {0, 1, 63, 64, 127, 128, 511, 512, tokens // 2, tokens - 2, tokens - 1}
    inside = [place for place in sorted(places) if place < tokens]
    return [request * tokens + place for request in sorted({0, batch - 1}) for place in inside]


WORKLOADS: tuple[Workload, ...] = (
    Decode("bf16", "bf16"),
    Decode("fp16", "fp16"),
    Decode("fp32", "fp32"),
    Decode("bf16", "fp8_block128"),
    *(
        Prefill(dtype, batch, tokens)
        for dtype in ("bf16", "fp32")
        for batch, tokens in ((1, 1024), (2, 1024), (1, 2048))
    ),
)
