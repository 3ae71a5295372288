"""Prints the rows of a report as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import RenderableType

from mlakit.tools.bench.report import MLAKIT, LeftOut, Memory, Row
from mlakit.tools.columns import Column, fitting_table

PERCENTILES = "median, 20th and 80th percentile of the rounds"
SPEEDUP = f"speedup: time of the implementation / time of {MLAKIT} in the same round"
QUICK = "--quick: tiny problems and few rounds. This shows that the suite runs, not how fast it is."


def table(rows: Sequence[Row], unit: str, width: int, *, is_quick: bool = False) -> RenderableType:
    """Times in `unit`, ms or us; a speedup above 1 means that mlakit is faster."""
    divisor = {"ms": 1e3, "us": 1.0}[unit]
    rate, rate_divisor = ("GFLOP/s", 1.0) if unit == "ms" else ("TFLOP/s", 1e3)
    has_roofline = any(row.roofline is not None for row in rows)
    has_target = any(row.min_speedup is not None and row.speedup is not None for row in rows)
    caption = f"{unit}: {PERCENTILES}; {SPEEDUP}"
    columns = (
        Column("workload", is_number=False),
        Column("implementation", is_number=False),
        Column(unit),
        *(Column(end, rank=6) for end in ("p20", "p80")),
        Column(rate, rank=4),
        Column("GB/s", rank=3),
        *([Column("% roof", rank=2)] if has_roofline else []),
        Column("rounds", rank=7),
        Column("speedup"),
        *(Column(end, rank=5) for end in ("p20", "p80")),
        *([Column("target", rank=1, folds_at=10)] if has_target else []),
    )
    lines = (
        [*_cells(row, divisor, rate_divisor, has_roofline), *([target_text(row)] * has_target)]
        for row in rows
    )
    caption = f"{QUICK}\n{caption}" if is_quick else caption
    return fitting_table(columns, lines, width, caption=caption)


def _cells(row: Row, divisor: float, rate_divisor: float, has_roofline: bool) -> list[str]:
    times = [digits(us / divisor) for us in (row.us.p50, row.us.p20, row.us.p80)]
    speedup = row.speedup
    speedups = [""] * 3
    if speedup is not None:
        speedups = [times_of(each) for each in (speedup.p50, speedup.p20, speedup.p80)]
    rates = [digits(row.gflops / rate_divisor), digits(row.gbytes_per_s)]
    share = [percent(row.roofline)] if has_roofline else []
    figures = [*times, *rates, *share, str(row.rounds), *speedups]
    return [row.workload, row.implementation, *figures]


def left_out_lines(left_out: Iterable[LeftOut]) -> list[str]:
    """A line per implementation and reason; a reason of many workloads counts them."""
    workloads: dict[tuple[str, str], list[str]] = {}
    for each in left_out:
        workloads.setdefault((each.implementation, each.reason), []).append(each.workload)
    return [
        f"{names[0] if len(names) == 1 else f'{len(names)} workloads'}: "
        f"{implementation} not timed, {reason}"
        for (implementation, reason), names in workloads.items()
    ]


def memory_lines(memory: Iterable[Memory]) -> list[str]:
    """A line per implementation: its peak, and what it is made of."""
    return [
        f"{each.workload}: {each.implementation} needs {_gb(each.use.peak)} GB: weights "
        f"{_gb(each.use.weights)}, cache {_gb(each.use.cache)}, step {_gb(each.use.step)}"
        for each in memory
    ]


def _gb(count: int) -> str:
    return digits(count / 1e9)


def target_text(row: Row) -> str:
    """Whether the speedup reaches its target; a workload may meet its bandwidth target instead."""
    if row.min_speedup is None or row.speedup is None:
        return ""
    if row.speedup.p50 >= row.min_speedup:
        return f"≥ {times_of(row.min_speedup)}"
    below = f"below {times_of(row.min_speedup)}"
    return f"{below}, bandwidth reached" if row.met else below


def times_of(speedup: float) -> str:
    """Such as 1.18x."""
    return f"{speedup:.2f}x" if speedup < 10 else f"{speedup:.0f}x"


def digits(value: float) -> str:
    """Three significant digits, never in exponents."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f}"
