"""Draws the chart of the first pages from the reports in docs/data: `make figures`.

It has the bf16 workloads of decode and one of sparse attention; bars are speeds, where the faster
of the peers has 1. The file names the numbers that it was drawn from.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

import figures
from matplotlib.figure import Figure

from mlakit.tools.bench.charts import COLOURS, MLAKIT_COLOUR, STYLE

FILE = figures.ROOT / "docs" / "img" / "h200-decode.png"
SPARSE = "sparse-decode-fp8_block128-b128-h128-32768-top2048"
PEERS = (figures.FA3, figures.FLASH_MLA)
BARS = (figures.OURS, *PEERS)
BAR_COLOURS = dict(zip(BARS, (MLAKIT_COLOUR, COLOURS[0], COLOURS[3]), strict=True))
SIZES = re.compile(r"-b(?P<b>\d+)-h(?P<h>\d+)(-q(?P<q>\d+))?-(?P<k>\d+)(-top(?P<top>\d+))?$")
INCHES, DPI = (9.0, 4.2), 200  # shown 900 pixels wide


class Workload(NamedTuple):
    """A group of bars: what stands below it, and microseconds by implementation."""

    label: str
    us: dict[str, float]


def workloads() -> list[Workload]:
    """Return the groups of bars in their order."""
    decode, sparse = (figures.FIGURES[name].workloads() for name in ("decode", "sparse-decode"))
    return [
        Workload(label(name), {each: times[each] for each in BARS if each in times})
        for name, times in (*decode.items(), (SPARSE, sparse[SPARSE]))
    ]


def label(name: str) -> str:
    """Return the sizes of a workload in words, a line each."""
    sizes = SIZES.search(name)
    assert sizes is not None, name
    requests = "1 request" if sizes["b"] == "1" else f"{sizes['b']} requests"
    tokens = f"{int(sizes['k']) >> 10}k tokens"
    lines = [requests, f"{sizes['h']} heads", tokens]
    if sizes["q"]:
        lines.append(f"{sizes['q']} queries each")
    if sizes["top"]:
        lines[2:] = [f"{sizes['top']} of {tokens}", "sparse, FP8"]
    return "\n".join(lines)


def facts() -> str:
    """Return what the chart shows, as its file has it."""
    return json.dumps([[each.label, each.us] for each in workloads()])


def where() -> str:
    """Return the GPU, dates and versions of the reports."""
    names = ("h200-decode.json", "h200-sparse-decode.json")
    dates = dict.fromkeys(figures.TAKEN[name][0] for name in names)
    made = figures.FIGURES["decode"].report()["environment"]
    return (
        f"{made['gpu']}, {', '.join(dates)}; torch {made['torch'].partition('+')[0]}, Triton "
        f"{made['triton']}; peers of the vLLM 0.26.0 wheel. bf16 rows but for the last, L2 cold, "
        "medians."
    )


def chart() -> Figure:
    """Draw the groups of bars; a speed is the time of the faster peer / the time."""
    figure = Figure(INCHES)
    axes = figure.subplots()
    groups = workloads()
    for x, (_, us) in enumerate(groups):
        fastest = min(us[peer] for peer in PEERS if peer in us)
        present = [each for each in BARS if each in us]
        for i, each in enumerate(present):
            at, height = x + 0.28 * (i - (len(present) - 1) / 2), fastest / us[each]
            axes.bar(at, height, 0.26, color=BAR_COLOURS[each], zorder=2)
            text = {"ha": "center", "fontsize": 8, "zorder": 3}
            axes.text(at, 0.03, figures.us(us[each]), color="white", va="bottom", **text)
            if each == figures.OURS:
                speed = f"{height:.2f}x"
                axes.text(at, height + 0.015, speed, weight="bold", va="bottom", **text)
    axes.axhline(1, color="#444444", ls="--", lw=0.8, zorder=3)
    axes.set_xticks(range(len(groups)), [each.label for each in groups], fontsize=8)
    axes.tick_params(axis="x", length=0)
    axes.set(xlim=(-0.55, len(groups) - 0.45), ylim=(0, 1.35), ylabel="speed, faster peer = 1")
    title = "MLA decode on an H200: higher is faster, times in us inside the bars"
    axes.set_title(title, loc="left", weight="bold", pad=24)
    for each in BARS:
        axes.bar(0, 0, color=BAR_COLOURS[each], label=figures.NAMES.get(each, each))
    placed = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": len(BARS)}
    axes.legend(**placed, frameon=False, borderpad=0)
    figure.supxlabel(where(), fontsize=7, color="#555555")
    return figure


def main() -> None:
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        chart().savefig(FILE, dpi=DPI, metadata={"Software": None, "Description": facts()})


if __name__ == "__main__":
    main()
