"""What the demo prints: two tables, the bytes and pages of the cache, and the result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from mlakit.formats import row_codec
from mlakit.model.geometry import MLAGeometry
from mlakit.tools.demo.check import Check
from mlakit.tools.demo.documented import Call
from mlakit.tools.demo.model import RandomModel
from mlakit.tools.demo.oracles import PREFILL_HEADS, Stage, prefill_heads
from mlakit.tools.demo.serving import CONTINUATIONS, PAGE_SIZE, SCALE_BYTES, PageCount, Settings


def introduction(name: str, model: RandomModel, settings: Settings) -> str:
    g = model.geometry
    threads = torch.get_num_threads()
    device = f"the CPU ({threads} {'threads' if threads > 1 else 'thread'})"
    if settings.device.type == "cuda":
        device = torch.cuda.get_device_name(settings.device)
    return (
        f"{name}: one attention layer, {g.num_heads} heads, hidden size {g.hidden_size}, "
        f"{model.num_weights / 1e6:.0f} million random weights, on {device}. "
        f"A prompt of {settings.prompt} tokens is prefilled in two chunks into {settings.format} "
        f"pages of {PAGE_SIZE}, forked, and continued {CONTINUATIONS} times."
    )


def stage_table(stages: Sequence[Stage], geometry: MLAGeometry) -> Table:
    heads = range(geometry.num_heads)
    caption = "Times are per token. The error is that of the worst row, against the float64 oracle"
    if geometry.num_heads > PREFILL_HEADS:
        checked = len(heads[prefill_heads(geometry)[0]])
        caption += f" (prefill: {checked} of {len(heads)} heads)"
    table = _table(f"{caption}.", "stage", "tokens", "project", "attend", "error", "tolerance")
    for stage in stages:
        times = (stage.projection_seconds, stage.attention_seconds)
        per_token = (_milliseconds(each, stage.tokens) for each in times)
        _add(table, stage.check, stage.label, str(stage.tokens), *per_token)
    return table


def call_table(calls: Sequence[Call]) -> Table:
    caption = "The functions of Modular's API, once each: time of the call, error of the worst row."
    table = _table(caption, "function", "time", "error", "tolerance")
    for call in calls:
        label = f"{call.check.name}\n  [dim]{call.shapes}[/dim]"
        _add(table, call.check, label, _milliseconds(call.seconds, 1))
    return table


def facts(geometry: MLAGeometry, settings: Settings, pages: PageCount) -> Table:
    """The bytes per token and layer, and the pages of the cache."""
    g = geometry
    size = row_codec(settings.format, g.row).bytes_per_token
    bf16 = row_codec("bf16", g.row).bytes_per_token
    expanded = g.expanded_elements_per_token * torch.bfloat16.itemsize
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold")
    grid.add_column()
    index = f", and {g.index_head_dim + SCALE_BYTES} for its index key" if g.has_indexer else ""
    as_k_and_v = (
        f"{expanded} as K and V of {g.num_heads} heads: {expanded / size:.0f} times as many"
    )
    grid.add_row("cache", f"{size} bytes per token and layer ({settings.format}){index}")
    grid.add_row("", f"{bf16} as a bf16 latent row, {as_k_and_v}")
    saved = f"{pages.copied} copied before a write; {pages.unshared} without sharing"
    grid.add_row("pages", f"{pages.used} of {PAGE_SIZE} tokens, {pages.shared} shared, {saved}")
    if not g.has_indexer:
        grid.add_row("sparse", "left out: this model has no indexer")
    return grid


def summary(checks: Iterable[Check], seconds: float) -> str:
    """The last lines: error messages, then PASS or FAIL."""
    checks = list(checks)
    wrong = [check for check in checks if not check.passed]
    if not wrong:
        return (
            f"[bold green]PASS[/bold green]: {len(checks)} of {len(checks)} checks within "
            f"tolerance ({seconds:.0f} s)"
        )
    messages = "".join(f"{escape(check.message)}\n" for check in wrong)
    names = ", ".join(check.name for check in wrong)
    return f"{messages}[bold red]FAIL[/bold red]: {names}"


def _table(caption: str, first: str, *numbers: str) -> Table:
    table = Table(caption=caption, caption_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("result", no_wrap=True)
    return table


def _add(table: Table, check: Check, *cells: str) -> None:
    word = "[green]ok[/green]" if check.passed else "[bold red]WRONG[/bold red]"
    table.add_row(*cells, f"{check.error:.1e}", f"{check.tolerance:.1e}", word)


def _milliseconds(seconds: float | None, tokens: int) -> str:
    return "" if seconds is None else f"{1000 * seconds / tokens:.1f} ms"
