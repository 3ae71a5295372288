"""`warmup`: compile every kernel that a serving process will launch, before it serves."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mlakit.dispatch import knobs, private
from mlakit.dispatch.architectures import NUM_SMS, arch_name, card_arch, is_amd
from mlakit.formats import Format
from mlakit.precompile.deployment import Deployment, deployment
from mlakit.precompile.worker import Done, Task, Worker

if TYPE_CHECKING:
    from mlakit.dispatch.private import CacheEntry
    from mlakit.kernels.launch import Target

LOCK = "mlakit-warmup.lock"
DEFAULT_TOKENS = 8192  # of a step, as engines have it


class WarmupError(RuntimeError):
    """Kernels could not be compiled; the message has one line."""


@dataclass(frozen=True)
class Warmup:
    """The result of `warmup`."""

    arch: str  # sm_90
    kernels: int  # that the deployment launches
    compiled: int  # of them, now; the others were in the cache
    seconds: float
    folder: str  # of the cache

    def __str__(self) -> str:
        if not self.compiled:
            return f"All {self.kernels} kernels for {self.arch} are in {self.folder}."
        done = f"{self.compiled} of {self.kernels} kernels for {self.arch} compiled"
        return f"{done} in {self.seconds:.0f} s, into {self.folder}."


def warmup(
    model: Any,
    *,
    heads: int | None = None,
    format: Format = "bf16",
    page_size: int = 64,
    page_rows: int | None = None,
    dtype: str = "bf16",
    user: str = "all",
    max_context: int | None = None,
    max_tokens: int = DEFAULT_TOKENS,
    has_fp8_weights: bool = False,
    is_batch_invariant: bool = False,
    arch: str | int | None = None,
    num_sms: int | None = None,
    jobs: int | None = None,
    show_progress: bool = False,
) -> Warmup:
    """Compile every kernel that serving a model launches, in parallel, into Triton's cache.

    model            what `MLAGeometry.from_config` takes: a name, a folder, a config
    heads            query heads of this rank; None: all
    format           of the cache
    page_size        tokens of a page
    page_rows        rows from a page to the next, where other layers' lie between; None: page_size
    dtype            of activations: bf16, fp16 or fp32
    user             who calls the ops: vllm, sglang, steps (`mlakit.steps`) or all
    max_context      tokens of the longest request; None: the model's
    max_tokens       new tokens of a step
    has_fp8_weights  block-FP8 up-projections, for `steps`
    is_batch_invariant  results of a request have the same bits in any batch, for engines
    arch             such as sm_90 or H200, which needs no GPU; None: the GPU of this machine
    num_sms          of that GPU; None: of a usual card
    jobs             processes; None: one per core

    Kernels in the cache already are not compiled again. A kernel depends on the versions of mlakit,
    Triton, Python's and CUDA's tools, on the architecture and on Triton's environment variables,
    not on the machine: a cache that was made while an image was built serves where it runs. For the
    GPU of this machine they are loaded into this process, too.

    Raises ValueError for an argument that is wrong, and `WarmupError` where a kernel cannot be
    compiled or the cache cannot be written.
    """
    d = deployment(
        model,
        heads=heads,
        format=format,
        page_size=page_size,
        page_rows=page_rows,
        dtype=dtype,
        user=user,
        max_context=max_context,
        max_tokens=max_tokens,
        has_fp8_weights=has_fp8_weights,
        is_batch_invariant=is_batch_invariant,
    )
    if knobs.interpreted():
        raise WarmupError("TRITON_INTERPRET is set, so kernels are interpreted, not compiled")
    target = target_of(arch, num_sms)
    start = perf_counter()
    folder = private.cache_folder()
    entries = entries_of_deployment(d, target)
    tasks = missing(entries)
    if tasks:
        check_writable(folder)
        with alone(folder):
            # others may have compiled them meanwhile
            tasks = missing(entries_of_deployment(d, target))
            with progress(len(tasks), is_shown=show_progress) as advance:
                compile_all(d, target, tasks, jobs or num_cores(), advance)
    if arch is None:
        load(d, target, sorted(set(entries.values())))
    return Warmup(arch_name(target.arch), len(entries), len(tasks), perf_counter() - start, folder)


def target_of(arch: str | int | None, num_sms: int | None) -> Target:
    """The GPU to compile for."""
    import torch

    from mlakit.kernels import launch

    if arch is None:
        if not torch.cuda.is_available():
            raise ValueError("warmup: arch must be given where there is no GPU, such as sm_90")
        target = launch.target(torch.device("cuda", torch.cuda.current_device()))
        if is_amd(target.arch):
            raise WarmupError(f"warmup is for NVIDIA's GPUs, got {arch_name(target.arch)}")
        return target
    digits = str(arch).lower().removeprefix("sm").strip("_a").replace(".", "")
    number = card_arch(str(arch)) or (int(digits) if digits.isdecimal() else 0)
    if number not in launch.SHARED_BYTES:
        known = ", ".join(map(arch_name, launch.SHARED_BYTES))
        raise ValueError(f"warmup: arch must be one of {known}, got {arch!r}")
    sms = NUM_SMS[number] if num_sms is None else num_sms
    return launch.Target(number, sms, launch.SHARED_BYTES[number])


def entries_of_deployment(d: Deployment, target: Target) -> dict[CacheEntry, int]:
    """The kernels of a deployment, each with the number of the first call that launches it."""
    from mlakit.precompile.listing import calls_of, entries_of

    try:
        return entries_of(list(calls_of(d)), target)
    except OSError as error:
        raise WarmupError(f"Triton's cache cannot be used: {error}") from None


def missing(entries: dict[CacheEntry, int]) -> list[Task]:
    """What is to be compiled: the kernels that the cache lacks."""
    return [Task(entry.key, call) for entry, call in entries.items() if not entry.exists]


def load(d: Deployment, target: Target, numbers: Sequence[int]) -> None:
    """Load the kernels of calls into this process, whose first launches then find them."""
    import torch

    from mlakit.precompile.listing import calls_of, load_kernels

    calls = list(calls_of(d))
    load_kernels((calls[number] for number in numbers), target, torch.cuda.current_device())


def num_cores() -> int:
    """The cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


