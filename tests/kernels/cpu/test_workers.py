"""How CPU kernels use threads: in whole items, with no operation of torch's own on several."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mlakit import knobs
from mlakit.bench import busy, cpu
from mlakit.kernels.cpu import workers
from mlakit.kernels.cpu.workers import SMALL, for_each, num_sharers, num_threads, on_one_thread
from mlakit.testing import assert_same_bits
from tests.ops.cases import CALLS
from tests.ops.inside_ops import modes_see_inside_ops

CPU = torch.device("cpu")


@pytest.fixture
def _three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


three_threads = pytest.mark.usefixtures("_three_threads")


@three_threads
def test_every_item_is_worked_on_once_by_threads_with_one_thread_of_torch():
    seen: list[tuple[int, int, int]] = []

    def work(item: int) -> None:
        time.sleep(0.002)
        seen.append((item, threading.get_ident(), torch.get_num_threads()))

    for_each(work, range(30))
    assert sorted(item for item, _, _ in seen) == list(range(30))
    assert {threads for _, _, threads in seen} == {1}
    idents = {ident for _, ident, _ in seen}
    assert 1 < len(idents) <= 3
    assert threading.get_ident() not in idents
    assert torch.get_num_threads() == 3


@three_threads
def test_other_threads_keep_the_threads_of_torch():
    for_each(lambda item: None, range(3))
    found = []
    other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert found == [3]


@three_threads
def test_small_work_stays_on_its_thread():
    found = []
    for_each(lambda item: found.append(threading.get_ident()), range(3), is_small=True)
    assert set(found) == {threading.get_ident()}
    for_each(found.append, [])


@three_threads
def test_an_error_is_raised_when_no_thread_works_any_more():
    working, done = [], []

    def work(item: int) -> None:
        if item == 1:
            raise ValueError("item 1")
        working.append(item)
        time.sleep(0.01)
        done.append(item)

    with pytest.raises(ValueError, match=r"^item 1$"):
        for_each(work, range(100))
    assert sorted(working) == sorted(done)
    assert len(done) < 99  # what was not begun is dropped
    for_each(done.append, ["still works"])
    assert done[-1] == "still works"


@three_threads
def test_a_worker_has_no_workers():
    found: list[tuple[int, int, set[int]]] = []

    def work(item: int) -> None:
        inner: list[int] = []
        for_each(lambda _: inner.append(threading.get_ident()), range(3))
        found.append((num_threads(), num_sharers(), {*inner, threading.get_ident()}))

    for_each(work, range(2))
    assert [(threads, sharers, len(idents)) for threads, sharers, idents in found] == [
        (1, 3, 1)
    ] * 2


@three_threads
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_workers_write_results_of_every_mode(mode):
    with mode():
        out = torch.zeros(4)
        weight = torch.nn.Parameter(torch.ones(4))

        def work(item: int) -> None:
            out[item] = 2 * weight[item]

        for_each(work, range(4))
    assert out.tolist() == [2.0] * 4
    assert not out.requires_grad


@three_threads
def test_knobs_of_a_scope_hold_in_workers():
    with knobs.override(workspace_mib=7):
        assert on_one_thread(knobs.workspace_mib, CPU) == 7


class Seen(TorchDispatchMode):
    """How often each operation is called, and how many elements are copied or converted."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.copied = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        self.calls[name] += 1
        if name in ("_to_copy", "copy_", "clone"):
            self.copied += result.numel()
        return result


@three_threads
def test_a_mode_that_sees_every_operation_sees_those_of_kernels():
    with Seen() as seen:
        for_each(lambda item: torch.ones(2) @ torch.ones(2), range(3))
    assert seen.calls["dot"] == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_workers_of_its_own():
    code = """
import os, torch
from mlakit.kernels.cpu.workers import for_each
torch.set_num_threads(2)
found = []
for_each(found.append, range(4))
child = os.fork()
for_each(found.append, range(4))
if child == 0:
    os._exit(len(found))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(found))
"""
    # torch warns of threads in a forked child; this one opens no region of torch
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["8", "8"]


