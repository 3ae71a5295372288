"""Devices, seeds, and poison in every uninitialised tensor."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest
import setuptools  # noqa: F401  patches distutils, so it comes before any import of that
import torch

from mlakit.dispatch import knobs, selection
from mlakit.dispatch.specs import KernelSpec, Problem
from tests import (
    cpu_products,
    emulation,
    gpu_parts,
    gpu_session,
    gpu_workers,
    slow_tests,
    transplant,
)

# an assertion in these shows its values when it fails, as one in a test does
pytest.register_assert_rewrite(
    "tests.steps.step_oracles",
    "tests.compat.modular.contiguous_decoding",
    "tests.reference.inputs",
)

INTERPRETED = ("triton", "cpu")
GPU_TESTS = pytest.StashKey[int]()


class Place(NamedTuple):
    """A backend, and the device whose tensors it is given."""

    backend: str
    device: torch.device

    @property
    def on_cpu_backend(self) -> bool:
        return self.backend == "cpu"


def pytest_addoption(parser: pytest.Parser) -> None:
    slow_tests.add_options(parser)
    gpu_session.add_options(parser)
    emulation.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    is_emulated = config.getoption(emulation.OPTION)
    # Triton decides when a kernel is defined: without a GPU the portable kernels run interpreted
    is_compiled = is_emulated or torch.cuda.is_available()
    os.environ.setdefault("TRITON_INTERPRET", "0" if is_compiled else "1")
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)  # the workers of xdist already fill the cores
    if config.option.markexpr.strip() == "gpu" and not is_compiled:
        raise pytest.UsageError("-m gpu needs a CUDA device, and torch sees none")
    config.pluginmanager.register(gpu_session)
    config.pluginmanager.register(gpu_workers)
    cpu_products.use_float32(cpu_products.slow_types())
    # torch.empty then holds NaN, the largest integer or 0xFF: reading what was never written shows
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    for warning in ("does not have a deterministic implementation", "is not deterministic because"):
        config.addinivalue_line("filterwarnings", f"ignore:.*{warning}:UserWarning")
    config.addinivalue_line(
        "markers",
        "interpreted(**values): a `place` may be Triton's interpreter, if parameters have `values`",
    )
    config.addinivalue_line("markers", "on_cpu: about what no device changes, so a `place` is one")
    config.addinivalue_line(
        "markers",
        "hopper_too: `auto` may take kernels of Hopper, so a `place` has the portable ones as well",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with a `device` runs on the CPU and, marked `gpu`, on CUDA; one with a `place` too.

    Marked `interpreted`, the latter also runs the portable kernels on CPU tensors, where there is
    no GPU: for small cases only. Marked `hopper_too`, it runs on CUDA with the kernels that `auto`
    takes and with the portable ones; without, these are the same, which `place` makes sure of.
    """
    if "place" in metafunc.fixturenames:
        metafunc.parametrize("place", _places(metafunc.definition), indirect=True)
    if "device" not in metafunc.fixturenames:
        return
    cuda = pytest.param("cuda", marks=pytest.mark.gpu)
    marked = metafunc.definition.get_closest_marker("gpu") is not None
    metafunc.parametrize("device", [cuda] if marked else ["cpu", cuda], indirect=True)


def _places(test: pytest.Item) -> list[object]:
    places: list[object] = [pytest.param(("cpu", "cpu"), id="cpu")]
    if test.get_closest_marker("on_cpu"):
        return places
    if test.get_closest_marker("gpu"):
        places = []
    interpreted = knobs.interpreted() and find_spec("triton") is not None
    if interpreted and test.get_closest_marker("interpreted"):
        places.append(pytest.param(INTERPRETED, id="interpreted", marks=pytest.mark.slow))
    places.append(pytest.param(("auto", "cuda"), id="cuda", marks=pytest.mark.gpu))
    if test.get_closest_marker("hopper_too"):
        places.append(pytest.param(("triton", "cuda"), id="triton-cuda", marks=pytest.mark.gpu))
    return places


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _refuse_addresses(items)
    items[:] = [item for item in items if not _too_slow_interpreted(item)]
    _leave_out_gpu_tests(config, items)
    emulation.leave_out(config, items)
    slow_tests.leave_out_thorough(config, items)
    slow_tests.select_measured(config, items)


def _refuse_addresses(items: list[pytest.Item]) -> None:
    """An address in an id differs between workers, which then run no test at all."""
    found = sorted({item.nodeid for item in items if " at 0x" in item.nodeid})
    if found:
        raise pytest.UsageError(f"ids of tests must not hold addresses, got {found[0]}")


