"""Reports as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import RenderableType

from mlakit.bench.report import OURS, LeftOut, Row
from mlakit.columns import Column, fitting_table


def table(rows: Sequence[Row], unit: str, width: int) -> RenderableType:
    """Times in `unit`, ms or us; a ratio below 1 says that mlakit is the faster one."""
    divisor = {"ms": 1e3, "us": 1.0}[unit]
    rate, rate_divisor = ("GFLOP/s", 1.0) if unit == "ms" else ("TFLOP/s", 1e3)
    has_roofline = any(row.roofline is not None for row in rows)
    columns = (
        Column("workload", is_number=False),
        Column("contender", is_number=False),
        Column(unit),
        *(Column(end, rank=6) for end in ("from", "to")),
        Column(rate, rank=4),
        Column("GB/s", rank=3),
        *([Column("% roof", rank=2)] if has_roofline else []),
        Column("rounds", rank=7),
        Column("ratio"),
        *(Column(end, rank=5) for end in ("from", "to")),
        Column("limit", rank=1, folds_at=10),
    )
    caption = (
        f"{unit}: median and the range of the middle three fifths of the rounds; "
        f"ratio: {OURS} / contender in the same round"
    )
    lines = (_cells(row, divisor, rate_divisor, has_roofline) for row in rows)
    return fitting_table(columns, lines, width, caption=caption)


def _cells(row: Row, divisor: float, rate_divisor: float, has_roofline: bool) -> list[str]:
    times = [digits(us / divisor) for us in (row.us.p50, row.us.p20, row.us.p80)]
    ratio = row.ratio
    ratios = [""] * 3 if ratio is None else [*map(digits, (ratio.p50, ratio.p20, ratio.p80))]
    rates = [digits(row.gflops / rate_divisor), digits(row.gbytes_per_s)]
    share = [percent(row.roofline)] if has_roofline else []
    figures = [*times, *rates, *share, str(row.rounds), *ratios]
    return [row.workload, row.contender, *figures, verdict(row)]


def left_out_lines(left_out: Iterable[LeftOut]) -> list[str]:
    """A line per contender and reason; one that is said of many workloads names their number."""
    workloads: dict[tuple[str, str], list[str]] = {}
    for each in left_out:
        workloads.setdefault((each.contender, each.reason), []).append(each.workload)
    return [
        f"{names[0] if len(names) == 1 else f'{len(names)} workloads'}: "
        f"{contender} not timed, {reason}"
        for (contender, reason), names in workloads.items()
    ]


def verdict(row: Row) -> str:
    """Whether the limit is kept, and where it is not kept by the ratio, by what."""
    if row.limit is None or row.ratio is None:
        return ""
    if row.ratio.p50 <= row.limit:
        return f"≤ {row.limit:.4g}"
    over = f"over {row.limit:.4g}"
    return f"{over}, reads enough" if row.met else over


def digits(value: float) -> str:
    """Three significant digits, never in exponents."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f}"
