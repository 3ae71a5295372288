"""What cases of the documented functions are made of: masks, strided tensors, steps, pages.

Pools hold NaN, page tables hold numbers that are no pages, tensors are strided views with NaN
between their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from inspect import isfunction
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mlakit.cache.layouts import bits
from mlakit.compat import modular as documented
from mlakit.model.geometry import RowShape
from mlakit.model.masks import Mask
from mlakit.tools.testing import assert_same_bits, poison
from tests.seen_keys import SEES
from tests.transplant import carried

# their `scalar_args_buf` is made on the CPU and stays there
HOST_ARGUMENTS = {"flare_mla_decoding": (6, "scalar_args_buf")}


def functions_of(module: Any) -> Any:
    """What a module offers, its functions run on the device of the test."""
    names = {name: getattr(module, name) for name in module.__all__}
    return SimpleNamespace(
        **{
            name: carried(value, host=HOST_ARGUMENTS.get(name, ())) if isfunction(value) else value
            for name, value in names.items()
        }
    )


modular: Any = functions_of(documented)

BF16, F16, F32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
ROW = RowShape(512, 64)
SMALL_ROW = RowShape(96, 32)
SCALE = 0.137
EPSILON = 1e-6
NO_PAGES = (2**31 - 1, -1, -(2**31), 123_456_789, -7)

# every page size and every head count at least once, large with small
PAGES_AND_HEADS = [(1, 20), (7, 128), (16, 3), (48, 1), (64, 7), (128, 16), (16, 128), (7, 1)]

MASKS: dict[str, type[Mask]] = {
    "null": modular.NullMask,
    "causal": modular.CausalMask,
    "sliding_window_causal": modular.SlidingWindowCausalMask,
    "sliding_window_noncausal": modular.SlidingWindowNonCausalMask,
    "chunked": modular.ChunkedMask,
    "chunked_causal": modular.ChunkedCausalMask,
}


def make_mask(kind: str, window: int) -> Mask:
    return MASKS[kind](window) if window else MASKS[kind]()


def window_of(kind: str, window: int) -> int:
    return 0 if kind in ("null", "causal") else window


def integers(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    """An integer tensor; uint32 holds the bits of the int32 numbers."""
    wide = torch.as_tensor(values, dtype=torch.int64)
    return wide.int().view(dtype) if dtype == torch.uint32 else wide.to(dtype)


def normal(generator: torch.Generator, *shape: int, std: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=generator) * std


def to_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(E4M3)


def store(x: Tensor, dtype: torch.dtype) -> Tensor:
    return to_e4m3(x) if dtype == E4M3 else x.to(dtype)


class Padded:
    """A strided view into a larger poisoned tensor, which remembers what it held."""

    def __init__(self, *shape: int, dtype: torch.dtype, gaps: Sequence[int]) -> None:
        self.shape = shape
        sizes = [size + gap for size, gap in zip(shape, gaps, strict=True)]
        self.base = poison(torch.empty(*sizes, dtype=dtype))
        self.remember()

    @classmethod
    def holding(cls, values: Tensor, gaps: Sequence[int]) -> Padded:
        padded = cls(*values.shape, dtype=values.dtype, gaps=gaps)
        bits(padded.view).copy_(bits(values))
        padded.remember()
        return padded

    def _inside(self, base: Tensor) -> Tensor:
        return base[tuple(slice(size) for size in self.shape)]

    @property
    def view(self) -> Tensor:
        return self._inside(self.base)

    @property
    def remembered(self) -> Tensor:
        return self._inside(self._before)

    def remember(self) -> None:
        self._before = self.base.clone()

    def assert_only_written(self, name: str, written: Tensor) -> None:
        """Nothing changed but the elements in `written`, bool, broadcast over the view."""
        expected = self._before.clone()
        inside, now = bits(self._inside(expected)), bits(self.view)
        inside.copy_(torch.where(written, now, inside))
        assert_same_bits(f"{name} outside of what is written", self.base, expected)


NOTHING = torch.tensor(False)
EVERYTHING = torch.tensor(True)


def ordinal(x: Tensor) -> Tensor:
    """int64 numbers that count the values of a float type in their order, 0 for ±0."""
    wide = {1: torch.int8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize]
    code = x.contiguous().view(wide).long()
    return torch.where(code < 0, -(code & torch.iinfo(wide).max), code)


SIGNIFICAND_BITS = {E4M3: 3, BF16: 7, F16: 10, F32: 23}


def assert_stepwise(name: str, actual: Tensor, stepwise: Tensor, computed_in: torch.dtype) -> None:
    """The documented roundings were made: the same bits, but for 1 of 500 elements.

    The order of a float32 sum may tip a rounding in `computed_in`; what follows makes of that one
    step at most two. Float32 results are left to `assert_matches`.
    """
    assert actual.dtype == stepwise.dtype
    assert bool(actual.float().isfinite().all()), f"{name} is not finite"
    if actual.dtype == F32 or actual.numel() == 0:
        return
    finer = SIGNIFICAND_BITS[actual.dtype] - SIGNIFICAND_BITS[computed_in]
    most = 2 << max(finer, 0)
    steps = (ordinal(actual) - ordinal(stepwise)).abs()
    assert int(steps.max()) <= most, f"{name}: {int(steps.max())} steps off, {most} are allowed"
    differing = int((steps > 0).sum())
    assert differing <= max(2, steps.numel() // 500), f"{name}: {differing} of {steps.numel()}"


@dataclass(frozen=True)
class Step:
    """A ragged batch: for each request the tokens cached before, and the new ones."""

    before: tuple[int, ...]
    new: tuple[int, ...]

    @property
    def after(self) -> list[int]:
        return [old + new for old, new in zip(self.before, self.new, strict=True)]

    @property
    def row_offsets(self) -> list[int]:
        return [0, *accumulate(self.new)]

    @property
    def num_tokens(self) -> int:
        return sum(self.new)

    @property
    def positions(self) -> list[int]:
        return [old + i for old, new in zip(self.before, self.new, strict=True) for i in range(new)]

    def first_seen(self, kind: str, window: int) -> list[int]:
        """The first key that a new token of each request sees; its end if it has no new token."""
        sees = SEES[kind]
        return [
            next((k for k in range(after) if sees(old, k, window)), after) if new else after
            for old, new, after in zip(self.before, self.new, self.after, strict=True)
        ]


def ragged_step(page_size: int, generator: torch.Generator, longest: int = 300) -> Step:
    """A last page of one token, a fresh request, an idle one, whole pages, a random length."""
    one_token_tail = page_size * max(1, min(2, longest // page_size)) + 1
    whole_pages = page_size * -(-9 // page_size)
    some = int(torch.randint(2, min(3 * page_size, longest) + 2, (), generator=generator))
    return Step((one_token_tail - 1, 0, page_size + 1, whole_pages - 4, some), (1, 3, 0, 4, 2))


@dataclass
class Pages:
    """A pool of several layers, all poison, into which rows of one layer are filled.

    has_token_scales  rope-aware rows: e4m3 latent and bf16 rope columns, with one scale per token
    scale_columns     rows of e4m3 with one scale per so many columns; 0: no such rows
    """

    num_pages: int
    page_size: int
    row: RowShape = ROW
    dtype: torch.dtype = BF16
    layers: int = 3
    layer: int = 1
    has_token_scales: bool = False
    scale_columns: int = 0
    num_scale_pages: int = 0
    blocks: Padded = field(init=False)
    scales: Padded | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        rope = self.row.qk_rope_head_dim * (2 if self.has_token_scales else 1)
        axes = (1, self.layers, self.page_size, 1)
        has_scales = self.has_token_scales or self.scale_columns > 0
        self.blocks = Padded(
            self.num_pages,
            *axes,
            self.row.kv_lora_rank + rope,
            dtype=E4M3 if has_scales else self.dtype,
            gaps=(0, 0, 0, 1, 0, 8),
        )
        if has_scales:
            pages = self.num_scale_pages or self.num_pages
            groups = -(-self.row.width // self.scale_columns) if self.scale_columns else 1
            self.scales = Padded(pages, *axes, groups, dtype=F32, gaps=(1, 0, 0, 1, 0, 2))

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    def at(self, slots: Tensor) -> tuple[Any, ...]:
        """The index of slots of this layer."""
        return slots // self.page_size, 0, self.layer, slots % self.page_size, 0

    def at_slots(self, pool: Padded, slots: Tensor) -> Tensor:
        """Bool over the rows of all layers of `pool`, true at `slots` of this one."""
        rows = torch.zeros(*pool.shape[:-1], 1, dtype=torch.bool)
        rows[self.at(slots)] = True
        return rows

    def per_column(self, scales: Tensor) -> Tensor:
        """Scales [slots, groups] for each column of rows."""
        if not self.scale_columns:
            return scales
        return scales.repeat_interleave(self.scale_columns, -1)[:, : self.row.width]

    def fill(
        self,
        slots: Tensor,
        generator: torch.Generator,
        *,
        scale_slots: Tensor | None = None,
        std: float = 1.0,
    ) -> Tensor:
        """Random rows at `slots`; returns what they mean, float64 [slots, width]."""
        if self.scales is None:
            stored = store(normal(generator, len(slots), self.row.width, std=std), self.dtype)
            bits(self.blocks.view)[self.at(slots)] = bits(stored)
            return stored.double()
        groups = self.scales.shape[-1]
        content = to_e4m3(normal(generator, len(slots), self.row.kv_lora_rank, std=90.0))
        rope = normal(generator, len(slots), self.row.qk_rope_head_dim, std=90.0)
        rope = to_e4m3(rope) if self.scale_columns else rope.to(BF16)
        sigma = normal(generator, len(slots), groups, std=0.7).exp() * std / 90
        stored = torch.cat([content.view(torch.uint8), rope.view(torch.uint8)], -1)
        bits(self.blocks.view)[self.at(slots)] = stored
        self.scales.view[self.at(slots if scale_slots is None else scale_slots)] = sigma
        columns = torch.cat([content.double(), rope.double()], -1)
        return columns * self.per_column(sigma.double())

    def meaning(self, slots: Tensor, scale_slots: Tensor) -> Tensor:
        """The rows now stored at `slots`, times their scales: float32 [slots, width]."""
        stored = self.stored(slots)
        if self.scales is None:
            return stored.float()
        d_c, raw = self.row.kv_lora_rank, stored.view(torch.uint8)
        rope = raw[:, d_c:].contiguous().view(E4M3 if self.scale_columns else BF16)
        columns = torch.cat([raw[:, :d_c].view(E4M3).float(), rope.float()], -1)
        return columns * self.per_column(self.stored_scales(scale_slots))

    def quantised(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(what float32 rows become in this cache, their scales), if it has scales."""
        latent, rope = rows.split([self.row.kv_lora_rank, self.row.qk_rope_head_dim], -1)
        if not self.scale_columns:
            sigma = latent.abs().amax(-1, keepdim=True) / 448
            columns = [to_e4m3(latent / sigma).float(), (rope / sigma).to(BF16).float()]
            return torch.cat(columns, -1) * sigma, sigma
        groups = rows.split(self.scale_columns, -1)
        sigma = torch.stack([group.abs().amax(-1) for group in groups], -1) / 448
        expanded = self.per_column(sigma)
        return to_e4m3(rows / expanded).float() * expanded, sigma

    def stored(self, slots: Tensor) -> Tensor:
        """The elements now stored at `slots`."""
        return bits(self.blocks.view)[self.at(slots)].view(self.blocks.view.dtype)

    def stored_scales(self, slots: Tensor) -> Tensor:
        """The scales at `slots`, float32 [slots, groups]."""
        assert self.scales is not None
        return self.scales.view[self.at(slots)]

    def clear(self) -> None:
        """Nothing was filled after all: poison everywhere."""
        poison(self.blocks.base)
        if self.scales is not None:
            poison(self.scales.base)
        self.remember()

    def remember(self) -> None:
        self.blocks.remember()
        if self.scales is not None:
            self.scales.remember()

    def assert_only_written(self, slots: Tensor, scale_slots: Tensor | None = None) -> None:
        """No other row of this layer, no other layer and no gap between rows changed."""
        self.blocks.assert_only_written("blocks", self.at_slots(self.blocks, slots))
        if self.scales is not None:
            written = self.at_slots(self.scales, slots if scale_slots is None else scale_slots)
            self.scales.assert_only_written("scales", written)


