"""What runs where: the tables, the explanations, and kernels compiled without a GPU."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from fnmatch import filter as matching
from pathlib import Path
from time import monotonic, sleep

import pytest
from typer.testing import CliRunner

from mlakit.dispatch import knobs, selection
from mlakit.dispatch.architectures import arch_name
from mlakit.formats import FORMATS, GROUP_FORMATS
from mlakit.kernels.blackwell.support import why_not_triton
from mlakit.tools import cli, support
from mlakit.tools.compile import compilation, configurations
from mlakit.tools.compile.compilation import Compiled
from mlakit.tools.compile.configurations import COMPILED_SPLIT
from mlakit.tools.compile.spills import SPILL_BOUNDS, spill_bound

MERGE = Compiled("merge-2", 90, "_kernel", 32, shared_bytes=512, shared_limit=1024)


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, list(arguments))
    return result.exit_code, result.output


def compile_checks(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`mlakit support --compile` in a process of its own: in this one kernels are interpreted."""
    return subprocess.run(
        [sys.executable, "-m", "mlakit", "support", "--compile", *arguments],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )


# where `auto` has something better than the portable kernels
HOPPER_KERNELS = {(op, 90) for op in ("mla_decode", "mla_prefill", "sparse_mla", "indexer_logits")}


@pytest.mark.parametrize("op", selection.OPS)
@pytest.mark.parametrize("arch", support.CARDS, ids=arch_name)
def test_explain_says_which_backend_takes_an_op_on_every_architecture(op, arch):
    code, output = invoke("explain", op, "--arch", arch_name(arch), "--json")
    said = json.loads(output)
    assert code == 0
    assert said["chosen"] == ("hopper" if (op, arch) in HOPPER_KERNELS else "triton")
    assert said["why_not"]["triton"] is None
    assert said["why_not"]["cpu"] == "needs CPU tensors, got cuda"
    assert set(said["why_not"]) == set(selection.BACKENDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "kernel", "others"),
    [
        ((), "m64_bf16", {"small_m_bf16": "m64_bf16 is faster"}),
        (("--heads", "16"), "small_m_bf16", {"m64_bf16": "is for more than 32 heads, got 16"}),
        (
            ("--format", "fp8_token"),
            "m64_fp8_kv",
            {"m64_fp8_qk": "needs queries of torch.float8_e4m3fn, got torch.bfloat16"},
        ),
        (("--format", "fp8", "--dtype", "e4m3"), "m64_fp8_qk", {}),
        (("--format", "fp8_block128"), "m64_fp8_kv", {}),
        (("--format", "fp8_block128", "--dtype", "e4m3"), "m64_fp8_kv", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_explain_names_the_kernel_of_a_backend_that_has_several(options, kernel, others):
    code, output = invoke("explain", "mla_decode", "--arch", "90", *options, "--json")
    said = json.loads(output)
    assert (code, said["chosen"], said["kernel"]) == (0, "hopper", kernel)
    assert [name for name, why in said["kernels"].items() if why is None] == [f"hopper:{kernel}"]
    for other, reason in others.items():
        assert said["kernels"][f"hopper:{other}"] == reason
    code, output = invoke("explain", "mla_decode", "--arch", "90", *options)
    assert re.search(rf"hopper:{kernel} +selected kernel", output)


@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        (("--model", "mistral-small-4"), "small_m_bf16"),
        (("--format", "mxfp4_block32", "--heads", "16"), "small_m_fp4_kv"),
    ],
)
def test_explain_shows_the_kernel_that_waits_for_a_check(options, kernel):
    code, output = invoke("explain", "mla_decode", "--arch", "90", *options, "--json")
    said = json.loads(output)
    assert (code, said["chosen"]) == (0, "triton")
    assert said["why_not"]["hopper"] == said["kernels"][f"hopper:{kernel}"]
    assert "mlakit check --backend hopper enables it" in said["why_not"]["hopper"]
    code, output = invoke("explain", "mla_decode", "--arch", "90", *options)
    assert re.search(rf"hopper:{kernel} +has not been checked on this machine", output)
    assert re.search(r"hopper:m64_bf16 +needs rows of", output)


