"""The suite `layer` on the CPU: its workloads, its products, and what its check finds."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from mlakit.ops import quantize_fp8
from mlakit.reference import dequantize_fp8
from mlakit.reference.steps import through_e4m3
from mlakit.steps import sparse
from mlakit.tools import cli
from mlakit.tools.bench.gemms import Gemm
from mlakit.tools.bench.report import SELECT, STAGES
from mlakit.tools.bench.shapes import Batch
from mlakit.tools.bench.step_checks import check_layer, check_selection
from mlakit.tools.bench.steps import GEMM_SUM, GEMMS_IN_A_ROW, STAGE_SUM, Layer, SparseStep
from tests.tools.bench.fakes import pretend_gpu
from tests.tools.bench.test_suites import mutate_kernel

KINDS = [(model, weights) for model in ("v3", "v3.2") for weights in ("bf16", "fp8")]
E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def cpu_as_gpu(monkeypatch):
    pretend_gpu(monkeypatch)


def small(model: str, weights: str) -> Layer:
    return Layer(model, weights, Batch.of(3, 1, 4096)).small


def test_the_products_are_those_of_the_layer():
    v3 = {each.name: each for each in Layer("v3", "bf16", Batch.of(16, 1, 4096)).gemms}
    assert v3["q_b_proj"] == Gemm("q_b_proj", 16, 128 * 192, 1536)
    assert v3["absorb"] == Gemm("absorb", 16, 512, 128, heads=128)
    assert v3["up-project"] == Gemm("up-project", 16, 128, 512, heads=128)
    assert v3["o_proj"].work.flops == 2 * 16 * 7168 * 128 * 128
    assert v3["kv_a_proj"].work.bytes == 2 * (16 * 7168 + 576 * 7168 + 16 * 576)
    sparse_layer = Layer("v3.2", "fp8", Batch.of(16, 1, 4096), heads=16)
    v32 = {each.name: each for each in sparse_layer.gemms}
    assert set(v32) - set(v3) == {"wq_b", "wk", "weights_proj"}
    assert v32["wq_b"] == Gemm("wq_b", 16, 64 * 128, 1536, dtype=E4M3)
    assert v32["weights_proj"].dtype == torch.float32
    assert v32["absorb"].dtype == torch.bfloat16
    assert v32["o_proj"].work.bytes == 16 * 2048 + 7168 * 2048 + 2 * 16 * 7168
    assert v32["o_proj"].work.products == "fp8"


@pytest.mark.parametrize("kind", KINDS)
def test_the_products_have_the_shapes_of_the_weights(kind):
    workload = small(*kind)
    layer = workload.layer(torch.Generator().manual_seed(0))
    found = {tuple(each.weight.shape) for each in layer.modules() if hasattr(each, "is_fp8")}
    up = tuple(layer.kv_b_proj.weight.shape)
    by_head = {each for each in workload.gemms if each.heads > 1}
    assert {(each.n, each.k) for each in workload.gemms if each.heads == 1} == found - {up}
    assert sum(each.heads * each.n * each.k for each in by_head) == up[0] * up[1]


@pytest.mark.parametrize(
    "gemm", [Gemm("a", 3, 32, 64), Gemm("b", 3, 32, 64, heads=2), Gemm("c", 3, 32, 64, dtype=E4M3)]
)
def test_a_product_has_its_shape(gemm):
    out = gemm.call(torch.Generator().manual_seed(0))()
    assert out.shape == ((3, 32) if gemm.heads == 1 else (2, 3, 32))
    assert out.dtype == torch.bfloat16


def test_flops_and_bytes_of_a_layer():
    dense = Layer("v3", "bf16", Batch.of(16, 1, 4096))
    products = dense.work_of(GEMM_SUM)
    assert products == dense.work_of(GEMMS_IN_A_ROW)
    assert dense.flops == products.flops + 2 * 128 * 16 * 4096 * 1088
    weights = 7168 * (1536 + 576 + 16384) + 1536 * 24576 + 512 * 32768
    assert dense.bytes == 2 * weights + 16 * 4096 * 1152 + 4 * 16 * 7168
    assert dense.work_of("attend").bytes == 16 * (4096 * 1152 + 2 * 128 * 1088)
    long = Layer("v3.2", "bf16", Batch.of(16, 1, 65536))
    assert long.work_of("attend").flops == 2 * 128 * 16 * 2048 * 1088
    assert long.work_of(SELECT).flops == 2 * 16 * 65536 * 64 * 128
    indexer = 2 * 1536 * 64 * 128 + 2 * 7168 * 128 + 4 * 7168 * 64
    assert long.bytes == 2 * weights + indexer + 16 * (65536 * 132 + 2048 * 1152 + 4 * 7168)
    assert long.work_of("mlakit").flops == long.flops


def test_times_of_products_become_a_sum():
    workload = Layer("v3", "bf16", Batch.of(1, 1, 4096))
    names = [f"GEMM {each.name}" for each in workload.gemms]
    seconds = {name: [1.0, 2.0] for name in names}
    others = {"read same bytes": [9.0] * 2, "output": [3.0] * 2, "projections": [4.0] * 2}
    found = workload.with_derived({**seconds, **others, "mlakit": [9.0] * 2})
    assert list(found) == ["mlakit", "projections", "output", GEMM_SUM, "read same bytes"]
    assert found[GEMM_SUM] == [6.0, 12.0]
    for stage in workload.parts:
        others[stage] = [0.5, 1.0]
    found = workload.with_derived({**seconds, **others, "mlakit": [9.0] * 2})
    assert found[STAGE_SUM] == [3.0, 6.0]
    del seconds[names[2]]
    assert GEMM_SUM not in workload.with_derived({**seconds, "mlakit": [9.0] * 2})


def test_the_stages_of_a_sparse_layer_add_up_with_its_selection_whole():
    workload = Layer("v3.2", "bf16", Batch.of(16, 1, 4096))
    seconds = {stage: [1.0, 2.0] for stage in workload.parts}
    found = workload.with_derived({**seconds, "mlakit": [9.0] * 2})
    assert found[STAGE_SUM] == [8.0, 16.0]
    assert workload.target_baseline == STAGE_SUM
    assert workload.min_speedup == 1 / 1.10
    assert Layer("v3", "bf16", Batch.of(16, 1, 4096)).min_speedup is None
    assert Layer("v3.2", "bf16", Batch.of(128, 1, 4096)).min_speedup is None
    step = SparseStep(Batch.of(16, 1, 4096))
    seconds = {stage: [1.0, 2.0] for stage in step.parts} | {"logits": [0.5, 0.5]}
    found = step.with_derived({**seconds, "mlakit": [9.0] * 2})
    assert (found[STAGE_SUM], found["top-k"]) == ([5.0, 10.0], [0.5, 1.5])


@pytest.mark.parametrize("kind", KINDS)
def test_every_stage_is_timed(kind):
    workload = small(*kind)
    found = [each.name for each in workload.build_case().baselines]
    stages = [name for name in STAGES if name in workload.parts]
    assert [name for name in STAGES if name in found] == stages
    assert len(stages) == (8 if kind[0] == "v3.2" else 6)
    gemms = [f"GEMM {each.name}" for each in workload.gemms]
    assert [*gemms, GEMMS_IN_A_ROW, "read same bytes"] == [n for n in found if n not in stages]


DENSE = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "q_a_layernorm"]
INDEXER = ["indexer.wq_b", "indexer.wk", "indexer.k_norm", "indexer.weights_proj"]


@pytest.mark.parametrize("weights", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("model", "module"),
    [*(("v3", each) for each in DENSE), *(("v3.2", each) for each in INDEXER)],
)
def test_every_module_is_checked(model, module, weights):
    workload = small(model, weights)
    inputs = workload.inputs(torch.Generator().manual_seed(0))
    check_layer(inputs, workload.batch)
    rolled = inputs.layer.get_submodule(module)
    rolled.register_forward_hook(lambda module, given, out: out.roll(1, dims=-1))
    with pytest.raises(AssertionError):
        check_layer(inputs, workload.batch)


@pytest.mark.parametrize("op", ["mla_decode", "batched_matmul", "norm_rope_quant_append"])
def test_kernels_of_a_dense_layer_are_checked(op, monkeypatch):
    case = small("v3", "bf16").build_case()
    case.check()
    if op == "norm_rope_quant_append":
        monkeypatch.setattr("mlakit.steps.decode.append_tokens", lambda *a, **options: None)
    else:
        mutate_kernel(monkeypatch, op)
    with pytest.raises(AssertionError):
        case.check()


@pytest.mark.parametrize("op", ["sparse_mla", "indexer_select", "scaled_mm_fp8"])
def test_kernels_of_a_sparse_layer_are_checked(op, monkeypatch):
    case = small("v3.2", "fp8").build_case()
    case.check()
    mutate_kernel(monkeypatch, op)
    with pytest.raises(AssertionError):
        case.check()


def test_a_layer_that_appends_no_index_key_is_wrong(monkeypatch):
    case = small("v3.2", "bf16").build_case()
    monkeypatch.setattr(sparse, "append_index_keys", lambda *args, **options: None)
    with pytest.raises(AssertionError, match="index key of token"):
        case.check()


def test_a_selection_is_the_best_within_the_error_of_its_scores():
    slots = torch.tensor([40, 41, 7, 8, 9])
    exact = torch.tensor([5.0, 4.0, 3.0, 2.9, 0.0]).double()
    naive = exact + 0.1

    def check(*selected: int) -> None:
        chosen = torch.tensor(selected, dtype=torch.int32)
        check_selection("token", chosen, slots, exact, naive)

    check(40, 41, 7)
    check(8, 40, 41)  # 3.0 and 2.9 are within the error
    check(7, 8, 9, 40, 41, -1)
    for wrong, said in [
        ((40, 41, 9), "leaves out a score better by"),
        ((40, 40, 41), "rows twice"),
        ((40, 41, 6), "of other requests"),
        ((40, 41, -1), "selects 2 rows, want 3"),
    ]:
        with pytest.raises(AssertionError, match=said):
            check(*wrong)


def test_operands_are_quantised_as_the_layer_does():
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    want = dequantize_fp8(*quantize_fp8(x, 128), 128, torch.float32)
    different = (through_e4m3(x.float(), 128) - want).abs() > 1e-6
    assert float(different.float().mean()) < 0.01  # a quotient and a product with 1 / scale


def test_the_suite_is_timed_in_graphs_unless_a_mode_is_given(tmp_path):
    file = tmp_path / "layer.json"
    options = ["layer", "--quick", "--only", "v3-bf16", "--json", str(file)]
    for more, mode in ([], "graph"), (["--mode", "cold"], "cold"), (["--host"], "host"):
        file.unlink(missing_ok=True)
        result = CliRunner().invoke(cli.app, ["bench", *options, *more])
        assert result.exit_code == 0, result.output
        written = json.loads(file.read_text("utf-8"))
        assert written["mode"] == mode
        named = {row["implementation"] for row in written["rows"]}
        assert {"mlakit", "projections", GEMM_SUM, GEMMS_IN_A_ROW} <= named
        assert not any(name.startswith("GEMM ") for name in named)
