"""A GPU's clocks, its ceilings and the progress bars, with a GPU that only counts."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from mlakit.tools.bench import ceilings, gpu_timers
from mlakit.tools.bench.measure import WallClock, time_interleaved
from mlakit.tools.bench.progress import suite_progress


class FakeGpu:
    """Host and device each have a clock; a call takes time of both, the device waits for launches.

    ms_host, ms_device  of a call
    """

    def __init__(self, monkeypatch, *, ms_host: float, ms_device: float) -> None:
        self.host = self.device = 0.0
        self.sleeps: list[float] = []
        self.flushes = self.calls = 0
        self.ms_host, self.ms_device = ms_host, ms_device
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                gpu.device = max(gpu.device, gpu.host)
                self.at = gpu.device

            def synchronize(self) -> None:
                gpu.host = max(gpu.host, gpu.device)

            def elapsed_time(self, end) -> float:
                return end.at - self.at

        fake = SimpleNamespace(
            Event=Event,
            _sleep=self.sleep,
            synchronize=lambda: setattr(gpu, "host", max(gpu.host, gpu.device)),
        )
        monkeypatch.setattr(gpu_timers.torch, "cuda", fake)
        monkeypatch.setattr(gpu_timers, "perf_counter", lambda: gpu.host / 1e3)
        monkeypatch.setattr(gpu_timers.torch, "ones", lambda *_, **__: None)
        monkeypatch.setattr(gpu_timers.torch, "zeros", lambda *_, **__: None)
        monkeypatch.setattr(gpu_timers.torch, "sum", self.flush)

    def sleep(self, cycles: int) -> None:
        self.sleeps.append(cycles / gpu_timers.CYCLES_PER_S)
        self.device = max(self.device, self.host) + 1e3 * self.sleeps[-1]

    def flush(self, *_: object, **__: object) -> None:
        self.flushes += 1

    def call(self) -> None:
        self.calls += 1
        self.host += self.ms_host
        self.device = max(self.device, self.host) + self.ms_device


def test_cold_time_is_the_gpus_alone(monkeypatch):
    gpu = FakeGpu(monkeypatch, ms_host=0.1, ms_device=0.25)
    assert gpu_timers.ColdGpu()(gpu.call) == pytest.approx(0.25e-3)
    assert (gpu.calls, gpu.flushes, gpu.sleeps) == (1, 1, [1e-3])


def test_a_slow_host_gets_a_longer_sleep(monkeypatch):
    gpu = FakeGpu(monkeypatch, ms_host=3.0, ms_device=0.25)
    assert gpu_timers.ColdGpu()(gpu.call) == pytest.approx(0.25e-3)
    assert gpu.sleeps == pytest.approx([1e-3, 6e-3])
    assert gpu.flushes == gpu.calls == 2


def test_a_host_that_waits_does_not_make_the_gpu_sleep_for_ever(monkeypatch):
    gpu = FakeGpu(monkeypatch, ms_host=500.0, ms_device=0.25)
    gpu_timers.ColdGpu()(gpu.call)
    assert gpu.sleeps == [1e-3, gpu_timers.MAX_SLEEP_S]


def test_back_to_back_is_a_share_of_many_calls(monkeypatch):
    gpu = FakeGpu(monkeypatch, ms_host=0.05, ms_device=0.25)
    assert gpu_timers.BackToBack()(gpu.call) == pytest.approx(0.25e-3)
    assert (gpu.calls, gpu.flushes) == (20, 0)


def test_host_time_is_without_the_gpus(monkeypatch):
    gpu = FakeGpu(monkeypatch, ms_host=0.05, ms_device=7.0)
    assert gpu_timers.HostTime()(gpu.call) == pytest.approx(0.05e-3)
    assert gpu.calls == gpu_timers.HostTime.calls


def test_host_time_is_without_the_calls_that_follow_a_wait(monkeypatch):
    gpu = FakeGpu(monkeypatch, ms_host=0.05, ms_device=0.01)

    def call() -> None:
        gpu.call()
        gpu.host += 0.2 if gpu.calls <= 3 else 0.0

    assert gpu_timers.HostTime()(call) == pytest.approx(0.05e-3)


def test_rounds_count_all_calls_of_a_turn():
    class Twenty(WallClock):
        calls = 20

    now = 0.0

    def call() -> None:
        nonlocal now
        now += 0.1

    turns = time_interleaved({"a": call}, budget_s=10.0, timer=Twenty(lambda: now))
    assert len(turns["a"]) == 5


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("cold", gpu_timers.ColdGpu),
        ("b2b", gpu_timers.BackToBack),
        ("graph", gpu_timers.ColdGraph),
        ("host", gpu_timers.HostTime),
    ],
)
def test_modes_have_timers(mode, kind, monkeypatch):
    FakeGpu(monkeypatch, ms_host=0, ms_device=0)
    assert type(gpu_timers.timer_for(mode)) is kind


def test_a_graph_is_captured_before_it_is_timed(monkeypatch):
    monkeypatch.setattr(gpu_timers, "captured", lambda call: f"the replay of {call}")
    FakeGpu(monkeypatch, ms_host=0, ms_device=0)
    assert gpu_timers.ColdGraph().prepared("a call") == "the replay of a call"
    assert gpu_timers.ColdGpu().prepared("a call") == "a call"


@pytest.fixture
def small_ceilings(monkeypatch):
    monkeypatch.setattr(ceilings, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(ceilings, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(ceilings, "MATMUL_SIZES", (16, 32))
    monkeypatch.setattr(ceilings, "BUDGET_S", 0.0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))


def test_ceilings_come_from_bytes_and_products(small_ceilings):
    class Steady(WallClock):
        def __call__(self, call) -> float:
            call()
            return 1e-3

    done = []
    found = ceilings.measure(Steady(), lambda: done.append(None))
    assert len(done) == len(ceilings.STEPS) == 4
    assert found.read_gb_s == found.copy_gb_s == pytest.approx((1 << 20) / 1e6)
    assert found.bf16_tflops == pytest.approx(2 * 32**3 / 1e9)
    assert found.fp8_tflops is None


def test_the_fastest_way_is_the_ceiling():
    class InTurn(WallClock):
        def __call__(self, call) -> float:
            return call()

    fastest = ceilings._fastest_s(InTurn(), {"slow": lambda: 2e-3, "fast": lambda: 1e-3})
    assert fastest == pytest.approx(1e-3)


def test_progress_tells_what_is_left():
    screen = Console(file=io.StringIO(), force_terminal=True, width=120)
    with suite_progress("decode", 4, screen) as progress:
        progress.begin_workload("a workload")
        progress.finish_round(1, 2)
        suite, workload = progress._bars.tasks
        assert (suite.percentage, workload.percentage) == (12.5, 50.0)
        progress.finish_workload()
        assert suite.percentage == 25.0
        progress._bars.refresh()
    output = screen.file.getvalue()
    assert "suite decode" in output
    assert "a workload" in output
    assert "-:--:--" in output  # the time that is left, not known yet


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [*gpu_timers.MODES, gpu_timers.HOST])
def test_a_gpu_is_timed(mode):
    x = torch.randn(1 << 24, device="cuda")
    timer = gpu_timers.timer_for(mode)
    call = timer.prepared(lambda: x.sum())
    assert 0 < min(timer(call) for _ in range(5)) < 1e-3


@pytest.mark.gpu
def test_the_ceilings_of_a_gpu_are_plausible():
    found = ceilings.measure(gpu_timers.timer_for("cold"))
    assert 100 < found.copy_gb_s < 20_000
    assert 100 < found.read_gb_s < 20_000
    assert 10 < found.bf16_tflops < 10_000
