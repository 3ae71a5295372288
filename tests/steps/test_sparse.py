"""A whole step of DeepSeek-V3.2 against float64: keys appended, rows selected, attended, projected.

Both caches are poison except the cached context. The oracle scores the keys as the index cache
holds them, in float64, and attends in the expanded form to the rows that it selects itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit import reference, steps
from mlakit.cache import PagedLatentCache, request_slots
from mlakit.dispatch import selection
from mlakit.dispatch.checks import UnsupportedError
from mlakit.model.geometry import RowShape
from mlakit.plan import EvenSplit, plan_decode
from mlakit.steps import CachedBatch, IndexInputs, LayerWeights
from mlakit.tools.testing import assert_same_bits, assert_unchanged, poison, snapshot
from tests.steps.step_oracles import (
    BF16,
    E4M3,
    F32,
    F64,
    FP8_STEPS,
    PAGE_SIZE,
    STEPS,
    Step,
    decode_branch,
    int32,
)
from tests.transplant import Transplant, carried

pytestmark = pytest.mark.usefixtures("place")
interpreted = pytest.mark.interpreted
sparse_step = carried(steps.sparse_step)
INDEX_LAYER = 2
INDEX_HEADS, INDEX_WIDTH = 2, 16
K = 4


@dataclass(frozen=True)
class SparseStep:
    """A step with the inputs of its indexer, made from a seed.

    q_dtype  of the index queries
    format   of the index keys
    paged    keys in pages as vLLM and DeepGEMM lay them out
    """

    step: Step = field(default_factory=Step)
    q_dtype: torch.dtype = BF16
    format: str = "fp8_token"
    paged: bool = False
    power_of_two: bool = True
    init_tokens: int = 0
    local_tokens: int = 0

    def _normal(self, seed: int, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + seed))

    @cached_property
    def _keys(self) -> list[Tensor]:
        """Of every token of every request; the newest are the step's own."""
        return [self._normal(b, n, INDEX_WIDTH).to(BF16) for b, n in enumerate(self.step.kv_lens)]

    def _cache(self, num_pages: int) -> tuple[PagedLatentCache, int]:
        if self.paged:
            blocks = torch.zeros(num_pages, PAGE_SIZE, INDEX_WIDTH + 4, dtype=torch.uint8)
            return PagedLatentCache.wrap_index_keys(blocks), 0
        made = PagedLatentCache.allocate(
            RowShape(INDEX_WIDTH, 0),
            self.format,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            num_layers=INDEX_LAYER + 1,
        )
        return made, INDEX_LAYER

    def index(self) -> IndexInputs:
        """With a cache of its own: the context's keys, all other rows poison."""
        tokens, step = self.step.tokens, self.step
        cache, layer = self._cache(step.batch().cache.num_pages)
        for stored in (cache.payload, cache.scales):
            if stored is not None:
                poison(stored)
        for request, (keys, before) in enumerate(zip(self._keys, step.before, strict=True)):
            slots = request_slots(step.table, PAGE_SIZE, request, 0, before)
            cache.layer(layer).write(slots, keys[:before])
        new = [keys[before:] for keys, before in zip(self._keys, step.before, strict=True)]
        return IndexInputs(
            self._normal(90, tokens, INDEX_HEADS, INDEX_WIDTH).to(self.q_dtype),
            torch.cat(new),
            self._normal(91, tokens, INDEX_HEADS),
            cache,
            layer,
            self.power_of_two,
            self.init_tokens,
            self.local_tokens,
        )

    def arguments(self) -> tuple[Tensor, Tensor, LayerWeights, CachedBatch, IndexInputs]:
        return *self.step.arguments(), self.index()

    def check_keys(self, index: IndexInputs) -> None:
        """The new keys are stored quantised, and nothing else was written."""
        untouched = self.index()
        written = torch.cat(
            [
                request_slots(self.step.table, PAGE_SIZE, b, *ends)
                for b, ends in enumerate(zip(self.step.before, self.step.kv_lens, strict=True))
            ]
        )
        layer = untouched.cache.layer(untouched.layer)
        layer.write(written, index.keys, power_of_two_scales=self.power_of_two)
        assert_same_bits("index keys", index.cache.payload, untouched.cache.payload)
        if index.cache.scales is not None and untouched.cache.scales is not None:
            assert_same_bits("their scales", index.cache.scales, untouched.cache.scales)

    def selected(self, index: IndexInputs, k: int) -> list[list[int]]:
        """Per query, the positions in its request that the oracle selects."""
        layer, step = index.cache.layer(index.layer), self.step
        keys = [
            layer.read(request_slots(step.table, PAGE_SIZE, b, 0, n), F64)
            for b, n in enumerate(step.kv_lens)
        ]
        tokens = [torch.arange(n) for n in step.kv_lens]
        always = {"init_tokens": self.init_tokens, "local_tokens": self.local_tokens}
        given = (index.q, index.weights, keys, tokens, step.q_lens, k)
        chosen = reference.indexer_select(*given, **always, dtype=F32)
        return [[at for at in own if at >= 0] for own in chosen.tolist()]

    def physical(self, lists: list[list[int]], k: int) -> Tensor:
        """int32 [tokens, k] as `indexer_select` returns them."""
        requests = [b for b, new in enumerate(self.step.q_lens) for _ in range(new)]
        rows = torch.full((self.step.tokens, k), -1, dtype=torch.int32)
        for token, (b, keys) in enumerate(zip(requests, lists, strict=True)):
            slots = request_slots(self.step.table, PAGE_SIZE, b, 0, self.step.kv_lens[b])
            rows[token, : len(keys)] = slots[torch.tensor(keys, dtype=torch.int64)].int()
        return rows

    def check(self, out: Tensor, rows: Tensor, batch: CachedBatch, index: IndexInputs) -> None:
        self.step.check_appended(batch)
        self.check_keys(index)
        lists = self.selected(index, rows.shape[1])
        assert_same_bits("rows", rows, self.physical(lists, rows.shape[1]))
        self.step.check_sparse(out, batch, lists)


