"""`pytest --emulate`: tests of Hopper's kernels, without a GPU, in the emulator.

A test marked `gpu` in tests/kernels/hopper then makes its CUDA tensors in host memory, and every
kernel that it launches runs in `mlakit.tools.emulator`. A test is skipped when an op is called with
more work than the emulator does in a few seconds, and when it asks for CUDA itself. Tests marked
`emulated` need the option, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from mlakit.dispatch import selection
from mlakit.dispatch.specs import KernelSpec
from tests.paths import ROOT

OPTION = "--emulate"
FOLDER = ROOT / "tests" / "kernels" / "hopper"
LEFT_OUT = pytest.StashKey[int]()
# multiplications of an element of a query by one of a key: some seconds in the emulator
MOST_WORK = 1e9
NO_CUDA = "Torch not compiled with CUDA enabled"


def add_options(parser: pytest.Parser) -> None:
    parser.getgroup("emulator").addoption(
        OPTION,
        action="store_true",
        help="run small tests of Hopper's kernels on the CPU, and tests marked emulated",
    )


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests marked `emulated` to the option."""
    if config.getoption(OPTION):
        return
    left_out = [item for item in items if item.get_closest_marker("emulated")]
    items[:] = [item for item in items if not item.get_closest_marker("emulated")]
    config.hook.pytest_deselected(items=left_out)
    config.stash[LEFT_OUT] = len(left_out)
    if hasattr(config, "workeroutput"):
        config.workeroutput["emulated_tests"] = len(left_out)


def runs(config: pytest.Config, item: pytest.Item) -> bool:
    """Whether a test marked `gpu` runs in the emulator."""
    if not config.getoption(OPTION) or item.get_closest_marker("large"):
        return False
    return FOLDER in item.path.parents


@contextmanager
def emulated_test() -> Iterator[None]:
    """Run Hopper's kernels of a test in the emulator."""
    from mlakit.tools.emulator.frontend import emulating_mlakit

    with ExitStack() as scopes:
        patch = scopes.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(torch, "Generator", _host_generator(torch.Generator))
        for spec in selection.SPECS:
            if spec.backend == "hopper":
                patch.setitem(spec.__dict__, "launch", _of_little_work(spec, spec.launch))
        scopes.enter_context(emulating_mlakit())
        scopes.enter_context(HostMemory())
        try:
            yield
        except (AssertionError, RuntimeError) as error:
            if NO_CUDA not in str(error):
                raise
            pytest.skip("needs CUDA itself")


class HostMemory(TorchFunctionMode):
    """Makes tensors in host memory that a test asks for on a GPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0].clone()
        moved = {name: _on_host(value) for name, value in (kwargs or {}).items()}
        return func(*map(_on_host, args), **moved)


def _on_host(value: object) -> object:
    if isinstance(value, (str, torch.device)) and str(value).partition(":")[0] == "cuda":
        return torch.device("cpu")
    return value


def _host_generator(own: type[torch.Generator]) -> Callable[..., torch.Generator]:
    return lambda device="cpu": own(_on_host(device))


def _of_little_work(spec: KernelSpec, launch: Callable[..., Any]) -> Callable[..., Any]:
    def launch_or_skip(arguments: Any, *results: Any) -> Any:
        amount = work(spec.op, arguments)
        if amount > MOST_WORK:
            pytest.skip(f"too much work for the emulator: {amount:.1e} of at most {MOST_WORK:.1e}")
        return launch(arguments, *results)

    return launch_or_skip


def work(op: str, a: Any) -> float:
    """Estimate the multiplications of a call by its heads, query tokens, keys and columns."""
    if op == "scaled_mm_fp8":
        return float(a.a.numel() * a.b.shape[-2])
    tokens, heads, columns = a.q.shape
    if op == "sparse_mla":
        pairs = tokens * a.rows.shape[1]
    else:
        keys = a.kv_starts.diff() if op == "mla_prefill" else a.kv_lens
        pairs = int((a.q_starts.diff() * keys).sum())
    return float(pairs * heads * columns)