def test_explain_shows_no_check_for_a_kernel_that_would_be_slower():
    options = ("--format", "mxfp4_block32", "--heads", "128", "--json")
    said = json.loads(invoke("explain", "mla_decode", "--arch", "90", *options)[1])
    assert said["why_not"]["hopper"].startswith("needs rows of bf16 or fp16")


@pytest.mark.parametrize("op", support.INDEX_OPS)
@pytest.mark.parametrize(
    ("model", "mask", "chosen"),
    [
        ("glm-5", "causal", "hopper"),
        ("glm-5.3-flash", "compressed_causal", "triton"),
        ("deepseek-v4-flash", "compressed_causal", "triton"),
    ],
)
def test_explain_asks_with_the_mask_of_a_models_index_keys(op, model, mask, chosen):
    said = json.loads(invoke("explain", op, "--arch", "90", "--model", model, "--json")[1])
    assert said["problem"].endswith(f"mask={mask}")
    if op == "indexer_logits":
        assert said["chosen"] == chosen


def test_explain_names_no_kernel_where_a_backend_has_one():
    code, output = invoke("explain", "merge_states", "--arch", "90", "--json")
    said = json.loads(output)
    assert (code, said["chosen"], said["kernel"], said["kernels"]) == (0, "triton", None, {})


def test_explain_asks_the_indexer_for_index_keys():
    code, output = invoke("explain", "indexer_logits", "--arch", "90", "--json")
    assert code == 0
    assert json.loads(output)["chosen"] == "hopper"
    code, output = invoke("explain", "indexer_logits", "--arch", "90", "--dtype", "bf16", "--json")
    assert json.loads(output)["chosen"] == "triton"


@pytest.mark.slow
def test_explain_gives_a_reason_for_every_refusal():
    code, output = invoke("explain", "mla_decode", "--arch", "75")
    assert code == 1
    assert "needs sm_80 or newer, got sm_75" in output
    assert "needs CPU tensors, got cuda" in output


@pytest.mark.slow
def test_explain_shows_the_problem_and_the_choice():
    code, output = invoke("explain", "mla_decode", "--heads", "7", "--format", "fp8")
    assert code == 0
    assert "heads=7" in output
    assert re.search(r"cpu +supported, selected by auto", output)


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        (
            "--dtype",
            "fp16",
            "needs queries of torch.bfloat16 with rows of bf16, got torch.float16",
        ),
        (
            "--format",
            "fp32",
            "needs rows of bf16 or fp16 or fp8 or fp8_token or fp8_block128, got fp32",
        ),
    ],
)
def test_explain_asks_what_a_call_would_ask(option, value, reason):
    code, output = invoke("explain", "mla_decode", "--arch", "90", option, value, "--json")
    said = json.loads(output)
    assert (code, said["chosen"]) == (0, "triton")
    assert said["why_not"]["hopper"] == reason


def test_explain_tells_kernels_the_size_of_pages(monkeypatch):
    asked = []
    monkeypatch.setattr(support, "explain", lambda op, problem: asked.append(problem) or {})
    invoke("explain", "mla_decode", "--page-size", "24")
    assert [problem.page_size for problem in asked] == [24]


@pytest.mark.parametrize("option", ["--dtype", "--format"])
def test_explain_refuses_what_no_call_can_have(option):
    code, output = invoke("explain", "mla_decode", option, "bf17")
    assert code == 2
    assert re.search(rf"{option.strip('-')} must be one of bf16, .*got", " ".join(output.split()))


