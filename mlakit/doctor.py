"""`mlakit doctor`: what this machine is, which backends work on it and why not, which peers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from time import perf_counter

import torch
from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from mlakit import dispatch, knobs, replay, selfcheck
from mlakit.bench import environment, gpu, peers
from mlakit.checks import UnsupportedError
from mlakit.knobs import Backend
from mlakit.workloads import DecodeCase

# where a kernel takes certain widths only; other ops have their smallest case
WIDE_CASES = {"mla_decode": DecodeCase(kv_lora_rank=512, qk_rope_head_dim=64, page_size=64)}
OPTIONAL = ("transformers", "matplotlib", "flash_mla", "flash_attn_3", "flashinfer-python", "vllm")


@dataclass(frozen=True)
class OpHealth:
    """One small call of an op."""

    op: str
    seconds: float
    refusal: str | None = None  # why the backend does not take it
    error: str | None = None  # what is wrong

    def as_json(self) -> dict[str, object]:
        return {**vars(self), "seconds": round(self.seconds, 3)}


@dataclass(frozen=True)
class BackendHealth:
    """A backend here."""

    backend: Backend
    device: str
    why_not: str | None  # no call was made, or none was taken
    ops: tuple[OpHealth, ...] = ()
    random: selfcheck.Outcome | None = None  # calls after those, where those were right

    @property
    def num_right(self) -> int:
        taken = sum(each.refusal is None and each.error is None for each in self.ops)
        return taken + (0 if self.random is None else self.random.num_right)

    @property
    def faults(self) -> list[str]:
        wrong = [f"{each.op}: {each.error}" for each in self.ops if each.error]
        if self.random is not None and self.random.miss is not None:
            wrong.append(selfcheck.verdict(self.random))
        return wrong

    def as_json(self) -> dict[str, object]:
        return {
            "backend": self.backend,
            "device": self.device,
            "works": self.num_right > 0 and not self.faults,
            "why_not": self.why_not,
            "ops": [each.as_json() for each in self.ops],
            "random": None if self.random is None else self.random.as_json(),
        }


@dataclass(frozen=True)
class Diagnosis:
    environment: dict[str, object]
    packages: dict[str, str | None]  # versions; None: not installed
    settings: dict[str, object]  # environment variables that are not at their defaults
    backends: tuple[BackendHealth, ...]
    peers: dict[str, str | None]  # why each is not here
    origins: dict[str, str]  # of those that are: which build
    replay: dict[str, replay.OpStats]  # of the calls made here

    @property
    def is_well(self) -> bool:
        return not any(each.faults for each in self.backends)

    def as_json(self) -> dict[str, object]:
        return {
            "environment": self.environment,
            "packages": self.packages,
            "settings": self.settings,
            "backends": [each.as_json() for each in self.backends],
            "peers": self.peers,
            "origins": self.origins,
            "replay": {op: vars(each) for op, each in self.replay.items()},
            "is_well": self.is_well,
        }


def examine(seconds: float) -> Diagnosis:
    """Call every op on every backend that can work here, then random cases for `seconds` each."""
    backends = tuple(_backend_health(backend, seconds) for backend in dispatch.BACKENDS)
    return Diagnosis(
        environment.describe(),
        {name: environment.version_of(name) for name in OPTIONAL},
        dict(_changed_settings()),
        backends,
        peers.present(),
        peers.origins(),
        replay.stats(),
    )


def _changed_settings() -> Iterator[tuple[str, object]]:
    for knob in knobs.REGISTRY.values():
        try:
            value = knob()
        except ValueError as error:  # it does not parse, and everything that needs it will say so
            yield knob.variable, str(error)
        else:
            if value != knob.default:
                yield knob.variable, value


def why_not(backend: Backend) -> str | None:
    """Why no op can be called on a backend here."""
    if not any(spec.backend == backend for spec in dispatch.SPECS):
        return "has no kernels in this version"
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
    named = [op for op in selfcheck.KINDS if backend in dispatch.backends(op)]
    ops = tuple(_op_health(op, device, backend) for op in named)
    if all(each.refusal for each in ops):
        return BackendHealth(backend, device, ops[0].refusal, ops)
    random = None
    if seconds > 0 and not any(each.error for each in ops):
        settings = selfcheck.Settings(
            tuple(named), seed=0, device=device, backend=backend, minutes=seconds / 60
        )
        random = selfcheck.run(settings)
    return BackendHealth(backend, device, None, ops, random)


def _op_health(op: str, device: str, backend: Backend) -> OpHealth:
    case = WIDE_CASES.get(op) or selfcheck.KINDS[op]()
    start = perf_counter()
    refusal = error = None
    try:
        case.run(device, backend)
    except UnsupportedError as why:
        *_, last_line = str(why).splitlines()  # the backend's own
        refusal = last_line.strip().removeprefix(f"{backend}: ")
    except AssertionError as wrong:
        error = str(wrong)
    return OpHealth(op, perf_counter() - start, refusal, error)


def report(diagnosis: Diagnosis) -> RenderableType:
    """All of it, for people."""
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
        shown += [f"[red]{each.backend}[/red] {escape(fault)}" for fault in each.faults]
    shown.append("Everything that can work here works." if diagnosis.is_well else "Not well.")
    return Group(*shown)


def _backend_table(backends: tuple[BackendHealth, ...]) -> Table:
    shown = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    shown.add_column("backend", no_wrap=True)
    shown.add_column("here")
    for each in backends:
        shown.add_row(each.backend, escape(_backend_line(each)))
    return shown


def _replay_table(stats: dict[str, replay.OpStats]) -> Table:
    shown = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    shown.add_column("launch replay", no_wrap=True)
    shown.add_column("hits", justify="right")
    shown.add_column("misses", justify="right")
    shown.add_column("refused, and why")
    for op, each in stats.items():
        reasons = "; ".join(f"{count} × {reason}" for reason, count in each.refused.most_common())
        shown.add_row(op, str(each.hits), str(each.misses), escape(reasons))
    return shown


def _backend_line(health: BackendHealth) -> str:
    if health.why_not is not None:
        return f"no: {health.why_not}"
    if health.faults:
        return "broken, see below"
    if health.num_right == 0:
        return "not seen at work: it took none of the calls"
    right = sum(each.refusal is None for each in health.ops)
    taken = sum(each.seconds for each in health.ops)
    line = f"works: {right} of {len(health.ops)} ops right in {taken:.1f} s"
    return line if health.random is None else f"{line}, then {health.random.num_right} random calls"


def _peer_table(diagnosis: Diagnosis) -> Table:
    shown = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    shown.add_column("peer of bench", no_wrap=True)
    shown.add_column("here")
    for name, reason in diagnosis.peers.items():
        line = f"no: {reason}" if reason else f"yes: {diagnosis.origins[name]}"
        shown.add_row(name, escape(line))
    return shown
