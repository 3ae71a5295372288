"""`mlakit check --backend BACKEND`: proves kernels that `auto` takes only after a check passed.

Every configuration of them in `compile.configurations` runs on this machine's GPU, and so does each
with the heads, masks and second caches that other code is compiled for. One is run with little
work, with more work, and with everything that a kernel is compiled for and a problem does not say,
and is compared with the oracle on poisoned inputs. Each has a process of its own: a kernel that
ends in an illegal instruction, or never, takes no other one with it. The outcome is recorded
(`dispatch.proofs`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from itertools import product
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mlakit.dispatch import proofs, selection
from mlakit.dispatch.checks import UnsupportedError
from mlakit.dispatch.names import Backend
from mlakit.dispatch.proofs import Facts, Proof
from mlakit.dispatch.specs import Problem, arch_of
from mlakit.model.masks import KINDS, WINDOWED
from mlakit.tools import check
from mlakit.tools.columns import counted
from mlakit.tools.compile.configurations import EXTERNAL_PLAN, SPECIALISED
from mlakit.tools.workloads import Case, IndexerLogitsCase
from mlakit.tools.workloads.case import BatchedCase
from mlakit.tools.workloads.random_launches import selection_of

SEEDS = (0, 1, 2)
LIMIT_S = 600.0  # of a configuration, most of it compilation
# work for all SMs, by op: its oracle runs on the GPU
MORE_WORK: dict[str, dict[str, Any]] = {
    "sparse_mla": {"num_tokens": 300, "topk": 1500, "num_pages": 64, "oracle": "batched"},
    "mla_decode": {
        "kv_lens": (3000, 1, 700, 0, 129) * 8,
        "q_lens": (2, 1, 1, 3, 1) * 8,
        "oracle": "batched",
    },
    "mla_prefill": {
        "kv_lens": (3000, 1, 700, 0, 1290) * 2,
        "q_lens": (2100, 1, 700, 0, 129) * 2,
        "heads": 16,
        "oracle": "batched",
    },
}
# constants of kernels that a problem does not say: splits, gaps between pages, negative scales, …
OTHER_CODE: dict[str, dict[str, Any]] = {
    "sparse_mla": {
        "topk": 600,
        "num_splits": 3,
        "with_lens": False,
        "num_layers": 2,
        "page_major": True,
        "sink": "mixed",
        "sharpness": -2.0,
    },
    "mla_decode": {
        **EXTERNAL_PLAN,
        "num_layers": 2,
        "page_major": True,
        "sink": "mixed",
        "sharpness": -2.0,
    },
    "mla_prefill": {"padded": True, "sink": "mixed", "sharpness": -2.0},
}
HEADS = (5, 9, 20, 40, 100)  # less than a tile of 8, 16, 32, 64 and 128
INDEX_QUERIES = (1, 2, 4, 9)  # of a request
WINDOW = 100
SECOND_CACHE: dict[str, Any] = {"extra_page_size": 16, "extra_topk": 64}


class Configuration(NamedTuple):
    """A case to run, and what it proves."""

    name: str
    proof: str  # what a problem asks for: "kernel: variant"
    case: Case


Body = Callable[[Backend, Configuration], None]


@dataclass(frozen=True)
class Checked:
    """A configuration that has run."""

    name: str
    proof: str  # what a problem asks for: "kernel: variant"
    seconds: float
    error: str = ""  # what is wrong

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Outcome:
    """What was checked, and the file that says so."""

    backend: Backend
    checked: tuple[Checked, ...]
    path: Path
    seconds: float

    @property
    def passed(self) -> bool:
        return not any(each.error for each in self.checked)

    def as_json(self) -> dict[str, object]:
        return {
            "backend": self.backend,
            "passed": self.passed,
            "record": str(self.path),
            "seconds": round(self.seconds, 3),
            "checked": [each.as_json() for each in self.checked],
        }


def needs_proof(backend: str) -> bool:
    """Return whether `auto` takes kernels of a backend only with a proof."""
    return any(spec.backend == backend and spec.variant is not None for spec in selection.SPECS)


def this_gpu(backend: Backend) -> Facts:
    """Return the facts that a record of this machine has. Raises ValueError without such a GPU."""
    archs, _ = SPECIALISED[backend]
    facts = None
    if torch.cuda.is_available():
        arch = arch_of(torch.device("cuda", torch.cuda.current_device()))
        facts = proofs.facts_of(arch) if arch in archs else None
    if facts is None:
        names = " or ".join(f"sm_{arch}" for arch in archs)
        raise ValueError(f"backend {backend} needs a GPU of {names}, and this machine has none")
    return facts


def cases_to_prove(backend: Backend) -> dict[str, Case]:
    """Return the configurations of the ops whose kernels need a proof."""
    ops = {
        spec.op for spec in selection.SPECS if spec.backend == backend and spec.variant is not None
    }
    return {name: case for name, case in SPECIALISED[backend][1].items() if case.op in ops}


def configurations(backend: Backend, device: str = "cuda") -> list[Configuration]:
    """Return the configurations that prove something: those that are listed, and others that prove
    what none of these does.

    Raises ValueError where the backend refuses one, with the reason.
    """
    found, others = [], []
    for name, case in cases_to_prove(backend).items():
        selected = selection_of(case, device, backend)
        if selected is None:
            refused = check.run_case(case, device, backend)
            raise ValueError(f"backend {backend} cannot be checked here: {refused.unsupported}")
        proof = proofs.configuration(*selected)
        if proof:
            found.append(Configuration(name, proof, case))
            others += [Configuration(name, *each) for each in _others(case, selected[1], backend)]
    known = {each.proof for each in found}
    for each in others:
        if each.proof not in known:
            known.add(each.proof)
            variant = each.proof.partition(": ")[2]
            found.append(each._replace(name=f"{each.name} for {variant}"))
    return found


def _others(case: Case, problem: Problem, backend: Backend) -> Iterator[tuple[str, Case]]:
    """Yield a case with other heads, masks and second caches, each with what it proves."""
    for heads, mask, has_extra in product(
        HEADS if problem.row else (problem.heads,),
        KINDS if problem.mask else ("",),
        (False, True) if case.op == "sparse_mla" else (False,),
    ):
        other = replace(problem, heads=heads, mask=mask, has_extra=has_extra)
        try:
            proof = proofs.configuration(selection.select(case.op, other, backend), other)
        except UnsupportedError:
            continue
        changes: dict[str, Any] = {"heads": heads} if problem.row else {}
        if mask:
            changes["mask"] = mask
        if hasattr(case, "window"):
            changes["window"] = WINDOW if mask in WINDOWED else 0
        if has_extra:
            changes |= {"extra_format": problem.format, **SECOND_CACHE}
        elif case.op == "sparse_mla":
            changes["extra_format"] = ""
        if proof:
            yield proof, replace(case, **changes)


def quick(known: Sequence[Configuration]) -> list[Configuration]:
    """Return the first configuration of each kernel."""
    first: dict[str, Configuration] = {}
    for each in known:
        first.setdefault(each.proof.partition(":")[0], each)
    return list(first.values())


def _token_blocks(case: IndexerLogitsCase) -> Iterator[Case]:
    """Yield work for all SMs with token blocks of every size: of many requests, and of one."""
    for queries in INDEX_QUERIES:
        for kv_lens in ((2600, 12, 700, 1290) * 20, (40_000,)):
            q_lens = (queries,) * len(kv_lens)
            yield replace(case, kv_lens=kv_lens, q_lens=q_lens, calls=3, oracle="batched")


def cases_of(case: Case) -> Iterator[Case]:
    """Yield a configuration with little work, with more, and with what selects other code."""
    for seed in SEEDS:
        yield replace(case, seed=seed)
        if isinstance(case, BatchedCase) and case.op in MORE_WORK:
            yield replace(case, seed=seed, calls=3, **MORE_WORK[case.op])
        if isinstance(case, IndexerLogitsCase):
            yield from _token_blocks(replace(case, seed=seed))
        if case.op in OTHER_CODE:
            yield replace(case, seed=seed, **OTHER_CODE[case.op])


def run_configuration(backend: Backend, configuration: Configuration) -> None:
    """Run the cases of a configuration; AssertionError says what is wrong."""
    for case in cases_of(configuration.case):
        selected = selection_of(case, "cuda", backend)
        proof = selected and proofs.configuration(*selected)
        if proof != configuration.proof:
            raise AssertionError(f"{case!r} proves {proof}")
        case.run("cuda", backend)


def _run_and_tell(
    sender: Connection, body: Body, backend: Backend, configuration: Configuration
) -> None:
    error = ""
    try:
        body(backend, configuration)
    except Exception as wrong:  # noqa: BLE001  # whatever is wrong is the result
        error = str(wrong) or type(wrong).__name__
    sender.send(error)


def check_configuration(
    backend: Backend,
    configuration: Configuration,
    *,
    body: Body = run_configuration,
    limit_s: float = LIMIT_S,
) -> Checked:
    """Run a configuration in a process of its own."""
    start, spawn = perf_counter(), get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_run_and_tell, args=(sender, body, backend, configuration))
    process.start()
    sender.close()  # the other end is that of the process alone
    error = f"it has not ended after {limit_s:g} s"
    if receiver.poll(limit_s):
        try:
            error = receiver.recv()
        except EOFError:
            error = "its process has died"
    process.kill()
    process.join()
    name, proof, _ = configuration
    return Checked(name, proof, perf_counter() - start, error)


def run(
    backend: Backend,
    *,
    is_quick: bool,
    jobs: int,
    before_all: Callable[[int], None] = lambda count: None,
    after_each: Callable[[Checked], None] = lambda checked: None,
) -> Outcome:
    """Check the configurations of a backend in `jobs` processes, and write the record.

    before_all  is called with their number
    Raises ValueError, naming the backend, where this machine cannot run them.
    """
    facts, start = this_gpu(backend), perf_counter()
    known = configurations(backend)
    if is_quick:
        known = quick(known)
    before_all(len(known))
    checked: dict[str, Checked] = {}
    with ThreadPoolExecutor(jobs) as threads:
        futures = [threads.submit(check_configuration, backend, each) for each in known]
        for future in as_completed(futures):
            done = future.result()
            checked[done.name] = done
            after_each(done)
    in_order = tuple(checked[each.name] for each in known)
    path = proofs.write(backend, proof_of(facts, in_order))
    return Outcome(backend, in_order, path, perf_counter() - start)


def proof_of(facts: Facts, checked: Sequence[Checked]) -> Proof:
    """Return the record: what is proved has passed in each configuration that proves it."""
    failed = {each.proof for each in checked if each.error}
    passed = {each.proof for each in checked} - failed
    return Proof(facts, tuple(sorted(passed)), tuple(sorted(failed)))


def run_with_progress(backend: Backend, *, is_quick: bool, jobs: int | None) -> Outcome:
    """`run` with a progress bar on stderr. jobs  None: a process for each core"""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("compiling and checking", total=None)
        return run(
            backend,
            is_quick=is_quick,
            jobs=jobs or os.cpu_count() or 1,
            before_all=lambda count: progress.update(task, total=count),
            after_each=lambda checked: progress.update(task, advance=1, description=checked.name),
        )


def summary(outcome: Outcome) -> str:
    """The output: what is wrong, and what `auto` takes now."""
    wrong = [each for each in outcome.checked if each.error]
    lines = [f"{each.name} is wrong ({each.proof}):\n{each.error}" for each in wrong]
    failed = {each.proof for each in wrong}
    taken = {each.proof for each in outcome.checked} - failed
    for title, some in (("auto takes on this machine", taken), ("auto leaves out", failed)):
        kernels: dict[str, list[str]] = {}
        for kernel, _, variant in (proof.partition(": ") for proof in sorted(some)):
            kernels.setdefault(kernel, []).append(variant)
        if kernels:
            lines.append(f"{title}:")
        lines += [f"  {kernel}: {'; '.join(variants)}" for kernel, variants in kernels.items()]
    count = counted(len(outcome.checked), "configuration")
    lines.append(f"{count} in {outcome.seconds:.0f} s; record: {outcome.path}")
    return "\n".join(lines)
