"""What `mlakit generate` prints."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mlakit.dispatch.checks import UnsupportedError
from mlakit.formats import FLOAT_FORMATS, known_format
from mlakit.integrations.transformers.generation import LocalModel, Run

SHORT = 1024  # tokens; over fewer attention is a small part of a step


def run(
    folder: Path,
    prompt: str | None,
    ids: list[int],
    count: int,
    format: str | None,
    page_size: int,
    dtype: str,
    device: str,
    *,
    compare: bool,
) -> None:
    """Generate and print; ValueError for what the command line got wrong.

    ids  the prompt in tokens, where `prompt` is None
    """
    console, errors = Console(), Console(stderr=True)
    known = None if format is None else known_format(format)
    with errors.status(f"loading {folder}"):
        model = LocalModel(folder, dtype=dtype, device=device, has_text=prompt is not None)
    tokens = ids if prompt is None else model.ids(prompt)
    model.check_ids(tokens)
    eager = _timed(model, "eager", tokens, count, errors) if compare else None
    try:
        model.patch(format=known, page_size=page_size)
    except UnsupportedError as error:
        raise ValueError(str(error)) from None
    ours = _timed(model, "mlakit", tokens, count, errors)
    shown = model.text(ids) if prompt is None else prompt
    console.print(shown + model.text(ours.tokens), highlight=False, markup=False)
    console.print(_line("mlakit", ours), highlight=False)
    if eager is not None:
        console.print(_line("eager", eager), highlight=False)
        for said in comparison(ours, eager, known or "bf16"):
            console.print(said, highlight=False, markup=False)


def comparison(ours: Run, eager: Run, format: str) -> list[str]:
    """Return sentences on the tokens of both runs, and on what a reader may expect of them."""
    same, count = ours.common_prefix(eager), max(len(ours.tokens), len(eager.tokens))
    said = [f"{same} of {count} tokens equal" + (" before the first difference" * (same < count))]
    if format not in FLOAT_FORMATS.values():
        said.append(
            "FP8 rows keep 4 significant bits of a latent: logits change by some per cent, and "
            "tokens differ from the first place on where two logits are that close. "
            "`mlakit accuracy` measures both."
        )
    elif same < count:
        said.append(
            "In 16 bits the order of sums decides where two logits are nearly equal; with "
            "--dtype fp32 the tokens should be equal."
        )
    if ours.cache is not None and ours.cache.tokens < SHORT:
        said.append(
            f"Attention is a small part of a step over {ours.cache.tokens} tokens: compare times "
            "with a long prompt."
        )
    return said


def _timed(model: LocalModel, name: str, prompt: list[int], count: int, console: Console) -> Run:
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("", total=count)
        return model.generate(prompt, count, lambda done: bars.update(bar, completed=done))


def _line(name: str, found: Run) -> str:
    speed = f"{found.tokens_per_second:.1f} tokens/s" if len(found.tokens) > 1 else "one token"
    line = f"{name:6}  first token after {found.prefill_seconds:.2f} s, then {speed}"
    if found.cache is None:
        return line
    use = found.cache
    return (
        f"{line}; cache {use.bytes_per_token:,.0f} bytes/token, {use.allocated_bytes:,} allocated"
    )
