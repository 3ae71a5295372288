"""Compiles GPU kernels on a machine without a GPU, and reads what they ask of one.

A check is a case of `mlakit.workloads` with the widths of a real model, and an architecture. The op
is called as ever, on tensors in host memory; the kernels it would start there are compiled for the
architecture instead of run. What fails is a kernel that does not compile, asks for more shared
memory than a block may have, spills registers other than `ALLOWED_SPILLS` says, has asynchronous
dots that wait for each other, or makes barriers that it does not use.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import active_children, get_context
from threading import current_thread, main_thread
from time import perf_counter
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from mlakit import knobs
from mlakit.columns import Column, fitting_table
from mlakit.formats import FORMATS
from mlakit.knobs import Backend
from mlakit.support.machine_code import machine_code
from mlakit.support.spills import ALLOWED_SPILLS
from mlakit.workloads import (
    AppendCase,
    BatchedMatmulCase,
    Case,
    DecodeCase,
    IndexerLogitsCase,
    IndexerTopkCase,
    MergeCase,
    PrefillCase,
    QuantizeCase,
    ScaledMatmulCase,
    SparseCase,
)

ARCHITECTURES = (80, 89, 90, 100, 120)
NUM_SMS = {80: 108, 89: 142, 90: 132, 100: 148, 120: 170}
V3_ROW = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
V4_ROW = {"kv_lora_rank": 448, "qk_rope_head_dim": 64, "v_width": 512}


def _row(format: str) -> dict[str, Any]:
    return {"format": format, "page_size": 64, **(V4_ROW if format == "fp8_block64" else V3_ROW)}


def _query(format: str) -> str:
    return format if format in ("bf16", "fp16", "fp32") else "bf16"


def _decode(format: str, heads: int, **more: Any) -> DecodeCase:
    given = {
        "dtype": _query(format),
        "kv_lens": (130, 65),
        "q_lens": (1, 1),
        **_row(format),
        **more,
    }
    return DecodeCase(heads=heads, **given)


def _sparse(format: str, heads: int, **more: Any) -> SparseCase:
    given = {"dtype": _query(format), "topk": 128, "num_tokens": 2, **_row(format), **more}
    return SparseCase(heads=heads, **given)


def _append(format: str, **more: Any) -> AppendCase:
    return AppendCase(**{"heads": 16, "kv_lens": (7,), "q_lens": (2,), **_row(format), **more})


def _prefill(nope: int, rope: int, v: int, **more: Any) -> PrefillCase:
    widths = {"qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": v}
    return PrefillCase(**{"heads": 2, "kv_lens": (200,), "q_lens": (130,), **widths, **more})


def _index_keys(**more: Any) -> IndexerLogitsCase:
    row = {"kv_lora_rank": 128, "qk_rope_head_dim": 0, "page_size": 64}
    return IndexerLogitsCase(**{"heads": 64, "kv_lens": (130,), "q_lens": (2,), **row, **more})


CONFIGURATIONS: dict[str, Case] = {
    **{f"append-{format}": _append(format) for format in FORMATS},
    "append-half-split-e4m3-q": _append("fp8_block128", rope="half", q_out="e4m3"),
    "append-flat-table": _append("bf16", flat_table=True),
    "quantize-128": QuantizeCase(m=130, k=512, group=128),
    "scaled-mm-128": ScaledMatmulCase(m=130, n=256, k=512, n_group=128, k_group=128),
    "scaled-mm-64": ScaledMatmulCase(m=130, n=256, k=512, n_group=64, k_group=64, batch=2),
    "matmul-bf16": BatchedMatmulCase(batch=2, m=130, n=128, k=512),
    "matmul-fp32": BatchedMatmulCase(batch=2, m=130, n=128, k=512, dtype="fp32"),
    "prefill-192-128": _prefill(128, 64, 128),
    "prefill-256-256": _prefill(192, 64, 256),
    "prefill-128-128": _prefill(128, 0, 128),
    "prefill-96-64": _prefill(64, 32, 64),
    "prefill-fp32": _prefill(128, 64, 128, dtype="fp32"),
    "prefill-window-alibi-sink": _prefill(
        128, 64, 128, mask="sliding_window_causal", window=50, alibi=True, sink="finite"
    ),
    **{f"decode-h16-{format}": _decode(format, 16) for format in FORMATS},
    **{f"decode-h128-{format}": _decode(format, 128) for format in ("bf16", "fp8", "fp8_block128")},
    "decode-e4m3-q": _decode("fp8_token", 128, dtype="e4m3", q_scaled=True),
    "decode-page1": _decode("bf16", 16, flat_table=True),
    "decode-ragged": _decode("bf16", 20, q_lens=(3, 2), kv_lens=(130, 65), sink="finite"),
    "decode-even-split": _decode("bf16", 16, num_splits=3),
    **{f"sparse-h128-{format}": _sparse(format, 128) for format in FORMATS},
    "sparse-h16-bf16": _sparse("bf16", 16),
    "sparse-extra": _sparse("bf16", 64, extra_format="fp8_block128", extra_topk=64, sink="finite"),
    "indexer-e4m3": _index_keys(format="fp8_token", dtype="e4m3"),
    "indexer-bf16": _index_keys(format="bf16"),
    "topk-2048": IndexerTopkCase(num_columns=5000, k=2048, num_tokens=2),
    "topk-16384": IndexerTopkCase(num_columns=16384, k=2048, num_tokens=200),
    "topk-long": IndexerTopkCase(num_columns=20000, k=2048, num_tokens=200),
    "topk-many": IndexerTopkCase(num_columns=20000, k=9000, num_tokens=200),
    "topk-64": IndexerTopkCase(num_columns=500, k=64, num_tokens=2),
    "merge-2": MergeCase(num_parts=2, v_width=512, heads=16),
    "merge-8-fp32": MergeCase(num_parts=8, v_width=128, heads=16, dtype="fp32", sink="finite"),
    "sparse-odd-pages": _sparse(
        "fp8_block64",
        64,
        page_size=61,
        extra_format="fp8_block64",
        extra_page_size=2,
        extra_topk=64,
    ),
    "append-slots": _append("fp8_block128", slots="some"),
}
# Gluon kernels, which are for one architecture
# more than `auto` gives to a small_m kernel
MUCH_WORK = {"kv_lens": (2200, 65), "q_lens": (64, 1)}
HOPPER = {
    "hopper-decode-h128-bf16": _decode("bf16", 128, page_size=64, **MUCH_WORK),
    "hopper-decode-h40-fp16": _decode("fp16", 40, page_size=64, sink="finite", **MUCH_WORK),
    "hopper-decode-given-plan": _decode(
        "bf16", 128, page_size=128, num_workers=3, tile=16, **MUCH_WORK
    ),
    "hopper-decode-little": _decode("bf16", 128, page_size=64),
    **{
        f"hopper-decode-h{heads}-{format}": _decode(format, heads, page_size=64, sink=sink)
        for heads, format, sink in (
            (8, "bf16", ""),
            (16, "bf16", ""),
            (16, "fp16", "finite"),
            (32, "bf16", ""),
        )
    },
    "hopper-decode-few-given-plan": _decode("bf16", 32, page_size=128, num_workers=3, tile=16),
    **{
        f"hopper-decode-h{heads}-{format}": _decode(format, heads, page_size=64, sink=sink)
        for heads, sink in ((8, ""), (16, "finite"), (32, ""))
        for format in ("fp8", "fp8_token", "fp8_block128")
    },
    **{
        f"hopper-decode-many-{format}{name}": _decode(
            format, heads, **{"page_size": 64, **MUCH_WORK, **more}
        )
        for format in ("fp8", "fp8_token")
        for name, heads, more in (
            ("", 128, {}),
            ("-given-plan", 128, {"page_size": 128, "num_workers": 3, "tile": 16}),
            ("-page8", 100, {"page_size": 8, "sink": "finite"}),
            ("-page32", 64, {"page_size": 32}),
            ("-e4m3-q", 128, {"dtype": "e4m3", "q_scaled": True}),
            ("-e4m3-q-page8", 100, {"dtype": "e4m3", "page_size": 8, "sink": "finite"}),
            (
                "-e4m3-q-given-plan",
                64,
                {"dtype": "e4m3", "page_size": 128, "num_workers": 3, "tile": 16},
            ),
        )
    },
    "hopper-decode-many-fp8-fp16-q": _decode("fp8", 128, page_size=64, dtype="fp16", **MUCH_WORK),
    "hopper-decode-many-fp8_token-e4m3-q-bf16-rope": _decode(
        "fp8_token",
        128,
        page_size=64,
        dtype="e4m3",
        q_rope_dtype="bf16",
        q_scaled=True,
        **MUCH_WORK,
    ),
    "hopper-decode-h16-fp8-fp16-q": _decode("fp8", 16, page_size=64, dtype="fp16"),
    **{
        f"hopper-decode-h{heads}-{format}-e4m3-q": _decode(
            format, heads, page_size=64, dtype="e4m3", q_scaled=is_scaled
        )
        for heads, is_scaled, formats in (
            (8, True, ("fp8_token",)),
            (16, False, ("fp8", "fp8_token", "fp8_block128")),
            (32, True, ("fp8", "fp8_token", "fp8_block128")),
        )
        for format in formats
    },
    **{
        f"hopper-decode-h{heads}-{format}-e4m3-q-bf16-rope": _decode(
            format, heads, page_size=64, dtype="e4m3", q_rope_dtype="bf16", q_scaled=True
        )
        for heads, format in ((16, "fp8_token"), (32, "fp8_token"), (32, "fp8_block128"))
    },
    **{
        f"hopper-decode-h{heads}-{format}-e4m3-q-given-plan": _decode(
            format, heads, page_size=page_size, dtype="e4m3", q_scaled=True, num_workers=3, tile=16
        )
        for heads, format, page_size in (
            (16, "fp8_block128", 128),
            (32, "fp8", 16),
            (32, "fp8_token", 16),
        )
    },
    **{
        f"hopper-decode-h{heads}-{format}-given-plan": _decode(
            format, heads, page_size=128, num_workers=3, tile=16
        )
        for heads, format in ((16, "fp8_block128"), (32, "fp8"), (32, "fp8_block128"))
    },
    **{
        f"hopper-decode-h{heads}-{format}-page{page_size}": _decode(
            format, heads, page_size=page_size, **more
        )
        for page_size in (8, 32)
        for heads, format, more in (
            (16, "bf16", {}),
            (128, "bf16", MUCH_WORK),
            (16, "fp8", {}),
            *(
                (heads, format, {})
                for heads in (16, 32)
                for format in ("fp8_token", "fp8_block128")
            ),
        )
    },
    "hopper-decode-h128-bf16-page16": _decode("bf16", 128, page_size=16, **MUCH_WORK),
    # with a gather producer
    **{
        f"hopper-decode-h{heads}-{format}-page{page_size}": _decode(
            format, heads, page_size=page_size, **more
        )
        for heads, format, page_size, more in (
            (16, "bf16", 1, {}),
            (32, "fp16", 24, {}),
            (128, "bf16", 1, MUCH_WORK),
            (128, "bf16", 96, MUCH_WORK),
            (16, "fp8", 3, {}),
            (16, "fp8_token", 1, {}),
            (32, "fp8_token", 1, {}),
            (16, "fp8_block128", 1, {}),
            (32, "fp8_block128", 1, {}),
            (128, "fp8", 96, MUCH_WORK),
            (128, "fp8_token", 1, MUCH_WORK),
        )
    },
    **{
        f"hopper-decode-h128-{format}-e4m3-q-page{page_size}": _decode(
            format, 128, page_size=page_size, dtype="e4m3", q_scaled=True, **MUCH_WORK
        )
        for format, page_size in (("fp8", 24), ("fp8_token", 1))
    },
}
HOPPER_ARCH = 90
EVERYWHERE = (
    "append-fp8_block128",
    "scaled-mm-128",
    "prefill-192-128",
    "decode-h16-bf16",
    "decode-h128-fp8_block128",
    "sparse-h128-fp8_block128",
    "indexer-e4m3",
    "topk-2048",
)


def named_checks() -> list[tuple[str, int]]:
    """(configuration, architecture): every configuration once, some on every architecture."""
    others = [name for name in CONFIGURATIONS if name not in EVERYWHERE]
    # 90 twice: of the architectures the one most users have
    turns = (90, 80, 100, 90, 89, 120)
    return [
        *((name, arch) for name in EVERYWHERE for arch in ARCHITECTURES),
        *((name, turns[i % len(turns)]) for i, name in enumerate(others)),
        *((name, HOPPER_ARCH) for name in HOPPER),
    ]


def all_checks() -> list[tuple[str, int]]:
    portable = [(name, arch) for name in CONFIGURATIONS for arch in ARCHITECTURES]
    return [*portable, *((name, HOPPER_ARCH) for name in HOPPER)]


@dataclass(frozen=True)
class Compiled:
    """One kernel of one check; `error` says why there is none."""

    configuration: str
    arch: int
    kernel: str
    registers: int = 0
    spill_stores: int = 0  # instructions
    spill_loads: int = 0
    allowed_spills: tuple[int, int] = (0, 0)
    is_serialised: bool = False  # asynchronous dots that wait for each other
    idle_barriers: int = 0
    shared_bytes: int = 0
    shared_limit: int = 0
    seconds: float = 0.0
    error: str = ""

    @property
    def fault(self) -> str:
        """What is wrong with it, "" if nothing is."""
        if self.error:
            return self.error
        if self.shared_bytes > self.shared_limit:
            return f"shared memory exceeds the limit of {self.shared_limit} bytes"
        if self.idle_barriers:
            return f"barriers that are used by no one: {self.idle_barriers}"
        if self.is_serialised:
            return "its wgmma are serialised"
        if (self.spill_stores, self.spill_loads) != self.allowed_spills:
            allowed = "{} and {} are allowed".format(*self.allowed_spills)
            return f"spills: {self.spill_stores} stores, {self.spill_loads} loads; {allowed}"
        return ""

    @property
    def is_excused(self) -> bool:
        return not self.fault and self.allowed_spills != (0, 0)

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "fault": self.fault}


def check(configuration: str, arch: int) -> list[Compiled]:
    """Compile what the op of a configuration would start on `arch`."""
    import triton

    from mlakit.kernels.triton.launch import SHARED_BYTES, Target, compiling

    start = perf_counter()
    target = Target(arch, NUM_SMS[arch], SHARED_BYTES[arch])
    backend: Backend = "hopper" if configuration in HOPPER else "triton"
    trial = (HOPPER | CONFIGURATIONS)[configuration].trial("cpu")
    try:
        with compiling(target) as compilation:
            trial.call(backend)
        unique = {kernel.hash: kernel for kernel in compilation.kernels}
        codes = {hash: machine_code(kernel) for hash, kernel in unique.items()}
    except Exception as error:  # noqa: BLE001  # whatever a compiler or a tool raises is the finding
        return [Compiled(configuration, arch, "—", error=_innermost(error))]
    seconds = (perf_counter() - start) / max(len(compilation.kernels), 1)
    if not unique:
        return [Compiled(configuration, arch, "—", error="no kernel was started")]
    allowed = ALLOWED_SPILLS.get((triton.__version__, configuration, arch), {})
    return [
        Compiled(
            configuration,
            arch,
            kernel.metadata.name,
            allowed_spills=allowed.get(kernel.metadata.name, (0, 0)),
            **asdict(codes[hash]),
            shared_bytes=kernel.metadata.shared,
            shared_limit=target.shared_bytes,
            seconds=seconds,
        )
        for hash, kernel in unique.items()
    ]


def _innermost(error: BaseException) -> str:
    """The first cause of a compiler's error, in one line; around it are quotes of the kernel."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip("^ ")]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def checks_with(only: str, checks: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Those with `only` in the name of the configuration. ValueError, naming --only, if none."""
    found = [each for each in checks if only in each[0]]
    if not found:
        names = ", ".join(dict.fromkeys(name for name, _ in checks))
        raise ValueError(f"--only: no configuration has {only!r} in its name; there are {names}")
    return found


