"""`mlakit demo` passes as it is, and fails as soon as any kernel it runs is wrong."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from mlakit.cache import PagedLatentCache
from mlakit.formats import FORMATS
from mlakit.model.geometry import PRESETS, MLAGeometry, RopeParameters
from mlakit.model.masks import NULL
from mlakit.tools import cli, demo
from mlakit.tools.demo.serving import PAGE_SIZE, Session, Settings, Stage, serve
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


@pytest.fixture(autouse=True)
def _tiny_model(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", TINY)


def run_command(*arguments: str, model: str = "tiny") -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["demo", "--model", model, *SMALL, *arguments])
    return result.exit_code, result.output


def failed_stages(output: str) -> set[str]:
    return set(output.rstrip().splitlines()[-1].removeprefix("FAIL: ").split(", "))


def messages(stages: list[Stage]) -> dict[str, str]:
    return {each.name: each.message for each in stages if each.message}


@pytest.mark.slow
@pytest.mark.parametrize("rope", ["interleaved", "half"])
def test_the_layer_rotates_as_its_model_does(rope):
    stages, session = serve(replace(TINY, rope=rope), Settings(70, 2, "bf16"))
    assert session.layer.rope == rope
    assert messages(stages) == {}


@pytest.mark.slow
def test_it_passes_and_says_so():
    exit_code, output = run_command()
    assert exit_code == 0, output
    assert re.fullmatch(r"PASS: 6 of 6 checks within tolerance \(\d+ s\)", output.splitlines()[-1])
    assert "FAIL" not in output
    assert "WRONG" not in output
    assert max(map(len, output.splitlines())) <= 80


@pytest.mark.slow
def test_stages_have_tokens_times_and_errors():
    stages, _ = serve(TINY, Settings(70, 2))
    tokens = {
        "prefill": 46,
        "prefill on 46 cached": 24,
        "decode": 4,
        "index": 2,
        "sparse": 2,
        "cached rows": 146,
    }
    assert {each.name: each.tokens for each in stages} == tokens
    assert messages(stages) == {}
    for each in stages:
        assert (each.seconds > 0) == (each.name != "cached rows")
        assert 0 < each.error < 0.1


@pytest.mark.slow
def test_it_tells_the_bytes_of_the_cache_and_the_pages():
    output = " ".join(run_command("--format", "fp8_token")[1].split())
    # 128 e4m3 + 32 bf16 + a scale; 64 e4m3 + a scale; in bf16; 4 heads · (96 + 64) halves
    said = "196 bytes per token and layer (fp8_token), and 68 for its index key; 320 in bf16; 1280"
    assert said in output
    assert "Pages: 3 of 64 tokens, 4 without sharing." in output


@pytest.mark.slow
@pytest.mark.parametrize(("prompt", "used", "unshared"), [(90, 3, 4), (128, 4, 6), (126, 5, 6)])
def test_continuations_share_the_pages_of_the_prompt(prompt, used, unshared):
    _, session = serve(TINY, Settings(prompt=prompt, tokens=3))
    held = [page for sequence in session.raw for page in sequence.pages]
    assert (len(set(held)), len(held)) == (used, unshared)
    one, other = (session.rows(session.caches[0], each) for each in session.raw)
    assert torch.equal(one[:prompt], other[:prompt])
    assert not torch.equal(one[prompt:], other[prompt:])


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_every_cache_format_passes(format):
    exit_code, output = run_command("--format", format)
    assert exit_code == 0, output
    assert f"({format})" in output


@pytest.mark.slow
def test_a_model_without_indexer_or_query_latent_passes(monkeypatch):
    plain = replace(TINY, q_lora_rank=None, index_n_heads=0, index_head_dim=0, index_topk=0)
    monkeypatch.setitem(PRESETS, "plain", plain)
    exit_code, output = run_command(model="plain")
    assert exit_code == 0, output
    assert "PASS: 4 of 4 checks" in output
    assert "this model has no indexer" in output


@pytest.mark.slow
def test_prefill_is_checked_on_other_heads_in_each_chunk(monkeypatch):
    checked, step = [], Session.step

    def watched(session: Session, stage: Stage, *args: object, **options: object) -> None:
        checked.append(args[2] if len(args) > 2 else None)
        step(session, stage, *args, **options)

    monkeypatch.setattr(Session, "step", watched)
    stages, _ = serve(TINY.with_heads(40), Settings(70, 1))
    assert messages(stages) == {}
    first, second = (list(range(40))[heads] for heads in checked[:2])
    assert (len(first), len(second)) == (14, 13)
    assert not set(first) & set(second)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["2", "64"])
def test_short_prompts_pass(prompt):
    exit_code, output = run_command("--prompt", prompt, "--tokens", "1")
    assert exit_code == 0, output


@pytest.mark.slow
def test_a_seed_decides_everything():
    rows = []
    for seed in (3, 3, 4):
        _, session = serve(TINY, Settings(prompt=20, tokens=2, seed=seed))
        rows.append(torch.cat([session.rows(session.caches[0], each) for each in session.raw]))
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])


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


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutant_fails_the_demo(mutation, monkeypatch):
    op, change, failing = MUTATIONS[mutation]
    mutate(monkeypatch, op, change)
    exit_code, output = run_command()
    assert exit_code == 1, output
    assert "PASS" not in output
    assert "WRONG" in output
    assert failing <= failed_stages(output) <= ANYTHING, output
    if not op.startswith(("norm_rope", "batched", "indexer")):  # whose results others use
        assert failed_stages(output) == failing, output


@pytest.mark.slow
def test_a_wrong_selection_is_reported(monkeypatch):
    mutate(monkeypatch, "indexer_topk", takes_the_worst)
    assert "index: 2 of 2 rows differ" in run_command()[1]


@pytest.mark.slow
def test_a_failure_is_reported(monkeypatch):
    mutate(monkeypatch, "mla_decode", off_in_one_number((1, 1, 50), 1.0))
    _, output = run_command()
    assert re.search(r"decode: \d+ of 8 rows are wrong, worst row \[1, 1\]: .* tolerance", output)


@pytest.mark.slow
def test_pages_that_are_not_copied_before_a_write_fail_the_demo(monkeypatch):
    monkeypatch.setattr(PagedLatentCache, "copy_pages", lambda *args, **kwargs: None)
    exit_code, output = run_command()
    assert exit_code == 1, output
    assert "cached rows" in failed_stages(output)


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize("format", FORMATS)
def test_it_passes_on_a_gpu(format):
    exit_code, output = run_command("--format", format, "--device", "cuda")
    assert exit_code == 0, output


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


def test_auto_is_a_gpu_if_there_is_one(monkeypatch):
    options = {"prompt": 2, "tokens": 1, "format": "bf16", "seed": 0}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert demo.make_settings(TINY, device="auto", **options).device.type == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert demo.make_settings(TINY, device="auto", **options).device.type == "cpu"
    with pytest.raises(ValueError, match="device cuda: torch sees no CUDA device"):
        demo.make_settings(TINY, device="cuda", **options)


def test_a_backend_that_is_not_there_is_a_usage_error(monkeypatch):
    monkeypatch.setenv("MLAKIT_BACKEND", "hopper")
    exit_code, output = run_command()
    assert exit_code == 2
    assert "device cpu:" in output


def test_what_is_not_finite_never_passes():
    nan = torch.full((2, 64), torch.nan)
    stage = Stage("both")
    stage.check(nan, nan.double(), nan)
    assert "oracle is not finite" in stage.message


@pytest.mark.slow
def test_rows_are_checked_in_the_format_they_are_stored_in():
    _, session = serve(TINY, Settings(prompt=20, tokens=1, format="fp8_block128"))
    layer, sequence = session.caches[0].layer(0), next(iter(session.raw))
    slot = torch.tensor([sequence.pages[0] * PAGE_SIZE + 7])
    layer.write(slot, layer.read(slot) * 1.15)  # more than e4m3 loses
    stage = Stage("cached rows")
    session.check_rows(stage)
    assert "1 of 22 rows are wrong" in stage.message
