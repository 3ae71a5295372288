"""What the demo serves: a prompt in two chunks, two continuations of it, one sparse step.

The prompt is forked after prefill: both continuations share its pages, and the first write to the
last, partly filled page goes to a copy. Pool rows without a token are NaN, and pages are allocated
in random order: reading a wrong row would show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from time import perf_counter
from typing import TypeVar

import torch
from rich.progress import Progress
from torch import Tensor

from mlakit.cache import (
    PagedLatentCache,
    request_slots,
    token_positions,
    token_slots,
)
from mlakit.cache.pages import PageAllocator, PagedSequence
from mlakit.formats import Format
from mlakit.ops import indexer_logits, indexer_topk, physical_rows
from mlakit.plan import plan_context
from mlakit.steps import CachedBatch, decode_branch, prefill_branch
from mlakit.tools.demo.model import Projected, RandomModel
from mlakit.tools.testing import poison

PAGE_SIZE = 64
CONTINUATIONS = 2
SCALE_BYTES = 4  # of an index key, after its e4m3 columns
KEEP_ONE_IN = 4  # the sparse step attends to at most this share of the cached tokens

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

    @property
    def positions(self) -> int:
        """Tokens of a continuation at its end, including the sparse step."""
        return self.prompt + self.tokens + 1


@dataclass(frozen=True, eq=False)
class Attended:
    """One attention call, or several of the same kind: inputs, outputs and seconds."""

    q_lens: tuple[int, ...]  # new tokens of each sequence; tokens are ordered by sequence
    q: Tensor  # [tokens, heads, D_N + D_R] not rotated
    kv: Tensor  # [tokens, D_C + D_R] raw
    out: Tensor  # [tokens, heads, D_V]
    projection_seconds: float
    attention_seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(self.q_lens)


@dataclass(frozen=True, eq=False)
class Selection:
    """Inputs and outputs of the indexer in the sparse step."""

    q: Tensor  # [tokens, index_heads, D]
    weights: Tensor  # [tokens, index_heads]
    logits: Tensor  # [tokens, kv_len] float32
    chosen: Tensor  # [tokens, topk] int32 positions
    seconds: float


@dataclass(frozen=True)
class PageCount:
    """Pages of the two continuations, and how many are shared."""

    used: int
    shared: int
    copied: int
    unshared: int  # pages without sharing


@dataclass(frozen=True, eq=False)
class Transcript:
    """All results of a run, for its oracles."""

    prefills: list[Attended]
    decode: Attended
    sparse: Attended | None  # of models with an indexer
    selection: Selection | None
    rows: list[Tensor]  # of each continuation [kv_len, width] float64, dequantised
    index_keys: list[Tensor]  # of each continuation [kv_len, D]; empty without an indexer
    pages: PageCount


class Session:
    """A model, its caches, and the sequences they hold."""

    def __init__(self, model: RandomModel, settings: Settings, generator: torch.Generator) -> None:
        self.model, self.generator, self.device = model, generator, settings.device
        num_pages = CONTINUATIONS * -(-settings.positions // PAGE_SIZE) + 1
        self.allocator = scattered_pool(num_pages, generator)
        self.cache = PagedLatentCache.allocate(
            model.geometry,
            settings.format,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            device=self.device,
        )
        self.num_copies = 0
        self.caches = [self.cache]  # and the index keys, if the model has an indexer
        if model.indexer is not None:
            shape = (num_pages, PAGE_SIZE, model.geometry.index_head_dim + SCALE_BYTES)
            blocks = torch.empty(shape, dtype=torch.uint8, device=self.device)
            self.caches.append(PagedLatentCache.wrap_index_keys(blocks))
        for cache in self.caches:
            for pool in (cache.payload, cache.scales):
                if pool is not None:
                    poison(pool)

    def grow(self, sequences: Sequence[PagedSequence]) -> None:
        """Append one token to each; a shared page is copied before it is written."""
        copies = self.allocator.append_batch(sequences, [1] * len(sequences))
        for cache in self.caches:
            cache.copy_pages([copy.source for copy in copies], [copy.target for copy in copies])
        self.num_copies += len(copies)

    def batch(self, sequences: Sequence[PagedSequence], counts: Sequence[int]) -> CachedBatch:
        """The step in which the last `counts` tokens of the sequences are new."""
        return CachedBatch(
            self.cache,
            self.allocator.page_table(sequences, device=self.device),
            self.allocator.kv_lens(sequences, device=self.device),
            torch.tensor([0, *accumulate(counts)], dtype=torch.int32).to(self.device),
        )

    def project(self, words: Tensor, batch: CachedBatch) -> Projected:
        """The projections of a step's words; writes the index keys to their cache."""
        request, positions = token_positions(batch.kv_lens, batch.q_starts, len(words))
        projected = self.model.project(words, positions)
        if projected.index is not None:
            slots = token_slots(batch.page_table, PAGE_SIZE, request, positions)
            self.caches[1].layer(0).write(slots, projected.index.keys)
        return projected

    def attend(
        self,
        words: Tensor,
        sequences: Sequence[PagedSequence],
        counts: Sequence[int],
        branch: Callable[[Projected, CachedBatch], Tensor],
    ) -> tuple[Attended, Tensor]:
        """One step of `counts` new words per sequence; also the next word of every sequence."""
        batch = self.batch(sequences, counts)
        projected, before = self.timed(lambda: self.project(words, batch))
        out, seconds = self.timed(lambda: branch(projected, batch))
        last = [end - 1 for end in accumulate(counts)]
        following, after = self.timed(lambda: self.model.next_words(out, last, self.generator))
        step = Attended(tuple(counts), projected.q, projected.kv, out, before + after, seconds)
        return step, following

    def prefill(self, projected: Projected, batch: CachedBatch) -> Tensor:
        kv_lens, q_lens = batch.kv_lens.tolist(), batch.q_starts.diff().tolist()
        # a copy: the branch rotates its queries in place
        q, plan = projected.q.clone(), plan_context(kv_lens, q_lens)
        return prefill_branch(q, projected.kv, self.model.layer, batch, plan=plan)

    def decode(self, projected: Projected, batch: CachedBatch) -> Tensor:
        return decode_branch(projected.q, projected.kv, self.model.layer, batch)

    def select(self, projected: Projected, batch: CachedBatch) -> tuple[Selection, Tensor]:
        """The best tokens of every sequence for its one query, and their rows in the cache."""
        index, table = projected.index, batch.page_table
        assert index is not None
        assert isinstance(table, Tensor)
        kv_lens = batch.kv_lens
        longest = int(kv_lens.max())
        topk = max(1, min(self.model.geometry.index_topk, longest // KEEP_ONE_IN))

        def choose() -> tuple[Tensor, Tensor, Tensor]:
            logits = indexer_logits(
                index.q, index.weights, self.caches[1], table, kv_lens, max_kv_len=longest
            )
            chosen = indexer_topk(logits, topk)
            return logits, chosen, physical_rows(chosen, table, PAGE_SIZE)

        (logits, chosen, rows), seconds = self.timed(choose)
        return Selection(index.q, index.weights, logits, chosen, seconds), rows

    def timed(self, call: Callable[[], T]) -> tuple[T, float]:
        self._finish()
        start = perf_counter()
        result = call()
        self._finish()
        return result, perf_counter() - start

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def rows(self, cache: PagedLatentCache, sequence: PagedSequence) -> Tensor:
        """float64 on the CPU [kv_len, width], dequantised."""
        table = self.allocator.page_table([sequence], device=self.device)
        slots = request_slots(table, PAGE_SIZE, 0, 0, sequence.length)
        return cache.layer(0).read(slots, torch.float64).cpu()


def scattered_pool(num_pages: int, generator: torch.Generator) -> PageAllocator:
    """An allocator whose free pages are in random order."""
    allocator = PageAllocator(num_pages, PAGE_SIZE)
    held = [allocator.reserve(PAGE_SIZE) for _ in range(num_pages)]
    for page in torch.randperm(num_pages, generator=generator).tolist():
        allocator.free(held[page])
    return allocator


def serve(model: RandomModel, settings: Settings, progress: Progress) -> Transcript:
    """Prefill the prompt, fork it, decode both continuations, end with a sparse step."""
    generator = torch.Generator().manual_seed(settings.seed)
    session = Session(model, settings, generator)
    prompt = torch.randint(len(model.embedding), (settings.prompt,), generator=generator)
    prefills, sequence, words = prefill_prompt(session, prompt.to(settings.device), progress)

    forks = (session.allocator.fork(sequence) for _ in range(CONTINUATIONS - 1))
    sequences = [sequence, *forks]
    words = words.repeat(
        CONTINUATIONS
    )  # the same first word; each continuation samples its own next ones
    decoded = []
    for _ in progress.track(range(settings.tokens), description="decode"):
        session.grow(sequences)
        step, words = session.attend(words, sequences, [1] * CONTINUATIONS, session.decode)
        decoded.append(step)

    sparse, selection = None, None
    if model.indexer is not None:
        session.grow(sequences)
        for _ in progress.track(range(1), description="sparse"):
            sparse, selection = sparse_step(session, words, sequences)

    return Transcript(
        prefills=prefills,
        decode=joined(decoded),
        sparse=sparse,
        selection=selection,
        rows=[session.rows(session.cache, each) for each in sequences],
        index_keys=[
            session.rows(cache, each) for cache in session.caches[1:] for each in sequences
        ],
        pages=count_pages(sequences, session.num_copies),
    )


def prefill_prompt(
    session: Session, prompt: Tensor, progress: Progress
) -> tuple[list[Attended], PagedSequence, Tensor]:
    """The prompt in two chunks, the second with the first as its context; also the next word."""
    first = 2 * len(prompt) // 3
    steps, sequence = [], session.allocator.reserve(0)
    for words in progress.track([prompt[:first], prompt[first:]], description="prefill"):
        session.allocator.append(sequence, len(words))
        step, following = session.attend(words, [sequence], [len(words)], session.prefill)
        steps.append(step)
    return steps, sequence, following


def sparse_step(
    session: Session, words: Tensor, sequences: Sequence[PagedSequence]
) -> tuple[Attended, Selection]:
    """One word per sequence, attending to the top-k cached tokens of the indexer."""
    selections = []

    def branch(projected: Projected, batch: CachedBatch) -> Tensor:
        selection, rows = session.select(projected, batch)
        selections.append(selection)
        return decode_branch(projected.q, projected.kv, session.model.layer, batch, rows=rows)

    step, _ = session.attend(words, sequences, [1] * len(sequences), branch)
    (selection,) = selections
    alone = step.attention_seconds - selection.seconds
    return replace(step, attention_seconds=alone), selection


def joined(steps: Sequence[Attended]) -> Attended:
    """Steps of one new token per sequence as one record, its tokens ordered by sequence."""

    def by_sequence(tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(tensors), dim=1).flatten(0, 1)

    return Attended(
        q_lens=(len(steps),) * len(steps[0].q_lens),
        q=by_sequence([step.q for step in steps]),
        kv=by_sequence([step.kv for step in steps]),
        out=by_sequence([step.out for step in steps]),
        projection_seconds=sum(step.projection_seconds for step in steps),
        attention_seconds=sum(step.attention_seconds for step in steps),
    )


def count_pages(sequences: Sequence[PagedSequence], num_copies: int) -> PageCount:
    holders = Counter(page for sequence in sequences for page in sequence.pages)
    return PageCount(
        used=len(holders),
        shared=sum(count > 1 for count in holders.values()),
        copied=num_copies,
        unshared=holders.total(),
    )
