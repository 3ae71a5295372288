"""Commands that run a model or a layer of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mlakit.model.geometry import PRESETS, MLAGeometry
from mlakit.model.v4 import is_v4
from mlakit.tools.options import Command, completion, needs_transformers, usage_errors

app = typer.Typer()
_WITH_LATENTS = [name for name in PRESETS if not is_v4(name)]


@app.command(cls=Command, epilog="Example: [bold]mlakit demo --model kimi-k2 --prompt 1000[/bold]")
def demo(
    model: str = typer.Option("deepseek-v3.2", help=f"One of {', '.join(_WITH_LATENTS)}."),
    prompt: int = typer.Option(300, min=2, help="Number of prompt tokens."),
    tokens: int = typer.Option(
        8, min=1, help="Number of tokens to decode, for each of two continuations."
    ),
    format: str = typer.Option(
        "fp8_block128",
        help="Cache format: bf16, fp16, fp32, fp8, fp8_token, fp8_block128, fp8_block64 or "
        "mxfp4_block32.",
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
        if is_v4(model):
            raise ValueError(
                f"--model must be a model with latents, got {model!r}; V4Attention runs DeepSeek-V4"
            )
        settings = make_settings(
            geometry, prompt=prompt, tokens=tokens, format=format, device=device, seed=seed
        )
    if not run(model, geometry, settings):
        raise typer.Exit(1)


@app.command(
    cls=Command,
    epilog="Examples: [bold]mlakit generate DeepSeek-V2-Lite --prompt 'Paris is'[/bold] · "
    "mlakit generate DeepSeek-V2-Lite --ids 11,42,7 --compare",
)
def generate(
    model_dir: Annotated[
        Path, typer.Argument(help="Folder of a checkpoint of transformers.", metavar="MODEL_DIR")
    ],
    prompt: str | None = typer.Option(None, help="Text to continue."),
    ids: str | None = typer.Option(
        None, metavar="N[,N...]", help="Token ids to continue, in place of --prompt."
    ),
    tokens: int = typer.Option(64, min=1, help="Largest number of new tokens."),
    format: str | None = typer.Option(
        None,
        help="Cache format: bf16, fp16, fp32, fp8, fp8_token, fp8_block128, fp8_block64 or "
        "mxfp4_block32. Default: the weights' dtype.",
    ),
    page_size: int = typer.Option(64, min=1, help="Tokens per page."),
    dtype: str = typer.Option(
        "auto", help="Weights' dtype: auto (the checkpoint's), bf16, fp16 or fp32."
    ),
    device: str = typer.Option("auto", help="auto, cpu or cuda."),
    compare: bool = typer.Option(
        False, "--compare", help="Also run eager attention: its tokens, times and cache."
    ),
) -> None:
    """Continue a prompt with an MLA model of transformers, patched. Greedy."""
    from mlakit.tools.generate import run

    if (prompt is None) == (ids is None):
        raise typer.BadParameter("one of --prompt and --ids must be given")
    with usage_errors(), needs_transformers("generate"):
        numbers = [] if ids is None else token_ids(ids)
        run(model_dir, prompt, numbers, tokens, format, page_size, dtype, device, compare=compare)


def token_ids(text: str) -> list[int]:
    """Return the token ids that a list such as 11,42,7 has."""
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise ValueError(f"ids must be whole numbers such as 11,42,7, got {text!r}") from None


@app.command(
    cls=Command,
    epilog="Example: [bold]mlakit tiny deepseek-v2-lite DeepSeek-V2-Lite[/bold]",
)
def tiny(
    model: Annotated[
        str,
        typer.Argument(
            help="A known model, by its name or Hub id.",
            metavar="MODEL",
            autocompletion=completion(PRESETS),
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.", metavar="DIR")],
    seed: int = typer.Option(0, min=0, help="Seed of the weights."),
) -> None:
    """Write a small checkpoint of a model's kind, with random weights and a tokenizer.

    It has two layers, 4 heads and 256 tokens, a few megabytes, and the config of the release
    otherwise: FP8 weights, an indexer, RoPE. The examples of the documentation run with it. Its
    text has no sense.
    """
    from mlakit.tools.tiny import write

    with usage_errors(), needs_transformers("tiny"):
        from transformers.utils import logging

        logging.disable_progress_bar()
        name = write(model, folder, seed=seed)
    typer.echo(f"A small {name} with random weights is in {folder}.")


@app.command(
    cls=Command,
    epilog="Example: [bold]mlakit accuracy DeepSeek-V2-Lite --text book.txt --format fp8[/bold]",
)
def accuracy(
    model_dir: Annotated[
        Path, typer.Argument(help="Folder of a checkpoint of transformers.", metavar="MODEL_DIR")
    ],
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text to measure with. Default: random tokens."),
    ] = None,
    tokens: int = typer.Option(512, min=2, help="Largest number of tokens."),
    format: Annotated[
        list[str] | None,
        typer.Option(help="Cache format; may be repeated. Default: all that the model supports."),
    ] = None,
    dtype: str = typer.Option(
        "auto", help="Weights' dtype: auto (the checkpoint's), bf16, fp16 or fp32."
    ),
    device: str = typer.Option("auto", help="auto, cpu or cuda."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """Show what each cache format costs a model: error of attention by layer, and perplexity.

    The model runs once with eager attention and once patched per format, over the same tokens.
    """
    from dataclasses import asdict

    from mlakit.tools.accuracy import measure, table
    from mlakit.tools.columns import wide_console

    with usage_errors(), needs_transformers("accuracy"):
        if text is not None and not text.is_file():
            raise ValueError(f"text must be a file, got {text}")
        content = None if text is None else text.read_text("utf-8", errors="replace")
        found = measure(model_dir, content, tokens, format or (), dtype, device)
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in found], indent=2))
    else:
        console = wide_console()
        of = "random tokens" if text is None else text.name
        console.print(table(found, of, console.width), highlight=False)