CASES = {
    "bf16": SparseStep(),
    "e4m3-queries-pages": SparseStep(q_dtype=E4M3, paged=True),
    "fp8_block128-flat": SparseStep(STEPS["fp8_block128-flat"], q_dtype=E4M3),
    "fp8_token-plain-scales": SparseStep(STEPS["fp8_token-half"], power_of_two=False),
    "fp32-bf16-keys": SparseStep(STEPS["fp32"], q_dtype=F32, format="bf16"),
    "empty-requests": SparseStep(Step(kv_lens=(0, 9, 5, 0), q_lens=(0, 2, 0, 0))),
    "nothing-cached": SparseStep(STEPS["nothing-cached"]),
    "sink": SparseStep(STEPS["sink"]),
    "always-selected": SparseStep(init_tokens=1, local_tokens=2),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


@every_case
@interpreted(case=[CASES["e4m3-queries-pages"]])
def test_a_step_selects_and_attends(case):
    arguments = case.arguments()
    q, kv, _, batch, index = arguments
    rows = torch.full((len(q), K), 77, dtype=torch.int32)
    out = torch.full((len(q), 3, 24), torch.nan, dtype=q.dtype)
    returned = sparse_step(*arguments, K, rows=rows, out=out)
    assert returned.data_ptr() == out.data_ptr()
    case.check(out, rows, batch, index)
    assert_same_bits("q", q, case.step.q)
    assert_same_bits("kv", kv, case.step.kv)


def test_a_query_sees_its_own_token_and_no_later_one():
    """Keys double with every position, so every query selects the newest token that it sees."""
    case = CASES["bf16"]
    q, kv, weights, batch, index = case.arguments()
    size = 2.0 ** (torch.tensor(case.step.positions)[:, None] + 8)
    index = replace(
        index,
        q=torch.ones_like(index.q),
        keys=size.expand(-1, INDEX_WIDTH).to(BF16).contiguous(),
        weights=torch.ones_like(index.weights),
    )
    rows = torch.empty(len(q), 1, dtype=torch.int32)
    sparse_step(q, kv, weights, batch, index, 1, rows=rows)
    own = [[position] for position in case.step.positions]
    assert_same_bits("rows", rows, case.physical(own, 1))


def test_as_many_rows_as_there_are_make_a_dense_step():
    case = CASES["bf16"]
    q, kv, weights, batch, index = case.arguments()
    out = sparse_step(q, kv, weights, batch, index, 64)
    case.step.check_decode(out, batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"max_score_bytes": 80 * 3}, {"max_kv_len": 18}, {"plan": EvenSplit(2)}],
    ids=["blocks", "max_kv_len", "splits"],
)
def test_how_a_step_is_computed_changes_no_selection(options):
    case = CASES["bf16"]
    arguments = case.arguments()
    rows = torch.empty(len(arguments[0]), K, dtype=torch.int32)
    out = sparse_step(*arguments, K, rows=rows, **options)
    case.check(out, rows, *arguments[3:])


