"""The `mlakit` command: parses arguments; the work is done in other modules.

torch is imported only when a command runs: the import takes seconds, and `--version`, `--help` and
shell completion do not need it.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from mlakit import __version__
from mlakit.dispatch.names import BACKENDS, OPS, one_of
from mlakit.model.geometry import PRESETS, MLAGeometry
from mlakit.tools.bench import SUITES
from mlakit.tools.options import Command, refuse, refuse_all_but, usage_errors
from mlakit.tools.planner import command as planner

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


_FETCH_OPTIONS = ("platform", "unpinned")
_REPORT_OPTIONS = ("json_file", "csv_file", "plot_folder", "earlier")


def _completion(words: Iterable[str]) -> Callable[[str], list[str]]:
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


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
            autocompletion=_completion(SUITES),
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


@app.command(
    cls=Command, epilog="Example: [bold]mlakit explain mla_decode --arch 90 --heads 16[/bold]"
)
def explain(
    context: typer.Context,
    op: str = typer.Argument(
        ..., help="A public op, such as mla_decode.", autocompletion=_completion(OPS)
    ),
    arch: str = typer.Option(
        "cpu", help="cpu, a compute capability (90, 9.0, sm_90 or sm_90a), or gfx942."
    ),
    dtype: str | None = typer.Option(
        None, help="bf16, fp16, fp32 or e4m3, of the queries: default bf16, indexer e4m3."
    ),
    format: str | None = typer.Option(None, help="Cache format: default bf16, indexer fp8_token."),
    heads: int | None = typer.Option(None, min=1, help="Query heads: default 128, indexer 64."),
    page_size: int = typer.Option(64, min=1, help="Rows per page of the cache."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """Show which backend and kernel run a call, and why the others do not. Needs no GPU.

    On a GPU a repeated call replays its recorded launches. MLAKIT_LAUNCH_CACHE=0 turns replay off.
    """
    from rich.console import Console

    from mlakit.tools import support

    facts = {"dtype": dtype, "format": format, "heads": heads, "page_size": page_size}
    with usage_errors():
        own = support.facts_of(op)
        refuse(context, facts.keys() - own, f"{{}} has no effect on {op}")
        known = {name: value for name, value in facts.items() if name in own}
        problem = support.problem_of(op, support.parse_arch(arch), **known)  # type: ignore[arg-type]
        selection = support.selection(op, problem)
    if as_json:
        typer.echo(json.dumps(selection.as_json(), indent=2))
    else:
        Console().print(support.explanation(selection))
    if selection.chosen is None:
        raise typer.Exit(1)


@app.command(
    cls=Command, epilog="Examples: [bold]mlakit support --markdown[/bold], mlakit support --compile"
)
def support(
    context: typer.Context,
    compile_kernels: bool = typer.Option(
        False, "--compile", help="Compile a list of GPU kernels for every architecture."
    ),
    everything: bool = typer.Option(
        False, "--all", help="With --compile: every configuration on every architecture."
    ),
    only: str = typer.Option(
        "", help="With --compile: only configurations whose name contains this text."
    ),
    sample: str = typer.Option(
        "", metavar="PART", help="With --compile: a sample of PART only, hopper or portable."
    ),
    jobs: int = typer.Option(2, min=1, help="With --compile: number of processes."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
    as_markdown: bool = typer.Option(
        False, "--markdown", help="Print the table in Markdown, as in the README."
    ),
) -> None:
    """Show which backend each op has on each architecture. With --compile: compile its kernels.

    Neither needs a GPU. --compile counts the register spills in the machine code and compares them
    and the shared memory with the limits of each architecture; the exit status is 1 if a kernel
    does not compile or exceeds a limit.
    """
    from rich.console import Console

    if as_markdown and (compile_kernels or as_json):
        raise typer.BadParameter("--markdown cannot be combined with --compile or --json")
    if not compile_kernels:
        refuse(context, ["everything", "only", "sample", "jobs"], "{} needs --compile")
        from mlakit.tools import support

        rows = support.selections()
        if as_markdown:
            typer.echo(support.markdown(rows))
        elif as_json:
            typer.echo(json.dumps([[each.as_json() for each in row] for row in rows], indent=2))
        else:
            Console().print(support.support_table(rows))
        return
    from mlakit.tools.columns import wide_console
    from mlakit.tools.compile import compilation, configurations, samples

    if everything:
        refuse(context, ["sample"], "{} cannot be combined with --all")
    with usage_errors():
        known = configurations.all_checks() if everything else configurations.named_checks()
        if sample:
            known = samples.checks_with_sample(sample)
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
    cls=Command,
    epilog="Examples: [bold]mlakit memory deepseek-v3.2 --context 128k --gpu-memory 141 --tp 8 "
    "--weights 80[/bold] · [bold]mlakit memory path/to/checkpoint --format fp8_block128[/bold]",
)
def memory(
    context: typer.Context,
    model: str = typer.Argument(
        ...,
        help="A known model, a config.json or its folder.",
        metavar="MODEL_CONFIG",
        autocompletion=_completion(PRESETS),
    ),
    tokens: str = typer.Option(
        "4k,32k,128k",
        "--context",
        metavar="N[,N...]",
        help="Tokens per request; a number may end in k or m.",
    ),
    batch: int = typer.Option(1, min=1, help="Number of requests."),
    gpu_memory: float | None = typer.Option(
        None, "--gpu-memory", metavar="GiB", min=0, help="Show how many tokens fit on such a GPU."
    ),
    tp: int = typer.Option(
        1, min=1, help="Tensor-parallel ranks. They do not divide the latent cache."
    ),
    dcp: int = typer.Option(
        1, min=1, help="Decode-context-parallel ranks, which divide the cache; must divide --tp."
    ),
    format: Annotated[
        list[str] | None,
        typer.Option(help="Cache format; may be repeated. Default: all that the model supports."),
    ] = None,
    page_size: int = typer.Option(64, min=1, help="Tokens per page; a request has whole pages."),
    weights: float | None = typer.Option(
        None,
        metavar="GiB",
        min=0,
        help="With --gpu-memory: weights per rank. Default: the total_size of a checkpoint's index "
        "in the folder divided by --tp; else they are not counted.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """Show the bytes of a model's KV cache per format and rank, and how many tokens fit on a GPU.

    Index keys are included, pages are counted as they are allocated, and the last row is the K/V
    cache without MLA. Needs no GPU.
    """
    from rich.console import Console

    from mlakit.tools.memory.budget import memory_report, parse_contexts, table

    if gpu_memory is None:
        refuse(context, ["weights"], "{} needs --gpu-memory")
    with usage_errors():
        report = memory_report(
            model,
            parse_contexts(tokens),
            batch=batch,
            tp=tp,
            dcp=dcp,
            formats=format or (),
            page_size=page_size,
            gpu_gib=gpu_memory,
            weights_gib=weights,
        )
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
    else:
        Console().print(table(report), highlight=False)


app.command("plan", cls=Command, epilog=planner.EXAMPLES)(planner.plan)


@app.command(
    cls=Command,
    epilog="Examples: [bold]mlakit warmup deepseek-v3 --heads 16 --format fp8_block128[/bold] · "
    "mlakit warmup deepseek-v3.2 --heads 16 --format fp8_block128 --for vllm --arch sm_90",
)
def warmup(
    model: Annotated[
        str,
        typer.Argument(
            help="A known model, its Hub id, a config.json or a folder with one.",
            metavar="MODEL",
            autocompletion=_completion(PRESETS),
        ),
    ],
    heads: int | None = typer.Option(
        None, min=1, help="Query heads of a rank: the model's divided by TP. Default: all."
    ),
    format: str = typer.Option("bf16", help="Cache format."),
    page_size: int = typer.Option(64, min=1, help="Tokens per page."),
    page_rows: int | None = typer.Option(
        None,
        min=1,
        help="Rows from a page to the next, where pages of other layers lie between. Default: "
        "--page-size.",
    ),
    dtype: str = typer.Option("bf16", help="Dtype of activations: bf16, fp16 or fp32."),
    user: str = typer.Option(
        "all", "--for", help="Who calls the ops: vllm, sglang, steps (mlakit.steps) or all."
    ),
    arch: str | None = typer.Option(
        None, help="Architecture, such as sm_90; needs no GPU. Default: this machine's GPU."
    ),
    sms: int | None = typer.Option(
        None, min=1, help="SMs of that GPU, with --arch. Default: those of a usual card."
    ),
    max_context: int | None = typer.Option(
        None, min=1, help="Tokens of the longest request. Default: the model's."
    ),
    max_tokens: int = typer.Option(8192, min=1, help="New tokens of a step."),
    fp8_weights: bool = typer.Option(
        False, "--fp8-weights", help="Block-FP8 up-projections, for mlakit.steps."
    ),
    batch_invariant: bool = typer.Option(
        False, "--batch-invariant", help="An engine's batch-invariant mode."
    ),
    jobs: int | None = typer.Option(None, min=1, help="Processes. Default: one per core."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a sentence."),
) -> None:
    """Compile every kernel that serving a model launches into Triton's cache.

    Kernels that are in the cache already are not compiled again. The exit status is 1 if a kernel
    cannot be compiled or the cache cannot be written.
    """
    from dataclasses import asdict

    from mlakit.precompile import WarmupError
    from mlakit.precompile import warmup as compile_kernels

    try:
        with usage_errors():
            done = compile_kernels(
                model,
                heads=heads,
                format=format,  # type: ignore[arg-type]  # it is checked
                page_size=page_size,
                page_rows=page_rows,
                dtype=dtype,
                user=user,
                max_context=max_context,
                max_tokens=max_tokens,
                has_fp8_weights=fp8_weights,
                is_batch_invariant=batch_invariant,
                arch=arch,
                num_sms=sms,
                jobs=jobs,
                show_progress=True,
            )
    except WarmupError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(json.dumps(asdict(done), indent=2) if as_json else str(done))


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
    "[bold]mlakit check --launches 10000 --backend hopper[/bold]",
)
def check(
    context: typer.Context,
    op: Annotated[
        list[str] | None,
        typer.Option(help="Check only this op; may be repeated.", autocompletion=_completion(OPS)),
    ] = None,
    minutes: float | None = typer.Option(
        None, help="Duration. Default: 1 minute, or until --count or --launches are done."
    ),
    count: int | None = typer.Option(None, min=1, help="Number of cases."),
    launches: int | None = typer.Option(
        None,
        min=1,
        help="Check this many launches of mla_decode, mla_prefill, sparse_mla and the indexer ops "
        "instead, in few configurations that are compiled once. The oracle runs on the device: "
        "milliseconds per launch on a GPU.",
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
    jobs: int = typer.Option(
        1, min=1, help="Processes: each compiles kernels on a core of its own."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """Call the ops with random problems and compare every result with a float64 oracle.

    Stops at the first wrong result and prints the command that repeats it. The exit status is 1 if
    a result is wrong or nothing could be checked.
    """
    from secrets import randbelow

    from rich.console import Console

    from mlakit.tools import check

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
        jobs=jobs,
    )
    with usage_errors():
        settings = check.with_kernel(settings)
        check.check_settings(settings)
    if launches is None:
        refuse(context, ["first"], "{} needs --launches")  # also for --first 0
    outcome = check.run_with_progress(settings)
    if as_json:
        typer.echo(json.dumps(outcome.as_json(), indent=2))
    else:
        Console().print(check.table(outcome))
        typer.echo(check.summary(outcome))
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
) -> None:
    """Run Hopper's kernels on the CPU, and look for races, deadlocks and wrong results.

    A configuration runs with little work in an emulator of a Hopper GPU, which interprets the
    kernel's TTGIR in a random interleaving of its warp partitions and asynchronous copies. Results
    are compared with a float64 oracle. The exit status is 1 if there is a fault. The emulator is in
    the source tree only; docs/emulator.md describes what it proves.
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
    if not command.run(names, range(seed, seed + seeds), is_traced=trace, steps=steps):
        raise typer.Exit(1)


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


def main() -> None:
    """Entry point of the `mlakit` script and of `python -m mlakit`."""
    app()
