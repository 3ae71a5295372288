"""Steps of one layer against float64: what is appended, expanded, absorbed, attended, merged.

One oracle checks both steps, the expanded form in float64 over the rows as the cache holds them:
that the absorbed form meets it too is the identity the library rests on. Where the FP8 product
quantises its input, so does the oracle; nothing else in it rounds. The naive run, from which
budgets are made, computes in float32 and rounds where the branches say they do: latents read back,
expanded keys and values, absorbed queries and the latent result are in q's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit import reference, steps
from mlakit.cache import KVShard, PagedLatentCache, PageTable, request_slots
from mlakit.model import masks
from mlakit.model.geometry import MLAGeometry
from mlakit.model.masks import CAUSAL, Mask
from mlakit.plan import plan_context
from mlakit.steps import CachedBatch, LayerWeights, plan_step
from mlakit.steps.step import DECODE_THRESHOLD
from mlakit.steps.weights import SCALE_UB, HeadMatrices, UpProjection
from mlakit.tools.testing import assert_matches, assert_same_bits, poison, shuffled_pages
from tests.transplant import CPU, carried, device_of_calls

BF16, F32, F64, E4M3 = torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn
GEOMETRY = MLAGeometry(
    num_heads=3,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=24,
    hidden_size=1,
)
PAGE_SIZE = 4
LAYER = 1
KV_LENS = (12, 5, 18, 4, 1, 15)  # tokens once the step's are cached
Q_LENS = (3, 5, 1, 0, 1, 12)  # new ones among them

MASKS = {
    "causal": CAUSAL,
    "null": masks.NULL,
    "window": masks.sliding_window_causal(4),
    "window-noncausal": masks.sliding_window_noncausal(4),
    "chunked": masks.chunked(5),
    "chunked-causal": masks.chunked_causal(5),
}


def planned(branch: Callable[..., Tensor], make: Callable[..., Any], **names: str) -> Any:
    """`branch` on the device of the test; where that is a GPU, a plan is made as callers make it.

    names  options of the branch, and what `make` calls them
    """
    there = carried(branch)

    @wraps(branch)
    def run(q: Tensor, kv: Tensor, weights: Any, batch: Any, **options: Any) -> Tensor:
        if device_of_calls() != CPU and "plan" not in options:
            given = {names[name]: options.pop(name) for name in names if name in options}
            lengths = batch.kv_lens.tolist(), batch.q_starts.diff().tolist()
            options["plan"] = make(*lengths, **given)
        return there(q, kv, weights, batch, **options)

    return run


prefill_branch = planned(steps.prefill_branch, plan_context, max_context_rows="max_rows")
decode_branch = carried(steps.decode_branch)
mla_step = planned(
    steps.mla_step,
    plan_step,
    decode_threshold="decode_threshold",
    max_context_rows="max_context_rows",
)


def int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass(frozen=True)
class Step:
    """A step of one layer, made from a seed: inputs, and the oracle of what must come out."""

    kv_lens: tuple[int, ...] = KV_LENS
    q_lens: tuple[int, ...] = Q_LENS
    format: str = "bf16"
    dtype: torch.dtype = BF16
    weights_dtype: torch.dtype | None = None  # of the up-projection: e4m3, or that of q
    geometry: MLAGeometry = GEOMETRY
    rope: str = "interleaved"
    flat: bool = False
    has_sink: bool = False
    seed: int = 0

    @property
    def before(self) -> list[int]:
        """Tokens that were cached before the step."""
        return [kv_len - new for kv_len, new in zip(self.kv_lens, self.q_lens, strict=True)]

    @property
    def tokens(self) -> int:
        return sum(self.q_lens)

    def _generator(self, part: int) -> torch.Generator:
        """Each part has its own, so that what is drawn first does not matter."""
        return torch.Generator().manual_seed(100 * self.seed + part)

    def _normal(self, generator: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(self.dtype)

    @cached_property
    def weights(self) -> LayerWeights:
        g, generator = self.geometry, self._generator(1)
        rows = g.num_heads * (g.qk_nope_head_dim + g.v_head_dim)
        matrix = self._normal(generator, rows, g.kv_lora_rank)
        scale = None
        if self.weights_dtype == E4M3:
            matrix = matrix.to(E4M3)
            blocks = [-(-size // 128) for size in matrix.shape]
            scale = torch.rand(*blocks, generator=generator) + 0.5
        positions = max(self.kv_lens) + 2
        angles = torch.rand(positions, g.qk_rope_head_dim // 2, generator=generator) * 6
        return LayerWeights(
            up=UpProjection.from_checkpoint(matrix, g, scale),
            gamma=self._normal(generator, g.kv_lora_rank),
            freqs=torch.stack([angles.cos(), angles.sin()], -1).flatten(1),
            softmax_scale=0.13,
            epsilon=1e-5,
            rope=self.rope,
            sink=torch.randn(g.num_heads, generator=generator) if self.has_sink else None,
        )

    @cached_property
    def q(self) -> Tensor:
        shape = (self.tokens, self.geometry.num_heads, self.geometry.qk_head_dim)
        return self._normal(self._generator(2), *shape)

    @cached_property
    def kv(self) -> Tensor:
        return self._normal(self._generator(3), self.tokens, self.geometry.row.width)

    @cached_property
    def _context(self) -> list[Tensor]:
        generator = self._generator(4)
        return [self._normal(generator, n, self.geometry.row.width) for n in self.before]

    @cached_property
    def table(self) -> Tensor:
        counts = [-(-kv_len // PAGE_SIZE) for kv_len in self.kv_lens]
        return shuffled_pages(len(counts), counts, sum(counts) + 2, self._generator(5))

    def batch(self) -> CachedBatch:
        """A new pool with the cached context; all other rows are poison."""
        table = self.table
        cache = PagedLatentCache.allocate(
            self.geometry,
            self.format,
            num_pages=sum(-(-kv_len // PAGE_SIZE) for kv_len in self.kv_lens) + 2,
            page_size=PAGE_SIZE,
            num_layers=LAYER + 1,
            tensor_scale=0.06 if self.format == "fp8" else 1.0,
        )
        for stored in (cache.payload, cache.scales):
            if stored is not None:
                poison(stored)
        for request, rows in enumerate(self._context):
            slots = request_slots(table, PAGE_SIZE, request, 0, len(rows))
            cache.layer(LAYER).write(slots, rows)
        starts = int32([0, *accumulate(self.q_lens)])
        return CachedBatch(cache, self._page_table(table), int32(self.kv_lens), starts, LAYER)

    def shard(self, shard: KVShard) -> CachedBatch:
        """One rank's pool: its share of the cached context; all other rows are poison."""
        lens = [shard.local_count(kv_len) for kv_len in self.kv_lens]
        counts = [-(-n // PAGE_SIZE) for n in lens]
        table = shuffled_pages(len(counts), counts, sum(counts) + 2, self._generator(6))
        cache = PagedLatentCache.allocate(
            self.geometry,
            self.format,
            num_pages=sum(counts) + 2,
            page_size=PAGE_SIZE,
            num_layers=LAYER + 1,
        )
        for stored in (cache.payload, cache.scales):
            if stored is not None:
                poison(stored)
        for request, rows in enumerate(self._context):
            owned = rows[shard.owner(torch.arange(len(rows))) == shard.rank]
            slots = request_slots(table, PAGE_SIZE, request, 0, len(owned))
            cache.layer(LAYER).write(slots, owned)
        starts = int32([0, *accumulate(self.q_lens)])
        return CachedBatch(cache, table, int32(self.kv_lens), starts, LAYER)

    def _page_table(self, table: Tensor) -> PageTable:
        if not self.flat:
            return table
        slots = [request_slots(table, PAGE_SIZE, b, 0, n) for b, n in enumerate(self.kv_lens)]
        return int32([0, *accumulate(self.kv_lens)]), torch.cat(slots).int()

    def arguments(self) -> tuple[Tensor, Tensor, LayerWeights, CachedBatch]:
        """Of a branch: a q that may be rotated in place, and a pool of its own."""
        batch = self.batch()
        return self.q.clone(), self.kv.clone(), self.weights, batch

    @property
    def positions(self) -> list[int]:
        """Of every new token in its request."""
        return reference.append_positions(self.kv_lens, self.q_lens)

    def cached_rows(self, batch: CachedBatch) -> list[Tensor]:
        """Per request, its rows [kv_len, width] float64 as the cache holds them."""
        layer = batch.cache.layer(LAYER)
        return [
            layer.read(request_slots(self.table, PAGE_SIZE, b, 0, n), F64)
            for b, n in enumerate(self.kv_lens)
        ]

    def check_appended(self, batch: CachedBatch) -> None:
        """The new rows are the normed and rotated latents, and no others were written."""
        arguments = (
            self.q[..., self.geometry.qk_nope_head_dim :],
            self.kv,
            self.weights.freqs,
            self.weights.gamma,
            self.positions,
        )
        options: dict[str, Any] = {"epsilon": self.weights.epsilon, "rope": self.rope}
        _, exact = reference.norm_rope_quant(*arguments, **options)
        _, stepwise = reference.norm_rope_quant_stepwise(
            *arguments, **options, out_dtype=self.dtype, cache_dtype=F32
        )
        codec, scale = batch.cache.codec, batch.cache.tensor_scale
        payload, scales = codec.encode(stepwise, tensor_scale=scale)
        naive = codec.decode(payload, scales, tensor_scale=scale)
        rows = self.cached_rows(batch)
        new = [r[n:] for r, n in zip(rows, self.before, strict=True)]
        stored = torch.cat(new).float()
        stored = stored.to(batch.cache.payload.dtype) if self.format in ("bf16", "fp16") else stored
        assert_matches("appended rows", stored, exact, naive)
        untouched = self.batch()
        written = torch.cat(
            [
                request_slots(self.table, PAGE_SIZE, b, *ends)
                for b, ends in enumerate(zip(self.before, self.kv_lens, strict=True))
            ]
        )
        for part in ("payload", "beside"):
            got, want = getattr(batch.cache, part), getattr(untouched.cache, part)
            if got is not None:
                want[LAYER, written // PAGE_SIZE, written % PAGE_SIZE] = got[
                    LAYER, written // PAGE_SIZE, written % PAGE_SIZE
                ]
                assert_same_bits(f"the {part} of other rows", got, want)

    def rotated(self, dtype: torch.dtype) -> Tensor:
        """q with its rope columns rotated: exactly in float64, else as documented."""
        rotate = reference.rotate if dtype == F64 else reference.rotate_stepwise
        q = self.q.to(F64 if dtype == F64 else self.dtype).clone()
        for token, position in enumerate(self.positions):
            columns = self.q[token, :, self.geometry.qk_nope_head_dim :]
            turned = rotate(columns, self.weights.freqs[position], rope=self.rope)
            q[token, :, self.geometry.qk_nope_head_dim :] = turned
        return q

    def expanded(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """(k_nope, k_rope, v) of cached rows: exactly in float64, else rounded to q's dtype."""
        g = self.geometry
        read = rows.to(self.dtype)  # a bf16 or fp32 cache loses nothing here
        latent, k_rope = read.split([g.kv_lora_rank, g.qk_rope_head_dim], -1)
        joint = self.weights.up.kv_b_proj
        both = entering(latent[:, None], joint)[:, 0].to(dtype) @ matrices(joint)[0].to(dtype).T
        both = both if dtype == F64 else both.to(self.dtype)
        by_head = both.unflatten(-1, (g.num_heads, -1))
        k_nope, v = by_head.split([g.qk_nope_head_dim, g.v_head_dim], -1)
        return k_nope, k_rope.to(both.dtype), v

    def prefilled(
        self, rows: Sequence[Tensor], mask: Mask, dtype: torch.dtype, sink: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) over some rows of every request, its queries the newest."""
        k_nope, k_rope, v = self.expanded(torch.cat(list(rows)), dtype)
        return reference.mla_prefill(
            self.rotated(dtype),
            k_nope,
            k_rope,
            v,
            [0, *accumulate(self.q_lens)],
            [0, *accumulate(map(len, rows))],
            softmax_scale=self.weights.softmax_scale,
            mask=mask,
            sink=sink,
            dtype=dtype,
        )

    def exact(self, rows: Sequence[Tensor], mask: Mask = CAUSAL) -> Tensor:
        """The oracle of both branches."""
        return self.prefilled(rows, mask, F64, self.weights.sink)[0]

    def naive_prefill(
        self, rows: Sequence[Tensor], mask: Mask = CAUSAL, max_rows: int | None = None
    ) -> Tensor:
        """The naive run of the prefill branch, with its chunks of context."""
        plan = plan_context(self.kv_lens, self.q_lens, max_rows=max_rows)
        if mask not in (CAUSAL, masks.NULL) or not plan.chunks:
            return self.prefilled(rows, mask, F32, self.weights.sink)[0]
        new = [each[before:] for each, before in zip(rows, self.before, strict=True)]
        parts = [self.prefilled(new, mask, F32, None)]
        for chunk in plan.chunks:
            taken = [each[low:high] for each, (low, high) in zip(rows, chunk, strict=True)]
            parts.append(self.prefilled(taken, masks.NULL, F32, None))
        outs, lses = zip(*parts, strict=True)
        rounded = torch.stack(outs).to(self.dtype)
        sink = self.weights.sink
        return reference.merge_states(rounded, torch.stack(lses), sink=sink, dtype=F32)[0]

    def absorbed(self, dtype: torch.dtype) -> Tensor:
        """q W_UK beside its rotated columns: exactly in float64, else rounded to q's dtype."""
        g, absorb = self.geometry, self.weights.up.w_uk_t
        x = entering(self.q[..., : g.qk_nope_head_dim], absorb).to(dtype)
        latent = torch.einsum("thi,hoi->tho", x, matrices(absorb).to(dtype))
        rope = self.rotated(dtype)[..., g.qk_nope_head_dim :]
        return torch.cat([latent if dtype == F64 else latent.to(self.dtype), rope], -1)

    def projected(self, latent: Tensor, dtype: torch.dtype) -> Tensor:
        """latent W_UVᵀ of a latent result that was rounded to q's dtype, or of an exact one."""
        values = self.weights.up.w_uv
        x = entering(latent, values).to(dtype)
        return torch.einsum("thi,hoi->tho", x, matrices(values).to(dtype))

    def naive_decode(self, rows: Sequence[Tensor], mask: Mask = CAUSAL) -> Tensor:
        """The naive run of the decode branch."""
        latent, _ = reference.mla_decode(
            self.absorbed(F32),
            rows,
            self.q_lens,
            softmax_scale=self.weights.softmax_scale,
            v_width=self.geometry.kv_lora_rank,
            mask=mask,
            sink=self.weights.sink,
            dtype=F32,
        )
        return self.projected(latent.to(self.dtype), F32)

    def check_prefill(
        self,
        out: Tensor,
        batch: CachedBatch,
        mask: Mask = CAUSAL,
        max_rows: int | None = None,
    ) -> None:
        rows = self.cached_rows(batch)
        assert out.dtype == self.dtype
        naive = self.naive_prefill(rows, mask, max_rows)
        assert_matches("prefill", out, self.exact(rows, mask), naive)

    def check_decode(self, out: Tensor, batch: CachedBatch, mask: Mask = CAUSAL) -> None:
        """Against the same oracle, in the expanded form."""
        rows = self.cached_rows(batch)
        assert out.dtype == self.dtype
        assert_matches("decode", out, self.exact(rows, mask), self.naive_decode(rows, mask))

    def check_sparse(self, out: Tensor, batch: CachedBatch, lists: Sequence[Sequence[int]]) -> None:
        """Every query over the positions of its request that its list names."""
        cached = self.cached_rows(batch)
        requests = [b for b, new in enumerate(self.q_lens) for _ in range(new)]
        chosen = [cached[b][list(keys)] for b, keys in zip(requests, lists, strict=True)]
        scale = self.weights.softmax_scale
        exact, _ = reference.mla_prefill(
            self.rotated(F64),
            *self.expanded(torch.cat(chosen), F64),
            range(self.tokens + 1),
            [0, *accumulate(map(len, chosen))],
            softmax_scale=scale,
            mask=masks.NULL,
            sink=self.weights.sink,
        )
        latent, _ = reference.mla_decode(
            self.absorbed(F32),
            chosen,
            [1] * self.tokens,
            softmax_scale=scale,
            v_width=self.geometry.kv_lora_rank,
            mask=masks.NULL,
            sink=self.weights.sink,
            dtype=F32,
        )
        naive = self.projected(latent.to(self.dtype), F32)
        assert out.dtype == self.dtype
        assert_matches("sparse attention", out, exact, naive)
        assert all((exact[token] == 0).all() for token, keys in enumerate(lists) if not keys)

    def check_step(
        self, out: Tensor, batch: CachedBatch, decode_threshold: int = DECODE_THRESHOLD
    ) -> None:
        """Each request as the branch it was sent to."""
        rows = self.cached_rows(batch)
        exact, decoded = self.exact(rows), self.naive_decode(rows)
        prefilled = self.naive_prefill(rows)
        bounds = pairwise(accumulate(self.q_lens, initial=0))
        for (first, last), new in zip(bounds, self.q_lens, strict=True):
            naive = decoded if new <= decode_threshold else prefilled
            assert_matches("step", out[first:last], exact[first:last], naive[first:last])


def matrices(of: HeadMatrices) -> Tensor:
    """[heads, outputs, inputs] float64; tests/steps/test_weights.py holds it to the checkpoint."""
    weight = of.weight.double()
    if of.scale is None:
        return weight
    _, rows, columns = weight.shape
    scale = of.scale.double().repeat_interleave(of.group, 1).repeat_interleave(of.group, 2)
    return weight * scale[:, :rows, :columns]


def entering(x: Tensor, of: HeadMatrices) -> Tensor:
    """x [tokens, heads, inputs] float64 as it enters the product."""
    if of.scale is None:
        return x.double()
    quantised = [reference.quantize_fp8(head, of.group, scale_ub=SCALE_UB) for head in x.unbind(1)]
    heads = [reference.dequantize_fp8(q, scales, of.group) for q, scales in quantised]
    return torch.stack(heads, dim=1)


STEPS = {
    "bf16": Step(),
    "fp32": Step(format="fp32", dtype=F32),
    "fp8": Step(format="fp8"),
    "fp8_token-half": Step(format="fp8_token", rope="half"),
    "fp8_block128-flat": Step(format="fp8_block128", flat=True),
    "fp8_block64-fp32": Step(format="fp8_block64", dtype=F32),
    "nothing-cached": Step(kv_lens=(4, 1, 7), q_lens=(4, 1, 7)),
    "nope": Step(geometry=replace(GEOMETRY, qk_rope_head_dim=0)),
    "sink": Step(has_sink=True),
}
FP8_STEPS = {
    "bf16": Step(weights_dtype=E4M3),
    "fp8_token": Step(weights_dtype=E4M3, format="fp8_token"),
    "crossed-blocks": Step(
        (7, 3), (2, 3), weights_dtype=E4M3, geometry=replace(GEOMETRY, qk_nope_head_dim=96)
    ),
}
every_step = pytest.mark.parametrize("step", STEPS.values(), ids=list(STEPS))
every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=list(MASKS))