@pytest.mark.parametrize(
    ("written", "arch"),
    [
        *((text, 90) for text in ("90", "9.0", "sm_90", "sm90", "90a", "sm_90a", "SM_90a")),
        *((text, 100) for text in ("100", "10.0", "sm_100f")),
        ("8.6", 86),
        *(("H200", 90), ("h100", 90), ("rtx 40", 89)),
        ("cpu", 0),
        ("0", 0),
    ],
)
def test_an_architecture_is_written_in_many_ways(written, arch):
    code, output = invoke("explain", "mla_decode", "--arch", written, "--json")
    assert code == 0
    problem = json.loads(output)["problem"]
    assert problem.startswith(f"cuda sm_{arch}," if arch else "cpu,")


@pytest.mark.parametrize(
    "written", ["", "9", "hopper", "900", "95", "9.00", "-90", "sm_", "80a", "90f", "90b", "h20"]
)
def test_what_is_no_architecture_is_refused(written):
    code, output = invoke("explain", "mla_decode", f"--arch={written}")
    assert code == 2
    said = " ".join(re.sub(r"[│\s]+", " ", output).split())
    rule = (
        "--arch must be cpu, a card (A100, RTX 30, A40, L40S, RTX 40, H100, H200, B200, RTX 50, "
        "MI300X, MI350X, RX 7900), a compute capability written as 90, 9.0, sm_90 or sm_90a, or "
        "one of AMD's architectures such as gfx942"
    )
    assert f"{rule}, got {written!r}; known: 50, " in said


def test_an_explained_problem_has_the_facts_of_a_call():
    for op in selection.OPS:
        problem = support.problem_of(op, 90)
        facts = {name for name in support.facts_of(op) if getattr(problem, name)}
        assert facts == support.facts_of(op)
    assert support.problem_of("quantize_fp8", None).heads == 0  # as `quantize_fp8` asks


@pytest.mark.parametrize(
    ("op", "model", "expected"),
    [
        ("mla_decode", "kimi-k3", (96, 576, None)),
        ("sparse_mla", "glm-5.3-flash", (64, 512, None)),
        ("append_rows", "mistral-small-4", (0, 320, None)),
        ("indexer_logits", "hy4-preview", (32, 128, None)),
        ("mla_prefill", "hy4-preview", (64, None, (192, 64, 256))),
    ],
)
def test_a_problem_of_a_model_has_its_sizes(op, model, expected):
    problem = support.problem_of(op, 90, model=model)
    width = None if problem.row is None else problem.row.width
    assert (problem.heads, width, problem.head_widths) == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["indexer_logits", "--model=kimi-k3"], "model must have an indexer for indexer_logits"),
        (["mla_decode", "--model=kimi-k4"], "'kimi-k4' is not a config.json"),
    ],
)
def test_explain_refuses_a_model_without_such_a_problem(arguments, said):
    code, output = invoke("explain", *arguments)
    assert code == 2
    assert said in " ".join(re.sub(r"[│\s]+", " ", output).split())


def test_explain_refuses_an_unknown_op():
    code, output = invoke("explain", "mla_encode")
    assert code == 2
    assert "mla_encode" in output


def test_triton_is_not_picked_in_host_memory_even_where_it_is_interpreted():
    problem = support.problem_of("mla_decode", None)
    assert selection.select("mla_decode", problem).backend == "cpu"
    assert (selection.explain("mla_decode", problem)["triton"] is None) == knobs.interpreted()


@pytest.mark.slow
def test_support_has_a_row_for_every_op():
    code, output = invoke("support")
    assert code == 0
    for op in selection.OPS:
        cells = ["hopper" if (op, arch) in HOPPER_KERNELS else "triton" for arch in support.NVIDIA]
        assert re.search(rf"{op} +cpu +{' +'.join(cells)}", output)
    assert "AMD: triton for every op" in output
    assert "gfx942, gfx950, gfx1100: compiled, not run" in output


