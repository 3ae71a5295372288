"""The charts of a report by matplotlib, the extra `plot`: bars of speedups or stages, the roofline,
heat maps of a grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import groupby
from math import nan
from pathlib import Path
from typing import Any, TypeAlias

from mlakit.tools.bench.ceilings import Ceilings
from mlakit.tools.bench.heatmap import HeatMap, heat_maps
from mlakit.tools.bench.report import HARDWARE_BASELINES, MLAKIT, STAGES, Report, Row
from mlakit.tools.bench.tables import digits, times_of

Axes: TypeAlias = Any  # matplotlib's, which is imported late
Figure: TypeAlias = Any
MLAKIT_COLOUR = "#d1495b"
COLOURS = ("#00798c", "#edae49", "#66a182", "#8d6a9f", "#2e4057", "#a0a0a0", "#b5651d", "#5f9ea0")
STYLE: Any = {  # matplotlib's types list every name of a setting
    "font.size": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": MLAKIT,  # equal charts are equal files
    "text.parse_math": False,
}
BAR_INCHES = 0.17
LONGEST = 4.0  # the speedup of a full bar; longer bars are cut
LABELLED_SHARE = 0.09  # of a step: a shorter stage has no room for its time


def why_not() -> str | None:
    """Why charts cannot be drawn; None if they can."""
    if find_spec("matplotlib") is None:
        return "needs matplotlib, which is not installed: pip install 'mlakit[plot]'"
    return None


def save_charts(report: Report, folder: Path) -> None:
    """Each chart that the report has rows for, as SVG and as PNG."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        for kind, figure in charts(report):
            file = folder / f"{report.suite}-{report.mode}-{kind}"
            figure.savefig(file.with_suffix(".svg"), metadata={"Date": None})
            figure.savefig(file.with_suffix(".png"), dpi=100)


def charts(report: Report) -> Iterator[tuple[str, Figure]]:
    """(kind, chart) of each chart that the report has rows for."""
    maps = heat_maps(report.rows)
    if maps:
        yield "heatmap", heat_chart(maps)
    elif any(row.implementation in STAGES for row in report.rows):
        yield "stages", stage_chart(report)
    elif report.rows:
        yield "bars", bar_chart(report)
    computing = [
        row for row in report.rows if row.flops and row.implementation not in HARDWARE_BASELINES
    ]
    if report.ceilings is not None and computing:
        yield "roofline", roofline_chart(computing, report.ceilings)


def bar_chart(report: Report) -> Figure:
    """mlakit's speedup over each implementation: a longer bar is a slower implementation."""
    colours = implementation_colours(report.rows)
    steps = _steps(report)
    figure, (axes,) = _figure(9, BAR_INCHES * (len(report.rows) + 2 * len(steps)) + 0.6)
    y, ticks, names = 0, [], []
    for workload, rows in steps:
        own_us = next((row.us.p50 for row in rows if row.implementation == MLAKIT), rows[0].us.p50)
        y += 2
        axes.text(0, y - 1, workload, weight="bold", va="center")
        for row in rows:
            cut = " →" if row.us.p50 / own_us > LONGEST else ""
            p20, end, p80 = (
                min(us / own_us, LONGEST) for us in (row.us.p20, row.us.p50, row.us.p80)
            )
            axes.barh(y, end, color=colours[row.implementation])
            axes.plot((p20, p80), (y, y), color="#222222", lw=0.8)
            speedup = "" if row.speedup is None else f", {times_of(row.speedup.p50)}"
            text = f"{digits(row.us.p50)} us{speedup}{cut}"
            axes.text(max(end, p80) + 0.03, y, text, va="center")
            ticks.append(y)
            names.append(row.implementation)
            y += 1
    axes.set_yticks(ticks, names)
    axes.set(xlim=(0, LONGEST * 1.2), ylim=(y, 0))
    axes.axvline(1, color="#888888", ls="--", lw=0.8)
    _title(axes, report, f"{MLAKIT}'s speedup over each implementation")
    return figure


