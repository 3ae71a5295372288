"""The commands `mlakit vllm-args` and `mlakit plan-cluster`: they parse arguments only.

What takes long to import is imported when a command runs, as in cli.py.
"""

from __future__ import annotations

import json

import typer

from mlakit.geometry import PRESETS
from mlakit.options import usage_errors

VLLM_ARGS_EXAMPLES = (
    "Examples: [bold]mlakit vllm-args path/to/DeepSeek-V3 --gpus 8 --context 128k --requests 16"
    "[/bold] · [bold]mlakit vllm-args deepseek-v3.2 --gpus 16 --context 64k --json[/bold]"
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

    from mlakit.cluster import report
    from mlakit.cluster.serve import serve_plan
    from mlakit.columns import wide_console
    from mlakit.memory import parse_contexts

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