def test_a_difference_between_ops_on_amd_is_shown():
    rows = [row for row in support.selections() if row[0].op in ("mla_decode", "merge_states")]
    refused = replace(rows[0][-1], why_not={"triton": "no"})
    shown = support._on_amd([[*rows[0][:-1], refused], rows[1]])
    assert shown == "AMD: triton for mla_decode, merge_states; — for mla_decode"


@pytest.mark.slow
def test_support_as_markdown():
    code, output = invoke("support", "--markdown")
    heading, rule, *rows, empty, note = output.splitlines()
    assert code == 0
    assert heading.startswith("| op | cpu | sm_80 (A100) |")
    assert heading.endswith("| gfx942 (MI300X) | gfx950 (MI350X) | gfx1100 (RX 7900) |")
    assert (empty, note) == ("", "gfx942, gfx950, gfx1100: compiled, not run.")
    assert rule == "|" + " --- |" * heading.count(" |")
    assert [row.split("|")[1].strip() for row in rows] == [f"`{op}`" for op in selection.OPS]
    assert all(row.count("|") == heading.count("|") for row in rows)
    for other in ("--compile", "--json"):
        assert invoke("support", "--markdown", other)[0] == 2


@pytest.mark.slow
def test_support_as_json():
    code, output = invoke("support", "--json")
    assert code == 0
    assert [row[0]["op"] for row in json.loads(output)] == list(selection.OPS)


def test_the_named_checks_leave_nothing_out():
    checks = configurations.named_checks()
    architectures = {*configurations.ARCHITECTURES, *configurations.AMD_ARCHITECTURES}
    assert {arch for _, arch in checks} - {103} == architectures
    on_amd = {name for name, arch in checks if arch in configurations.AMD_ARCHITECTURES}
    assert {configurations.CONFIGURATIONS[name].op for name in on_amd} == set(selection.OPS)
    assert set(checks) <= set(configurations.all_checks())
    hopper, blackwell = set(configurations.HOPPER), set(configurations.BLACKWELL)
    if why_not_triton() is not None:
        blackwell = set()
    assert {name for name, _ in checks} == {*configurations.CONFIGURATIONS, *hopper, *blackwell}
    assert {arch for name, arch in checks if name in hopper} == {90}
    for name in blackwell:
        assert {arch for each, arch in checks if each == name} == {100, 103}
    assert len(checks) == len(set(checks))
    cases = configurations.CONFIGURATIONS.values()
    assert {case.op for case in cases} == set(selection.OPS)
    for op, formats in {
        "norm_rope_quant_append": (*FORMATS, *GROUP_FORMATS, *COMPILED_SPLIT),
        "mla_decode": (*FORMATS, *GROUP_FORMATS, *COMPILED_SPLIT),
        "sparse_mla": (*FORMATS, *COMPILED_SPLIT),
    }.items():
        assert {case.format for case in cases if case.op == op} == set(formats)


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        (MERGE, ""),
        (replace(MERGE, shared_bytes=1024), ""),
        (replace(MERGE, shared_bytes=1025), "shared memory exceeds the limit of 1024 bytes"),
        (replace(MERGE, spill_stores=2), "spills: 2 stores, 0 loads; at most 0 and 0 are allowed"),
        (replace(MERGE, spill_loads=3), "spills: 0 stores, 3 loads; at most 0 and 0 are allowed"),
        (replace(MERGE, spill_stores=2, spill_loads=3, spill_bound=(2, 3)), ""),
        (
            replace(MERGE, spill_stores=2, spill_loads=4, spill_bound=(2, 3)),
            "spills: 2 stores, 4 loads; at most 2 and 3 are allowed",
        ),
        (
            replace(MERGE, spill_stores=3, spill_loads=1, spill_bound=(2, 3)),
            "spills: 3 stores, 1 loads; at most 2 and 3 are allowed",
        ),
        (replace(MERGE, spill_bound=(2, 3)), ""),
        (replace(MERGE, is_serialised=True), "its wgmmas are serialised"),
        (replace(MERGE, idle_barriers=2), "barriers that are never used: 2"),
        (replace(MERGE, clashing_barriers=1), "named barriers that the compiler uses, too: 1"),
        (replace(MERGE, error="no"), "no"),
        (replace(MERGE, arch=0x942, spill_stores=2), ""),
        (
            replace(MERGE, arch=0x942, has_amd_fp8=True),
            "has instructions for 8-bit floats, whose format is another on gfx942",
        ),
        (
            replace(MERGE, arch=0x942, shared_bytes=1025),
            "shared memory exceeds the limit of 1024 bytes",
        ),
    ],
)
def test_what_counts_as_a_fault(kernel, fault):
    assert kernel.fault == fault
    assert kernel.as_json()["fault"] == fault


