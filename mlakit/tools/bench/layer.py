"""The suite `layer`: a decode step of one whole layer, `MLAAttention`, in a CUDA graph.

Layers  DeepSeek-V3 and V3.2 with random bf16 or block-FP8 weights, 128 heads and the 16 of one of
        eight tensor-parallel ranks; bf16 rows, index keys of 132 bytes
Stages  each one alone, with a cold L2 of its own. Projections: q_a, q_b and kv_a with the norm of
        q and the quantisation; output: o_proj. The speedup column is a stage's share of the layer
GEMMs   the products of the projections by cuBLAS: "GEMMs, sum" adds the times of each one alone,
        "GEMMs in a row" is one call. FP8 with one scale per tensor; products by head in bf16
Plan    made before the clock starts, like the positions: all layers of a step share them
Bytes   weights, the visible or selected rows, index keys, x and the result once
Check   some tokens: appended rows and keys, selection and output against the float64 oracle
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache, request_slots, token_positions
from mlakit.formats import Format, row_codec
from mlakit.layer import LayerConfig, MLAAttention
from mlakit.layer.linear import Activations
from mlakit.ops import indexer_select, mla_decode, sparse_mla
from mlakit.ops.decode_plan import plan_mla_decode
from mlakit.plan import DecodePlanTensors
from mlakit.steps import CachedBatch
from mlakit.steps.batch import append_tokens
from mlakit.steps.decode import absorb
from mlakit.steps.sparse import append_index_keys
from mlakit.tools.bench import gpu
from mlakit.tools.bench.gemms import Gemm, projections
from mlakit.tools.bench.layer_oracle import IndexOracle, LayerOracle
from mlakit.tools.bench.pool import ROW, SharedPool, StepPool, clear_new_rows, page_counts
from mlakit.tools.bench.report import MLAKIT, SELECT, STAGES
from mlakit.tools.bench.shapes import Batch, Shape
from mlakit.tools.bench.suite import Baseline, BenchmarkCase, Work, Workload
from mlakit.tools.testing import assert_matches

GEMM = "GEMM "  # begins the name of a product that is timed alone
GEMM_SUM, GEMMS_IN_A_ROW = "GEMMs, sum", "GEMMs in a row"
OF_STAGE = {
    "projections": ("q_a_proj", "q_b_proj", "kv_a_proj"),
    "absorb": ("absorb",),
    "indexer": ("wq_b", "wk", "weights_proj"),
    "up-project": ("up-project",),
    "output": ("o_proj",),
}
KEY_BYTES = 132  # of an index key with its scale
SMALL_WIDTHS = {"hidden_size": 256, "q_lora_rank": 256}
SMALL_TOPK = 64

Model = Literal["v3", "v3.2"]
WeightKind = Literal["bf16", "fp8"]


@dataclass(frozen=True, eq=False)
class Inputs:
    """The layer and the tensors of a step."""

    layer: MLAAttention
    x: Tensor
    batch: CachedBatch
    positions: Tensor
    index_cache: PagedLatentCache | None
    plan: DecodePlanTensors | None
    max_kv_len: int

    def run(self, rows: Tensor | None = None) -> Tensor:
        result: Tensor = self.layer(
            self.x,
            self.batch,
            plan=self.plan,
            index_cache=self.index_cache,
            rows=rows,
            positions=self.positions,
            max_kv_len=self.max_kv_len,
        )
        return result


@dataclass(frozen=True)
class Layer(Workload):
    """A decode step of one layer.

    weights   block-FP8 or bf16
    is_small  smaller hidden states and selections
    pool      shared with other workloads; None: its own
    """

    model: Model
    weights: WeightKind
    batch: Batch
    heads: int = 128
    format: Format = "bf16"
    page_size: int = 64
    is_small: bool = False
    pool: StepPool | None = field(default=None, compare=False)

    op = "MLAAttention"
    budget_s = 1.0
    max_rounds = 12

    @property
    def name(self) -> str:
        page = f"-page{self.page_size}" if self.page_size != 64 else ""
        rows = f"-{self.format}-rows" if self.format != "bf16" else ""
        label = self.batch.label(self.heads)
        return f"layer-{self.model}-{self.weights}-weights-{label}{rows}{page}"

    @property
    def config(self) -> LayerConfig:
        found = LayerConfig.from_config(f"deepseek-{self.model}").with_heads(self.heads)
        g = found.geometry
        if self.is_small:
            topk = min(g.index_topk, SMALL_TOPK)
            g = replace(g, index_topk=topk, **SMALL_WIDTHS)  # type: ignore[arg-type]
        return replace(found, geometry=g)

    @property
    def gemms(self) -> list[Gemm]:
        is_fp8 = self.weights == "fp8"
        return list(projections(self.config.geometry, self.batch.tokens, is_fp8=is_fp8))

    @property
    def flops(self) -> int:
        return sum(self.work_of(stage).flops for stage in self._stage_names)

    @property
    def bytes(self) -> int:
        g = self.config.geometry
        weights = sum(each.heads * each.n * each.k * each.dtype.itemsize for each in self.gemms)
        return weights + self._attended_bytes + self._key_bytes + 4 * self._tokens * g.hidden_size

    @property
    def small(self) -> Workload:
        heads = min(self.heads, 4)
        return replace(self, batch=self.batch.small, heads=heads, is_small=True, pool=None)

    @property
    def _tokens(self) -> int:
        return self.batch.tokens

    @property
    def _topk(self) -> int:
        return self.config.geometry.index_topk

    @property
    def _stage_names(self) -> tuple[str, ...]:
        own = ("projections", "absorb", "append", "attend", "up-project", "output")
        return (*own, "indexer", SELECT) if self._topk else own

    @property
    def _pairs(self) -> int:
        """Queries times their visible rows."""
        return sum(a * b for a, b in zip(self.batch.q_lens, self.batch.kv_lens, strict=True))

    @property
    def _attended(self) -> int:
        """Queries times the rows that they attend to."""
        lengths = zip(self.batch.q_lens, self.batch.kv_lens, strict=True)
        return sum(a * min(b, self._topk or b) for a, b in lengths)

    @property
    def _attended_bytes(self) -> int:
        rows = self._attended if self._topk else sum(self.batch.kv_lens)
        return rows * row_codec(self.format, ROW).bytes_per_token

    @property
    def _key_bytes(self) -> int:
        return sum(self.batch.kv_lens) * KEY_BYTES if self._topk else 0

    def work_of(self, implementation: str) -> Work:
        g, tokens, heads = self.config.geometry, self._tokens, self.heads
        gemms = {each.name: each.work for each in self.gemms}
        if implementation in OF_STAGE:
            return _sum_of([gemms[name] for name in OF_STAGE[implementation] if name in gemms])
        if implementation in (GEMM_SUM, GEMMS_IN_A_ROW):
            return _sum_of(list(gemms.values()))
        if implementation == "append":
            rotated = 4 * heads * ROW.qk_rope_head_dim
            stored = row_codec(self.format, ROW).bytes_per_token
            keys = KEY_BYTES + 2 * g.index_head_dim if self._topk else 0
            return Work(0, tokens * (rotated + stored + 2 * ROW.width + keys))
        if implementation == SELECT:
            flops = 2 * self._pairs * g.index_n_heads * g.index_head_dim
            queries = tokens * g.index_n_heads * (g.index_head_dim + 4)
            scores = 2 * 4 * self._pairs
            return Work(flops, self._key_bytes + queries + scores + 4 * tokens * self._topk, "fp8")
        if implementation == "attend":
            per_query = 2 * heads * (ROW.width + ROW.v_width)
            lists = 4 * tokens * self._topk
            flops = 2 * heads * self._attended * (ROW.width + ROW.v_width)
            return Work(flops, self._attended_bytes + tokens * per_query + lists)
        return super().work_of(implementation)

    def with_derived(self, seconds: dict[str, list[float]]) -> dict[str, list[float]]:
        """The products that are timed alone become one sum; stages in their order."""
        names = [GEMM + each.name for each in self.gemms]
        alone = [seconds[name] for name in names if name in seconds]
        found = {name: each for name, each in seconds.items() if not name.startswith(GEMM)}
        stages = {name: found.pop(name) for name in STAGES if name in found}
        ordered = {MLAKIT: found.pop(MLAKIT), **stages}
        if len(alone) == len(names):
            ordered[GEMM_SUM] = [sum(each) for each in zip(*alone, strict=True)]
        return ordered | found

    def build_case(self) -> BenchmarkCase:
        generator = gpu.generator()
        inputs = self._inputs(generator)
        products = {GEMM + each.name: each.call(generator) for each in self.gemms}

        def in_a_row() -> None:
            for product in products.values():
                product()

        calls = {**dict(_stages(inputs)), **products, GEMMS_IN_A_ROW: in_a_row}
        baselines = [Baseline(name, call, sets_target=False) for name, call in calls.items()]
        return BenchmarkCase(
            inputs.run,
            [*baselines, gpu.read_baseline(self.bytes)],
            check=lambda: _check(inputs, self.batch),
        )

    def _inputs(self, generator: torch.Generator) -> Inputs:
        kv_lens, starts = gpu.int32(self.batch.kv_lens), gpu.int32(self.batch.starts)
        layer = self._layer(generator)
        pages = sum(page_counts(self.batch.kv_lens, self.page_size))
        pool = self.pool or StepPool(SharedPool(pages, self.page_size, self.format))
        cache, page_table = pool.latents.pages(self.batch.kv_lens, generator)
        batch = CachedBatch(cache, page_table, kv_lens, starts)
        index_cache, plan = None, None
        if layer.indexer is None:
            plan = plan_mla_decode(
                cache,
                page_table,
                kv_lens,
                heads=self.heads,
                num_tokens=self._tokens,
                q_starts=starts,
                dtype=torch.bfloat16,
            )
        else:
            index_cache = pool.index_keys(layer.indexer.width)
        return Inputs(
            layer=layer,
            x=gpu.normal(generator, self._tokens, self.config.geometry.hidden_size),
            batch=batch,
            positions=token_positions(kv_lens, starts, self._tokens)[1],
            index_cache=index_cache,
            plan=plan,
            max_kv_len=max(self.batch.kv_lens),
        )

    def _layer(self, generator: torch.Generator) -> MLAAttention:
        """Random weights, those of the norms too."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layer = MLAAttention(
                self.config,
                is_fp8=self.weights == "fp8",
                max_positions=max(self.batch.kv_lens),
                dtype=torch.bfloat16,
                device=gpu.DEVICE,
            )
        for name, parameter in layer.named_parameters():
            if "norm" in name:
                noise = gpu.normal(generator, *parameter.shape, dtype=torch.float32)
                parameter.add_(0.2 * noise)
        return layer


