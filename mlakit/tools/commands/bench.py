"""The command `mlakit bench`."""

from __future__ import annotations

import shlex
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from mlakit.tools.bench import SUITES
from mlakit.tools.options import Command, completion, refuse, refuse_all_but, usage_errors

app = typer.Typer()


_FETCH_OPTIONS = ("platform", "unpinned")
_REPORT_OPTIONS = ("json_file", "csv_file", "plot_folder", "earlier")


@app.command(
    cls=Command,
    epilog="Examples: [bold]mlakit bench decode sparse-decode --json h200.json[/bold] · "
    "[bold]mlakit bench decode --shape 64q1s4k+2q1s64k --heads 16[/bold] · "
    "[bold]mlakit bench prefill --mode graph --csv prefill.csv[/bold] · "
    "[bold]mlakit bench decode --host[/bold] · "
    "[bold]mlakit bench --from h200.json --compare older.json --plot charts[/bold]",
)
def bench(
    context: typer.Context,
    suites: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"One or more of {', '.join(SUITES)}. Default: all GPU suites except grids; "
            "without a GPU: cpu.",
            metavar="SUITE",
            autocompletion=completion(SUITES),
        ),
    ] = None,
    shape: str | None = typer.Option(
        None,
        help="Run this batch instead of the suite's workloads: <count>q<q_len>s<kv_len>, such as "
        "128q1s8k; + joins several. For fp8: MxNxK.",
    ),
    heads: int | None = typer.Option(None, min=1, help="Number of heads, with --shape."),
    format: str | None = typer.Option(None, help="Cache format, with --shape."),
    page_size: int | None = typer.Option(None, min=1, help="Page size, with --shape."),
    topk: int | None = typer.Option(
        None, min=1, help="Rows per query of sparse attention, with --shape."
    ),
    causal: bool | None = typer.Option(None, help="Causal mask of prefill, with --shape."),
    mode: str | None = typer.Option(
        None,
        help="How GPU time is taken: cold (cold L2, the default), b2b (back to back), graph (CUDA "
        "graph replay, cold L2; the default of suite layer).",
    ),
    host: bool = typer.Option(
        False, "--host", help="Measure the host time of a call instead of the GPU time."
    ),
    peers: bool = typer.Option(True, help="Also time other libraries that are available."),
    json_file: str | None = typer.Option(
        None, "--json", help="Write the figures to this JSON file."
    ),
    csv_file: str | None = typer.Option(None, "--csv", help="Write the figures to this CSV file."),
    plot_folder: str | None = typer.Option(
        None, "--plot", help="Write charts as SVG and PNG to this folder; needs matplotlib."
    ),
    earlier: str | None = typer.Option(
        None,
        "--compare",
        help="Compare with this --json file: print what changed by more than the spread.",
    ),
    stored: str | None = typer.Option(
        None, "--from", help="Measure nothing: read the figures from this --json file."
    ),
    only: str = typer.Option("", help="Run only workloads whose name contains this text."),
    quick: bool = typer.Option(
        False, "--quick", help="Tiny problems: shows that the suite runs, measures nothing."
    ),
    threads: int | None = typer.Option(
        None, min=1, help="Number of torch threads, for suite cpu. Default: torch's choice."
    ),
    busy: int = typer.Option(
        0,
        min=0,
        help="Suite cpu only: measure next to this many busy processes, and without them.",
    ),
    fetch_peers: bool = typer.Option(
        False,
        "--fetch-peers",
        help="Only download FlashMLA, FA3 and DeepGEMM (300 MB) to the folder given in place of "
        "SUITE. Default: MLAKIT_PEERS, or mlakit/peers in your cache folder.",
    ),
    platform: str | None = typer.Option(
        None,
        help="With --fetch-peers: x86_64, aarch64 or a platform tag. Default: this machine.",
    ),
    unpinned: bool = typer.Option(
        False,
        "--unpinned",
        help="With --fetch-peers: accept a wheel with an unknown SHA-256. Its code will be "
        "executed.",
    ),
) -> None:
    """Benchmark this machine, suite by suite. All suites except [bold]cpu[/bold] need a GPU.

    Every result is compared with a float64 oracle before it is timed; the exit status is 1 if one
    is wrong. mlakit and its baselines (FlashMLA, FA3, FlashInfer, torch) run interleaved in one
    process. The speedup is the baseline's time / mlakit's time: above 1x mlakit is faster. GPU
    times have a cold L2 and exclude launch overhead; the roofline is measured in the same run. The
    suite cpu takes minutes, most of them on a CPU without bf16 matmuls. Ctrl-C and SIGTERM end a
    run early: tables and files have the workloads that are done, the exit status is 130.
    """
    if fetch_peers:
        others = "--fetch-peers only downloads, so {} has no effect"
        refuse_all_but(context, ("fetch_peers", "suites", *_FETCH_OPTIONS), others)
        _fetch_peers(suites or [], platform, unpinned=unpinned)
        return
    refuse(context, _FETCH_OPTIONS, "{} needs --fetch-peers")
    if stored is not None:
        nothing = "--from measures nothing, so {} has no effect"
        refuse_all_but(context, ("stored", *_REPORT_OPTIONS), nothing)
    if host:
        refuse(context, ["mode"], "--host measures host time, so {} has no effect")
    from mlakit.tools.bench import command, outputs
    from mlakit.tools.bench.shapes import Shape

    options = {
        "heads": heads,
        "format": format,
        "page_size": page_size,
        "topk": topk,
        "causal": causal,
    }
    files = (json_file, csv_file, plot_folder, earlier)
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
                    mode=command.checked_mode(mode, host=host),
                    with_peers=peers,
                    quick=quick,
                    threads=threads,
                    busy=busy,
                )
                workloads = command.workloads_of(settings)
                if set(workloads) == {"cpu"}:
                    refuse(context, ["mode", "host", "peers"], "{} has no effect on suite cpu")
                if "cpu" not in workloads:
                    refuse(context, ["threads"], "{} has no effect without suite cpu")
            open_files.enter_context(wanted.opened())
        if stored is not None:
            outputs.print_reports(reports)
        else:
            measured = command.run(settings, workloads)
            if measured is None:
                raise typer.Exit(1)
            reports = measured
        wanted.write(reports)
        if stored is None and any(report.is_interrupted for report in reports):
            raise typer.Exit(128 + signal.SIGINT)


def _fetch_peers(folders: list[str], platform: str | None, *, unpinned: bool) -> None:
    from mlakit.dispatch import knobs
    from mlakit.tools.bench.peers import fetch

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
