"""torch's default dtype is the caller's: it changes no result and no dtype of one.

Programs that serve a model set it to the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from mlakit import MLAAttention, ops, reference, steps
from mlakit.layer.indexer import hadamard_matrix
from mlakit.model import masks
from mlakit.model.rope import rope_table
from mlakit.plan import plan_prefill
from mlakit.reference.hopper_fp8_mma import fp8_mma
from mlakit.tools import workloads
from mlakit.tools.testing import assert_same_bits
from mlakit.tools.workloads.random_cases import SeededDraw, random_case
from tests.compat.modular.calls import WRITERS, name_of, plan, split_scalars
from tests.conftest import Place
from tests.layer.checkpoints import INDEX, SMALL, tensors
from tests.layer.serving import serve
from tests.ops.cases import (
    BF16,
    CALLS,
    E4M3,
    F32,
    HEADS,
    PAGE_SIZE,
    ROW,
    SCALE,
    Call,
    decode_call,
    int32,
    make_cache,
    normal,
    prefill_call,
    scaled_mm_call,
    starts,
)
from tests.ops.every_op import ONE_EACH, assert_same_results, assert_same_state
from tests.ops.factory_calls import calls_without, package_calls_without
from tests.steps.step_oracles import FP8_STEPS, STEPS, Step

# torch's factories whose dtype may be the default one; `arange` of integers is int64
FACTORIES = {
    *("as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace"),
    *("ones", "rand", "randn", "scalar_tensor", "tensor", "zeros"),
}
SPARSE = SMALL | {"qk_rope_head_dim": 32} | INDEX
defaults = pytest.mark.parametrize("default", [BF16, torch.float16, torch.float64], ids=str)


def under(default: torch.dtype, function: Callable[..., object]) -> Callable[..., object]:
    """`function` while torch's default dtype is `default`."""

    def run(*args: object, **options: object) -> object:
        torch.set_default_dtype(default)
        try:
            return function(*args, **options)
        finally:
            torch.set_default_dtype(F32)

    return run


def long_decode(kv_lens: list[int], **options: object) -> Call:
    """One query per request, some of which have several splits."""
    generator = torch.Generator().manual_seed(20)
    pool, table = make_cache(generator, kv_lens)
    arguments = {
        "q": normal(generator, len(kv_lens), HEADS, ROW.width),
        "cache": pool,
        "page_table": table,
        "kv_lens": int32(kv_lens),
        "softmax_scale": SCALE,
    }
    return Call(ops.mla_decode, {**arguments, **options})


MORE_CALLS: dict[str, Callable[[], Call]] = {
    "decode-mixed-lengths": lambda: long_decode([400, 30, 700]),
    "decode-no-keys": lambda: long_decode([30, 0]),
    "decode-window": lambda: long_decode([400, 30], mask=masks.sliding_window_causal(50)),
    "decode-null": lambda: decode_call("fp32", mask=masks.NULL),
    "prefill-window": lambda: prefill_call(mask=masks.sliding_window_causal(3)),
    "prefill-fewer-keys": lambda: prefill_call(kv_starts=starts([1, 6, 2, 12, 4])),
    "scaled-mm-float32": lambda: scaled_mm_call(out_dtype=F32),
}


@pytest.mark.interpreted(name=ONE_EACH, default=[torch.float16])
@pytest.mark.parametrize(
    ("name", "default"),
    [
        *((name, BF16) for name in (*CALLS, *MORE_CALLS)),
        *((name, other) for name in ONE_EACH for other in (torch.float16, torch.float64)),
    ],
)
def test_every_op(name, default, place: Place):
    make = (CALLS | MORE_CALLS)[name]
    call, other = (make().on(place.device) for _ in range(2))
    assert_same_results(under(default, call.run)(), other.run())
    assert_same_state(call, other)


@defaults
@pytest.mark.parametrize("step", [STEPS["bf16"], FP8_STEPS["fp8_token"]], ids=["bf16", "fp8"])
@pytest.mark.parametrize("branch", ["prefill_branch", "decode_branch", "mla_step"])
def test_every_branch(branch, step: Step, default):
    run = getattr(steps, branch)
    expected = run(*step.arguments())
    assert_same_bits("out", under(default, run)(*step.arguments()), expected)


@defaults
@pytest.mark.parametrize("make", [*WRITERS, plan, split_scalars], ids=name_of)
def test_every_documented_function(make, default):
    expected, call = make()(), make()
    results = under(default, call)()
    for got, want in zip(as_tuple(results), as_tuple(expected), strict=True):
        assert_same_bits("result", got, want)


def as_tuple(results: object) -> tuple[object, ...]:
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.slow
@defaults
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_layer_with_an_indexer(default, dtype):
    x = [torch.randn(30, 256, generator=torch.Generator().manual_seed(3)).to(dtype)]
    weights = tensors(SPARSE)

    def served(max_positions: int) -> torch.Tensor:
        layer = MLAAttention(SPARSE, dtype=dtype, max_positions=max_positions)
        layer.load_state_dict(weights)
        format = "fp32" if dtype == F32 else "bf16"
        return serve(layer, x, [(20,), (9,), (1,)], format=format, index_format="fp8_token")[0]

    # layers with as many positions would share a RoPE table, whichever default it was made under
    assert_same_bits("out", under(default, served)(64), served(65))


@defaults
def test_tables_plans_and_oracles(default):
    lengths = int32([5, 0, 9])
    a, b = (normal(torch.Generator().manual_seed(seed), 3, 64).to(E4M3) for seed in (0, 1))

    def results() -> list[torch.Tensor]:
        buffers = plan_prefill(lengths, 8, page_size=PAGE_SIZE)
        return [
            *(rope_table(name, 70) for name in ("deepseek-v3", "deepseek-v2-lite")),
            hadamard_matrix(16),
            *(buffers.buffer_row_offsets, buffers.cache_offsets, buffers.buffer_lengths),
            reference.alibi_slopes(5),
            fp8_mma(a, b),
        ]

    assert_same_results(under(default, results)(), results())


@defaults
@pytest.mark.parametrize("kind", workloads.CASES, ids=lambda kind: kind.__name__)
def test_workloads(kind, default):
    under(default, random_case(SeededDraw(0), kind).run)()


@pytest.mark.slow
def test_every_new_tensor_has_a_dtype():
    assert package_calls_without("dtype", FACTORIES) == {}


def test_the_dtype_checker_sees():
    found_in = partial(calls_without, "dtype", FACTORIES)
    assert list(found_in("x = 1\ny = torch.zeros(3, device=d)[None]")) == ["zeros:2"]
    assert list(found_in("torch.full((3,), -torch.inf, device=d)")) == ["full:1"]
    assert not list(found_in("torch.zeros(3, dtype=d) + torch.ones(2, **options)"))
    assert not list(found_in("x.new_zeros(3), torch.arange(3), torch.zeros_like(a)"))
