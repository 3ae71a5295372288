"""The commands `mlakit vllm-args` and `mlakit plan-cluster`: they parse arguments only.

What takes long to import is imported when a command runs, as in cli.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import typer

from mlakit.model.geometry import PRESETS
from mlakit.tools.options import usage_errors

VLLM_ARGS_EXAMPLES = (
    "Examples: [bold]mlakit vllm-args path/to/DeepSeek-V3 --gpus 8 --context 128k --requests 16"
    "[/bold] · [bold]mlakit vllm-args deepseek-v3.2 --gpus 16 --context 64k --json[/bold]"
)

PLAN_EXAMPLES = (
    "Examples: [bold]mlakit plan-cluster deepseek-v3 --gpus 8 --context 4k,32k,128k[/bold] · "
    "[bold]mlakit plan-cluster deepseek-v3 --gpus 16 --context 4k..1m --link ib:25 --plot c.svg"
    "[/bold]"
)


def _complete_model(incomplete: str) -> list[str]:
    return [model for model in PRESETS if model.startswith(incomplete)]


MODEL = typer.Argument(
    ...,
    help="A folder with a config.json, or a known model.",
    metavar="MODEL_DIR",
    autocompletion=_complete_model,
)
WEIGHTS = typer.Option(
    None,
    metavar="GiB",
    help="Weights of the whole model. Default: total_size of the checkpoint's index, else its "
    "files, else by the config.",
)
GPU_MEMORY = typer.Option(
    "H200", "--gpu-memory", metavar="NAME|GiB", help="Memory of one GPU, 141 GiB for H200."
)
PER_NODE = typer.Option(8, "--gpus-per-node", help="GPUs of a node.")


def vllm_args(
    model: str = MODEL,
    gpus: int = typer.Option(..., help="GPUs that serve the model, one engine over all of them."),
    tokens: str = typer.Option(
        ..., "--context", metavar="N", help="Tokens of a request, prompt and answer, such as 128k."
    ),
    requests: int = typer.Option(1, help="Requests of that length at a time."),
    cache_dtype: str | None = typer.Option(
        None,
        "--cache-dtype",
        help="vLLM's --kv-cache-dtype: auto, bfloat16, float16, fp8, fp8_e4m3 or fp8_ds_mla. "
        "Default: auto (bf16) if it fits, else fp8; fp8_ds_mla for models with an indexer.",
    ),
    gpu_memory: str = GPU_MEMORY,
    gpus_per_node: int = PER_NODE,
    weights: float | None = WEIGHTS,
    as_json: bool = typer.Option(False, "--json", help="Print JSON with the lines and reasons."),
) -> None:
    """Print the line of [bold]vllm serve[/bold] that fits a model and a context on N GPUs.

    The line goes to stdout, one per node; the reasons go to stderr. TP is the GPUs of a node, PP
    the nodes. DCP is the lowest degree with which the requests fit, before an FP8 cache is tried.
    Needs no GPU and starts nothing. The exit status is 1 if nothing fits.
    """
    from rich.console import Console

    from mlakit.tools.columns import wide_console
    from mlakit.tools.memory import parse_contexts
    from mlakit.tools.planner import report
    from mlakit.tools.planner.serve import serve_plan

    with usage_errors():
        contexts = parse_contexts(tokens)
        if len(contexts) != 1:
            raise ValueError(f"context must be one number such as 128k, got {tokens!r}")
        plan = serve_plan(
            model,
            gpus=gpus,
            context=contexts[0],
            requests=requests,
            gpu_memory=gpu_memory,
            cache_dtype=cache_dtype,
            gpus_per_node=gpus_per_node,
            weights_gib=weights,
        )
    if as_json:
        typer.echo(json.dumps(plan.as_json(), indent=2))
    else:
        width = wide_console().width
        console = Console(stderr=True, width=width)
        if plan.why_not is None:
            for line in plan.lines:
                typer.echo(line)
        console.print(report.reasons(plan, width), highlight=False)
    if plan.why_not is not None:
        typer.echo(f"Nothing fits: {plan.why_not}.", err=True)
        raise typer.Exit(1)


def plan_cluster(
    model: str = MODEL,
    gpus: int = typer.Option(8, help="GPUs of the cluster; each TP group of them is an engine."),
    tokens: str = typer.Option(
        "4k,32k,128k",
        "--context",
        metavar="N[,N...]|N..N",
        help="Cached tokens of a request; 4k..1m doubles from the first to the last.",
    ),
    tp: str = typer.Option("", metavar="N[,N...]", help="Only these TP degrees."),
    dcp: str = typer.Option("", metavar="N[,N...]", help="Only these DCP degrees."),
    requests: int | None = typer.Option(
        None, help="Requests per engine. Default: as many as fit, at most --max-requests."
    ),
    max_requests: int = typer.Option(256, "--max-requests", help="The most that an engine takes."),
    format: str | None = typer.Option(
        None,
        help="Cache format: bf16 (default), fp8, fp8_token or fp8_block128, which is the only one "
        "for models with an indexer.",
    ),
    node_link: str = typer.Option(
        "nvlink",
        "--node-link",
        metavar="LINK",
        help="Within a node: nvlink (450 GB/s, 10 us), ib (50 GB/s, 30 us), or with other GB/s per "
        "GPU and us per collective: nvlink:300:12.",
    ),
    link: str = typer.Option(
        "ib", metavar="LINK", help="Between nodes, for groups that span them: as --node-link."
    ),
    gpu_memory: str = GPU_MEMORY,
    gpus_per_node: int = PER_NODE,
    weights: float | None = WEIGHTS,
    weight_efficiency: float = typer.Option(
        0.7, "--weight-efficiency", help="Share of the read bandwidth with which weights are read."
    ),
    layer_us: float = typer.Option(
        60.0, "--layer-us", help="Fixed time of a layer's small kernels, in us."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
    plot_file: str | None = typer.Option(
        None,
        "--plot",
        metavar="FILE",
        help="Write a chart of tokens/s/GPU over context to this .svg or .png file; .png needs "
        "matplotlib.",
    ),
) -> None:
    """Simulate decode on a cluster: tokens per second per TP and DCP degree and context.

    A model, not a measurement; no GPU is needed. A step is the sum of attention (kernel times that
    were measured on one H200, interpolated by heads and tokens), reading the weights (evenly routed
    experts), collectives (latency + bytes / link bandwidth, nothing overlaps: two all-reduces per
    layer, with DCP two all-gathers and a reduce-scatter more) and a fixed time per layer. GPUs
    beyond TP run further engines. Pipeline and expert parallelism, prefill, drafts and the
    scheduler are not simulated. * marks the most tokens per second and GPU of a context.
    """
    from mlakit.tools.columns import wide_console
    from mlakit.tools.memory.report import check_chart_file, write_chart
    from mlakit.tools.planner import report, simulation

    file = None if plot_file is None else Path(plot_file)
    with usage_errors():
        if file is not None:
            check_chart_file(file)
        settings = simulation.Settings(
            gpus=gpus,
            gpus_per_node=gpus_per_node,
            gpu_memory=gpu_memory,
            node_link=simulation.parse_link("--node-link", node_link),
            link=simulation.parse_link("--link", link),
            requests=requests,
            max_requests=max_requests,
            format=format,
            weights_gib=weights,
            weight_efficiency=weight_efficiency,
            layer_us=layer_us,
        )
        contexts = simulation.parse_range(tokens)
        degrees = (
            simulation.parse_degrees(name, text) for name, text in (("tp", tp), ("dcp", dcp))
        )
        plan = simulation.plan_cluster(model, contexts, settings, *degrees)
        if file is not None:
            write_chart(report.chart(plan), file)
    if as_json:
        typer.echo(json.dumps(plan.as_json(), indent=2))
    else:
        console = wide_console()
        console.print(report.table(plan, console.width), highlight=False)
    if not any(step.requests for step in plan.steps):
        typer.echo("Nothing fits.", err=True)
        raise typer.Exit(1)
