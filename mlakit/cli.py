"""The `mlakit` command: arguments are parsed here, the work is done elsewhere."""

from __future__ import annotations

import typer

from mlakit import __version__

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


@app.command(epilog="Example: [bold]mlakit demo[/bold]")
def demo() -> None:
    """Run the library once on this machine, a CPU is enough, and show what it did."""
    from mlakit.demo import run  # torch takes seconds to import: only who runs it waits

    run()


def main() -> None:
    """Entry point of the `mlakit` script and of `python -m mlakit`."""
    app()
