"""The scripts that compare engines' backends: their checkpoints, and what they make of results."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from itertools import accumulate
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mlakit.tools.bench.measure import Spread
from tests.paths import ROOT

FOLDER = ROOT / "scripts/engines"


sys.path.append(str(FOLDER))  # the scripts import each other


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"engines_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


models, compare, vllm_job = script("models"), script("compare"), script("vllm_job")
report = sys.modules["report"]  # as compare imports it


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"experts": 4}, {"has_indexer": True}], ids=str)
def test_transformers_takes_every_weight_of_a_checkpoint(given, tmp_path):
    from transformers import AutoModelForCausalLM

    model = models.Model(2, layers=2, hidden=128, **given)
    models.save(model, tmp_path)
    loaded, found = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    logits = loaded(torch.tensor([[5, 9, 2]])).logits
    assert logits.shape == (1, 3, models.VOCABULARY)
    assert bool(logits.isfinite().all())
    assert logits.float().std() > 0.3  # tokens differ in probability


def test_fp8_weights_are_their_bytes_times_the_scale_of_their_block():
    weight = torch.randn(200, 300)
    payload, scales = models._in_blocks(weight)
    assert scales.shape == (2, 3)
    whole = scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    error = (payload.float() * whole - weight).abs()
    assert bool((error <= weight.abs() / 16 + scales.max() / 512).all())


def run(tokens: list[list[int]], shift: float = 0.0) -> dict[str, object]:
    """A result whose positions have two tokens each, the likeliest one `shift` less likely."""
    logprobs = [[{str(token): -0.5 - shift, "0": -2.0} for token in request] for request in tokens]
    return {"tokens": tokens, "logprobs": logprobs}


def test_logprobs_count_as_far_as_two_runs_saw_the_same_tokens():
    one, other = run([[5, 6, 7], [8, 9]]), run([[5, 6, 7], [8, 9]], 0.25)
    # of two tokens in each position one differs
    assert report.difference(one, other) == report.Difference(2, 2, 0.125, 0.25)
    other = run([[5, 3, 7], [8, 9]])
    other["logprobs"][0][2]["0"] = -9.0  # after the first difference
    found = report.difference(one, other)
    assert (found.equal, found.largest) == (1, 0.0)


def steps(ms: float, kernels: dict[str, float]) -> dict[str, object]:
    """The result of a task whose one profiled step runs kernels, in microseconds, in a row."""
    starts = [0.0, *accumulate(kernels.values())]
    runs = [[i, starts[i], us] for i, us in enumerate(kernels.values())]
    return {
        "task": {"kind": "speed", "batch": 16, "context": 1024},
        "all_ms": [ms, ms],
        "kernels": {"steps": 1, "names": list(kernels), "runs": runs},
    }


def test_a_step_and_its_attention_each_have_a_best_other_backend():
    by_backend = {
        "FLASHMLA": {"tasks": [steps(2.0, {"flash_fwd_splitkv_mla_kernel": 500, "gemm": 900})]},
        "TRITON_MLA": {"tasks": [steps(1.9, {"_fwd_grouped_kernel_stage1": 600, "gemm": 900})]},
        "MLAKIT": {"tasks": [steps(1.8, {"mla_decode_kernel": 400, "gemm": 900})]},
    }
    found = {each.op: each for each in report.times_of({("speed", "v3-h16"): by_backend})}
    step, attention = found["step"], found["attention"]
    assert (step.best, attention.best) == ("TRITON_MLA", "FLASHMLA")
    assert attention.workload == "v3-h16-b16-1024"
    assert step.ratio == pytest.approx(1.8 / 1.9)
    assert attention.ratio == pytest.approx(0.8)
    rows = {row.implementation: row for row in attention.rows()}
    assert rows["mlakit"].speedup is None
    assert rows["TRITON_MLA"].speedup.p50 == pytest.approx(1.5)


def test_several_processes_are_one_with_the_steps_of_all():
    def of_run(ms: float, replay: float) -> Any:
        ours = steps(ms, {"mla_decode_kernel": 400}) | {"host_us": {"replay": [replay]}}
        other = steps(1.0, {"flash_fwd_splitkv_mla_kernel": 500}) | {"host_us": {"replay": [25.0]}}
        return {("speed", "v3-h16"): {"MLAKIT": {"tasks": [ours]}, "FLASHMLA": {"tasks": [other]}}}

    second = of_run(1.5, 40.0)
    del second["speed", "v3-h16"]["FLASHMLA"]  # a run that was cut off
    found = report.pooled([of_run(1.0, 20.0), second, {}])
    made = {each.op: each for each in report.times_of(found)}
    assert made["step"].us["MLAKIT"] == Spread.of([1000.0, 1000.0, 1500.0, 1500.0])
    assert made["replay"].us["MLAKIT"] == Spread.of([20.0, 40.0])
    assert made["step"].rounds == 2
    assert report.report(found) == 1  # the steps; parts of the host have no limit


def test_the_host_of_a_step_is_timed_in_its_parts(monkeypatch):
    now = 0.0

    def take(seconds: float) -> None:
        nonlocal now
        now += seconds

    class Builder:
        pass

    class Own(Builder):
        def build(self) -> None:
            take(0.5)

    class Derived(Own):
        def build(self) -> None:
            super().build()  # counts once
            take(0.25)

    def step() -> None:
        take(8.0)
        Derived().build()
        torch.cuda.CUDAGraph.replay(None)

    backend = ModuleType("vllm.v1.attention.backend")
    backend.AttentionMetadataBuilder = Builder
    for name in ("vllm", "vllm.v1", "vllm.v1.attention"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, backend.__name__, backend)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: take(2.0))
    monkeypatch.setattr(vllm_job, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(vllm_job, "HOST_STEPS", 3)
    own = Own.build
    assert vllm_job.host_times(SimpleNamespace(step=step)) == {
        "metadata": [0.75e6] * 3,
        "replay": [2e6] * 3,
    }
    assert Own.build is own


def test_kernels_that_run_at_once_count_once():
    kernels = {
        "steps": 2,
        "names": ["mla_decode_kernel", "_merge_partials_kernel", "gemm"],
        # the merge waits for what is ahead of it; a product follows; then the next step
        "runs": [[0, 0, 100], [1, 20, 90], [2, 110, 50], [0, 200, 100], [1, 300, 10]],
    }
    assert report.attention_us(kernels, report.own_kernels()) == (110 + 110) / 2


def report_of(tmp_path, name: str, model: str, by_backend: dict[str, dict[str, object]]) -> int:
    for backend, result in by_backend.items():
        (tmp_path / f"{name}.{model}.{backend}.json").write_text(json.dumps({"tasks": [result]}))
    return report.report(compare.results(tmp_path))


def with_task(result: dict[str, object], **task: object) -> dict[str, object]:
    return result | {"task": task}


def test_other_tokens_are_a_miss_unless_the_others_differ_as_much(tmp_path):
    task = {"kind": "tokens", "lengths": [4]}
    base = with_task(run([[5, 6]]), **task)
    ours = with_task(run([[5, 3]], 0.25), **task)
    far = with_task(run([[5, 6]], 0.5), **task)
    names = ("FLASHMLA", "FLASH_ATTN_MLA", "MLAKIT")
    for shift, misses in ((base, 2), (far, 0)):
        by_backend = dict(zip(names, (base, shift, ours), strict=True))
        assert report_of(tmp_path, "tokens", "v3-h16", by_backend) == misses
    (tmp_path / "tokens.v3-h16.FLASH_ATTN_MLA.json").unlink()
    # nothing says how much others differ
    assert report.report(compare.results(tmp_path)) == 1


@pytest.mark.parametrize(("micros", "step", "misses"), [(96, 1.0, 0), (98, 1.0, 1), (96, 1.02, 1)])
def test_slower_attention_or_steps_are_a_miss(micros, step, misses, tmp_path):
    other = steps(1.0, {"flash_fwd_splitkv_mla_kernel": 100})
    ours = steps(step, {"mla_decode_kernel": micros})
    by_backend = {"FLASHMLA": other, "MLAKIT": ours}
    assert report_of(tmp_path, "speed", "v3-h128", by_backend) == misses


@pytest.mark.parametrize(
    ("change", "misses"),
    [
        ({}, 0),
        ({"memory_after": 102}, 1),
        ({"different_alone": [{}]}, 1),
        ({"compared_alone": 0}, 1),
    ],
)
def test_a_soak_must_end_as_it_began(change, misses, tmp_path):
    result = {"memory_before": 100, "memory_after": 100, "compared_alone": 3, "different_alone": []}
    by_backend = {"MLAKIT": with_task(result | change, kind="soak")}
    assert report_of(tmp_path, "soak", "v3-h16", by_backend) == misses


def test_every_scenario_has_a_backend_of_ours_and_models_that_exist():
    for scenario in compare.SCENARIOS.values():
        (ours,) = filter(report.is_ours, scenario.backends)
        assert ours in json.dumps(scenario.arguments(ours))
        assert (FOLDER / scenario.program).exists()
        assert set(scenario.models) <= set(models.MODELS)


LOG = """\
WARNING 11-19 08:17:11 [import_utils.py:408] Traceback (most recent call last):
WARNING 11-19 08:17:11 [import_utils.py:408]   File "a.py", line 1, in expected
WARNING 11-19 08:17:11 [import_utils.py:408] ImportError: an optional package
(EngineCore pid=7) ERROR 11-19 08:17:12 [core.py:1100] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-19 08:17:12 [core.py:1100]   File "b.py", line 2, in the_cause
(EngineCore pid=7) ERROR 11-19 08:17:12 [core.py:1100]     launch()
(EngineCore pid=7) ERROR 11-19 08:17:12 [core.py:1100] CompilationError: at 3:7:
(EngineCore pid=7) ERROR 11-19 08:17:12 [core.py:1100]     x = tl.load(y)
INFO 11-19 08:17:13 [core.py:9] going down
[rank0]: Traceback (most recent call last):
[rank0]:   File "c.py", line 3, in main
[rank0]: RuntimeError: Engine core initialization failed
nanobind: leaked 7 types!
nanobind: leaked 9 functions!
nanobind: leaked 1 keep_alive record!
nanobind: this is likely caused by a reference counting issue in the binding code.
nanobind: see its documentation
"""


def test_the_first_errors_of_a_log_are_shown_and_not_only_its_end():
    found = script("logs").telling(LOG)
    assert not any("optional package" in line for line in found)
    assert found[:4] == [
        '  File "b.py", line 2, in the_cause',
        "    launch()",
        "CompilationError: at 3:7:",
        "    x = tl.load(y)",
    ]
    assert "RuntimeError: Engine core initialization failed" in found
    assert found[-1] == "nanobind: see its documentation"
    assert script("logs").telling("nothing\n") == ["nothing"]


def test_a_process_is_killed_with_all_that_it_started(tmp_path):
    forever = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], sys.argv[2]])"
    )
    ticks = (
        "import pathlib, sys, time\nwhile True: pathlib.Path(sys.argv[1]).touch(); time.sleep(0.1)"
    )
    path = tmp_path / "alive"
    command = [sys.executable, "-c", forever, ticks, str(path)]
    assert compare.exit_status([sys.executable, "-c", "raise SystemExit(3)"], 60) == 3
    assert compare.exit_status(command, 3) is None
    assert path.exists()
    path.unlink()
    time.sleep(1)
    assert not path.exists()


def test_scenarios_are_asked_for_by_patterns():
    def names(only: str) -> set[str]:
        return {job.name for job in compare.jobs(only)}

    assert names("tokens") == {"tokens"}
    assert names("speed*,soak") == {
        "speed",
        "speed-fp8",
        "speed-sparse",
        "speed-sparse-fp8",
        "soak",
    }
    stems = [job.stem for job in compare.jobs("tokens", ["MLAKIT"], ["v3-h128"])]
    assert stems == ["tokens.v3-h128.MLAKIT"]
    assert not names("nothing")


def test_tasks_with_a_result_are_not_run_again(tmp_path, monkeypatch):
    engine = SimpleNamespace(start_seconds=1.0, kernels_at_start=0)
    monkeypatch.setattr(vllm_job, "import_engine", lambda: None)
    monkeypatch.setattr(vllm_job, "Engine", lambda *arguments: engine)
    ran: list[int] = []

    def task(engine: object, task: dict[str, int]) -> dict[str, int]:
        ran.append(task["number"])
        if len(ran) == 2:
            raise RuntimeError("the machine goes back")
        return {"gave": task["number"]}

    monkeypatch.setitem(vllm_job.TASKS, "counted", task)
    path, result = tmp_path / "job.json", tmp_path / "result.json"
    tasks = [{"kind": "counted", "number": number} for number in range(3)]
    lock = str(tmp_path / "turn.lock")
    job = {"model": "", "engine": {}, "tasks": tasks, "result": str(result), "turn": lock}
    path.write_text(json.dumps(job))
    with pytest.raises(RuntimeError, match="goes back"):
        vllm_job.main(path)
    scenario = compare.Scenario((), (), tasks)
    half = compare.Job("result", "", "", scenario)
    monkeypatch.setattr(compare.Job, "stem", "result")
    assert not compare.is_done(half, tmp_path)
    vllm_job.main(path)
    assert ran == [0, 1, 1, 2]
    assert [each["gave"] for each in json.loads(result.read_text())["tasks"]] == [0, 1, 2]
    assert compare.is_done(half, tmp_path)
