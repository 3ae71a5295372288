"""Reports as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE
from rich.table import Table

from mlakit.bench.report import OURS, LeftOut, Row

WIDE = 150  # columns for a table where the output is no terminal


def table(rows: Sequence[Row], unit: str = "ms") -> Table:
    """Times in `unit`, ms or us; a ratio below 1 says that mlakit is the faster one."""
    divisor = {"ms": 1e3, "us": 1.0}[unit]
    rate, rate_divisor = ("GFLOP/s", 1.0) if unit == "ms" else ("TFLOP/s", 1e3)
    has_roofline = any(row.roofline is not None for row in rows)
    shown = Table(
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        caption=f"{unit}: median and the range of the middle three fifths of the rounds; "
        f"ratio: {OURS} / contender in the same round",
        caption_justify="left",
    )
    shown.add_column("workload", no_wrap=True)
    shown.add_column("contender", no_wrap=True)
    roofline = ("% roof",) if has_roofline else ()
    for heading in (
        *(unit, "from", "to", rate, "GB/s", *roofline, "rounds"),
        *("ratio", "from", "to", "limit"),
    ):
        shown.add_column(heading, justify="right", no_wrap=True)
    previous = ""
    for row in rows:
        if previous and row.workload != previous:
            shown.add_section()
        name = "" if row.workload == previous else row.workload
        times = (digits(us / divisor) for us in (row.us.p50, row.us.p20, row.us.p80))
        ratio = row.ratio
        ratios = (
            ("", "", "") if ratio is None else tuple(map(digits, (ratio.p50, ratio.p20, ratio.p80)))
        )
        share = (percent(row.roofline),) if has_roofline else ()
        facts = (digits(row.gflops / rate_divisor), digits(row.gbytes_per_s), *share)
        shown.add_row(name, row.contender, *times, *facts, str(row.rounds), *ratios, verdict(row))
        previous = row.workload
    return shown


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
