"""Proofs that kernels are right on this machine, for those that `auto` takes only with one.

Kernels that have never run on a GPU have a `KernelSpec` with a variant. `mlakit check --backend
blackwell`, or hopper, compares them with the oracle, and records what passed. A record holds the
GPU, its architecture, the versions of driver, Triton and mlakit, and a hash of the kernels'
sources; where one of them differs, or the file cannot be read, nothing is proved. It is read once
per process.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

import torch

from mlakit._version import __version__
from mlakit.dispatch import knobs
from mlakit.dispatch.specs import KernelSpec, Problem, arch_of

KERNELS = Path(__file__).parents[1] / "kernels"
DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Facts:
    """What a proof holds for."""

    gpu: str
    arch: int
    driver: str
    triton: str
    mlakit: str
    sources: str  # a hash of the kernels' sources


@dataclass(frozen=True)
class Proof:
    """The record of a check: configurations are named "kernel: variant"."""

    facts: Facts
    passed: tuple[str, ...]
    failed: tuple[str, ...] = ()


def facts_of(arch: int) -> Facts | None:
    """Return the facts of this machine's GPUs of `arch`; None if it has none, or several kinds."""
    if not torch.cuda.is_available():
        return None
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    gpus = {torch.cuda.get_device_name(each) for each in devices if arch_of(each) == arch}
    if len(gpus) != 1:
        return None
    return Facts(gpus.pop(), arch, _driver(), _triton(), __version__, hash_of_sources())


def _driver() -> str:
    """Return the version of the driver; "" where the system does not tell."""
    try:
        text = DRIVER_FILE.read_text()
    except OSError:
        return ""
    found = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", text)
    return found.group() if found else ""


def _triton() -> str:
    try:
        return installed_version("triton")
    except PackageNotFoundError:
        return ""


def hash_of_sources() -> str:
    """Return a hash of all kernels: those of Blackwell share parts with others."""
    digest = sha256()
    for path in sorted(KERNELS.rglob("*.py")):
        digest.update(path.relative_to(KERNELS).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def path_of(backend: str, arch: int) -> Path:
    """Return the file of a backend's record."""
    return knobs.cache_folder() / "proofs" / f"{backend}-{arch}.json"


def write(backend: str, proof: Proof) -> Path:
    """Write a record, in place of an older one, and return its file."""
    path = path_of(backend, proof.facts.arch)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(proof), indent=1) + "\n", encoding="utf-8")
    _read.cache_clear()
    return path


def configuration(spec: KernelSpec, problem: Problem) -> str:
    """Return the name of the configuration that proves a kernel for a problem; "" if none need."""
    variant = "" if spec.variant is None else spec.variant(problem)
    if not variant:
        return ""
    kernel = f"{spec.op} {spec.kernel}" if spec.kernel else spec.op
    return f"{kernel}: {variant}"


def why_unproved(spec: KernelSpec, problem: Problem) -> str | None:
    """Return why `auto` does not take a kernel that needs a proof; None if it may."""
    name = configuration(spec, problem)
    if not name:
        return None
    if not knobs.proved_kernels():
        return f"{knobs.proved_kernels.variable} turns it off"
    enable = f"mlakit check --backend {spec.backend} enables it"
    proof = _read(spec.backend, problem.arch)
    if isinstance(proof, str):
        return f"has not been checked on this machine ({proof}): {enable}"
    if name in proof.failed:
        return f"has failed its check on this machine ({name})"
    if name not in proof.passed:
        return f"has not been checked on this machine ({name}): {enable}"
    return None


def why_no_proof(backend: str, arch: int) -> str | None:
    """Return why nothing of a backend is proved on this machine; None if something may be."""
    proof = _read(backend, arch)
    return proof if isinstance(proof, str) else None


@lru_cache(maxsize=16)
def _read(backend: str, arch: int) -> Proof | str:
    """Return the proof of this machine, or why there is none."""
    path = path_of(backend, arch)
    if not path.is_file():
        return "no record"
    facts = facts_of(arch)
    if facts is None:
        return "no such GPU, or several kinds"
    try:
        proof = _parsed(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError):
        return f"{path} cannot be read"
    different = [
        name for name, value in asdict(facts).items() if getattr(proof.facts, name) != value
    ]
    return f"the record has another {different[0]}" if different else proof


def _parsed(record: dict[str, object]) -> Proof:
    facts, passed, failed = (record[name] for name in ("facts", "passed", "failed"))
    if not isinstance(facts, dict) or not (_are_names(passed) and _are_names(failed)):
        raise TypeError("a record must have facts, and lists of names")
    return Proof(Facts(**facts), tuple(passed), tuple(failed))  # type: ignore[arg-type]


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