def run(
    checks: Sequence[tuple[str, int]],
    *,
    jobs: int,
    after_each: Callable[[int], None] = lambda done: None,
) -> Iterator[Compiled]:
    """Carry out `checks` in `jobs` processes; results come in the order of the checks."""
    if knobs.interpreted():
        raise RuntimeError("kernels are interpreted here: unset TRITON_INTERPRET to compile them")
    results: dict[int, list[Compiled]] = {}
    others = active_children()
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_begin_worker)
    try:
        with _interrupts_held_back():  # workers inherit this, and start in peace
            futures = {pool.submit(check, *each): place for place, each in enumerate(checks)}
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
    for place in range(len(checks)):
        yield from results[place]


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """A Ctrl-C in this block arrives at its end; processes that it starts get none."""
    if current_thread() is not main_thread():  # which gets them, and may change what they do
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
    os.dup2(2, 1)  # what a compiler complains of must not get into the results
    # A Ctrl-C goes to all processes of a terminal. This one leaves it to its parent, without a
    # traceback; a function, and not SIG_IGN, so that the tools it starts still end.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def run_with_progress(checks: Sequence[tuple[str, int]], *, jobs: int) -> list[Compiled]:
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(checks))
        advance = partial(progress.update, task)
        return list(run(checks, jobs=jobs, after_each=lambda done: advance(completed=done)))