def _sum_of(works: list[Work]) -> Work:
    """FP8 if one of the products is."""
    products = "fp8" if any(each.products == "fp8" for each in works) else "bf16"
    return Work(sum(each.flops for each in works), sum(each.bytes for each in works), products)


def _stages(inputs: Inputs) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each stage of the layer on inputs of its own, with what it is called."""
    layer, batch, x = inputs.layer, inputs.batch, inputs.x
    weights = layer.weights(x.device)

    def project() -> tuple[Activations, Activations, Tensor, Tensor]:
        states = Activations(x)
        residual = Activations(layer.q_a_layernorm(layer.q_a_proj(states)))
        q = layer.q_b_proj(residual).unflatten(-1, (layer.config.geometry.num_heads, -1))
        return states, residual, q, layer.kv_a_proj_with_mqa(states)

    states, residual, q, kv = project()
    absorbed, q_rope, rotated = absorb(q, weights, "auto")
    yield "projections", project
    yield "absorb", lambda: absorb(q, weights, "auto")

    def append_latents() -> None:
        append_tokens(q_rope, kv, weights, batch, q_rope_out=rotated, backend="auto")

    append_latents()
    scale = weights.softmax_scale
    where = (batch.page_table, batch.kv_lens)
    if layer.indexer is None:
        yield "append", append_latents

        def attend() -> Tensor:
            return mla_decode(
                absorbed,
                batch.cache,
                *where,
                q_starts=batch.q_starts,
                softmax_scale=scale,
                plan=inputs.plan,
            )[0]
    else:
        indexer, keys = layer.indexer, inputs.index_cache
        assert keys is not None

        def prepare_index() -> object:
            return indexer(states, residual, inputs.positions, keys)

        index = indexer(states, residual, inputs.positions, keys)

        def append() -> None:
            append_latents()
            append_index_keys(index, weights, batch, backend="auto")

        def select() -> Tensor:
            return indexer_select(
                index.q,
                index.weights,
                keys,
                *where,
                indexer.topk,
                q_starts=batch.q_starts,
                max_kv_len=inputs.max_kv_len,
            )

        append()
        rows = select()

        def attend() -> Tensor:
            return sparse_mla(absorbed, batch.cache, rows, softmax_scale=scale)[0]

        yield "append", append
        yield "indexer", prepare_index
        yield SELECT, select
    yield "attend", attend
    attended = attend()
    out = attended.new_empty(*attended.shape[:2], layer.config.geometry.v_head_dim)
    weights.up.w_uv.apply(attended, out=out)
    yield "up-project", lambda: weights.up.w_uv.apply(attended, out=out)
    yield "output", lambda: layer.o_proj(out.flatten(1))


def _check(inputs: Inputs, lengths: Batch) -> None:
    """Compare the last token of some requests: its row, its key, its selection, its output."""
    batch, layer = inputs.batch, inputs.layer
    caches = [batch.cache] if inputs.index_cache is None else [batch.cache, inputs.index_cache]
    clear_new_rows(batch, len(inputs.x), *caches)
    chosen = None
    if layer.indexer is not None:
        chosen = gpu.int32([[-1] * layer.indexer.topk] * len(inputs.x))
    out = inputs.run(rows=chosen)
    requests = lengths.checked_requests
    tokens = [lengths.starts[request + 1] - 1 for request in requests]
    positions = [lengths.kv_lens[request] - 1 for request in requests]
    oracles = [LayerOracle(layer, is_exact=is_exact) for is_exact in (True, False)]
    exact, naive = (each.project(inputs.x[tokens], positions) for each in oracles)
    latents = batch.cache.layer(0)
    for i, (request, token) in enumerate(zip(requests, tokens, strict=True)):
        label, own = f"token {token}", slice(i, i + 1)
        slots = request_slots(batch.page_table, batch.cache.page_size, request, 0, positions[i] + 1)
        stored = latents.codec.decode(*latents.codec.encode(naive.rows[own]))
        row = latents.read(slots[-1:], torch.float32)
        assert_matches(f"row of {label}", row, exact.rows[own], stored)
        if chosen is not None:
            assert exact.index is not None
            assert naive.index is not None
            assert inputs.index_cache is not None
            _check_key(label, inputs.index_cache, slots[-1:], exact.index, naive.index, i)
            keys = inputs.index_cache.layer(0).read(slots, torch.float64)
            scores = [each.scores(i, keys) for each in (exact.index, naive.index)]
            selected = chosen[token]
            _check_selection(label, selected, slots, scores[0], scores[1].double())
            slots = selected[selected >= 0].long()
        rows = latents.read(slots, torch.float64)
        wanted, plain = (
            oracle.output(each.q[i], rows)
            for oracle, each in zip(oracles, (exact, naive), strict=True)
        )
        assert_matches(f"out of {label}", out[token : token + 1], wanted, plain)


def _check_key(
    label: str,
    cache: PagedLatentCache,
    slot: Tensor,
    exact: IndexOracle,
    naive: IndexOracle,
    i: int,
) -> None:
    layer, own = cache.layer(0), slice(i, i + 1)
    stored = layer.codec.decode(*layer.codec.encode(naive.keys[own], power_of_two=True))
    assert_matches(f"index key of {label}", layer.read(slot), exact.keys[own], stored)


def _check_selection(
    label: str, selected: Tensor, slots: Tensor, exact: Tensor, naive: Tensor
) -> None:
    """Assert that no token that is left out is better than a selected one.

    Scores may be wrong by twice the largest error of the naive scores: FP8 queries and roundings
    swap tokens with nearly equal scores.
    """
    own = selected[selected >= 0].long()
    want = min(len(selected), len(slots))
    assert len(own) == want, f"{label} selects {len(own)} rows, want {want}"
    is_selected = torch.isin(slots, own)
    assert int(is_selected.sum()) == want, f"{label} selects rows twice or of other requests"
    if want < len(slots):
        error = float((naive - exact).abs().max())
        excess = float(exact[~is_selected].max() - exact[is_selected].min())
        must = f"want at most {2 * error:.2e}"
        assert excess <= 2 * error, f"{label} leaves out a score better by {excess:.2e}, {must}"


def of_shape(shape: Shape) -> tuple[Workload, ...]:
    given = shape.accept("layer", "heads", "format", "page_size")
    return tuple(
        Layer(model, weights, shape.batch, **given)  # type: ignore[arg-type]  # checked by options
        for model, weights in KINDS
    )


KINDS: tuple[tuple[Model, WeightKind], ...] = (
    ("v3", "bf16"),
    ("v3", "fp8"),
    ("v3.2", "bf16"),
    ("v3.2", "fp8"),
)
HEADS = (128, 16)
BATCHES = (1, 16, 128)
CONTEXTS = (4 << 10, 64 << 10)
_POOL = StepPool(SharedPool(max(BATCHES) * max(CONTEXTS) // 64))
WORKLOADS: tuple[Workload, ...] = tuple(
    Layer(model, weights, Batch.of(count, 1, context), heads, pool=_POOL)
    for model, weights in KINDS
    for heads in HEADS
    for context in CONTEXTS
    for count in BATCHES
)
