"""`mlakit check`: it finds what is wrong, says how to see it again, and stops when it should."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mlakit.dispatch import selection
from mlakit.dispatch.specs import Problem, Use
from mlakit.formats import FORMATS, SPLIT_FORMATS
from mlakit.tools import check, cli
from mlakit.tools.check import KINDS, Settings, random_cases, run
from mlakit.tools.workloads.inputs import DTYPES
from mlakit.tools.workloads.random_cases import MODEL_HEADS, MODEL_ROWS, USUAL_PAGES
from tests.kernel_launchers import Arguments, by_name, replace_launcher


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["check", *arguments])
    return result.exit_code, result.output


def mutate_merge(monkeypatch: pytest.MonkeyPatch, *, from_heads: int) -> None:
    """The CPU kernel of `merge_states` is wrong for so many heads and more."""

    def add_to_lse(a: Arguments) -> None:
        if a["lse"].shape[1] >= from_heads:
            a["lse"].add_(1.0)

    replace_launcher(monkeypatch, "merge_states", by_name(after=add_to_lse), backend="cpu")


@pytest.mark.slow
def test_every_op_is_checked_and_the_table_says_how_often():
    count = 2 * len(selection.OPS)
    code, output = invoke(
        "--count", str(count), "--seed", "1", "--device", "cpu", "--backend", "cpu"
    )
    assert code == 0, output
    assert "cpu, seed 1, " in output
    for op in selection.OPS:
        row = next(line for line in output.splitlines() if line.strip().startswith(op))
        assert row.split() == [op, "cpu", "2", "0"]
    assert output.endswith(f"{count} calls, all results correct.\n")


@pytest.mark.slow
def test_a_miss_prints_a_command_that_misses_again(monkeypatch):
    mutate_merge(monkeypatch, from_heads=12)
    arguments = ("--op", "merge_states", "--device", "cpu", "--backend", "cpu")
    code, output = invoke(*arguments, "--seed", "0", "--count", "50")
    assert code == 1
    assert "merge_states is wrong on cpu, seed " in output
    assert "lse: " in output
    assert "Or: python -c" in output
    (line,) = (line for line in output.splitlines() if line.startswith("Repeat: "))
    command = shlex.split(line.removeprefix("Repeat: "))
    assert command[:2] == ["mlakit", "check"]
    assert command[-4:] == ["--device", "cpu", "--backend", "cpu"]
    again, repeated = invoke(*command[2:], "--json")
    assert again == 1
    failure = json.loads(repeated)["failure"]
    assert (failure["op"], failure["backend"]) == ("merge_states", "cpu")
    assert failure["command"] == line.removeprefix("Repeat: ")
    monkeypatch.undo()  # over there, where nothing is wrong
    assert invoke(*command[2:])[0] == 0


def test_the_command_names_only_what_was_asked_for():
    settings = Settings(("mla_decode",), seed=3)
    assert settings.command("mla_decode", 9) == "mlakit check --op mla_decode --seed 9 --count 1"
    loose = Settings(("mla_decode",), seed=3, device="cuda", any_widths=True)
    assert loose.command("x", 9).endswith("--count 1 --device cuda --any-widths")


@pytest.mark.slow
def test_json():
    arguments = ("--op", "indexer_topk", "--op", "merge_states", "--device", "cpu")
    code, output = invoke(*arguments, "--backend", "cpu", "--count", "4", "--seed", "5", "--json")
    said = json.loads(output)
    assert code == 0
    assert said["checked"] == [
        {"op": op, "backend": "cpu", "correct": 2, "unsupported": 0}
        for op in ("indexer_topk", "merge_states")
    ]
    assert (said["device"], said["seed"], said["failure"]) == ("cpu", 5, None)


def test_time_ends_it(monkeypatch):
    clock = iter(range(0, 1000, 7))
    monkeypatch.setattr(check, "run_case", lambda case, *_: check.CaseResult(case.op, 0.0))
    monkeypatch.setattr(check, "perf_counter", lambda: float(next(clock)))
    seen = []
    settings = Settings(("indexer_topk",), seed=0, device="cpu", backend="cpu", minutes=0.5)
    outcome = check.run(settings, lambda done, seconds: seen.append((done, seconds)))
    assert seen == [(0, 7.0), (1, 14.0), (2, 21.0), (3, 28.0), (4, 35.0)]
    assert (outcome.num_correct, outcome.seconds) == (4, 35.0)


@pytest.mark.parametrize("launches", [None, 7])
def test_processes_share_the_cases(launches):
    settings = Settings(("merge_states",) if launches is None else ("mla_decode",), 3, "cpu")
    settings = replace(settings, minutes=None, first=0 if launches is None else 5, jobs=3)
    settings = replace(settings, count=7 if launches is None else None, launches=launches)
    draw = random_cases if launches is None else check.random_launches
    whole = list(islice(draw(settings), 7))
    shares = [settings.share(job) for job in range(3)]
    drawn = [case for share in shares for case in islice(draw(share), share.limit)]
    assert [share.limit for share in shares] == [3, 2, 2]
    assert sorted(drawn, key=lambda each: each[0]) == whole


def test_a_check_in_processes_counts_all_of_them():
    arguments = ("--op", "merge_states", "--count", "3", "--jobs", "2", "--device", "cpu")
    code, output = invoke(*arguments, "--seed", "1", "--backend", "cpu")
    assert code == 0, output
    assert "3 calls, all results correct." in output


def test_a_check_ends_when_another_process_stops_it():
    asked = iter([False, False, True])
    settings = Settings(("merge_states",), 0, "cpu", "cpu", None, 40)
    assert run(settings, is_stopped=lambda: next(asked)).num_done == 2


def test_a_wrong_result_of_one_process_is_the_outcome(monkeypatch):
    settings = Settings(("merge_states",), 0, "cpu", "cpu", None, 40)
    right = run(settings)
    mutate_merge(monkeypatch, from_heads=2)
    wrong = run(settings)
    together = check._joined(settings, [right, wrong], 1.0)
    assert together.failure == wrong.failure is not None
    assert together.num_done == right.num_done + wrong.num_done
    assert together.num_correct == right.num_correct + wrong.num_correct


@pytest.mark.slow
def test_without_a_seed_a_new_one_is_drawn_and_shown():
    arguments = ("--op", "indexer_topk", "--count", "1", "--device", "cpu", "--json")
    seeds = {json.loads(invoke(*arguments)[1])["seed"] for _ in range(3)}
    assert len(seeds) == 3


@pytest.mark.slow
def test_nothing_checked_is_no_success():
    code, output = invoke(
        "--op", "mla_decode", "--device", "cpu", "--backend", "hopper", "--count", "1"
    )
    assert code == 1
    assert "Nothing was checked: no backend supports these calls on cpu." in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "mla_encode"), "op must be one of norm_rope_quant_append,"),
        (("--device", "tpu"), "device must be one of auto, cpu, cuda, got 'tpu'"),
        (("--minutes", "0"), "minutes must be more than 0, got 0"),
        (("--minutes", "-1"), "minutes must be more than 0, got -1"),
        (
            ("--backend", "cuda"),
            "backend must be one of blackwell, hopper, triton, cpu, got 'cuda'",
        ),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    code, output = invoke(*arguments)
    assert code == 2
    assert message in " ".join(output.replace("│", " ").split())


def test_without_a_gpu_cuda_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, output = invoke("--device", "cuda", "--count", "1")
    assert code == 2
    assert "torch sees none" in output
    assert Settings((), 0).torch_device == "cpu"


def test_the_same_seed_draws_the_same_cases():
    settings = Settings(tuple(KINDS), seed=11)
    count = 4 * len(KINDS)
    drawn = list(islice(random_cases(settings), count))
    assert drawn == list(islice(random_cases(settings), count))
    assert [seed for seed, _ in drawn] == [11 + i // len(KINDS) for i in range(count)]
    later = next(islice(random_cases(Settings(tuple(KINDS), seed=13)), 0, None))
    assert drawn[2 * len(KINDS)] == later
    (alone,) = islice(random_cases(Settings(("mla_decode",), seed=12)), 1)
    assert alone in drawn


def test_some_decodes_are_what_kernels_for_one_architecture_take():
    cases = (case for _, case in islice(random_cases(Settings(("mla_decode",), seed=0)), 200))
    plain = {"q_rope_dtype": "", "q_scaled": False, "flat_table": False, "world": 1}
    plain |= {"deterministic": False, "num_splits": 0, "page_size": 64, "padded": False}
    plain |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_width": 0, "window": 0}
    taken = [case for case in cases if case == replace(case, **plain, dtype=case.format)]
    assert len({case.mask for case in taken}) == len({case.num_ctas > 0 for case in taken}) == 2
    assert {case.format for case in taken} >= {"bf16", "fp16"}


@pytest.mark.slow
def test_widths_are_those_of_models_unless_any_will_do():
    ops = ("mla_decode", "mla_prefill")
    cases = [case for _, case in islice(random_cases(Settings(ops, seed=0)), 200)]
    decoded = cases[::2]
    rows = {(each.kv_lora_rank, each.qk_rope_head_dim, each.v_width) for each in decoded}
    assert rows == set(MODEL_ROWS)
    assert {each.page_size for each in decoded} == set(USUAL_PAGES)
    assert {each.format for each in decoded} == {*FORMATS, *SPLIT_FORMATS}
    widths = {
        (each.qk_nope_head_dim, each.qk_rope_head_dim, each.v_head_dim) for each in cases[1::2]
    }
    assert widths == set(MODEL_HEADS)
    free = [case for _, case in islice(random_cases(Settings(ops, 0, any_widths=True)), 200)]
    assert len({each.kv_lora_rank for each in free[::2]}) > len(MODEL_ROWS)


def assert_checked_every_op(
    checked: list[dict[str, Any]], cases: int, portable: str, backends: Collection[str]
) -> None:
    """So many cases of every op went to each of its backends, and `portable` took all of them."""
    asked = {(row["op"], row["backend"]): row["correct"] + row["unsupported"] for row in checked}
    offered = {(op, name) for op in selection.OPS for name in selection.backends(op)}
    assert asked == {each: cases for each in offered if each[1] in backends}
    taken = {row["op"]: row["correct"] for row in checked if row["backend"] == portable}
    assert taken == dict.fromkeys(selection.OPS, cases)


@pytest.mark.gpu
@pytest.mark.long
def test_every_op_passes_on_the_gpu():
    count = str(2 * len(selection.OPS))
    arguments = ["check", "--device", "cuda", "--seed", "0", "--count", count, "--json"]
    result = CliRunner().invoke(cli.app, arguments)
    said = json.loads(result.stdout)  # progress goes to stderr
    assert result.exit_code == 0, said["failure"]
    assert_checked_every_op(said["checked"], 2, "triton", selection.BACKENDS)


@pytest.mark.parametrize("left_out", [None, "merge_states"])
def test_an_op_that_is_left_out_is_noticed(left_out):
    names = [op for op in selection.OPS if op != left_out]
    ops = [word for op in names for word in ("--op", op)]
    where = ("--device", "cpu", "--backend", "cpu")
    code, output = invoke(*where, "--seed", "0", "--count", str(len(names)), "--json", *ops)
    assert code == 0, output
    with pytest.raises(AssertionError) if left_out else nullcontext():
        assert_checked_every_op(json.loads(output)["checked"], 1, "cpu", ["cpu"])


def test_cases_for_the_hopper_kernel_are_ones_it_takes():
    settings = Settings(("mla_decode",), seed=0, backend="hopper")
    cases = [case for _, case in islice(random_cases(settings), 60)]
    for case in cases:
        problem = Problem(
            "cuda", 90, str(DTYPES[case.dtype]), case.format, case.heads, case.page_size, case.row,
            mask=case.mask, uses=(Use.Q_SCALE,) if case.q_scaled else (),
        )  # fmt: skip
        assert selection.select("mla_decode", problem).backend == "hopper"
        assert not case.padded
        assert case.num_splits == 0
        assert any(case.kv_lens)
    assert {bool(case.num_ctas) for case in cases} == {True, False}
    assert {case.heads > 64 for case in cases} == {True, False}
    scaled = {case.format for case in cases if case.dtype == "e4m3" and case.q_scaled}
    assert scaled == {"fp8", "fp8_token", "fp8_block128"}


@pytest.mark.gpu
@pytest.mark.long
def test_the_hopper_kernel_passes_random_cases():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    outcome = run(Settings(("mla_decode",), seed=7, backend="hopper", minutes=None, count=12))
    assert outcome.failure is None, outcome.failure
    assert outcome.tallies["mla_decode", "hopper"] == (12, 0)
