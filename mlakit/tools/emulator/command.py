"""`mlakit emulate`: runs configurations of Gluon kernels and prints what the emulator saw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mlakit.dispatch.proofs import hash_of_sources
from mlakit.tools.emulator import record
from mlakit.tools.emulator.harness import CONFIGURATIONS, Outcome, Step, configuration, emulate
from mlakit.tools.emulator.lowering import exit_without_leak_reports


def names_with(text: str) -> list[str]:
    """Return the configurations whose names contain `text`. Raises ValueError if there is none."""
    if text in CONFIGURATIONS:
        return [text]
    found = [name for name in CONFIGURATIONS if text in name]
    if not found:
        configuration(text)  # raises
    return found


def listing() -> str:
    """Return the configurations with the cases that they run, one on a line."""
    width = max(map(len, CONFIGURATIONS))
    return "\n".join(f"{name:{width}}  {configuration(name).case}" for name in CONFIGURATIONS)


def run(
    names: Sequence[str],
    seeds: Sequence[int],
    *,
    is_traced: bool,
    steps: int,
    file: Path | None = None,
) -> bool:
    """Run configurations with every seed, print the outcomes, and return whether all passed.

    file  for a record of the runs
    """
    exit_without_leak_reports()
    sources = hash_of_sources()
    console, outcomes = Console(), []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("emulating", total=len(names) * len(seeds))
        for name in names:
            for seed in seeds:
                progress.update(task, description=name)
                outcomes.append(emulate(name, seed, is_traced=is_traced))
                progress.advance(task)
                print_outcome(console, outcomes[-1], steps)
    if file is not None:
        record.write(record.record_of(outcomes, sources), file)
    faulty = sum(not each.passed for each in outcomes)
    if len(outcomes) > 1:
        result = f"[red]{faulty} of them failed[/red]" if faulty else "[green]all passed[/green]"
        console.print(f"{len(outcomes)} runs, {result}", highlight=False)
    return faulty == 0


def print_outcome(console: Console, outcome: Outcome, steps: int) -> None:
    """Print a line for a run, and its fault with the steps that led to it."""
    ran = ", ".join(
        f"{each.kernel} ({each.ctas} {'CTA' if each.ctas == 1 else 'CTAs'}, {each.steps} steps)"
        for each in outcome.launches
    )
    state = "[green]ok[/green]" if outcome.passed else f"[red]{outcome.kind}[/red]"
    head = f"{outcome.configuration}, seed {outcome.seed}: {state}, {outcome.seconds:.1f} s"
    console.print(head, highlight=False, soft_wrap=True)
    if ran:
        console.print(f"  ran {ran}", highlight=False, soft_wrap=True)
    for warning, count in outcome.warnings.items():
        console.print(f"  warning, {count}x: {escape(warning)}", highlight=False, soft_wrap=True)
    if not outcome.passed:
        console.print(f"  {escape(outcome.message)}", highlight=False, soft_wrap=True)
    if outcome.trace:
        console.print("  the steps that led to it:", highlight=False)
        for line in traced_lines(outcome.trace, steps):
            console.print(f"    {escape(line)}", highlight=False, soft_wrap=True)


def traced_lines(trace: Sequence[Step], steps: int) -> list[str]:
    """Return the last steps of a trace, numbered, with a column for who takes them."""
    first = max(len(trace) - steps, 0)
    last = trace[first:]
    width = max((len(step.who) for step in last), default=0)
    lines = [f"{i:6} {step.who:{width}}  {step.what}" for i, step in enumerate(last, first + 1)]
    if first:
        lines.insert(0, f"({first} steps before these are not shown)")
    return lines
