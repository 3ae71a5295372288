"""`mlakit demo`: serves with one full-size attention layer and compares it with its oracles.

serving.py has the stages: a prompt, two continuations and a sparse step over a paged cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mlakit.dispatch.checks import UnsupportedError
from mlakit.formats import known_format, row_codec
from mlakit.model.geometry import MLAGeometry
from mlakit.tools.demo.serving import (
    CONTINUATIONS,
    PAGE_SIZE,
    SCALE_BYTES,
    Settings,
    Stage,
    serve,
)

DEVICES = ("auto", "cpu", "cuda")


def run(name: str, geometry: MLAGeometry, settings: Settings) -> bool:
    """Serve, check and print. Returns whether every result is within its tolerance.

    Raises BadParameter if the device has no kernel for one of the ops.
    """
    console, start, device = Console(), perf_counter(), settings.device
    is_cuda = device.type == "cuda"
    where = torch.cuda.get_device_name(device) if is_cuda else "the CPU"
    console.print(
        f"{name}: the attention of one layer with {geometry.num_heads} heads, on {where}. "
        f"A prompt of {settings.prompt} tokens is prefilled in two chunks into {settings.format} "
        f"pages of {PAGE_SIZE}, forked, and continued {CONTINUATIONS} times."
    )
    try:
        with Console(stderr=True).status("attending, and computing the float64 oracles"):
            for _ in range(1 + is_cuda):  # the first calls compile the kernels
                stages, session = serve(geometry, settings)
    except UnsupportedError as unsupported:
        raise typer.BadParameter(f"device {device}: {unsupported}") from None
    console.print(table(stages))
    held = [page for sequence in session.raw for page in sequence.pages]
    console.print(
        f"{cache_line(geometry, settings)}\nPages: {len(set(held))} of {PAGE_SIZE} tokens, "
        f"{len(held)} without sharing."
    )
    seconds, wrong = perf_counter() - start, [each for each in stages if each.message]
    for each in wrong:
        console.print(escape(each.message), soft_wrap=True)
    if wrong:
        console.print(f"FAIL: {', '.join(each.name for each in wrong)}", soft_wrap=True)
    else:
        total = len(stages)
        console.print(f"PASS: {total} of {total} checks within tolerance ({seconds:.0f} s)")
    return not wrong


def make_settings(
    geometry: MLAGeometry, *, prompt: int, tokens: int, format: str, device: str, seed: int
) -> Settings:
    """The settings of a run. Raises ValueError for an unknown format or device."""
    row_codec(format, geometry.row)  # raises for an unknown format
    if device not in DEVICES:
        raise ValueError(f"unknown device {device!r}; choose from {', '.join(DEVICES)}")
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ValueError("device cuda: torch sees no CUDA device")
    chosen = device if device != "auto" else "cuda" if has_cuda else "cpu"
    return Settings(prompt, tokens, known_format(format), torch.device(chosen), seed)


def table(stages: Sequence[Stage]) -> Table:
    """The stages. The error is that of the worst row, relative to its largest element."""
    shown = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    shown.add_column("stage", overflow="fold")
    for column in ("tokens", "ms per token", "error"):
        shown.add_column(column, justify="right", no_wrap=True)
    shown.add_column("result", no_wrap=True)
    for each in stages:
        time = f"{1e3 * each.seconds / each.tokens:.2f}" if each.seconds else ""
        result = "[bold red]WRONG[/bold red]" if each.message else "[green]ok[/green]"
        shown.add_row(each.name, str(each.tokens), time, f"{each.error:.1e}", result)
    return shown


def cache_line(geometry: MLAGeometry, settings: Settings) -> str:
    """The bytes of a token in the cache."""
    size, bf16 = (row_codec(f, geometry.row).bytes_per_token for f in (settings.format, "bf16"))
    expanded = geometry.expanded_elements_per_token * torch.bfloat16.itemsize
    keys = geometry.index_head_dim + SCALE_BYTES if geometry.has_indexer else 0
    return (
        f"Cache: {size} bytes per token and layer ({settings.format})"
        + (f", and {keys} for its index key" if keys else "; this model has no indexer")
        + f"; {bf16} in bf16; {expanded} as K and V of {geometry.num_heads} heads."
    )