def page_table(
    step: Step,
    first: Sequence[int],
    page_size: int,
    num_pages: int,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> tuple[Tensor, list[Tensor]]:
    """A shuffled table, garbage outside tokens [first, after); and the slots of those tokens."""
    pages = torch.randperm(num_pages, generator=generator).tolist()
    columns = max((-(-after // page_size) for after in step.after), default=0) + 2
    table = [[NO_PAGES[(r + c) % 5] for c in range(columns)] for r in range(len(step.new))]
    slots = []
    for request, (low, high) in enumerate(zip(first, step.after, strict=True)):
        for column in range(low // page_size, -(-high // page_size) if high > low else 0):
            table[request][column] = pages.pop()
        slots.append(
            torch.tensor(
                [
                    table[request][t // page_size] * page_size + t % page_size
                    for t in range(low, high)
                ],
                dtype=torch.int64,
            )
        )
    return integers(table, dtype).reshape(len(step.new), columns), slots


@dataclass
class PagedStep:
    """The requests of one step in a pool: rows of the tokens [first, after), poison elsewhere."""

    step: Step
    first: Sequence[int]
    generator: torch.Generator
    page_size: int = 16
    row: RowShape = ROW
    dtype: torch.dtype = BF16
    integers: torch.dtype = torch.int32
    layer: int = 1
    layers: int = 3
    has_token_scales: bool = False
    scale_columns: int = 0
    has_scale_pool: bool = False
    std: float = 1.0
    pages: Pages = field(init=False)
    rows: list[Tensor] = field(init=False)
    slots: list[Tensor] = field(init=False)
    scale_slots: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        used = sum(-(-after // self.page_size) for after in self.step.after)
        self.pages = Pages(
            used + 3,
            self.page_size,
            row=self.row,
            dtype=self.dtype,
            layers=self.layers,
            layer=self.layer,
            has_token_scales=self.has_token_scales,
            scale_columns=self.scale_columns,
            num_scale_pages=used + 5 if self.has_scale_pool else 0,
        )
        self.table, self.slots = self._table(used + 3)
        self.scales_table, self.scale_slots = None, self.slots
        if self.has_scale_pool:
            self.scales_table, self.scale_slots = self._table(used + 5)
        self.rows = [
            torch.cat(
                [
                    torch.full((first, self.row.width), torch.nan, dtype=torch.float64),
                    self.pages.fill(slots, self.generator, scale_slots=places, std=self.std),
                ]
            )
            for first, slots, places in zip(self.first, self.slots, self.scale_slots, strict=True)
        ]
        self.pages.remember()
        self.cache_lengths = integers(list(self.step.before), self.integers)

    def _table(self, num_pages: int) -> tuple[Tensor, list[Tensor]]:
        return page_table(
            self.step, self.first, self.page_size, num_pages, self.generator, self.integers
        )

    @property
    def row_offsets(self) -> Tensor:
        return integers(self.step.row_offsets, self.integers)

    @property
    def new_slots(self) -> Tensor:
        """Where the new tokens live, in the order of the ragged batch."""
        return self._newest(self.slots)

    @property
    def new_scale_slots(self) -> Tensor:
        """Where the scales of the new tokens live."""
        return self._newest(self.scale_slots)

    def _newest(self, slots: list[Tensor]) -> Tensor:
        nowhere = torch.zeros(0, dtype=torch.int64)
        ends = [s[len(s) - new :] for s, new in zip(slots, self.step.new, strict=True)]
        return torch.cat([nowhere, *ends])

    def collection(self) -> documented.KVCollection:
        scales = self.pages.scales
        return modular.KVCollection(
            self.pages.blocks.view,
            self.table,
            self.cache_lengths,
            scales=None if scales is None else scales.view,
            scales_lookup_table=self.scales_table,
            kv_lora_rank=self.row.kv_lora_rank,
            # rows of the documented widths need no flag
            per_token_scale_rope_aware=None if self.row == ROW else self.has_token_scales,
        )

    def key_cache(self) -> documented.KeyCache:
        return self.collection().get_key_cache(self.layer)