def test_a_layer_that_shares_the_rows_attends_to_them():
    case = CASES["bf16"]
    q, kv, weights, batch, index = case.arguments()
    rows = torch.empty(len(q), K, dtype=torch.int32)
    want = sparse_step(q, kv, weights, batch, index, K, rows=rows)
    q, kv, weights, batch = case.step.arguments()
    assert_same_bits("out", decode_branch(q, kv, weights, batch, rows=rows), want)


@pytest.mark.parametrize("step", FP8_STEPS.values(), ids=list(FP8_STEPS))
def test_fp8_weights(step):
    """The same as the branch that is given the rows."""
    case = SparseStep(step)
    q, kv, weights, batch, index = case.arguments()
    rows = torch.empty(len(q), K, dtype=torch.int32)
    out = sparse_step(q, kv, weights, batch, index, K, rows=rows)
    assert_same_bits("rows", rows, case.physical(case.selected(index, K), K))
    q, kv, weights, batch = step.arguments()
    assert_same_bits("out", decode_branch(q, kv, weights, batch, rows=rows), out)


@pytest.mark.parametrize(
    "scope",
    [
        lambda: torch.device("meta"),
        lambda: torch.autocast("cpu", BF16),
        lambda: torch.inference_mode(),
    ],
    ids=["default-device", "autocast", "inference"],
)
@pytest.mark.on_cpu
def test_scopes_of_torch_change_no_bit(scope):
    case = CASES["fp32-bf16-keys"]
    want = sparse_step(*case.arguments(), K)
    arguments = case.arguments()
    with scope():
        out = sparse_step(*arguments, K)
    assert_same_bits("out", out, want)
    case.check_keys(arguments[4])


@pytest.mark.slow
def test_a_step_compiles_into_one_graph(place):
    there = Transplant(place.device)
    case = SparseStep(q_dtype=E4M3)  # aot_autograd takes no pages whose scales are views of bytes
    want_arguments, arguments = there.moved(case.arguments()), there.moved(case.arguments())
    torch._dynamo.reset()
    compiled = torch.compile(steps.sparse_step, fullgraph=True, backend="aot_eager")
    out = compiled(*arguments, K)
    assert_same_bits("out", out, steps.sparse_step(*want_arguments, K))
    assert_same_bits("keys", arguments[4].cache.payload, want_arguments[4].cache.payload)
    torch._dynamo.reset()


@pytest.mark.parametrize("op", ["sparse_mla", "indexer_logits"])
def test_a_step_without_a_kernel_of_a_later_op_writes_nothing(op, monkeypatch):
    select = selection.select

    def refuse(name: str, *arguments: Any) -> Any:
        if name == op:
            raise UnsupportedError(f"{name}: no kernel")
        return select(name, *arguments)

    monkeypatch.setattr(selection, "select", refuse)
    arguments = CASES["bf16"].arguments()
    before = written_by(arguments)
    with pytest.raises(UnsupportedError, match=op):
        sparse_step(*arguments, K)
    assert_unchanged(before)


def written_by(arguments: tuple[Any, ...]) -> Any:
    q, kv, _, batch, index = arguments
    return snapshot(q=q, kv=kv, payload=batch.cache.payload, keys=index.cache.payload)


Change = Callable[[CachedBatch, IndexInputs], dict[str, Any]]


def other_cache(index: IndexInputs, row: RowShape, page_size: int = PAGE_SIZE) -> IndexInputs:
    cache = PagedLatentCache.allocate(row, "fp8_token", num_pages=20, page_size=page_size)
    return replace(index, cache=cache, layer=0)


