"""The `mlakit` command: arguments are parsed here, the work is done elsewhere.

Nothing here imports torch before a command runs: it takes seconds, which `--version`, `--help` and
shell completion need not wait.
"""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from mlakit import __version__
from mlakit.bench import SUITES
from mlakit.geometry import PRESETS, MLAGeometry
from mlakit.names import OPS
from mlakit.options import Command, refuse, refuse_all_but, usage_errors

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


@app.command(cls=Command, epilog="Example: [bold]mlakit demo --model kimi-k2 --prompt 1000[/bold]")
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
    from mlakit.demo import make_settings, run

    with usage_errors():
        geometry = MLAGeometry.preset(model)
        settings = make_settings(
            geometry, prompt=prompt, tokens=tokens, format=format, device=device, seed=seed
        )
    if not run(model, geometry, settings, with_documented=documented):
        raise typer.Exit(1)


_FETCH_OPTIONS = ("platform", "unpinned")
_REPORT_OPTIONS = ("json_file", "csv_file", "html_file", "plot_folder", "earlier")


def _complete_suite(incomplete: str) -> list[str]:
    return [suite for suite in SUITES if suite.startswith(incomplete)]


@app.command(
    cls=Command,
    epilog="Examples: [bold]mlakit bench decode sparse-decode --json h200.json[/bold] · "
    "[bold]mlakit bench decode --shape 64q1s4k+2q1s64k --heads 16[/bold] · "
    "[bold]mlakit bench prefill --mode graph --html page.html[/bold] · "
    "[bold]mlakit bench decode --host[/bold] · "
    "[bold]mlakit bench --from h200.json --compare older.json --plot charts[/bold]",
)
def bench(
    context: typer.Context,
    suites: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Of {', '.join(SUITES)}. None: all for the GPU but grid, or cpu without one.",
            metavar="SUITE",
            autocompletion=_complete_suite,
        ),
    ] = None,
    shape: str | None = typer.Option(
        None,
        help="Instead of a suite's own workloads: requests as COUNTqNEWsCACHED, such as 128q1s8k, "
        "several joined by +; for fp8 MxNxK.",
    ),
    heads: int | None = typer.Option(None, min=1, help="With --shape."),
    format: str | None = typer.Option(None, help="With --shape: of cache rows."),
    page_size: int | None = typer.Option(None, min=1, help="With --shape."),
    topk: int | None = typer.Option(None, min=1, help="With --shape: rows of a list."),
    causal: bool | None = typer.Option(None, help="With --shape, for prefill."),
    mode: str | None = typer.Option(
        None,
        help="Of a GPU's time: cold (L2), which is the default, b2b (back to back), graph (CUDA "
        "graph, cold L2).",
    ),
    host: bool = typer.Option(False, "--host", help="Time the host's share of a call instead."),
    peers: bool = typer.Option(True, help="Time other libraries too, where they are installed."),
    json_file: str | None = typer.Option(
        None, "--json", help="Write the figures to this file too."
    ),
    csv_file: str | None = typer.Option(None, "--csv", help="The same as a table for programs."),
    html_file: str | None = typer.Option(
        None, "--html", help="One page with tables, charts, environment and command."
    ),
    plot_folder: str | None = typer.Option(
        None, "--plot", help="Charts as SVG and PNG into this folder; needs matplotlib."
    ),
    earlier: str | None = typer.Option(
        None, "--compare", help="A file of --json: say what moved since, by more than the spread."
    ),
    stored: str | None = typer.Option(
        None, "--from", help="Measure nothing: take the figures from a file of --json."
    ),
    only: str = typer.Option("", help="Of each suite only workloads with this in their names."),
    quick: bool = typer.Option(False, "--quick", help="Tiny problems: only to see that it runs."),
    threads: int | None = typer.Option(None, min=1, help="Threads of torch; else its own choice."),
    busy: int = typer.Option(
        0, min=0, help="Of suite cpu: times beside so many busy processes, and without them."
    ),
    fetch_peers: bool = typer.Option(
        False,
        "--fetch-peers",
        help="Only download FlashMLA and FA3, 300 MB, into the folder given in place of SUITE; "
        "else into MLAKIT_PEERS, by default mlakit/peers in your cache folder.",
    ),
    platform: str | None = typer.Option(
        None, help="With --fetch-peers: x86_64, aarch64 or a platform tag; else this machine's."
    ),
    unpinned: bool = typer.Option(
        False,
        "--unpinned",
        help="With --fetch-peers: take a wheel whose SHA-256 mlakit does not know. It is code that "
        "will be executed.",
    ),
) -> None:
    """Measure this machine, suite by suite; [bold]cpu[/bold] needs no GPU, the others do.

    Every workload is held to its float64 oracle before it is timed; the exit status is 1 if a
    result is wrong. Contenders, other libraries among them where they are installed, take turns; on
    a GPU with a cold L2 and launch costs left out, under ceilings measured in the same run. The
    suite cpu takes minutes, most of them where the CPU has no bf16 products.
    """
    if fetch_peers:
        others = "--fetch-peers only downloads, so {} has no meaning with it"
        refuse_all_but(context, ("fetch_peers", "suites", *_FETCH_OPTIONS), others)
        _fetch_peers(suites or [], platform, unpinned=unpinned)
        return
    refuse(context, _FETCH_OPTIONS, "{} goes with --fetch-peers only")
    if stored is not None:
        nothing = "--from measures nothing, so {} has no meaning with it"
        refuse_all_but(context, ("stored", *_REPORT_OPTIONS), nothing)
    if host:
        refuse(context, ["mode"], "--host times calls as they are, so {} has no meaning with it")
    from mlakit.bench import command, outputs
    from mlakit.bench.shapes import Shape

    options = {
        "heads": heads,
        "format": format,
        "page_size": page_size,
        "topk": topk,
        "causal": causal,
    }
    files = (json_file, csv_file, html_file, plot_folder, earlier)
    wanted = outputs.Outputs(*(None if file is None else Path(file) for file in files))
    with ExitStack() as open_files:
        with usage_errors():
            wanted.check()
            if stored is not None:
                reports = outputs.read_reports("--from", Path(stored))
            else:
                settings = command.Settings(
                    suites=suites or (),
                    command=shlex.join(["mlakit", *sys.argv[1:]]),
                    shape=Shape.given(shape, options),
                    only=only,
                    mode=command.checked_mode(mode or "cold", host=host),
                    with_peers=peers,
                    quick=quick,
                    threads=threads,
                    busy=busy,
                )
                workloads = command.workloads_of(settings)
                if set(workloads) == {"cpu"}:
                    refuse(context, ["mode", "host", "peers"], "{} has no meaning for suite cpu")
                if "cpu" not in workloads:
                    refuse(context, ["threads"], "{} has no meaning without suite cpu")
            open_files.enter_context(wanted.opened())
        if stored is not None:
            outputs.print_reports(reports)
        else:
            measured = command.run(settings, workloads)
            if measured is None:
                raise typer.Exit(1)
            reports = measured
        wanted.write(reports)


