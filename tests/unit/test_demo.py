"""`mlakit demo` passes as it is, and fails as soon as any kernel it runs is wrong."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from typer.testing import CliRunner

from mlakit import cli, demo, dispatch
from mlakit.cache import PagedLatentCache
from mlakit.checks import UnsupportedError
from mlakit.compat import modular
from mlakit.demo import Settings, documented
from mlakit.demo.check import Result, check_results, row_errors
from mlakit.demo.model import RandomModel, make_model
from mlakit.demo.oracles import prefill_heads
from mlakit.demo.serving import Transcript, serve
from mlakit.formats import FORMATS, row_codec
from mlakit.geometry import PRESETS, MLAGeometry, RopeParameters
from mlakit.masks import NULL
from mlakit.rope import rope_table
from mlakit.specs import Problem
from mlakit.testing import assert_matches
from tests.kernel_launchers import Arguments, Change, by_name, does_nothing, replace_launcher

TINY = MLAGeometry(
    num_heads=4,
    kv_lora_rank=128,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
    hidden_size=256,
    q_lora_rank=96,
    attention_mscale=1.2,
    index_n_heads=4,
    index_head_dim=64,
    index_topk=16,
    rope_parameters=RopeParameters(
        "yarn",
        factor=math.exp(2),
        original_max_position_embeddings=64,
        mscale=1.0,
        mscale_all_dim=1.0,
    ),
)
SMALL = ("--prompt", "70", "--tokens", "2", "--device", "cpu")

APPENDS = {"fused_rope_rmsnorm_quantization_kernel", "mla_fused_rope_rmsnorm_quantization"}
PREFILL_FP8 = {"mla_prefill_branch_fp8"}
FLARE = {"flare_mla_decoding"}
SPARSE_PREFILL = {"mla_sm100_prefill_sparse"}
DOCUMENTED = APPENDS | PREFILL_FP8 | FLARE | SPARSE_PREFILL


@pytest.fixture(autouse=True)
def _tiny_model(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", TINY)


@pytest.fixture
def _small_batch(monkeypatch):
    """Few heads and short contexts, in the same five kinds of requests."""
    cached = (0, 64, 66, 10, 1)
    totals = tuple(before + new for before, new in zip(cached, documented.NEW, strict=True))
    for name, value in {"HEADS": 2, "CACHED": cached, "TOTALS": totals}.items():
        monkeypatch.setattr(documented, name, value)


def run_command(*arguments: str, model: str = "tiny") -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["demo", "--model", model, *SMALL, *arguments])
    return result.exit_code, result.output


def serve_only(*arguments: str, model: str = "tiny") -> tuple[int, str]:
    return run_command("--no-documented", *arguments, model=model)


def failed_stages(output: str) -> set[str]:
    return set(output.rstrip().splitlines()[-1].removeprefix("FAIL: ").split(", "))


def table_rows(output: str) -> dict[str, list[str]]:
    """The cells of the lines that end in a result, by the text before the first number."""
    found = {}
    for line in output.splitlines():
        if line.rstrip().endswith(("ok", "WRONG")):
            label, *cells = re.split(r"\s{2,}", line.strip())
            found[label] = cells
    return found


def served(settings: Settings, geometry: MLAGeometry = TINY) -> tuple[RandomModel, Transcript]:
    model = make_model(
        geometry,
        positions=settings.positions,
        dtype=demo.activation_dtype(settings.format, geometry),
        device=settings.device,
        generator=torch.Generator().manual_seed(settings.seed),
    )
    return model, serve(model, settings, Progress(disable=True))


@pytest.mark.parametrize("rope", ["interleaved", "half"])
def test_the_layer_rotates_as_its_model_does(rope):
    geometry = replace(TINY, rope=rope)
    settings = Settings(70, 2, "bf16", torch.device("cpu"), 0)
    model, transcript = served(settings, geometry)
    assert model.layer.rope == rope
    assert torch.equal(model.layer.freqs, rope_table(geometry, settings.positions))
    codec = row_codec("bf16", geometry.row)
    stages = demo.checked_stages(transcript, model, codec, Progress(disable=True))
    assert all(stage.check.passed for stage in stages)


def test_it_passes_and_says_so():
    exit_code, output = run_command()
    assert exit_code == 0, output
    assert re.fullmatch(
        r"PASS: 12 of 12 checks within tolerance \(\d+ s\)", output.splitlines()[-1]
    )
    assert "FAIL" not in output
    assert "WRONG" not in output
    assert max(map(len, output.splitlines())) <= 80
    for function in DOCUMENTED:
        assert function in output
        assert callable(getattr(modular, function))


def test_the_table_gives_tokens_times_errors_and_tolerances():
    exit_code, output = serve_only()
    assert exit_code == 0, output
    assert "PASS: 6 of 6 checks" in output
    rows = table_rows(output)
    tokens = {
        "prefill": 46,
        "prefill on 46 cached": 24,
        "decode": 4,
        "index, top 16": 2,
        "sparse, 16 of 73 rows": 2,
        "cached rows": 146,
    }
    assert {label: int(cells[0]) for label, cells in rows.items()} == tokens
    for label, (_, *times, error, tolerance, result) in rows.items():
        assert len(times) == {"index, top 16": 1, "cached rows": 0}.get(label, 2)
        assert all(re.fullmatch(r"\d+\.\d ms", time) for time in times)
        assert 0 < float(error) <= float(tolerance)
        assert result == "ok"


def test_it_tells_the_bytes_of_the_cache_and_the_pages_saved():
    _, output = serve_only("--format", "fp8_token")
    words = output.replace(",", " ").split()
    # 128 e4m3 + 32 bf16 + a scale; in bf16; 4 heads · (96 + 64) halves; 64 e4m3 + a scale
    for size in ("196", "320", "1280", "68"):
        assert size in words
    told = " ".join(output.split())
    assert f"1280 as K and V of 4 heads: {1280 / 196:.0f} times as many" in told
    assert "3 of 64 tokens, 1 shared, 1 copied before a write; 4 without sharing" in told


@pytest.mark.parametrize(
    ("prompt", "used", "shared", "copied", "unshared"),
    [(90, 3, 1, 1, 4), (128, 4, 2, 0, 6), (126, 5, 1, 1, 6)],
)
def test_continuations_share_the_pages_of_the_prompt(prompt, used, shared, copied, unshared):
    _, transcript = served(Settings(prompt=prompt, tokens=3))
    pages = transcript.pages
    assert (pages.used, pages.shared, pages.copied) == (used, shared, copied)
    assert pages.unshared == unshared
    one, other = transcript.rows
    assert torch.equal(one[:prompt], other[:prompt])
    assert not torch.equal(one[prompt:], other[prompt:])  # sampled apart


@pytest.mark.parametrize("format", FORMATS)
def test_every_cache_format_passes(format):
    exit_code, output = serve_only("--format", format)
    assert exit_code == 0, output
    assert f"({format})" in output


def test_a_model_without_indexer_or_query_latent_passes(monkeypatch):
    plain = replace(TINY, q_lora_rank=None, index_n_heads=0, index_head_dim=0, index_topk=0)
    monkeypatch.setitem(PRESETS, "plain", plain)
    exit_code, output = serve_only(model="plain")
    assert exit_code == 0, output
    assert "PASS: 4 of 4 checks" in output
    assert "left out: this model has no indexer" in output


def test_more_heads_than_are_checked_in_prefill_pass(monkeypatch):
    monkeypatch.setitem(PRESETS, "wide", TINY.with_heads(40))
    exit_code, output = serve_only(model="wide")
    assert exit_code == 0, output
    checked = [list(range(40))[heads] for heads in prefill_heads(TINY.with_heads(40))]
    assert [len(heads) for heads in checked] == [14, 13]
    assert not set(checked[0]) & set(checked[1])
    assert "14 of 40 heads" in " ".join(output.split())


@pytest.mark.parametrize("prompt", ["2", "64"])
def test_short_prompts_pass(prompt):
    exit_code, output = serve_only("--prompt", prompt, "--tokens", "1")
    assert exit_code == 0, output


def test_a_seed_decides_everything():
    settings = Settings(prompt=20, tokens=2)
    first, again, other = (served(replace(settings, seed=seed))[1] for seed in (3, 3, 4))
    assert torch.equal(first.decode.out, again.decode.out)
    assert not torch.equal(first.decode.out, other.decode.out)


def test_a_query_attends_to_some_keys_neither_to_one_nor_to_all():
    _, transcript = served(Settings(prompt=300, tokens=1, format="fp32"))
    # a mean of n values of unit variance has variance 1/n
    attended = 1 / transcript.decode.out.double().square().mean()
    assert 3 < attended < 75


@pytest.mark.usefixtures("_small_batch")
def test_every_progress_bar_is_finished(monkeypatch):
    bars = Progress(console=Console(quiet=True))
    monkeypatch.setattr(demo, "_progress_bars", lambda console: bars)
    assert demo.run("tiny", TINY, Settings(prompt=20, tokens=2))
    names = ["random weights", "prefill", "decode", "sparse", "float64 oracles"]
    assert [task.description for task in bars.tasks] == [*names, "documented functions"]
    assert bars.finished


def off_in_one_number(index: tuple[int, ...], value: float) -> Change:
    def write(a: Arguments) -> None:
        a["out"][index] = value

    return by_name(after=write)


def with_options(**changed: object) -> Change:
    return by_name(lambda a: changed)


ignores_the_newest_key = by_name(lambda a: {"kv_lens": a["kv_lens"] - 1})
reads_one_page_for_all = by_name(
    lambda a: {"page_table": a["page_table"][:, :1].expand_as(a["page_table"])}
)
without_gamma = by_name(lambda a: {"gamma": torch.ones_like(a["gamma"])})
with_equal_weight_scales = by_name(
    lambda a: {"b_scale": torch.full_like(a["b_scale"], float(a["b_scale"].mean()))}
)
takes_the_worst = by_name(lambda a: {"logits": -a["logits"]})

ATTENTION = {"prefill", "prefill on 46 cached", "decode", "sparse"}
ANYTHING = ATTENTION | {"index", "cached rows"}

MUTATIONS = {
    "decode-does-nothing": ("mla_decode", does_nothing, {"decode"}),
    "decode-newest-key": ("mla_decode", ignores_the_newest_key, {"decode"}),
    "decode-pages": ("mla_decode", reads_one_page_for_all, {"decode"}),
    "decode-one-number": ("mla_decode", off_in_one_number((1, 1, 50), 1.0), {"decode"}),
    "decode-one-nan": ("mla_decode", off_in_one_number((1, 1, 50), torch.nan), {"decode"}),
    "sparse-does-nothing": ("sparse_mla", does_nothing, {"sparse"}),
    "sparse-entry": ("sparse_mla", by_name(lambda a: {"rows": a["rows"][:, 1:]}), {"sparse"}),
    "prefill-does-nothing": ("mla_prefill", does_nothing, {"prefill", "prefill on 46 cached"}),
    "prefill-mask": ("mla_prefill", with_options(mask=NULL), {"prefill", "prefill on 46 cached"}),
    "prefill-scale": (
        "mla_prefill",
        by_name(lambda a: {"softmax_scale": 1.1 * a["softmax_scale"]}),
        {"prefill", "prefill on 46 cached"},
    ),
    "merge-first-part": (
        "merge_states",
        by_name(lambda a: {"outs": a["outs"][:1], "lses": a["lses"][:1]}),
        {"prefill on 46 cached"},
    ),
    "matmul-does-nothing": ("batched_matmul", does_nothing, ATTENTION),
    "matmul-one-number": ("batched_matmul", off_in_one_number((-1, -1, -1), 3.0), ATTENTION),
    "index-scores": (
        "indexer_logits",
        by_name(lambda a: {"weights": torch.ones_like(a["weights"])}),
        {"index"},
    ),
    "index-worst": ("indexer_topk", takes_the_worst, {"index"}),
    "append-does-nothing": ("norm_rope_quant_append", does_nothing, ATTENTION | {"cached rows"}),
    "append-rope": ("norm_rope_quant_append", with_options(rope="half"), {"cached rows"}),
    "append-gamma": ("norm_rope_quant_append", without_gamma, {"cached rows"}),
    "append-position": (
        "norm_rope_quant_append",
        by_name(lambda a: {"freqs": a["freqs"].roll(1, 0)}),
        {"cached rows"},
    ),
}


def mutate(monkeypatch: pytest.MonkeyPatch, op: str, change: Change) -> None:
    replace_launcher(monkeypatch, op, change, backend="cpu")


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutant_fails_the_demo(mutation, monkeypatch):
    op, change, failing = MUTATIONS[mutation]
    mutate(monkeypatch, op, change)
    exit_code, output = serve_only()
    assert exit_code == 1, output
    assert "PASS" not in output
    assert "WRONG" in output
    assert failing <= failed_stages(output) <= ANYTHING, output
    if not op.startswith(("norm_rope", "batched", "indexer")):  # whose results others use
        assert failed_stages(output) == failing, output


def test_a_wrong_selection_is_reported(monkeypatch):
    mutate(monkeypatch, "indexer_topk", takes_the_worst)
    assert "index selection: 2 of 2 rows differ" in serve_only()[1]


def test_a_failure_is_reported(monkeypatch):
    mutate(monkeypatch, "mla_decode", off_in_one_number((1, 1, 50), 1.0))
    _, output = serve_only()
    assert re.search(
        r"decode: \d+ of 16 rows are wrong, worst row \[\d+, 1\]: .* tolerance", output
    )


def test_pages_that_are_not_copied_before_a_write_fail_the_demo(monkeypatch):
    monkeypatch.setattr(PagedLatentCache, "copy_pages", lambda *args, **kwargs: None)
    exit_code, output = serve_only()
    assert exit_code == 1, output
    assert "cached rows" in failed_stages(output)


DOCUMENTED_MUTATIONS = {
    "decode-pages": ("mla_decode", reads_one_page_for_all, FLARE),
    "sparse-sink": ("sparse_mla", with_options(sink=None), SPARSE_PREFILL),
    "append-does-nothing": ("norm_rope_quant_append", does_nothing, APPENDS | PREFILL_FP8),
    "append-gamma": ("norm_rope_quant_append", without_gamma, APPENDS | PREFILL_FP8),
    "prefill-mask": ("mla_prefill", with_options(mask=NULL), PREFILL_FP8),
    "prefill-weight-scales": ("scaled_mm_fp8", with_equal_weight_scales, PREFILL_FP8),
    "prefill-quantiser": ("quantize_fp8", with_options(scale_ub=2.0), PREFILL_FP8),
}


@pytest.mark.usefixtures("_small_batch")
@pytest.mark.parametrize("mutation", DOCUMENTED_MUTATIONS)
def test_a_mutant_fails_the_documented_functions(mutation, monkeypatch):
    op, change, failing = DOCUMENTED_MUTATIONS[mutation]
    mutate(monkeypatch, op, change)
    checks = [call.check for call in documented.all_calls(Progress(disable=True))]
    failed = {check.name for check in checks if not check.passed}
    # a wrong append leaves NaN or other rows for those that follow
    assert failing <= failed <= DOCUMENTED
    if op != "norm_rope_quant_append":
        assert failed == failing


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize("format", FORMATS)
def test_it_passes_on_a_gpu(format):
    exit_code, output = serve_only("--format", format, "--device", "cuda")
    assert exit_code == 0, output


@pytest.mark.usefixtures("_small_batch")
def test_the_documented_functions_run_where_the_demo_does(device):
    calls = documented.all_calls(Progress(disable=True), device)
    assert [call.check.message for call in calls] == [""] * len(calls)


@pytest.mark.usefixtures("_small_batch")
def test_a_wrong_documented_function_fails_the_command(monkeypatch):
    mutate(monkeypatch, "quantize_fp8", with_options(scale_ub=2.0))
    exit_code, output = run_command("--prompt", "2")
    assert exit_code == 1
    assert failed_stages(output) == PREFILL_FP8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "gpt-2"], "unknown model 'gpt-2'; choose from deepseek-v2,"),
        (["--format", "fp7"], "unknown cache format 'fp7'; choose from bf16"),
        (["--device", "tpu"], "unknown device 'tpu'; choose from auto, cpu, cuda"),
        (["--prompt", "1"], "--prompt"),
        (["--tokens", "0"], "--tokens"),
        (["--tokens", "many"], "--tokens"),
        (["--seed", "-1"], "--seed"),
    ],
    ids=str,
)
def test_a_wrong_option_is_a_usage_error_that_explains_itself(arguments, said):
    exit_code, output = run_command(*arguments)
    assert exit_code == 2
    assert said in " ".join(output.replace("│", " ").split())


def test_a_format_that_cannot_hold_the_rows_is_a_usage_error(monkeypatch):
    monkeypatch.setitem(PRESETS, "odd", replace(TINY, kv_lora_rank=130))
    exit_code, output = run_command("--format", "fp8_token", model="odd")
    assert exit_code == 2
    assert "kv_lora_rank must be a multiple of 4" in " ".join(output.split())


def test_help_names_every_format_and_model():
    output = CliRunner().invoke(cli.app, ["demo", "--help"], terminal_width=200).output
    words = re.split(r"[\s,.│]+", re.sub(r"\.(?=\d)", "·", output))
    for name in (*FORMATS, *(name for name in PRESETS if name != "tiny")):
        assert name.replace(".", "·") in words


def only_on_the_cpu(op: str, problem: Problem, backend: str = "auto") -> None:
    if problem.device != "cpu":
        raise UnsupportedError(f"{op}: no kernel for it")


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.usefixtures("cuda")
def test_auto_is_a_gpu_only_where_every_op_has_a_kernel(monkeypatch):
    asked = []
    monkeypatch.setattr(dispatch, "select", lambda op, problem: asked.append((op, problem)))
    assert demo.choose_device("auto", TINY, "fp8").type == "cuda"
    assert {problem.device for _, problem in asked} == {"cuda"}

    monkeypatch.setattr(dispatch, "select", only_on_the_cpu)
    assert demo.choose_device("auto", TINY, "fp8").type == "cpu"
    with pytest.raises(ValueError, match="device cuda: norm_rope_quant_append: no kernel"):
        demo.choose_device("cuda", TINY, "fp8")


def test_a_device_is_asked_for_the_kernels_that_run(monkeypatch):
    select, ops = dispatch.select, []
    monkeypatch.setattr(dispatch, "select", lambda op, *rest: ops.append(op) or select(op, *rest))
    demo.choose_device("cpu", TINY, "fp8")
    asked = set(ops)
    ops.clear()
    served(Settings(prompt=20, tokens=1, format="fp8"))
    assert set(ops) == asked


def test_auto_without_a_gpu_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert demo.choose_device("auto", TINY, "bf16").type == "cpu"
    with pytest.raises(ValueError, match="device cuda: torch sees no CUDA device"):
        demo.choose_device("cuda", TINY, "bf16")


def test_a_backend_that_is_not_there_is_a_usage_error(monkeypatch):
    monkeypatch.setenv("MLAKIT_BACKEND", "hopper")
    exit_code, output = run_command()
    assert exit_code == 2
    assert "backend" in output or "no kernel" in output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_numbers_shown_are_those_of_the_rule(dtype, generator):
    """`assert_matches` fails above the shown tolerance, on a result with one wrong number."""
    exact = torch.randn(50, 96, generator=generator, dtype=torch.float64)
    exact *= torch.logspace(-3, 3, 50, dtype=torch.float64)[:, None]
    naive = exact * (1 + 1e-3 * torch.randn(exact.shape, generator=generator).double())
    tolerance = row_errors(Result(exact.to(dtype), exact, naive))[1]
    for row in range(len(exact)):
        for share in (0.8, 1.25):
            actual = exact.to(dtype)
            actual[row, 5] = exact[row, 5] + share * tolerance[row]
            result = Result(actual, exact, naive)
            error, same_tolerance = row_errors(result)
            within = bool((error <= same_tolerance).all())
            assert within == (share < 1), "rounding moved the result across the tolerance"
            assert check_results("one", result).passed == within
            if within:
                assert_matches("one", *result)


def test_what_is_not_finite_never_passes():
    nan = torch.full((2, 64), torch.nan)
    check = check_results("both", Result(nan, nan.double(), nan))
    assert not check.passed
    assert "oracle is not finite" in check.message


def test_rows_are_checked_in_the_format_they_are_stored_in():
    model, transcript = served(Settings(prompt=20, tokens=1, format="fp8_block128"))
    codec = row_codec("fp8_block128", model.geometry.row)
    stages = demo.checked_stages(transcript, model, codec, Progress(disable=True))
    assert all(stage.check.passed for stage in stages)
    spoiled = [rows.clone() for rows in transcript.rows]
    spoiled[1][7] *= 1.15  # more than e4m3 loses
    wrong = demo.checked_stages(
        replace(transcript, rows=spoiled), model, codec, Progress(disable=True)
    )
    assert not wrong[-1].check.passed
