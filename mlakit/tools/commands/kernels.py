"""Commands that show which kernels run, and compile them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mlakit.dispatch.names import OPS
from mlakit.model.geometry import PRESETS
from mlakit.tools.options import Command, completion, refuse, usage_errors

app = typer.Typer()


@app.command(
    cls=Command, epilog="Example: [bold]mlakit explain mla_decode --arch 90 --heads 16[/bold]"
)
def explain(
    context: typer.Context,
    op: str = typer.Argument(
        ..., help="A public op, such as mla_decode.", autocompletion=completion(OPS)
    ),
    arch: str = typer.Option(
        "cpu", help="cpu, a card such as H200, a compute capability (90, 9.0, sm_90), or gfx942."
    ),
    model: str | None = typer.Option(
        None,
        help="A known model, its Hub id, a config.json or a folder with one: its rows, widths and "
        "heads. Default: DeepSeek-V3, V3.2 for the indexer.",
        autocompletion=completion(PRESETS),
    ),
    dtype: str | None = typer.Option(
        None, help="bf16, fp16, fp32 or e4m3, of the queries: default bf16, indexer e4m3."
    ),
    format: str | None = typer.Option(None, help="Cache format: default bf16, indexer fp8_token."),
    heads: int | None = typer.Option(
        None, min=1, help="Query heads: default those of the model, 128, indexer 64."
    ),
    page_size: int = typer.Option(64, min=1, help="Rows per page of the cache."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """Show which backend and kernel run a call, and why the others do not. Needs no GPU.

    On a GPU a repeated call replays its recorded launches. MLAKIT_LAUNCH_CACHE=0 turns replay off.
    """
    from rich.console import Console

    from mlakit.tools import support

    facts = {
        "model": model,
        "dtype": dtype,
        "format": format,
        "heads": heads,
        "page_size": page_size,
    }
    with usage_errors():
        own = support.facts_of(op) | ({"model"} if op in support.OPS_OF_MODELS else set())
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
        "",
        help="With --compile: only configurations whose name contains this text, or those that run "
        "a kernel, by its name in mlakit explain, such as m64_bf16.",
    ),
    sample: str = typer.Option(
        "", metavar="PART", help="With --compile: a sample of PART only, hopper or portable."
    ),
    jobs: int = typer.Option(2, min=1, help="With --compile: number of processes."),
    dump: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --compile: write IR, PTX and machine code of every kernel to this folder.",
        ),
    ] = None,
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
    from mlakit.tools.columns import wide_console

    if as_markdown and (compile_kernels or as_json):
        raise typer.BadParameter("--markdown cannot be combined with --compile or --json")
    if not compile_kernels:
        refuse(context, ["everything", "only", "sample", "jobs", "dump"], "{} needs --compile")
        from mlakit.tools import support

        rows = support.selections()
        if as_markdown:
            typer.echo(support.markdown(rows))
        elif as_json:
            typer.echo(json.dumps([[each.as_json() for each in row] for row in rows], indent=2))
        else:
            console = wide_console()
            console.print(support.support_table(rows, console.width), highlight=False)
        return
    from mlakit.tools.compile import compilation, configurations, samples

    if everything:
        refuse(context, ["sample"], "{} cannot be combined with --all")
    with usage_errors():
        known = configurations.all_checks() if everything else configurations.named_checks()
        if sample:
            known = samples.checks_with_sample(sample)
        checks = compilation.checks_with(only, known)
    kernels = compilation.run_with_progress(checks, jobs=jobs, dump=dump)
    if as_json:
        typer.echo(json.dumps([each.as_json() for each in kernels], indent=2))
    else:
        console = wide_console()
        console.print(compilation.compile_table(kernels, console.width))
        console.print(compilation.summary(kernels))
    if any(each.fault for each in kernels):
        raise typer.Exit(1)
