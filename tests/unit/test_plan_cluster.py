"""`mlakit plan-cluster`: measured times, the simulated step by hand, table and chart."""

from __future__ import annotations

import json
import re
from typing import Any
from xml.etree import ElementTree

import pytest
import scaling_page
from typer.testing import CliRunner

from mlakit.tools import cli
from mlakit.tools.memory.gpus import GIB
from mlakit.tools.planner import kernel_times
from mlakit.tools.planner.kernel_times import KernelTimes, interpolated, measured_times
from mlakit.tools.planner.report import chart
from mlakit.tools.planner.simulation import (
    Link,
    Model,
    Plan,
    Settings,
    parse_degrees,
    parse_link,
    parse_range,
    plan_cluster,
    step_of,
)
from tests.paths import ROOT
from tests.unit.test_vllm_args import SPARSE, written


def test_the_times_are_those_of_the_documented_reports():
    stored = json.loads(kernel_times.FILE.read_text(encoding="utf-8"))
    # if it differs: python scripts/docs/scaling_page.py
    assert stored == scaling_page.measured(ROOT / "docs" / "data")


def test_interpolation():
    points = [(10.0, 2.0), (1000.0, 8.0)]
    assert [interpolated(points, x) for x in (1, 10, 1000, 2000)] == [2, 2, 8, 16]
    assert interpolated(points, 100) == pytest.approx(4)


def test_a_measured_shape_has_its_time():
    times = measured_times()
    rows = json.loads(kernel_times.FILE.read_text(encoding="utf-8"))["h200-grid.json"]["us"]
    assert len(rows) == 120
    for name, us in rows.items():
        b, h, n = map(int, re.findall(r"\d+", name.removeprefix("grid-bf16")))
        assert times.dense_us(h, b * n) == pytest.approx(us, rel=0.21)
    # shapes of other runs
    assert times.dense_us(128, 128 * 4096) == pytest.approx(228.5, rel=0.02)
    assert times.dense_us(16, 128 * 8192, "fp8") == pytest.approx(165.6, rel=0.06)
    assert times.dense_us(128, 128 * 4096, "fp8_block128") == pytest.approx(356.4, rel=0.02)
    assert times.sparse_us(128, 64, 32768) == pytest.approx(76.2 + 31.6 + 98.5, rel=0.01)


def test_more_work_never_takes_less_time():
    times = measured_times()
    sizes = [1 << power for power in range(8, 25)]
    for heads in (1, 8, 20, 128, 256):
        us = [times.dense_us(heads, tokens) for tokens in sizes]
        assert us == sorted(us)
        assert times.dense_us(heads, 4096) <= times.dense_us(2 * heads, 4096)
    us = [times.sparse_us(16, 8, context) for context in sizes]
    assert us == sorted(us)


# a measured machine of round numbers: attention takes heads · tokens / 1000 us
TIMES = KernelTimes(
    dense={1: [(1, 0.001), (1e9, 1e6)], 1024: [(1, 1.024), (1e9, 1.024e9)]},
    factors={"fp8": [(1, 0.5)]},
    logits={1: [(1, 1.0), (1000, 1000.0)]},
    topk={1: [(1, 2.0), (1000, 2000.0)]},
    attend={1: [(1, 3.0), (1000, 3000.0)]},
    read_gb_s=1000.0,
    bf16_tflops=1000.0,
)
SETTINGS = Settings(
    gpus=16,
    node_link=Link("nvlink", 100.0, 5.0),
    link=Link("ib", 10.0, 50.0),
    weight_efficiency=0.5,
    layer_us=7.0,
)


def test_one_gpu_by_hand(tmp_path):
    model = Model.of(written(tmp_path))
    step = step_of(model, SETTINGS, TIMES, "bf16", context=1000, tp=1, dcp=1, requests=3)
    # 4 layers, 8 heads, 3000 tokens
    assert step.attention_us == pytest.approx(4 * 8 * 3000 / 1000)
    read = model.weights.total_bytes * (1 - model.weights.expert_share)
    read += 2 * model.weights.expert_parameters * (1 - (14 / 16) ** 3)
    assert step.weights_us == pytest.approx(read / 1e6 / 0.5)
    assert (step.collectives_us, step.fixed_us) == (0, 28)
    assert step.us == step.attention_us + step.weights_us + 28
    assert step.tokens_per_s_gpu == pytest.approx(3e6 / step.us)
    assert step.tokens_per_s_node == pytest.approx(8 * 3e6 / step.us)
    assert step.tokens_per_s == pytest.approx(16 * 3e6 / step.us)


