"""`mlakit check --launches`: it kills mutants, and any launch can be made again by itself."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mlakit.dispatch import selection
from mlakit.dispatch.specs import pretending
from mlakit.kernels.triton.configs import pick_topk_config, power_of_two
from mlakit.tools import check, cli
from mlakit.tools.check import Settings, random_launches, run, with_kernel
from mlakit.tools.testing import NEVER_A_PAGE
from mlakit.tools.workloads import BatchedCase, DecodeCase, PrefillCase, SparseCase
from mlakit.tools.workloads.random_launches import (
    FOR_HOPPER,
    INDEXER_CONFIGURATIONS,
    LAUNCHES,
    PREFILL_CONFIGURATIONS,
    SPARSE_FOR_HOPPER,
    kernel_of,
)
from tests.kernel_launchers import by_name, replace_launcher
from tests.mutations import Mutation, of_kernel
from tests.ops.mutations.changes import (
    After,
    Before,
    keyless,
    rescaled,
    unmasked,
    with_a_stray_write,
    with_ties_reversed,
    without,
)

DECODE = ("--op", "mla_decode")
CPU = ("--device", "cpu", "--backend", "cpu")
ON_CPU = {"device": "cpu", "backend": "cpu", "minutes": None}


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["check", *arguments])
    return result.exit_code, result.output


def change_decode(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Change the arguments of decode kernels `before` they run, or their results `after`."""
    replace_launcher(monkeypatch, "mla_decode", by_name(**changes))


# --- the inputs ---------------------------------------------------------------------------------


# keys 125 to 129 of the first request; the second has no query, the third no key
SEEN_KEYS = {
    "kv_lens": (130, 70, 0),
    "q_lens": (1, 0, 2),
    "mask": "sliding_window_causal",
    "window": 5,
}


@pytest.mark.slow
def test_a_launch_is_poison_and_garbage_wherever_nothing_is_seen(monkeypatch):
    seen: list[dict[str, Any]] = []
    change_decode(monkeypatch, before=lambda a: seen.append(dict(a)) or {})
    DecodeCase(**SEEN_KEYS, oracle="batched", page_size=64, kv_lora_rank=512, num_layers=2).run(
        "cpu", "cpu"
    )
    (call,) = seen
    payload, table = call["layer"].payload, call["page_table"]
    assert int((~payload.isnan().any(-1)).sum()) == 5
    used = (table >= 0) & (table < len(payload))
    pages = table[0, 1:3]
    assert not payload[pages[0], 61:].isnan().any()
    assert not payload[pages[1], :2].isnan().any()
    looked_up = torch.zeros_like(used)
    looked_up[0, 1:3] = True
    garbage = {NEVER_A_PAGE, -1, call["layer"].num_slots, 0}
    assert set(table[~looked_up].tolist()) <= garbage


def test_keys_that_no_query_sees_are_poison(monkeypatch):
    seen: list[dict[str, Any]] = []
    replace_launcher(
        monkeypatch, "mla_prefill", by_name(before=lambda a: seen.append(dict(a)) or {})
    )
    PrefillCase(**SEEN_KEYS, oracle="batched").run("cpu", "cpu")
    (call,) = seen
    for name in ("k_nope", "k_rope", "v"):
        finite = ~call[name].flatten(1).isnan().any(1)
        assert finite.nonzero().flatten().tolist() == [125, 126, 127, 128, 129]


@pytest.mark.parametrize("wrong_call", [1, 2, 3])
def test_several_calls_give_the_same_bits(monkeypatch, wrong_call):
    calls: list[bool] = []

    def wrong_once(a: dict[str, Any]) -> None:
        calls.append(bool(a["out"].isnan().any()))
        if len(calls) == wrong_call:
            a["out"][0, 0, 0] += 2.0**-12  # within the tolerance

    change_decode(monkeypatch, after=wrong_once)
    differing = max(wrong_call, 2)
    with pytest.raises(AssertionError, match=f"out of call {differing}: "):
        DecodeCase(oracle="batched", given_results=True, calls=3, dtype="fp32", format="fp32").run(
            "cpu", "cpu"
        )
    assert calls == [False] * differing


