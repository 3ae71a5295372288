"""FlashMLA's test problems of sparse decode and sparse prefill: its shapes, its corner cases."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache
from mlakit.geometry import RowShape
from mlakit.testing import poison
from tests.compat.flash_mla.inputs import (
    ENTRIES_AT_A_TIME,
    NOT_INDICES,
    listed_attention,
    padded,
    random_lengths,
    random_lists,
    random_sink,
    scattered_blocks,
    softmax_over,
)
from tests.pairs import with_every_pair

ROWS_AT_A_TIME = 2**18  # in float64 a gigabyte of them
ROWS = {576: ("fp8_block128", RowShape(512, 64)), 512: ("fp8_block64", RowShape(448, 64, 512))}


# --- sparse decode ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scope:
    """A cache and the lists into it: its tokens per request, pages, list length and lengths."""

    s_k: int
    topk: int
    page: int
    has_length: bool = False


NO_SCOPE = Scope(0, 0, 0)


@dataclass(frozen=True)
class SparseCase:
    b: int
    s_q: int
    main: Scope
    extra: Scope | None = None
    h_q: int = 64
    d: int = 576
    varlen: bool = True
    all_invalid: bool = False
    zeros: bool = False
    has_sink: bool = True
    byte_type: torch.dtype = torch.float8_e4m3fn

    def make(self, device: torch.device | str, seed: int = 0) -> SparseProblem:
        generator = torch.Generator(device).manual_seed(seed)
        shape = (self.b, self.s_q, self.h_q, self.d)
        q = torch.randn(shape, generator=generator, device=device).clamp_(-1, 1).bfloat16()
        sink = random_sink(self.h_q, generator) if self.has_sink else None
        main = self._source(self.main, generator)
        extra = None if self.extra is None else self._source(self.extra, generator)
        return SparseProblem(self, padded(q), sink, main, extra)

    def _source(self, scope: Scope, generator: torch.Generator) -> SparseSource:
        device, host = generator.device, torch.Generator().manual_seed(generator.initial_seed())
        lengths = random_lengths(
            self.b, scope.s_k, self.s_q, varlen=self.varlen, zeros=self.zeros, generator=host
        )
        table = scattered_blocks(lengths, scope.page, 4, host).to(device)
        limits = torch.tensor(lengths, device=device).repeat_interleave(self.s_q)
        tokens = random_lists(limits, scope.topk, generator)
        if self.all_invalid:
            tokens.fill_(-1)
        own_blocks = table.repeat_interleave(self.s_q, 0).gather(
            1, (tokens // scope.page).clamp_min(0).long()
        )
        rows = torch.where(tokens >= 0, own_blocks * scope.page + tokens % scope.page, -1)
        topk_length = None
        counts = torch.full((self.b,), scope.topk, device=device)
        if scope.has_length:
            topk_length = torch.randint(
                scope.topk + 1, (self.b,), generator=generator, device=device, dtype=torch.int32
            )
            counts = topk_length
        seen = torch.arange(scope.topk, device=device) < counts.repeat_interleave(self.s_q)[:, None]
        used = rows[seen & (rows >= 0)].unique().long()
        # Triton compiles other kernels for numbers of rows that are no multiples of 16
        blocks = -(-table.numel() // 16) * 16
        cache = self._cache(blocks, scope.page, device)
        pool = PagedLatentCache.wrap(cache, ROWS[self.d][1])
        values = torch.randn(len(used), self.d, generator=generator, device=device) / 10
        pool.layer(0).write(used, values.clamp_(-1, 1).bfloat16(), power_of_two_scales=True)
        indices = padded(rows.view(self.b, self.s_q, scope.topk))
        return SparseSource(cache, indices, topk_length, used, pool)

    def _cache(self, blocks: int, page: int, device: torch.device) -> Tensor:
        """Poisoned pages with room between them, in the layouts of FlashMLA's writers."""
        if self.d == 576:
            store = torch.empty(blocks, page + 1, 656, dtype=torch.uint8, device=device)
            cache = poison(store)[:, :page].unsqueeze(2)
        else:
            size = -(-page * 584 // 576) * 576
            store = poison(torch.empty(blocks, size, dtype=torch.uint8, device=device))
            cache = store[:, : page * 584].unflatten(1, (page, 1, 584))
        return cache.view(self.byte_type)


@dataclass(frozen=True, eq=False)
class SparseSource:
    cache: Tensor
    indices: Tensor
    topk_length: Tensor | None
    used: Tensor  # int64, the slots that hold rows
    pool: PagedLatentCache

    @cached_property
    def stored(self) -> Tensor:
        """[used + 1, d] float32; the last row stands for none, and is 0."""
        return torch.nn.functional.pad(self.pool.layer(0).read(self.used), (0, 0, 0, 1))

    @cached_property
    def listed(self) -> ListedRows:
        """From the arguments of the call, which may list a row several times."""
        (b, s_q, topk), num_slots = self.indices.shape, self.pool.layer(0).num_slots
        rows = self.indices.long()
        seen = (rows >= 0) & (rows < num_slots)
        if self.topk_length is not None:
            seen &= torch.arange(topk, device=rows.device) < self.topk_length[:, None, None]
        ordered, order = torch.where(seen, rows, num_slots).flatten(1).sort(1)
        is_row = ordered < num_slots
        is_first = is_row.clone()
        is_first[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
        counts = is_first.sum(1)
        most = int(counts.max())
        # what is not seen goes to a column of its own, which is dropped
        column = torch.where(is_row, is_first.cumsum(1) - 1, most)
        slots = rows.new_full((b, most + 1), num_slots).scatter_(1, column, ordered)
        times = torch.zeros(b, s_q * (most + 1), device=rows.device)
        times.scatter_add_(1, order // topk * (most + 1) + column, is_row.float())
        return ListedRows(
            torch.searchsorted(self.used, slots[:, :most].contiguous()),
            times.view(b, s_q, most + 1)[:, :, :most],
            counts,
        )


@dataclass(frozen=True, eq=False)
class ListedRows:
    """The rows that any list of a request has, each once."""

    places: Tensor  # int64 [b, most], in what is stored; past a request's last that of no row
    times: Tensor  # [b, s_q, most] float32: how often a list has the row
    counts: Tensor  # int64 [b]

    def of(self, requests: Tensor) -> tuple[Tensor, Tensor]:
        """(places, times) of some requests, no wider than they need."""
        most = int(self.counts[requests].max())
        return self.places[requests, :most], self.times[requests, :, :most]


@dataclass(frozen=True, eq=False)
class SparseProblem:
    case: SparseCase
    q: Tensor
    attn_sink: Tensor | None
    main: SparseSource
    extra: SparseSource | None
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", self.case.d**-0.55)

    def of_heads(self, heads: int) -> SparseProblem:
        """The problem of the first heads."""
        sink = None if self.attn_sink is None else self.attn_sink[:heads]
        return replace(
            self, case=replace(self.case, h_q=heads), q=self.q[:, :, :heads], attn_sink=sink
        )

    @property
    def arguments(self) -> tuple[Any, ...]:
        """In the positions of `flash_mla_with_kvcache` from softmax_scale on."""
        second = (None, None, None)
        if self.extra is not None:
            second = (self.extra.cache, self.extra.indices, self.extra.topk_length)
        return (
            *(self.scale, False, True, self.main.indices, self.attn_sink),
            *(*second[:2], self.main.topk_length, second[2]),
        )

    def answer(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """(out [b, s_q, h_q, 512], lse [b, h_q, s_q]).

        The lists of a request attend together, over all rows that any of them has: a row that a
        list has n times counts n times, and one that it has not, not at all.
        """
        case = self.case
        sources = [self.main] if self.extra is None else [self.main, self.extra]
        counts = torch.stack([source.listed.counts for source in sources]).sum(0)
        # requests of like size together: little of what they are padded with is computed
        counts, order = counts.sort(descending=True)
        out = self.q.new_empty(case.b, case.s_q, case.h_q, 512, dtype=dtype)
        lse = out.new_empty(out.shape[:3])
        sizes, start = counts.tolist(), 0
        while start < case.b:
            requests = order[start : start + max(ROWS_AT_A_TIME // max(sizes[start], 1), 1)]
            out[requests], lse[requests] = self._attend(sources, requests, dtype)
            start += len(requests)
        return out, lse.transpose(1, 2)

    def _attend(
        self, sources: Sequence[SparseSource], requests: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """(out [requests, s_q, h_q, 512], lse [requests, s_q, h_q])."""
        listed = [(source.stored, *source.listed.of(requests)) for source in sources]
        rows = torch.cat([stored[places] for stored, places, _ in listed], 1).to(dtype)
        times = torch.cat([times for _, _, times in listed], 2).to(dtype)
        q = self.q[requests].to(dtype)
        scores = (q.flatten(1, 2) @ rows.mT).unflatten(1, q.shape[1:3]) * self.scale
        scores = (scores + times.log()[:, :, None]).flatten(1, 2)
        sink = None if self.attn_sink is None else self.attn_sink.repeat(q.shape[1])
        out, lse = softmax_over(scores, rows[..., :512], sink)
        return out.view(*q.shape[:3], 512), lse.view(q.shape[:3])


SCOPES = (
    (512, 64, 2), (512, 64, 64), (512, 64, 69), (1024, 576, 2),
    (1024, 576, 61), (2046, 2048, 2), (2046, 2048, 64), (2046, 2048, 576),
)  # fmt: skip
CORNER_SCOPES = ((512, 64, 61), (650, 576, 53))
SPARSE_HEADS = (64, 128)
MOST_HEADS = max(SPARSE_HEADS)


@dataclass(frozen=True)
class SparseGroup:
    """The cases of FlashMLA's list that share these features, for 128 heads.

    Its list has the same cases for 64 heads: they are the first of the 128.
    """

    d: int
    main: tuple[int, int, int]
    has_length: bool = False
    has_extra: bool = False
    has_extra_length: bool = False

    def __str__(self) -> str:
        features = ("has_length", "has_extra", "has_extra_length")
        named = [f[4:] for f in features if getattr(self, f)]
        return "-".join([str(self.d), *named, *map(str, self.main)])

    def cases(self) -> Iterator[SparseCase]:
        if self.main in SCOPES:
            for extra, b, s_q in product(self._extras(SCOPES), (4, 74, 321), (1, 3)):
                for varlen in self._varlen(b):
                    yield SparseCase(b, s_q, self._main, extra, MOST_HEADS, self.d, varlen)
            return
        corners = [c for c in product((True, False), repeat=3) if any(c)]
        for extra, b in product(self._extras(CORNER_SCOPES), (4, 74, 321)):
            for varlen, corner in product(self._varlen(b), corners):
                yield SparseCase(b, 3, self._main, extra, MOST_HEADS, self.d, varlen, *corner)

    @property
    def _main(self) -> Scope:
        return Scope(*self.main, self.has_length)

    def _extras(self, scopes: Sequence[tuple[int, int, int]]) -> Sequence[Scope | None]:
        if not self.has_extra:
            return (None,)
        return [Scope(*extra, self.has_extra_length) for extra in scopes]

    def _varlen(self, b: int) -> tuple[bool, ...]:
        both = b == 74 and not (self.has_length or self.has_extra_length)
        return (True, False) if both else (True,)


SPARSE_GROUPS = [
    *(SparseGroup(576, main) for main in (*SCOPES, *CORNER_SCOPES)),
    *(
        SparseGroup(512, main, has_length, has_extra, has_extra_length)
        for has_length, has_extra, has_extra_length in product((False, True), repeat=3)
        if has_extra or not has_extra_length
        for main in (*SCOPES, *CORNER_SCOPES)
    ),
]


@lru_cache(maxsize=1)
def sparse_pairs() -> list[SparseCase]:
    """Return cases of FlashMLA's list that have every pair of the features in it."""

    def features(case: SparseCase) -> tuple[Hashable, ...]:
        scopes = case.main, case.extra or NO_SCOPE
        sizes = (replace(scope, has_length=False) for scope in scopes)
        corner = case.all_invalid, case.zeros, case.has_sink
        has_length = tuple(scope.has_length for scope in scopes)
        return case.d, *sizes, has_length, case.b, case.s_q, case.varlen, corner

    return with_every_pair([case for group in SPARSE_GROUPS for case in group.cases()], features)


WINDOW = Scope(16384, 128, 256)
SERVING_SPARSE = [
    *(SparseCase(b, 2, Scope(32768, 2048, 64), h_q=128) for b in (2, 64, 74, 128)),
    *(
        SparseCase(b, 2, WINDOW, Scope(16384, *extra), h_q=h_q, d=512)
        for h_q, extra in (
            (64, (512, 64)),
            (128, (1024, 64)),
            (64, (1024, 2, True)),
            (128, (1024, 2, True)),
        )
        for b in (2, 64, 74, 128, 148, 256)
    ),
    *(
        SparseCase(148, 2, Scope(32768, 16384, 64), h_q=h_q, d=d)
        for h_q, d in product((64, 128), (512, 576))
    ),
]
SMALL = Scope(70, 24, 7)
FEW_SPARSE = [
    SparseCase(3, 1, SMALL, h_q=5),
    SparseCase(2, 3, Scope(40, 64, 2), h_q=3, byte_type=torch.uint8),
    SparseCase(4, 2, Scope(40, 9, 64), h_q=4, zeros=True),
    SparseCase(2, 3, SMALL, h_q=2, all_invalid=True),
    SparseCase(2, 2, SMALL, h_q=3, has_sink=False, varlen=False, byte_type=torch.int8),
    SparseCase(3, 1, SMALL, h_q=5, d=512),
    SparseCase(3, 2, Scope(60, 20, 5, True), h_q=3, d=512),
    SparseCase(3, 3, SMALL, Scope(30, 33, 2), h_q=4, d=512, zeros=True),
    SparseCase(3, 2, Scope(60, 20, 5, True), Scope(90, 17, 61, True), h_q=3, d=512),
    SparseCase(2, 3, SMALL, SMALL, h_q=2, d=512, all_invalid=True, zeros=True),
    SparseCase(
        2, 2, Scope(50, 13, 6, True), Scope(30, 33, 2, True), h_q=6
    ),  # FlashMLA: MODEL1 only
]


# --- sparse prefill -----------------------------------------------------------------------------


@dataclass(frozen=True)
class PrefillCase:
    s_q: int
    s_kv: int
    topk: int
    h_q: int = 128
    d: int = 576
    has_sink: bool = False
    has_length: bool = False
    some_invalid: bool = False
    d_v: int = 512
    dtype: torch.dtype = torch.bfloat16

    def make(self, device: torch.device | str, seed: int = 0) -> PrefillProblem:
        generator = torch.Generator(device).manual_seed(seed)
        shift_q, shift_kv = (
            (torch.rand(2, generator=generator, device=device) - 0.5) / 10
        ).tolist()

        def draw(shift: float, *shape: int) -> Tensor:
            values = torch.randn(shape, generator=generator, device=device) / 10 + shift
            return padded(values.clamp_(-10, 10).to(self.dtype))

        q, kv = draw(shift_q, self.s_q, self.h_q, self.d), draw(shift_kv, self.s_kv, 1, self.d)
        limits = torch.full((self.s_q,), self.s_kv, device=device)
        rows = random_lists(limits, self.topk, generator)
        invalid = torch.tensor((*NOT_INDICES, self.s_kv), dtype=torch.int32, device=device)
        drawn = torch.randint(len(invalid), rows.shape, generator=generator, device=device)
        rows = torch.where(rows < 0, invalid[drawn], rows)
        if self.some_invalid:
            nothing = torch.randn(self.s_q, generator=generator, device=device) < -0.5
            rows = torch.where(nothing[:, None], invalid[drawn[:, :1]], rows)
        topk_length = None
        if self.has_length:
            topk_length = torch.randint(
                max(self.topk + 1, 64), (self.s_q,), generator=generator, device=device
            ).clamp_max(self.topk).int()  # fmt: skip
        sink = random_sink(self.h_q, generator) if self.has_sink else None
        return PrefillProblem(self, q, kv, padded(rows[:, None]), sink, topk_length)


@dataclass(frozen=True, eq=False)
class PrefillProblem:
    case: PrefillCase
    q: Tensor
    kv: Tensor
    indices: Tensor
    attn_sink: Tensor | None
    topk_length: Tensor | None
    scale: float = 0.5

    def answer(
        self, dtype: torch.dtype = torch.float64, entries: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(out [s_q, h_q, d_v], max_logits, lse [s_q, h_q]) over the first `entries`."""
        rows = self.indices[:, 0, :entries].long()
        seen = (rows >= 0) & (rows < self.case.s_kv)
        if self.topk_length is not None:
            seen &= torch.arange(rows.shape[1], device=rows.device) < self.topk_length[:, None]
        pool = self.kv[:, 0]
        step = max(ENTRIES_AT_A_TIME // rows.shape[1], 1)
        parts = []
        for start in range(0, len(rows), step):
            own = slice(start, start + step)
            gathered = pool[torch.where(seen[own], rows[own], 0)]
            parts.append(
                listed_attention(
                    self.q[own],
                    gathered,
                    seen[own],
                    self.scale,
                    self.case.d_v,
                    self.attn_sink,
                    dtype,
                )
            )
        out, lse, max_logits = (torch.cat(part) for part in zip(*parts, strict=True))
        return out, max_logits, lse


PREFILL_WIDTHS = tuple(product((512, 576), SPARSE_HEADS))
REGULAR = ((128, 128), (256, 256), (512, 512))
IRREGULAR = ((592, 128), (1840, 256), (1592, 384), (1521, 512), (95, 128), (153, 256), (114, 384))


def prefill_cases(d: int, h_q: int) -> Iterator[PrefillCase]:
    """FlashMLA's list for one width and head count."""
    for (s_kv, topk), s_q in product((*REGULAR, *IRREGULAR), (1, 62, 213)):
        yield PrefillCase(s_q, s_kv, topk, h_q, d)
    for (s_kv, topk), s_q, features in product(
        IRREGULAR, (62, 213), product((False, True), repeat=2)
    ):
        yield PrefillCase(s_q, s_kv, topk, h_q, d, *features)
    for s_q, s_kv, topk in (
        (1, 128, 128),
        (1, 256, 256),
        (1234, 4321, 4096),
        (4096, 2048, 2048),
    ):
        yield PrefillCase(s_q, s_kv, topk, h_q, d, True, True, some_invalid=True)
    for (s_kv, topk), s_q in product(((32, 2048), (64, 8192)), (1, 1024)):
        yield PrefillCase(s_q, s_kv, topk, h_q, d, True, True)


@lru_cache(maxsize=1)
def prefill_pairs() -> list[PrefillCase]:
    """Return cases of FlashMLA's lists that have every pair of the features in them."""

    def features(case: PrefillCase) -> tuple[Hashable, ...]:
        given = case.has_sink, case.has_length, case.some_invalid
        return case.d, case.h_q, case.s_q, (case.s_kv, case.topk), given

    return with_every_pair(
        [case for width in PREFILL_WIDTHS for case in prefill_cases(*width)], features
    )


SERVING_PREFILL = [
    *(PrefillCase(4096, n * 1024, 2048, 128, 576, True) for n in (8, 32, 64, 96, 128)),
    *(PrefillCase(4096, n * 1024, 512, 64, 512, True) for n in (8, 32, 48, 64)),
    *(PrefillCase(4096, n * 1024, 1024, 128, 512, True) for n in (8, 32, 48, 64)),
]
# FlashMLA has 64 and 128 heads here and does not look at the results
LONG_PREFILL = PrefillCase(70000, 256, 256, 16, 576, True, True)
FEW_PREFILL = [
    PrefillCase(1, 128, 128, 5),
    PrefillCase(30, 95, 64, 3),
    PrefillCase(13, 40, 64, 4, 512, True, True),
    PrefillCase(21, 114, 38, 3, 576, True, False, some_invalid=True),
    PrefillCase(9, 32, 200, 2, 512, True, True, some_invalid=True),
    # beyond FlashMLA
    PrefillCase(5, 50, 1, 1, 576, True, True),
    PrefillCase(5, 50, 17, 7, 320, True, True, d_v=256),
    PrefillCase(5, 50, 17, 3, 576, dtype=torch.float16),
    PrefillCase(5, 50, 17, 3, 576, has_sink=True, dtype=torch.float32),
]
