"""Cases of the documented functions that attend: decoding, sparse prefill, the prefill branch.

A case has `run`, which calls the function, and `check`, which compares every row of every output
with a float64 oracle and asserts that nothing else was written.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mlakit import reference
from mlakit.compat import modular as documented
from mlakit.model.geometry import RowShape
from mlakit.model.masks import Mask
from mlakit.tools.testing import assert_matches
from tests.compat.modular.append_cases import check_appended, rope_table
from tests.compat.modular.inputs import (
    BF16,
    E4M3,
    EPSILON,
    EVERYTHING,
    F32,
    NO_PAGES,
    NOTHING,
    ROW,
    SCALE,
    Padded,
    PagedStep,
    Pages,
    Step,
    bits,
    integers,
    make_mask,
    modular,
    normal,
    ragged_step,
    store,
    to_e4m3,
)
from tests.reference import hopper_scaled_mm
from tests.transplant import device_of_calls


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
    scale_columns: int = 0
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
            scale_columns=self.scale_columns,
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
        bits(self.q.view)[self.where] = bits(stored)
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
    has_token_scales: bool = False
    scale_columns: int = 0
    has_scale_pool: bool = False
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
            has_token_scales=self.has_token_scales,
            scale_columns=self.scale_columns,
            has_scale_pool=self.has_scale_pool,
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
        """The new tokens' rows before the call, times their scales."""
        news = zip(self.paged.rows, self.step.new, strict=True)
        return torch.cat([rows[len(rows) - new :] for rows, new in news]).to(F32)

    def quantised_rows(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Per request: the rows now cached in q's dtype, their latents in e4m3, the scales."""
        if self._quantised is None:
            self._quantised = []
            for slots in zip(self.paged.slots, self.paged.scale_slots, strict=True):
                rows = self.paged.pages.meaning(*slots).to(self.dtype)
                latent = rows[:, : self.row.kv_lora_rank]
                quantised = reference.quantize_fp8(latent, self.group, scale_ub=1200.0)
                self._quantised.append((rows, *quantised))
        return self._quantised

    def _expanded(self, latent: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The latents times the weight; float32 as exact as what multiplies them on this device."""
        is_on_gpu = dtype == F32 and device_of_calls().type == "cuda"
        takes_library = self.group == hopper_scaled_mm.GROUP and latent.shape[1] % 512 == 0
        if is_on_gpu and takes_library and self.dtype == torch.bfloat16:
            return hopper_scaled_mm.scaled_mm(latent, scales, self.weight, self.weight_scale)
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
            self.paged,
            self.q.remembered[..., self.d_n :],
            self.raw_latents(),
            self.freqs,
            self.gamma,
            out_dtype=self.dtype,
        )
        assert_matches("output", self.output.view, self.oracle(), self.oracle(F32))
        self.output.assert_only_written("output", EVERYTHING)
        self.q.assert_only_written("q", torch.arange(self.q.shape[-1]) >= self.d_n)
        self.paged.pages.assert_only_written(self.paged.new_slots, self.paged.new_scale_slots)

    def assert_untouched(self) -> None:
        for name, tensor in (("output", self.output), ("q", self.q)):
            tensor.assert_only_written(name, NOTHING)
        self.paged.pages.assert_only_written(torch.zeros(0, dtype=torch.int64))