@three_threads
@pytest.mark.parametrize("name", CALLS)
def test_results_do_not_depend_on_the_number_of_threads(name):
    shared = CALLS[name]()
    results = shared.run()
    torch.set_num_threads(1)
    alone = CALLS[name]()
    for i, (got, want) in enumerate(zip(results, alone.run(), strict=True)):
        assert_same_bits(f"result {i}", got, want)
    for (argument, got), (_, want) in zip(shared.tensors(), alone.tensors(), strict=True):
        assert_same_bits(argument, got, want)


STEPS = [each for each in busy.WORKLOADS if isinstance(each, busy.Step)]
DECODE, PREFILL = STEPS
FEW_HEADS = [replace(step, heads=16) for step in STEPS]
# and how many operations torch may spread over its threads: gather and dequantise, or expand K and
# V, then fused attention. x86 CPUs widen e4m3 in 8 operations, and with 16-bit products a prompt's
# first queries are computed twice
LARGE_CALLS = {
    FEW_HEADS[0]: 16,
    FEW_HEADS[1]: 21,
    cpu.Decode("bf16", "bf16", tokens=1024): 7,
    cpu.Decode("bf16", "fp8_block128", tokens=1024): 20,
    cpu.Prefill("bf16", 1, 300): 14,
}


class Shared(TorchFunctionMode):
    """The functions called on this thread that torch spreads over its own threads."""

    # callers of `prefill_branch` make a copy of q
    LEFT_OUT = ("empty", "new_empty", "empty_like", "clone")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", str(function))
        taken, made = (
            [x for x in tree_leaves(tree) if isinstance(x, Tensor)]
            for tree in ((args, kwargs), result)
        )
        places = {x.untyped_storage().data_ptr() for x in taken}
        is_new = any(x.untyped_storage().data_ptr() not in places for x in made)
        is_written = name.endswith("_") and not name.endswith("__")
        if name == "__setitem__":
            touched = taken[1:]  # a few rows of a pool may be written
        else:
            touched = [*taken, *made] if is_new else taken[:1] if is_written else []
        if name not in self.LEFT_OUT and any(x.numel() > SMALL for x in touched):
            self.found.append(f"{name} {[tuple(x.shape) for x in (*taken, *made)]}")
        return result


@three_threads
@pytest.mark.parametrize("workload", LARGE_CALLS, ids=lambda each: each.name)
def test_few_operations_are_spread_over_the_threads_of_torch(workload):
    """Each waits for all of them, and beside a busy process one is often not running."""
    call = workload.build_case().call
    with Shared() as shared:
        call()
    assert len(shared.found) <= LARGE_CALLS[workload], shared.found


def test_shared_finds_what_is_spread():
    x = torch.ones(300, 300)
    with Shared() as shared:
        x.view(-1)[:10].add_(1)
        x.mul_(2)
        x[:, :200].float().bfloat16()
        torch.empty_like(x).view(-1)
    assert [each.split()[0] for each in shared.found] == ["mul_", "bfloat16"]


def test_a_decode_step_makes_few_calls_and_converts_no_weights():
    """2386 calls, and 34 million elements converted, where heads were multiplied one by one."""
    call = DECODE.build_case().call
    with modes_see_inside_ops(), Seen() as seen:
        call()
    num_weights = DECODE.heads * 512 * (128 + 128)
    assert sum(seen.calls.values()) <= 600
    assert seen.copied < num_weights / 4


def test_waiting_ends_with_the_last_item_not_with_the_last_thread():
    """A worker that is not running is not waited for where there is no item left for it."""
    late, call = [], workers._Call(lambda item: None, [1, 2], 2)
    call.work_on_items()
    call.wait()
    workers._thread.sharers = 0
    late.append(call.work_on_items)
    late[0]()
    workers._thread.sharers = 0
