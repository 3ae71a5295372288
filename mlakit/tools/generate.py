"""What `mlakit generate` prints."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mlakit.dispatch.checks import UnsupportedError
from mlakit.formats import known_format
from mlakit.integrations.transformers.generation import LocalModel, Run


def run(
    folder: Path,
    prompt: str,
    count: int,
    format: str | None,
    page_size: int,
    dtype: str,
    device: str,
    *,
    compare: bool,
) -> None:
    """Generate and print; ValueError for what the command line got wrong."""
    console, errors = Console(), Console(stderr=True)
    known = None if format is None else known_format(format)
    with errors.status(f"loading {folder}"):
        model = LocalModel(folder, dtype=dtype, device=device)
    eager = _timed(model, "eager", prompt, count, errors) if compare else None
    try:
        model.patch(format=known, page_size=page_size)
    except UnsupportedError as error:
        raise ValueError(str(error)) from None
    ours = _timed(model, "mlakit", prompt, count, errors)
    console.print(prompt + model.text(ours.tokens), highlight=False, markup=False)
    console.print(_line("mlakit", ours), highlight=False)
    if eager is not None:
        console.print(_line("eager", eager), highlight=False)
        same = ours.common_prefix(eager)
        console.print(f"{same} of {len(ours.tokens)} tokens equal", highlight=False)


def _timed(model: LocalModel, name: str, prompt: str, count: int, console: Console) -> Run:
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("", total=count)
        return model.generate(prompt, count, lambda done: bars.update(bar, completed=done))


def _line(name: str, found: Run) -> str:
    speed = f"{found.tokens_per_second:.1f} tokens/s" if len(found.tokens) > 1 else "one token"
    return f"{name:6}  first token after {found.prefill_seconds:.2f} s, then {speed}"