def _complete_op(incomplete: str) -> list[str]:
    return [op for op in OPS if op.startswith(incomplete)]


@app.command(
    cls=Command, epilog="Example: [bold]mlakit explain mla_decode --arch 90 --heads 16[/bold]"
)
def explain(
    context: typer.Context,
    op: str = typer.Argument(
        ..., help="A public op, such as mla_decode.", autocompletion=_complete_op
    ),
    arch: str = typer.Option(
        "cpu", help="cpu, or a compute capability: 90, 9.0, sm_90 and sm_90a are the same."
    ),
    dtype: str = typer.Option("bf16", help="Of queries or activations: bf16, fp16, fp32 or e4m3."),
    format: str = typer.Option("bf16", help="Of cache rows."),
    heads: int = typer.Option(128, min=1),
    page_size: int = typer.Option(64, min=1),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """Say which backend carries out a call, and why not the others. Needs no GPU."""
    from rich.console import Console

    from mlakit.support import table

    facts = {"dtype": dtype, "format": format, "heads": heads, "page_size": page_size}
    with usage_errors():
        own = table.facts_of(op)
        refuse(context, facts.keys() - own, f"{{}} has no meaning for {op}")
        known = {name: value for name, value in facts.items() if name in own}
        problem = table.problem_of(op, table.parse_arch(arch), **known)  # type: ignore[arg-type]
        verdict = table.verdict(op, problem)
    if as_json:
        typer.echo(json.dumps(verdict.as_json(), indent=2))
    else:
        Console().print(table.explanation(verdict))
    if verdict.chosen is None:
        raise typer.Exit(1)


@app.command(
    cls=Command, epilog="Examples: [bold]mlakit support --markdown[/bold], mlakit support --compile"
)
def support(
    context: typer.Context,
    compile_kernels: bool = typer.Option(
        False, "--compile", help="Compile a list of GPU kernels, for every architecture."
    ),
    everything: bool = typer.Option(
        False, "--all", help="With --compile: every configuration on every architecture."
    ),
    only: str = typer.Option("", help="With --compile: configurations with this in their names."),
    jobs: int = typer.Option(2, min=1, help="With --compile: processes."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
    as_markdown: bool = typer.Option(
        False, "--markdown", help="Print the table as the README has it; not with --compile."
    ),
) -> None:
    """Show which backend each op has on each architecture, or prove that its kernels compile there.

    Neither needs a GPU. With --compile spills, which are counted in the machine code that would
    run, and shared memory are held to the limits of each architecture; the exit status is 1 if a
    kernel does not compile or breaks one.
    """
    from rich.console import Console

    if as_markdown and (compile_kernels or as_json):
        raise typer.BadParameter("--markdown goes with neither --compile nor --json")
    if not compile_kernels:
        refuse(context, ["everything", "only", "jobs"], "{} goes with --compile only")
        from mlakit.support import table

        rows = table.verdicts()
        if as_markdown:
            typer.echo(table.markdown(rows))
        elif as_json:
            typer.echo(json.dumps([[each.as_json() for each in row] for row in rows], indent=2))
        else:
            Console().print(table.support_table(rows))
        return
    from mlakit.columns import wide_console
    from mlakit.support import compilation

    with usage_errors():
        known = compilation.all_checks() if everything else compilation.named_checks()
        checks = compilation.checks_with(only, known)
    kernels = compilation.run_with_progress(checks, jobs=jobs)
    if as_json:
        typer.echo(json.dumps([each.as_json() for each in kernels], indent=2))
    else:
        console = wide_console()
        console.print(compilation.compile_table(kernels, console.width))
        console.print(compilation.summary(kernels))
    if any(each.fault for each in kernels):
        raise typer.Exit(1)


@app.command(
    cls=Command, epilog="Examples: [bold]mlakit doctor[/bold], mlakit doctor --json --seconds 0"
)
def doctor(
    seconds: float = typer.Option(
        5.0, min=0.0, help="Random calls on each backend, after one of each op."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of tables."),
) -> None:
    """Say what this machine is, which backends work on it and why not, and which peers are here.

    Every op is called on every backend that can work here and held to the oracle; the exit status
    is 1 if a result is wrong. A GPU compiles its kernels first, which takes a minute.
    """
    from rich.console import Console

    from mlakit.doctor import examine, report

    with Console(stderr=True).status("calling every op"):
        diagnosis = examine(seconds)
    if as_json:
        typer.echo(json.dumps(diagnosis.as_json(), indent=2))
    else:
        Console().print(report(diagnosis), highlight=False)
    if not diagnosis.is_well:
        raise typer.Exit(1)


@app.command(
    cls=Command,
    epilog="Examples: [bold]mlakit check --minutes 10[/bold], "
    "mlakit check --op mla_decode --seed 7 --count 1, "
    "[bold]mlakit check --launches 10000 --backend hopper[/bold]",
)
def check(
    context: typer.Context,
    op: Annotated[
        list[str] | None,
        typer.Option(help="Only this op; may be repeated.", autocompletion=_complete_op),
    ] = None,
    minutes: float | None = typer.Option(
        None,
        help="How long; else 1 minute, or with --count or --launches as long as these take.",
    ),
    count: int | None = typer.Option(None, min=1, help="How many cases."),
    launches: int | None = typer.Option(
        None,
        min=1,
        help="Instead: so many launches of mla_decode in few configurations, which are compiled "
        "once, made and judged on the device. A GPU takes milliseconds for one.",
    ),
    first: int = typer.Option(0, min=0, help="With --launches: the number of the first."),
    calls: int | None = typer.Option(
        None,
        min=1,
        help="With --launches: calls of each, which must all give the same bits; else 1 or 3. Many "
        "of them find what goes wrong now and then only.",
    ),
    seed: int | None = typer.Option(
        None, min=0, help="Of the first case, or of all launches; else a new one."
    ),
    device: str = typer.Option("auto", help="auto, cpu or cuda; auto is a GPU if there is one."),
    backend: str = typer.Option("", help="Only hopper, triton or cpu; else each that can."),
    any_widths: bool = typer.Option(
        False, "--any-widths", help="Any width and page size: a GPU then compiles all the time."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """Call the ops with random problems, and hold every result to the float64 oracle.

    Stops at the first wrong result, prints the command that repeats it, and exits with status 1;
    also where nothing could be checked.
    """
    from secrets import randbelow

    from rich.console import Console

    from mlakit import selfcheck

    if minutes is None and count is None and launches is None:
        minutes = selfcheck.DEFAULT_MINUTES
    settings = selfcheck.Settings(
        selfcheck.all_ops(op or (), launched=launches is not None),
        seed=randbelow(2**31) if seed is None else seed,
        device=device,
        backend=backend,
        minutes=minutes,
        count=count,
        any_widths=any_widths,
        launches=launches,
        first=first,
        calls=calls,
    )
    with usage_errors():
        selfcheck.check_settings(settings)
    if launches is None:
        refuse(context, ["first"], "{} goes with --launches only")  # even if it is 0
    outcome = selfcheck.run_with_progress(settings)
    if as_json:
        typer.echo(json.dumps(outcome.as_json(), indent=2))
    else:
        Console().print(selfcheck.table(outcome))
        typer.echo(selfcheck.verdict(outcome))
    if not outcome.is_well:
        raise typer.Exit(1)


def _fetch_peers(folders: list[str], platform: str | None, *, unpinned: bool) -> None:
    from mlakit import knobs
    from mlakit.bench.peers import fetch

    if len(folders) > 1:
        raise typer.BadParameter(f"--fetch-peers takes one folder, got {' '.join(folders)}")
    target = Path(folders[0]) if folders else knobs.peers_folder()
    try:
        kept = fetch.fetch(target, platform, unpinned=unpinned)
    except fetch.FetchError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    for each in kept:
        typer.echo(f"{each}  {each.stat().st_size:,} bytes")


def main() -> None:
    """Entry point of the `mlakit` script and of `python -m mlakit`."""
    app()