def stage_chart(report: Report) -> Figure:
    """Where the time of a step goes: a bar per workload, split by the shares of its stages."""
    present = {row.implementation for row in report.rows}
    colours = dict(zip((name for name in STAGES if name in present), COLOURS, strict=False))
    steps = [
        (workload, {row.implementation: row.us.p50 for row in rows})
        for workload, rows in _steps(report)
    ]
    figure, (axes,) = _figure(11, 0.35 * len(steps) + 1.2)
    for y, (_, us) in enumerate(steps):
        total, left = sum(us.get(name, 0.0) for name in colours), 0.0
        for name in (name for name in colours if name in us):
            label = f"{digits(us[name])} us" if us[name] > LABELLED_SHARE * total else ""
            bar = axes.barh(y, us[name] / total, left=left, color=colours[name])
            axes.bar_label(bar, [label], label_type="center", color="white")
            left += us[name] / total
        step = f"step {digits(us[MLAKIT])} us" if MLAKIT in us else f"stages {digits(total)} us"
        axes.text(1.01, y, step, va="center")
    axes.set_yticks(range(len(steps)), [workload for workload, _ in steps])
    axes.set(xlim=(0, 1.15), xticks=[], ylim=(len(steps) - 0.5, -0.5))
    _title(axes, report, "where the time goes, each stage timed alone")
    _legend(figure, colours)
    return figure


def roofline_chart(rows: Sequence[Row], ceilings: Ceilings) -> Figure:
    """TFLOP/s over FLOPs per byte, both logarithmic, with the measured ceilings."""
    colours = implementation_colours(rows)
    peaks = {"bf16": ceilings.bf16_tflops}
    if ceilings.fp8_tflops is not None:
        peaks["fp8"] = ceilings.fp8_tflops
    figure, (axes,) = _figure(9, 5)
    for name, colour in colours.items():
        own = [row for row in rows if row.implementation == name]
        intensity = [row.flops / row.bytes for row in own]
        axes.scatter(intensity, [row.gflops / 1e3 for row in own], 16, color=colour)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte", ylabel="TFLOP/s")
    bandwidth, highest = ceilings.read_gb_s / 1e3, max(peaks.values())  # TFLOP/s at one FLOP a byte
    left, right = axes.get_xlim()
    right = max(right, 1e4)
    left = min(left, highest / bandwidth)
    axes.plot((left, highest / bandwidth), (left * bandwidth, highest), color="#444444")
    for kind, peak in peaks.items():
        axes.plot((peak / bandwidth, right), (peak, peak), color="#444444")
        axes.text(right, peak, f" {kind} {peak:.0f} TFLOP/s", va="center")
    axes.set_xlim(left, right)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(color="#dddddd")
    axes.set_title("Roofline: ceilings measured in the same run", loc="left", weight="bold")
    _legend(figure, colours)
    return figure


def heat_chart(maps: Sequence[HeatMap]) -> Figure:
    """The maps one below the other; green is fast, red is slow."""
    across = max(len(heat.columns) for heat in maps)
    down = max(len(heat.lengths) for heat in maps)
    height = (0.35 * down + 0.8) * len(maps)
    figure, all_axes = _figure(0.8 * across + 1, height, len(maps))
    for axes, heat in zip(all_axes, maps, strict=True):
        shades = [
            [heat.goodness(s, each) if heat.text(s, each) else nan for each in heat.columns]
            for s in heat.lengths
        ]
        axes.imshow(shades, "RdYlGn", vmin=-1, vmax=1, aspect="auto")
        axes.set_xticks(range(len(heat.columns)), [f"{heat.axis} {each}" for each in heat.columns])
        axes.set_yticks(range(len(heat.lengths)), map(str, heat.lengths))
        axes.set_title(heat.title, loc="left", weight="bold")
        for y, length in enumerate(heat.lengths):
            for x, column in enumerate(heat.columns):
                axes.text(x, y, heat.text(length, column), ha="center", va="center")
    return figure


def implementation_colours(rows: Sequence[Row]) -> dict[str, str]:
    others = [name for name in dict.fromkeys(row.implementation for row in rows) if name != MLAKIT]
    return {MLAKIT: MLAKIT_COLOUR} | {
        name: COLOURS[i % len(COLOURS)] for i, name in enumerate(others)
    }


def _steps(report: Report) -> list[tuple[str, list[Row]]]:
    """The rows by workload."""
    return [(name, list(rows)) for name, rows in groupby(report.rows, lambda row: row.workload)]


def _figure(width: float, height: float, count: int = 1) -> tuple[Figure, Sequence[Axes]]:
    """A figure of so many inches, and its axes, one below the other."""
    from matplotlib import figure

    made = figure.Figure((width, height))
    return made, list(made.subplots(count, squeeze=False)[:, 0])


def _title(axes: Axes, report: Report, text: str) -> None:
    title = f"{report.suite} ({report.mode}): {text}"
    axes.set_title(title, loc="left", weight="bold")


def _legend(figure: Figure, colours: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=patches, loc="outside right upper", frameon=False)
