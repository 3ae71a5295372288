"""Tables and the chart of the cluster commands."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from mlakit.cluster.serve import ServePlan
from mlakit.columns import Column, fitting_table

CHOICES = (
    Column("option", is_number=False),
    Column("value", is_number=False),
    Column("why", is_number=False, folds_at=30),
)


def reasons(plan: ServePlan, width: int) -> RenderableType:
    """Why each option of a serve line has its value, and what it was computed from."""
    rows = [(each.option, each.value, each.reason) for each in plan.choices]
    table = fitting_table(CHOICES, rows, width, grouped=False)
    return Group(table, *(Text(note) for note in plan.notes))
