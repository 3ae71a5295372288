"""What an op may allocate, copy and look at: scratch, a pool where it lies, nothing on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mlakit import ops, reference
from mlakit.cache import PagedLatentCache
from mlakit.dispatch import checks, knobs, selection
from mlakit.model.geometry import RowShape
from mlakit.ops import _checks, indexer, norm_rope_quant
from mlakit.tools.testing import assert_same_bits
from tests.conftest import Place
from tests.ops.cases import (
    BF16,
    CALLS,
    E4M3,
    KV_LENS,
    SCALE,
    Call,
    append_call,
    decode_call,
    int32,
    make_cache,
    quantize_call,
    scaled_mm_call,
    sparse_call,
)
from tests.ops.every_op import assert_same_results
from tests.ops.inside_ops import modes_see_inside_ops


class Scratch(TorchDispatchMode):
    """The tensors made while it is entered: the most bytes alive at once, and the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.largest = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        taken = {storage(x).data_ptr() for x in tree_leaves((args, kwargs)) if is_tensor(x)}
        results = function(*args, **(kwargs or {}))
        for made in map(storage, filter(is_tensor, tree_leaves(results))):
            if made.data_ptr() not in taken and made.nbytes():
                self._alive[made.data_ptr()] = (StorageWeakRef(made), made.nbytes())
                self.largest = max(self.largest, made.nbytes())
        self._alive = {k: v for k, v in self._alive.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return results


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def test_scratch_sees_what_is_alive_at_once():
    x = torch.zeros(1000)
    with Scratch() as scratch:
        for _ in range(3):
            doubled = x * 2
            doubled.add_(1).view(10, 100).sum()
            del doubled
    assert scratch.largest == 4000
    assert 4000 <= scratch.peak < 8000


@pytest.mark.slow
@pytest.mark.parametrize("format", ["bf16", "fp8", "fp8_token", "fp8_block128"])
@pytest.mark.parametrize(
    "make", [decode_call, append_call, sparse_call], ids=["decode", "append", "sparse"]
)
def test_a_strided_pool_is_used_where_it_lies(make, format):
    """Nothing the size of a pool is made, let alone a copy of one; its results are the same."""
    call, generator = make(format), torch.Generator().manual_seed(1)
    pool, table = make_cache(
        generator, KV_LENS, format=format, num_pages=3000, padded=True, room=KV_LENS
    )
    assert not pool.payload.is_contiguous()
    others = {"page_table": table} if "page_table" in call.arguments else {}
    packed = PagedLatentCache(
        pool.codec,
        pool.payload.contiguous(),
        None if pool.scales is None else pool.scales.contiguous(),
    )
    with modes_see_inside_ops(), Scratch() as scratch:
        results = call.run(cache=pool, **others)
    assert scratch.largest < storage(pool.payload).nbytes() / 20
    for result, want in zip(results, call.run(cache=packed, **others), strict=True):
        assert_same_bits("result", result, want)
    assert_same_bits("payload", pool.payload, packed.payload)


LONG = 20_000
NARROW, WIDE = RowShape(48, 16), RowShape(240, 16)


def long_decode(
    q_len: int, kv_len: int, format: str, page_size: int, row: RowShape = NARROW
) -> Call:
    pages = -(-kv_len // page_size)
    cache = PagedLatentCache.allocate(row, format, num_pages=pages, page_size=page_size)
    arguments = {
        "q": torch.zeros(q_len, 8, row.width, dtype=BF16),
        "cache": cache,
        "page_table": torch.arange(pages, dtype=torch.int32)[None],
        "kv_lens": int32([kv_len]),
        "q_starts": int32([0, q_len]),
        "softmax_scale": SCALE,
    }
    return Call(ops.mla_decode, arguments)


def long_prefill(q_len: int, kv_len: int, heads: int, width: int = 16) -> Call:
    arguments = {
        "q": torch.zeros(q_len, heads, width + 8, dtype=BF16),
        "k_nope": torch.zeros(kv_len, heads, width, dtype=BF16),
        "k_rope": torch.zeros(kv_len, 8, dtype=BF16),
        "v": torch.zeros(kv_len, heads, width, dtype=BF16),
        "q_starts": int32([0, q_len]),
        "kv_starts": int32([0, kv_len]),
        "softmax_scale": SCALE,
    }
    return Call(ops.mla_prefill, arguments)


def long_sparse(tokens: int, topk: int, format: str) -> Call:
    cache = PagedLatentCache.allocate(NARROW, format, num_pages=400, page_size=64)
    rows = torch.arange(tokens * topk, dtype=torch.int32).view(tokens, topk) % LONG
    q = torch.zeros(tokens, 8, NARROW.width, dtype=BF16)
    arguments = {"q": q, "cache": cache, "rows": rows, "softmax_scale": SCALE}
    return Call(ops.sparse_mla, arguments)


def long_logits(q_len: int, kv_len: int) -> Call:
    call = long_decode(q_len, kv_len, "fp8_token", 64)
    del call.arguments["softmax_scale"]
    q = torch.zeros(q_len, 2, NARROW.width, dtype=BF16)
    return Call(ops.indexer_logits, {**call.arguments, "q": q, "weights": torch.zeros(q_len, 2)})


def long_append(tokens: int) -> Call:
    call = long_decode(tokens, tokens, "fp8_token", 64)
    arguments = {
        "q_rope": torch.zeros(tokens, 8, NARROW.qk_rope_head_dim, dtype=BF16),
        "kv": torch.zeros(tokens, NARROW.width, dtype=BF16),
        "freqs": torch.zeros(tokens, NARROW.qk_rope_head_dim),
        "gamma": torch.zeros(NARROW.kv_lora_rank, dtype=BF16),
        "epsilon": 1e-6,
        **{name: call.arguments[name] for name in ("cache", "page_table", "kv_lens", "q_starts")},
    }
    return Call(ops.norm_rope_quant_append, arguments)


def long_merge(tokens: int) -> Call:
    outs = [torch.zeros(tokens, 8, 32, dtype=BF16) for _ in range(3)]
    lses = [torch.zeros(tokens, 8) for _ in range(3)]
    return Call(ops.merge_states, {"outs": outs, "lses": lses})


def long_scaled_mm(rows: int) -> Call:
    a, b = (torch.zeros(n, 256, dtype=E4M3) for n in (rows, 512))
    scales = {"a_scale": torch.zeros(2, rows), "b_scale": torch.zeros(4, 2)}
    return Call(ops.scaled_mm_fp8, {"a": a, "b": b, **scales})


def long_matmul(rows: int) -> Call:
    # torch multiplies bf16 without scratch where the CPU can
    a, b = (torch.zeros(2, n, 256, dtype=torch.float16) for n in (rows, 512))
    return Call(ops.batched_matmul, {"a": a, "b": b})


LONG_CALLS: dict[str, Callable[[], Call]] = {
    "decode-long-context": lambda: long_decode(2, LONG, "fp8_token", 64),
    "decode-page-1": lambda: long_decode(1, LONG, "bf16", 1),
    "decode-one-page": lambda: long_decode(1, LONG, "fp8_block128", LONG),
    "decode-many-queries": lambda: long_decode(150, 160, "bf16", 64, WIDE),
    "prefill-long-context": lambda: long_prefill(40, LONG, 2),
    "prefill-many-heads": lambda: long_prefill(100, 200, 64),
    "prefill-one-wide-head": lambda: long_prefill(600, 600, 1, 128),
    "sparse-long-lists": lambda: long_sparse(1, LONG, "fp8_token"),
    "sparse-many-tokens": lambda: long_sparse(100, 300, "bf16"),
    "logits-long-context": lambda: long_logits(4, LONG),
    "logits-many-queries": lambda: long_logits(700, 1500),
    "topk-long-rows": lambda: Call(ops.indexer_topk, {"logits": torch.zeros(40, LONG), "k": 512}),
    "append-many-tokens": lambda: long_append(2000),
    "merge-many-tokens": lambda: long_merge(4000),
    "quantize-many-rows": lambda: Call(
        ops.quantize_fp8, {"x": torch.zeros(4000, 256, dtype=BF16), "group": 128}
    ),
    "scaled-mm-many-rows": lambda: long_scaled_mm(4000),
    "matmul-many-rows": lambda: long_matmul(2000),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG_CALLS)
def test_scratch_stays_within_the_workspace(name):
    call = LONG_CALLS[name]()
    given = dict(zip(call.results, call.empty_results(), strict=True))
    with knobs.override(workspace_mib=1), modes_see_inside_ops(), Scratch() as scratch:
        call.run(**given)
    assert 0 < scratch.peak <= 1 << 20


@pytest.mark.slow
def test_scores_of_a_long_prompt_stay_within_the_limit():
    """Beside the workspace of the kernels; all scores are 4 MB."""
    call = long_logits(700, 1500)
    call = Call(ops.indexer_select, {**call.arguments, "k": 16, "max_score_bytes": 1 << 18})
    (out,) = call.empty_results()
    with knobs.override(workspace_mib=1), modes_see_inside_ops(), Scratch() as scratch:
        call.run(out=out)
    assert scratch.largest <= 1 << 20
    assert 1 << 18 < scratch.peak <= (1 << 18) + (1 << 20)


@pytest.mark.slow
def test_the_workspace_is_used_when_there_is_one():
    """Else the test above would pass for kernels that go row by row."""
    call = long_prefill(600, 600, 4, 128)
    with knobs.override(workspace_mib=64), modes_see_inside_ops(), Scratch() as scratch:
        call.run()
    assert scratch.peak > 4 << 20


@contextmanager
def nothing_is_read_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors as if on a GPU with `check_values` off: looking at a value fails."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a value was read on the host")

    with monkeypatch.context() as patch:
        # a function has the name of its module
        appending = import_module("mlakit.ops.append_rows")
        for module in (checks, _checks, indexer, norm_rope_quant, appending):
            patch.setattr(module, "values_visible", lambda tensor: False)
        for read in ("tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__"):
            patch.setattr(Tensor, read, refuse)
        for read in ("nonzero", "equal", "allclose"):
            patch.setattr(torch, read, refuse)
        nothing = SimpleNamespace(
            launch=lambda *_, **__: None,
            plan=lambda starts, lens, mask, blocks: [(starts, lens) for _ in blocks],
        )
        patch.setattr(selection, "select", lambda *_: nothing)
        yield


@pytest.mark.parametrize("name", CALLS)
def test_no_value_is_read_on_the_host(name, monkeypatch):
    call = CALLS[name]()
    with nothing_is_read_back(monkeypatch):
        call.run()


@pytest.mark.interpreted
def test_a_group_larger_than_its_axis_takes_no_memory(place: Place):
    huge = 2**50
    for batch in ((), (2,)):
        call = quantize_call(*batch).on(place.device)
        columns = call.arguments["x"].shape[-1]
        expected = call.run(group=columns)
        assert_same_results(call.run(group=huge), expected)
        call = scaled_mm_call(*batch)
        call = call.but(
            a_scale=call.arguments["a_scale"][..., :1, :],
            b_scale=call.arguments["b_scale"][..., :1, :1],
        ).on(place.device)
        expected = call.run(n_group=call.arguments["b"].shape[-2], k_group=columns)
        assert_same_results(call.run(n_group=huge, k_group=huge), expected)


def test_a_group_larger_than_its_axis_takes_no_memory_in_the_reference():
    huge = 2**50
    x = torch.randn(3, 20)
    q, scales = reference.quantize_fp8(x, huge)
    assert_same_bits(
        "x", reference.dequantize_fp8(q, scales, huge), reference.dequantize_fp8(q, scales, 20)
    )
    products = [
        reference.scaled_mm_fp8(q, scales, q, scales[:, :1], n_group=n, k_group=k)
        for n, k in ((3, 20), (huge, huge))
    ]
    assert_same_bits("product", *products)
