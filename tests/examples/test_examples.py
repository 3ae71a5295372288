"""Every example runs, shows what it says, and notices a wrong result."""

from __future__ import annotations

import re

import pytest
import torch

import mlakit
from mlakit.steps import decode_branch
from tests.examples.scripts import FOLDER, imported, printed

AGREES = "plain torch agrees\n"
DOCUMENTED = (
    "mla_fused_rope_rmsnorm_quantization",
    "fused_rope_rmsnorm_quantization_kernel",
    "flare_mla_decoding",
    "mla_sm100_prefill_sparse",
    "mla_prefill_branch_fp8",
)


def last_request_halved(function):
    """`function` with a result that is wrong for its last query."""

    def wrong(*args, **kwargs):
        result = function(*args, **kwargs)
        out = result[0] if isinstance(result, tuple) else result
        out[-1] = out[-1] / 2
        return result

    return wrong


def test_the_list_has_every_example():
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    scripts = {path.name for path in FOLDER.glob("*.py")}
    assert scripts >= {f"{name}.py" for name in ("raw_op", "serving_loop", "sparse_decode")}
    for script in scripts:
        assert f"| [{script}]({script}) |" in listed
        source = (FOLDER / script).read_text(encoding="utf-8")
        assert source.startswith('"""')
        assert f"examples/{script}" in source.split('"""')[1]  # how it is run


@pytest.mark.slow
def test_raw_op(capsys):
    out = printed("raw_op", capsys)
    assert re.findall(r"^(\w+) +(\d+) ", out, flags=re.MULTILINE) == [
        ("bf16", "1152"),
        ("fp8_block128", "656"),
        ("fp8_token", "644"),
    ]
    assert out.endswith(AGREES)


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["last request", "no result", "lse"])
def test_raw_op_notices_a_wrong_result(broken, monkeypatch, capsys):
    right = mlakit.mla_decode

    def wrong(*args, **kwargs):
        out, lse = right(*args, **kwargs)
        if broken == "last request":
            out[-1] = out[0]
        return (torch.empty_like(out) if broken == "no result" else out), (
            lse + 1 if broken == "lse" else lse
        )

    monkeypatch.setattr(mlakit, "mla_decode", wrong)
    assert imported("raw_op").main([]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


@pytest.mark.slow
def test_documented_function(capsys):
    out = printed("documented_function", capsys)
    assert [line.split()[0] for line in out.splitlines()[1:-1]] == [*DOCUMENTED]
    assert out.endswith(AGREES)


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_function_notices_one_that_does_nothing(name, monkeypatch, capsys):
    example = imported("documented_function")
    monkeypatch.setattr(example, name, lambda *args, **kwargs: args[0])
    assert example.main([]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


@pytest.mark.slow
def test_serving_loop(capsys):
    out = printed("serving_loop", capsys, "--check")
    steps = [line for line in out.splitlines() if re.match(r" *\d+ +\d+ +\d+ ", line)]
    mixed = [line.split()[1:3] for line in steps]
    assert any(int(prefill) > 1 and int(decode) for prefill, decode in mixed)
    for event in ("preempted", "starts again", "tokens shared", "done"):
        assert any(event in line for line in steps), event
    (copied,) = re.findall(r"pages copied (\d+)", out)
    assert int(copied) > 0
    assert out.endswith("the same tokens alone\n")


def test_serving_loop_prefills_in_chunks():
    example = imported("serving_loop")
    requests = example.random_requests(9, torch.Generator().manual_seed(0))
    assert max(each.prompt_length for each in requests) > 32  # the default of --budget


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["copy on write", "shared prefix", "attention"])
def test_serving_loop_notices_wrong_tokens(broken, monkeypatch, capsys):
    example = imported("serving_loop")
    if broken == "copy on write":
        monkeypatch.setattr(mlakit.PagedLatentCache, "copy_pages", lambda *args: None)
    elif broken == "shared prefix":  # one token of it is another's
        monkeypatch.setattr(example, "common_prefix", lambda a, b: min(len(a), len(b)))
    else:
        wrong = last_request_halved(decode_branch)
        monkeypatch.setattr("mlakit.steps.step.decode_branch", wrong)
    assert example.main(["--check", "--requests", "5"]) == 1
    assert "DIFFERENT tokens alone: r" in capsys.readouterr().out


@pytest.mark.slow
def test_sparse_decode(capsys):
    out = printed("sparse_decode", capsys)
    rows = [line.split() for line in out.splitlines()[1:5]]
    assert [row[0] for row in rows] == ["8", "24", "64", "700"]
    shares = [float(row[3]) for row in rows]
    assert shares == sorted(shares)
    assert shares[0] < 0.5 < 0.9 < shares[1]
    assert shares[-1] == 1
    assert "sparse_step, k = 64: same rows True" in out
    assert out.endswith(AGREES)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["indexer_select", "sparse_mla", "sparse_step"])
def test_sparse_decode_notices_a_wrong_result(name, monkeypatch, capsys):
    right = getattr(mlakit, name)
    wrong = last_request_halved(right)
    if name == "indexer_select":  # the next page's rows

        def wrong(*args, **kwargs):
            return right(*args, **kwargs).roll(1, 0)

    monkeypatch.setattr(mlakit, name, wrong)
    assert imported("sparse_decode").main([]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


@pytest.mark.slow
def test_cuda_graph(device, capsys):
    out = printed("cuda_graph", capsys, "--device", str(device), "--steps", "30")
    kind = "CUDA graphs" if device.type == "cuda" else "no graphs"
    assert out.startswith("30 steps of up to 8 requests; batch sizes 1, 2, 4, 8; " + kind)


@pytest.mark.slow
def test_cuda_graph_notices_inputs_that_are_not_copied(device):
    example = imported("cuda_graph")
    fill = example.Step.fill

    def forget(self, other):
        x = self.x.clone()
        fill(self, other)
        self.x.copy_(x)

    example.Step.fill = forget
    assert example.main(["--device", str(device)]) == 1
