"""torch's default device, its default dtype and autocast are the caller's: they change no result.

The default device here is meta, where any work that should be done on the CPU fails or is lost.
Programs that serve a model set the default dtype to the model's.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mlakit
from mlakit import MLAAttention, cache, ops, reference, steps
from mlakit.cache import PagedLatentCache
from mlakit.cache.pages import PageAllocator
from mlakit.dispatch.autocast import without_autocast
from mlakit.formats import FORMATS
from mlakit.layer.indexer import hadamard_matrix
from mlakit.model import masks
from mlakit.model.rope import rope_table
from mlakit.plan import plan_decode, plan_prefill
from mlakit.reference.hopper_fp8_mma import fp8_mma
from mlakit.tools import workloads
from mlakit.tools.testing import assert_same_bits, shuffled_pages
from mlakit.tools.workloads.random_cases import SeededDraw, random_case
from tests.cache.cache_rows import V3, V4
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
    KV_LENS,
    PAGE_SIZE,
    ROW,
    SCALE,
    Call,
    decode_call,
    flat_table,
    int32,
    make_cache,
    normal,
    prefill_call,
    scaled_mm_call,
    starts,
)
from tests.ops.every_op import ONE_EACH, assert_same_results, assert_same_state
from tests.steps.step_oracles import FP8_STEPS, STEPS, Step


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(F32)


SCOPES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "meta": lambda: torch.device("meta"),
    "bf16": lambda: default_dtype(BF16),
    "fp16": lambda: default_dtype(torch.float16),
    "fp64": lambda: default_dtype(torch.float64),
    "autocast": lambda: torch.autocast("cpu", BF16),
}
DEFAULTS = ("bf16", "fp16", "fp64")
every_scope = pytest.mark.parametrize("scope", SCOPES)
SPARSE = SMALL | {"qk_rope_head_dim": 32} | INDEX


def within(scope: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` in a scope of torch, with arguments that were made outside."""

    def run(*args: object, **options: object) -> Any:
        with SCOPES[scope]():
            return function(*args, **options)

    return run


def as_tuple(results: object) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


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


@pytest.mark.interpreted(name=ONE_EACH, scope=("meta", "fp16"))
@pytest.mark.parametrize(
    ("name", "scope"),
    [
        *((name, scope) for name in CALLS for scope in ("meta", "bf16", "autocast")),
        *((name, "bf16") for name in MORE_CALLS),
        *((name, scope) for name in ONE_EACH for scope in ("fp16", "fp64")),
    ],
)
def test_every_op(name, scope, place: Place):
    make = (CALLS | MORE_CALLS)[name]
    call, other = (make().on(place.device) for _ in range(2))
    assert_same_results(within(scope, call.run)(), other.run())
    assert_same_state(call, other)


@every_scope
@pytest.mark.parametrize(
    "step",
    [STEPS["bf16"], STEPS["fp8_block128-flat"], FP8_STEPS["fp8_token"]],
    ids=["bf16", "flat", "fp8"],
)
@pytest.mark.parametrize("branch", [steps.prefill_branch, steps.decode_branch, steps.mla_step])
def test_every_branch(branch, step: Step, scope):
    *plain, plain_batch = step.arguments()
    *given, batch = step.arguments()
    expected = branch(*plain, plain_batch)
    assert_same_bits("out", within(scope, branch)(*given, batch), expected)
    assert_same_bits("payload", batch.cache.payload, plain_batch.cache.payload)


@every_scope
@pytest.mark.parametrize("make", [*WRITERS, plan, split_scalars], ids=name_of)
def test_every_documented_function(make, scope):
    expected, call = make()(), make()
    assert_same_results(as_tuple(within(scope, call)()), as_tuple(expected))


