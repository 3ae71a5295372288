"""The time of attention over a batch, interpolated between times measured on an H200.

Dense attention is taken to depend on the heads and on the tokens of all requests together: rows of
the grid with as many tokens differ by up to 20 %, and their median stands for them. FP8 rows take
the bf16 time multiplied by a factor that was measured with 16 and 128 heads. Sparse attention is
the sum of logits, top-k and attention over 2048 rows, of `mlakit bench sparse-step` and
`sparse-decode`.

Between two measured points the logarithms are interpolated linearly. Below the first point the time
is that of the first; above the last it is proportional.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, log
from pathlib import Path
from statistics import median

FILE = Path(__file__).with_name("h200.json")
# the reports in docs/data, and the implementations of their rows that are taken
SOURCES = {
    "h200-grid.json": ("mlakit",),
    "h200-decode.json": ("mlakit",),
    "h200-sparse-step.json": ("logits", "top-k", "attend"),
    "h200-sparse-decode.json": ("mlakit",),
}
GPU = "H200"
ROW = (512, 64)  # columns of the latents in all of them
TOPK = 2048
SPARSE_FORMAT = "fp8_block128"
NAME = re.compile(
    r"(?P<kind>[a-z0-9_-]+?)-b(?P<b>\d+)-h(?P<h>\d+)-(?P<n>\d+)(-top2048)? (?P<row>\S+)"
)

Points = Sequence[tuple[float, float]]


def interpolated(points: Points, x: float) -> float:
    """The value at `x` of points (x, y), ascending in x, as said above."""
    (first, lowest), (last, highest) = points[0], points[-1]
    if x <= first:
        return lowest
    if x >= last:
        return highest * x / last
    at = next(i for i, point in enumerate(points) if point[0] >= x)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    share = (log(x) - log(x0)) / (log(x1) - log(x0))
    return exp(log(y0) + share * (log(y1) - log(y0)))


@dataclass(frozen=True)
class KernelTimes:
    """Times in us.

    dense    by heads: (tokens, us)
    factors  by format: (heads, time / time of bf16)
    logits   by context: (requests, us); `topk` too
    attend   over 2048 rows, by heads: (requests, us)
    """

    dense: dict[int, Points]
    factors: dict[str, Points]
    logits: dict[int, Points]
    topk: dict[int, Points]
    attend: dict[int, Points]
    read_gb_s: float
    bf16_tflops: float

    def dense_us(self, heads: int, tokens: int, format: str = "bf16") -> float:
        """Decode attention of one query per request over `tokens` tokens in all."""
        us = _surface(self.dense, heads, tokens)
        if format == "bf16":
            return us
        points = self.factors[format]
        return us * interpolated(points, min(heads, points[-1][0]))

    def sparse_us(self, heads: int, requests: int, context: int) -> float:
        """Logits, top-k and attention over the best 2048 rows of each request."""
        return (
            _surface(self.logits, context, requests)
            + _surface(self.topk, context, requests)
            + _surface(self.attend, heads, requests)
        )


def _surface(lines: dict[int, Points], key: float, x: float) -> float:
    """Interpolated along each line at `x`, then between the lines at `key`."""
    return interpolated([(each, interpolated(lines[each], x)) for each in sorted(lines)], key)


@cache
def measured_times() -> KernelTimes:
    """The times in h200.json."""
    reports = json.loads(FILE.read_text(encoding="utf-8"))
    grid = _rows(reports, "h200-grid.json")
    decode = _rows(reports, "h200-decode.json")
    steps = _rows(reports, "h200-sparse-step.json")
    few = [each for each in _rows(reports, "h200-sparse-decode.json") if each[2] < 128]
    bf16 = {(b, h, n): us for kind, b, h, n, _, us in decode if kind == "decode-bf16"}
    factors: dict[str, dict[float, list[float]]] = {}
    for kind, b, h, n, _, us in decode:
        name = kind.removeprefix("decode-")
        factors.setdefault(name, {}).setdefault(h, []).append(us / bf16[b, h, n])
    ceilings = reports["h200-grid.json"]["ceilings"]
    attend = {(h, b): us for _, b, h, _, row, us in steps if row == "attend"}
    attend |= {(h, b): us for _, b, h, _, _, us in few}
    by_heads: dict[int, list[tuple[float, float]]] = {}
    for (h, b), us in sorted(attend.items()):
        by_heads.setdefault(h, []).append((b, us))
    return KernelTimes(
        dense=_lines([(h, b * n, us) for _, b, h, n, _, us in grid]),
        factors={
            name: sorted((h, median(found)) for h, found in heads.items())
            for name, heads in factors.items()
            if name != "bf16"
        },
        logits=_lines([(n, b, us) for _, b, _, n, row, us in steps if row == "logits"]),
        topk=_lines([(n, b, us) for _, b, _, n, row, us in steps if row == "top-k"]),
        # with 32 and 64 heads there is one point each: 16 and 128 heads have several
        attend={h: points for h, points in by_heads.items() if len(points) > 1},
        read_gb_s=ceilings["read_gb_s"],
        bf16_tflops=ceilings["bf16_tflops"],
    )


def _rows(
    reports: dict[str, dict[str, dict[str, float]]], file: str
) -> list[tuple[str, int, int, int, str, float]]:
    """(kind, requests, heads, tokens, implementation, us) of rows with one query per request."""
    found = []
    for name, us in reports[file]["us"].items():
        match = NAME.fullmatch(name)
        if match:
            sizes = (int(match[each]) for each in "bhn")
            found.append((match["kind"], *sizes, match["row"], us))
    return found  # type: ignore[return-value]  # three sizes


def _lines(found: list[tuple[int, int, float]]) -> dict[int, Points]:
    """(key, x, us) as lines by key; the median of those with the same key and x."""
    grouped: dict[int, dict[int, list[float]]] = {}
    for key, x, us in found:
        grouped.setdefault(key, {}).setdefault(x, []).append(us)
    return {
        key: sorted((x, median(us)) for x, us in points.items()) for key, points in grouped.items()
    }
