"""Cases of the documented functions that append to a cache.

A case has `run`, which calls the function, and `check`, which compares every row of every output
with a float64 oracle and asserts that nothing else was written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlakit import reference
from mlakit.model.geometry import RowShape
from mlakit.tools.testing import assert_matches, poison
from tests.compat.modular.inputs import (
    BF16,
    E4M3,
    EPSILON,
    F32,
    NOTHING,
    ROW,
    Padded,
    PagedStep,
    Step,
    assert_stepwise,
    modular,
    normal,
    ragged_step,
)


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
    scale_columns: int = 0
    has_scale_pool: bool = False
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
            scale_columns=self.scale_columns,
            has_scale_pool=self.has_scale_pool,
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
        check_appended(self.q_rope_output, self.paged, *arguments, out_dtype=out_dtype)
        column = torch.arange(self.buffer.shape[-1])
        self.buffer.assert_only_written("q_rope_output", column >= self.first_column)
        if self.output != "alias":
            self.q_rope.assert_only_written("q_rope", NOTHING)
        self.kv.assert_only_written("kv", NOTHING)
        self.paged.pages.assert_only_written(self.paged.new_slots, self.paged.new_scale_slots)


def check_appended(
    q_rope_out: Tensor,
    paged: PagedStep,
    q_rope: Tensor,
    kv: Tensor,
    freqs: Tensor,
    gamma: Tensor,
    *,
    out_dtype: torch.dtype,
) -> None:
    """Rotated queries and new cache rows against the exact and the stepwise oracle."""
    arguments = (q_rope, kv, freqs, gamma, paged.step.positions)
    has_scales = paged.pages.scales is not None
    exact = reference.norm_rope_quant(*arguments, epsilon=EPSILON)
    stepwise = reference.norm_rope_quant_stepwise(
        *arguments,
        epsilon=EPSILON,
        out_dtype=out_dtype,
        cache_dtype=F32 if has_scales else paged.dtype,
    )
    assert_stepwise("q_rope_output", q_rope_out, stepwise[0], freqs.dtype)
    assert_matches("q_rope_output", q_rope_out, saturated(exact[0], out_dtype), stepwise[0])
    if has_scales:
        check_scaled_rows(paged, exact[1], stepwise[1])
        return
    rows, d_c = paged.pages.stored(paged.new_slots), gamma.shape[0]
    for name, part, computed_in in (
        ("latents", slice(d_c), gamma.dtype),
        ("rotated keys", slice(d_c, None), freqs.dtype),
    ):
        actual, want, naive = rows[:, part], exact[1][:, part], stepwise[1][:, part]
        assert_stepwise(name, actual, naive, computed_in)
        assert_matches(name, actual, saturated(want, actual.dtype), naive)


def check_scaled_rows(paged: PagedStep, exact: Tensor, stepwise: Tensor) -> None:
    """The new rows of a cache with scales: the scales, and the rows times their scales."""
    pages, d_c = paged.pages, paged.row.kv_lora_rank
    naive, naive_scales = pages.quantised(stepwise)
    _, scales = pages.quantised(exact)
    assert_matches("scales", pages.stored_scales(paged.new_scale_slots), scales, naive_scales)
    rows = pages.meaning(paged.new_slots, paged.new_scale_slots)
    for name, part in (("latents", slice(d_c)), ("rotated keys", slice(d_c, None))):
        assert_matches(name, rows[:, part], exact[:, part], naive[:, part])