def fewer_pages(index: IndexInputs) -> IndexInputs:
    made = PagedLatentCache.allocate(
        RowShape(INDEX_WIDTH, 0), "fp8_token", num_pages=3, page_size=PAGE_SIZE
    )
    return replace(index, cache=made, layer=0)


REFUSALS: dict[str, Change] = {
    "index must be IndexInputs, got PagedLatentCache": lambda b, i: {"index": i.cache},
    "index.cache must be a PagedLatentCache, got Tensor; "
    "PagedLatentCache.wrap(tensor, geometry) makes one": lambda b, i: {
        "index": replace(i, cache=i.keys)
    },
    "index.layer must be below the cache's 3 layers, got 3": lambda b, i: {
        "index": replace(i, layer=3)
    },
    "index.cache must have rows of one kind of column, got rows with 8 rope columns": lambda b, i: {
        "index": other_cache(i, RowShape(8, 8))
    },
    "index.cache must have pages of 4 tokens, like the latent cache: both share the page "
    "table, got 8": lambda b, i: {"index": other_cache(i, RowShape(INDEX_WIDTH, 0), 8)},
    "page_table[": lambda b, i: {"index": fewer_pages(i)},
    "index.q.shape[2] (D) must equal the row width of index.cache, 16, got 8": lambda b, i: {
        "index": replace(i, q=i.q[..., :8])
    },
    "index.q.shape[0] (tokens) must equal q.shape[0], 22, got 21": lambda b, i: {
        "index": replace(i, q=i.q[1:])
    },
    "index.keys.shape[0] (tokens) must equal q.shape[0], 22, got 21": lambda b, i: {
        "index": replace(i, keys=i.keys[1:])
    },
    "index.keys must be bfloat16 or float16 or float32, got float8_e4m3fn": lambda b, i: {
        "index": replace(i, keys=i.keys.to(E4M3))
    },
    "index.weights must be float32, got bfloat16": lambda b, i: {
        "index": replace(i, weights=i.weights.to(BF16))
    },
    "index.weights.shape[1] (index_heads) must equal index.q.shape[1], 2, got 1": lambda b, i: {
        "index": replace(i, weights=i.weights[:, :1])
    },
    "k must be at least 1, got 0": lambda b, i: {"k": 0},
    "k must be an integer, got float": lambda b, i: {"k": 2.0},
    "rows must be int32, got int64": lambda b, i: {"rows": torch.zeros(22, K, dtype=torch.int64)},
    "rows.shape[1] (k) must equal k, 4, got 5": lambda b, i: {
        "rows": torch.zeros(22, K + 1, dtype=torch.int32)
    },
    "kv_lens[2] must not exceed max_kv_len, 17, got 18": lambda b, i: {"max_kv_len": 17},
    "max_score_bytes must hold the scores of one query, 80 bytes, got 79": lambda b, i: {
        "max_score_bytes": 79
    },
    "plan must be an EvenSplit, got DecodePlan": lambda b, i: {
        "plan": plan_decode((1,) * 6, num_ctas=2)
    },
    "kv_lens[1] must include the 5 new tokens of the request, got 0": lambda b, i: {
        "batch": replace(b, kv_lens=b.kv_lens - b.q_starts.diff())
    },
    "out must be bfloat16, got float32": lambda b, i: {"out": torch.zeros(22, 3, 24)},
}


@pytest.mark.parametrize("said", REFUSALS)
@pytest.mark.on_cpu
def test_a_wrong_step_is_refused_and_writes_nothing(said):
    arguments = CASES["bf16"].arguments()
    names = ("q", "kv", "weights", "batch", "index")
    before = written_by(arguments)
    batch, index = arguments[3:]
    given = {**dict(zip(names, arguments, strict=True)), "k": K, **REFUSALS[said](batch, index)}
    with pytest.raises((TypeError, ValueError)) as refusal:
        sparse_step(**given)
    assert str(refusal.value).startswith(f"sparse_step: {said}")
    assert_unchanged(before)


@pytest.mark.parametrize("name", ["q", "kv"])
@pytest.mark.on_cpu
def test_strided_inputs_are_refused_before_the_keys_are_appended(name):
    arguments = CASES["bf16"].arguments()
    before = written_by(arguments)
    given = dict(zip(("q", "kv", "weights", "batch", "index"), arguments, strict=True))
    given[name] = given[name].mT.contiguous().mT
    with pytest.raises(ValueError, match=f"^sparse_step: {name} must have a contiguous last axis"):
        sparse_step(**given, k=K)
    assert_unchanged(before)


