"""The command `mlakit plan`. What takes long to import is imported when it runs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import typer

from mlakit.model.geometry import PRESETS
from mlakit.tools.options import completion, usage_errors

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mlakit.tools.planner.plan import Plan

EXAMPLES = (
    "Examples: [bold]mlakit plan deepseek-v3 --context 128k --requests 32[/bold] · "
    "[bold]mlakit plan path/to/DeepSeek-V3.2 --context 64k --gpus 16 --json[/bold]"
)


def plan(
    model: str = typer.Argument(
        ...,
        help="A known model, its Hub id, a config.json or a folder with one.",
        metavar="MODEL",
        autocompletion=completion(PRESETS),
    ),
    tokens: str = typer.Option(
        ..., "--context", metavar="N", help="Tokens of a request, prompt and answer, such as 128k."
    ),
    requests: int | None = typer.Option(
        None, min=1, help="Requests of that length at a time. Default: as many as fit."
    ),
    gpus: int | None = typer.Option(
        None, min=1, help="GPUs of one engine. Default: the fewest that fit."
    ),
    cache_dtype: str | None = typer.Option(
        None,
        "--cache-dtype",
        help="vLLM's --kv-cache-dtype: auto, bfloat16, float16, fp8, fp8_e4m3 or fp8_ds_mla. "
        "Default: auto (bf16) if it fits, else fp8; fp8_ds_mla for models with an indexer.",
    ),
    gpu_memory: float = typer.Option(
        141.0, "--gpu-memory", metavar="GiB", min=1, max=2048, help="Memory of one GPU: H200."
    ),
    gpus_per_node: int = typer.Option(8, "--gpus-per-node", min=1, help="GPUs of a node."),
    weights: float | None = typer.Option(
        None,
        metavar="GiB",
        help="Weights of the whole model. Default: total_size of the checkpoint's index, else its "
        "files, else by the config.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON with the lines and reasons."),
) -> None:
    """Print how many GPUs serve a model, which TP and DCP, and the [bold]vllm serve[/bold] line.

    The line goes to stdout, one per node; candidates and reasons go to stderr. The time of
    attention is interpolated between times measured on one H200. Needs no GPU and starts nothing.
    The exit status is 1 if nothing fits.
    """
    from rich.console import Console

    from mlakit.tools.memory.budget import parse_contexts
    from mlakit.tools.planner.plan import make_plan

    with usage_errors():
        context, *others = parse_contexts(tokens)
        if others:
            raise ValueError(f"context must be one number such as 128k, got {tokens!r}")
        found = make_plan(
            model,
            context=context,
            requests=requests,
            gpus=gpus,
            gpu_gib=gpu_memory,
            cache_dtype=cache_dtype,
            gpus_per_node=gpus_per_node,
            weights_gib=weights,
        )
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
    else:
        console = Console(stderr=True)
        for line in found.lines:
            typer.echo(folded(line, console.width))
        if found.why_not is not None:
            typer.echo(
                f"Does not fit: {needed(found, gpus_per_node)}. Why: {found.why_not}.", err=True
            )
        for part in shown(found, console.width):
            console.print(part, highlight=False)
    if found.why_not is not None:
        raise typer.Exit(1)


def folded(line: str, width: int) -> str:
    """Return a command in lines of at most `width` columns; an option stays with its value."""
    words = shlex.split(line)
    starts = [0, *(i for i, word in enumerate(words) if word.startswith("--")), len(words)]
    parts = [shlex.join(words[first:last]) for first, last in pairwise(starts)]
    lines = parts[:1]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + len("  \\") > width:
            lines.append("   ")
        lines[-1] += f" {part}"
    return " \\\n".join(lines)


def needed(found: Plan, gpus_per_node: int) -> str:
    """Return what would fit, for a plan in which nothing does."""
    from mlakit.tools.planner.plan import MOST_NODES

    if found.enough_gpus is not None:
        return f"needs {found.enough_gpus} GPUs"
    tried = max(MOST_NODES * gpus_per_node, *(each.gpus for each in found.candidates))
    return f"needs more than {tried} GPUs"


def shown(found: Plan, width: int) -> Iterator[RenderableType]:
    """The candidates, the options of the chosen one with their reasons, and the assumptions."""
    from mlakit.tools.columns import Column, fitting_table
    from mlakit.tools.memory.budget import GIB
    from mlakit.tools.planner.plan import RESERVE

    columns = [Column(heading) for heading in ("GPUs", "TP", "PP", "DCP")]
    columns += [Column("cache", is_number=False)]
    columns += [Column("GiB\nneeded", rank=2), Column("GiB\nfree", rank=2)]
    columns += [Column("requests\nfit"), Column("attention\nms", rank=1)]
    rows = []
    for each in found.candidates:
        mark = "*" if each == found.chosen else ""
        row = [f"{mark}{each.gpus}", str(each.tp), str(each.pp), str(each.dcp), each.cache_dtype]
        row += [f"{bytes / GIB:,.1f}" for bytes in (each.needed_bytes, max(each.free_bytes, 0))]
        row.append(f"{each.max_requests:,}")
        rows.append([*row, "" if each.attention_ms is None else f"{each.attention_ms:.1f}"])
    yield fitting_table(columns, rows, width, grouped=False)
    if found.options:
        text = [Column(heading, is_number=False) for heading in ("option", "value")]
        why = Column("why", is_number=False, folds_at=20)
        yield fitting_table([*text, why], found.options, width, grouped=False)
    yield (
        f"* chosen. Weights: {found.weights.total_bytes / GIB:,.1f} GiB ({found.weights.source}). "
        f"Assumed: {RESERVE / GIB:g} GiB per GPU for activations, CUDA graphs and NCCL."
    )
    yield from found.notes
