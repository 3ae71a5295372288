"""The charts of a report: bars of speedups or stages, the roofline, heat maps of a grid."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import ceil, floor, log10

from mlakit.tools.bench.ceilings import Ceilings
from mlakit.tools.bench.drawing import Dot, Drawing, Line, Rectangle, Text
from mlakit.tools.bench.heatmap import HeatMap, heat_maps
from mlakit.tools.bench.report import HARDWARE_BASELINES, MLAKIT, STAGES, Report, Row
from mlakit.tools.bench.tables import digits, times_of

MLAKIT_COLOUR = "#d1495b"
COLOURS = ("#00798c", "#edae49", "#66a182", "#8d6a9f", "#2e4057", "#a0a0a0", "#b5651d", "#5f9ea0")
GREY, PALE = "#888888", "#dddddd"
BAR, GAP = 16, 14
FULL = 560  # pixels of the widest bar
LABELS = 200
STAGE_BAR = 24
STAGE_LABEL = 108  # pixels of a name in the legend
SHORTEST_LABEL = 46  # pixels that a time needs
LONGEST = 4.0  # the speedup of a full bar; longer bars are cut


def charts(report: Report) -> dict[str, Drawing]:
    """By kind, the charts that the report has rows for."""
    found: dict[str, Drawing] = {}
    maps = heat_maps(report.rows)
    if maps:
        found["heatmap"] = heat_chart(maps)
    elif any(row.implementation in STAGES for row in report.rows):
        found["stages"] = stage_chart(report)
    elif report.rows:
        found["bars"] = bar_chart(report)
    computing = [
        row for row in report.rows if row.flops and row.implementation not in HARDWARE_BASELINES
    ]
    if report.ceilings is not None and computing:
        found["roofline"] = roofline_chart(computing, report.ceilings)
    return found


def implementation_colours(rows: Sequence[Row]) -> dict[str, str]:
    others = [name for name in dict.fromkeys(row.implementation for row in rows) if name != MLAKIT]
    return {MLAKIT: MLAKIT_COLOUR} | {
        name: COLOURS[i % len(COLOURS)] for i, name in enumerate(others)
    }


def bar_chart(report: Report) -> Drawing:
    """mlakit's speedup over each implementation: a longer bar is a slower implementation."""
    colours = implementation_colours(report.rows)
    groups = [(name, list(rows)) for name, rows in groupby(report.rows, lambda row: row.workload)]
    height = 60 + sum(22 + BAR * len(rows) + GAP for _, rows in groups)
    drawing = Drawing(LABELS + FULL + 140, height)
    title = f"{report.suite} ({report.mode}): {MLAKIT}'s speedup over each implementation"
    drawing.add(Text(10, 20, title, bold=True))
    y = 44.0
    for workload, rows in groups:
        own_us = next((row.us.p50 for row in rows if row.implementation == MLAKIT), rows[0].us.p50)
        drawing.add(Text(10, y + 8, workload, bold=True))
        y += 22
        for row in rows:
            _add_bar(drawing, y, row, own_us, colours[row.implementation])
            y += BAR
        y += GAP
    one = LABELS + FULL / LONGEST
    drawing.add(Line([(one, 36), (one, height - 10)], GREY, dashed=True))
    return drawing


def _add_bar(drawing: Drawing, y: float, row: Row, own_us: float, colour: str) -> None:
    def x(us: float) -> float:
        return LABELS + FULL * min(us / own_us, LONGEST) / LONGEST

    middle, end = y + BAR / 2, x(row.us.p50)
    spread = f"{digits(row.us.p20)} to {digits(row.us.p80)}"
    hint = f"{row.implementation}: {digits(row.us.p50)} us ({spread})"
    cut = " →" if row.us.p50 / own_us > LONGEST else ""
    speedup = "" if row.speedup is None else f", {times_of(row.speedup.p50)}"
    drawing.add(
        Text(LABELS - 8, middle, row.implementation, anchor="end", size=11),
        Rectangle(LABELS, y + 2, end - LABELS, BAR - 4, colour, hint),
        Line([(x(row.us.p20), middle), (x(row.us.p80), middle)], "#222222"),
        Text(end + 6, middle, f"{digits(row.us.p50)} us{speedup}{cut}", size=11),
    )


def stage_chart(report: Report) -> Drawing:
    """Where the time of a step goes: a bar per workload, as wide as its stages together."""
    named = [name for name in STAGES if any(row.implementation == name for row in report.rows)]
    colours = dict(zip(named, COLOURS, strict=False))
    steps = [(name, list(rows)) for name, rows in groupby(report.rows, lambda row: row.workload)]
    pitch = 22 + STAGE_BAR + GAP
    width = max(FULL + 200, 10 + STAGE_LABEL * len(named))
    drawing = Drawing(width, 84 + pitch * len(steps))
    title = f"{report.suite} ({report.mode}): where the time goes, each stage timed alone"
    drawing.add(Text(10, 20, title, bold=True))
    for i, (name, colour) in enumerate(colours.items()):
        x = 10 + STAGE_LABEL * i
        drawing.add(Rectangle(x, 38, 12, 12, colour), Text(x + 18, 44, name, size=11))
    for i, (workload, rows) in enumerate(steps):
        _add_stages(drawing, 72 + pitch * i, workload, rows, colours)
    return drawing


