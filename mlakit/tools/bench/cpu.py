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

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from mlakit.cache import PagedLatentCache, request_slots
from mlakit.formats import FLOAT_FORMATS
from mlakit.ops import mla_decode, mla_prefill
from mlakit.tools.bench import decode, gpu, prefill
from mlakit.tools.bench.pool import ROW, SCALE
from mlakit.tools.bench.prefill import D_N, D_R, D_V, Tensors
from mlakit.tools.bench.problems import DensePrefill
from mlakit.tools.bench.shapes import Batch
from mlakit.tools.bench.suite import Baseline, BenchmarkCase, Workload

Call = Callable[[], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Decode(decode.Decode):
    """One new token of each request."""

    target_baseline = None

    def build_case(self) -> BenchmarkCase:
        with gpu.on(gpu.CPU):
            return super().build_case()

    def operation(
        self, q: Tensor, cache: PagedLatentCache, page_table: Tensor, kv_lens: Tensor
    ) -> tuple[Call, list[Baseline]]:
        layer, page_size = cache.layer(0), cache.page_size
        slots = [
            request_slots(page_table, page_size, request, 0, kv_len)
            for request, kv_len in enumerate(self.batch.kv_lens)
        ]
        k = torch.stack([layer.read(own, self.dtype) for own in slots])
        variants = _products(q, k)
        # without a target one baseline is enough
        has_target = self.format in FLOAT_FORMATS.values()
        return (
            lambda: mla_decode(q, cache, page_table, kv_lens, softmax_scale=SCALE),
            variants if has_target else variants[:1],
        )


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
class Prefill(prefill.Prefill):
    """Prompts of one length, causal."""

    target_baseline = None
    max_checked = 20

    def build_case(self) -> BenchmarkCase:
        with gpu.on(gpu.CPU):
            return super().build_case()

    def operation(self, tensors: Tensors, problem: DensePrefill) -> tuple[Call, list[Baseline]]:
        starts = problem.starts

        def heads_first(tensor: Tensor) -> Tensor:
            by_prompt: Tensor = tensor.unflatten(0, (self.batch.size, -1))
            return by_prompt.transpose(1, 2).contiguous()

        def attention(values: Tensor) -> Callable[[], Tensor]:
            each = heads_first(problem.q), heads_first(problem.k), heads_first(values)
            return partial(scaled_dot_product_attention, *each, is_causal=True, scale=SCALE)

        return lambda: mla_prefill(*tensors, starts, starts, softmax_scale=SCALE), [
            Baseline("SDPA", attention(problem.v)),
            Baseline("SDPA, V padded", attention(pad(problem.v, (0, D_N + D_R - D_V)))),
        ]


WORKLOADS: tuple[Workload, ...] = (
    *(
        Decode(Batch.of(4, 1, 4096), 16, format, dtype=dtype, min_speedup=1 / 1.5)
        for dtype, format in FLOAT_FORMATS.items()
    ),
    Decode(Batch.of(4, 1, 4096), 16, "fp8_block128"),
    *(
        Prefill(Batch.of(count, length, length), 16, dtype=dtype, min_speedup=1 / 1.2)
        for dtype in (torch.bfloat16, torch.float32)
        for count, length in ((1, 1024), (2, 1024), (1, 2048))
    ),
)
