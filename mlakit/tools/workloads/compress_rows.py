"""Cases of `compress_rows`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlakit import reference
from mlakit.cache import PageTable
from mlakit.dispatch.knobs import Backend
from mlakit.model.geometry import RowShape
from mlakit.ops import compress_rows
from mlakit.tools.testing import assert_same_bits
from mlakit.tools.workloads.case import Results, Trial, assert_logits_match
from mlakit.tools.workloads.inputs import Inputs
from mlakit.tools.workloads.norm_rope_quant import assert_quantised_alike
from mlakit.tools.workloads.paged import (
    PagedCase,
    Pool,
    map_tokens,
    num_pages_for,
    starts_of,
    used_slots,
    write_tokens,
)

PADDING = 2  # tokens after the last request


@dataclass(frozen=True, kw_only=True, repr=False)
class CompressCase(PagedCase):
    """One call of `compress_rows` on poisoned caches of rows and of states.

    kv_lens      tokens of each request, including its q_lens new ones
    keep         newest tokens that a later step may take back
    dtype        of kv and gate; bias_dtype, gamma_dtype and freqs_dtype of the others
    angles       rotated columns where rows have no rope columns
    rotated      whether there are angles at all
    normed       whether there is a gamma
    flat_table   of rows and of states
    state_repeats   consecutive places of a page of states in its table
    """

    op = "compress_rows"

    kv_lens: tuple[int, ...] = (9, 4, 3, 0, 21)
    q_lens: tuple[int, ...] = (1, 4, 2, 0, 13)
    implicit_starts: bool = False
    rate: int = 4
    overlap: bool = True
    keep: int = 0
    dtype: str = "bf16"
    bias_dtype: str = "fp32"
    gamma_dtype: str = "fp32"
    freqs_dtype: str = "fp32"
    epsilon: float = 1e-6
    rotated: bool = True
    normed: bool = True
    angles: int = 4
    state_page_size: int = 4
    state_repeats: int = 1
    flat_table: bool = False

    def trial(self, device: torch.device | str) -> Trial:
        inputs = Inputs(device, self.seed, padded=self.padded)
        width = self.row.width
        columns = (1 + self.overlap) * width
        tokens = sum(self.q_lens)
        padding = 0 if self.implicit_starts or not self.q_lens else PADDING
        shape = (tokens + padding, 2, columns)
        drawn = torch.full(shape, torch.nan, dtype=torch.float32, device="cpu")
        # tokens of all magnitudes, and gates that favour few tokens or many
        drawn[:tokens, 0] = inputs.normal(tokens, columns) * inputs.uniform(-6, 6, tokens, 1).exp2()
        drawn[:tokens, 1] = inputs.normal(tokens, columns) * inputs.uniform(-3, 2, 1, 1).exp2()
        given: dict[str, Any] = {
            "kv": inputs.place("kv", drawn[:, 0], self.dtype),
            "gate": inputs.place("gate", drawn[:, 1], self.dtype),
            "bias": inputs.place("bias", inputs.normal(self.rate, columns), self.bias_dtype),
            "gamma": inputs.place("gamma", inputs.uniform(0.5, 2.0, width), self.gamma_dtype)
            if self.normed
            else None,
            "freqs": self._freqs(inputs),
        }
        copies = {name: None if t is None else t.cpu().clone() for name, t in given.items()}
        pool, table, slots = self._rows(inputs)
        state, state_table, earlier, kept = self._states(inputs, columns)
        pool.allow(slots)
        state.allow(kept)
        kv_lens = inputs.place_ints("kv_lens", self.kv_lens, wide=self.wide_indices)
        starts = None
        if not self.implicit_starts:
            starts = inputs.place_ints("q_starts", starts_of(self.q_lens), wide=self.wide_indices)

        def call(backend: Backend) -> Results:
            compress_rows(
                **given,
                cache=pool.cache,
                page_table=table,
                state_cache=state.cache,
                state_table=state_table,
                kv_lens=kv_lens,
                q_starts=starts,
                rate=self.rate,
                overlap=self.overlap,
                epsilon=self.epsilon,
                layer=pool.layer_index,
                state_layer=state.layer_index,
                keep=self.keep,
                state_pages_repeat=self.state_repeats > 1,
                power_of_two_scales=self.power_of_two,
                backend=backend,
            )
            return ()

        def check(results: Results) -> None:
            oracle = {**copies, "states": earlier, "q_lens": self.q_lens}
            self._check(oracle, pool, slots, state, kept)

        return Trial(inputs, call, check)

    @property
    def _requests(self) -> list[tuple[int, int, int]]:
        """(tokens before the step, tokens after it, the first that later windows read)."""
        return [
            (kv_len - q_len, kv_len, self._first_needed(kv_len - self.keep))
            for kv_len, q_len in zip(self.kv_lens, self.q_lens, strict=True)
        ]

    def _first_needed(self, length: int) -> int:
        return max((length // self.rate - self.overlap) * self.rate, 0)

    def _freqs(self, inputs: Inputs) -> Tensor | None:
        """Angles of the windows of this step, NaN at other positions."""
        if not self.rotated:
            return None
        d_r = self.row.qk_rope_head_dim or self.angles
        firsts = [
            window * self.rate
            for before, kv_len, _ in self._requests
            for window in range(before // self.rate, kv_len // self.rate)
        ]
        shape = (max(firsts, default=0) + 1, d_r)
        freqs = torch.full(shape, torch.nan, dtype=torch.float32, device="cpu")
        angle = torch.tensor(sorted(set(firsts)), dtype=torch.float32, device="cpu")[:, None]
        angle = angle * 100.0 ** (
            -torch.arange(0, d_r, 2, dtype=torch.float32, device="cpu") / max(d_r, 1)
        )
        freqs[sorted(set(firsts))] = torch.stack([angle.cos(), angle.sin()], dim=-1).flatten(1)
        return inputs.place("freqs", freqs, self.freqs_dtype)

    def _rows(self, inputs: Inputs) -> tuple[Pool, PageTable, Tensor]:
        """The pool, its page table, and the slots of the windows of this step."""
        used = [
            torch.arange(kv_len // self.rate, device="cpu") >= before // self.rate
            for before, kv_len, _ in self._requests
        ]
        pool = self.pool(inputs, "cache", num_pages_for(list(map(len, used)), self.page_size))
        table, slots = map_tokens(pool, used, flat=self.flat_table, wide=self.wide_indices)
        return pool, table, used_slots(slots, used)

    def _states(self, inputs: Inputs, columns: int) -> tuple[Pool, PageTable, list[Tensor], Tensor]:
        """The states, their page table, those before the step, and slots that it stores."""
        read, kept = [], []
        for before, kv_len, needed in self._requests:
            token = torch.arange(kv_len, device="cpu")
            completes = kv_len // self.rate > before // self.rate
            first = self._first_needed(before) if completes else before
            read.append((token >= first) & (token < before))
            kept.append((token >= before) & (token >= needed))
        used = [one | other for one, other in zip(read, kept, strict=True)]
        pool = self.pool(
            inputs,
            "state",
            num_pages_for(self.kv_lens, self.state_page_size),
            format="fp32",
            row=RowShape(2 * columns, 0),
            page_size=self.state_page_size,
        )
        table, slots = map_tokens(
            pool, used, flat=self.flat_table, wide=self.wide_indices, repeats=self.state_repeats
        )
        rows = inputs.normal(sum(self.kv_lens), 2 * columns)
        stored = write_tokens(pool, slots, read, rows)
        earlier = [
            states[:before] for states, (before, _, _) in zip(stored, self._requests, strict=True)
        ]
        return pool, table, earlier, used_slots(slots, kept)

    def _check(
        self, oracle: dict[str, Any], pool: Pool, slots: Tensor, state: Pool, kept: Tensor
    ) -> None:
        (exact, _, _), (naive, _, states) = (
            reference.compress_rows(
                **oracle,
                rate=self.rate,
                overlap=self.overlap,
                epsilon=self.epsilon,
                dtype=dtype,
            )
            for dtype in (torch.float64, torch.float32)
        )
        is_kept = [
            position >= needed
            for before, kv_len, needed in self._requests
            for position in range(before, kv_len)
        ]
        kept_states = states[torch.tensor(is_kept, dtype=torch.bool, device="cpu")]
        assert_same_bits("states", state.read(kept), kept_states)

        rows, codec, scale = pool.read(slots), pool.cache.codec, pool.cache.tensor_scale
        encoded = codec.encode(naive, tensor_scale=scale, power_of_two=self.power_of_two)
        stored = codec.decode(*encoded, tensor_scale=scale)
        # a GPU's exp may lose a few bits of float32 more than that of the naive run
        largest = 8 * exact.abs().amax(-1, keepdim=True)
        assert_logits_match("cache rows", rows, exact, stored, largest)
        assert_quantised_alike(codec, rows, stored, torch.float32)
