"""`warmup` compiles what serving launches, and says in one line where a cache cannot be made."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import mlakit
from mlakit.precompile import WarmupError, run
from mlakit.tools.cli import app
from tests.paths import ROOT

# model, heads, format, user, architecture, SMs (not those of a usual card), longest request, seeds
SERVED = (
    ("deepseek-v3", 16, "fp8_block128", "vllm", 90, 114, 5000, 4),
    ("deepseek-v3.2", 64, "fp8_block128", "sglang", 90, 78, 70_001, 4),
)
MORE_SERVED = (
    ("deepseek-v3", 128, "bf16", "sglang", 90, 132, 163_840, 20),
    ("deepseek-v3", 128, "fp8", "vllm", 90, 78, 8192, 20),
    ("deepseek-v3", 10, "bf16", "vllm", 90, 132, 5000, 20),
    ("deepseek-v3", 16, "bf16", "vllm", 90, 132, 20_000, 20, "batch-invariant"),
    ("deepseek-v3", 16, "fp8_block128", "steps", 90, 132, 5000, 5, "fp8-weights"),
    ("deepseek-v3.2", 64, "bf16", "steps", 90, 114, 5000, 3),
    ("deepseek-v3.2", 16, "fp8_block128", "vllm", 90, 114, 163_840, 30),
    ("deepseek-v3.2", 128, "bf16", "vllm", 90, 132, 40_000, 20),
    ("glm-5.3-flash", 16, "fp8_block128", "steps", 90, 132, 5000, 4),
    ("glm-5", 8, "fp8_block128", "sglang", 90, 132, 202_752, 20),
    ("deepseek-v3", 16, "fp8_block128", "vllm", 80, 108, 20_000, 12),
    ("deepseek-v3.2", 16, "fp8_block128", "vllm", 89, 142, 40_000, 12),
)


def program(*arguments: object, **environment: str) -> str:
    """The output of a program that compiles kernels; that of the tests interprets them."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_served(cache: Path, *case: object) -> None:
    keys = json.loads(program("-m", "tests.precompile.serving", *case, TRITON_CACHE_DIR=str(cache)))
    served, compiled = keys["served"], keys["compiled"]
    assert len(served) > 5
    assert {name for key, name in served.items() if key not in compiled} == set()


@pytest.mark.slow
@pytest.mark.parametrize("case", SERVED)
def test_serving_launches_no_kernel_that_a_warm_up_did_not_compile(case, tmp_path):
    check_served(tmp_path, *case)


@pytest.mark.thorough
@pytest.mark.parametrize("case", MORE_SERVED)
def test_serving_other_models_and_cards_launches_no_other_kernel(case, tmp_path):
    check_served(tmp_path, *case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        ("deepseek-v3", 16, "fp8_block128", "vllm"),
        ("deepseek-v3.2", 16, "fp8_block128", "vllm"),
        ("deepseek-v3", 16, "bf16", "sglang"),
    ],
)
def test_no_kernel_is_compiled_or_loaded_while_serving_on_a_gpu(case, tmp_path):
    printed = program("-m", "tests.precompile.on_gpu", *case, TRITON_CACHE_DIR=str(tmp_path))
    stats = json.loads(printed)
    assert stats["kernels"] > 0
    assert (stats["compiled"], stats["loaded"]) == ({}, {})


COMPILE = """
import json, sys
import mlakit
from mlakit.precompile import listing, run
from mlakit.precompile.deployment import deployment

d = deployment(
    "deepseek-v3", heads=16, format="fp8_block128", page_size=64, page_rows=None, dtype="bf16",
    user="steps", max_context=4096, max_tokens=4,
)
target = run.target_of("sm_90", None)
entries = run.entries_of_deployment(d, target)
tasks, known = run.missing(entries), len(entries)
calls = list(listing.calls_of(d))
small = [task for task in tasks if calls[task.call].name.startswith("merge")][:2]
run.compile_all(d, target, small, 2, lambda: None)
left = run.missing(run.entries_of_deployment(d, target))
merge = next(call for call in calls if call.name.startswith("merge"))
for _ in range(2):
    listing.load_kernels([merge], target, 7)
stats = mlakit.stats()
json.dump(
    {
        "known": known,
        "missing": len(tasks),
        "left": len(left),
        "compiled": sum(stats.compiled.values()),
        "loaded": sum(stats.loaded.values()),
    },
    sys.stdout,
)
"""


