"""Records what the figures of a run depend on: the machine, the versions, the threads."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import torch

from mlakit import __version__

CPUINFO = Path("/proc/cpuinfo")
# they determine the speed of float32, bf16 and fp16 matmuls
FEATURES = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_fp16",
    "asimd",
    "asimdhp",
    "bf16",
    "sve",
    "sme",
)


def describe() -> dict[str, object]:
    """Facts by name, in plain values; None if unknown."""
    cpuinfo = CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else ""
    return {
        "cpu": cpu_model(cpuinfo) or _field(_output("lscpu"), "Model name") or platform.machine(),
        "cpu_features": cpu_features(cpuinfo),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        **gpu(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "mlakit": __version__,
        "commit": _commit(),
    }


def gpu() -> dict[str, object]:
    """The current CUDA device; empty without one."""
    if not torch.cuda.is_available():
        return {}
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "gpu": facts.name,
        "gpu_sms": facts.multi_processor_count,
        "cuda": torch.version.cuda,
        "driver": driver.splitlines()[0].strip() if driver else None,
    }


def version_of(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_model(cpuinfo: str) -> str | None:
    """The processor's name in /proc/cpuinfo: present on x86, absent on ARM."""
    return _field(cpuinfo, "model name")


def cpu_features(cpuinfo: str) -> list[str]:
    flags = (_field(cpuinfo, "flags") or _field(cpuinfo, "Features") or "").split()
    return [name for name in FEATURES if name in flags]


def summary(facts: Mapping[str, object]) -> str:
    """A few lines of text."""
    features = facts["cpu_features"]
    assert isinstance(features, Sequence)
    load = "" if facts["load_average"] is None else f", load {facts['load_average']:.1f}"
    commit = f" at {facts['commit']}" if facts["commit"] else ""
    gpu = ""
    if "gpu" in facts:
        gpu = f"{facts['gpu']}, driver {facts['driver']}, CUDA {facts['cuda']}\n"
    return (
        f"{gpu}{facts['cpu']} ({', '.join(features) or 'features unknown'}), "
        f"{facts['threads']} of {facts['cores']} threads{load}\n"
        f"mlakit {facts['mlakit']}{commit}, torch {facts['torch']}, "
        f"Triton {facts['triton'] or 'absent'}, Python {facts['python']}"
    )


def _field(text: str, name: str) -> str | None:
    """The first value of a line `name : value`."""
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return None


def _commit() -> str | None:
    """The commit of the checkout; None for an installed package."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    commit = _output("git", "-C", str(root), "rev-parse", "--short=12", "HEAD").strip()
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--", "mlakit").strip()
    return f"{commit} with changes" if commit and changed else commit or None


def _output(*command: str) -> str:
    """What a command prints; empty if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""