def test_tensor_and_context_parallel_by_hand(tmp_path):
    model = Model.of(written(tmp_path))
    step = step_of(model, SETTINGS, TIMES, "fp8", context=1001, tp=4, dcp=2, requests=3)
    assert step.attention_us == pytest.approx(4 * 0.5 * (8 * 2 / 4) * (3 * 501) / 1000)
    reduced = 5 + (2 * 3 / 4) * (3 * 64 * 2) / 1e5
    heads = 3 * 2  # of the other rank, for 3 requests
    gathered = 5 + heads * 576 * 2 / 1e5
    lse = 5 + (3 * 4) * 4 / 1e5  # all 4 heads of the group
    scattered = 5 + heads * 512 * 2 / 1e5
    assert step.collectives_us == pytest.approx(4 * (2 * reduced + gathered + lse + scattered))
    assert step.tokens_per_s_gpu == pytest.approx(3e6 / step.us / 4)
    # a group of 16 spans two nodes, its context parallel groups of 8 do not
    wide = Settings(**{**SETTINGS.__dict__, "gpus_per_node": 4})
    spans = step_of(model, wide, TIMES, "fp8", context=1001, tp=8, dcp=4, requests=3)
    reduced = 50 + (2 * 7 / 8) * (3 * 64 * 2) / 1e4
    heads = 3 * 3 * 1
    own = [heads * 1152, 4 * 3 * 3 * 4, heads * 1024]
    assert spans.collectives_us == pytest.approx(
        4 * (2 * reduced + sum(5 + received / 1e5 for received in own))
    )


def test_many_requests_are_limited_by_products(tmp_path):
    model = Model.of(written(tmp_path))
    step = step_of(model, SETTINGS, TIMES, "bf16", context=1, tp=2, dcp=1, requests=10**6)
    flops = 2 * model.weights.active_parameters() * 10**6
    assert step.weights_us == pytest.approx(flops / 1e9 / 2 / 0.5)


def test_a_sparse_model_by_hand(tmp_path):
    model = Model.of(written(tmp_path, **{**SPARSE, "index_topk": 2048}))
    step = step_of(model, SETTINGS, TIMES, "fp8_block128", context=1, tp=8, dcp=1, requests=10)
    assert step.attention_us == pytest.approx(4 * (10 + 20 + 30))


def plan(config: str, contexts: tuple[int, ...] = (1024,), **options: Any) -> Plan:
    degrees = {name: options.pop(name) for name in ("tp", "dcp") if name in options}
    return plan_cluster(config, contexts, Settings(**{"gpus": 8, **options}), **degrees)


def test_degrees_divide_gpus_heads_and_nodes(tmp_path):
    config = written(tmp_path)
    found = {(step.tp, step.dcp) for step in plan(config).steps}
    assert found == {(tp, dcp) for tp in (1, 2, 4, 8) for dcp in (1, 2, 4, 8) if tp % dcp == 0}
    assert {step.tp for step in plan(config, gpus=16).steps} == {1, 2, 4, 8}  # 8 heads
    assert {step.tp for step in plan(config, gpus=6).steps} == {1, 2}
    few = plan(config, tp=(4, 8), dcp=(2,))
    assert [(step.tp, step.dcp) for step in few.steps] == [(4, 2), (8, 2)]
    sparse = plan(written(tmp_path, **{**SPARSE, "index_topk": 2048}))
    assert {step.dcp for step in sparse.steps} == {1}


