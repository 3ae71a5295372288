"""`mlakit doctor`: this machine, the backends that work on it, and the available peers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from mlakit import launch_cache
from mlakit.dispatch import knobs, proofs, selection
from mlakit.dispatch.knobs import Backend
from mlakit.dispatch.specs import arch_of
from mlakit.tools import check
from mlakit.tools.bench import environment, gpu, peers
from mlakit.tools.workloads import (
    Case,
    DecodeCase,
    IndexerLogitsCase,
    PrefillCase,
    ScaledMatmulCase,
    SparseCase,
)

# for kernels that support certain widths only; other ops use their smallest case
WIDE_CASES: dict[str, Case] = {
    "mla_prefill": PrefillCase(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    "mla_decode": DecodeCase(kv_lora_rank=512, qk_rope_head_dim=64, page_size=64),
    "sparse_mla": SparseCase(kv_lora_rank=512, qk_rope_head_dim=64, page_size=64),
    "indexer_logits": IndexerLogitsCase(
        kv_lora_rank=128, qk_rope_head_dim=0, page_size=64, format="fp8_token", dtype="e4m3"
    ),
    "scaled_mm_fp8": ScaledMatmulCase(m=20, n=200, k=272, n_group=128, k_group=128),
}
OPTIONAL = (
    *("transformers", "matplotlib", "vllm"),
    *(package for peer in peers.PEERS for package in peer.packages),
)


@dataclass(frozen=True)
class BackendHealth:
    """A backend on this machine."""

    backend: Backend
    device: str
    why_not: str | None  # why no call was made, or none is supported
    ops: tuple[check.CaseResult, ...] = ()
    random: check.Outcome | None = None  # random calls, if those of `ops` are correct
    offer: str = ""  # what `auto` needs to take it

    @property
    def num_correct(self) -> int:
        correct = sum(each.unsupported is None and each.error is None for each in self.ops)
        return correct + (0 if self.random is None else self.random.num_correct)

    @property
    def errors(self) -> list[str]:
        wrong = [f"{each.op}: {each.error}" for each in self.ops if each.error]
        if self.random is not None and self.random.failure is not None:
            wrong.append(check.summary(self.random))
        return wrong

    def as_json(self) -> dict[str, object]:
        return {
            "backend": self.backend,
            "device": self.device,
            "works": self.num_correct > 0 and not self.errors,
            "why_not": self.why_not,
            "ops": [each.as_json() for each in self.ops],
            "random": None if self.random is None else self.random.as_json(),
            "offer": self.offer,
        }


@dataclass(frozen=True)
class Diagnosis:
    environment: dict[str, object]
    packages: dict[str, str | None]  # versions; None: not installed
    settings: dict[str, object]  # environment variables that are not at their defaults
    backends: tuple[BackendHealth, ...]
    peers: dict[str, str | None]  # why each is unavailable; None: it is available
    origins: dict[str, str]  # the builds of the available peers
    replay: dict[str, launch_cache.OpStats]  # counted during these calls

    @property
    def passed(self) -> bool:
        return not any(each.errors for each in self.backends)

    def as_json(self) -> dict[str, object]:
        return {
            "environment": self.environment,
            "packages": self.packages,
            "settings": self.settings,
            "backends": [each.as_json() for each in self.backends],
            "peers": self.peers,
            "origins": self.origins,
            "replay": {op: vars(each) for op, each in self.replay.items()},
            "passed": self.passed,
        }


def examine(seconds: float) -> Diagnosis:
    """Call every op on every available backend, then random cases for `seconds` each."""
    backends = tuple(_backend_health(backend, seconds) for backend in selection.BACKENDS)
    return Diagnosis(
        environment.describe(),
        {name: environment.version_of(name) for name in OPTIONAL},
        dict(_changed_settings()),
        backends,
        peers.present(),
        peers.origins(),
        launch_cache.stats(),
    )


def _changed_settings() -> Iterator[tuple[str, object]]:
    for knob in knobs.REGISTRY.values():
        try:
            value = knob()
        except ValueError as error:  # it does not parse: show the error
            yield knob.variable, str(error)
        else:
            if value != knob.default:
                yield knob.variable, value


def why_not(backend: Backend) -> str | None:
    """Why a backend is unavailable; None if it is available."""
    if not any(spec.backend == backend for spec in selection.SPECS):
        return "this version has no kernels for it"
    if backend == "cpu":
        return None
    if reason := gpu.why_not():
        return reason
    return None if find_spec("triton") else "needs Triton, which is not installed"


def _backend_health(backend: Backend, seconds: float) -> BackendHealth:
    device = "cpu" if backend == "cpu" else "cuda"
    reason = why_not(backend)
    if reason is not None:
        return BackendHealth(backend, device, reason)
    named = [op for op in check.KINDS if backend in selection.backends(op)]
    cases = (WIDE_CASES.get(op) or check.KINDS[op]() for op in named)
    ops = tuple(check.run_case(case, device, backend) for case in cases)
    if all(each.unsupported for each in ops):
        return BackendHealth(backend, device, ops[0].unsupported, ops)
    random = None
    if seconds > 0 and not any(each.error for each in ops):
        settings = check.Settings(
            tuple(named), seed=0, device=device, backend=backend, minutes=seconds / 60
        )
        random = check.run(settings)
    return BackendHealth(backend, device, None, ops, random, _offer(backend))


def _offer(backend: Backend) -> str:
    """Return what `auto` needs to take a backend's kernels; "" if nothing."""
    kernels = dict.fromkeys(
        spec.kernel or spec.op
        for spec in selection.SPECS
        if spec.backend == backend and spec.variant is not None
    )
    if not kernels:
        return ""
    arch = arch_of(torch.device("cuda", torch.cuda.current_device()))
    why = proofs.why_no_proof(backend, arch)
    if why is None:
        return ""
    command = f"mlakit check --backend {backend}"
    named = ", ".join(kernels)
    return f"auto leaves out what needs a check of {named} ({why}): run {command}"


