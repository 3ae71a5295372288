"""The matrix products and the attention of a step, each timed alone: what the step cannot beat
unless it overlaps them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mlakit.model.masks import CAUSAL
from mlakit.ops import mla_decode, mla_prefill
from mlakit.plan import DecodePlanTensors, plan_context
from mlakit.steps import CachedBatch, LayerWeights
from mlakit.steps.context import KeyRange, pick_part_sizes
from mlakit.steps.decode import absorb
from mlakit.steps.prefill import key_ranges
from mlakit.tools.bench import gpu
from mlakit.tools.bench.pool import MODEL, ROW, SCALE
from mlakit.tools.bench.report import MLAKIT
from mlakit.tools.bench.shapes import Batch
from mlakit.tools.bench.suite import Baseline

GEMMS, ATTENTION, SUM = "GEMMs alone", "attention alone", "GEMMs + attention"
D_C, D_N, D_R = MODEL.kv_lora_rank, MODEL.qk_nope_head_dim, MODEL.qk_rope_head_dim
D_V = MODEL.v_head_dim
MIN_TOKENS, MIN_BATCH = 2048, 16  # of prefill and of decode: with fewer, launches count


def max_over_sum(batch: Batch) -> float:
    """The target: a step takes at most this times as long as its kernels alone."""
    return 1.10 if batch.tokens >= MIN_TOKENS or len(batch.q_lens) >= MIN_BATCH else 1.20


def with_sum(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """`seconds` by implementation, with the sum of the kernels."""
    if GEMMS not in seconds or ATTENTION not in seconds:
        return seconds
    pairs = zip(seconds[GEMMS], seconds[ATTENTION], strict=True)
    rest = {name: each for name, each in seconds.items() if name != MLAKIT}
    return {MLAKIT: seconds[MLAKIT], SUM: [sum(pair) for pair in pairs], **rest}


def _baselines(gemms: Callable[[], object], attention: Callable[[], object]) -> list[Baseline]:
    calls = {GEMMS: gemms, ATTENTION: attention}
    return [Baseline(name, call, sets_target=False) for name, call in calls.items()]


def decode_kernels(
    q: Tensor, weights: LayerWeights, batch: CachedBatch, plan: DecodePlanTensors | None
) -> list[Baseline]:
    """Absorb and up-projection; attention with its merge."""
    absorbed = gpu.normal(gpu.generator(), *q.shape[:2], ROW.width)
    attended = absorbed[..., :D_C].contiguous()
    out = q.new_empty(*q.shape[:2], D_V)

    def multiply() -> None:
        absorb(q, weights, "auto")
        weights.up.w_uv.apply(attended, out=out)

    def attend() -> object:
        return mla_decode(
            absorbed,
            batch.cache,
            batch.page_table,
            batch.kv_lens,
            q_starts=batch.q_starts,
            softmax_scale=SCALE,
            plan=plan,
        )

    return _baselines(multiply, attend)


def prefill_kernels(batch: Batch, weights: LayerWeights) -> list[Baseline]:
    """Up-projections and attentions of all parts, on random K and V of one part."""
    generator, heads = gpu.generator(), weights.up.geometry.num_heads
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
    latent, k_rope = rows.split([D_C, D_R], dim=-1)
    size = max(part.keys.num_rows * part.num_heads for part in parts) * sizes.columns_per_head
    buffer = gpu.normal(generator, size)
    q = gpu.normal(generator, batch.tokens, heads, D_N + D_R)
    out = q.new_empty(batch.tokens, heads, D_V)
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

    return _baselines(expand, attend)


def _views(buffer: Tensor, rows: int, heads: int) -> tuple[Tensor, Tensor]:
    shape = (rows, heads, D_N + D_V)
    size = shape[0] * shape[1] * shape[2]
    k_nope, v = buffer[:size].view(shape).split([D_N, D_V], dim=-1)
    return k_nope, v


def _starts(keys: KeyRange) -> list[int]:
    starts = [0]
    for first, last in zip(keys.first, keys.last, strict=True):
        starts.append(starts[-1] + last - first)
    return starts
