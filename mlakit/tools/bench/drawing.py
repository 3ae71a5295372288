"""Drawings of simple shapes: written as SVG, and as PNG if matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.util import find_spec
from pathlib import Path

FONT = "DejaVu Sans, Helvetica, Arial, sans-serif"
DOTS_PER_INCH = 100


@dataclass(frozen=True)
class Rectangle:
    x: float
    y: float
    width: float
    height: float
    fill: str
    hint: str = ""  # a browser shows it as a tooltip


@dataclass(frozen=True)
class Line:
    points: Sequence[tuple[float, float]]
    colour: str
    width: float = 1.0
    dashed: bool = False


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    colour: str
    hint: str = ""
    radius: float = 4.0


@dataclass(frozen=True)
class Text:
    x: float
    y: float  # of the vertical centre
    text: str
    anchor: str = "start"  # or middle, end
    size: int = 12
    bold: bool = False
    colour: str = "#222222"


Shape = Rectangle | Line | Dot | Text


@dataclass
class Drawing:
    """Shapes on a white background; x to the right, y downwards, in pixels."""

    width: float
    height: float
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        self.shapes.extend(shapes)

    def svg(self) -> str:
        body = "\n".join(_svg(shape) for shape in self.shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" '
            f'height="{self.height:g}" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'font-family="{FONT}">\n'
            f'<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>\n'
        )

    def save_png(self, file: Path) -> None:
        """Needs matplotlib (`why_no_png`)."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure((self.width / DOTS_PER_INCH, self.height / DOTS_PER_INCH), DOTS_PER_INCH)
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(0, self.width)
        axes.set_ylim(self.height, 0)
        axes.axis("off")
        for shape in self.shapes:
            _draw(axes, shape)
        figure.savefig(file)


def why_no_png() -> str | None:
    """Why PNG output is unavailable; None if it works."""
    if find_spec("matplotlib") is None:
        return "needs matplotlib, which is not installed: pip install 'mlakit[plot]'"
    return None


def _svg(shape: Shape) -> str:
    if isinstance(shape, Rectangle):
        place = f'x="{shape.x:.1f}" y="{shape.y:.1f}"'
        size = f'width="{max(shape.width, 0):.1f}" height="{shape.height:.1f}"'
        return f'<rect {place} {size} fill="{shape.fill}">{_hint(shape.hint)}</rect>'
    if isinstance(shape, Line):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
        dashes = ' stroke-dasharray="4 3"' if shape.dashed else ""
        return (
            f'<polyline points="{points}" fill="none" stroke="{shape.colour}" '
            f'stroke-width="{shape.width:g}"{dashes}/>'
        )
    if isinstance(shape, Dot):
        place = f'cx="{shape.x:.1f}" cy="{shape.y:.1f}" r="{shape.radius:g}"'
        return f'<circle {place} fill="{shape.colour}">{_hint(shape.hint)}</circle>'
    weight = ' font-weight="bold"' if shape.bold else ""
    return (
        f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" text-anchor="{shape.anchor}" '
        f'dominant-baseline="central" font-size="{shape.size}" fill="{shape.colour}"{weight}>'
        f"{escape(shape.text)}</text>"
    )


def _hint(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


def _draw(axes, shape: Shape) -> None:  # type: ignore[no-untyped-def]  # matplotlib is untyped
    from matplotlib.lines import Line2D
    from matplotlib.patches import Circle
    from matplotlib.patches import Rectangle as Patch

    if isinstance(shape, Rectangle):
        place = (shape.x, shape.y)
        axes.add_patch(Patch(place, max(shape.width, 0), shape.height, color=shape.fill, lw=0))
    elif isinstance(shape, Line):
        style = "--" if shape.dashed else "-"
        xs, ys = zip(*shape.points, strict=True)
        axes.add_line(Line2D(xs, ys, color=shape.colour, lw=0.75 * shape.width, ls=style))
    elif isinstance(shape, Dot):
        axes.add_patch(Circle((shape.x, shape.y), shape.radius, color=shape.colour, lw=0))
    else:
        axes.text(
            shape.x,
            shape.y,
            shape.text.replace("$", r"\$"),  # matplotlib would parse a formula
            ha={"start": "left", "middle": "center", "end": "right"}[shape.anchor],
            va="center",
            fontsize=0.75 * shape.size,
            weight="bold" if shape.bold else "normal",
            color=shape.colour,
        )
