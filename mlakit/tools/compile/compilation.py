"""Compiles GPU kernels on a machine without a GPU, and checks their resources.

A check is a configuration (`configurations`) and an architecture. The op is called with tensors in
host memory; its kernels are compiled for the architecture and not run. A check fails if a kernel
does not compile, needs more shared memory than a block has, has more spills than `SPILL_BOUNDS`
allows, has serialised wgmmas, initialises barriers that it does not use, or has named barriers that
the compiler uses, too. On AMD's GPUs spills are shown and not checked, since nothing is tuned for
them, and instructions for 8-bit floats fail the check.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from threading import current_thread, main_thread
from time import perf_counter
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from mlakit.dispatch import knobs
from mlakit.dispatch.architectures import NUM_SMS as NUM_SMS
from mlakit.dispatch.architectures import arch_name, is_amd
from mlakit.dispatch.selection import SPECS
from mlakit.tools.columns import Column, counted, fitting_table
from mlakit.tools.compile.configurations import configured
from mlakit.tools.compile.machine_code import assembler_log, machine_code, write_code
from mlakit.tools.compile.spills import NO_SPILLS, spill_bound
from mlakit.tools.workloads.random_launches import kernel_of

if TYPE_CHECKING:
    from mlakit.kernels.launch import Target


@dataclass(frozen=True)
class Compiled:
    """One kernel of one check; `error` says why it could not be compiled."""

    configuration: str
    arch: int
    kernel: str
    registers: int = 0
    spill_stores: int = 0  # instructions
    spill_loads: int = 0
    spill_bound: tuple[int, int] = NO_SPILLS  # upper bounds of both
    is_serialised: bool = False  # its wgmmas are serialised
    idle_barriers: int = 0
    clashing_barriers: int = 0  # named ones
    has_amd_fp8: bool = False
    shared_bytes: int = 0
    shared_limit: int = 0
    seconds: float = 0.0
    error: str = ""

    @property
    def fault(self) -> str:
        """What is wrong with the kernel; "" if nothing is."""
        if self.error:
            return self.error
        if self.shared_bytes > self.shared_limit:
            return f"shared memory exceeds the limit of {self.shared_limit} bytes"
        if self.idle_barriers:
            return f"barriers that are never used: {self.idle_barriers}"
        if self.clashing_barriers:
            return f"named barriers that the compiler uses, too: {self.clashing_barriers}"
        if self.is_serialised:
            return "its wgmmas are serialised"
        if self.has_amd_fp8:
            return "has instructions for 8-bit floats, whose format is another on gfx942"
        if is_amd(self.arch):
            return ""
        stores, loads = self.spill_bound
        if self.spill_stores > stores or self.spill_loads > loads:
            made = f"{self.spill_stores} stores, {self.spill_loads} loads"
            return f"spills: {made}; at most {stores} and {loads} are allowed"
        return ""

    @property
    def has_allowed_spills(self) -> bool:
        spills = self.spill_stores + self.spill_loads
        return not self.fault and not is_amd(self.arch) and spills > 0

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "fault": self.fault}


def check(configuration: str, arch: int, dump: Path | None = None) -> list[Compiled]:
    """Compile the kernels that a configuration launches on `arch`.

    dump  a folder for their IR, PTX and machine code
    """
    from mlakit.kernels.launch import compiling

    start = perf_counter()
    target = _target(arch)
    backend, case = configured(configuration)
    trial = case.trial("cpu")
    try:
        with assembler_log() as log, compiling(target) as compilation:
            trial.call(backend)
        unique = {kernel.hash: kernel for kernel in compilation.kernels}
        codes = {hash: machine_code(kernel, log.getvalue()) for hash, kernel in unique.items()}
        if dump is not None:
            for number, kernel in enumerate(unique.values()):
                write_code(kernel, dump / f"{configuration}-{arch_name(arch)}", number)
    except Exception as error:  # noqa: BLE001  # any error of a compiler or a tool is the result
        return [Compiled(configuration, arch, "—", error=_innermost(error))]
    seconds = (perf_counter() - start) / max(len(compilation.kernels), 1)
    if not unique:
        return [Compiled(configuration, arch, "—", error="no kernel was launched")]
    return [
        Compiled(
            configuration,
            arch,
            kernel.metadata.name,
            spill_bound=spill_bound(kernel.metadata.name, configuration),
            **asdict(codes[hash]),
            shared_bytes=kernel.metadata.shared,
            shared_limit=target.shared_bytes,
            seconds=seconds,
        )
        for hash, kernel in unique.items()
    ]


def _innermost(error: BaseException) -> str:
    """The root cause of a compiler's error in one line, without quoted kernel source."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip("^ ")]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def checks_with(only: str, checks: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Checks whose configuration contains `only`, or whose call runs the kernel of that name.

    only  a part of a name, or a kernel as `mlakit explain` prints it: m64_bf16, hopper:m64_bf16

    Raises ValueError, naming --only, if there are none.
    """
    named = [spec for spec in SPECS if spec.kernel and only in (spec.kernel, spec.name)]
    if named:
        ops = {spec.op for spec in named}
        return [each for each in checks if _kernel_of(*each, ops) in {s.name for s in named}]
    found = [each for each in checks if only in each[0]]
    if not found:
        names = ", ".join(dict.fromkeys(name for name, _ in checks))
        kernels = ", ".join(dict.fromkeys(spec.name for spec in SPECS if spec.kernel))
        raise ValueError(
            f"--only: no configuration has {only!r} in its name; known: {names}; no kernel has "
            f"that name; known: {kernels}"
        )
    return found


def _kernel_of(configuration: str, arch: int, ops: Collection[str]) -> str:
    """Return the kernel that a configuration's call of one of `ops` runs, as backend:kernel."""
    from mlakit.kernels.launch import compiling

    backend, case = configured(configuration)
    if case.op not in ops or is_amd(arch):
        return ""
    with compiling(_target(arch)):
        return f"{backend.partition(':')[0]}:{kernel_of(case, 'cpu', backend)}"


