"""torch's default device is the caller's: what the library makes is where its arguments are.

The default device here is meta, where any work that should be done on the CPU fails or is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

import mlakit
from mlakit import cache, reference, steps
from mlakit.cache import PagedLatentCache
from mlakit.cache.pages import PageAllocator
from mlakit.formats import FORMATS
from mlakit.plan import plan_decode, plan_prefill
from mlakit.tools import workloads
from mlakit.tools.testing import assert_same_bits, shuffled_pages
from mlakit.tools.workloads.random_cases import SeededDraw, random_case
from tests.cache.cache_rows import V3, V4
from tests.compat.modular.calls import WRITERS, name_of, plan, split_scalars
from tests.conftest import Place
from tests.ops.cases import CALLS, KV_LENS, PAGE_SIZE, decode_call, flat_table, int32, make_cache
from tests.ops.every_op import ONE_EACH, assert_same_results, assert_same_state
from tests.ops.factory_calls import calls_without, package_calls_without
from tests.steps.step_oracles import FP8_STEPS, STEPS, Step

FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace"),
    *("logspace", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor"),
    *("zeros",),
}


def elsewhere(function: Callable[..., object]) -> Callable[..., object]:
    """`function` while torch's default device is another than that of its arguments."""

    def run(*args: object, **options: object) -> object:
        with torch.device("meta"):
            return function(*args, **options)

    return run


@pytest.mark.interpreted(name=ONE_EACH)
@pytest.mark.parametrize("name", CALLS)
def test_every_op(name, place: Place):
    call, other = (CALLS[name]().on(place.device) for _ in range(2))
    assert_same_results(elsewhere(call.run)(), other.run())
    assert_same_state(call, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    "step",
    [STEPS["bf16"], STEPS["fp8_block128-flat"], FP8_STEPS["fp8_token"]],
    ids=["bf16", "flat", "fp8"],
)
@pytest.mark.parametrize("branch", ["prefill_branch", "decode_branch", "mla_step"])
def test_every_branch(branch, step: Step):
    run = getattr(steps, branch)
    expected = run(*step.arguments())
    assert_same_bits("out", elsewhere(run)(*step.arguments()), expected)


@pytest.mark.parametrize("make", [*WRITERS, plan, split_scalars], ids=name_of)
def test_every_documented_function(make):
    expected, call = make()(), make()
    results = elsewhere(call)()
    for got, want in zip(as_tuple(results), as_tuple(expected), strict=True):
        assert_same_bits("result", got, want)


def as_tuple(results: object) -> tuple[object, ...]:
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize("format", FORMATS)
def test_a_pool_of_every_format(format, generator):
    row = V4 if format == "fp8_block64" else V3
    pools = [PagedLatentCache.allocate(row, format, num_pages=4, page_size=3) for _ in range(2)]
    slots, rows = torch.tensor([3, -1, 7, 11]), torch.randn(4, row.width, generator=generator)

    def used(pool: PagedLatentCache) -> tuple[torch.Tensor, ...]:
        pool.layer(0).write(slots, rows)
        pool.copy_pages([1, 3], [0, 2])
        return pool.payload, pool.layer(0).read(slots[[0, 2, 3]]), pool.clone().payload

    assert_same_results(elsewhere(used)(pools[0]), used(pools[1]))
    with torch.device("meta"):
        assert PagedLatentCache.allocate(row, format, num_pages=1).device.type == "cpu"
        assert pools[0].to("cpu") is pools[0]


@pytest.mark.parametrize("flat", [False, True], ids=["paged", "flat"])
def test_page_tables(flat, generator):
    pool, table = make_cache(generator, KV_LENS)
    given = flat_table(table, KV_LENS) if flat else table
    layer, q_starts = pool.layer(1), int32([0, 2, 3])

    def results() -> list[torch.Tensor]:
        return [
            *cache.gather_rows(layer, given, [0, 2, 3, 0, 1], KV_LENS),
            cache.request_slots(given, PAGE_SIZE, 2, 1, 6),
            *as_tuple(cache.select_requests(given, [2, 0])),
            *as_tuple(cache.select_requests(given, [2, 0], [3, 1])),
            *cache.token_requests(q_starts, 3),
            cache.from_host([3, 1], torch.int32, torch.device("cpu")),
        ]

    assert_same_results(elsewhere(results)(), results())


def test_allocators_and_plans():
    allocator = PageAllocator(8, 4)
    sequences = [allocator.reserve(5), allocator.reserve(0), allocator.reserve(9)]
    lengths = int32([5, 0, 9])

    def results() -> list[torch.Tensor]:
        prefill = plan_prefill(lengths, 8, page_size=4)
        empty = plan_prefill(lengths[:0], 8, page_size=4)
        return [
            allocator.page_table(sequences),
            allocator.page_table([]),
            allocator.kv_lens(sequences),
            allocator.kv_lens([]),
            *plan_decode(KV_LENS, num_ctas=3, tile=2).tensors("cpu")[:4],
            *(prefill.buffer_row_offsets, prefill.cache_offsets, prefill.buffer_lengths),
            *(empty.buffer_row_offsets, empty.cache_offsets, empty.buffer_lengths),
            shuffled_pages(2, [3, 1], 9, torch.Generator().manual_seed(0)),
        ]

    assert_same_results(elsewhere(results)(), results())


def test_a_plan_of_the_kernel():
    call = decode_call()
    q, pool, table, kv_lens, q_starts = (
        call.arguments[name] for name in ("q", "cache", "page_table", "kv_lens", "q_starts")
    )
    options = {"heads": q.shape[1], "num_tokens": len(q), "q_starts": q_starts, "dtype": q.dtype}
    made = elsewhere(mlakit.plan_mla_decode)(pool, table, kv_lens, **options)
    assert_same_results(made[:4], mlakit.plan_mla_decode(pool, table, kv_lens, **options)[:4])


def test_oracles(generator):
    slopes = elsewhere(reference.alibi_slopes)(5)
    assert_same_bits("slopes", slopes, reference.alibi_slopes(5))
    logits = torch.randn(4, 9, generator=generator)
    chosen = elsewhere(reference.indexer_topk)(logits, 3)
    assert_same_bits("chosen", chosen, reference.indexer_topk(logits, 3))


@pytest.mark.parametrize("kind", workloads.CASES, ids=lambda kind: kind.__name__)
def test_workloads(kind):
    for seed in range(2):
        elsewhere(random_case(SeededDraw(seed), kind).run)()


@pytest.mark.slow
def test_every_new_tensor_has_a_device():
    assert package_calls_without("device", FACTORIES) == {}


def test_the_device_checker_sees():
    found_in = partial(calls_without, "device", FACTORIES)
    assert list(found_in("x = 1\ny = torch.arange(3)[None]")) == ["arange:2"]
    assert list(found_in("torch.zeros(3, dtype=d)")) == ["zeros:1"]
    assert not list(found_in("torch.zeros(3, device=d) + torch.ones(2, **options)"))
    assert not list(found_in("x.new_zeros(3), torch.stack([a]), torch.zeros_like(a)"))