@pytest.mark.slow
def test_triton_kernels_compile_without_a_gpu():
    """Also for AMD: gfx942's own e4m3 has half the values, so kernels must not use it."""
    done = compile_checks("--only", "append-rows-fp8_token", "--json", "--jobs", "1")
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    assert {kernel["configuration"] for kernel in kernels} == {"append-rows-fp8_token"}
    nvidia, amd = kernels
    assert nvidia["arch"] in configurations.ARCHITECTURES
    assert amd["arch"] == 0x942
    for kernel in kernels:
        assert kernel["registers"] > 0
        assert kernel["fault"] == ""
        assert not kernel["has_amd_fp8"]


def test_a_name_that_no_check_has_is_an_error(monkeypatch):
    monkeypatch.setattr(compilation, "run_with_progress", None)  # it is not reached
    code, output = invoke("support", "--compile", "--only", "zzz")
    said = " ".join(re.sub(r"[│\s]+", " ", output).split())
    assert code == 2
    assert "--only: no configuration has 'zzz' in its name; known: append-fp8_block128," in said
    assert "hopper-decode-h16-bf16" in said
    checks = configurations.named_checks()
    (merge,) = (check for check in checks if check[0] == "merge-2")
    assert compilation.checks_with("merge-2", checks) == [merge]


@pytest.mark.slow
def test_checks_are_found_by_the_kernel_that_explain_prints():
    checks = [
        *(("hopper-decode-h128-bf16", 90), ("hopper-decode-h16-bf16", 90), ("merge-2", 90)),
        *(("hopper-sparse-h128-bf16", 90), ("decode-h16-bf16", 90)),
    ]
    assert {name for name, _ in checks} < {
        *configurations.CONFIGURATIONS,
        *configurations.HOPPER,
    }
    for only in ("m64_bf16", "hopper:m64_bf16"):
        found = compilation.checks_with(only, checks)
        assert found == [checks[0], checks[3]]
    assert compilation.checks_with("small_m_bf16", checks) == [checks[1]]


@pytest.mark.slow
def test_code_is_written_to_a_folder(tmp_path):
    code = """
import sys
from pathlib import Path
from mlakit.tools.compile import compilation
(kernel,) = compilation.check("quantize-128", 90, Path(sys.argv[1]))
assert kernel.fault == "", kernel.fault
"""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True)
    (folder,) = tmp_path.iterdir()
    assert folder.name == "quantize-128-sm_90"
    files = {path.suffix: path for path in folder.iterdir()}
    assert {".ttgir", ".ptx", ".cubin", ".sass"} <= set(files)
    name = files[".ptx"].stem.partition("-")[2]
    assert f".entry {name}(" in files[".ptx"].read_text()
    assert "EXIT" in files[".sass"].read_text()


def descendants(pid: int) -> set[int]:
    """Of a process, as /proc has them."""
    children = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        children |= {int(child) for child in task.read_text().split()}
    return children.union(*(descendants(child) for child in children))


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def has_compiler(pid: int) -> bool:
    """Has the process loaded Triton?"""
    try:
        return "libtriton" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def wait_for(what, seconds: float) -> None:
    end = monotonic() + seconds
    while not what():
        assert monotonic() < end, f"not in {seconds} s"
        sleep(0.05)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
