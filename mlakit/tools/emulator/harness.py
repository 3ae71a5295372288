"""Runs of Gluon kernels' configurations in the emulator, each compared with the float64 oracle.

A configuration is one of HOPPER or BLACKWELL in `compile.configurations`. Those with enough work
for a whole GPU are cut to what a GPU with two SMs has to do for the same kernel.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from mlakit.dispatch import knobs
from mlakit.dispatch.names import Backend
from mlakit.dispatch.specs import pretending
from mlakit.tools.compile.compilation import NUM_SMS as WHOLE_GPU
from mlakit.tools.compile.configurations import (
    BLACKWELL,
    HOPPER,
    MUCH_WORK,
    archs_of,
    configured,
)
from mlakit.tools.emulator.faults import Fault
from mlakit.tools.emulator.frontend import NUM_SMS, Launch, Mutate, emulating_mlakit
from mlakit.tools.workloads import Case
from mlakit.tools.workloads.case import Trial

SEEDS = (0, 1)
LESS_WORK: dict[str, Any] = {"kv_lens": (330, 65), "q_lens": (3, 1)}
# products for which the same tiles are picked on so few SMs
LESS_PRODUCTS: dict[str, dict[str, int]] = {
    "hopper-scaled-mm-256x128": {"m": 300, "n": 200},
    "hopper-scaled-mm-256x128-e4m3": {"m": 300, "n": 200},
    "hopper-scaled-mm-128x128": {"n": 400},
    "hopper-scaled-mm-128x64": {"m": 600, "n": 60},
}
TRACED_STEPS = 4000  # the last ones of a CTA are kept
WRONG_RESULT = "WrongResult"
CONFIGURATIONS = HOPPER | BLACKWELL


@dataclass(frozen=True)
class Step:
    """One line of a trace."""

    who: str  # a partition, or the engine that completes an operation
    what: str


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run: `kind` and `message` say what is wrong, and are "" if nothing is."""

    configuration: str
    seed: int
    kind: str = ""  # the name of a fault's class, or WRONG_RESULT
    message: str = ""
    launches: tuple[Launch, ...] = ()
    warnings: dict[str, int] = field(default_factory=dict)
    trace: tuple[Step, ...] = ()  # of the CTA with the fault
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.kind

    def __str__(self) -> str:
        outcome = "ok" if self.passed else f"{self.kind}: {self.message}"
        return f"{self.configuration}, seed {self.seed}: {outcome}"


@dataclass(frozen=True)
class Configuration:
    """A case with little work, and how it runs: see `run_trial`."""

    case: Case
    selects_for: int
    backend: Backend


def configuration(name: str) -> Configuration:
    """Return a configuration by name. Raises ValueError for unknown names."""
    if name not in CONFIGURATIONS:
        raise ValueError(f"NAME must be a configuration, as --list shows them, got {name!r}")
    case, backend = CONFIGURATIONS[name], configured(name)[0]
    num_sms = WHOLE_GPU[archs_of(backend)[0]]
    if getattr(case, "kv_lens", None) == MUCH_WORK["kv_lens"]:
        case, num_sms = replace(case, **LESS_WORK), NUM_SMS
    elif name in LESS_PRODUCTS:
        case, num_sms = replace(case, **LESS_PRODUCTS[name]), NUM_SMS  # type: ignore[arg-type]
    return Configuration(case, num_sms, backend)


def emulate(
    name: str, seed: int, *, is_traced: bool = False, mutate: Mutate | None = None
) -> Outcome:
    """Run a configuration as `run_trial`; inputs and interleaving are made from the seed."""
    chosen = configuration(name)
    trial = replace(chosen.case, seed=seed).trial("cpu")
    settings: dict[str, Any] = {"is_traced": is_traced, "mutate": mutate}
    return run_trial(
        trial, name, seed, backend=chosen.backend, selects_for=chosen.selects_for, **settings
    )


def run_trial(
    trial: Trial,
    name: str,
    seed: int,
    *,
    backend: Backend = "hopper",
    selects_for: int = NUM_SMS,
    is_traced: bool = False,
    mutate: Mutate | None = None,
) -> Outcome:
    """Run a trial on the kernels of `backend`, whose IR `mutate` may change, and check its results.

    selects_for  SMs of the GPU that a kernel is selected for; it runs on few
    """
    if knobs.interpreted():
        raise RuntimeError(
            "TRITON_INTERPRET is set, so kernels have no IR: unset it to emulate them"
        )
    started = perf_counter()
    steps: deque[Step] = deque(maxlen=TRACED_STEPS)

    def observe(who: str, what: str) -> None:
        if who == "CTA":
            steps.clear()
        steps.append(Step(who, what))

    kind = message = ""
    arch = archs_of(backend)[0]
    settings: dict[str, Any] = {
        "arch": arch,
        "seed": seed,
        "mutate": mutate,
        "observer": observe if is_traced else None,
    }
    with (
        emulating_mlakit(**settings) as emulation,
        pretending(arch, selects_for),
    ):
        try:
            before = trial.inputs.snapshot()
            results = trial.call(backend)
            trial.inputs.assert_only_written(before)
        except Fault as fault:
            kind, message = type(fault).__name__, str(fault)
        except AssertionError as error:
            kind, message = WRONG_RESULT, str(error)
    if not kind:
        try:
            trial.check(results)
        except AssertionError as error:
            kind, message = WRONG_RESULT, str(error)
    return Outcome(
        name,
        seed,
        kind,
        message,
        tuple(emulation.launches),
        emulation.warnings,
        tuple(steps) if kind else (),
        perf_counter() - started,
    )
