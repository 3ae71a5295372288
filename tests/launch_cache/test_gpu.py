"""Launch replay on a GPU, at its edges: each call is compared with the same call on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mlakit import PagedLatentCache, launch_cache, ops
from mlakit.dispatch import knobs
from mlakit.model.geometry import RowShape
from mlakit.tools.testing import assert_same_bits

pytestmark = pytest.mark.gpu

ROW = RowShape(512, 64)
HEADS, BATCH, PAGES = 16, 4, 3
BF16 = torch.bfloat16


class Table(NamedTuple):
    """A flat page table as a caller's own type."""

    starts: Tensor
    slots: Tensor


@pytest.fixture(autouse=True)
def _fresh_counts() -> None:
    launch_cache.reset_stats()


@pytest.fixture
def decode() -> Callable[..., tuple[Tensor, Tensor]]:
    """`mla_decode` on one cache; batches of other sizes are calls of other facts."""
    generator = torch.Generator("cuda").manual_seed(0)
    cache = PagedLatentCache.allocate(ROW, "bf16", num_pages=BATCH * PAGES, device="cuda")
    cache.payload.normal_(generator=generator)
    lens = torch.tensor([130, 64, 1, 192], dtype=torch.int32, device="cuda")

    def call(q: Tensor, **changes: Any) -> tuple[Tensor, Tensor]:
        arguments: dict[str, Any] = {
            "page_table": torch.arange(BATCH * PAGES, dtype=torch.int32, device="cuda").view(
                BATCH, PAGES
            ),
            "kv_lens": lens,
            "softmax_scale": 0.1,
        }
        return ops.mla_decode(q, cache, **arguments | changes)

    return call


def queries(seed: int, heads: int = HEADS) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(BATCH, heads, 576, device="cuda", generator=generator).to(BF16)