def summary(kernels: Sequence[Compiled]) -> str:
    import triton

    faulty = sum(bool(each.fault) for each in kernels)
    checks = len({(each.configuration, each.arch) for each in kernels})
    excused = sum(each.is_excused for each in kernels)
    ends = f"[red]{faulty} of them wrong[/red]" if faulty else "[green]all well[/green]"
    if excused:
        ends += f", {excused} with spills that are allowed"
    return f"Triton {triton.__version__}: {checks} checks, {len(kernels)} kernels, {ends}"


def compile_table(kernels: Sequence[Compiled], width: int) -> RenderableType:
    columns = (
        Column("configuration", is_number=False),
        Column("arch", is_number=False),
        Column("kernel", rank=1, is_number=False),
        Column("registers", rank=3),
        Column("spills", rank=2),
        Column("shared", rank=4),
        Column("of", rank=4),
        Column("s", rank=5),
        Column("", is_number=False, folds_at=20),
    )
    rows = (
        (
            each.configuration,
            f"sm_{each.arch}",
            each.kernel,
            str(each.registers),
            str(each.spill_stores + each.spill_loads),
            str(each.shared_bytes),
            str(each.shared_limit),
            f"{each.seconds:.1f}",
            _verdict(each),
        )
        for each in kernels
    )
    return fitting_table(columns, rows, width, grouped=False)


def _verdict(kernel: Compiled) -> Text:
    if kernel.fault:
        return Text(kernel.fault, style="red")
    return Text.assemble(("ok", "green"), ", spills are allowed" if kernel.is_excused else "")
