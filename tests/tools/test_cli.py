"""The command line: what it prints, what it calls, how it ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import mlakit
from mlakit.dispatch import names, selection
from mlakit.model.geometry import MLAGeometry
from mlakit.tools import cli


def test_version():
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"mlakit {mlakit.__version__}\n")


@pytest.mark.slow
@pytest.mark.parametrize(("passed", "exit_code"), [(True, 0), (False, 1)])
def test_demo_runs_the_demo(monkeypatch, passed, exit_code):
    calls = []
    stand_in = types.ModuleType("mlakit.tools.demo")
    stand_in.make_settings = lambda geometry, **options: options
    stand_in.run = lambda *args: calls.append(args) or passed
    monkeypatch.setitem(sys.modules, "mlakit.tools.demo", stand_in)
    arguments = ["--model", "kimi-k2", "--prompt", "9", "--device", "cpu"]
    result = CliRunner().invoke(cli.app, ["demo", *arguments])
    assert result.exit_code == exit_code, result.output
    options = {"prompt": 9, "tokens": 8, "format": "fp8_block128", "device": "cpu", "seed": 0}
    assert calls == [("kimi-k2", MLAGeometry.preset("kimi-k2"), options)]


NAMES = list(get_command(cli.app).commands)


def test_an_unknown_command_is_a_usage_error():
    assert CliRunner().invoke(cli.app, ["dmeo"]).exit_code == 2


@pytest.mark.slow
def test_python_dash_m_is_the_command():
    command = [sys.executable, "-m", "mlakit", "--version"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output == f"mlakit {mlakit.__version__}\n"


# what the console script does
SCRIPT = "import sys; sys.argv = ['mlakit', {}]; from mlakit.tools.cli import main; main()"
QUICK_CALLS = {
    "--version": ([sys.executable, "-c", SCRIPT.format("'--version'")], {}),
    "-m": ([sys.executable, "-m", "mlakit", "--version"], {}),
    "--help": ([sys.executable, "-m", "mlakit", "bench", "--help"], {}),
    **{
        f"complete {words}": (
            [sys.executable, "-c", SCRIPT.format("")],
            {
                "_MLAKIT_COMPLETE": "complete_bash",
                "COMP_WORDS": words,
                "COMP_CWORD": str(len(words.split()) - 1),
            },
        )
        for words in (
            *("mlakit do", "mlakit bench sp", "mlakit check --op mla_p", "mlakit explain s"),
            *("mlakit memory deep", "mlakit plan deep"),
        )
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK_CALLS)
def test_what_needs_no_torch_does_not_import_it(name):
    command, variables = QUICK_CALLS[name]
    command = [command[0], "-X", "importtime", *command[1:]]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip()
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "mlakit.tools.cli" in imported
    assert imported & {"torch", "numpy", "triton", "mlakit._public"} == set()


def test_completed_ops_are_those_there_are():
    assert names.OPS == selection.OPS


COMMANDS = {
    "demo": ["demo"],
    "generate": ["generate", "DeepSeek-V2-Lite", "--prompt", "a"],
    "accuracy": ["accuracy", "DeepSeek-V2-Lite"],
    "tiny": ["tiny", "deepseek-v3", "/dev/null"],
    "bench": ["bench", "cpu", "--quick"],
    "explain": ["explain", "mla_decode"],
    "support": ["support"],
    "memory": ["memory", "deepseek-v3"],
    "plan": ["plan", "deepseek-v3", "--context", "4k"],
    "doctor": ["doctor", "--seconds", "0"],
    "warmup": ["warmup", "deepseek-v3", "--arch", "sm_90"],
    "check": ["check", "--count", "1"],
    "emulate": ["emulate", "--list"],
}


def refusal(*arguments: str) -> str:
    """What a command says that refuses its arguments, without the box around it."""
    result = CliRunner(env={"COLUMNS": "300"}).invoke(cli.app, list(arguments))
    assert result.exit_code == 2, result.output
    return re.sub(r"[│\s]+", " ", result.output)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_environment_variable_is_named_by_every_command(name, monkeypatch):
    monkeypatch.setenv("MLAKIT_BACKEND", "foo")
    said = "MLAKIT_BACKEND must be one of auto, blackwell, hopper, triton, cpu, got 'foo'"
    assert said in refusal(*COMMANDS[name])
    assert CliRunner().invoke(cli.app, [name, "--help"]).exit_code == 0
    monkeypatch.setenv("MLAKIT_BACKEND", "cpu")
    monkeypatch.setenv("MLAKIT_WORKSPACE_MIB", "0")
    assert "MLAKIT_WORKSPACE_MIB must be a whole number" in refusal(*COMMANDS[name])


def test_a_wrong_backend_variable_is_named_by_a_call(monkeypatch):
    import torch

    monkeypatch.setenv("MLAKIT_BACKEND", "foo")
    with pytest.raises(ValueError, match=r"MLAKIT_BACKEND must be one of auto, .*, got 'foo'"):
        mlakit.quantize_fp8(torch.ones(4, 128), 128)


# arguments with an option that would do nothing, and what is said of it
OPTIONS_WITHOUT_EFFECT = [
    ("support --only merge", "--only needs --compile"),
    ("support --only merge --json", "--only needs --compile"),
    ("support --all", "--all needs --compile"),
    ("support --jobs 2", "--jobs needs --compile"),
    ("support --sample hopper", "--sample needs --compile"),
    ("support --dump folder", "--dump needs --compile"),
    ("support --compile --all --sample hopper", "--sample cannot be combined with --all"),
    ("support --compile --markdown", "--markdown cannot be combined with --compile or --json"),
    ("explain merge_states --format fp8", "--format has no effect on merge_states"),
    ("explain merge_states --page-size 64", "--page-size has no effect on merge_states"),
    ("explain mla_prefill --page-size 64", "--page-size has no effect on mla_prefill"),
    ("explain quantize_fp8 --heads 128", "--heads has no effect on quantize_fp8"),
    ("explain quantize_fp8 --model kimi-k3", "--model has no effect on quantize_fp8"),
    ("explain indexer_topk --model deepseek-v3.2", "--model has no effect on indexer_topk"),
    ("memory deepseek-v3 --weights 80", "--weights needs --gpu-memory"),
    ("emulate hopper-indexer-h32-q1 --steps 9", "--steps needs --trace"),
    ("emulate hopper-indexer-h32-q1 --list", "NAME has no effect with --list"),
    ("check --first 0", "--first needs --launches"),
    ("check --calls 3", "calls needs launches"),
    ("check --kernel m64_bf16", "kernel needs launches"),
    ("check --launches 2 --count 2", "count has no effect"),
    ("check --launches 2 --any-widths", "any_widths has no effect"),
    ("bench cpu --mode cold", "--mode has no effect on suite cpu"),
    ("bench cpu --host", "--host has no effect on suite cpu"),
    ("bench cpu --no-peers", "--no-peers has no effect on suite cpu"),
    ("bench cpu --peers", "--peers has no effect on suite cpu"),
    ("bench cpu --heads 2", "--heads needs --shape"),
    ("bench cpu --unpinned", "--unpinned needs --fetch-peers"),
    ("bench cpu --platform x86_64", "--platform needs --fetch-peers"),
    ("bench decode --host --mode cold", "so --mode has no effect"),
    *(
        (f"bench --fetch-peers {option}", f"so {option.split()[0]} has no effect")
        for option in (
            *("--shape 1q1s1", "--heads 2", "--quick", "--host", "--no-peers", "--only decode"),
            *("--json x.json", "--csv x.csv", "--from x.json", "--threads 2", "--mode cold"),
        )
    ),
    *(
        (f"bench --from x.json {option}", f"so {option.split()[0]} has no effect")
        for option in (
            *("--shape 1q1s1", "--heads 2", "--format bf16", "--page-size 64", "--topk 2"),
            *("--causal", "--no-causal", "--peers", "--only decode", "--quick", "--host"),
        )
    ),
]


@pytest.mark.parametrize(("arguments", "said"), OPTIONS_WITHOUT_EFFECT, ids=lambda value: value)
def test_an_option_that_would_do_nothing_is_refused(arguments, said):
    assert said in refusal(*arguments.split())
