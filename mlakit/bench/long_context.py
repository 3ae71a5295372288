"""The suite `long-context`: a chunk of a prompt over a long cached context, `prefill_branch`.

Step    append 2048 new tokens, expand the context part by part, attend, merge
Parts   what the step itself does, without append, gather and merge: "GEMMs" is the up-projection of
        every part, "attention" the attention over it, and their sum what the step cannot beat
        unless it overlaps them
Memory  K and V of a part, in two buffers; the whole context would need 64 KB per token
Check   some tokens, all heads, and their cache rows against the float64 oracle
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mlakit.bench import branch, gpu
from mlakit.bench.pool import ROW, SCALE
from mlakit.bench.report import MLAKIT
from mlakit.bench.shapes import Batch, Shape
from mlakit.bench.suite import Baseline, BenchmarkCase, Workload
from mlakit.branches.context import KeyRange, pick_part_sizes
from mlakit.branches.prefill import key_ranges
from mlakit.masks import CAUSAL
from mlakit.ops import mla_prefill
from mlakit.plan import plan_context

GEMMS, ATTENTION, SUM = "GEMMs", "attention", "GEMMs + attention"
MAX_OVER_SUM = 1.10  # the step at most this times as long as its kernels alone


@dataclass(frozen=True)
class LongContext(branch.Step):
    """One layer's step of the newest tokens of a prompt."""

    @property
    def name(self) -> str:
        return super().name.replace("step-", "long-context-", 1)

    target_baseline = SUM

    @property
    def min_speedup(self) -> float:
        return 1 / MAX_OVER_SUM

    @property
    def small(self) -> Workload:
        return replace(self, batch=self.batch.small, heads=min(self.heads, 4))

    def with_derived(self, seconds: dict[str, list[float]]) -> dict[str, list[float]]:
        found = dict(seconds)
        if GEMMS in found and ATTENTION in found:
            pairs = zip(found[GEMMS], found[ATTENTION], strict=True)
            found = {MLAKIT: found.pop(MLAKIT), SUM: [sum(pair) for pair in pairs], **found}
        return found

    def build_case(self) -> BenchmarkCase:
        case = super().build_case()
        calls = dict(_kernels_alone(self.batch, self.heads))
        baselines = [Baseline(name, call, sets_target=False) for name, call in calls.items()]
        return replace(case, baselines=[*baselines, *case.baselines])


def _kernels_alone(batch: Batch, heads: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """The up-projections and the attentions of all parts, on random K and V of one part."""
    generator = gpu.generator()
    weights = branch.layer_weights(generator, heads, 1)
    plan = plan_context(batch.kv_lens, batch.q_lens)
    sizes = pick_part_sizes(
        weights.up.geometry,
        tokens=batch.tokens,
        itemsize=torch.bfloat16.itemsize,
        head_group=1,
    )
    ranges = key_ranges(plan, CAUSAL, sizes.max_rows)
    parts = [part for keys in ranges for part in sizes.parts(keys)]
    most = max(keys.num_rows for keys in ranges)
    rows = gpu.normal(generator, most, ROW.width)
    latent, k_rope = rows.split([branch.D_C, branch.D_R], dim=-1)
    size = max(part.keys.num_rows * part.num_heads for part in parts) * sizes.columns_per_head
    buffer = gpu.normal(generator, size)
    q = gpu.normal(generator, batch.tokens, heads, branch.D_N + branch.D_R)
    out = q.new_empty(batch.tokens, heads, branch.D_V)
    q_starts = gpu.int32(batch.starts)
    kv_starts = {keys: gpu.int32(_starts(keys)) for keys in ranges}

    def expand() -> None:
        for part in parts:
            rows = part.keys.num_rows
            weights.up.expand(latent[:rows], heads=part.heads, buffer=buffer)

    def attend() -> None:
        for part in parts:
            rows = part.keys.num_rows
            k_nope, v = _views(buffer, rows, part.num_heads)
            mla_prefill(
                q[:, part.heads],
                k_nope,
                k_rope[:rows],
                v,
                q_starts,
                kv_starts[part.keys],
                softmax_scale=SCALE,
                mask=part.keys.mask,
                out=out[:, part.heads],
            )

    yield GEMMS, expand
    yield ATTENTION, attend


def _views(buffer: Tensor, rows: int, heads: int) -> tuple[Tensor, Tensor]:
    shape = (rows, heads, branch.D_N + branch.D_V)
    size = shape[0] * shape[1] * shape[2]
    k_nope, v = buffer[:size].view(shape).split([branch.D_N, branch.D_V], dim=-1)
    return k_nope, v


def _starts(keys: KeyRange) -> list[int]:
    starts = [0]
    for first, last in zip(keys.first, keys.last, strict=True):
        starts.append(starts[-1] + last - first)
    return starts


def of_shape(shape: Shape) -> tuple[Workload, ...]:
    given = shape.accept("long-context", "heads", "format", "page_size")
    return (LongContext(shape.batch, **given),)  # type: ignore[arg-type]  # checked by their options


CHUNK = 2048  # new tokens
CONTEXTS = (16 << 10, 32 << 10, 64 << 10, 128 << 10)  # tokens, the new ones included
WORKLOADS: tuple[Workload, ...] = (
    *(LongContext(Batch.of(1, CHUNK, context)) for context in CONTEXTS),
    LongContext(Batch.of(1, CHUNK, 128 << 10), heads=16),
    LongContext(Batch.of(4, CHUNK, 32 << 10)),
)
