"""The time of attention in a decode step, interpolated between measured times of the kernels.

Dense models: MLA layers × the time of heads · DCP / TP heads over requests · ceil(context / DCP)
tokens. Sparse models: logits, top-k and attention over 2048 rows, on every rank, whatever TP.

Times are interpolated linearly between the logarithms of measured points. Below the first point the
time is that of the first; above the last it is proportional.
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
from mlakit.tools.memory.layers import LayerCounts

FILE = Path(__file__).with_name("h200.json")
ROW = (512, 64)  # columns of the latents in all measured rows
TOPK = 2048
SPARSE_FORMAT = "fp8_block128"

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


def attention_us(
    geometry: MLAGeometry,
    layers: LayerCounts,
    *,
    format: str,
    heads: int,
    requests: int,
    context: int,
    times: KernelTimes | None = None,
) -> float | None:
    """Attention of all layers on a rank, one query per request; None for rows not measured.

    heads    that the rank attends with: those of DCP ranks together
    context  tokens of a request on the rank
    """
    times = times or measured_times()
    if (geometry.kv_lora_rank, geometry.qk_rope_head_dim) != ROW:
        return None
    if not geometry.has_indexer:
        return layers.mla * times.dense_us(heads, requests * context, format)
    if format == SPARSE_FORMAT and geometry.index_topk == TOPK:
        return layers.mla * times.sparse_us(heads, requests, context)
    return None
