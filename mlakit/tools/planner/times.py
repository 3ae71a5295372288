"""The time of a decode step of one engine: measured attention, and a model of the rest.

    step        attention + weights + collectives + fixed
    attention   MLA layers × measured kernel time of heads · DCP / TP heads over requests ·
                ceil(context / DCP) tokens; sparse models: logits, top-k and attention over 2048
                rows, on every rank, whatever TP
    weights     the larger of the bytes that the step reads / TP / (`EFFICIENCY` · read bandwidth)
                and 2 · active parameters · requests / TP / (`EFFICIENCY` · bf16 rate)
    collectives per layer two all-reduces of the hidden states; with DCP per MLA layer an all-gather
                of the absorbed queries, one of lse, and a reduce-scatter of the outputs. Each takes
                latency + bytes that a rank receives / bandwidth of NVLink; nothing overlaps
    fixed       layers × `LAYER_US`: small kernels of a layer

Kernel times are interpolated linearly between the logarithms of measured points. Below the first
point the time is that of the first; above the last it is proportional.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, log
from pathlib import Path

from mlakit.model.geometry import MLAGeometry
from mlakit.tools.memory import LayerCounts
from mlakit.tools.planner.weights import Weights

FILE = Path(__file__).with_name("h200.json")
ROW = (512, 64)  # columns of the latents in all measured rows
TOPK = 2048
SPARSE_FORMAT = "fp8_block128"
# fitted to `mlakit bench layer` on an H200 (bf16 weights, 16 requests): a layer without its
# attention kernel takes 32 us and reads its weights at 0.87 of the bandwidth, with 16 heads and
# with 128. MLPs and experts were not measured: the efficiency is lowered and the time doubled.
EFFICIENCY = 0.7
LAYER_US = 60.0
NVLINK_GB_S, NVLINK_US = 450.0, 10.0  # the data sheet's bandwidth, and an assumed latency

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class KernelTimes:
    """Measured times in us, as lines of points.

    dense    by heads: (tokens of all requests, us), bf16 rows
    factors  by format: (heads, time / time of bf16)
    logits   by context: (requests, us); `topk` too
    attend   over 2048 rows, by heads: (requests, us)
    """

    dense: Mapping[str, Points]
    factors: Mapping[str, Points]
    logits: Mapping[str, Points]
    topk: Mapping[str, Points]
    attend: Mapping[str, Points]
    read_gb_s: float
    bf16_tflops: float

    def dense_us(self, heads: int, tokens: int, format: str = "bf16") -> float:
        """Decode attention of one query per request over `tokens` tokens in all."""
        us = _surface(self.dense, heads, tokens)
        if format not in self.factors:  # 16 bits
            return us
        points = self.factors[format]
        return us * interpolated(points, min(heads, points[-1][0]))

    def sparse_us(self, heads: int, requests: int, context: int) -> float:
        """Logits, top-k and attention over the best 2048 rows of each request."""
        lines = ((self.logits, context), (self.topk, context), (self.attend, heads))
        return sum(_surface(line, key, requests) for line, key in lines)


def interpolated(points: Points, x: float) -> float:
    """The value at `x` of points (x, y), ascending in x."""
    (first, lowest), (last, highest) = points[0], points[-1]
    if x <= first:
        return lowest
    if x >= last:
        return highest * x / last
    at = bisect_left(points, x, key=lambda point: point[0])
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    share = (log(x) - log(x0)) / (log(x1) - log(x0))
    return exp(log(y0) + share * (log(y1) - log(y0)))


def _surface(lines: Mapping[str, Points], key: float, x: float) -> float:
    """Interpolated along each line at `x`, then between the lines at `key`."""
    return interpolated([(float(each), interpolated(lines[each], x)) for each in lines], key)


@cache
def measured_times() -> KernelTimes:
    return KernelTimes(**json.loads(FILE.read_text(encoding="utf-8")))


def step_us(
    geometry: MLAGeometry,
    layers: LayerCounts,
    weights: Weights,
    *,
    format: str,
    tp: int,
    dcp: int,
    requests: int,
    context: int,
    times: KernelTimes | None = None,
) -> float | None:
    """A step that gives one token to each request; None for rows that were not measured."""
    times = times or measured_times()
    heads = -(-geometry.num_heads * dcp // tp)
    if (geometry.kv_lora_rank, geometry.qk_rope_head_dim) != ROW:
        return None
    if not geometry.has_indexer:
        attention = times.dense_us(heads, requests * -(-context // dcp), format)
    elif format == SPARSE_FORMAT and geometry.index_topk == TOPK:
        attention = times.sparse_us(heads, requests, context)
    else:
        return None
    read = weights.bytes_read(requests) / (times.read_gb_s * 1e3)
    multiplied = 2 * weights.active_parameters * requests / (times.bf16_tflops * 1e6)
    states = 2 * (tp - 1) / tp * requests * geometry.hidden_size * 2
    reduces = 2 * _collective_us(states) if tp > 1 else 0.0
    others = (dcp - 1) * requests * geometry.num_heads // tp  # heads of the other ranks
    # queries, the lse of each head that the rank attends with, and outputs
    received = (2 * sum(ROW) * others, 4 * others * dcp, 2 * ROW[0] * others)
    gathers = sum(map(_collective_us, received)) if dcp > 1 else 0.0
    return (
        layers.mla * (attention + gathers)
        + layers.total * (reduces + LAYER_US)
        + max(read, multiplied) / tp / EFFICIENCY
    )


def _collective_us(received: float) -> float:
    """A collective in which each rank receives so many bytes."""
    return NVLINK_US + received / NVLINK_GB_S / 1e3
