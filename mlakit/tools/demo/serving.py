"""The attention of one layer serves a prompt in two chunks, two continuations, and a sparse step.

Activations and weights are random. The prompt is forked after prefill: both continuations share its
pages, and the first write to the last, partly filled page goes to a copy. Pool rows without a token
are NaN, and pages are allocated in random order: reading a wrong row would show. Each step is
compared with an oracle that reads the dequantised rows of the cache; the last stage compares the
rows themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from mlakit import reference
from mlakit.cache import PagedLatentCache, request_slots, token_positions, token_slots
from mlakit.cache.pages import PageAllocator, PagedSequence
from mlakit.dispatch.checks import FLOATS
from mlakit.formats import Format, row_codec
from mlakit.model.geometry import MLAGeometry
from mlakit.model.rope import rope_table
from mlakit.ops import indexer_logits, indexer_topk, physical_rows
from mlakit.plan import plan_context
from mlakit.reference.steps import StepOracle, StepQuery, StepWeights, naive_prefill_output
from mlakit.steps import CachedBatch, LayerWeights, decode_branch, prefill_branch
from mlakit.steps.weights import UpProjection
from mlakit.tools.testing import (
    MERGED_ROUNDINGS,
    STORED_ROUNDINGS,
    assert_matches,
    assert_same_bits,
    poison,
)

PAGE_SIZE = 64
CONTINUATIONS = 2
SCALE_BYTES = 4  # of an index key, after its e4m3 columns
KEEP_ONE_IN = 4  # the sparse step attends to at most this share of the cached tokens
PREFILL_HEADS = 16  # the float64 oracle would take 15 seconds for all 128 heads of a prompt
CPU = torch.device("cpu")

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """The size of a run, and where it runs."""

    prompt: int = 300
    tokens: int = 8  # of each continuation
    format: Format = "fp8_block128"
    device: torch.device = CPU
    seed: int = 0


@dataclass
class Stage:
    """One line of the table. `error` is the worst of a row, relative to its largest element."""

    name: str
    tokens: int = 0
    seconds: float = 0.0
    error: float = 0.0
    message: str = ""  # what is wrong; empty if nothing is

    def timed(self, tokens: int, device: torch.device, call: Callable[[], T]) -> T:
        """Return the result of a call on `tokens` tokens, and add its time."""
        _finish(device)
        start = perf_counter()
        result = call()
        _finish(device)
        self.seconds += perf_counter() - start
        self.tokens += tokens
        return result

    def check(self, actual: Tensor, exact: Tensor, naive: Tensor, **given: float) -> None:
        """Compare all rows; `naive` is the oracle in the precision of the kernels."""
        actual = actual.cpu()
        size = exact.abs().amax(-1).clamp_min(torch.finfo(torch.float64).tiny)
        errors = (actual.double() - exact).abs().amax(-1) / size
        self.error = max(self.error, float(errors.nan_to_num(nan=torch.inf).max()))
        if not exact.isfinite().all():
            self.fail(f"{self.name}: the oracle is not finite: wrong inputs")
        self.expect(assert_matches, actual, exact, naive, **given)

    def expect(self, comparison: Callable[..., None], *results: Tensor, **given: float) -> None:
        try:
            comparison(self.name, *results, **given)
        except AssertionError as wrong:
            self.fail(str(wrong))

    def fail(self, message: str) -> None:
        self.message = self.message or message


class Session:
    """A layer, its caches, and the sequences they hold."""

    def __init__(self, geometry: MLAGeometry, settings: Settings) -> None:
        g, self.geometry, self.device = geometry, geometry, settings.device
        self.random = torch.Generator().manual_seed(settings.seed)
        stored = row_codec(settings.format, g.row).payload_dtype
        self.dtype = stored if stored in FLOATS else torch.bfloat16
        positions = settings.prompt + settings.tokens + 1
        kv_b = self.normal(g.num_heads * (g.qk_nope_head_dim + g.v_head_dim), g.kv_lora_rank)
        self.layer = LayerWeights(
            up=UpProjection.from_checkpoint(kv_b / sqrt(g.kv_lora_rank), g),
            gamma=1 + 0.1 * self.normal(g.kv_lora_rank),
            freqs=rope_table(g, positions, device=self.device),
            softmax_scale=g.softmax_scale,
            rope=g.rope,
        )
        num_pages = CONTINUATIONS * -(-positions // PAGE_SIZE) + 1
        pools: Any = {"num_pages": num_pages, "page_size": PAGE_SIZE, "device": self.device}
        self.caches = [PagedLatentCache.allocate(g, settings.format, **pools)]
        if g.has_indexer:
            shape = (num_pages, PAGE_SIZE, g.index_head_dim + SCALE_BYTES)
            blocks = torch.empty(shape, dtype=torch.uint8, device=self.device)
            self.caches.append(PagedLatentCache.wrap_index_keys(blocks))
        for pool in (each for cache in self.caches for each in (cache.payload, cache.beside)):
            if pool is not None:
                poison(pool)
        self.pages = PageAllocator(num_pages, PAGE_SIZE)
        held = [self.pages.reserve(PAGE_SIZE) for _ in range(num_pages)]
        for page in torch.randperm(num_pages, generator=self.random).tolist():
            self.pages.free(held[page])
        self.raw: dict[PagedSequence, Tensor] = {}  # the latents that each sequence was given

    def normal(self, *shape: int) -> Tensor:
        """Made on the CPU: every device gets the same numbers."""
        return torch.randn(*shape, generator=self.random).to(self.device, self.dtype)

    def rows(self, cache: PagedLatentCache, sequence: PagedSequence) -> Tensor:
        """float64 on the CPU [kv_len, width], dequantised."""
        table = self.pages.page_table([sequence], device=self.device)
        slots = request_slots(table, PAGE_SIZE, 0, 0, sequence.length)
        return cache.layer(0).read(slots, torch.float64).cpu()

    def oracles(self, heads: slice) -> tuple[StepOracle, StepOracle]:
        """The exact and the naive oracle of some heads."""
        layer, up = self.layer, self.layer.up
        weights = StepWeights(
            w_uk=up.w_uk_t.weight.mT.cpu()[heads],
            w_uv=up.w_uv.weight.cpu()[heads],
            gamma=layer.gamma.cpu(),
            freqs=layer.freqs.cpu(),
            softmax_scale=layer.softmax_scale,
            epsilon=layer.epsilon,
            rope=layer.rope,
        )
        naive = StepOracle(weights, is_exact=False, stored=self.dtype)
        return StepOracle(weights, is_exact=True), naive

    def step(
        self,
        stage: Stage,
        sequences: Sequence[PagedSequence],
        count: int,
        heads: slice | None = None,
        index: Stage | None = None,
    ) -> None:
        """Append `count` new tokens to each sequence; with `index` they attend to a selection.

        heads  of a prefill that are compared with the oracle; None: the step decodes
        """
        g, tokens = self.geometry, count * len(sequences)
        copies = self.pages.append_batch(sequences, [count] * len(sequences))
        for cache in self.caches:  # a shared page is copied before it is written
            cache.copy_pages(copies)
        q, kv = self.normal(tokens, g.num_heads, g.qk_head_dim), self.normal(tokens, g.row.width)
        for sequence, new in zip(sequences, kv.split(count), strict=True):
            self.raw[sequence] = torch.cat([self.raw.get(sequence, new[:0]), new])
        starts = torch.arange(len(sequences) + 1, dtype=torch.int32) * count
        table = self.pages.page_table(sequences, device=self.device)
        kv_lens = self.pages.kv_lens(sequences, device=self.device)
        batch = CachedBatch(self.caches[0], table, kv_lens, starts.to(self.device))
        request, positions = token_positions(kv_lens, batch.q_starts, tokens)
        if g.has_indexer:
            keys = self.normal(tokens, g.index_head_dim)
            slots = token_slots(table, PAGE_SIZE, request, positions)
            self.caches[1].layer(0).write(slots, keys)
        chosen = rows = None
        if index is not None:
            chosen = self.select(index, sequences, table, kv_lens)
            rows = physical_rows(chosen, table, PAGE_SIZE)

        def attend() -> Tensor:
            if heads is None:
                return decode_branch(q, kv, self.layer, batch, rows=rows)
            plan = plan_context(kv_lens.tolist(), batch.q_starts.diff().tolist())
            # a copy: the branch rotates its queries in place
            return prefill_branch(q.clone(), kv, self.layer, batch, plan=plan)

        out = stage.timed(tokens, self.device, attend)
        exact, naive = self.oracles(heads or slice(None))
        cached = [self.rows(self.caches[0], each) for each in sequences]
        before, wanted, plain = len(cached[0]) - count, [], []
        for token, position in enumerate(positions.tolist()):
            seen = cached[token // count][: position + 1]
            if chosen is not None:
                seen = seen[chosen[token].cpu().long()]
            own = q[token].cpu()[heads or slice(None)]
            query = StepQuery(own, kv[token].cpu(), position, seen, before)
            wanted.append(exact.output(query))
            plain.append(
                naive.output(query) if heads is None else naive_prefill_output(query, naive.weights)
            )
        stage.check(
            out[:, heads or slice(None)],
            torch.cat(wanted),
            torch.cat(plain),
            # the context and the new tokens are attended to apart, and merged
            roundings=MERGED_ROUNDINGS if heads and before else STORED_ROUNDINGS,
        )

    def select(
        self, stage: Stage, sequences: Sequence[PagedSequence], table: Tensor, kv_lens: Tensor
    ) -> Tensor:
        """The best tokens of each sequence, checked: the logits, and that these are the top k."""
        g, n = self.geometry, len(sequences)
        q = self.normal(n, g.index_n_heads, g.index_head_dim)
        weights = self.normal(n, g.index_n_heads).float() / sqrt(g.index_n_heads * g.index_head_dim)
        longest = int(kv_lens.max())
        topk = max(1, min(g.index_topk, longest // KEEP_ONE_IN))

        def choose() -> tuple[Tensor, Tensor]:
            keys = self.caches[1]
            logits = indexer_logits(q, weights, keys, table, kv_lens, max_kv_len=longest)
            return logits, indexer_topk(logits, topk)

        logits, chosen = stage.timed(n, self.device, choose)
        keys = [self.rows(self.caches[1], each) for each in sequences]
        arguments = (q.cpu(), weights.cpu(), keys, [1] * n)
        exact = reference.indexer_logits(*arguments)
        stage.check(logits, exact, reference.indexer_logits(*arguments, dtype=torch.float32))
        stage.expect(assert_same_bits, chosen.cpu(), reference.indexer_topk(logits.cpu(), topk))
        return chosen

    def check_rows(self, stage: Stage) -> None:
        """The cache rows of all sequences, including the rounding of the format."""
        codec, oracles = self.caches[0].layer(0).codec, self.oracles(slice(0))
        for sequence, raw in self.raw.items():
            no_queries = torch.empty(len(raw), 0, self.geometry.qk_head_dim, dtype=raw.dtype)
            step = (no_queries, raw.cpu(), range(len(raw)))
            exact, naive = (each.absorb(*step)[1] for each in oracles)
            rows = self.rows(self.caches[0], sequence).float()
            stage.check(rows, exact, codec.decode(*codec.encode(naive)))
            stage.tokens += len(rows)


def serve(geometry: MLAGeometry, settings: Settings) -> tuple[list[Stage], Session]:
    """Prefill the prompt, fork it, decode both continuations, end with a sparse step."""
    session = Session(geometry, settings)
    first = 2 * settings.prompt // 3
    every = -(-geometry.num_heads // PREFILL_HEADS)  # other heads in each of the two chunks
    prompt = session.pages.reserve(0)
    stages = [Stage("prefill"), Stage(f"prefill on {first} cached"), Stage("decode")]
    session.step(stages[0], [prompt], first, slice(0, None, every))
    session.step(stages[1], [prompt], settings.prompt - first, slice(every // 2, None, every))
    sequences = [prompt, *(session.pages.fork(prompt) for _ in range(CONTINUATIONS - 1))]
    session.raw.update(dict.fromkeys(sequences, session.raw[prompt]))
    for _ in range(settings.tokens):
        session.step(stages[2], sequences, 1)
    if geometry.has_indexer:
        index, sparse = Stage("index"), Stage("sparse")
        session.step(sparse, sequences, 1, index=index)
        stages += [index, sparse]
    stages.append(Stage("cached rows"))
    session.check_rows(stages[-1])
    return stages, session


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