def _target(arch: int) -> Target:
    from mlakit.kernels.launch import AMD_SHARED_BYTES, SHARED_BYTES, Target

    return Target(arch, NUM_SMS[arch], (SHARED_BYTES | AMD_SHARED_BYTES)[arch])


def run(
    checks: Sequence[tuple[str, int]],
    *,
    jobs: int,
    dump: Path | None = None,
    after_each: Callable[[int], None] = lambda done: None,
) -> Iterator[Compiled]:
    """Run `checks` in `jobs` processes; results are in the order of the checks."""
    if knobs.interpreted():
        raise RuntimeError(
            "TRITON_INTERPRET is set, so kernels are interpreted: unset it to compile them"
        )
    results: dict[int, list[Compiled]] = {}
    others = active_children()
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_begin_worker)
    try:
        with _interrupts_held_back():  # worker processes inherit it while they start
            futures = {pool.submit(check, *each, dump): index for index, each in enumerate(checks)}
        for future in as_completed(futures):
            results[futures[future]] = future.result()
            after_each(len(results))
    except BaseException:
        for worker in active_children():
            if worker not in others:
                worker.kill()  # a compiler takes up to a minute to return
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
    for index in range(len(checks)):
        yield from results[index]


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Delay a Ctrl-C until the end of the block; processes started in it get none."""
    if current_thread() is not main_thread():  # only the main thread handles signals
        yield
        return
    arrived: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: arrived.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if arrived:
        raise KeyboardInterrupt


def _begin_worker() -> None:
    os.dup2(2, 1)  # keep compiler messages out of stdout
    # A Ctrl-C goes to all processes of a terminal. Only the parent handles it, without a traceback
    # here. A handler instead of SIG_IGN: child tools would inherit SIG_IGN and not end.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def run_with_progress(
    checks: Sequence[tuple[str, int]], *, jobs: int, dump: Path | None = None
) -> list[Compiled]:
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(checks))
        advance = partial(progress.update, task)
        shown = run(checks, jobs=jobs, dump=dump, after_each=lambda done: advance(completed=done))
        return list(shown)


def summary(kernels: Sequence[Compiled]) -> str:
    import triton

    faulty = sum(bool(each.fault) for each in kernels)
    checks = len({(each.configuration, each.arch) for each in kernels})
    spilling = sum(each.has_allowed_spills for each in kernels)
    result = f"[red]{faulty} of them failed[/red]" if faulty else "[green]all passed[/green]"
    if spilling:
        result += f", {spilling} with allowed spills"
    if any(is_amd(each.arch) for each in kernels):
        result += "; those for AMD's GPUs have not been run on one"
    counts = f"{counted(checks, 'check')}, {counted(len(kernels), 'kernel')}"
    return f"Triton {triton.__version__}: {counts}, {result}"


def compile_table(kernels: Sequence[Compiled], width: int) -> RenderableType:
    columns = (
        Column("configuration", is_number=False, folds_at=14),
        Column("arch", is_number=False),
        Column("kernel", is_number=False, folds_at=14),
        Column("registers", rank=3),
        Column("spills", rank=2),
        Column("shared bytes", rank=4),
        Column("limit", rank=4),
        Column("s", rank=5),
        Column("result", is_number=False, folds_at=20),
    )
    rows = (
        (
            each.configuration,
            arch_name(each.arch),
            each.kernel,
            str(each.registers),
            str(each.spill_stores + each.spill_loads),
            str(each.shared_bytes),
            str(each.shared_limit),
            f"{each.seconds:.1f}",
            _result(each),
        )
        for each in kernels
    )
    return fitting_table(columns, rows, width, grouped=False)


def _result(kernel: Compiled) -> Text:
    if kernel.fault:
        return Text(kernel.fault, style="red")
    notes = ", allowed spills" if kernel.has_allowed_spills else ""
    return Text.assemble(("ok", "green"), ", not run" if is_amd(kernel.arch) else notes)
