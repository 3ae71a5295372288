"""The scripts in `examples/`: run as a user runs them, or imported to change something in them."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from types import ModuleType

import pytest

from tests.paths import ROOT

FOLDER = ROOT / "examples"


def printed(name: str, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What `python examples/NAME.py OPTIONS` prints; its exit status must be 0."""
    path = str(FOLDER / f"{name}.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [path, *options])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(path, run_name="__main__")
    out = capsys.readouterr().out
    assert end.value.code == 0, out
    return out


def imported(name: str) -> ModuleType:
    """The script as a new module, whose names a test may change."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