def test_the_last_of_several_calls_is_compared(monkeypatch):
    def wrong_each_time(a: dict[str, Any]) -> None:
        a["out"][0, 0, 0] = torch.nan

    change_decode(monkeypatch, after=wrong_each_time)
    with pytest.raises(AssertionError, match="NaN pattern"):
        DecodeCase(oracle="batched", calls=3).run("cpu", "cpu")


# --- what is found ------------------------------------------------------------------------------


def with_one_element_off(a: dict[str, Any]) -> None:
    if 65 in a["kv_lens"].tolist():
        a["out"][-1, -1, -1] += 0.1


def with_one_logit_off(a: dict[str, Any]) -> None:
    if 65 in a["kv_lens"].tolist():
        a["out"][-1, 0] += 0.01


def with_one_prefill_element_off(a: dict[str, Any]) -> None:
    if 64 in a["kv_starts"].diff().tolist():
        a["out"][-1, -1, -1] += 0.1


def every_launch_is_right(op: str = "mla_decode") -> None:
    outcome = run(Settings((op,), seed=0, launches=100, **ON_CPU))
    if outcome.failure is None:
        return
    assert outcome.num_done == outcome.failure.launch + 1
    raise AssertionError(outcome.failure.error)


def other_mutation(
    op: str, name: str, before: Before = lambda a: {}, after: After = lambda a: None
) -> Mutation:
    return of_kernel(op, name, by_name(before, after), partial(every_launch_is_right, op))


def mutation(name: str, before: Before = lambda a: {}, after: After = lambda a: None) -> Mutation:
    return of_kernel("mla_decode", name, by_name(before, after), every_launch_is_right)


logits_mutation = partial(other_mutation, "indexer_logits")
prefill_mutation = partial(other_mutation, "mla_prefill")
MUTATIONS = [
    mutation("drops the last key", keyless),
    mutation("reads past the end", lambda a: {"kv_lens": a["kv_lens"] + 1}),
    mutation("scales scores by 1.02", rescaled),
    mutation("ignores the sign of the scale", lambda a: {"softmax_scale": abs(a["softmax_scale"])}),
    mutation("does not mask the tail", unmasked),
    mutation("ignores the sink", without("sink")),
    mutation("ignores q_scale", without("q_scale")),
    mutation("is off in one element where a request has 65 keys", after=with_one_element_off),
    mutation("leaves a row unwritten", after=lambda a: a["out"][-1:].fill_(torch.nan)),
    mutation("adds to lse", after=lambda a: a["lse"].add_(1e-3)),
    mutation("writes to the cache", after=with_a_stray_write),
    other_mutation("indexer_topk", "ignores row_ends", without("row_ends")),
    other_mutation("indexer_topk", "prefers the later of equals", after=with_ties_reversed),
    other_mutation("indexer_topk", "drops a column", after=lambda a: a["out"][:, -1:].fill_(-1)),
    other_mutation(
        "indexer_topk", "selects -inf", lambda a: {"logits": a["logits"].clamp_min(-1e38)}
    ),
    other_mutation("indexer_select", "takes a block for the first", lambda a: {"first_token": 0}),
    other_mutation("indexer_select", "drops a row", after=lambda a: a["out"][:, -1:].fill_(-1)),
    other_mutation("indexer_select", "sees few keys", lambda a: {"logits": a["logits"][:, :5]}),
    logits_mutation("drops the last key", keyless),
    logits_mutation("does not mask the tail", unmasked),
    logits_mutation("scales weights by 1.02", lambda a: {"weights": a["weights"] * 1.02}),
    logits_mutation("is off in one logit where a request has 65 keys", after=with_one_logit_off),
    logits_mutation("leaves a row unwritten", after=lambda a: a["out"][-1:].fill_(torch.nan)),
    logits_mutation(
        "leaves the last column unwritten", after=lambda a: a["out"][:, -1:].fill_(0.0)
    ),
    logits_mutation("writes to the cache", after=with_a_stray_write),
    prefill_mutation("takes the key before", lambda a: {"k_nope": a["k_nope"].roll(1, 0)}),
    prefill_mutation("scales scores by 1.02", rescaled),
    prefill_mutation(
        "ignores the sign of the scale", lambda a: {"softmax_scale": abs(a["softmax_scale"])}
    ),
    prefill_mutation("does not mask", unmasked),
    prefill_mutation("ignores the sink", without("sink")),
    prefill_mutation("ignores k_rope", lambda a: {"k_rope": torch.zeros_like(a["k_rope"])}),
    prefill_mutation(
        "is off in one element where a request has 64 keys", after=with_one_prefill_element_off
    ),
    prefill_mutation("leaves a row unwritten", after=lambda a: a["out"][-1:].fill_(torch.nan)),
    prefill_mutation("adds to lse", after=lambda a: a["lse"].add_(1e-3)),
    prefill_mutation("writes to v", after=lambda a: a["v"][:1].fill_(0.0)),
]


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_mutant_is_killed_within_a_hundred_launches(mutation, monkeypatch):
    mutation.assert_killed(monkeypatch)