@pytest.mark.parametrize(
    ("begun", "send"),
    [
        pytest.param(False, os.killpg, id="all processes of a terminal, which are starting"),
        pytest.param(True, os.kill, id="the command, whose workers are compiling"),
    ],
)
def test_an_interrupt_ends_compiling_at_once(begun, send, tmp_path):
    """Workers that are waited for would compile for half a minute more."""
    command = [sys.executable, "-m", "mlakit", "support", "--compile", "--only", "hopper-decode"]
    variables = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    running = subprocess.Popen(
        command,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # jobs in the background of a shell ignore interrupts, and their children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        # the tracker of multiprocessing, and two workers
        wait_for(lambda: len(descendants(running.pid)) >= 3, 60)
        if begun:
            wait_for(lambda: any(map(has_compiler, descendants(running.pid))), 120)
        workers = descendants(running.pid)
        start = monotonic()
        send(running.pid, signal.SIGINT)
        stdout, stderr = running.communicate(timeout=60)
        seconds = monotonic() - start
        assert running.returncode == 130
        assert "Traceback" not in stderr
        assert stdout == ""
        assert seconds < 15  # two busy cores
        wait_for(lambda: not any(map(is_alive, workers)), 5)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)


def test_a_faulty_kernel_fails_the_command(monkeypatch):
    faulty = replace(MERGE, spill_stores=8)
    monkeypatch.setattr(
        compilation, "run_with_progress", lambda checks, jobs, dump: [MERGE, faulty]
    )
    code, output = invoke("support", "--compile")
    assert code == 1
    assert "spills: 8 stores" in output
    assert "1 of them failed" in output


def test_allowed_spills_are_shown(monkeypatch):
    spilling = replace(MERGE, spill_stores=2, spill_loads=3, spill_bound=(2, 3))
    monkeypatch.setattr(
        compilation, "run_with_progress", lambda checks, jobs, dump: [MERGE, spilling]
    )
    code, output = invoke("support", "--compile")
    assert code == 0
    assert "ok, allowed spills" in output
    assert "all passed, 1 with allowed spills" in output


def test_kernels_for_amd_are_said_not_to_have_run(monkeypatch):
    amd = replace(MERGE, arch=0x942, spill_stores=2)
    monkeypatch.setattr(compilation, "run_with_progress", lambda checks, jobs, dump: [MERGE, amd])
    code, output = invoke("support", "--compile")
    assert code == 0
    assert "gfx942" in output
    assert "ok, not run" in output
    assert "all passed; those for AMD's GPUs have not been run on one" in " ".join(output.split())


def test_every_bound_of_spills_is_that_of_a_check():
    names = {name for name, _ in configurations.all_checks()}
    for bounds in SPILL_BOUNDS.values():
        uncovered = names
        for pattern in bounds:
            covered = set(matching(uncovered, pattern))
            assert covered, pattern
            uncovered = uncovered - covered


def test_the_first_pattern_of_a_configuration_bounds_its_spills():
    kernel = "mla_decode_small_m_fp8_kv_kernel"
    bounds = SPILL_BOUNDS[kernel]
    first = spill_bound(kernel, "hopper-decode-h32-fp8_block128-page1")
    assert first == bounds["hopper-decode-h32-fp8_block128*"] != bounds["*-page*"]
    assert spill_bound(kernel, "hopper-decode-h16-fp8-page3") == bounds["*-page*"]
    assert spill_bound("sparse_mla_kernel", "sparse-h16-bf16") == (0, 0)
    assert spill_bound("another_kernel", "sparse-extra") == (0, 0)


@pytest.mark.skipif(not knobs.interpreted(), reason="kernels are compiled here")
def test_interpreted_kernels_are_not_compiled():
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        list(compilation.run([("merge-2", 90)], jobs=1))