@pytest.mark.slow
def test_a_second_process_finds_what_the_first_compiled(tmp_path):
    first, second = (
        json.loads(program("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path))) for _ in range(2)
    )
    known = first["known"]
    # the processes of the warm-up compile; this one only loads
    assert first == {
        "known": known,
        "missing": known,
        "left": known - 2,
        "compiled": 0,
        "loaded": 1,
    }
    assert (second["known"], second["missing"], second["compiled"]) == (known, known - 2, 0)


@pytest.mark.parametrize(("name", "arch"), [("H200", 90), ("a100", 80), ("sm_90a", 90), (9.0, 90)])
def test_a_card_is_an_architecture(name, arch):
    assert run.target_of(name, None).arch == arch


KEYS = """
import importlib, json, pkgutil, sys
import mlakit.kernels
from triton.language import constexpr
from triton.runtime.jit import JITFunction
from mlakit.kernels.blackwell.support import why_not_triton

found = {}
for module in pkgutil.walk_packages(mlakit.kernels.__path__, "mlakit.kernels."):
    if why_not_triton() and module.name.startswith("mlakit.kernels.blackwell."):
        continue  # this Triton lacks what the kernels call
    for name, each in vars(importlib.import_module(module.name)).items():
        if isinstance(each, JITFunction) and each.__module__.startswith("mlakit."):
            found[f"{each.__module__}.{name}"] = each
keys = []
for names in (sorted(found), sorted(found, reverse=True)):
    for each in found.values():
        each.hash, each.used_global_vals = None, {}
    keys.append({name: found[name].cache_key for name in names})
values = {
    name: {
        (constant, repr(value))
        for (constant, _), (value, _) in each.used_global_vals.items()
        if isinstance(value, constexpr)
    }
    for name, each in found.items()
}
ambiguous = [name for name, each in values.items() if len(dict(each)) < len(each)]
changed = [name for name in found if keys[0][name] != keys[1][name]]
json.dump({"functions": len(found), "changed": changed, "ambiguous": ambiguous}, sys.stdout)
"""


@pytest.mark.slow
def test_keys_of_kernels_do_not_depend_on_which_was_first():
    """Triton 3.6 would also order constants of one name by the addresses of their modules."""
    keys = json.loads(program("-c", KEYS))
    assert keys["functions"] > 400
    assert (keys["changed"], keys["ambiguous"]) == ([], [])


def call(**changes: Any) -> Any:
    return mlakit.warmup(**{"model": "deepseek-v3", "arch": "sm_90", **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "deepseek-v9"}, "'deepseek-v9' is not a config.json"),
        ({"format": "fp9"}, "format must be bf16, .* got 'fp9'"),
        ({"dtype": "fp8"}, "dtype must be bf16, fp16 or fp32, got 'fp8'"),
        ({"user": "trt"}, "user must be vllm, sglang, steps or all, got 'trt'"),
        (
            {"model": "glm-5.3-flash", "user": "vllm"},
            "user must be steps or all for",
        ),
        (
            {"model": "glm-5.3-flash", "page_size": 6},
            "page_size must be a multiple of the 4",
        ),
        ({"heads": 0}, "heads must be at least 1, got 0"),
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"page_rows": 8}, "page_rows must be at least 64, got 8"),
        ({"arch": "sm_75"}, "arch must be one of sm_80, .* got 'sm_75'"),
        ({"arch": "MI300X"}, "arch must be one of sm_80, .* got 'MI300X'"),
    ],
)
def test_a_wrong_argument_is_named(changes, message, monkeypatch):
    # for `run` alone: a module that this test is the first to import would never be interpreted
    monkeypatch.setattr(run, "knobs", SimpleNamespace(interpreted=lambda: False))
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_interpreted_kernels_are_not_compiled(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(WarmupError, match="TRITON_INTERPRET is set"):
        call()


def failing_command(cache: Path, *options: str, **environment: str) -> str:
    """The one line that `mlakit warmup` prints where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "mlakit", "warmup", "deepseek-v3", "--arch", "sm_90", *options],
        env={
            **os.environ,
            "TRITON_INTERPRET": "0",
            "PYTHONPATH": str(ROOT),
            "TRITON_CACHE_DIR": str(cache),
            **environment,
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["file/cache", "/dev/full/cache"])
def test_a_cache_that_cannot_be_written_is_an_error_of_one_line(folder, tmp_path):
    (tmp_path / "file").touch()
    error = failing_command(tmp_path / folder)
    assert error.startswith("Error: Triton's cache cannot be used: ")


@pytest.mark.slow
def test_a_disk_that_fills_while_kernels_are_compiled_is_an_error_of_one_line(tmp_path):
    error = failing_command(
        tmp_path, "--jobs", "2", TRITON_CACHE_MANAGER="tests.precompile.full_disk:FullDisk"
    )
    assert error == (
        f"Error: a kernel cannot be compiled into {tmp_path}: "
        "OSError: [Errno 28] No space left on device\n"
    )
    # kernels were being compiled, and none of them counts as done
    assert list(tmp_path.glob("*/*.ptx"))
    assert not list(tmp_path.glob("*/__grp__*"))


@pytest.mark.parametrize("begin", [run.check_writable, run.alone])
def test_a_disk_that_is_full_before_is_an_error_that_names_the_cache(begin, tmp_path, monkeypatch):
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run.tempfile, "TemporaryFile", full)
    monkeypatch.setattr(run, "open", full, raising=False)
    with (
        pytest.raises(WarmupError, match=f"{tmp_path} cannot be written: No space left on device"),
        begin(str(tmp_path)) or nullcontext(),
    ):
        pass


@pytest.mark.slow
def test_the_command_says_what_is_wrong_with_its_line():
    done = CliRunner().invoke(app, ["warmup", "deepseek-v3", "--format", "fp9", "--arch", "sm_90"])
    assert done.exit_code == 2
    assert "format" in done.output
    assert "fp9" in done.output