@pytest.mark.slow
def test_a_miss_prints_a_command_that_makes_that_launch_again(monkeypatch):
    change_decode(monkeypatch, after=with_one_element_off)
    code, output = invoke(*DECODE, "--seed", "2", "--launches", "100", *CPU)
    assert code == 1
    assert "mla_decode is wrong on cpu, seed 2, launch " in output
    assert output.splitlines()[-1].endswith(", 1 failure.")
    (line,) = (line for line in output.splitlines() if line.startswith("Repeat: "))
    command = shlex.split(line.removeprefix("Repeat: "))
    again, repeated = invoke(*command[2:], "--json")
    said = json.loads(repeated)
    assert (again, said["launches"], said["seed"]) == (1, 1, 2)
    failure = said["failure"]
    assert f"launch {failure['launch']}:\n{failure['error']}" in output
    assert failure["python"] in output
    assert failure["command"] == shlex.join(command)
    assert failure["launch"] == said["first"] == int(command[command.index("--first") + 1])
    assert "from mlakit.tools.workloads import DecodeCase" in failure["python"]
    monkeypatch.undo()
    assert invoke(*command[2:])[0] == 0


@pytest.mark.parametrize("result", ["out", "lse", "max_logits"])
def test_a_wrong_result_of_sparse_attention_is_noticed(monkeypatch, result):
    launch = SparseCase(
        oracle="batched", num_tokens=3, topk=70, heads=2, extra_format="bf16", with_lens=False
    )
    launch.run("cpu", "cpu")
    spoilt = by_name(after=lambda a: a[result][-1, -1].mul_(1.02))
    replace_launcher(monkeypatch, "sparse_mla", spoilt)
    with pytest.raises(AssertionError, match=f"{result}: "):
        launch.run("cpu", "cpu")


# --- what is drawn ------------------------------------------------------------------------------


def drawn(
    backend: str, number: int, first: int = 0, place: str = "cpu", op: str = "mla_decode"
) -> list[Any]:
    settings = Settings((op,), 5, place, backend, launches=1, first=first)
    return [launch for _, launch in islice(random_launches(settings), number)]


def test_a_launch_depends_on_its_seed_and_number_only():
    launches = drawn("", 20)
    assert launches[7:] == drawn("", 13, first=7)
    other = Settings(("mla_decode",), 6, "cpu", launches=1)
    assert next(random_launches(other))[1] != launches[0]


@pytest.mark.slow
def test_lengths_are_those_where_kernels_go_wrong():
    launches = drawn("hopper", 400, place="cuda")
    lengths = {kv_len for launch in launches for kv_len in launch.kv_lens}
    assert lengths >= {0, 1, 63, 64, 65, 128}
    assert max(lengths) > 3000
    q_lens = {launch.q_lens for launch in launches}
    assert {0, 2, 4} <= {q_len for each in q_lens for q_len in each}
    assert all(any(each) for each in q_lens)
    # padded to its longest request, a batch stays small enough for milliseconds
    assert max(max(each.kv_lens) * len(each.kv_lens) for each in launches) <= 12_000
    assert {each.heads for each in launches} >= {1, 8, 9, 16, 17, 32, 33, 64, 97, 128}
    assert {each.fixed_split > 0 for each in launches} == {True, False}
    assert {each.num_ctas > 0 for each in launches} == {True, False}


