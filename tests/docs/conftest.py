"""What the examples of the pages find in their folder: what `mlakit tiny` writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlakit.tools import tiny

CHECKPOINTS = ("DeepSeek-V3", "DeepSeek-V3.2", "DeepSeek-V2-Lite")


@pytest.fixture(scope="session")
def _checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small checkpoints under the names that examples use."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in CHECKPOINTS:
        tiny.write(name, folder / name)
    return folder


@pytest.fixture
def checkpoint(_checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example runs where the checkpoints are."""
    monkeypatch.chdir(_checkpoints)
