"""Which kernel carries out a call, and why not the others."""

from __future__ import annotations

from functools import lru_cache

from mlakit import knobs
from mlakit.checks import UnsupportedError
from mlakit.kernels.cpu import support as cpu
from mlakit.kernels.hopper import support as hopper
from mlakit.kernels.triton import support as triton
from mlakit.knobs import Backend
from mlakit.specs import KernelSpec, Problem

# fastest first: `auto` takes the first kernel that has no objection; in host memory that is `cpu`,
# where the portable kernels are only ever interpreted
SPECS: tuple[KernelSpec, ...] = (*cpu.SPECS, *hopper.SPECS, *triton.SPECS)
OPS: tuple[str, ...] = tuple(dict.fromkeys(spec.op for spec in SPECS))
BACKENDS: tuple[Backend, ...] = tuple(name for name in knobs.BACKENDS if name != "auto")


def specs(op: str) -> list[KernelSpec]:
    """The kernels of one op, fastest first."""
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}; choose from {', '.join(OPS)}")
    return [spec for spec in SPECS if spec.op == op]


def explain(op: str, problem: Problem) -> dict[str, str | None]:
    """For each backend: the reason it refuses `problem`, or None if it takes it.

    Those with a kernel of `op` come first, in the order in which `auto` asks them.
    """
    asked: dict[str, str | None] = {spec.backend: spec.why_not(problem) for spec in specs(op)}
    absent: dict[str, str | None] = {
        backend: f"has no kernel of {op}" for backend in BACKENDS if backend not in asked
    }
    return asked | absent


def select(op: str, problem: Problem, backend: str = "auto") -> KernelSpec:
    """The first kernel with no objection to `problem`; raises with every objection otherwise."""
    return _select(op, problem, knobs.backend() if backend == "auto" else backend)


@lru_cache(maxsize=1024)
def _select(op: str, problem: Problem, backend: str) -> KernelSpec:
    candidates = [spec for spec in specs(op) if backend in ("auto", spec.backend)]
    if backend not in ("auto", *BACKENDS):
        raise ValueError(
            f"{op}: backend must be one of auto, {', '.join(BACKENDS)}, got {backend!r}"
        )
    if not candidates:
        have = ", ".join(spec.backend for spec in specs(op))
        raise UnsupportedError(f"{op}: no kernel for backend {backend!r}, only for {have}")
    objections = [spec.why_not(problem) for spec in candidates]
    for spec, objection in zip(candidates, objections, strict=True):
        if objection is None:
            return spec
    reasons = "\n".join(
        f"  {spec.backend}: {why}" for spec, why in zip(candidates, objections, strict=True)
    )
    raise UnsupportedError(f"{op}: no kernel for {problem}\n{reasons}")
