"""The `mlakit` command, put together of the commands of `mlakit.tools.commands`.

torch is imported only when a command runs: the import takes seconds, and `--version`, `--help` and
shell completion do not need it.
"""

from __future__ import annotations

import typer

from mlakit import __version__
from mlakit.tools.commands import bench, checks, kernels, models, run

app = typer.Typer(
    name="mlakit",
    no_args_is_help=True,
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


for topic in (run, bench, kernels, models, checks):
    app.add_typer(topic.app)


def main() -> None:
    """Entry point of the `mlakit` script and of `python -m mlakit`."""
    app()
