"""Cases of `append_rows`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mlakit import reference
from mlakit.dispatch.knobs import Backend
from mlakit.ops import append_rows
from mlakit.tools.testing import assert_matches, assert_same_bits
from mlakit.tools.workloads.case import Results, Trial
from mlakit.tools.workloads.inputs import Inputs
from mlakit.tools.workloads.paged import PagedCase, Pool


@dataclass(frozen=True, kw_only=True, repr=False)
class AppendRowsCase(PagedCase):
    """One call of `append_rows` on a poisoned cache.

    num_pages   of the pool; tokens that its rows cannot hold have slot -1
    skipped     share of the other tokens with slot -1, whose rows are poison
    dtype       of the latents; rope_dtype of the rope columns
    """

    op = "append_rows"

    num_tokens: int = 5
    num_pages: int = 3
    skipped: float = 0.3
    dtype: str = "bf16"
    rope_dtype: str = "bf16"

    def trial(self, device: torch.device | str) -> Trial:
        inputs = Inputs(device, self.seed, padded=self.padded)
        row = self.row
        pool = self.pool(inputs, "cache", self.num_pages)
        slots = self._slots(inputs, pool)
        is_stored = slots >= 0
        # tokens of all magnitudes: the largest saturate e4m3
        size = inputs.uniform(-6, 11, self.num_tokens, 1).exp2()
        values = inputs.normal(self.num_tokens, row.width) * size
        values[~is_stored] = torch.nan
        latent = inputs.place("latent", values[:, : row.kv_lora_rank], self.dtype)
        k_rope = None
        if row.qk_rope_head_dim or inputs.padded:  # a tensor without columns is taken as well
            k_rope = inputs.place("k_rope", values[:, row.kv_lora_rank :], self.rope_dtype)
        given = latent.cpu().clone()
        given_rope = None if k_rope is None else k_rope.cpu().clone()
        placed = inputs.place_ints("slots", slots.tolist(), wide=self.wide_indices)
        pool.allow(slots[is_stored])

        def call(backend: Backend) -> Results:
            append_rows(
                latent,
                k_rope,
                pool.cache,
                placed,
                layer=pool.layer_index,
                power_of_two_scales=self.power_of_two,
                backend=backend,
            )
            return ()

        def check(results: Results) -> None:
            self._check(given, given_rope, slots, pool)

        return Trial(inputs, call, check)

    def _slots(self, inputs: Inputs, pool: Pool) -> Tensor:
        """int64 [tokens], different rows of the pool in any order, and -1 for some."""
        num_slots = pool.layer.num_slots
        free = torch.randperm(num_slots, generator=inputs.generator, device="cpu")
        slots = torch.full((self.num_tokens,), -1, dtype=torch.int64, device="cpu")
        slots[: len(free)] = free[: self.num_tokens]
        return torch.where(inputs.chance(self.skipped, self.num_tokens), -1, slots)

    def _check(self, latent: Tensor, k_rope: Tensor | None, slots: Tensor, pool: Pool) -> None:
        written = slots[slots >= 0]
        rows, codec = pool.read(written), pool.cache.codec
        cached = torch.full(
            (pool.layer.num_slots, self.row.width), torch.nan, dtype=torch.float32, device="cpu"
        )
        exact, naive = (
            reference.append_rows(latent, k_rope, cached, slots.tolist(), dtype)[written]
            for dtype in (torch.float64, torch.float32)
        )
        scale = pool.cache.tensor_scale
        encoded = codec.encode(naive, tensor_scale=scale, power_of_two=self.power_of_two)
        stored = codec.decode(*encoded, tensor_scale=scale)
        assert_matches("cache rows", rows, exact, stored)
        # nothing but quantisation rounds, and it is the same everywhere
        assert_same_bits("cache rows", rows, stored)
