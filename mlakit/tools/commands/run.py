"""Commands that run a model or a layer of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlakit.model.geometry import PRESETS, MLAGeometry
from mlakit.tools.options import Command, usage_errors

app = typer.Typer()


@app.command(cls=Command, epilog="Example: [bold]mlakit demo --model kimi-k2 --prompt 1000[/bold]")
def demo(
    model: str = typer.Option("deepseek-v3.2", help=f"One of {', '.join(PRESETS)}."),
    prompt: int = typer.Option(300, min=2, help="Number of prompt tokens."),
    tokens: int = typer.Option(
        8, min=1, help="Number of tokens to decode, for each of two continuations."
    ),
    format: str = typer.Option(
        "fp8_block128",
        help="Cache format: bf16, fp16, fp32, fp8, fp8_token, fp8_block128 or fp8_block64.",
    ),
    device: str = typer.Option("auto", help="auto, cpu or cuda; auto is a GPU if torch sees one."),
    seed: int = typer.Option(0, min=0, help="Seed of the weights and activations."),
) -> None:
    """Serve with one full-size attention layer and check every result. Runs on a CPU or a GPU.

    Runs prefill, decode and sparse attention over a paged KV cache with random activations, and
    compares each result with a float64 oracle. The exit status is 1 if a result is wrong.
    """
    from mlakit.tools.demo import make_settings, run

    with usage_errors():
        geometry = MLAGeometry.preset(model)
        settings = make_settings(
            geometry, prompt=prompt, tokens=tokens, format=format, device=device, seed=seed
        )
    if not run(model, geometry, settings):
        raise typer.Exit(1)


@app.command(
    cls=Command, epilog="Example: [bold]mlakit generate DeepSeek-V2-Lite --prompt 'Paris is'[/bold]"
)
def generate(
    model_dir: Annotated[
        Path, typer.Argument(help="Folder of a checkpoint of transformers.", metavar="MODEL_DIR")
    ],
    prompt: str = typer.Option(..., help="Text to continue."),
    tokens: int = typer.Option(64, min=1, help="Largest number of new tokens."),
    format: str | None = typer.Option(None, help="Cache format. Default: the weights' dtype."),
    page_size: int = typer.Option(64, min=1, help="Tokens per page."),
    dtype: str = typer.Option("auto", help="Weights' dtype; auto is the checkpoint's."),
    device: str = typer.Option("auto", help="auto, cpu or cuda."),
    compare: bool = typer.Option(False, "--compare", help="Also run eager attention."),
) -> None:
    """Continue a prompt with an MLA model of transformers, patched. Greedy."""
    from mlakit.tools.generate import run

    with usage_errors():
        run(model_dir, prompt, tokens, format, page_size, dtype, device, compare=compare)
