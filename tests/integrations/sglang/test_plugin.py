"""The plugin where SGLang is not installed: its entry point, what it imports, what it refuses."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import pytest

from mlakit import UnsupportedError
from mlakit.integrations.sglang import plugin, seams
from tests.integrations.sglang import fake_engine
from tests.paths import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it where the standard library has none
    import tomli as tomllib

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]


def test_the_entry_point_is_the_function_that_registers():
    (point,) = PROJECT["entry-points"]["sglang.srt.plugins"].values()
    module, _, name = point.partition(":")
    assert getattr(importlib.import_module(module), name) is plugin.register


def test_the_extra_is_the_range_of_the_releases():
    assert PROJECT["optional-dependencies"]["sglang"] == ["sglang>=0.5.17,<0.5.24"]
    assert (seams.RELEASES.first, seams.RELEASES.last) == ("0.5.17", "0.5.23")


def test_importing_the_plugin_is_cheap():
    code = (
        "import sys, mlakit.integrations.sglang.plugin\n"
        "print([m for m in ('torch', 'triton', 'sglang', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_without_sglang_the_plugin_warns(monkeypatch):
    fake_engine.version_is(monkeypatch, None)
    message = r"SGLang must be installed: pip install 'mlakit\[sglang\]'"
    with pytest.raises(UnsupportedError, match=message):
        _ = seams.AttentionBackend
    monkeypatch.setitem(vars(seams), "register_attention_backend", pytest.fail)
    with pytest.warns(UserWarning, match=message):
        plugin.register()  # an error would stop an SGLang that does not use it


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23+cu130"])
def test_builds_of_the_release_are_taken(version, monkeypatch):
    fake_engine.version_is(monkeypatch, version)
    assert seams.why_not() is None


def test_a_name_that_is_no_seam():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = seams.nothing


def test_the_name_is_registered_once(monkeypatch):
    names = fake_engine.install(monkeypatch)
    plugin.register()
    plugin.register()
    assert names["ATTENTION_BACKEND_CHOICES"] == ["triton", "fa3", "mlakit"]
    assert names["CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS"] == ["fa3", "mlakit"]
    assert names["ATTENTION_BACKENDS"]["mlakit"] is plugin.create_backend
