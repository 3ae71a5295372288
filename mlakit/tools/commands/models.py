"""Commands about a model: its memory, its GPUs, the kernels that it needs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from mlakit.model.geometry import PRESETS
from mlakit.tools.options import Command, completion, refuse, usage_errors
from mlakit.tools.planner import command as planner

app = typer.Typer()


@app.command(
    cls=Command,
    epilog="Examples: [bold]mlakit memory deepseek-v3.2 --context 128k --gpu-memory 141 --tp 8 "
    "--weights 80[/bold] · [bold]mlakit memory path/to/checkpoint --format fp8_block128[/bold]",
)
def memory(
    context: typer.Context,
    model: str = typer.Argument(
        ...,
        help="A known model, its Hub id, a config.json or a folder with one.",
        metavar="MODEL",
        autocompletion=completion(PRESETS),
    ),
    tokens: str = typer.Option(
        "4k,32k,128k",
        "--context",
        metavar="N[,N...]",
        help="Tokens per request; a number may end in k or m.",
    ),
    batch: int = typer.Option(1, min=1, help="Number of requests."),
    gpu_memory: float | None = typer.Option(
        None, "--gpu-memory", metavar="GiB", min=0, help="Show how many tokens fit on such a GPU."
    ),
    tp: int = typer.Option(
        1, min=1, help="Tensor-parallel ranks. They do not divide the latent cache."
    ),
    dcp: int = typer.Option(
        1, min=1, help="Decode-context-parallel ranks, which divide the cache; must divide --tp."
    ),
    format: Annotated[
        list[str] | None,
        typer.Option(help="Cache format; may be repeated. Default: all that the model supports."),
    ] = None,
    index_format: str | None = typer.Option(
        None,
        help="Format of an indexer's keys, such as mxfp4_block32. Default: fp8_token; in "
        "DeepSeek-V4 it follows --format.",
    ),
    page_size: int = typer.Option(64, min=1, help="Tokens per page; a request has whole pages."),
    weights: float | None = typer.Option(
        None,
        metavar="GiB",
        min=0,
        help="With --gpu-memory: weights per rank. Default: the total_size of a checkpoint's index "
        "in the folder divided by --tp; else they are not counted.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """Show the bytes of a model's KV cache per format and rank, and how many tokens fit on a GPU.

    Index keys are included, pages are counted as they are allocated, and the last row is the K/V
    cache without MLA. Needs no GPU.
    """
    from mlakit.tools.columns import wide_console
    from mlakit.tools.memory.budget import memory_report, parse_contexts, table

    if gpu_memory is None:
        refuse(context, ["weights"], "{} needs --gpu-memory")
    with usage_errors():
        report = memory_report(
            model,
            parse_contexts(tokens),
            batch=batch,
            tp=tp,
            dcp=dcp,
            formats=format or (),
            page_size=page_size,
            gpu_gib=gpu_memory,
            weights_gib=weights,
            index_format=index_format,
        )
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
    else:
        console = wide_console()
        console.print(table(report, console.width), highlight=False)


app.command("plan", cls=Command, epilog=planner.EXAMPLES)(planner.plan)


@app.command(
    cls=Command,
    epilog="Examples: [bold]mlakit warmup deepseek-v3 --heads 16 --format fp8_block128[/bold] · "
    "mlakit warmup deepseek-v3.2 --heads 16 --format fp8_block128 --for vllm --arch sm_90",
)
def warmup(
    model: Annotated[
        str,
        typer.Argument(
            help="A known model, its Hub id, a config.json or a folder with one.",
            metavar="MODEL",
            autocompletion=completion(PRESETS),
        ),
    ],
    heads: int | None = typer.Option(
        None, min=1, help="Query heads of a rank: the model's divided by TP. Default: all."
    ),
    format: str = typer.Option("bf16", help="Cache format."),
    page_size: int = typer.Option(64, min=1, help="Tokens per page."),
    page_rows: int | None = typer.Option(
        None,
        min=1,
        help="Rows from a page to the next, where pages of other layers lie between. Default: "
        "--page-size.",
    ),
    dtype: str = typer.Option("bf16", help="Dtype of activations: bf16, fp16 or fp32."),
    user: str = typer.Option(
        "all", "--for", help="Who calls the ops: vllm, sglang, steps (mlakit.steps) or all."
    ),
    arch: str | None = typer.Option(
        None,
        help="Architecture or card, such as sm_90 or H200; needs no GPU. Default: this "
        "machine's GPU.",
    ),
    sms: int | None = typer.Option(
        None, min=1, help="SMs of that GPU, with --arch. Default: those of a usual card."
    ),
    max_context: int | None = typer.Option(
        None, min=1, help="Tokens of the longest request. Default: the model's."
    ),
    max_tokens: int = typer.Option(8192, min=1, help="New tokens of a step."),
    fp8_weights: bool = typer.Option(
        False, "--fp8-weights", help="Block-FP8 up-projections, for mlakit.steps."
    ),
    batch_invariant: bool = typer.Option(
        False, "--batch-invariant", help="An engine's batch-invariant mode."
    ),
    jobs: int | None = typer.Option(None, min=1, help="Processes. Default: one per core."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a sentence."),
) -> None:
    """Compile every kernel that serving a model launches into Triton's cache.

    Kernels that are in the cache already are not compiled again. The exit status is 1 if a kernel
    cannot be compiled or the cache cannot be written.
    """
    from dataclasses import asdict

    from mlakit.precompile import WarmupError
    from mlakit.precompile import warmup as compile_kernels

    try:
        with usage_errors():
            done = compile_kernels(
                model,
                heads=heads,
                format=format,  # type: ignore[arg-type]  # it is checked
                page_size=page_size,
                page_rows=page_rows,
                dtype=dtype,
                user=user,
                max_context=max_context,
                max_tokens=max_tokens,
                has_fp8_weights=fp8_weights,
                is_batch_invariant=batch_invariant,
                arch=arch,
                num_sms=sms,
                jobs=jobs,
                show_progress=True,
            )
    except WarmupError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(json.dumps(asdict(done), indent=2) if as_json else str(done))
