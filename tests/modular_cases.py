"""Cases of the documented functions: inputs with poison wherever nothing may be read, and oracles.

Each case has `run`, which calls the function, and `check`, which compares every row of every output
with a float64 oracle and asserts that nothing else was written. Pools hold NaN, page tables hold
numbers that are no pages, tensors are strided views with NaN between their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import isfunction
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import hopper_sums
import torch
from torch import Tensor
from transplant import carried, device_of_calls

from mlakit import ops, reference
from mlakit.compat import modular as documented
from mlakit.geometry import RowShape
from mlakit.masks import Mask
from mlakit.testing import assert_matches, assert_same_bits, poison

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
ops_there: Any = functions_of(ops)

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
# does a query at position q see key k < N, with window w
SEES: dict[str, Callable[[int, int, int], bool]] = {
    "null": lambda q, k, w: True,
    "causal": lambda q, k, w: k <= q,
    "sliding_window_causal": lambda q, k, w: q - w < k <= q,
    "sliding_window_noncausal": lambda q, k, w: k + w > q,
    "chunked": lambda q, k, w: k // w == q // w,
    "chunked_causal": lambda q, k, w: k <= q and k // w == q // w,
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


def _bits(tensor: Tensor) -> Tensor:
    """Torch lacks many functions for e4m3; moving bytes is enough here."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


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
        _bits(padded.view).copy_(_bits(values))
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
        inside, now = _bits(self._inside(expected)), _bits(self.view)
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
    """A pool of several layers, all poison, into which rows of one layer are filled."""

    num_pages: int
    page_size: int
    row: RowShape = ROW
    dtype: torch.dtype = BF16
    layers: int = 3
    layer: int = 1
    has_token_scales: bool = False
    num_scale_pages: int = 0
    blocks: Padded = field(init=False)
    scales: Padded | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        rope = self.row.qk_rope_head_dim * (2 if self.has_token_scales else 1)
        axes = (1, self.layers, self.page_size, 1)
        self.blocks = Padded(
            self.num_pages,
            *axes,
            self.row.kv_lora_rank + rope,
            dtype=E4M3 if self.has_token_scales else self.dtype,
            gaps=(0, 0, 0, 1, 0, 8),
        )
        if self.has_token_scales:
            pages = self.num_scale_pages or self.num_pages
            self.scales = Padded(pages, *axes, 1, dtype=F32, gaps=(1, 0, 0, 1, 0, 2))

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    def at(self, slots: Tensor) -> tuple[Any, ...]:
        """The index of slots of this layer."""
        return slots // self.page_size, 0, self.layer, slots % self.page_size, 0

    def at_slots(self, slots: Tensor) -> Tensor:
        """Bool over the rows of all layers, true at `slots` of this one."""
        rows = torch.zeros(*self.blocks.shape[:-1], 1, dtype=torch.bool)
        rows[self.at(slots)] = True
        return rows

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
            _bits(self.blocks.view)[self.at(slots)] = _bits(stored)
            return stored.double()
        content = to_e4m3(normal(generator, len(slots), self.row.kv_lora_rank, std=90.0))
        rope = normal(generator, len(slots), self.row.qk_rope_head_dim, std=90.0).to(BF16)
        sigma = normal(generator, len(slots), 1, std=0.7).exp() * std / 90
        stored = torch.cat([content.view(torch.uint8), rope.view(torch.uint8)], -1)
        _bits(self.blocks.view)[self.at(slots)] = stored
        self.scales.view[self.at(slots if scale_slots is None else scale_slots)] = sigma
        return torch.cat([content.double(), rope.double()], -1) * sigma.double()

    def stored(self, slots: Tensor) -> Tensor:
        """The elements now stored at `slots`."""
        return _bits(self.blocks.view)[self.at(slots)].view(self.blocks.view.dtype)

    def stored_scales(self, slots: Tensor) -> Tensor:
        """Their scales, float32 [slots, 1]."""
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

    def assert_only_written(self, slots: Tensor) -> None:
        """No other row of this layer, no other layer and no gap between rows changed."""
        written = self.at_slots(slots)
        self.blocks.assert_only_written("blocks", written)
        if self.scales is not None:
            self.scales.assert_only_written("scales", written if len(slots) else NOTHING)


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
    has_scale_pool: bool = False
    std: float = 1.0
    pages: Pages = field(init=False)
    rows: list[Tensor] = field(init=False)
    slots: list[Tensor] = field(init=False)

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
            num_scale_pages=used + 5 if self.has_scale_pool else 0,
        )
        self.table, self.slots = self._table(used + 3)
        self.scales_table, scale_slots = None, self.slots
        if self.has_scale_pool:
            self.scales_table, scale_slots = self._table(used + 5)
        self.rows = [
            torch.cat(
                [
                    torch.full((first, self.row.width), torch.nan, dtype=torch.float64),
                    self.pages.fill(slots, self.generator, scale_slots=places, std=self.std),
                ]
            )
            for first, slots, places in zip(self.first, self.slots, scale_slots, strict=True)
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
        nowhere = torch.zeros(0, dtype=torch.int64)
        ends = [s[len(s) - new :] for s, new in zip(self.slots, self.step.new, strict=True)]
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
        )

    def key_cache(self) -> documented.KeyCache:
        return self.collection().get_key_cache(self.layer)


