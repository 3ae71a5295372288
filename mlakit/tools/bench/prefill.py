"""The suite `prefill`: expanded attention of whole prompts on a GPU, head dimensions 192 and 128.

Keys    mlakit takes k_nope and k_rope; for peers they are concatenated before the clock starts
Bytes   q, k_nope, k_rope, v and out once
FLOPs   2 · heads · length² · (192 + 128) per prompt, half of it if causal
Check   some tokens, all heads, against the float64 oracle
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from mlakit.formats import FLOAT_FORMATS
from mlakit.model.masks import CAUSAL, NULL
from mlakit.ops import mla_prefill
from mlakit.tools.bench import correctness, gpu
from mlakit.tools.bench.pool import MODEL, SCALE
from mlakit.tools.bench.problems import DensePrefill
from mlakit.tools.bench.shapes import Batch, Shape, even_lengths
from mlakit.tools.bench.suite import Baseline, BenchmarkCase, Workload

D_N, D_R, D_V = MODEL.qk_nope_head_dim, MODEL.qk_rope_head_dim, MODEL.v_head_dim
SMALL_LENGTH = 70

Tensors: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]  # q, k_nope, k_rope, v


@dataclass(frozen=True)
class Prefill(Workload):
    """Prompts without cached context.

    min_speedup  target for FA3's time / mlakit's time; None: no target
    dtype        of queries, keys and values
    """

    batch: Batch
    heads: int
    causal: bool = True
    min_speedup: float | None = None
    dtype: torch.dtype = torch.bfloat16

    op = "mla_prefill"
    target_baseline: ClassVar[str | None] = "fa3"
    max_checked: ClassVar[int] = 4  # tokens per prompt

    @property
    def name(self) -> str:
        return f"prefill-{FLOAT_FORMATS[self.dtype]}-{self.label}"

    @property
    def label(self) -> str:
        mask = "causal" if self.causal else "full"
        if len(self.batch.groups) > 1:
            return f"{self.batch}-h{self.heads}-{mask}"
        (group,) = self.batch.groups
        return f"b{group.count}-h{self.heads}-{group.kv_len}-{mask}"

    @property
    def flops(self) -> int:
        pairs = sum(length**2 for length in self.batch.kv_lens)
        return 2 * self.heads * pairs * (D_N + D_R + D_V) // (2 if self.causal else 1)

    @property
    def bytes(self) -> int:
        per_head = (D_N + D_R) + D_N + 2 * D_V
        return self.dtype.itemsize * self.batch.tokens * (self.heads * per_head + D_R)

    @property
    def small(self) -> Workload:
        small = Batch.of(min(self.batch.size, 2), SMALL_LENGTH, SMALL_LENGTH)
        return replace(self, batch=small, heads=min(self.heads, 4), min_speedup=None)

    def build_case(self) -> BenchmarkCase:
        q, k_nope, k_rope, v = tensors = self.tensors()
        joined = torch.cat([k_nope, k_rope[:, None].expand(-1, self.heads, -1)], dim=-1)
        problem = DensePrefill(
            *(q, joined, v, gpu.int32(self.batch.starts)),
            *(max(self.batch.kv_lens), SCALE, self.causal),
        )
        call, baselines = self.operation(tensors, problem)

        def samples() -> Iterator[correctness.Sample]:
            return self._samples(*tensors)

        return BenchmarkCase(
            call,
            baselines,
            check=lambda: correctness.assert_correct(("out", "lse"), call(), samples()),
            problem=problem,
            peer_error=lambda output: correctness.peer_error(output, samples()),
        )

    def tensors(self) -> Tensors:
        generator, tokens, heads = gpu.generator(), self.batch.tokens, self.heads
        shapes = ((heads, D_N + D_R), (heads, D_N), (D_R,), (heads, D_V))
        q, k_nope, k_rope, v = (
            gpu.normal(generator, tokens, *each, dtype=self.dtype) for each in shapes
        )
        return q, k_nope, k_rope, v

    def operation(
        self, tensors: Tensors, problem: DensePrefill
    ) -> tuple[Callable[[], tuple[Tensor, Tensor]], list[Baseline]]:
        """The call of mlakit, and its baselines; `problem` has the joined keys."""
        mask, starts = CAUSAL if self.causal else NULL, problem.starts
        return lambda: mla_prefill(*tensors, starts, starts, softmax_scale=SCALE, mask=mask), []

    def _samples(
        self, q: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor
    ) -> Iterator[correctness.Sample]:
        ends = list(pairwise(self.batch.starts))
        for request in self.batch.checked_requests:
            start, end = ends[request]
            for place in correctness.evenly_spaced(end - start, self.max_checked):
                token = start + place
                keys = slice(start, token + 1 if self.causal else end)
                yield correctness.token_sample(token, keys, q, k_nope, k_rope, v, SCALE)


def of_shape(shape: Shape) -> tuple[Workload, ...]:
    given = {"heads": 128, **shape.accept("prefill", "heads", "causal")}
    batch = even_lengths("prefill", shape.batch)
    return (Prefill(batch, **given),)  # type: ignore[arg-type]  # checked by their options


def _prompts(count: int, heads: int, length: int, causal: bool, min_speedup: float) -> Prefill:
    return Prefill(Batch.of(count, length, length), heads, causal, min_speedup)


WORKLOADS: tuple[Workload, ...] = (
    _prompts(8, 128, 2048, True, 1.08),
    _prompts(4, 128, 4096, True, 1.04),
    _prompts(4, 128, 4096, False, 1.03),
    _prompts(2, 128, 8192, True, 1.02),
    _prompts(2, 128, 8192, False, 1.03),
    _prompts(1, 128, 16384, True, 1.01),
    _prompts(4, 16, 4096, True, 1.02),
)
