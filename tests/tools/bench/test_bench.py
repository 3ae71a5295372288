"""The benchmark: its arithmetic, its checks, what it times, what it prints and writes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import pytest
import torch
from typer.testing import CliRunner

from mlakit import reference
from mlakit.cache import request_slots
from mlakit.tools import cli
from mlakit.tools.bench import SUITES, cpu, environment, suite
from mlakit.tools.bench.cpu import WORKLOADS, Decode, Prefill
from mlakit.tools.bench.measure import (
    MAX_ROUNDS,
    MIN_ROUNDS,
    Spread,
    WallClock,
    paired_speedup,
    rounds_within,
    time_interleaved,
)
from mlakit.tools.bench.shapes import Batch
from mlakit.tools.bench.suite import Baseline, BenchmarkCase, Workload
from mlakit.tools.testing import assert_matches
from tests.kernel_launchers import by_name, replace_launcher
from tests.ops.mutations.changes import rescaled

SMALL = list(dict.fromkeys(workload.small for workload in WORKLOADS))


class FakeMachine:
    """Calls of given durations, on a clock that only they move."""

    def __init__(self, **seconds: float) -> None:
        self.now = 0.0
        self.called: list[str] = []
        self.calls = {name: self._call(name, duration) for name, duration in seconds.items()}

    def _call(self, name: str, duration: float):
        def call() -> None:
            self.called.append(name)
            self.now += duration

        return call

    def clock(self) -> float:
        return self.now


def mutate_kernel(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """The CPU kernel of an op scales its scores by 1.02."""
    replace_launcher(monkeypatch, op, by_name(rescaled), backend="cpu")


def test_a_spread_is_three_quantiles():
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0, 0.0]) == Spread(1.0, 2.5, 4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


def test_a_speedup_is_taken_round_by_round():
    # the quotient of the medians is 0.5; in most rounds the baseline was slower
    assert paired_speedup([1.0, 30.0, 20.0], [2.0, 10.0, 100.0]).p50 == pytest.approx(2.0)
    # a machine that slows down tenfold in mid-run changes times, not the speedup
    assert paired_speedup([1.0, 10.0], [4.0, 40.0]) == Spread(4.0, 4.0, 4.0)


def test_a_speedup_needs_equal_rounds():
    with pytest.raises(ValueError, match="zip"):
        paired_speedup([1.0], [1.0, 2.0])


def test_implementations_are_interleaved():
    machine = FakeMachine(a=1.0, b=2.0, c=3.0)
    seconds = time_interleaved(machine.calls, budget_s=60.0, timer=WallClock(machine.clock))
    assert seconds == {"a": [1.0] * 10, "b": [2.0] * 10, "c": [3.0] * 10}
    warm_up, rounds = machine.called[:3], machine.called[3:]
    assert warm_up == ["a", "b", "c"]
    orders = {tuple(rounds[i : i + 3]) for i in range(0, len(rounds), 3)}
    assert all(set(order) == {"a", "b", "c"} for order in orders)
    assert len(orders) > 1


@pytest.mark.parametrize(("seconds", "warm_ups"), [(0.1, 10), (4.0, 4), (100.0, 2)])
def test_warm_ups_of_a_long_call_end_with_the_budget(seconds, warm_ups):
    machine = FakeMachine(a=seconds)
    clock = WallClock(machine.clock)
    clock.warm_ups = 10
    taken = time_interleaved(machine.calls, budget_s=15.0, timer=clock)
    assert len(machine.called) - len(taken["a"]) == warm_ups


def test_one_that_runs_out_of_memory_is_dropped():
    machine = FakeMachine(a=1.0, b=2.0)
    calls, failed = dict(machine.calls), {}

    def late():
        machine.calls["a"]()
        if machine.called.count("a") > 3:
            raise torch.OutOfMemoryError("out of memory\nwhere")

    calls["a"] = late
    clock = WallClock(machine.clock)
    seconds = time_interleaved(calls, budget_s=15.0, timer=clock, out_of_memory=failed)
    assert seconds == {"b": [2.0] * 5}
    assert failed == {"a": "out of memory"}
    assert machine.called.count("a") == 4
    with pytest.raises(torch.OutOfMemoryError):
        time_interleaved(calls, budget_s=15.0, timer=clock)


def test_a_suite_may_have_fewer_rounds_than_fit():
    machine = FakeMachine(a=1.0)
    clock = WallClock(machine.clock)
    seconds = time_interleaved(machine.calls, budget_s=60.0, max_rounds=4, timer=clock)
    assert seconds == {"a": [1.0] * 4}


def test_progress_is_reported_after_every_round():
    machine, seen = FakeMachine(a=1.0), []
    time_interleaved(
        machine.calls,
        budget_s=4.0,
        timer=WallClock(machine.clock),
        after_round=lambda done, rounds: seen.append((done, rounds, len(machine.called))),
    )
    assert seen == [(1, 4, 2), (2, 4, 3), (3, 4, 4), (4, 4, 5)]


@pytest.mark.parametrize(
    ("budget_s", "round_s", "rounds"),
    [
        (10.0, 1.0, 10),
        (10.0, 0.9, 11),
        (10.0, 9.0, MIN_ROUNDS),
        (10.0, 1e-4, MAX_ROUNDS),
        (0.0, 0.0, MIN_ROUNDS),
    ],
)
def test_rounds_follow_the_budget(budget_s, round_s, rounds):
    assert rounds_within(budget_s, round_s) == rounds


@dataclass(frozen=True)
class Stub(Workload):
    """A workload that takes no time: `suite.time_interleaved` is replaced where it is used."""

    op = "stub"
    name = "stub-large"
    flops = 3_000_000
    bytes = 600_000
    min_speedup = 0.64

    @property
    def small(self) -> Workload:
        return Stub()

    def build_case(self) -> BenchmarkCase:
        baselines = [
            Baseline("slow", str),
            Baseline("fast", str),
            Baseline("other", str, sets_target=False),
            Baseline("too slow", str, sets_target=False),
        ]
        return BenchmarkCase(str, baselines, check=lambda: None)


@pytest.fixture
def stub_times(monkeypatch) -> dict[str, list[float]]:
    times = {
        "mlakit": [3e-3, 3e-3, 6e-3],
        "slow": [4e-3, 4e-3, 4e-3],
        "fast": [2e-3, 2e-3, 2e-3],
        "other": [1e-3, 1e-3, 1e-3],
        "too slow": [1e-2, 1.1e-2, 1e-2],
    }
    monkeypatch.setattr(
        suite, "time_interleaved", lambda calls, **_: {name: times[name] for name in calls}
    )
    return times


@pytest.mark.slow
def test_the_target_refers_to_the_fastest_baseline_that_sets_one(stub_times):
    report = suite.run("stub", [Stub()], command="")
    targets = {row.implementation: row.min_speedup for row in report.rows}
    assert targets == {"mlakit": None, "slow": None, "fast": 0.64, "other": None, "too slow": None}


def test_rows_hold_times_speedups_and_rates(stub_times):
    report = suite.run("stub", [Stub()], command="")
    ours, slow = report.rows[:2]
    assert (ours.implementation, ours.us.p50, ours.rounds) == ("mlakit", 3000.0, 3)
    assert ours.speedup is None
    assert ours.gflops == pytest.approx(1.0)
    assert slow.speedup.p50 == pytest.approx(4 / 3)
    assert slow.speedup.p20 == pytest.approx(2 / 3 + 0.4 * 2 / 3)


def test_a_baseline_that_is_too_slow_is_left_out_and_named(stub_times, capsys):
    stub_times["too slow"] = [9.0, 1.7e-2, 1.8e-2]
    stub_times["slow"] = [9.0] * 3  # but it sets the target
    report = suite.run("stub", [Stub()], command="")
    assert [row.implementation for row in report.rows] == ["mlakit", "slow", "fast", "other"]
    (left_out,) = report.left_out
    assert left_out.reason == "17x slower than other on stub-large"
    assert "stub-large: too slow not timed, 17x slower than other" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "said"), [(3.1e-3, "≥ 0.64x"), (3.3e-3, "below 0.64x")])
def test_the_table_says_whether_the_target_is_met(stub_times, capsys, seconds, said):
    stub_times["mlakit"] = [seconds] * 3
    suite.run("stub", [Stub()], command="")
    lines = capsys.readouterr().out.splitlines()
    assert [line.strip().endswith(said) for line in lines if "fast " in line] == [True]


def test_flops_count_the_keys_that_are_seen():
    assert Prefill(Batch.of(2, 50, 50), 3).flops == 2 * 3 * (2 * 50**2 // 2) * (192 + 128)
    assert Decode(Batch.of(2, 1, 7), 3).flops == 2 * (2 * 3 * 7) * (576 + 512)


@pytest.mark.slow
@pytest.mark.parametrize("workload", SMALL, ids=lambda each: each.name)
def test_a_wrong_kernel_does_not_pass_the_check(workload, monkeypatch):
    case = workload.build_case()
    case.check()
    mutate_kernel(monkeypatch, workload.op)
    with pytest.raises(AssertionError, match="exceeds its tolerance"):
        case.check()


@pytest.mark.slow
@pytest.mark.parametrize("row", [0, -1])
def test_the_prefill_check_sees_one_wrong_row(row, monkeypatch):
    case = Prefill(Batch.of(2, 300, 300), 2, dtype=torch.float32).build_case()
    zero_row = by_name(after=lambda a: a["out"][row].zero_())
    replace_launcher(monkeypatch, "mla_prefill", zero_row, backend="cpu")
    with pytest.raises(AssertionError, match=r"^out of token (0|599)"):
        case.check()


@pytest.fixture
def op_calls(monkeypatch):
    """The arguments of each call of an op."""
    calls = []

    def noted(op):
        def call(*args, **kwargs):
            calls.append(args)
            return op(*args, **kwargs)

        return call

    for name in ("mla_decode", "mla_prefill"):
        monkeypatch.setattr(cpu, name, noted(getattr(cpu, name)))
    return calls


def test_the_matmul_baselines_compute_the_attention(op_calls):
    batch, tokens = 3, 70
    case = Decode(Batch.of(batch, 1, tokens), 2, "fp32", dtype=torch.float32).build_case()
    case.call()
    ((q, cache, page_table, _),) = op_calls
    slots = [request_slots(page_table, 64, request, 0, tokens) for request in range(batch)]
    k = torch.stack([cache.layer(0).read(own, torch.float64) for own in slots])

    def attention(dtype):
        scores = q.to(dtype) @ k.to(dtype).mT
        return scores, torch.softmax(scores * cpu.SCALE, -1) @ k[..., :512].to(dtype)

    exact, naive = attention(torch.float64), attention(torch.float32)
    batched, keys_first, by_request = (each.call() for each in case.baselines)
    stacked = tuple(torch.stack(each) for each in zip(*by_request, strict=True))
    for scores, values in (batched, (keys_first[0].mT, keys_first[1]), stacked):
        assert_matches("scores", scores, exact[0], naive[0])
        assert_matches("values", values, exact[1], naive[1])


@pytest.mark.slow
def test_the_sdpa_baselines_compute_the_attention(op_calls):
    batch, tokens, heads = 2, 40, 3
    case = Prefill(Batch.of(batch, tokens, tokens), heads, dtype=torch.float32).build_case()
    case.call()
    ((*inputs, q_starts, kv_starts),) = op_calls
    exact, naive = (
        reference.mla_prefill(
            *inputs, q_starts.tolist(), kv_starts.tolist(), softmax_scale=cpu.SCALE, dtype=dtype
        )[0]
        for dtype in (torch.float64, torch.float32)
    )
    plain, padded = (each.call().transpose(1, 2).flatten(0, 1) for each in case.baselines)
    assert padded.shape[-1] == 192
    for name, out in (("plain", plain), ("padded", padded[..., :128])):
        assert_matches(name, out, exact, naive)


def test_decode_is_timed_on_shuffled_pages(monkeypatch):
    tables = []
    note = by_name(lambda a: tables.append(a["page_table"]) or {})
    replace_launcher(monkeypatch, "mla_decode", note, backend="cpu")
    Decode(Batch.of(2, 1, 640), 1, "fp32", dtype=torch.float32).build_case().call()
    assert sorted(tables[0].flatten().tolist()) == list(range(20))
    assert tables[0].flatten().tolist() != list(range(20))


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    """One quick run: (result of the command, what it wrote, threads of torch afterwards)."""
    file = tmp_path_factory.mktemp("bench") / "cpu.json"
    arguments = ["bench", "cpu", "--quick", "--threads", "1", "--json", str(file)]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        result = CliRunner().invoke(cli.app, arguments)
        threads = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
    return result, json.loads(file.read_text(encoding="utf-8")), threads


@pytest.mark.slow
def test_the_threads_are_given_back(quick_run):
    assert quick_run[2] == 2


@pytest.mark.slow
def test_a_red_gate_ends_the_command_with_status_1(monkeypatch, tmp_path):
    mutate_kernel(monkeypatch, "mla_decode")
    file = tmp_path / "cpu.json"
    result = CliRunner().invoke(cli.app, ["bench", "cpu", "--quick", "--json", str(file)])
    assert result.exit_code == 1
    assert f"{SMALL[0].name} is wrong: out of request 0:" in result.output
    assert "speedup" not in result.output
    assert not file.exists()


@pytest.mark.slow
def test_a_json_file_that_cannot_be_written_is_found_before_the_run(tmp_path):
    arguments = ["bench", "cpu", "--json", str(tmp_path / "nowhere" / "cpu.json")]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 2
    # the message is folded into a box, and the path with it
    assert "nowhere" in re.sub(r"[│\s]", "", result.output)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_suite_for_gpus_says_that_it_needs_one():
    result = CliRunner().invoke(cli.app, ["bench", "decode"])
    assert result.exit_code == 2
    assert "suite decode needs a CUDA device" in re.sub(r"[│\s]+", " ", result.output)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in SUITES if name != "cpu"])
def test_a_suite_for_gpus_runs(name, tmp_path):
    file = tmp_path / "figures.json"
    result = CliRunner().invoke(cli.app, ["bench", name, "--quick", "--json", str(file)])
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert {row["implementation"] for row in rows} >= {"mlakit"}
    assert all(row["p50_us"] > 0 and row["gbytes_per_s"] > 0 for row in rows)


X86 = "processor\t: 0\nmodel name\t: Intel(R) Xeon(R)\nflags\t\t: fpu avx2 amx_bf16 avx512f\n"
ARM = "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd asimdhp\nCPU part\t: 0xd0c\n"


def test_the_processor_is_named():
    assert environment.cpu_model(X86) == "Intel(R) Xeon(R)"
    assert environment.cpu_model(ARM) is None
    assert environment.cpu_features(X86) == ["avx2", "avx512f", "amx_bf16"]
    assert environment.cpu_features(ARM) == ["asimd", "asimdhp"]
    assert environment.cpu_features("") == []
    assert environment.describe()["cpu"]
