"""The suites of whole steps: what each is called with, its stages and their work, its check.

The suite `branch`: a layer's whole step without its projections, `mla_step`, on a GPU.

Step    append the new tokens, absorb or expand the up-projection, attend, project up
Plan    made before the clock starts: all layers of a step share it
Bytes   cached rows, weights, q, the raw latents and out once
FLOPs   attention and the up-projection, absorbed or expanded as each request computes them
Kernels the products and the attention alone, and their sum; mixed batches have none
Check   some tokens, all heads, and their cache rows against the float64 oracle

The suite `long-context`: a chunk of a prompt over a long cached context, `mla_step`.

Step    append 2048 new tokens, expand the context part by part, attend, merge
Kernels the up-projection of every part, and the attention over it, each alone; their sum is what
        the step cannot beat unless it overlaps them
Memory  K and V of a part, in two buffers; the whole context would need 64 KB per token
Check   some tokens, all heads, and their cache rows against the float64 oracle

The suite `sparse-step`: a layer's whole step of DeepSeek-V3.2, `sparse_step`, and its stages.

Step    absorb the up-projection, append latents and index keys, score the index keys, select 2048
        rows per query, attend to them, project up; 128 heads, 656-byte FP8 rows, 64 index heads
Stages  each one alone, with a cold L2 of its own. Top-k is the time of `indexer_select` minus that
        of `indexer_logits`. The speedup column is a stage's share of the step: 0.30x is 30 %
Bytes   index keys, selected rows, weights, q and out once; of a stage: its own inputs and results
Check   some queries: their appended rows, logits, selection and output against the oracles

The suite `layer`: a decode step of one whole layer, `MLAAttention`, in a CUDA graph.

Layers  DeepSeek-V3 and V3.2 with random bf16 or block-FP8 weights, 128 heads and the 16 of one of
        eight tensor-parallel ranks; bf16 rows, index keys of 132 bytes
Stages  each one alone, with a cold L2 of its own. Projections: q_a, q_b and kv_a with the norm of
        q and the quantisation; output: o_proj. The speedup column is a stage's share of the layer
GEMMs   the products of the projections by cuBLAS: "GEMMs, sum" adds the times of each one alone,
        "GEMMs in a row" is one call. FP8 with one scale per tensor; products by head in bf16
Sum     "stages, sum" adds the times of all stages: kernels alone. V3.2 with 1 and 16 requests has
        the target of at most 1.10x its time
Plan    made before the clock starts, like the positions: all layers of a step share them
Bytes   weights, the visible or selected rows, index keys, x and the result once
Check   some tokens: appended rows and keys, selection and output against the float64 oracle
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal, get_args

import torch
from torch import Tensor

from mlakit.cache import token_positions
from mlakit.formats import Format, row_codec
from mlakit.layer import LayerConfig, MLAAttention
from mlakit.model.geometry import MLAGeometry
from mlakit.model.rope import rope_table
from mlakit.ops.decode_plan import plan_mla_decode
from mlakit.plan import DecodePlanTensors
from mlakit.steps import (
    CachedBatch,
    IndexInputs,
    LayerWeights,
    StepPlan,
    mla_step,
    plan_step,
    sparse_step,
)
from mlakit.steps.weights import UpProjection
from mlakit.tools.bench import gpu
from mlakit.tools.bench.gemms import Gemm, projections
from mlakit.tools.bench.indexer import KEY_BYTES
from mlakit.tools.bench.indexer import MODEL as INDEX_MODEL
from mlakit.tools.bench.pool import (
    MODEL,
    ROW,
    SCALE,
    SharedPool,
    StepPool,
    clear_new_rows,
    page_counts,
)
from mlakit.tools.bench.report import MLAKIT, SELECT, STAGES
from mlakit.tools.bench.shapes import Batch, Shape
from mlakit.tools.bench.step_checks import (
    assert_output_correct,
    assert_row_appended,
    check_layer,
    check_sparse_step,
    step_queries,
)
from mlakit.tools.bench.step_stages import (
    ATTENTION,
    GEMMS,
    LayerInputs,
    absorbed_stages,
    decode_kernels,
    layer_stages,
    prefill_kernels,
)
from mlakit.tools.bench.suite import Baseline, BenchmarkCase, Work, Workload

D_C, D_N, D_R = MODEL.kv_lora_rank, MODEL.qk_nope_head_dim, MODEL.qk_rope_head_dim
D_V = MODEL.v_head_dim
SUM = "GEMMs + attention"
GEMM = "GEMM "  # begins the name of a product that is timed alone
GEMM_SUM, GEMMS_IN_A_ROW = "GEMMs, sum", "GEMMs in a row"
STAGE_SUM = "stages, sum"
# the products of a layer that are computed in each stage
GEMMS_OF = {
    "projections": ("q_a_proj", "q_b_proj", "kv_a_proj"),
    "absorb": ("absorb",),
    "indexer": ("wq_b", "wk", "weights_proj"),
    "up-project": ("up-project",),
    "output": ("o_proj",),
}
# the stages whose work adds up to that of a whole step
DENSE_STAGES = ("absorb", "append", "attend", "up-project")
SPARSE_STAGES = (*DENSE_STAGES, SELECT)
LAYER_STAGES = ("projections", "output")
SMALL_WIDTHS = {"hidden_size": 256, "q_lora_rank": 256}
SMALL_TOPK = 64
MIN_TOKENS, MIN_BATCH = 2048, 16  # of prefill and of decode: with fewer, launches count

Model = Literal["v3", "v3.2"]
WeightKind = Literal["bf16", "fp8"]


class StepWorkload(Workload):
    """A step over a batch of requests.

    pool  shared with other workloads; None: its own
    """

    batch: Batch
    heads: int
    format: Format
    page_size: int
    pool: StepPool | None

    @property
    def page(self) -> str:
        """A part of its name."""
        return f"-page{self.page_size}" if self.page_size != 64 else ""

    @property
    def row_bytes(self) -> int:
        return row_codec(self.format, ROW).bytes_per_token

    def cached_batch(self, generator: torch.Generator) -> tuple[StepPool, CachedBatch]:
        """The pool, and the requests on random pages of it."""
        pages = sum(page_counts(self.batch.kv_lens, self.page_size))
        pool = self.pool or StepPool(SharedPool(pages, self.page_size, self.format))
        cache, page_table = pool.latents.pages(self.batch.kv_lens, generator)
        kv_lens, starts = gpu.int32(self.batch.kv_lens), gpu.int32(self.batch.starts)
        return pool, CachedBatch(cache, page_table, kv_lens, starts)

    def decode_plan(self, batch: CachedBatch) -> DecodePlanTensors:
        return plan_mla_decode(
            batch.cache,
            batch.page_table,
            batch.kv_lens,
            heads=self.heads,
            num_tokens=self.batch.tokens,
            q_starts=batch.q_starts,
            dtype=torch.bfloat16,
        )


@dataclass(frozen=True)
class Step(StepWorkload):
    """One layer's step over a batch of requests: the suite `branch`."""

    batch: Batch
    heads: int = 128
    format: Format = "bf16"
    page_size: int = 64

    op = "mla_step"
    pool = None
    target_baseline = SUM

    @property
    def name(self) -> str:
        return f"step-{self.format}-{self.batch.label(self.heads)}{self.page}"

    @property
    def min_speedup(self) -> float:
        """A step takes at most 1.10 or 1.20 times as long as its kernels alone."""
        is_long = self.batch.tokens >= MIN_TOKENS or len(self.batch.q_lens) >= MIN_BATCH
        return 1 / (1.10 if is_long else 1.20)

    def with_derived(self, seconds: dict[str, list[float]]) -> dict[str, list[float]]:
        """`seconds` by implementation, with the sum of the kernels."""
        if GEMMS not in seconds or ATTENTION not in seconds:
            return seconds
        pairs = zip(seconds[GEMMS], seconds[ATTENTION], strict=True)
        rest = {name: each for name, each in seconds.items() if name != MLAKIT}
        return {MLAKIT: seconds[MLAKIT], SUM: [sum(pair) for pair in pairs], **rest}

    @property
    def flops(self) -> int:
        lengths = list(zip(self.batch.q_lens, self.batch.kv_lens, strict=True))
        decoding = [lengths[b] for b in self._plan.decode]
        prefilling = [lengths[b] for b in self._plan.prefill]
        absorbed = sum(new * (D_C * (D_N + D_V) + kv * (ROW.width + D_C)) for new, kv in decoding)
        seen = sum(new * kv - new * (new - 1) // 2 for new, kv in prefilling)
        expanded = sum(kv for _, kv in prefilling) * D_C * (D_N + D_V) + seen * (D_N + D_R + D_V)
        return 2 * self.heads * (absorbed + expanded)

    @property
    def bytes(self) -> int:
        weights = self.heads * (D_N + D_V) * D_C
        per_token = self.heads * (D_N + D_R + D_V) + ROW.width
        cached = sum(self.batch.kv_lens) * self.row_bytes
        return cached + 2 * (weights + self.batch.tokens * per_token)

    @property
    def small(self) -> Workload:
        return replace(self, batch=self.batch.small, heads=min(self.heads, 4))

    @property
    def _plan(self) -> StepPlan:
        return plan_step(self.batch.kv_lens, self.batch.q_lens)

    def build_case(self) -> BenchmarkCase:
        generator, tokens = gpu.generator(), self.batch.tokens
        weights = layer_weights(generator, self.heads, max(self.batch.kv_lens))
        _, batch = self.cached_batch(generator)
        new_q = gpu.normal(generator, tokens, self.heads, D_N + D_R)
        q = new_q.clone()  # rotated in place, again at every call
        kv = gpu.normal(generator, tokens, ROW.width)
        plan = self._plan
        decode_plan = None if plan.prefill else self.decode_plan(batch)

        def call() -> Tensor:
            return mla_step(
                q, kv, weights, batch, plan=plan, decode_plan=decode_plan, overwrite_q=True
            )

        def check() -> None:
            clear_new_rows(batch, tokens, batch.cache)
            q.copy_(new_q)
            out = call()
            for request, token, query in step_queries(self.batch, new_q, kv, batch):
                is_decode = request in plan.decode
                assert_row_appended(query, weights, batch.cache.codec)
                assert_output_correct(out, token, query, weights, is_decode=is_decode)

        kernels = {}
        if not plan.prefill:
            stages, _ = absorbed_stages(new_q, kv, weights, batch, plan=decode_plan)
            kernels = decode_kernels(stages)
        elif not plan.decode:
            kernels = prefill_kernels(self.batch, weights)
        parts = [Baseline(name, each, sets_target=False) for name, each in kernels.items()]
        return BenchmarkCase(call, [gpu.read_baseline(self.bytes), *parts], check)


@dataclass(frozen=True)
class LongContext(Step):
    """One layer's step of the newest tokens of a prompt."""

    max_rounds = 12  # of milliseconds each

    @property
    def name(self) -> str:
        return super().name.replace("step-", "long-context-", 1)


class StagedWorkload(StepWorkload):
    """A step of absorbed attention, dense or sparse, that is timed stage by stage."""

    @property
    @abstractmethod
    def geometry(self) -> MLAGeometry:
        """The dimensions of its layer; an index_topk of 0 is dense attention."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The stages whose work adds up to the step's."""
        return SPARSE_STAGES if self.geometry.index_topk else DENSE_STAGES

    @property
    def flops(self) -> int:
        works = self.works
        return sum(works[stage].flops for stage in self.parts)

    @property
    def attended(self) -> int:
        """Queries times the rows that they attend to."""
        topk = self.geometry.index_topk
        lengths = zip(self.batch.q_lens, self.batch.kv_lens, strict=True)
        return sum(new * min(kv, topk or kv) for new, kv in lengths)

    @property
    def attended_bytes(self) -> int:
        rows = self.attended if self.geometry.index_topk else sum(self.batch.kv_lens)
        return rows * self.row_bytes

    @property
    def key_bytes(self) -> int:
        return sum(self.batch.kv_lens) * KEY_BYTES if self.geometry.index_topk else 0

    @property
    def gemms(self) -> list[Gemm]:
        """The matrix products of its layer, those outside of the step too."""
        return list(projections(self.geometry, self.batch.tokens, is_fp8=False))

    @property
    def works(self) -> dict[str, Work]:
        """The work of every stage."""
        g, tokens, heads = self.geometry, self.batch.tokens, self.heads
        topk = g.index_topk
        lengths = zip(self.batch.q_lens, self.batch.kv_lens, strict=True)
        visible = sum(new * kv for new, kv in lengths)
        queries = tokens * g.index_n_heads * (g.index_head_dim + 4)
        new_key = KEY_BYTES + 2 * g.index_head_dim if topk else 0
        new_row = 4 * heads * D_R + self.row_bytes + 2 * ROW.width
        logits_flops = 2 * visible * g.index_n_heads * g.index_head_dim
        logits_bytes, topk_bytes = self.key_bytes + queries + 4 * visible, 4 * visible
        topk_bytes += 4 * tokens * topk
        per_query = 2 * heads * (ROW.width + ROW.v_width) + 4 * topk
        attend_flops = 2 * heads * self.attended * (ROW.width + ROW.v_width)
        gemms = {each.name: each.work for each in self.gemms}
        found = {
            stage: _sum_of([gemms[name] for name in names if name in gemms])
            for stage, names in GEMMS_OF.items()
        }
        return found | {
            "append": Work(0, tokens * (new_row + new_key)),
            "logits": Work(logits_flops, logits_bytes, "fp8"),
            "top-k": Work(0, topk_bytes),
            SELECT: Work(logits_flops, logits_bytes + topk_bytes, "fp8"),
            "attend": Work(attend_flops, self.attended_bytes + tokens * per_query),
            GEMM_SUM: _sum_of(list(gemms.values())),
            GEMMS_IN_A_ROW: _sum_of(list(gemms.values())),
        }

    def work_of(self, implementation: str) -> Work:
        return self.works.get(implementation) or super().work_of(implementation)

    def with_derived(self, seconds: dict[str, list[float]]) -> dict[str, list[float]]:
        """Stages in their order.

        Top-k is what `indexer_select` takes beyond `indexer_logits`. The products that are timed
        alone become one sum, and so do the stages.
        """
        found = dict(seconds)
        stages = [found[name] for name in self.parts if name in found]
        if SELECT in found and "logits" in found:
            both = zip(found.pop(SELECT), found["logits"], strict=True)
            found["top-k"] = [max(select - logits, 1e-9) for select, logits in both]
        names = [GEMM + each.name for each in self.gemms]
        alone = [found.pop(name) for name in names if name in found]
        ordered = {MLAKIT: found.pop(MLAKIT)}
        ordered |= {name: found.pop(name) for name in STAGES if name in found}
        if len(stages) == len(self.parts):
            ordered[STAGE_SUM] = [sum(each) for each in zip(*stages, strict=True)]
        if len(alone) == len(names):
            ordered[GEMM_SUM] = [sum(each) for each in zip(*alone, strict=True)]
        return ordered | found


@dataclass(frozen=True)
class SparseStep(StagedWorkload):
    """One layer's step of DeepSeek-V3.2 over a batch of requests: the suite `sparse-step`."""

    batch: Batch
    heads: int = 128
    topk: int = INDEX_MODEL.index_topk
    format: Format = "fp8_block128"
    page_size: int = 64
    pool: StepPool | None = field(default=None, compare=False)

    op = "sparse_step"
    budget_s = 3.0

    @property
    def name(self) -> str:
        label = self.batch.label(self.heads)
        return f"sparse-step-{self.format}-{label}-top{self.topk}{self.page}"

    @property
    def geometry(self) -> MLAGeometry:
        return replace(INDEX_MODEL, num_heads=self.heads, index_topk=self.topk)

    @property
    def bytes(self) -> int:
        g, heads = self.geometry, self.heads
        per_token = 2 * (heads * (D_N + D_R + D_V) + ROW.width + g.index_head_dim)
        index = g.index_n_heads * (g.index_head_dim + 4)
        weights = 2 * heads * D_C * (D_N + D_V)
        tokens = self.batch.tokens * (per_token + index)
        return self.key_bytes + self.attended_bytes + weights + tokens

    @property
    def small(self) -> Workload:
        small, heads = self.batch.small, min(self.heads, 4)
        return replace(self, batch=small, heads=heads, topk=SMALL_TOPK, pool=None)

    def build_case(self) -> BenchmarkCase:
        generator, tokens = gpu.generator(), self.batch.tokens
        columns, g = max(self.batch.kv_lens), self.geometry
        weights = layer_weights(generator, self.heads, columns)
        pool, batch = self.cached_batch(generator)
        heads, width = g.index_n_heads, g.index_head_dim
        index = IndexInputs(
            gpu.normal(generator, tokens, heads, width, dtype=torch.float8_e4m3fn),
            gpu.normal(generator, tokens, width),
            gpu.normal(generator, tokens, heads, dtype=torch.float32),
            pool.index_keys(width),
        )
        q = gpu.normal(generator, tokens, self.heads, D_N + D_R)
        kv = gpu.normal(generator, tokens, ROW.width)
        given = (q, kv, weights, batch)

        def call() -> Tensor:
            return sparse_step(q, kv, weights, batch, index, self.topk, max_kv_len=columns)

        def check() -> None:
            clear_new_rows(batch, tokens, batch.cache, index.cache)
            rows = gpu.int32([[-1] * self.topk] * tokens)
            out = sparse_step(*given, index, self.topk, max_kv_len=columns, rows=rows)
            check_sparse_step(self.batch, out, rows, *given, index)

        stages, _ = absorbed_stages(*given, index=index, topk=self.topk, max_kv_len=columns)
        baselines = [Baseline(name, each, sets_target=False) for name, each in stages.items()]
        return BenchmarkCase(call, [*baselines, gpu.read_baseline(self.bytes)], check)


@dataclass(frozen=True)
class Layer(StagedWorkload):
    """A decode step of one layer: the suite `layer`.

    weights   block-FP8 or bf16
    is_small  smaller hidden states and selections
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
    target_baseline = STAGE_SUM
    budget_s = 1.0
    max_rounds = 12

    @property
    def name(self) -> str:
        rows = f"-{self.format}-rows" if self.format != "bf16" else ""
        label = self.batch.label(self.heads)
        return f"layer-{self.model}-{self.weights}-weights-{label}{rows}{self.page}"

    @property
    def min_speedup(self) -> float | None:
        is_small_batch = self.batch.size <= MIN_BATCH and self.heads == 128
        return 1 / 1.10 if self.model == "v3.2" and is_small_batch else None

    @property
    def config(self) -> LayerConfig:
        found = LayerConfig.from_config(f"deepseek-{self.model}").with_heads(self.heads)
        g = found.geometry
        if self.is_small:
            topk = min(g.index_topk, SMALL_TOPK)
            g = replace(g, index_topk=topk, **SMALL_WIDTHS)  # type: ignore[arg-type]
        return replace(found, geometry=g)

    @property
    def geometry(self) -> MLAGeometry:
        return self.config.geometry

    @property
    def parts(self) -> tuple[str, ...]:
        indexer = ("indexer",) if self.geometry.index_topk else ()
        return (*super().parts, *LAYER_STAGES, *indexer)

    @property
    def gemms(self) -> list[Gemm]:
        return list(projections(self.geometry, self.batch.tokens, is_fp8=self.weights == "fp8"))

    @property
    def bytes(self) -> int:
        weights = sum(each.heads * each.n * each.k * each.dtype.itemsize for each in self.gemms)
        states = 4 * self.batch.tokens * self.geometry.hidden_size
        return weights + self.attended_bytes + self.key_bytes + states

    @property
    def small(self) -> Workload:
        heads = min(self.heads, 4)
        return replace(self, batch=self.batch.small, heads=heads, is_small=True, pool=None)

    def build_case(self) -> BenchmarkCase:
        generator = gpu.generator()
        inputs = self.inputs(generator)
        products = {GEMM + each.name: each.call(generator) for each in self.gemms}

        def in_a_row() -> None:
            for call in products.values():
                call()

        calls = {**layer_stages(inputs), **products, GEMMS_IN_A_ROW: in_a_row}
        baselines = [Baseline(name, each, sets_target=False) for name, each in calls.items()]
        baselines.append(gpu.read_baseline(self.bytes))
        return BenchmarkCase(inputs.run, baselines, check=lambda: check_layer(inputs, self.batch))

    def inputs(self, generator: torch.Generator) -> LayerInputs:
        layer = self.layer(generator)
        pool, batch = self.cached_batch(generator)
        is_dense, tokens = layer.indexer is None, self.batch.tokens
        return LayerInputs(
            layer=layer,
            x=gpu.normal(generator, tokens, self.geometry.hidden_size),
            batch=batch,
            positions=token_positions(batch.kv_lens, batch.q_starts, tokens)[1],
            index_cache=None if is_dense else pool.index_keys(self.geometry.index_head_dim),
            plan=self.decode_plan(batch) if is_dense else None,
            max_kv_len=max(self.batch.kv_lens),
        )

    def layer(self, generator: torch.Generator) -> MLAAttention:
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


def _sum_of(works: Sequence[Work]) -> Work:
    """FP8 if one of the products is."""
    products = "fp8" if any(each.products == "fp8" for each in works) else "bf16"
    return Work(sum(each.flops for each in works), sum(each.bytes for each in works), products)


def layer_weights(generator: torch.Generator, heads: int, positions: int) -> LayerWeights:
    matrix = gpu.normal(generator, heads * (D_N + D_V), D_C, dtype=torch.float32)
    matrix = (matrix / D_C**0.5).to(torch.bfloat16)
    return LayerWeights(
        up=UpProjection.from_checkpoint(matrix, replace(MODEL, num_heads=heads)),
        gamma=gpu.normal(generator, D_C),
        freqs=rope_table(MODEL, positions, device=gpu.DEVICE),
        softmax_scale=SCALE,
    )


LAYERS: tuple[tuple[Model, WeightKind], ...] = tuple(product(get_args(Model), get_args(WeightKind)))
LAYER_BATCHES, LAYER_CONTEXTS = (1, 16, 128), (4 << 10, 64 << 10)
SPARSE_BATCHES, SPARSE_CONTEXTS = (1, 8, 64, 128), (8 << 10, 32 << 10, 128 << 10)
_LAYER_POOL = StepPool(SharedPool(max(LAYER_BATCHES) * max(LAYER_CONTEXTS) // 64))
_SPARSE_POOL = StepPool(
    SharedPool(max(SPARSE_BATCHES) * max(SPARSE_CONTEXTS) // 64, 64, "fp8_block128")
)
CHUNK = 2048  # new tokens of a long context
WORKLOADS: dict[str, tuple[Workload, ...]] = {
    "branch": (
        Step(Batch.of(128, 1, 4096)),
        Step(Batch.of(128, 1, 4096), format="fp8_block128"),
        Step(Batch.of(128, 1, 8192), heads=16),
        Step(Batch.of(1, 1, 65536)),
        Step(Batch.of(4, 4096, 4096)),
        Step(Batch.of(1, 2048, 16384)),
        Step(Batch.parse("64q1s4k+2q1ks2k")),
    ),
    "long-context": (
        *(LongContext(Batch.of(1, CHUNK, kilo << 10)) for kilo in (16, 32, 64, 128)),
        LongContext(Batch.of(1, CHUNK, 128 << 10), heads=16),
        LongContext(Batch.of(4, CHUNK, 32 << 10)),
    ),
    "sparse-step": tuple(
        SparseStep(Batch.of(count, 1, context), pool=_SPARSE_POOL)
        for context in SPARSE_CONTEXTS
        for count in SPARSE_BATCHES
    ),
    "layer": tuple(
        Layer(model, weights, Batch.of(count, 1, context), heads, pool=_LAYER_POOL)
        for model, weights in LAYERS
        for heads in (128, 16)
        for context in LAYER_CONTEXTS
        for count in LAYER_BATCHES
    ),
}


def of_shape(suite: str, shape: Shape) -> tuple[Workload, ...]:
    options = ("heads", "format", *(["topk"] if suite == "sparse-step" else []), "page_size")
    given = shape.accept(suite, *options)
    if suite == "layer":
        return tuple(
            Layer(model, weights, shape.batch, **given)  # type: ignore[arg-type]
            for model, weights in LAYERS
        )
    kind = {"branch": Step, "long-context": LongContext, "sparse-step": SparseStep}[suite]
    return (kind(shape.batch, **given),)