def test_requests_are_those_that_fit(tmp_path):
    config = written(tmp_path)
    options = {"gpu_memory": "8", "tp": (8,), "max_requests": 1000}
    found = plan(config, (1 << 17,), **options)
    weights = -(-Model.of(config).weights.total_bytes // 8)
    free = int(8 * GIB * 0.9) - 4 * GIB - weights
    page = 4 * 1152 * 64
    assert [step.requests for step in found.steps] == [
        free // page // (2048 // dcp) for dcp in (1, 2, 4, 8)
    ]
    assert found.best(1 << 17) is not None
    asked = plan(config, (1 << 17,), requests=10, **options)
    assert [step.requests for step in asked.steps] == [0, 10, 10, 10]
    assert asked.steps[0].tokens_per_s == 0
    none = plan(config, (1 << 30,), **options)
    assert none.best(1 << 30) is None


def test_weights_that_do_not_fit_are_left_out():
    found = plan("deepseek-v3")
    assert {step.tp for step in found.steps} == {8}
    assert "TP 4: weights take 156.7 GiB per rank, 122.9 GiB are usable" in found.left_out


def test_contexts_links_and_degrees_are_parsed():
    assert parse_range("4k..32k") == (4096, 8192, 16384, 32768)
    assert parse_range("3k..10k") == (3072, 6144)
    assert parse_range("4k,1m") == (4096, 1 << 20)
    assert parse_link("--link", "ib:25") == Link("ib", 25.0, 30.0)
    assert parse_link("--link", "NVLink:300:12.5") == Link("nvlink", 300.0, 12.5)
    assert parse_degrees("tp", "8, 16") == (8, 16)
    assert parse_degrees("tp", "") == ()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpus", "0"], "gpus must be at least 1, got 0"),
        (["--gpus", "12"], "gpus must be at most 8 or a multiple of it (--gpus-per-node), got 12"),
        (["--context", "8k..4k"], "context must ascend from one number to another, got '8k..4k'"),
        (["--context", "x"], "context must be numbers such as 4096,32k, got 'x'"),
        (["--context", "0"], "context must be at least 1, got 0"),
        (["--link", "pigeon"], "--link must be nvlink or ib, with GB/s and us as in ib:50:20"),
        (["--node-link", "ib:0"], "--node-link must have more than 0 GB/s, got 'ib:0'"),
        (["--tp", "3"], "tp must be one of 1, 2, 4, 8, got 3"),
        (["--tp", "x"], "tp must be numbers such as 8,16, got 'x'"),
        (["--dcp", "16"], "dcp must be one of 1, 2, 4, 8, got 16"),
        (["--requests", "0"], "requests must be at least 1, got 0"),
        (["--format", "fp9"], "format must be one of bf16, fp8, fp8_token, fp8_block128, which"),
        (["--weight-efficiency", "0"], "weight_efficiency must be above 0 and at most 1, got 0"),
        (["--layer-us", "-1"], "layer_us must be at least 0, got -1"),
        (["--plot", "c.pdf"], "--plot must be a file that ends in .svg or .png"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(tmp_path, arguments, said):
    assert said in run(written(tmp_path), *arguments, columns=300, status=2)


def test_models_that_the_kernels_do_not_stand_for(tmp_path):
    with pytest.raises(ValueError, match=r"rows of 512 \+ 64 columns, .* got 256 \+ 64"):
        plan(written(tmp_path, kv_lora_rank=256))
    with pytest.raises(ValueError, match=r"index_topk 2048, .* got 64"):
        plan(written(tmp_path, **SPARSE))
    with pytest.raises(ValueError, match="dcp must be one of 1, got 2"):
        plan(written(tmp_path, **{**SPARSE, "index_topk": 2048}), dcp=(2,))


def run(*arguments: object, columns: int = 100, status: int = 0) -> str:
    runner = CliRunner(env={"COLUMNS": str(columns)})
    result = runner.invoke(cli.app, ["plan-cluster", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return re.sub(r"[│\s]+", " ", result.output) if status == 2 else result.output


def test_the_command_prints_the_steps():
    output = run("deepseek-v3", "--context", "128k")
    (best,) = [line.split() for line in output.splitlines() if re.search(r"\d\*", line)]
    step = plan("deepseek-v3", (1 << 17,)).best(1 << 17)
    assert best[:4] == ["8", str(step.dcp), str(step.requests), f"{step.us / 1e3:.1f}"]
    assert "Simulated, not measured." in output
    assert "Links: in a node nvlink, 450 GB/s, 10 us per collective." in output
    assert "between nodes ib, 25 GB/s" in run("deepseek-v3", "--gpus", 16, "--link", "ib:25")
    stored = json.loads(run("deepseek-v3", "--context", "128k", "--json"))
    assert (
        stored["steps"][-1]["tokens_per_s_gpu"]
        == plan("deepseek-v3", (1 << 17,)).steps[-1].tokens_per_s_gpu
    )
    assert run("deepseek-v3", "--context", "128k") == output


def test_nothing_that_fits_is_an_error(tmp_path):
    assert "Nothing fits." in run("deepseek-v3", "--gpus", 4, status=1)
    assert "Nothing fits." in run("deepseek-v3", "--requests", 100000, status=1)


def test_the_chart_has_every_degree(tmp_path):
    file = tmp_path / "cluster.svg"
    run("deepseek-v3", "--gpus", 16, "--context", "4k..1m", "--plot", file)
    drawn = ElementTree.fromstring(file.read_text("utf-8"))
    texts = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"TP 8, DCP 1", "TP 16, DCP 16", "4k", "1024k", "100"} <= set(texts)
    for circle in drawn.iter("{http://www.w3.org/2000/svg}circle"):
        assert 0 <= float(circle.get("cx")) <= float(drawn.get("width"))
        assert 0 <= float(circle.get("cy")) <= float(drawn.get("height"))
    one = chart(plan("deepseek-v3", (4096,)))
    assert one.svg()
    assert chart(plan("deepseek-v3", (1 << 30,))).svg()


def test_the_fitted_constants_are_those_of_the_measured_layer():
    """The layer's time without attention, as `layer_us` and an efficiency of reading weights."""
    report = json.loads((ROOT / "docs" / "data" / "h200-layer.json").read_text(encoding="utf-8"))
    us = {
        (row["workload"], row["implementation"]): row["p50_us"]
        for row in report["rows"]
        if row["workload"].startswith("layer-v3-bf16-weights-b16-h")
    }
    rest, read = {}, {}
    for heads in (16, 128):
        name = f"layer-v3-bf16-weights-b16-h{heads}-4096"
        rest[heads] = us[name, "mlakit"] - us[name, "attend"]
        inner, hidden = 1536, 7168
        parameters = hidden * (inner + 576) + heads * (inner * 192 + 512 * 256 + 128 * hidden)
        read[heads] = 2 * parameters / report["ceilings"]["read_gb_s"] / 1e3
    efficiency = (read[128] - read[16]) / (rest[128] - rest[16])
    assert efficiency == pytest.approx(0.87, abs=0.03)
    assert rest[16] - read[16] / efficiency == pytest.approx(32, abs=4)
