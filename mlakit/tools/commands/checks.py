"""Commands that check results: on this machine, at random, in the emulator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from mlakit.dispatch.names import BACKENDS, OPS, one_of
from mlakit.tools.options import Command, completion, refuse, refuse_all_but, typed, usage_errors

if TYPE_CHECKING:
    from mlakit.dispatch.names import Backend

app = typer.Typer()
PROOF_OPTIONS = {"backend", "quick", "jobs", "as_json"}  # others make it a random check


@app.command(
    cls=Command, epilog="Examples: [bold]mlakit doctor[/bold], mlakit doctor --json --seconds 0"
)
def doctor(
    seconds: float = typer.Option(
        5.0, min=0.0, help="Seconds of random calls per backend, after one call of each op."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of tables."),
) -> None:
    """Show this machine, which backends work on it, and which benchmark peers are available.

    Calls every op on every available backend and compares the results with the oracle; the exit
    status is 1 if one is wrong. On a GPU the kernels are compiled first, which takes a minute.
    """
    from rich.console import Console

    from mlakit.tools.doctor import examine, report

    with Console(stderr=True).status("calling every op"):
        diagnosis = examine(seconds)
    if as_json:
        typer.echo(json.dumps(diagnosis.as_json(), indent=2))
    else:
        Console().print(report(diagnosis), highlight=False)
    if not diagnosis.passed:
        raise typer.Exit(1)


@app.command(
    cls=Command,
    epilog="Examples: [bold]mlakit check --minutes 10[/bold], "
    "mlakit check --op mla_decode --seed 7 --count 1, "
    "[bold]mlakit check --launches 10000 --backend hopper[/bold], "
    "mlakit check --backend blackwell --quick",
)
def check(
    context: typer.Context,
    op: Annotated[
        list[str] | None,
        typer.Option(help="Check only this op; may be repeated.", autocompletion=completion(OPS)),
    ] = None,
    minutes: float | None = typer.Option(
        None, help="Duration. Default: 1 minute, or until --count or --launches are done."
    ),
    count: int | None = typer.Option(None, min=1, help="Number of cases."),
    launches: int | None = typer.Option(
        None,
        min=1,
        help="Check this many launches of mla_decode, mla_prefill, sparse_mla, scaled_mm_fp8 and "
        "the indexer ops instead, in few configurations that are compiled once. The oracle runs on "
        "the device: milliseconds per launch on a GPU.",
    ),
    first: int = typer.Option(0, min=0, help="With --launches: the index of the first launch."),
    calls: int | None = typer.Option(
        None,
        min=1,
        help="With --launches: calls per launch, which must all return the same bits. Default: 1 "
        "or 3. Many calls find intermittent errors.",
    ),
    seed: int | None = typer.Option(
        None, min=0, help="Of the first case, or of all launches. Default: random."
    ),
    device: str = typer.Option("auto", help="auto, cpu or cuda; auto is a GPU if torch sees one."),
    backend: str = typer.Option(
        "", help=f"{one_of(BACKENDS[1:])}. Default: every backend that supports the case."
    ),
    kernel: str = typer.Option(
        "",
        metavar="NAME",
        help="With --launches: only launches that dispatch gives to this kernel, such as m64_bf16 "
        "of mla_decode and sparse_mla.",
    ),
    any_widths: bool = typer.Option(
        False,
        "--any-widths",
        help="Random widths and page sizes; a GPU then compiles a kernel for most cases.",
    ),
    jobs: int | None = typer.Option(
        None, min=1, help="Processes: each compiles kernels on a core of its own. Default: 1."
    ),
    record: str = typer.Option(
        "",
        metavar="FILE",
        help="With --launches: add the launches of each kernel to a JSON file, with seed, commit, "
        "Triton and GPU.",
    ),
    quick: bool = typer.Option(
        False,
        "--quick",
        help="With --backend blackwell and no other option: one configuration of each kernel, "
        "which lets auto take only those.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """Call the ops with random problems and compare every result with a float64 oracle.

    Stops at the first wrong result and prints the command that repeats it. The exit status is 1 if
    a result is wrong or nothing could be checked.

    --backend blackwell or hopper alone checks every configuration of the kernels that need it
    instead, with as many processes as there are cores, and records on this machine which of them
    auto may take.
    """
    from secrets import randbelow

    from rich.console import Console

    from mlakit.tools import check, launch_records, prove

    if prove.needs_proof(backend) and not set(typed(context)) - PROOF_OPTIONS:
        _prove(cast("Backend", backend), is_quick=quick, jobs=jobs, as_json=as_json)
        return
    refuse(context, ["quick"], "{} needs --backend blackwell, and only --jobs and --json beside it")
    if minutes is None and count is None and launches is None:
        minutes = check.DEFAULT_MINUTES
    settings = check.Settings(
        check.all_ops(op or (), launched=launches is not None),
        seed=randbelow(2**31) if seed is None else seed,
        device=device,
        backend=backend,
        minutes=minutes,
        count=count,
        any_widths=any_widths,
        launches=launches,
        first=first,
        calls=calls,
        kernel=kernel,
        record=record,
        jobs=jobs or 1,
    )
    with usage_errors():
        settings = check.with_kernel(settings)
        check.check_settings(settings)
        if record and Path(record).exists():
            launch_records.read(Path(record))  # before an hour of launches, not after it
    if launches is None:
        refuse(context, ["first"], "{} needs --launches")  # also for --first 0
    outcome = check.run_with_progress(settings)
    if record:
        launch_records.add_run(Path(record), outcome)
    if as_json:
        typer.echo(json.dumps(outcome.as_json(), indent=2))
    else:
        Console().print(check.table(outcome))
        typer.echo(check.summary(outcome))
    if not outcome.passed:
        raise typer.Exit(1)


def _prove(backend: Backend, *, is_quick: bool, jobs: int | None, as_json: bool) -> None:
    """Check what `auto` takes only with a proof, and record it."""
    from mlakit.tools import prove

    with usage_errors():
        outcome = prove.run_with_progress(backend, is_quick=is_quick, jobs=jobs)
    typer.echo(json.dumps(outcome.as_json(), indent=2) if as_json else prove.summary(outcome))
    if not outcome.passed:
        raise typer.Exit(1)


@app.command(
    cls=Command,
    epilog="Examples: [bold]mlakit emulate --list[/bold], "
    "[bold]mlakit emulate hopper-decode-h128-bf16 --seed 3 --trace[/bold], "
    "mlakit emulate sparse --seeds 5",
)
def emulate(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(help="A configuration, or a part of the names of several.", metavar="NAME"),
    ] = None,
    show_list: bool = typer.Option(False, "--list", help="List the configurations and exit."),
    seed: int = typer.Option(0, min=0, help="Seed of the inputs and of the interleaving."),
    seeds: int = typer.Option(1, min=1, help="Number of seeds, from --seed on."),
    trace: bool = typer.Option(
        False, "--trace", help="Show the interleaving that led to a fault, step by step."
    ),
    steps: int = typer.Option(60, min=1, help="With --trace: number of steps, the last ones."),
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write a record of the runs to this file.", metavar="FILE"),
    ] = None,
) -> None:
    """Run Gluon kernels on the CPU, and look for races, deadlocks and wrong results.

    A configuration runs with little work in an emulator of a Hopper or Blackwell GPU, which
    interprets the kernel's TTGIR in a random interleaving of its warp partitions and asynchronous
    copies. Results are compared with a float64 oracle. The exit status is 1 if there is a fault.
    The emulator is in the source tree only; docs/emulator.md describes what it proves.
    """
    if not trace:
        refuse(context, ["steps"], "{} needs --trace")
    try:
        from mlakit.tools.emulator import command
    except ModuleNotFoundError as error:
        if error.name not in ("mlakit.tools", "mlakit.tools.emulator"):
            raise
        typer.echo(
            "Error: the emulator is in the source tree of mlakit only, not in its wheel. Run the "
            "command in a clone of https://github.com/mlakit/mlakit.",
            err=True,
        )
        raise typer.Exit(1) from None
    if show_list:
        refuse_all_but(context, ["show_list"], "{} has no effect with --list")
        typer.echo(command.listing())
        return
    with usage_errors():
        if name is None:
            raise ValueError("NAME must be a configuration, as --list shows them, got nothing")
        names = command.names_with(name)
    some = range(seed, seed + seeds)
    if not command.run(names, some, is_traced=trace, steps=steps, file=json_file):
        raise typer.Exit(1)