@pytest.mark.slow
def test_few_kernels_are_compiled_for_launches_of_the_hopper_kernel():
    launches = drawn("hopper", 1600, place="cuda")
    compiled = {
        (
            each.format, each.dtype, each.page_size, each.mask, each.sharpness < 0, bool(each.sink),
            each.kv_lora_rank, each.q_rope_dtype, each.q_scaled,
            max(8, 2 ** (each.heads - 1).bit_length()), each.num_ctas > 0,
            # which kernel, where there are two
            each.spare_pages > 0 and each.heads > 32 and each.format != "fp8_block128",
        )
        for each in launches
    }  # fmt: skip
    has_two = [
        each["heads"][0] > 32 and each.get("format") != "fp8_block128" for each in FOR_HOPPER
    ]
    assert len(compiled) == 2 * (len(FOR_HOPPER) + sum(has_two))
    assert {each.q_scaled for each in launches if each.dtype == "e4m3"} == {True, False}
    for each in launches:
        assert each == replace(each, padded=False, wide_indices=False, num_splits=0)


def test_few_kernels_are_compiled_for_launches_of_the_topk_kernel():
    settings = Settings(("indexer_topk",), 0, device="cuda", backend="triton", launches=1)
    kernels = set()
    for _, launch in islice(random_launches(settings), 400):
        rows, columns, k = launch.num_tokens, launch.num_columns, launch.k
        config = pick_topk_config(rows=rows, columns=columns, k=k, num_sms=132)
        lists = power_of_two(config.splits * config.num_warps)
        bounds = (launch.with_starts, launch.with_ends)
        strides = (launch.padded, columns % 16 == 0, k % 16 == 0, k == 1)
        options = (config.block, config.step, config.sample, config.num_warps)
        kernels.add((config.method, config.splits > 1, lists, options, bounds, strides))
    assert {kernel[0] for kernel in kernels} == {"whole", "narrow", "reread"}
    assert {kernel[1] for kernel in kernels} == {True, False}
    assert len(kernels) <= 12


def test_other_backends_are_given_more_formats_masks_and_splits():
    launches = drawn("", 200)
    assert {each.format for each in launches} >= {"bf16", "fp16", "fp8_block128", "fp8_token"}
    assert "sliding_window_causal" in {each.mask for each in launches}
    assert {each.num_splits > 0 for each in launches} == {True, False}


def test_launches_of_the_indexer_are_those_where_kernels_go_wrong():
    launches = drawn("hopper", 600, place="cuda", op="indexer_logits")
    lengths = {kv_len for launch in launches for kv_len in launch.kv_lens}
    assert lengths >= {0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257}
    assert max(lengths) > 3000
    assert {0, 1, 2, 3, 4, 8, 9, 30} == {n for launch in launches for n in launch.q_lens}
    assert {len(launch.kv_lens) for launch in launches} >= {1, 2, 32}
    pairs = (max(each.kv_lens) * len(each.kv_lens) * max(each.q_lens) for each in launches)
    assert max(pairs) <= 48_000
    # a batch of one token block, and batches in which a request has more queries than keys
    assert any(len(each.kv_lens) == 1 and each.q_lens[0] <= 4 for each in launches)
    assert any(
        kv_len < q_len
        for each in launches
        for kv_len, q_len in zip(each.kv_lens, each.q_lens, strict=True)
    )


def test_few_kernels_are_compiled_for_launches_of_the_indexer():
    launches = drawn("hopper", 600, place="cuda", op="indexer_logits")
    compiled = {(each.heads, each.page_size, each.mask, each.window) for each in launches}
    assert len(compiled) <= len(INDEXER_CONFIGURATIONS)


