"""The plugins of engines in a process of their own, as an engine loads them."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from typing import Any

import pytest

from mlakit.integrations.sglang import seams as sglang_seams
from mlakit.integrations.vllm import seams as vllm_seams
from tests.paths import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it where the standard library has none
    import tomli as tomllib

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
POINTS = PROJECT["entry-points"]
ENGINES = {"vllm.general_plugins": "vllm", "sglang.srt.plugins": "sglang"}
LOAD = """
import importlib, sys, warnings
module, name = {point!r}.split(":")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    register = getattr(importlib.import_module(module), name)
    register()
    register()
print(sorted(m for m in ("torch", "triton", "transformers", {engine!r}) if m in sys.modules))
print(*(str(each.message) for each in caught if "mlakit" in str(each.message)), sep="\\n")
"""


def is_installed(engine: str) -> bool:
    try:
        importlib.metadata.version(engine)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def test_every_plugin_is_known():
    assert POINTS.keys() == ENGINES.keys()


@pytest.mark.parametrize(
    ("seams", "extra", "first", "last"),
    [
        (vllm_seams, "vllm>=0.26,<0.34", "0.26.0", "0.33.0"),
        (sglang_seams, "sglang>=0.5.17,<0.5.24", "0.5.17", "0.5.23"),
    ],
)
def test_an_extra_is_the_range_of_the_releases(seams, extra, first, last):
    assert [extra] == PROJECT["optional-dependencies"][extra.partition(">")[0]]
    assert (seams.RELEASES.first, seams.RELEASES.last) == (first, last)


@pytest.mark.parametrize("group", ENGINES)
def test_a_plugin_loads_without_its_engine(group):
    engine = ENGINES[group]
    if is_installed(engine):
        pytest.skip(f"{engine} is installed")
    (point,) = POINTS[group].values()
    done = subprocess.run(
        [sys.executable, "-c", LOAD.format(point=point, engine=engine)],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    loaded, *messages = done.stdout.splitlines()
    assert loaded == "[]"
    assert len(messages) == 2  # one per call
    for message in messages:
        assert message.startswith(f"mlakit.integrations.{engine}: ")
        assert f"must be installed: pip install 'mlakit[{engine}]' ({engine}==" in message
