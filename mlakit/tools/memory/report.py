"""The table and the chart of a memory report."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, floor, log10
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from mlakit.tools.bench.drawing import Dot, Drawing, Line, why_no_png
from mlakit.tools.bench.drawing import Text as Label
from mlakit.tools.bench.shapes import short_number
from mlakit.tools.columns import Column, fitting_table
from mlakit.tools.memory.budget import EXPANDED, Fit, MemoryReport
from mlakit.tools.memory.gpus import GIB

COLUMNS = (
    Column("context"),
    Column("cache", is_number=False),
    Column("bytes/token", rank=1),
    Column("bytes/token/rank", rank=2),
    Column("GiB/rank"),
)
GPU_COLUMNS = (
    Column("tokens that fit", rank=1),
    Column("requests that fit"),
    Column("batch fits", rank=1, is_number=False),
)
COLOURS = ("#d1495b", "#00798c", "#2e4057", "#edae49", "#66a182", "#8d6a9f", "#b5651d")
GREY, PALE, DARK = "#888888", "#dddddd", "#444444"
WIDTH, HEIGHT, LEFT, TOP = 560, 400, 70, 50
SHORTEST, LONGEST = 1 << 10, 1 << 17  # tokens on the axis, and further if a context is longer


def table(report: MemoryReport, width: int) -> RenderableType:
    """What the cache takes, and the assumptions, as text no wider than `width`."""
    columns = COLUMNS if report.budget is None else (*COLUMNS, *GPU_COLUMNS)
    rows = [_cells(fit, report.budget is not None) for fit in report.fits]
    return Group(Text(heading(report)), fitting_table(columns, rows, width), *notes(report))


def _cells(fit: Fit, with_gpu: bool) -> list[str]:
    shown = [
        f"{fit.context:,}",
        fit.format,
        f"{fit.bytes_per_token:,}",
        f"{fit.rank_bytes_per_token:,.0f}",
        f"{fit.rank_bytes / GIB:,.2f}",
    ]
    if with_gpu:
        shown += [f"{fit.max_tokens:,}", f"{fit.max_requests:,}", "yes" if fit.fits else "no"]
    return shown


def heading(report: MemoryReport) -> str:
    return (
        f"{report.model}: {_layers(report)}; batch {report.batch}, TP {report.tp}, "
        f"DCP {report.dcp}, pages of {report.page_size} tokens"
    )


def _layers(report: MemoryReport) -> str:
    total, mla, indexer = report.layers
    shown = f"{mla} MLA layers" if mla == total else f"{mla} MLA layers of {total}"
    return f"{shown}, {indexer} with index keys" if indexer else shown


def notes(report: MemoryReport) -> Iterator[Text]:
    """The assumptions, one line each."""
    budget = report.budget
    if report.tp > 1:
        divided = "DCP divides its tokens" if report.dcp > 1 else "every rank has all of it"
        yield Text(f"TP does not divide the latent cache: {divided}. TP divides {EXPANDED}.")
    if report.layers.mla < report.layers.total:
        yield Text("The state of linear attention is not counted: its size is constant.")
    for reason in report.unsupported:
        yield Text(f"Left out: {reason}.")
    if budget is None:
        return
    if budget.weight_bytes is None:
        weights = "weights are not counted (--weights GiB)"
    else:
        weights = f"weights take {budget.weight_bytes / GIB:.1f} GiB ({budget.weight_source})"
    yield Text(f"GPU: {budget.gpu_bytes / GIB:g} GiB; {weights}; activations are not counted.")


def check_chart_file(file: Path) -> None:
    """Raises ValueError for a file that `write_chart` cannot write."""
    if file.suffix not in (".svg", ".png"):
        raise ValueError(f"--plot must be a file that ends in .svg or .png, got {file}")
    if not file.parent.is_dir():
        raise ValueError(f"--plot: there is no folder {file.parent}")
    if file.suffix == ".png" and (reason := why_no_png()):
        raise ValueError(f"--plot {reason}; a file that ends in .svg needs no other package")


def write_chart(drawing: Drawing, file: Path) -> None:
    """Raises ValueError if the file cannot be written."""
    try:
        if file.suffix == ".png":
            drawing.save_png(file)
        else:
            file.write_text(drawing.svg(), "utf-8")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(f"--plot: {file} cannot be written, {reason}") from None


def chart(report: MemoryReport) -> Drawing:
    """GiB per rank over the tokens of a request, both logarithmic, and the limit of the GPU."""
    asked = sorted({fit.context for fit in report.fits})
    first = min(SHORTEST, asked[0]).bit_length() - 1
    last = (max(LONGEST, asked[-1]) - 1).bit_length()
    contexts = [1 << power for power in range(first, last + 1)]
    lines = {
        size.name: [(each, size.rank_bytes(each, report.batch) / GIB) for each in contexts]
        for size in report.sizes
    }
    limit = None if report.budget is None else report.budget.cache_bytes / GIB
    heights = [y for line in lines.values() for _, y in line]
    heights += [] if limit is None else [limit]
    bottom, top = floor(log10(min(heights))), ceil(log10(max(heights)))
    drawing = Drawing(LEFT + WIDTH + 180, TOP + HEIGHT + 60)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (log10(x) - log10(contexts[0])) / (log10(contexts[-1]) - log10(contexts[0]))
        up = (log10(y) - bottom) / max(top - bottom, 1)
        return LEFT + WIDTH * across, TOP + HEIGHT * (1 - up)

    drawing.add(Label(10, 18, heading(report), bold=True), Label(10, 38, "GiB per rank"))
    for each in contexts:
        x, y = place(each, 10.0**bottom)
        drawing.add(
            Line([(x, TOP), (x, y)], PALE), Label(x, y + 16, short_number(each), "middle", 11)
        )
    for power in range(bottom, top + 1):
        x, y = place(contexts[0], 10.0**power)
        drawing.add(
            Line([(x, y), (LEFT + WIDTH, y)], PALE), Label(x - 8, y, f"{10.0**power:g}", "end")
        )
    drawing.add(Label(LEFT + WIDTH / 2, TOP + HEIGHT + 42, "tokens per request", "middle"))
    for i, (size, points) in enumerate(zip(report.sizes, lines.values(), strict=True)):
        is_expanded = size.name == EXPANDED
        colour = GREY if is_expanded else COLOURS[i % len(COLOURS)]
        drawing.add(Line([place(*point) for point in points], colour, 2, dashed=is_expanded))
        for each in asked:
            gib = size.rank_bytes(each, report.batch) / GIB
            hint = f"{size.name}, {each:,} tokens: {gib:.2f} GiB"
            drawing.add(Dot(*place(each, gib), colour, hint))
        y = TOP + 10 + 18 * i
        x = LEFT + WIDTH + 20.0
        drawing.add(Dot(x, y, colour), Label(x + 12, y, size.name, size=11))
    if limit is not None:
        left, right = place(contexts[0], limit), place(contexts[-1], limit)
        shown = f"{limit:.1f} GiB for the cache"
        drawing.add(Line([left, right], DARK, 2), Label(left[0] + 8, left[1] - 9, shown, size=11))
    return drawing
