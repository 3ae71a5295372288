"""Selection of the kernel that carries out a call, with the refusals of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module

from mlakit.dispatch import knobs, log, names, proofs
from mlakit.dispatch.checks import UnsupportedError
from mlakit.dispatch.names import Backend
from mlakit.dispatch.specs import KernelSpec, Problem


def _specs_of(backend: Backend) -> tuple[KernelSpec, ...]:
    specs: tuple[KernelSpec, ...] = import_module(f"..kernels.{backend}.support", __package__).SPECS
    return specs


BACKENDS: tuple[Backend, ...] = tuple(name for name in names.BACKENDS if name != "auto")
# fastest first: `auto` takes the first kernel that has no objection. `cpu` comes before all others:
# in host memory the portable kernels are only ever interpreted
SPECS: tuple[KernelSpec, ...] = tuple(
    spec for name in sorted(BACKENDS, key=lambda name: name != "cpu") for spec in _specs_of(name)
)


@dataclass(frozen=True)
class Choice:
    """Why a kernel was chosen the first time."""

    problem: Problem  # of that call
    why_not: dict[str, str]  # of the kernels that would be faster: why they were not taken

    def __str__(self) -> str:
        reasons = "; ".join(f"{name}: {why}" for name, why in self.why_not.items())
        return f"{self.problem}" + (f"; not {reasons}" if reasons else "")


_CHOSEN: dict[str, dict[str, Choice]] = {}  # kernels of every op, in the order of their first calls
OPS: tuple[str, ...] = tuple(dict.fromkeys(spec.op for spec in SPECS))


def specs(op: str) -> list[KernelSpec]:
    """The kernels of one op, fastest first."""
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}; choose from {', '.join(OPS)}")
    return [spec for spec in SPECS if spec.op == op]


def backends(op: str) -> list[Backend]:
    """The backends with a kernel of one op, in the order in which `auto` asks them."""
    return list(dict.fromkeys(spec.backend for spec in specs(op)))


def explain(op: str, problem: Problem) -> dict[str, str | None]:
    """Return for each backend the reason why `auto` does not give it `problem`, or None if it may.

    Those with a kernel of `op` come first, in the order in which `auto` asks them. The reason is
    that of the backend's first kernel, or of one that takes `problem` and only waits for a check;
    `explain_kernels` has those of all.
    """
    asked: dict[str, str | None] = {}
    for spec in specs(op):
        refusal = _why_not_auto(spec, problem)
        waits = spec.why_not(problem) is None and _why_slower(spec, problem) is None
        if spec.backend not in asked or refusal is None or (waits and asked[spec.backend]):
            asked[spec.backend] = refusal
    absent: dict[str, str | None] = {
        backend: f"has no kernel of {op}" for backend in BACKENDS if backend not in asked
    }
    return asked | absent


def explain_kernels(op: str, problem: Problem) -> dict[str, str | None]:
    """Return, for each kernel of `op`, why `auto` does not take it; None for its choice."""
    reasons: dict[str, str | None] = {}
    taken: dict[str, str] = {}
    for spec in specs(op):
        reason = _why_not_auto(spec, problem) or _why_slower(spec, problem)
        if reason is None and spec.backend in taken:
            reason = f"{taken[spec.backend]} is faster"
        elif reason is None:
            taken[spec.backend] = spec.kernel
        reasons[spec.name] = reason
    return reasons


def select(op: str, problem: Problem, backend: str = "auto") -> KernelSpec:
    """The first kernel with no objection to `problem`; raises with every objection otherwise.

    backend  auto, a backend, or "backend:kernel" for one of its kernels by name
    """
    if not isinstance(backend, str):
        raise TypeError(f"{op}: backend must be a string, got {type(backend).__name__}")
    wanted = knobs.backend() if backend == "auto" else backend
    return _select(op, problem, wanted, knobs.proved_kernels())


def _why_not_auto(spec: KernelSpec, problem: Problem) -> str | None:
    """Return why `auto` does not take a kernel; None if it may."""
    return spec.why_not(problem) or proofs.why_unproved(spec, problem)


@lru_cache(maxsize=1024)
def _select(op: str, problem: Problem, backend: str, uses_proofs: bool) -> KernelSpec:
    name, _, kernel = backend.partition(":")
    candidates = [spec for spec in specs(op) if name in ("auto", spec.backend)]
    if name not in ("auto", *BACKENDS):
        raise ValueError(
            f"{op}: backend must be one of auto, {', '.join(BACKENDS)}, got {backend!r}"
        )
    if not candidates:
        have = ", ".join(backends(op))
        raise UnsupportedError(f"{op}: no kernel for backend {backend!r}, only for {have}")
    if kernel:
        named = [spec for spec in candidates if spec.kernel == kernel]
        if not named:
            have = ", ".join(spec.kernel for spec in candidates if spec.kernel) or "no names"
            raise ValueError(f"{op}: kernel of {name} must be one of {have}, got {kernel!r}")
        candidates = named
    # a kernel or backend asked for by name runs without a proof
    refusal = _why_not_auto if name == "auto" else KernelSpec.why_not
    able = [spec for spec in candidates if refusal(spec, problem) is None]
    if not able:
        raise UnsupportedError(f"{op}: no kernel for {problem}\n{_reasons(candidates, problem)}")
    # a kernel asked for by name runs even where another one is faster
    fast = [spec for spec in able if kernel or _why_slower(spec, problem) is None]
    chosen = (fast or able)[0]
    known = _CHOSEN.setdefault(op, {})
    if log.is_on() or chosen.name not in known:
        choice = Choice(problem, _why_none_before(chosen, candidates, problem))
        known.setdefault(chosen.name, choice)
        log.LOGGER.info("%s runs %s for %s", op, chosen.name, choice)
    return chosen


def _why_none_before(
    chosen: KernelSpec, candidates: Sequence[KernelSpec], problem: Problem
) -> dict[str, str]:
    """Return why the kernels that were asked before the chosen one did not get the call."""
    before = candidates[: candidates.index(chosen)]
    reasons = {s.name: _why_not_auto(s, problem) or _why_slower(s, problem) for s in before}
    # on a GPU it is no surprise that the kernels of the CPU are not taken
    return {name: why for name, why in reasons.items() if why and not name.startswith("cpu")}


def choices() -> dict[str, dict[str, Choice]]:
    """Return, by op, the kernels that this process has chosen so far, and why."""
    return {op: dict(kernels) for op, kernels in sorted(_CHOSEN.items())}


def chosen(op: str) -> tuple[str, ...]:
    """Return the kernels of an op that this process has chosen so far."""
    return tuple(_CHOSEN.get(op, ()))


def _why_slower(spec: KernelSpec, problem: Problem) -> str | None:
    return None if spec.why_slower is None else spec.why_slower(problem)


def _reasons(candidates: Sequence[KernelSpec], problem: Problem) -> str:
    """A line per backend where its kernels agree, else per kernel."""
    lines: list[str] = []
    for backend in dict.fromkeys(spec.backend for spec in candidates):
        own = {s.name: _why_not_auto(s, problem) for s in candidates if s.backend == backend}
        if len(set(own.values())) == 1 and len(own) > 1:
            own = {backend: next(iter(own.values()))}
        lines += [f"  {name}: {why}" for name, why in own.items()]
    return "\n".join(lines)