def _leave_out_gpu_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return

    def is_left_out(item: pytest.Item) -> bool:
        return item.get_closest_marker("gpu") is not None and not emulation.runs(config, item)

    on_gpu = [item for item in items if is_left_out(item)]
    items[:] = [item for item in items if not is_left_out(item)]
    config.hook.pytest_deselected(items=on_gpu)
    config.stash[GPU_TESTS] = len(on_gpu)
    if hasattr(config, "workeroutput"):
        config.workeroutput["gpu_tests"] = len(on_gpu)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """With xdist only the workers collect, each of them everything."""
    output = getattr(node, "workeroutput", {})
    node.config.stash[GPU_TESTS] = output.get("gpu_tests", 0)
    node.config.stash[emulation.LEFT_OUT] = output.get("emulated_tests", 0)
    node.config.stash[slow_tests.THOROUGH] = output.get("thorough_tests", 0)


@pytest.hookimpl(hookwrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
    yield from slow_tests.measure_fixture(fixturedef)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield from slow_tests.measure_call(item)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Run the tests of Hopper's kernels in the emulator, if that is asked for."""
    is_on_gpu = pyfuncitem.get_closest_marker("gpu") is not None
    if is_on_gpu and emulation.runs(pyfuncitem.config, pyfuncitem):
        with emulation.emulated_test():
            return (yield)
    return (yield)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    count = config.stash.get(GPU_TESTS, 0)
    if count:
        terminalreporter.write_line(f"GPU tests left out: {count}, torch sees no CUDA device")
    emulated = config.stash.get(emulation.LEFT_OUT, 0)
    if emulated:
        terminalreporter.write_line(f"emulated tests left out: {emulated}, make emulate runs them")
    thorough = config.stash.get(slow_tests.THOROUGH, 0)
    if thorough:
        terminalreporter.write_line(f"thorough tests left out: {thorough}, --thorough runs them")
    if config.option.markexpr == "not slow":
        terminalreporter.write_line("slow tests left out, make test runs them")
    if config.getoption("--measure-slow"):
        stats = terminalreporter.stats
        reports = [*stats.get("passed", []), *stats.get("failed", [])]
        for wrong in slow_tests.wrong_markers(reports):
            terminalreporter.write_line(wrong)


def _too_slow_interpreted(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("interpreted")
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if marker is None or parameters.get("place") != INTERPRETED:
        return False
    return any(parameters[name] not in values for name, values in marker.kwargs.items())


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Where the test runs: its backend is the one that `auto` means, its device that of calls."""
    backend, device = request.param
    here = Place(backend, torch.device(device))
    if not request.node.get_closest_marker("hopper_too"):
        refuse_hopper(monkeypatch)
    with knobs.override(backend=backend), transplant.calls_run_on(here.device):
        yield here


def refuse_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no kernel be selected but portable ones and those of the CPU.

    By `monkeypatch`, which a test may use for the same function: it undoes both in order.
    """
    select = selection.select

    def select_portable(op: str, problem: Problem, backend: str = "auto") -> KernelSpec:
        spec = select(op, problem, backend)
        assert spec.backend in ("cpu", "triton"), f"{op} runs {spec.name}: mark it hopper_too"
        return spec

    monkeypatch.setattr(selection, "select", select_portable)


@pytest.fixture
def no_replay() -> Iterator[None]:
    """For a test that changes a launcher or a picker: a replayed call would not ask it.

    Nor is a call recorded that other tests would then replay as it was changed here.
    """
    with knobs.override(launch_cache=False):
        yield


@pytest.fixture
def generator() -> torch.Generator:
    """Seeded, on the CPU: tests draw there and move, so every device sees the same numbers."""
    return torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """What a test draws without `generator` must not depend on the tests before it."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # without the stack trace that torch keeps of a seed for a GPU not yet there, 2 ms a test
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_knobs_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for knob in knobs.REGISTRY.values():
        monkeypatch.delenv(knob.variable, raising=False)


@pytest.fixture(autouse=True)
def _gpu_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Workers of xdist share one GPU: large tests take turns, and give back what they held."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    marker = request.node.get_closest_marker("large")
    if marker is None:
        yield
    else:
        with turn_of_large_tests(**marker.kwargs):
            yield
            torch.cuda.empty_cache()
    if torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


@contextmanager
def turn_of_large_tests(turns: int = 1) -> Iterator[None]:
    """Hold so many of the locks, of which there are as many as large tests may run at a time."""
    folder = Path(tempfile.gettempdir())
    names = [folder / f"mlakit-large-{number}.lock" for number in range(gpu_parts.LARGE_AT_ONCE)]
    with ExitStack() as stack:
        free = [stack.enter_context(name.open("w")) for name in names]
        with (folder / "mlakit-large.lock").open("w") as queue:
            # two that wait at a time could have half of their turns each
            fcntl.flock(queue, fcntl.LOCK_EX)
            while turns:
                taken = next((lock for lock in free if _is_taken(lock)), None)
                if taken is None:
                    time.sleep(0.1)
                else:
                    free.remove(taken)
                    turns -= 1
        yield


def _is_taken(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
