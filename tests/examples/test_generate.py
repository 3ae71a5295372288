"""`examples/generate.py` runs on the CPU, and notices wrong tokens."""

from __future__ import annotations

import pytest

from mlakit.integrations.transformers import attention
from tests.examples.scripts import printed


def test_generate(capsys):
    lines = printed("generate", capsys, "--tokens", "9").splitlines()
    assert [len(line.split()) for line in lines[:2]] == [9, 9]
    assert lines[2] == "cached tokens without padding: 14 10"
    assert lines[3] == "bytes per token and layer: 320"
    assert lines[4] == "eager attention agrees"


@pytest.mark.slow
def test_a_checkpoint(tmp_path, capsys):
    from tests.integrations.models import build

    build("DeepseekV32").save_pretrained(tmp_path)
    assert "eager attention agrees" in printed("generate", capsys, str(tmp_path))


@pytest.mark.slow
def test_wrong_tokens_are_noticed(capsys, monkeypatch):
    right = attention.attention

    def wrong(*args, **kwargs):
        out, weights = right(*args, **kwargs)
        return out.roll(1, -1), weights

    monkeypatch.setattr(attention, "attention", wrong)
    from tests.examples.scripts import imported

    module = imported("generate")
    monkeypatch.setattr("sys.argv", ["generate.py"])
    assert module.main() == 1
    assert "eager attention differs" in capsys.readouterr().out