def in_full(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with knobs.override(launch_cache=False):
        return function(*args, **kwargs)


def hits(op: str = "mla_decode") -> int:
    return launch_cache.stats()[op].hits


def test_repeated_calls_are_replayed_and_counted(decode):
    own = {"softmax_scale": 0.375}  # other tests may have recorded the calls with the usual one
    for seed in range(6):
        q = queries(seed)
        got = decode(q, **own)
        assert_same_bits("out", got[0], in_full(decode, q, **own)[0])
    stats = launch_cache.stats()["mla_decode"]
    assert stats.hits == 4
    assert stats.misses == 2
    assert stats.refused == {"MLAKIT_LAUNCH_CACHE is off": 6}


def test_a_sink_that_is_a_view_of_q(decode):
    """Recorded with the sink inside q, replayed with one elsewhere."""
    for seed in range(5):
        q = queries(seed)
        sink = q.view(torch.float32).view(-1)[1024 : 1024 + HEADS]
        sink.fill_(float(seed))
        assert_same_bits("out", decode(q, sink=sink)[0], in_full(decode, q, sink=sink)[0])
        apart = torch.full((HEADS,), -float(seed), device="cuda")
        got = decode(q, sink=apart)[0]
        assert_same_bits("out", got, in_full(decode, q, sink=apart)[0])
    assert hits() >= 7


def test_recording_survives_a_busy_gpu(decode):
    torch.cuda._sleep(int(2e9))
    for seed in range(8):
        decode(queries(seed))
    torch.cuda.synchronize()
    for seed in range(80):
        decode(queries(seed % 3))
    before = hits()
    decode(queries(1))
    assert hits() == before + 1


def test_recording_survives_a_graph_capture(decode):
    q = queries(0)
    out, lse = decode(q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            decode(q, out=out, lse=lse)
    want = in_full(decode, q)[0]
    out.zero_()
    graph.replay()
    assert_same_bits("out", out, want)
    for seed in range(20):
        decode(queries(seed % 3))
    before = hits()
    decode(q)
    assert hits() == before + 1


def test_merging_in_place_is_replayed():
    for seed in range(6):
        generator = torch.Generator("cuda").manual_seed(seed)
        outs = [torch.randn(5, 8, 64, device="cuda", generator=generator) for _ in range(2)]
        lses = [torch.randn(5, 8, device="cuda", generator=generator) for _ in range(2)]
        want = in_full(ops.merge_states, outs, lses)
        ops.merge_states(outs, lses, out=outs[0], lse=lses[0])
        assert_same_bits("out", outs[0], want[0])
        assert_same_bits("lse", lses[0], want[1])
    assert hits("merge_states") == 4


def test_rotating_queries_in_place_is_replayed():
    cache = PagedLatentCache.allocate(ROW, "bf16", num_pages=BATCH, device="cuda")
    freqs = torch.randn(64, 64, device="cuda")
    gamma = torch.nn.Parameter(torch.ones(512, device="cuda", dtype=BF16))
    slots = torch.arange(BATCH, dtype=torch.int32, device="cuda")
    with torch.no_grad():
        for seed in range(6):
            q_rope, kv = queries(seed)[..., :64].contiguous(), queries(seed, 1)[:, 0]

            def append(out: Tensor | None, q_rope: Tensor = q_rope, kv: Tensor = kv) -> Tensor:
                kv_lens = torch.ones(BATCH, dtype=torch.int32, device="cuda")
                return ops.norm_rope_quant_append(
                    q_rope, kv, freqs, gamma, cache, slots[:, None], kv_lens, None,
                    epsilon=1e-6, q_rope_out=out,
                )  # fmt: skip

            want = in_full(append, None)
            version = q_rope._version, cache.payload._version
            append(q_rope)
            assert_same_bits("q_rope", q_rope, want)
            assert q_rope._version > version[0]
            assert cache.payload._version > version[1]
    assert hits("norm_rope_quant_append") == 4


def test_a_named_tuple_as_page_table_is_neither_kept_nor_stale(decode):
    lens = torch.tensor([130, 64, 1, 190], dtype=torch.int32, device="cuda")
    starts = torch.tensor([0, 130, 194, 195, 385], dtype=torch.int32, device="cuda")
    memory = []
    for seed in range(12):
        q = queries(seed)
        slots = torch.randperm(BATCH * PAGES * 64, device="cuda").int()
        table = Table(starts, torch.cat([slots, slots.new_zeros(2**20)]))
        got = decode(q, page_table=table, kv_lens=lens)[0]
        want = in_full(decode, q, page_table=tuple(table), kv_lens=lens)[0]
        assert_same_bits("out", got, want)
        del table, slots, got, want, q
        memory.append(torch.cuda.memory_allocated())
    assert memory[-1] == memory[3]
    assert hits() > 0


def test_negative_views_are_read_with_their_sign(decode):
    q = queries(0)
    for _ in range(4):
        got = decode(torch._neg_view(q))[0]
        assert_same_bits("out", got, in_full(decode, -q)[0])


def test_fake_tensors_start_no_kernel(decode):
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out, _ = decode(mode.from_tensor(queries(0)))
    assert out.shape == (BATCH, HEADS, 512)
    torch.cuda.synchronize()
    decode(queries(0))


def test_the_result_of_a_functional_collective(decode, tmp_path):
    from torch import distributed
    from torch.distributed import _functional_collectives as functional

    distributed.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        for seed in range(4):
            q = queries(seed)
            reduced = functional.all_reduce(q.clone(), "sum", distributed.group.WORLD)
            assert type(reduced) is functional.AsyncCollectiveTensor
            got = decode(reduced)[0]
            assert_same_bits("out", got, in_full(decode, q)[0])
    finally:
        distributed.destroy_process_group()
    torch.cuda.synchronize()


def test_make_fx_keeps_the_kernels(decode):
    from torch.fx.experimental.proxy_tensor import make_fx

    q = queries(0)
    for _ in range(4):
        decode(q)
    graph = make_fx(lambda q: decode(q)[0])(q)
    other = queries(1)
    assert_same_bits("out", graph(other), in_full(decode, other)[0])


def test_compiled_calls_are_replayed_too(decode):
    compiled = torch.compile(lambda q: decode(q)[0] * 2, fullgraph=True)
    for seed in range(6):
        q = queries(seed)
        assert_same_bits("out", compiled(q), in_full(decode, q)[0] * 2)
    assert hits() >= 3


def test_a_float_in_kv_shard_is_refused_after_recording_too(decode):
    for seed in range(4):
        decode(queries(seed), kv_shard=(0, 2, 1))
    with pytest.raises(TypeError, match="kv_shard interleave must be an integer, got float"):
        decode(queries(0), kv_shard=(0.0, 2, 1.0))


def test_a_scale_that_requires_grad_is_refused():
    cache = PagedLatentCache.allocate(
        ROW, "fp8", num_pages=1, device="cuda",
        tensor_scale=torch.ones(1, device="cuda", requires_grad=True),
    )  # fmt: skip
    table = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
    lens = torch.ones(1, dtype=torch.int32, device="cuda")
    for _ in range(4):
        with pytest.raises(NotImplementedError, match="the tensor_scale of layer must not require"):
            ops.mla_decode(queries(0)[:1], cache, table, lens, softmax_scale=1.0)


def test_threads_with_more_host_scales_than_are_remembered(decode):
    import threading

    failed = []

    def run(first: int) -> None:
        try:
            for i in range(first, first + 300):
                cache = PagedLatentCache.allocate(
                    ROW, "fp8", num_pages=1, device="cuda", tensor_scale=1.0 + i / 1024
                )
                table = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
                lens = torch.ones(1, dtype=torch.int32, device="cuda")
                ops.mla_decode(queries(0)[:1], cache, table, lens, softmax_scale=1.0)
        except BaseException as error:  # noqa: BLE001  # the test reports it
            failed.append(error)

    threads = [threading.Thread(target=run, args=(i * 300,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_library_products_are_replayed():
    """`batched_matmul` by cuBLAS, over slices as in a decode step."""
    weight = queries(99, heads=4).transpose(0, 1)[..., :512]  # [4, BATCH, 512]
    for seed in range(6):
        a = queries(seed, heads=4).transpose(0, 1)[..., :512]
        out = torch.empty(BATCH, 4, BATCH, dtype=BF16, device="cuda")
        with torch.autocast("cuda", dtype=torch.float16, enabled=seed == 5):
            ops.batched_matmul(a, weight, out=out.transpose(0, 1))
        want = in_full(ops.batched_matmul, a, weight)
        assert_same_bits("out", out.transpose(0, 1), want)
    assert hits("batched_matmul") == 4
