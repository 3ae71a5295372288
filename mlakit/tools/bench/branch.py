"""The suite `branch`: a layer's whole step without its projections, `mla_step`, on a GPU.

Step    append the new tokens, absorb or expand the up-projection, attend, project up
Plan    made before the clock starts: all layers of a step share it
Bytes   cached rows, weights, q, the raw latents and out once
FLOPs   attention and the up-projection, absorbed or expanded as each request computes them
Kernels the products and the attention alone, and their sum; mixed batches have none
Check   some tokens, all heads, and their cache rows against the float64 oracle
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mlakit.cache import request_slots
from mlakit.formats import Format, row_codec
from mlakit.model.rope import rope_table
from mlakit.ops.decode_plan import plan_mla_decode
from mlakit.steps import CachedBatch, LayerWeights, StepPlan, mla_step, plan_step
from mlakit.steps.weights import UpProjection
from mlakit.tools.bench import branch_oracle, correctness, gpu, step_kernels
from mlakit.tools.bench.pool import MODEL, ROW, SCALE, filled_pages
from mlakit.tools.bench.shapes import Batch, Shape
from mlakit.tools.bench.suite import BenchmarkCase, Workload

D_C, D_N, D_R = MODEL.kv_lora_rank, MODEL.qk_nope_head_dim, MODEL.qk_rope_head_dim
D_V = MODEL.v_head_dim
MAX_CHECKED = 2  # queries per request


@dataclass(frozen=True)
class Step(Workload):
    """One layer's step over a batch of requests."""

    batch: Batch
    heads: int = 128
    format: Format = "bf16"
    page_size: int = 64

    op = "mla_step"

    @property
    def name(self) -> str:
        page = f"-page{self.page_size}" if self.page_size != 64 else ""
        return f"step-{self.format}-{self.batch.label(self.heads)}{page}"

    target_baseline = step_kernels.SUM

    @property
    def min_speedup(self) -> float:
        return 1 / step_kernels.max_over_sum(self.batch)

    def with_derived(self, seconds: dict[str, list[float]]) -> dict[str, list[float]]:
        return step_kernels.with_sum(seconds)

    @property
    def flops(self) -> int:
        lengths = list(zip(self.batch.q_lens, self.batch.kv_lens, strict=True))
        decoding = [lengths[b] for b in self._plan.decode]
        prefilling = [lengths[b] for b in self._plan.prefill]
        absorbed = sum(new * (D_C * (D_N + D_V) + kv * (ROW.width + D_C)) for new, kv in decoding)
        seen = sum(new * kv - new * (new - 1) // 2 for new, kv in prefilling)
        expanded = sum(kv for _, kv in prefilling) * D_C * (D_N + D_V) + seen * (D_N + D_R + D_V)
        return 2 * self.heads * (absorbed + expanded)

    @property
    def bytes(self) -> int:
        cached = sum(self.batch.kv_lens) * row_codec(self.format, ROW).bytes_per_token
        weights = self.heads * (D_N + D_V) * D_C
        per_token = self.heads * (D_N + D_R + D_V) + ROW.width
        return cached + 2 * (weights + self.batch.tokens * per_token)

    @property
    def small(self) -> Workload:
        return replace(self, batch=self.batch.small, heads=min(self.heads, 4))

    @property
    def _plan(self) -> StepPlan:
        return plan_step(self.batch.kv_lens, self.batch.q_lens)

    def build_case(self) -> BenchmarkCase:
        generator, tokens = gpu.generator(), self.batch.tokens
        weights = layer_weights(generator, self.heads, max(self.batch.kv_lens))
        cache, page_table = filled_pages(self.batch.kv_lens, self.page_size, self.format, generator)
        kv_lens, starts = gpu.int32(self.batch.kv_lens), gpu.int32(self.batch.starts)
        batch = CachedBatch(cache, page_table, kv_lens, starts)
        new_q = gpu.normal(generator, tokens, self.heads, D_N + D_R)
        q = new_q.clone()  # rotated in place, again at every call
        kv = gpu.normal(generator, tokens, ROW.width)
        plan, decode_plan = self._plan, None
        if not plan.prefill:
            decode_plan = plan_mla_decode(
                cache,
                page_table,
                kv_lens,
                heads=self.heads,
                num_tokens=tokens,
                q_starts=starts,
                dtype=q.dtype,
            )

        def call() -> Tensor:
            return mla_step(
                q, kv, weights, batch, plan=plan, decode_plan=decode_plan, overwrite_q=True
            )

        def check() -> None:
            q.copy_(new_q)
            out = call()
            for token, query, decodes in self._queries(new_q, batch, plan):
                branch_oracle.assert_row_appended(query, kv[token], weights, cache.codec)
                branch_oracle.assert_output_correct(out, token, query, weights, is_decode=decodes)

        baselines = [gpu.read_baseline(self.bytes)]
        if not plan.prefill:
            baselines += step_kernels.decode_kernels(new_q, weights, batch, decode_plan)
        elif not plan.decode:
            baselines += step_kernels.prefill_kernels(self.batch, weights)
        return BenchmarkCase(call, baselines, check)

    def _queries(
        self, q: Tensor, batch: CachedBatch, plan: StepPlan
    ) -> Iterator[tuple[int, branch_oracle.Query, bool]]:
        """Some new tokens: (token, its query for the oracle, does its request decode?)."""
        layer = batch.cache.layer(0)
        assert isinstance(batch.page_table, Tensor)
        for request in self.batch.checked_requests:
            q_len = self.batch.q_lens[request]
            before = self.batch.kv_lens[request] - q_len
            for place in correctness.evenly_spaced(q_len, MAX_CHECKED):
                token, seen = self.batch.starts[request] + place, before + place + 1
                slots = request_slots(batch.page_table, self.page_size, request, 0, seen)
                rows = layer.read(slots, torch.float64)
                query = branch_oracle.Query(q[token], before + place, rows, before)
                yield token, query, request in plan.decode


def layer_weights(generator: torch.Generator, heads: int, positions: int) -> LayerWeights:
    matrix = gpu.normal(generator, heads * (D_N + D_V), D_C, dtype=torch.float32)
    matrix = (matrix / D_C**0.5).to(torch.bfloat16)
    return LayerWeights(
        up=UpProjection.from_checkpoint(matrix, replace(MODEL, num_heads=heads)),
        gamma=gpu.normal(generator, D_C),
        freqs=rope_table(MODEL, positions, device=gpu.DEVICE),
        softmax_scale=SCALE,
    )


def of_shape(shape: Shape) -> tuple[Workload, ...]:
    given = shape.accept("branch", "heads", "format", "page_size")
    return (Step(shape.batch, **given),)  # type: ignore[arg-type]  # checked by their options


WORKLOADS: tuple[Workload, ...] = (
    Step(Batch.of(128, 1, 4096)),
    Step(Batch.of(128, 1, 4096), format="fp8_block128"),
    Step(Batch.of(128, 1, 8192), heads=16),
    Step(Batch.of(1, 1, 65536)),
    Step(Batch.of(4, 4096, 4096)),
    Step(Batch.of(1, 2048, 16384)),
    Step(Batch.parse("64q1s4k+2q1ks2k")),
)
