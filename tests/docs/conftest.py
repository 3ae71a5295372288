"""What the examples of the pages find in their folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.models import build
from tests.layer.checkpoints import INDEX, SMALL, quantised, tensors, write_checkpoint


@pytest.fixture(scope="session")
def _checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small checkpoints under the names that examples use."""
    folder = tmp_path_factory.mktemp("checkpoints")
    write_checkpoint(folder / "DeepSeek-V3", SMALL, {0: quantised(tensors(SMALL))})
    sparse = SMALL | INDEX
    write_checkpoint(folder / "DeepSeek-V3.2", sparse, {0: quantised(tensors(sparse))})
    build("DeepseekV2-no_q_latent").save_pretrained(folder / "DeepSeek-V2-Lite")
    return folder


@pytest.fixture
def checkpoint(_checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example runs where the checkpoints are."""
    monkeypatch.chdir(_checkpoints)