@contextmanager
def alone(folder: str) -> Iterator[None]:
    """Hold a lock on the cache: of the ranks of an engine one compiles, and the others wait."""
    import fcntl  # Triton is for systems that have it

    with ExitStack() as scope:
        with written(folder):
            file = scope.enter_context(open(os.path.join(folder, LOCK), "w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def check_writable(folder: str) -> None:
    with written(folder):
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(2**20))


@contextmanager
def written(folder: str) -> Iterator[None]:
    """Raise `WarmupError` where the cache cannot be written."""
    try:
        yield
    except OSError as error:
        raise WarmupError(f"Triton's cache {folder} cannot be written: {error.strerror}") from None


def compile_all(
    d: Deployment, target: Target, tasks: list[Task], jobs: int, advance: Callable[[], None]
) -> None:
    """Compile the kernels of `tasks` in processes; the first error ends all."""
    waiting: SimpleQueue[Task] = SimpleQueue()
    for task in tasks:
        waiting.put(task)
    errors: list[str] = []
    workers = [Worker(d, target) for _ in range(min(jobs, len(tasks)))]

    def feed(worker: Worker) -> None:
        while not errors:
            try:
                task = waiting.get_nowait()
            except Empty:
                return
            done: Done = worker.do(task)
            if done.error:
                errors.append(done.error)
            advance()

    pool = ThreadPoolExecutor(len(workers))
    try:
        for running in [pool.submit(feed, worker) for worker in workers]:
            running.result()
    finally:
        for worker in workers:
            worker.stop()
        pool.shutdown()
    if errors:
        raise WarmupError(f"a kernel cannot be compiled into {private.cache_folder()}: {errors[0]}")


@contextmanager
def progress(total: int, *, is_shown: bool) -> Iterator[Callable[[], None]]:
    """Yield what advances a progress bar by one kernel."""
    if not is_shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    # in a file the bar would leave an empty line
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
