"""How CPU kernels use torch's threads: by few operations, with the same bits for any number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from platform import machine

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mlakit.kernels.cpu.workspace import SMALL
from mlakit.tools.bench import busy, cpu, pool
from mlakit.tools.bench.shapes import Batch
from mlakit.tools.testing import assert_same_bits
from tests.ops.cases import CALLS
from tests.ops.inside_ops import modes_see_inside_ops


@pytest.fixture
def _three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


three_threads = pytest.mark.usefixtures("_three_threads")


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
# first queries are computed twice. An x86 CPU without instructions for bf16 widens the latents of
# both parts of the prompt for the up-projection
WIDENED_PARTS = 0 if machine() != "x86_64" or torch.cpu._is_avx512_bf16_supported() else 2
LARGE_CALLS = {
    FEW_HEADS[0]: 16,
    FEW_HEADS[1]: 32 + WIDENED_PARTS,  # in two parts, which are merged
    cpu.Decode(Batch.of(4, 1, 1024), 16): 7,
    cpu.Decode(Batch.of(4, 1, 1024), 16, "fp8_block128"): 20,
    cpu.Prefill(Batch.of(1, 300, 300), 16): 14,
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
        elif name == "index_select":
            touched = made  # few rows of a pool
        else:
            touched = [*taken, *made] if is_new else taken[:1] if is_written else []
        if name not in self.LEFT_OUT and any(x.numel() > SMALL for x in touched):
            self.found.append(f"{name} {[tuple(x.shape) for x in (*taken, *made)]}")
        return result


@pytest.mark.slow
@three_threads
@pytest.mark.parametrize("workload", LARGE_CALLS, ids=lambda each: each.name)
def test_few_operations_are_spread_over_the_threads_of_torch(workload, monkeypatch):
    """Each waits for all of them, and beside a busy process one is often not running."""
    # scores of small numbers would be computed again, in float32
    monkeypatch.setattr(pool, "LATENT_STD", 1.0)
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


@pytest.mark.slow
def test_a_decode_step_makes_few_calls_and_converts_no_weights():
    """2386 calls, and 34 million elements converted, where heads were multiplied one by one."""
    call = DECODE.build_case().call
    with modes_see_inside_ops(), Seen() as seen:
        call()
    num_weights = DECODE.heads * 512 * (128 + 128)
    assert sum(seen.calls.values()) <= 600
    assert seen.copied < num_weights / 4
