"""What SGLang's wheel lacks on a machine without CUDA; for tests only.

`packages` makes a folder for PYTHONPATH with
    sgl_kernel          the compiled kernels: names that raise when they are called
    sitecustomize       torchvision without its compiled ops
    an entry point      of `record`, which notes what the processes of an engine call
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

CALLS = "MLAKIT_TEST_CALLS"  # a folder

SGL_KERNEL = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments, **named):
        raise RuntimeError(f"sgl_kernel.{name} is missing on this machine")

    return missing
"""
SITE = """
import sys, types

sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")
"""


def is_installed() -> bool:
    """Is SGLang there? If so, this process can import it."""
    if importlib.util.find_spec("sglang") is None:
        return False
    exec(SITE, {})
    return True


def packages(folder: Path) -> Path:
    """Make the folder."""
    info = folder / "mlakit_cpu_shim-0.dist-info"
    points = {"mlakit": "mlakit.integrations.sglang.plugin:register", "mlakit_cpu_shim": RECORD}
    files = {
        folder / "sgl_kernel" / "__init__.py": SGL_KERNEL,
        folder / "sitecustomize.py": SITE,
        info / "METADATA": "Metadata-Version: 2.1\nName: mlakit-cpu-shim\nVersion: 0\n",
        info / "entry_points.txt": "[sglang.srt.plugins]\n"
        + "".join(f"{name} = {point}\n" for name, point in points.items()),
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


RECORD = f"{__name__}:record"


def record() -> None:
    """Note the kinds of attention that this process calls, as names of files."""
    folder = os.environ.get(CALLS)
    if not folder:
        return
    from mlakit.integrations import steps

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            kind = name
            if name == "decode":
                kind += "" if arguments[2].q_starts is None else "-several"
            elif len(arguments[0]) != len(arguments[1]):  # more keys than queries
                kind += "-prefix"
            Path(folder, f"{kind}.{os.getpid()}").touch()
            return function(*arguments, **named)

        return call

    for name in ("decode", "prefill"):
        setattr(steps, name, recorded(name, getattr(steps, name)))
