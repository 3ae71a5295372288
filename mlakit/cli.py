"""The `mlakit` command: arguments are parsed here, the work is done elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer

from mlakit import __version__
from mlakit.geometry import PRESETS, MLAGeometry

app = typer.Typer(
    name="mlakit",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mlakit {__version__}")
        raise typer.Exit


@app.callback(epilog="Example: [bold]mlakit demo[/bold]")
def mlakit(
    version: bool = typer.Option(
        False,
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Show the version and exit.",
    ),
) -> None:
    """Multi-head Latent Attention for PyTorch, for inference."""


@app.command(epilog="Example: [bold]mlakit demo --model kimi-k2 --prompt 1000[/bold]")
def demo(
    model: str = typer.Option("deepseek-v3.2", help=f"One of {', '.join(PRESETS)}."),
    prompt: int = typer.Option(300, min=2, help="Tokens of the prompt."),
    tokens: int = typer.Option(8, min=1, help="Tokens to decode, of each of two continuations."),
    format: str = typer.Option(
        "fp8_block128",
        help="Of cache rows: bf16, fp16, fp32, fp8, fp8_token, fp8_block128, fp8_block64.",
    ),
    device: str = typer.Option("auto", help="auto, cpu or cuda; auto is a GPU if one will do."),
    seed: int = typer.Option(0, min=0, help="Of weights, prompt and samples."),
    documented: bool = typer.Option(True, help="Call the documented functions as well."),
) -> None:
    """Serve one attention layer of a model at full size, a CPU is enough, and check all of it.

    Prefill, decode and sparse attention over a paged cache; exit status 1 if a result is wrong.
    """
    from mlakit.demo import make_settings, run  # torch takes seconds to import: only here

    try:
        geometry = MLAGeometry.preset(model)
        settings = make_settings(
            geometry, prompt=prompt, tokens=tokens, format=format, device=device, seed=seed
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not run(model, geometry, settings, with_documented=documented):
        raise typer.Exit(1)


bench = typer.Typer(no_args_is_help=True, help="Measure this machine, suite by suite.")
app.add_typer(bench, name="bench")


@bench.command(epilog="Example: [bold]mlakit bench cpu --json cpu.json[/bold]")
def cpu(
    json_file: str | None = typer.Option(
        None, "--json", help="Write the figures to this file too."
    ),
    quick: bool = typer.Option(False, "--quick", help="Tiny problems: only to see that it runs."),
    threads: int | None = typer.Option(None, min=1, help="Threads of torch; else its own choice."),
) -> None:
    """Time the CPU kernels against torch.matmul and scaled_dot_product_attention.

    Every workload is held to its float64 oracle before it is timed; the exit status is 1 if a
    result is wrong. It takes minutes, most of them where the CPU has no bf16 products.
    """
    from mlakit.bench.cpu import WORKLOADS  # torch takes seconds to import: only here
    from mlakit.bench.suite import run

    if json_file is not None and not Path(json_file).parent.is_dir():
        raise typer.BadParameter(f"--json: there is no folder {Path(json_file).parent}")
    command = " ".join(["mlakit", *sys.argv[1:]])
    report = run("cpu", WORKLOADS, command=command, quick=quick, threads=threads)
    if report is None:
        raise typer.Exit(1)
    if json_file is not None:
        text = json.dumps(report.as_json(), indent=2, ensure_ascii=False)
        Path(json_file).write_text(f"{text}\n", encoding="utf-8")


def main() -> None:
    """Entry point of the `mlakit` script and of `python -m mlakit`."""
    app()
