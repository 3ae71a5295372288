"""The plugin where SGLang is not installed: what it registers and what it refuses."""

from __future__ import annotations

import pytest

from mlakit import UnsupportedError
from mlakit.integrations.sglang import plugin, seams
from tests.integrations.sglang import fake_engine


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
