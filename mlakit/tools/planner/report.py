"""Tables and the chart of the cluster commands."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, floor, log10

from rich.console import Group, RenderableType
from rich.text import Text

from mlakit.tools.bench.drawing import Dot, Drawing, Line
from mlakit.tools.bench.drawing import Text as Label
from mlakit.tools.bench.shapes import short_number
from mlakit.tools.columns import Column, fitting_table
from mlakit.tools.memory.gpus import GIB
from mlakit.tools.planner.kernel_times import GPU
from mlakit.tools.planner.serve import ServePlan
from mlakit.tools.planner.simulation import Plan, Step

CHOICES = (
    Column("option", is_number=False),
    Column("value", is_number=False),
    Column("why", is_number=False, folds_at=30),
)
STEPS = (
    Column("context"),
    Column("TP"),
    Column("DCP"),
    Column("requests"),
    Column("step ms"),
    Column("attention", rank=1),
    Column("weights", rank=1),
    Column("collectives", rank=1),
    Column("tokens/s/GPU"),
    Column("per node", rank=1),
    Column("all GPUs", rank=2),
)
# by DCP degree; TP degrees differ by their dashes
COLOURS = ("#d1495b", "#00798c", "#2e4057", "#edae49", "#66a182", "#8d6a9f", "#b5651d")
PALE = "#dddddd"
WIDTH, HEIGHT, LEFT, TOP = 560, 400, 70, 50


def reasons(plan: ServePlan, width: int) -> RenderableType:
    """Why each option of a serve line has its value, and what it was computed from."""
    rows = [(each.option, each.value, each.reason) for each in plan.choices]
    table = fitting_table(CHOICES, rows, width, grouped=False)
    return Group(table, *(Text(note) for note in plan.notes))


def table(plan: Plan, width: int) -> RenderableType:
    """The steps, and the assumptions, as text no wider than `width`."""
    rows = [_cells(plan, step) for step in plan.steps]
    return Group(Text(heading(plan)), fitting_table(STEPS, rows, width), *notes(plan))


def _cells(plan: Plan, step: Step) -> list[str]:
    name = [short_number(step.context), str(step.tp), str(step.dcp)]
    if not step.requests:
        return [*name, "0", *["-"] * 7]
    times = (step.us, step.attention_us, step.weights_us, step.collectives_us)
    rates = (step.tokens_per_s_gpu, step.tokens_per_s_node, step.tokens_per_s)
    shown = [f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}" for rate in rates]
    return [
        *name,
        str(step.requests),
        *(f"{us / 1e3:.1f}" for us in times),
        shown[0] + ("*" if step == plan.best(step.context) else " "),
        *shown[1:],
    ]


def heading(plan: Plan) -> str:
    settings = plan.settings
    nodes = -(-settings.gpus // settings.gpus_per_node)
    where = f"{settings.gpus} GPUs" + (f" in {nodes} nodes" if nodes > 1 else "")
    return f"{plan.model.name} on {where}, {plan.format} cache: simulated decode"


def notes(plan: Plan) -> Iterator[Text]:
    """The assumptions, one line each."""
    settings, weights = plan.settings, plan.model.weights
    for reason in plan.left_out:
        yield Text(f"Left out: {reason}.")
    links = [("in a node", settings.node_link)]
    if settings.gpus > settings.gpus_per_node:
        links.append(("between nodes", settings.link))
    shown = "; ".join(
        f"{where} {x.name}, {x.gb_s:g} GB/s, {x.latency_us:g} us" for where, x in links
    )
    yield Text(f"Simulated, not measured. Kernels: interpolated between times of an {GPU}.")
    yield Text("*: the most tokens per second and GPU with this context.")
    yield Text(f"Links: {shown} per collective.")
    yield Text(
        f"Weights: {weights.total_bytes / GIB:,.1f} GiB ({weights.source}), read at "
        f"{settings.weight_efficiency:g} of the bandwidth; per layer {settings.layer_us:g} us more."
    )
    if settings.requests is None:
        yield Text(f"Requests per engine: as many as fit, at most {settings.max_requests}.")


def chart(plan: Plan) -> Drawing:
    """Tokens per second and GPU over the tokens of a request, both logarithmic."""
    lines: dict[tuple[int, int], list[Step]] = {}
    for step in plan.steps:
        if step.requests:
            lines.setdefault((step.tp, step.dcp), []).append(step)
    drawing = Drawing(LEFT + WIDTH + 150, TOP + HEIGHT + 60)
    title = "tokens per second and GPU, simulated"
    drawing.add(Label(10, 18, heading(plan), bold=True), Label(10, 38, title))
    if not lines:
        return drawing
    steps = [step for each in lines.values() for step in each]
    contexts = sorted({step.context for step in steps})
    rates = [step.tokens_per_s_gpu for step in steps]
    left, right = log10(contexts[0]), log10(contexts[-1])
    bottom, top = floor(log10(min(rates))), ceil(log10(max(rates)))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (log10(x) - left) / ((right - left) or 1)
        up = (log10(y) - bottom) / max(top - bottom, 1)
        return LEFT + WIDTH * across, TOP + HEIGHT * (1 - up)

    for each in contexts:
        x, y = place(each, 10.0**bottom)
        label = Label(x, y + 16, short_number(each), "middle", 11)
        drawing.add(Line([(x, TOP), (x, y)], PALE), label)
    for power in range(bottom, top + 1):
        x, y = place(contexts[0], 10.0**power)
        drawing.add(Line([(x, y), (LEFT + WIDTH, y)], PALE))
        drawing.add(Label(x - 8, y, f"{10.0**power:g}", "end"))
    drawing.add(Label(LEFT + WIDTH / 2, TOP + HEIGHT + 42, "tokens per request", "middle"))
    first = min(tp for tp, _ in lines)
    for i, ((tp, dcp), line) in enumerate(sorted(lines.items())):
        colour = COLOURS[(dcp.bit_length() - 1) % len(COLOURS)]
        points = [place(step.context, step.tokens_per_s_gpu) for step in line]
        drawing.add(Line(points, colour, 2, dashed=tp != first))
        for point, step in zip(points, line, strict=True):
            hint = (
                f"TP {tp}, DCP {dcp}, {step.context:,} tokens: {step.requests} requests, "
                f"{step.us / 1e3:.1f} ms, {step.tokens_per_s_gpu:.1f} tokens/s/GPU"
            )
            drawing.add(Dot(*point, colour, hint))
        x, y = LEFT + WIDTH + 20.0, TOP + 10.0 + 18 * i
        drawing.add(Line([(x - 10, y), (x + 10, y)], colour, 2, dashed=tp != first))
        drawing.add(Label(x + 16, y, f"TP {tp}, DCP {dcp}", size=11))
    return drawing