@pytest.mark.slow
@pytest.mark.parametrize("scope", DEFAULTS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_layer_with_an_indexer(scope, dtype):
    x = [torch.randn(30, 256, generator=torch.Generator().manual_seed(3)).to(dtype)]
    weights = tensors(SPARSE)

    def served(max_positions: int) -> Tensor:
        layer = MLAAttention(SPARSE, dtype=dtype, max_positions=max_positions)
        layer.load_state_dict(weights)
        format = "fp32" if dtype == F32 else "bf16"
        return serve(layer, x, [(20,), (9,), (1,)], format=format, index_format="fp8_token")[0]

    # layers with as many positions would share a RoPE table, whichever default it was made under
    assert_same_bits("out", within(scope, served)(64), served(65))


@every_scope
@pytest.mark.parametrize("format", FORMATS)
def test_a_pool_of_every_format(format, scope, generator):
    row = V4 if format == "fp8_block64" else V3
    slots, rows = torch.tensor([3, -1, 7, 11]), torch.randn(4, row.width, generator=generator)

    def used() -> tuple[Tensor, ...]:
        pool = PagedLatentCache.allocate(row, format, num_pages=4, page_size=3)
        assert pool.payload.device.type == "cpu"
        assert pool.to("cpu") is pool
        pool.layer(0).write(slots, rows)
        pool.copy_pages([(1, 0), (3, 2)])
        read = pool.layer(0).read(torch.tensor([3, 7, 11], device="cpu"))
        return pool.payload, read, pool.clone().payload

    assert_same_results(within(scope, used)(), used())


@every_scope
@pytest.mark.parametrize("flat", [False, True], ids=["paged", "flat"])
def test_page_tables(flat, scope, generator):
    pool, table = make_cache(generator, KV_LENS)
    given = flat_table(table, KV_LENS) if flat else table
    layer, q_starts = pool.layer(1), int32([0, 2, 3])

    def results() -> list[Tensor]:
        return [
            *cache.gather_rows(layer, given, [0, 2, 3, 0, 1], KV_LENS),
            cache.request_slots(given, PAGE_SIZE, 2, 1, 6),
            *as_tuple(cache.select_requests(given, [2, 0])),
            *as_tuple(cache.select_requests(given, [2, 0], [3, 1])),
            *cache.token_requests(q_starts, 3),
            cache.from_host([3, 1], torch.int32, torch.device("cpu")),
        ]

    assert_same_results(within(scope, results)(), results())


@every_scope
def test_allocators_and_plans(scope):
    allocator = PageAllocator(8, 4)
    sequences = [allocator.reserve(5), allocator.reserve(0), allocator.reserve(9)]
    lengths, a = int32([5, 0, 9]), decode_call().arguments

    def results() -> list[Tensor]:
        prefills = [plan_prefill(each, 8, page_size=4) for each in (lengths, lengths[:0])]
        made = mlakit.plan_mla_decode(
            *(a[name] for name in ("cache", "page_table", "kv_lens")),
            heads=a["q"].shape[1],
            num_tokens=len(a["q"]),
            q_starts=a["q_starts"],
            dtype=a["q"].dtype,
        )
        return [
            *(allocator.page_table(each) for each in (sequences, [])),
            *(allocator.kv_lens(each) for each in (sequences, [])),
            *plan_decode(KV_LENS, num_ctas=3, tile=2).tensors("cpu")[:4],
            *made[:4],
            *(each.buffer_row_offsets for each in prefills),
            *(each.cache_offsets for each in prefills),
            *(each.buffer_lengths for each in prefills),
            shuffled_pages(2, [3, 1], 9, torch.Generator().manual_seed(0)),
        ]

    assert_same_results(within(scope, results)(), results())


@every_scope
def test_tables_and_oracles(scope, generator):
    q, rows = normal(generator, 2, 3, 40, dtype=F32), normal(generator, 9, 40, dtype=F32)
    a, b = (normal(generator, 3, 64).to(E4M3) for _ in range(2))
    attended = partial(reference.mla_decode, q, [rows], [2], softmax_scale=0.3, v_width=32)

    def results() -> list[Tensor]:
        return [
            *(rope_table(name, 70, device="cpu") for name in ("deepseek-v3", "deepseek-v2-lite")),
            hadamard_matrix(16),
            reference.alibi_slopes(5),
            reference.indexer_topk(rows, 3),
            *attended(dtype=F32),
            *attended(dtype=torch.float64),
            reference.rotate(rows[:, :8].double(), rows[0, 8:16].double()),
            fp8_mma(a, b),
        ]

    assert_same_results(within(scope, results)(), results())


@pytest.mark.parametrize("scope", ["meta", *DEFAULTS])
@pytest.mark.parametrize("kind", workloads.CASES, ids=lambda kind: kind.__name__)
def test_workloads(kind, scope):
    within(scope, random_case(SeededDraw(0), kind).run)()


def test_autocast_goes_on_afterwards():
    @without_autocast
    def inside() -> bool:
        return torch.is_autocast_enabled("cpu")

    with torch.autocast("cpu", BF16):
        assert not inside()
        assert torch.is_autocast_enabled("cpu")
    assert not inside()


PACKAGE = Path(mlakit.__file__).parent
# commands, which have their process to themselves
COMMANDS = tuple(
    f"tools/{each}"
    for each in (
        *("bench/", "commands/", "compile/", "demo/", "accuracy.py", "check.py", "cli.py"),
        *("doctor.py", "generate.py", "support.py", "tiny.py"),
    )
)
# torch's factories that have a default dtype; `arange` of integers and `randint` are int64
OF_A_DTYPE = {
    *("as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace"),
    *("ones", "rand", "randn", "scalar_tensor", "tensor", "zeros"),
}
FACTORIES = {"dtype": OF_A_DTYPE, "device": OF_A_DTYPE | {"arange", "randint", "randperm"}}


def calls_without(keyword: str, factories: Collection[str], source: str) -> Iterator[str]:
    """Calls that leave a keyword to torch's default, such as `zeros:12`, and their line."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and (node.func.value.id, node.func.attr in factories) == ("torch", True)
            # the keyword, or **options that have it
            and not any(given.arg in (keyword, None) for given in node.keywords)
        ):
            yield f"{node.func.attr}:{node.lineno}"


@pytest.mark.slow
@pytest.mark.parametrize("keyword", FACTORIES)
def test_every_new_tensor_has_a_device_and_a_dtype(keyword):
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name, source = path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")
        if not name.startswith(COMMANDS):
            found[name] = list(calls_without(keyword, FACTORIES[keyword], source))
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_the_checker_sees_what_is_left_to_a_default():
    found_in = partial(calls_without, "device", FACTORIES["device"])
    assert list(found_in("x = 1\ny = torch.arange(3)[None]")) == ["arange:2"]
    assert list(found_in("torch.full((3,), -torch.inf, dtype=d)")) == ["full:1"]
    assert not list(found_in("torch.zeros(3, device=d) + torch.ones(2, **options)"))
    assert not list(found_in("x.new_zeros(3), torch.stack([a]), torch.zeros_like(a)"))