def test_lengths_of_prefill_are_those_where_the_kernel_goes_wrong():
    launches = drawn("hopper", 400, place="cuda", op="mla_prefill")
    q_lens = {length for launch in launches for length in launch.q_lens}
    kv_lens = {length for launch in launches for length in launch.kv_lens}
    assert q_lens >= {0, 1, 63, 64, 65, 127, 128, 129, 256}
    assert kv_lens >= {0, 1, 64, 127, 128, 129}
    assert max(kv_lens) > 1500
    # one block of keys at most: the unmasked main loop is empty
    assert any(0 < max(launch.kv_lens) <= 64 for launch in launches)
    pairs = [
        pair for launch in launches for pair in zip(launch.q_lens, launch.kv_lens, strict=True)
    ]
    assert any(q_len > kv_len for q_len, kv_len in pairs)
    assert any(q_len < kv_len for q_len, kv_len in pairs)
    assert {launch.padded for launch in launches} == {True, False}


def test_few_kernels_are_compiled_for_launches_of_prefill():
    launches = drawn("hopper", 400, place="cuda", op="mla_prefill")
    compiled = {
        (
            each.qk_nope_head_dim, each.qk_rope_head_dim, each.v_head_dim, each.dtype, each.mask,
            bool(each.sink), each.sharpness < 0,
        )
        for each in launches
    }  # fmt: skip
    assert len(compiled) == len(PREFILL_CONFIGURATIONS)


def test_lists_are_those_where_kernels_go_wrong():
    launches = drawn("hopper", 400, place="cuda", op="sparse_mla")
    assert {each.topk for each in launches} >= {1, 63, 64, 65, 127, 128, 129}
    assert max(each.topk for each in launches) > 1500
    assert {each.heads for each in launches} >= {16, 64, 128}
    assert {min(each.num_splits, 2) for each in launches} == {0, 1, 2}
    assert max(each.num_tokens for each in launches) > 132


def test_few_kernels_are_compiled_for_launches_of_sparse_attention():
    launches = drawn("hopper", 400, place="cuda", op="sparse_mla")
    assert all(each.extra_format in ("", each.format) for each in launches)
    compiled = {
        replace(
            each, seed=0, calls=1, num_tokens=1, topk=1, extra_topk=1, num_splits=0, num_pages=1,
            heads=1, num_layers=1, given_results=False, sharpness=each.sharpness < 0,
        )
        for each in launches
    }  # fmt: skip
    assert len(compiled) == len(SPARSE_FOR_HOPPER)


# --- launches of one kernel ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("op", ["mla_decode", "sparse_mla"])
def test_every_kernel_with_a_name_is_selected_for_some_launches(op):
    names = {spec.kernel for spec in selection.specs(op) if spec.backend == "hopper"}
    launches = map(small, drawn("hopper", 60, place="cuda", op=op))
    with pretending(90, 132):
        selected = {kernel_of(each, "cpu", "hopper") for each in launches}
    assert selected == names


def small(launch: DecodeCase | SparseCase) -> BatchedCase:
    """A launch in a part of its memory."""
    if isinstance(launch, DecodeCase):
        return replace(launch, kv_lens=tuple(min(each, 65) for each in launch.kv_lens))
    return replace(launch, topk=min(launch.topk, 65), extra_topk=1, num_tokens=2)


@pytest.mark.slow
def test_launches_are_those_that_dispatch_gives_to_a_kernel(monkeypatch):
    monkeypatch.setattr(Settings, "torch_device", "cpu")
    settings = with_kernel(Settings(("mla_decode",), 0, launches=8, kernel="small_m_fp8_kv"))
    assert settings.backend == "hopper"
    with pretending(90, 132):
        launches = list(islice(random_launches(settings), 8))
    numbers = [number for number, _ in launches]
    assert numbers == sorted(numbers) != list(range(8))
    assert all(each.format.startswith("fp8") for _, each in launches)
    assert "--kernel small_m_fp8_kv" in settings.command("mla_decode", numbers[0])
    every = dict(random_launches_of(replace(settings, kernel=""), numbers[-1] + 1))
    assert [every[number] for number in numbers] == [each for _, each in launches]