def _add_stages(
    drawing: Drawing, y: float, workload: str, rows: Sequence[Row], colours: dict[str, str]
) -> None:
    us = {row.implementation: row.us.p50 for row in rows}
    stages = {name: us[name] for name in colours if name in us}
    total = sum(stages.values())
    drawing.add(Text(10, y, workload, bold=True))
    y, x = y + 12, 10.0
    for name, own in stages.items():
        width, share = FULL * own / total, f"{100 * own / total:.0f} %"
        hint = f"{name}: {digits(own)} us, {share} of the stages"
        drawing.add(Rectangle(x, y, width, STAGE_BAR, colours[name], hint))
        if width > SHORTEST_LABEL:
            at = (x + width / 2, y + STAGE_BAR / 2)
            drawing.add(Text(*at, f"{digits(own)} us", "middle", size=11, colour="#ffffff"))
        x += width
    step = f"step {digits(us[MLAKIT])} us" if MLAKIT in us else f"stages {digits(total)} us"
    drawing.add(Text(x + 8, y + STAGE_BAR / 2, step, size=11))


def roofline_chart(rows: Sequence[Row], ceilings: Ceilings) -> Drawing:
    """TFLOP/s over FLOPs per byte, both logarithmic, with the measured ceilings."""
    colours = implementation_colours(rows)
    xs = [row.flops / row.bytes for row in rows]
    ys = [row.gflops / 1e3 for row in rows]
    peaks = {"bf16": ceilings.bf16_tflops} | (
        {} if ceilings.fp8_tflops is None else {"fp8": ceilings.fp8_tflops}
    )
    left, right = floor(log10(min(xs))), max(ceil(log10(max(xs))), 4)
    bottom, top = floor(log10(min(ys))), ceil(log10(max(*peaks.values(), *ys)))
    width, height = 560, 400
    drawing = Drawing(width + 280, height + 100)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (log10(x) - left) / (right - left)
        up = (log10(y) - bottom) / max(top - bottom, 1)
        return 70 + width * across, 40 + height * (1 - up)

    drawing.add(Text(10, 18, "Roofline: ceilings measured in the same run", bold=True))
    for power in range(left, right + 1):
        x, y = place(10.0**power, 10.0**bottom)
        drawing.add(Line([(x, 40), (x, y)], PALE), Text(x, y + 16, f"{10.0**power:g}", "middle"))
    for power in range(bottom, top + 1):
        x, y = place(10.0**left, 10.0**power)
        drawing.add(
            Line([(x, y), (70 + width, y)], PALE), Text(x - 8, y, f"{10.0**power:g}", "end")
        )
    drawing.add(
        Text(70 + width / 2, height + 78, "FLOPs per byte", "middle"),
        Text(76, 32, "TFLOP/s"),
    )
    bandwidth = ceilings.read_gb_s / 1e3  # TFLOP/s at one FLOP per byte
    highest = max(peaks.values())
    start = max(10.0**left, 10.0**bottom / bandwidth)
    drawing.add(
        Line([place(start, start * bandwidth), place(highest / bandwidth, highest)], "#444444", 2)
    )
    for kind, peak in peaks.items():
        first, last = place(peak / bandwidth, peak), place(10.0**right, peak)
        drawing.add(
            Line([first, last], "#444444", 2),
            Text(last[0] + 6, last[1], f"{kind} {peak:.0f} TFLOP/s", size=11),
        )
    for row, x, y in zip(rows, xs, ys, strict=True):
        hint = f"{row.workload}, {row.implementation}: {digits(y)} TFLOP/s"
        drawing.add(Dot(*place(x, y), colours[row.implementation], hint))
    for i, (name, colour) in enumerate(colours.items()):
        y = height - 10 - 18 * i
        drawing.add(Dot(70 + width + 20, y, colour), Text(70 + width + 32, y, name, size=11))
    return drawing


def heat_chart(maps: Sequence[HeatMap]) -> Drawing:
    """The maps one below the other; green is fast, red is slow."""
    cell, across = (62, 30), max(len(heat.columns) for heat in maps)
    down = max(len(heat.lengths) for heat in maps)
    width, height = 70 + cell[0] * across, 76 + cell[1] * down
    drawing = Drawing(width + 20, height * len(maps))
    for i, heat in enumerate(maps):
        top = i * height + 50
        drawing.add(Text(10, top - 32, heat.title, bold=True))
        for place, column in enumerate(heat.columns):
            label = f"{heat.axis} {column}"
            drawing.add(Text(70 + cell[0] * (place + 0.5), top - 12, label, "middle"))
        for line, length in enumerate(heat.lengths):
            y = top + cell[1] * line
            drawing.add(Text(60, y + cell[1] / 2, f"{length}", "end"))
            for place, column in enumerate(heat.columns):
                x, text = 70 + cell[0] * place, heat.text(length, column)
                if text:
                    shade = shade_of(heat.goodness(length, column))
                    drawing.add(
                        Rectangle(x, y, cell[0] - 2, cell[1] - 2, shade),
                        Text(x + cell[0] / 2 - 1, y + cell[1] / 2 - 1, text, "middle"),
                    )
    return drawing


def shade_of(goodness: float) -> str:
    """From red over white to green."""
    strength = abs(goodness)
    kept, faded = round(255 - 20 * strength), round(255 - 175 * strength)
    red, green = (faded, kept) if goodness > 0 else (kept, faded)
    return f"#{red:02x}{green:02x}{faded:02x}"