@pytest.mark.on_cpu
def test_a_cache_of_one_page_expanded_is_refused_before_the_keys_are_appended():
    q, kv, weights, batch, index = CASES["bf16"].arguments()
    before = written_by((q, kv, weights, batch, index))
    payload = batch.cache.payload[:, :1].expand(batch.cache.payload.shape)
    expanded = replace(batch, cache=replace(batch.cache, payload=payload))
    with pytest.raises(ValueError, match="sparse_step: the payload of cache must be writable"):
        sparse_step(q, kv, weights, expanded, index, K)
    assert_unchanged(before)


@pytest.mark.parametrize("name", ["out", "the payload of cache"])
@pytest.mark.on_cpu
def test_what_is_written_and_requires_grad_is_refused_before_the_keys_are_appended(name):
    arguments = CASES["bf16"].arguments()
    before = written_by(arguments)
    out = torch.zeros(22, 3, 24, dtype=BF16, requires_grad=name == "out")
    payload = arguments[3].cache.payload.requires_grad_(name != "out")
    with pytest.raises(UnsupportedError, match=f"^sparse_step: {name} must not require grad"):
        sparse_step(*arguments, K, out=out)
    payload.requires_grad_(False)
    assert_unchanged(before)


@pytest.mark.parametrize("name", ["q", "keys", "weights"])
def test_index_inputs_that_require_grad_are_refused(name):
    *others, index = CASES["bf16"].arguments()
    trained = getattr(index, name).clone().requires_grad_()
    with pytest.raises(UnsupportedError, match=rf"index\.{name} must not require grad"):
        sparse_step(*others, replace(index, **{name: trained}), K)


@pytest.mark.gpu
def test_one_cuda_graph_follows_the_lengths(place):
    """Captured with some lengths, replayed with others, into the same tensors."""
    there = Transplant(place.device)
    case = CASES["e4m3-queries-pages"]
    q, kv, weights, batch, index = there.moved(case.arguments())
    rows = torch.empty(len(q), K, dtype=torch.int32, device=q.device)
    out = torch.empty(len(q), 3, 24, dtype=q.dtype, device=q.device)

    def step() -> None:
        steps.sparse_step(q, kv, weights, batch, index, K, rows=rows, out=out)

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths, q_lens in (
        (case.step.kv_lens, case.step.q_lens),
        ((5, 12, 4, 18, 1, 15), (5, 3, 1, 12, 1, 0)),
    ):
        other = SparseStep(Step(kv_lens=lengths, q_lens=q_lens, seed=3), q_dtype=E4M3, paged=True)
        other_q, other_kv, _, other_batch, other_index = there.moved(other.arguments())
        pages = min(batch.page_table.shape[1], other_batch.page_table.shape[1])
        batch.page_table[:, :pages].copy_(other_batch.page_table[:, :pages])
        for mine, theirs in (
            (q, other_q),
            (kv, other_kv),
            (batch.kv_lens, other_batch.kv_lens),
            (batch.q_starts, other_batch.q_starts),
            (batch.cache.payload, other_batch.cache.payload),
            (index.q, other_index.q),
            (index.keys, other_index.keys),
            (index.weights, other_index.weights),
            (index.cache.payload, other_index.cache.payload),
            (index.cache.scales, other_index.cache.scales),
        ):
            mine.copy_(theirs)
        for result in (rows, out):
            poison(result)
        graph.replay()
        torch.cuda.synchronize()
        want_rows = torch.empty_like(rows)
        want = steps.sparse_step(
            other_q, other_kv, weights, other_batch, other_index, K, rows=want_rows
        )
        assert_same_bits("rows", rows, want_rows)
        assert_same_bits("out", out, want)
        assert int((rows >= 0).sum()) == sum(
            min(kv_len - new + i + 1, K)
            for kv_len, new in zip(lengths, q_lens, strict=True)
            for i in range(new)
        )
        assert list(accumulate(q_lens, initial=0)) == batch.q_starts.tolist()
        assert int32(lengths).tolist() == batch.kv_lens.tolist()