def report(diagnosis: Diagnosis) -> RenderableType:
    """The whole diagnosis as text and tables."""
    shown: list[RenderableType] = [escape(environment.summary(diagnosis.environment))]
    installed = [f"{name} {version}" for name, version in diagnosis.packages.items() if version]
    if installed:
        shown.append(f"Also installed: {escape(', '.join(installed))}")
    for name, value in diagnosis.settings.items():
        shown.append(f"{name}={escape(str(value))}")
    if not torch.cuda.is_available():
        shown.append("torch sees no CUDA device.")
    shown += [_backend_table(diagnosis.backends), _peer_table(diagnosis)]
    if diagnosis.replay:
        shown.append(_replay_table(diagnosis.replay))
    for each in diagnosis.backends:
        shown += [f"[red]{each.backend}[/red] {escape(error)}" for error in each.errors]
    shown.append("All available backends work." if diagnosis.passed else "Some results are wrong.")
    return Group(*shown)


def _backend_table(backends: tuple[BackendHealth, ...]) -> Table:
    shown = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    shown.add_column("backend", no_wrap=True)
    shown.add_column("status", overflow="fold")
    for each in backends:
        shown.add_row(each.backend, escape(_backend_line(each)))
    return shown


def _replay_table(stats: dict[str, launch_cache.OpStats]) -> Table:
    shown = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    shown.add_column("launch replay", no_wrap=True)
    shown.add_column("hits", justify="right", no_wrap=True)
    shown.add_column("misses", justify="right", no_wrap=True)
    shown.add_column("not replayed, and why", overflow="fold")
    for op, each in stats.items():
        reasons = "; ".join(f"{count} × {reason}" for reason, count in each.refused.most_common())
        shown.add_row(op, str(each.hits), str(each.misses), escape(reasons))
    return shown


def _backend_line(health: BackendHealth) -> str:
    if health.why_not is not None:
        return f"no: {health.why_not}"
    if health.errors:
        return "wrong results, see below"
    if health.num_correct == 0:
        return "not tested: it supports none of the calls"
    correct = sum(each.unsupported is None for each in health.ops)
    seconds = sum(each.seconds for each in health.ops)
    line = f"works: {correct} of {len(health.ops)} ops correct in {seconds:.1f} s"
    if health.random is not None:
        line += f", then {health.random.num_correct} random calls"
    return f"{line}; {health.offer}" if health.offer else line


def _peer_table(diagnosis: Diagnosis) -> Table:
    shown = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    shown.add_column("benchmark peer", no_wrap=True)
    shown.add_column("available", overflow="fold")
    for name, reason in diagnosis.peers.items():
        line = f"no: {reason}" if reason else f"yes: {diagnosis.origins[name]}"
        shown.add_row(name, escape(line))
    return shown