def rope_table(generator: torch.Generator, step: Step, width: int, dtype: torch.dtype) -> Tensor:
    """cos and sin of an angle per position and pair, interleaved; NaN where no new token stands."""
    angle = torch.rand(max([1, *step.after]), width // 2, generator=generator) * 6.28
    table = torch.stack([angle.cos(), angle.sin()], -1).flatten(1).to(dtype)
    used = torch.zeros(len(table), dtype=torch.bool)
    used[step.positions] = True
    return poison(table, keep=used)


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.clamp(-448, 448) if dtype == E4M3 else x


@dataclass
class RopeCase:
    """Of `fused_rope_rmsnorm_quantization_kernel` and `mla_fused_rope_rmsnorm_quantization`.

    output  "own": a tensor of its own; "alias": q_rope itself; "slice": of an absorbed-Q buffer
    """

    seed: int = 0
    page_size: int = 16
    heads: int = 3
    row: RowShape = ROW
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype | None = None
    cache_dtype: torch.dtype = BF16
    freqs_dtype: torch.dtype = F32
    gamma_dtype: torch.dtype = BF16
    out_dtype: torch.dtype | None = None
    output: str = "own"
    integers: torch.dtype = torch.int32
    layer: int = 1
    std: float = 1.0
    has_token_scales: bool = False
    step: Step | None = None

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        step = self.step or ragged_step(self.page_size, g)
        tokens, d_c, d_r = step.num_tokens, self.row.kv_lora_rank, self.row.qk_rope_head_dim
        # the step reads no old row: only the pages of new tokens need exist
        self.paged = PagedStep(
            step,
            [old if new else old + new for old, new in zip(step.before, step.new, strict=True)],
            g,
            page_size=self.page_size,
            row=self.row,
            dtype=self.cache_dtype,
            integers=self.integers,
            layer=self.layer,
            has_token_scales=self.has_token_scales,
        )
        self.paged.pages.clear()
        q_rope = normal(g, tokens, self.heads, d_r, std=self.std).to(self.dtype)
        self.q_rope = Padded.holding(q_rope, gaps=(1, 1, 6))
        kv = normal(g, tokens, self.row.width, std=2 * self.std).to(self.kv_dtype or self.dtype)
        self.kv = Padded.holding(kv, gaps=(1, 8))
        self.freqs = rope_table(g, step, d_r, self.freqs_dtype)
        self.gamma = (1 + normal(g, d_c, std=0.3)).to(self.gamma_dtype)
        out_dtype = self.out_dtype or self.dtype
        self.first_column = d_c if self.output == "slice" else 0
        if self.output == "alias":
            self.buffer = self.q_rope
        else:
            columns = self.first_column + d_r
            self.buffer = Padded(tokens, self.heads, columns, dtype=out_dtype, gaps=(1, 1, 4))

    @property
    def q_rope_output(self) -> Tensor:
        return self.buffer.view[..., self.first_column :]

    def run(self, kv_input: Any = None) -> Tensor:
        return modular.mla_fused_rope_rmsnorm_quantization(
            self.q_rope_output,
            self.q_rope.view,
            self.paged.row_offsets,
            self.freqs,
            self.gamma,
            self.paged.collection(),
            self.layer,
            EPSILON,
            kv_input=self.kv.view if kv_input is None else kv_input,
        )

    def run_kernel(self, **launch: int) -> Tensor:
        return modular.fused_rope_rmsnorm_quantization_kernel(
            self.q_rope_output,
            self.q_rope.view,
            self.kv.view,
            self.paged.row_offsets,
            self.freqs,
            self.gamma,
            self.paged.key_cache(),
            EPSILON,
            **launch,
        )

    def check(self) -> None:
        arguments = (self.q_rope.remembered, self.kv.remembered, self.freqs, self.gamma)
        out_dtype = self.q_rope_output.dtype
        check_appended(
            self.q_rope_output,
            self.paged.pages.stored(self.paged.new_slots),
            *arguments,
            self.paged.step.positions,
            out_dtype=out_dtype,
            cache_dtype=self.cache_dtype,
        )
        column = torch.arange(self.buffer.shape[-1])
        self.buffer.assert_only_written("q_rope_output", column >= self.first_column)
        if self.output != "alias":
            self.q_rope.assert_only_written("q_rope", NOTHING)
        self.kv.assert_only_written("kv", NOTHING)
        self.paged.pages.assert_only_written(self.paged.new_slots)


def check_appended(
    q_rope_out: Tensor,
    rows: Tensor,
    q_rope: Tensor,
    kv: Tensor,
    freqs: Tensor,
    gamma: Tensor,
    positions: Sequence[int],
    *,
    out_dtype: torch.dtype,
    cache_dtype: torch.dtype,
) -> None:
    """Rotated queries and new cache rows against the exact and the stepwise oracle."""
    arguments = (q_rope, kv, freqs, gamma, positions)
    exact = reference.norm_rope_quant(*arguments, epsilon=EPSILON)
    stepwise = reference.norm_rope_quant_stepwise(
        *arguments, epsilon=EPSILON, out_dtype=out_dtype, cache_dtype=cache_dtype
    )
    d_c = gamma.shape[0]
    latent, rope = (..., slice(d_c)), (..., slice(d_c, None))
    for name, actual, want, naive, computed_in in (
        ("q_rope_output", q_rope_out, exact[0], stepwise[0], freqs.dtype),
        ("latents", rows[latent], exact[1][latent], stepwise[1][latent], gamma.dtype),
        ("rotated keys", rows[rope], exact[1][rope], stepwise[1][rope], freqs.dtype),
    ):
        assert_stepwise(name, actual, naive, computed_in)
        assert_matches(name, actual, saturated(want, actual.dtype), naive)


@dataclass
class DecodeCase:
    """Of `flare_mla_decoding` over a paged cache."""

    seed: int = 0
    page_size: int = 16
    heads: int = 3
    row: RowShape = ROW
    dtype: torch.dtype = BF16
    cache_dtype: torch.dtype = BF16
    mask: str = "causal"
    window: int = 0
    is_ragged: bool = True
    has_token_scales: bool = False
    has_scale_pool: bool = False
    has_q_scale: bool = True
    integers: torch.dtype = torch.int32
    layer: int = 1
    scale: float = SCALE
    step: Step | None = None

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        self.step = self.step or ragged_step(self.page_size, g)
        self.paged = PagedStep(
            self.step,
            self.step.first_seen(self.mask, self.window),
            g,
            page_size=self.page_size,
            row=self.row,
            dtype=self.cache_dtype,
            integers=self.integers,
            layer=self.layer,
            has_token_scales=self.has_token_scales,
            has_scale_pool=self.has_scale_pool,
        )
        tokens, d_c = self.step.num_tokens, self.row.kv_lora_rank
        stored, self.meaning = self._queries(g, tokens)
        out_dtype = BF16 if self.dtype == E4M3 else self.dtype
        if self.is_ragged:
            self.where: Any = slice(None)
            self.q = Padded.holding(stored, gaps=(1, 1, 8))
            self.output = Padded(tokens, self.heads, d_c, dtype=out_dtype, gaps=(2, 1, 4))
            return
        batch, longest = len(self.step.new), max([0, *self.step.new]) + 1
        request = [r for r, new in enumerate(self.step.new) for _ in range(new)]
        index = [i for new in self.step.new for i in range(new)]
        self.where = (integers(request, torch.int64), integers(index, torch.int64))
        leading = (batch, longest, self.heads)
        self.q = Padded(*leading, stored.shape[-1], dtype=stored.dtype, gaps=(1, 1, 1, 8))
        _bits(self.q.view)[self.where] = _bits(stored)
        self.q.remember()
        self.output = Padded(*leading, d_c, dtype=out_dtype, gaps=(1, 2, 1, 4))

    def _queries(self, g: torch.Generator, tokens: int) -> tuple[Tensor, Tensor]:
        """q as it is stored, and what it means in float64; `q_scale` on the way."""
        self.q_scale = None
        if not self.has_token_scales:
            stored = store(normal(g, tokens, self.heads, self.row.width), self.dtype)
            return stored, stored.double()
        content = to_e4m3(normal(g, tokens, self.heads, self.row.kv_lora_rank, std=3.0))
        rope = normal(g, tokens, self.heads, self.row.qk_rope_head_dim, std=3.0).to(BF16)
        stored = torch.cat([content.view(torch.uint8), rope.view(torch.uint8)], -1).view(E4M3)
        meaning = torch.cat([content.double(), rope.double()], -1)
        if self.has_q_scale:
            sigma = normal(g, tokens).exp() / 3
            meaning *= sigma.double()[:, None, None]
            self.q_scale = sigma
        return stored, meaning

    def mask_functor(self) -> Mask:
        return make_mask(self.mask, self.window)

    def _padded_q_scale(self) -> Tensor | None:
        if self.q_scale is None or self.is_ragged:
            return self.q_scale
        padded = torch.full(self.q.shape[:2], torch.nan)
        padded[self.where] = self.q_scale
        return padded.flatten()

    def run(self, scalar_args_buf: Tensor | None = None, **options: Any) -> Tensor:
        valid_length = integers(
            self.step.row_offsets if self.is_ragged else list(self.step.new), self.integers
        )
        return modular.flare_mla_decoding(
            self.output.view,
            self.q.view,
            self.paged.key_cache(),
            self.mask_functor(),
            valid_length,
            self.scale,
            scalar_args_buf,
            ragged=self.is_ragged,
            q_scale=self._padded_q_scale(),
            per_token_scale_rope_aware=self.has_token_scales,
            **options,
        )

    def oracle(self, dtype: torch.dtype = torch.float64) -> Tensor:
        out, _ = reference.mla_decode(
            self.meaning,
            self.paged.rows,
            self.step.new,
            softmax_scale=self.scale,
            v_width=self.row.v_width,
            mask=self.mask_functor(),
            dtype=dtype,
        )
        return out

    def check(self) -> None:
        assert_matches("output", self.output.view[self.where], self.oracle(), self.oracle(F32))
        written = torch.zeros(*self.output.shape[:-1], 1, dtype=torch.bool)
        written[self.where] = True
        self.output.assert_only_written("output", written)
        self.q.assert_only_written("q", NOTHING)
        self.paged.pages.assert_only_written(torch.zeros(0, dtype=torch.int64))


@dataclass
class SparseCase:
    """Of `mla_sm100_prefill_sparse`. Half of the pool's rows are poison, and lists name them too,
    past their lengths."""

    seed: int = 0
    page_size: int = 16
    heads: int = 3
    dtype: torch.dtype = BF16
    cache_dtype: torch.dtype = BF16
    has_token_scales: bool = False
    sink: Tensor | None = None
    integers: torch.dtype = torch.int32
    layer: int = 1
    lengths: tuple[int, ...] = (19, 0, 1, 24, 24, 7)
    stride: int = 24
    scale: float = SCALE
    is_flat: bool = True
    with_invalid: bool = True

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        self.pages = Pages(
            -(-90 // self.page_size) + 1,
            self.page_size,
            dtype=self.cache_dtype,
            layer=self.layer,
            has_token_scales=self.has_token_scales,
        )
        slots = torch.randperm(self.pages.num_slots, generator=g)
        live, dead = slots.chunk(2)
        self.pool = torch.full((self.pages.num_slots, ROW.width), torch.nan, dtype=torch.float64)
        self.pool[live] = self.pages.fill(live, g)
        self.pages.remember()
        tokens = len(self.lengths)
        self.lists = live[torch.randint(len(live), (tokens, self.stride), generator=g)]
        if self.with_invalid and tokens:
            self._spoil(dead, g)
        self.q = Padded.holding(
            normal(g, tokens, self.heads, ROW.width).to(self.dtype), gaps=(1, 1, 8)
        )
        self.output = Padded(tokens, self.heads, 512, dtype=self.dtype, gaps=(1, 2, 4))

    @property
    def invalid(self) -> Tensor:
        wide = [2**40, -(2**40)] if self.integers == torch.int64 else []
        bounds = [-(2**31), -123_456, -1, self.pages.num_slots, 2**31 - 1]
        return torch.tensor(bounds + wide)

    def _spoil(self, dead: Tensor, g: torch.Generator) -> None:
        """Poisoned rows past the lengths, duplicates and invalid numbers before them."""
        shape = self.lists.shape
        past = torch.arange(self.stride) >= torch.tensor(self.lengths)[:, None]
        anything = torch.cat([dead, self.invalid])
        self.lists[past] = anything[torch.randint(len(anything), shape, generator=g)][past]
        spoilt = (torch.rand(shape, generator=g) < 0.25) & ~past
        numbers = self.invalid[torch.arange(self.lists.numel()) % len(self.invalid)].view(shape)
        self.lists[spoilt] = numbers[spoilt]
        self.lists[0, :4] = self.pool_live()[0]
        self.lists[-2] = self.invalid[torch.arange(self.stride) % len(self.invalid)]

    def pool_live(self) -> Tensor:
        """The slots whose rows are not poison."""
        return self.pool.isfinite().all(-1).nonzero().flatten()

    def key_cache(self) -> documented.KeyCache:
        scales = self.pages.scales
        return modular.KVCollection(
            self.pages.blocks.view,
            integers([NO_PAGES] * 2, self.integers),  # lists name physical rows: no table is read
            integers([3, 0], self.integers),
            scales=None if scales is None else scales.view,
        ).get_key_cache(self.layer)

    def run(self) -> Tensor:
        indices = integers(self.lists, self.integers)
        return modular.mla_sm100_prefill_sparse(
            self.output.view,
            self.q.view,
            self.key_cache(),
            indices.flatten() if self.is_flat else indices,
            integers(list(self.lengths), self.integers),
            self.sink,
            self.scale,
            num_q_heads=self.heads,
            qk_depth=576,
            v_depth=512,
            indices_stride=self.stride,
        )

    def oracle(self, dtype: torch.dtype = torch.float64) -> Tensor:
        out, _, _ = reference.sparse_mla(
            self.q.remembered,
            self.pool,
            self.lists,
            softmax_scale=self.scale,
            v_width=512,
            topk_lens=self.lengths,
            sink=self.sink,
            dtype=dtype,
        )
        return out

    def check(self) -> None:
        assert_matches("output", self.output.view, self.oracle(), self.oracle(F32))
        self.output.assert_only_written("output", EVERYTHING)
        self.q.assert_only_written("q", NOTHING)
        self.pages.assert_only_written(torch.zeros(0, dtype=torch.int64))


@dataclass
class PrefillCase:
    """Of `mla_prefill_branch_fp8`.

    `skips_hidden`: the buffer starts at the first key a query sees, instead of at key 0.
    """

    seed: int = 0
    page_size: int = 16
    heads: int = 3
    d_n: int = 128
    d_v: int = 128
    row: RowShape = ROW
    dtype: torch.dtype = BF16
    cache_dtype: torch.dtype | None = None
    freqs_dtype: torch.dtype = F32
    gamma_dtype: torch.dtype = BF16
    group: int = 128
    mask: str = "causal"
    window: int = 0
    score_mod: str = "no_pos"
    integers: torch.dtype = torch.int32
    layer: int = 1
    scale: float = SCALE
    skips_hidden: bool = False
    std: float = 1.5
    step: Step | None = None
    _quantised: list[tuple[Tensor, Tensor, Tensor]] | None = None

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        self.step = self.step or ragged_step(self.page_size, g, longest=140)
        tokens, d_c, d_r = self.step.num_tokens, self.row.kv_lora_rank, self.row.qk_rope_head_dim
        self.paged = PagedStep(
            self.step,
            self.step.first_seen(self.mask, self.window),
            g,
            page_size=self.page_size,
            row=self.row,
            dtype=self.cache_dtype or self.dtype,
            integers=self.integers,
            layer=self.layer,
            std=self.std,
        )
        q = normal(g, tokens, self.heads, self.d_n + d_r).to(self.dtype)
        self.q = Padded.holding(q, gaps=(1, 1, 6))
        self.output = Padded(tokens, self.heads, self.d_v, dtype=self.dtype, gaps=(1, 1, 4))
        self.freqs = rope_table(g, self.step, d_r, self.freqs_dtype)
        self.gamma = (1 + normal(g, d_c, std=0.3)).to(self.gamma_dtype)
        outputs = self.heads * (self.d_n + self.d_v)
        self.weight = to_e4m3(normal(g, outputs, d_c, std=60.0))
        groups = (-(-outputs // self.group), -(-d_c // self.group))
        self.weight_scale = normal(g, *groups, std=0.5).exp() / (60 * d_c**0.5)

    def buffer(self) -> tuple[Tensor, Tensor, int]:
        """(buffer_row_offsets, cache_offsets, buffer_length) in whole pages; the last cache offset
        is not part of the contract and is garbage."""
        skipped = self.paged.first if self.skips_hidden else [0] * len(self.step.new)
        counts = [
            -(-(after - skip) // self.page_size) * self.page_size
            for after, skip in zip(self.step.after, skipped, strict=True)
        ]
        starts = [0, *accumulate(counts)]
        offsets = integers([*skipped, 2**31 - 1], self.integers)
        return integers(starts, self.integers), offsets, starts[-1]

    def run(self, buffer: tuple[Tensor, Tensor, int] | None = None, **options: Any) -> Tensor:
        self._quantised = None
        buffer_row_offsets, cache_offsets, buffer_length = buffer or self.buffer()
        return modular.mla_prefill_branch_fp8(
            self.output.view,
            self.q.view,
            self.paged.row_offsets,
            self.freqs,
            self.gamma,
            self.paged.collection(),
            self.layer,
            self.scale,
            EPSILON,
            buffer_row_offsets,
            cache_offsets,
            buffer_length,
            self.weight,
            self.weight_scale,
            n_scale_granularity=self.group,
            k_scale_granularity=self.group,
            mask_str=self.mask,
            local_window_size=self.window or None,
            score_mod_str=self.score_mod,
            **options,
        )

    def raw_latents(self) -> Tensor:
        """The new tokens' rows before the call, in q's dtype."""
        news = zip(self.paged.rows, self.step.new, strict=True)
        return torch.cat([rows[len(rows) - new :] for rows, new in news]).to(self.dtype)

    def quantised_rows(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Per request: the rows now cached in q's dtype, their latents in e4m3, the scales."""
        if self._quantised is None:
            self._quantised = []
            for slots in self.paged.slots:
                rows = self.paged.pages.stored(slots).to(self.dtype)
                latent = rows[:, : self.row.kv_lora_rank]
                quantised = reference.quantize_fp8(latent, self.group, scale_ub=1200.0)
                self._quantised.append((rows, *quantised))
        return self._quantised

    def _expanded(self, latent: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The latents times the weight; float32 as exact as what multiplies them on this device."""
        is_on_gpu = dtype == F32 and device_of_calls().type == "cuda"
        takes_library = self.group == hopper_sums.GROUP and latent.shape[1] % 512 == 0
        if is_on_gpu and takes_library and self.dtype == torch.bfloat16:
            return hopper_sums.scaled_mm(latent, scales, self.weight, self.weight_scale)
        return reference.scaled_mm_fp8(
            latent,
            scales,
            self.weight,
            self.weight_scale,
            n_group=self.group,
            k_group=self.group,
            dtype=dtype,
        )

    def keys_and_values(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """K, shared K, V of all positions from the rows now cached; NaN where no query looks."""
        all_k, all_shared, all_v = [], [], []
        cached = self.quantised_rows()
        for first, (rows, quantised, scales) in zip(self.paged.first, cached, strict=True):
            expanded = self._expanded(quantised, scales, dtype).to(self.dtype)
            hidden = expanded.new_full((first, expanded.shape[1]), torch.nan)
            per_head = torch.cat([hidden, expanded]).unflatten(1, (self.heads, -1))
            k, v = per_head.split([self.d_n, self.d_v], -1)
            all_k.append(k)
            all_v.append(v)
            no_rope = rows.new_full((first, self.row.qk_rope_head_dim), torch.nan)
            all_shared.append(torch.cat([no_rope, rows[:, self.row.kv_lora_rank :]]))
        return torch.cat(all_k), torch.cat(all_shared), torch.cat(all_v)

    def oracle(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Attention from the queries and cache rows as they are now, after the append."""
        out, _ = reference.mla_prefill(
            self.q.view,
            *self.keys_and_values(dtype),
            self.step.row_offsets,
            [0, *accumulate(self.step.after)],
            softmax_scale=self.scale,
            mask=make_mask(self.mask, self.window),
            alibi_slopes=reference.alibi_slopes(self.heads) if self.score_mod == "alibi" else None,
            dtype=dtype,
        )
        return out

    def check(self) -> None:
        check_appended(
            self.q.view[..., self.d_n :],
            self.paged.pages.stored(self.paged.new_slots),
            self.q.remembered[..., self.d_n :],
            self.raw_latents(),
            self.freqs,
            self.gamma,
            self.step.positions,
            out_dtype=self.dtype,
            cache_dtype=self.paged.dtype,
        )
        assert_matches("output", self.output.view, self.oracle(), self.oracle(F32))
        self.output.assert_only_written("output", EVERYTHING)
        self.q.assert_only_written("q", torch.arange(self.q.shape[-1]) >= self.d_n)
        self.paged.pages.assert_only_written(self.paged.new_slots)

    def assert_untouched(self) -> None:
        for name, tensor in (("output", self.output), ("q", self.q)):
            tensor.assert_only_written(name, NOTHING)
        self.paged.pages.assert_only_written(torch.zeros(0, dtype=torch.int64))