def random_launches_of(settings: Settings, number: int) -> list[tuple[int, BatchedCase]]:
    return list(islice(random_launches(settings), number))


@pytest.mark.slow
def test_a_kernel_that_no_launch_reaches_ends_the_check(monkeypatch):
    monkeypatch.setattr(check, "MAX_MISSES", 20)
    arguments = ("--launches", "2", "--kernel", "m64_bf16", "--op", "mla_decode", "--device", "cpu")
    code, output = invoke(*arguments)
    assert code == 1
    assert output.splitlines()[-1].startswith("Nothing was checked")


def test_a_launch_whose_kernel_is_asked_for_does_not_run(monkeypatch):
    calls: list[int] = []
    change_decode(monkeypatch, before=lambda a: calls.append(1) or {})
    assert kernel_of(DecodeCase(), "cpu", "cpu") == ""
    assert calls == []
    DecodeCase().run("cpu", "cpu")
    assert calls == [1]


# --- the command --------------------------------------------------------------------------------


@pytest.mark.slow
def test_launches_are_counted_in_json_and_in_words():
    arguments = (*DECODE, "--launches", "3", "--seed", "4", *CPU)
    code, output = invoke(*arguments, "--first", "10", "--json")
    said = json.loads(output)
    assert (code, said["launches"], said["first"], said["seed"]) == (0, 3, 10, 4)
    assert said["checked"] == [
        {"op": "mla_decode", "backend": "cpu", "correct": 3, "unsupported": 0}
    ]
    assert said["failure"] is None
    code, output = invoke(*arguments)
    assert code == 0
    last = output.splitlines()[-1]
    assert last.startswith("3 launches of seed 4 in ")
    assert last.endswith(" s, no failure.")


@pytest.mark.slow
def test_calls_of_each_launch_are_made_and_named(monkeypatch):
    arguments = (*DECODE, "--launches", "1", "--seed", "4", *CPU)
    made: list[int] = []

    def wrong_at_last(a: dict[str, Any]) -> None:
        made.append(1)
        if len(made) == 7:
            a["out"][...] = 7.0

    change_decode(monkeypatch, after=wrong_at_last)
    code, output = invoke(*arguments, "--calls", "7")
    assert (code, len(made)) == (1, 7)
    assert "out of call 7: " in output
    assert "--first 0 --calls 7" in " ".join(output.split())


@pytest.mark.slow
def test_launches_that_no_backend_takes_are_no_success():
    code, output = invoke("--launches", "2", "--device", "cpu", "--backend", "hopper")
    assert code == 1
    assert output.splitlines()[-1].startswith("Nothing was checked")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--first", "3"), "first needs launches"),
        (("--calls", "3"), "calls needs launches"),
        (("--record", "file"), "record needs launches"),
        (("--launches", "2", "--count", "2"), "count has no effect"),
        (("--kernel", "m64_bf16"), "kernel needs launches"),
        (("--launches", "2", "--kernel", "m65"), "small_m_bf16, small_m_fp8_kv,"),
        (("--launches", "2", "--any-widths"), "any_widths has no effect"),
        (("--launches", "2", "--op", "merge_states"), "launches support only mla_decode,"),
    ],
)
def test_what_does_not_go_together_is_said(arguments, message):
    code, output = invoke(*arguments)
    assert code == 2
    assert message in " ".join(output.replace("│", " ").split())


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("op", LAUNCHES)
def test_launches_pass_on_the_gpu(op, backend):
    if backend not in selection.backends(op):
        pytest.skip(f"{backend} has no kernel of {op}")
    settings = Settings((op,), 0, device="cuda", backend=backend, minutes=None, launches=20)
    outcome = run(settings)
    assert outcome.failure is None, outcome.failure
    assert outcome.num_correct >= 10


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_many_calls_give_the_same_bits_on_the_gpu(seed):
    """Many calls find an error that occurs in few of them."""
    settings = Settings(
        ("mla_decode",), 100 + seed, device="cuda", minutes=None, launches=4, calls=60
    )
    outcome = run(settings)
    assert outcome.failure is None, outcome.failure
    assert outcome.num_correct >= 4
