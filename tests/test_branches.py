"""The composed steps against float64: what is appended, expanded, absorbed, attended, merged.

One oracle judges both branches, the expanded form in float64 over the rows as the cache holds them:
that the absorbed form meets it too is the identity the library rests on. Where the FP8 product
quantises its input, so does the oracle; nothing else in it rounds. The naive run, from which
budgets are made, computes in float32 and rounds where the branches say they do: latents read back,
expanded keys and values, absorbed queries and the latent result are in q's dtype.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transplant import CPU, Transplant, calls_may_not_wait, carried, device_of_calls

from mlakit import branches, dispatch, masks, reference
from mlakit.branches import CachedBatch, LayerWeights, StepPlan, plan_step
from mlakit.cache import PagedLatentCache, PageTable, request_slots, select_requests
from mlakit.checks import UnsupportedError
from mlakit.geometry import MLAGeometry, RowShape
from mlakit.masks import CAUSAL, Mask
from mlakit.ops import _arguments
from mlakit.plan import EvenSplit, plan_context, plan_decode
from mlakit.testing import (
    assert_matches,
    assert_same_bits,
    assert_unchanged,
    poison,
    shuffled_pages,
    snapshot,
)
from mlakit.weights import SCALE_UB, HeadMatrices, UpProjection

pytestmark = pytest.mark.usefixtures("place")
interpreted = pytest.mark.interpreted
on_cpu = pytest.mark.on_cpu

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
KV_LENS = (9, 0, 17, 4, 0, 3)  # tokens cached before the step
Q_LENS = (3, 5, 1, 0, 1, 12)  # new ones

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


prefill_branch = planned(branches.prefill_branch, plan_context, max_context_rows="max_rows")
decode_branch = carried(branches.decode_branch)
mla_step = planned(
    branches.mla_step,
    plan_step,
    decode_up_to="decode_up_to",
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
    seed: int = 0

    @property
    def totals(self) -> list[int]:
        return [before + new for before, new in zip(self.kv_lens, self.q_lens, strict=True)]

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
        positions = max(self.totals) + 2
        angles = torch.rand(positions, g.qk_rope_head_dim // 2, generator=generator) * 6
        return LayerWeights(
            up=UpProjection.from_checkpoint(matrix, g, scale),
            gamma=self._normal(generator, g.kv_lora_rank),
            freqs=torch.stack([angles.cos(), angles.sin()], -1).flatten(1),
            softmax_scale=0.13,
            epsilon=1e-5,
            rope=self.rope,
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
        return [self._normal(generator, n, self.geometry.row.width) for n in self.kv_lens]

    @cached_property
    def _table(self) -> Tensor:
        counts = [-(-total // PAGE_SIZE) for total in self.totals]
        return shuffled_pages(len(counts), counts, sum(counts) + 2, self._generator(5))

    def batch(self) -> CachedBatch:
        """A new pool with the cached context; all other rows are poison."""
        table = self._table
        cache = PagedLatentCache.allocate(
            self.geometry,
            self.format,
            num_pages=int(sum(-(-total // PAGE_SIZE) for total in self.totals)) + 2,
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

    def _page_table(self, table: Tensor) -> PageTable:
        if not self.flat:
            return table
        slots = [request_slots(table, PAGE_SIZE, b, 0, n) for b, n in enumerate(self.totals)]
        return int32([0, *accumulate(self.totals)]), torch.cat(slots).int()

    def arguments(self) -> tuple[Tensor, Tensor, LayerWeights, CachedBatch]:
        """Of a branch: a q that may be rotated in place, and a pool of its own."""
        batch = self.batch()
        return self.q.clone(), self.kv.clone(), self.weights, batch

    @property
    def positions(self) -> list[int]:
        """Of every new token in its request."""
        lengths = zip(self.kv_lens, self.q_lens, strict=True)
        return [before + i for before, new in lengths for i in range(new)]

    def cached_rows(self, batch: CachedBatch) -> list[Tensor]:
        """Per request, its rows [total, width] float64 as the cache holds them."""
        layer = batch.cache.layer(LAYER)
        return [
            layer.read(request_slots(self._table, PAGE_SIZE, b, 0, n), F64)
            for b, n in enumerate(self.totals)
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
        new = [r[n:] for r, n in zip(rows, self.kv_lens, strict=True)]
        stored = torch.cat(new).float()
        stored = stored.to(batch.cache.payload.dtype) if self.format in ("bf16", "fp16") else stored
        assert_matches("appended rows", stored, exact, naive)
        untouched = self.batch()
        written = torch.cat(
            [
                request_slots(self._table, PAGE_SIZE, b, before, total)
                for b, (before, total) in enumerate(zip(self.kv_lens, self.totals, strict=True))
            ]
        )
        for part in ("payload", "scales"):
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
        joint = self.weights.up.joint
        both = entering(latent[:, None], joint)[:, 0].to(dtype) @ matrices(joint)[0].to(dtype).T
        both = both if dtype == F64 else both.to(self.dtype)
        by_head = both.unflatten(-1, (g.num_heads, -1))
        k_nope, v = by_head.split([g.qk_nope_head_dim, g.v_head_dim], -1)
        return k_nope, k_rope.to(both.dtype), v

    def prefilled(
        self, rows: Sequence[Tensor], mask: Mask, dtype: torch.dtype
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
            dtype=dtype,
        )

    def exact(self, rows: Sequence[Tensor], mask: Mask = CAUSAL) -> Tensor:
        """The oracle of both branches."""
        return self.prefilled(rows, mask, F64)[0]

    def naive_prefill(
        self, rows: Sequence[Tensor], mask: Mask = CAUSAL, max_rows: int | None = None
    ) -> Tensor:
        """The naive run of the prefill branch, with its chunks of context."""
        plan = plan_context(self.kv_lens, self.q_lens, max_rows=max_rows)
        if mask not in (CAUSAL, masks.NULL) or not plan.chunks:
            return self.prefilled(rows, mask, F32)[0]
        new = [each[before:] for each, before in zip(rows, self.kv_lens, strict=True)]
        parts = [self.prefilled(new, mask, F32)]
        for chunk in plan.chunks:
            taken = [each[low:high] for each, (low, high) in zip(rows, chunk, strict=True)]
            parts.append(self.prefilled(taken, masks.NULL, F32))
        outs, lses = zip(*parts, strict=True)
        rounded = torch.stack(outs).to(self.dtype)
        return reference.merge_states(rounded, torch.stack(lses), dtype=F32)[0]

    def absorbed(self, dtype: torch.dtype) -> Tensor:
        """q W_UK beside its rotated columns: exactly in float64, else rounded to q's dtype."""
        g, absorb = self.geometry, self.weights.up.absorb
        x = entering(self.q[..., : g.qk_nope_head_dim], absorb).to(dtype)
        latent = torch.einsum("thi,hoi->tho", x, matrices(absorb).to(dtype))
        rope = self.rotated(dtype)[..., g.qk_nope_head_dim :]
        return torch.cat([latent if dtype == F64 else latent.to(self.dtype), rope], -1)

    def projected(self, latent: Tensor, dtype: torch.dtype) -> Tensor:
        """latent W_UVᵀ of a latent result that was rounded to q's dtype, or of an exact one."""
        values = self.weights.up.values
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


def matrices(of: HeadMatrices) -> Tensor:
    """[heads, outputs, inputs] float64; tests/test_weights.py proves them the checkpoint's."""
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
    "nothing-cached": Step(kv_lens=(0, 0, 0), q_lens=(4, 1, 7)),
    "nope": Step(geometry=replace(GEOMETRY, qk_rope_head_dim=0)),
}
FP8_STEPS = {
    "bf16": Step(weights_dtype=E4M3),
    "fp8_token": Step(weights_dtype=E4M3, format="fp8_token"),
    "crossed-blocks": Step(
        (5, 0), (2, 3), weights_dtype=E4M3, geometry=replace(GEOMETRY, qk_nope_head_dim=96)
    ),
}
every_step = pytest.mark.parametrize("step", STEPS.values(), ids=list(STEPS))
every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=list(MASKS))


# --- prefill ----------------------------------------------------------------------------------


@every_step
@interpreted(step=[STEPS["fp8_block128-flat"]])
def test_prefill(step):
    q, kv, weights, batch = step.arguments()
    out = prefill_branch(q, kv, weights, batch)
    step.check_prefill(out, batch)
    step.check_appended(batch)


@pytest.mark.parametrize("step", FP8_STEPS.values(), ids=list(FP8_STEPS))
@interpreted(step=[FP8_STEPS["crossed-blocks"]])
def test_prefill_with_fp8_weights(step):
    q, kv, weights, batch = step.arguments()
    out = prefill_branch(q, kv, weights, batch)
    step.check_prefill(out, batch)
    step.check_appended(batch)


def test_prefill_rotates_q_in_place_and_nothing_else_of_it():
    step = STEPS["bf16"]
    q, kv, weights, batch = step.arguments()
    prefill_branch(q, kv, weights, batch)
    assert_matches("q", q, step.rotated(F64), step.rotated(BF16))
    d_n = step.geometry.qk_nope_head_dim
    assert_same_bits("q_nope", q[..., :d_n].contiguous(), step.q[..., :d_n].contiguous())
    assert_same_bits("kv", kv, step.kv)


@every_mask
@pytest.mark.parametrize("max_rows", [None, 1, 3, 7, 64])
@interpreted(mask=[CAUSAL], max_rows=[7])
def test_prefill_in_chunks_of_context(mask, max_rows):
    step = STEPS["bf16"]
    q, kv, weights, batch = step.arguments()
    out = prefill_branch(q, kv, weights, batch, mask=mask, max_context_rows=max_rows)
    step.check_prefill(out, batch, mask, max_rows)


@pytest.mark.parametrize(
    "step",
    [FP8_STEPS["fp8_token"], STEPS["fp8_block64-fp32"]],
    ids=["fp8-weights-fp8_token", "fp8_block64-fp32"],
)
def test_prefill_in_chunks_of_a_quantised_context(step):
    q, kv, weights, batch = step.arguments()
    step.check_prefill(prefill_branch(q, kv, weights, batch, max_context_rows=2), batch, max_rows=2)


def test_many_chunks_lose_no_more_than_one():
    """Partial results are rounded once each and their sum once, however often it is merged."""
    step = Step(kv_lens=(300,), q_lens=(2,))
    q, kv, weights, batch = step.arguments()
    many = prefill_branch(q, kv, weights, batch, max_context_rows=1)
    step.check_prefill(many, batch, max_rows=1)


@pytest.mark.parametrize("max_rows", [1, 3, 7, 64, None])
def test_prefill_expands_no_more_context_at_once_than_asked(max_rows, monkeypatch):
    step = STEPS["bf16"]
    expanded = []
    expand = UpProjection.expand

    def note(up: UpProjection, latent: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        expanded.append(len(latent))
        return expand(up, latent, **options)

    monkeypatch.setattr(UpProjection, "expand", note)
    q, kv, weights, batch = step.arguments()
    prefill_branch(q, kv, weights, batch, max_context_rows=max_rows)
    new, *context = expanded
    attended = sum(n for n, queries in zip(step.kv_lens, step.q_lens, strict=True) if queries)
    assert new == step.tokens
    assert max(context) <= (max_rows or attended)
    assert sum(context) == attended  # every row once


def test_a_window_expands_only_the_keys_it_shows(monkeypatch):
    step = Step(kv_lens=(40,), q_lens=(2,))
    expanded = []
    expand = UpProjection.expand
    monkeypatch.setattr(
        UpProjection,
        "expand",
        lambda up, latent, **options: expanded.append(len(latent)) or expand(up, latent, **options),
    )
    q, kv, weights, batch = step.arguments()
    prefill_branch(q, kv, weights, batch, mask=masks.sliding_window_causal(3), max_context_rows=1)
    assert expanded == [2 + 3 - 1]


def test_prefill_follows_a_plan():
    step = STEPS["fp32"]
    plan = plan_context(step.kv_lens, step.q_lens, max_rows=5)
    assert len(plan.chunks) > 2
    q, kv, weights, batch = step.arguments()
    planned = prefill_branch(q, kv, weights, batch, plan=plan)
    q, kv, weights, batch = step.arguments()
    assert_same_bits("out", planned, prefill_branch(q, kv, weights, batch, max_context_rows=5))


# --- decode -----------------------------------------------------------------------------------


@every_step
@interpreted(step=[STEPS["fp8_token-half"], STEPS["nope"]])
def test_decode_is_prefill(step):
    """The same oracle, in the expanded form, judges the absorbed form."""
    q, kv, weights, batch = step.arguments()
    out = decode_branch(q, kv, weights, batch)
    step.check_decode(out, batch)
    step.check_appended(batch)
    assert_same_bits("q", q, step.q)


@every_mask
def test_decode_under_every_mask(mask):
    step = STEPS["fp8_token-half"]
    q, kv, weights, batch = step.arguments()
    step.check_decode(decode_branch(q, kv, weights, batch, mask=mask), batch, mask)


@pytest.mark.parametrize(
    "plan",
    [
        EvenSplit(3),
        plan_decode(STEPS["bf16"].totals, num_workers=5, tile=2),
        plan_decode(STEPS["bf16"].totals, num_workers=5, tile=2).tensors(),
    ],
    ids=["even", "planned", "planned-tensors"],
)
def test_decode_follows_a_plan(plan):
    step = STEPS["bf16"]
    q, kv, weights, batch = step.arguments()
    step.check_decode(decode_branch(q, kv, weights, batch, plan=plan), batch)


@pytest.mark.parametrize("step", FP8_STEPS.values(), ids=list(FP8_STEPS))
@interpreted(step=[FP8_STEPS["crossed-blocks"]])
def test_decode_with_fp8_weights(step, monkeypatch):
    """In two stages: the result of attention is quantised, so what follows depends on its bits."""
    entered = []
    apply = HeadMatrices.apply

    def note(of: HeadMatrices, x: Tensor, **options: Any) -> Tensor:
        entered.append(x.clone().cpu())
        return apply(of, x, **options)

    monkeypatch.setattr(HeadMatrices, "apply", note)
    q, kv, weights, batch = step.arguments()
    out = decode_branch(q, kv, weights, batch)
    q_nope, latent = entered
    assert_same_bits("q_nope", q_nope, step.q[..., : step.geometry.qk_nope_head_dim])
    exact, naive = (
        reference.mla_decode(
            step.absorbed(dtype),
            step.cached_rows(batch),
            step.q_lens,
            softmax_scale=weights.softmax_scale,
            v_width=step.geometry.kv_lora_rank,
            dtype=dtype,
        )[0]
        for dtype in (F64, F32)
    )
    assert_matches("latent result", latent, exact, naive)
    assert_matches("out", out, step.projected(latent, F64), step.projected(latent, F32))
    step.check_appended(batch)


def listed_rows(step: Step, mask: Mask, keep: Callable[[int], bool]) -> list[list[int]]:
    """For every query token, the positions of its request that it sees and `keep` lets through."""
    lists = []
    for total, new in zip(step.totals, step.q_lens, strict=True):
        for position in range(total - new, total):
            lists.append([key for key in range(*mask.interval(position, total)) if keep(key)])
    return lists


def physical(step: Step, lists: list[list[int]]) -> tuple[Tensor, Tensor]:
    """(rows, topk_lens): garbage after each list's end."""
    requests = [b for b, new in enumerate(step.q_lens) for _ in range(new)]
    rows = torch.full((step.tokens, max(map(len, lists)) + 1), 3, dtype=torch.int32)
    for token, (request, keys) in enumerate(zip(requests, lists, strict=True)):
        slots = request_slots(step._table, PAGE_SIZE, request, 0, step.totals[request])
        rows[token, : len(keys)] = slots[torch.tensor(keys, dtype=torch.int64)].int()
    return rows, int32([len(keys) for keys in lists])


@pytest.mark.parametrize("format", ["bf16", "fp8_token"])
@pytest.mark.parametrize("plan", [None, EvenSplit(2)], ids=["whole", "split"])
@interpreted(format=["fp8_token"], plan=[None])
def test_sparse_decode(format, plan):
    step = Step(format=format)
    lists = listed_rows(step, CAUSAL, lambda key: key % 3 != 1)
    rows, lens = physical(step, lists)
    q, kv, weights, batch = step.arguments()
    out = decode_branch(q, kv, weights, batch, rows=rows, topk_lens=lens, plan=plan)
    step.check_appended(batch)

    cached = step.cached_rows(batch)
    requests = [b for b, new in enumerate(step.q_lens) for _ in range(new)]
    alone = replace(step, kv_lens=(0,) * step.tokens, q_lens=(1,) * step.tokens)
    chosen = [cached[b][keys] for b, keys in zip(requests, lists, strict=True)]
    k_nope, k_rope, v = step.expanded(torch.cat(chosen), F64)
    exact, _ = reference.mla_prefill(
        step.rotated(F64),
        k_nope,
        k_rope,
        v,
        range(step.tokens + 1),
        [0, *accumulate(map(len, chosen))],
        softmax_scale=weights.softmax_scale,
        mask=masks.NULL,
    )
    latent, _ = reference.mla_decode(
        step.absorbed(F32),
        chosen,
        alone.q_lens,
        softmax_scale=weights.softmax_scale,
        v_width=step.geometry.kv_lora_rank,
        mask=masks.NULL,
        dtype=F32,
    )
    assert_matches("sparse decode", out, exact, step.projected(latent.to(step.dtype), F32))
    assert (exact[lens == 0] == 0).all()


def test_sparse_decode_over_all_rows_is_dense_decode():
    step = STEPS["bf16"]
    rows, lens = physical(step, listed_rows(step, CAUSAL, lambda key: True))
    q, kv, weights, batch = step.arguments()
    step.check_decode(decode_branch(q, kv, weights, batch, rows=rows, topk_lens=lens), batch)


def test_sparse_decode_does_not_look_at_the_pages_of_the_context():
    """The lists say where the rows are."""
    step = Step(kv_lens=(8,), q_lens=(1,))
    rows, lens = physical(step, listed_rows(step, CAUSAL, lambda key: True))
    q, kv, weights, batch = step.arguments()
    want = decode_branch(q, kv, weights, batch, rows=rows, topk_lens=lens)
    q, kv, weights, batch = step.arguments()
    assert isinstance(batch.page_table, Tensor)
    batch.page_table[0, :2] = -1
    assert_same_bits("out", decode_branch(q, kv, weights, batch, rows=rows, topk_lens=lens), want)


@pytest.mark.parametrize("branch", [prefill_branch, decode_branch, mla_step])
def test_results_are_written_into_a_given_tensor(branch):
    step = STEPS["bf16"]
    want = branch(*step.arguments())
    room = poison(torch.empty(step.tokens, step.geometry.num_heads, 30, dtype=BF16))
    around = room.clone()
    out = room[..., 2:26]
    assert branch(*step.arguments(), out=out) is out
    assert_same_bits("out", out, want)
    around[..., 2:26] = want
    assert_same_bits("what surrounds it", room, around)


@pytest.mark.parametrize("branch", [prefill_branch, decode_branch, mla_step])
def test_twice_the_same_bits(branch):
    step = STEPS["fp8_token-half"]
    assert_same_bits("out", branch(*step.arguments()), branch(*step.arguments()))


@pytest.mark.gpu
@pytest.mark.parametrize("branch", [prefill_branch, decode_branch, mla_step])
@pytest.mark.parametrize(
    "step", [STEPS["fp8_block128-flat"], FP8_STEPS["fp8_token"]], ids=["flat", "fp8"]
)
def test_no_branch_waits_for_the_gpu(step, branch):
    branch(*step.arguments())  # compiles
    with calls_may_not_wait():
        branch(*step.arguments())


@pytest.mark.parametrize("op", ["batched_matmul", "mla_prefill", "merge_states"])
@pytest.mark.parametrize("branch", [prefill_branch, mla_step])
def test_a_step_that_has_no_kernel_of_a_later_op_writes_nothing(branch, op, monkeypatch):
    assert_refused_untouched(branch, op, STEPS["bf16"], monkeypatch)


def test_a_decode_without_a_kernel_of_attention_writes_nothing(monkeypatch):
    assert_refused_untouched(decode_branch, "mla_decode", STEPS["bf16"], monkeypatch)


def assert_refused_untouched(
    branch: Callable[..., Tensor], op: str, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    select = dispatch.select

    def refuse(name: str, *arguments: Any) -> Any:
        if name == op:
            raise UnsupportedError(f"{name}: no kernel")
        return select(name, *arguments)

    monkeypatch.setattr(dispatch, "select", refuse)
    q, kv, weights, batch = step.arguments()
    before = snapshot(q=q, payload=batch.cache.payload)
    with pytest.raises(UnsupportedError, match=op):
        branch(q, kv, weights, batch)
    assert_unchanged(before)


@pytest.mark.parametrize("step", [STEPS["bf16"], FP8_STEPS["fp8_token"]], ids=["bf16", "fp8"])
def test_decode_compiles_into_one_graph(step, place):
    there = Transplant(place.device)
    want_arguments, arguments = there.moved(step.arguments()), there.moved(step.arguments())
    torch._dynamo.reset()
    out = torch.compile(branches.decode_branch, fullgraph=True, backend="aot_eager")(*arguments)
    assert_same_bits("out", out, branches.decode_branch(*want_arguments))
    assert_same_bits("payload", arguments[3].cache.payload, want_arguments[3].cache.payload)
    torch._dynamo.reset()


# --- mixed batches ----------------------------------------------------------------------------


class Spy:
    """How many queries of how many requests each op of attention was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decoded: list[list[int]] = []
        self.prefilled: list[list[int]] = []
        for name, seen in (("mla_decode", self.decoded), ("mla_prefill", self.prefilled)):
            monkeypatch.setattr(branches, name, self._noting(getattr(branches, name), seen))

    @staticmethod
    def _noting(op: Callable[..., Any], seen: list[list[int]]) -> Callable[..., Any]:
        def noting(*arguments: Any, **options: Any) -> Any:
            q_starts = options["q_starts"] if "q_starts" in options else arguments[4]
            seen.append(q_starts.diff().tolist())
            return op(*arguments, **options)

        return noting


def alone(step: Step, batch: CachedBatch, request: int) -> tuple[slice, CachedBatch]:
    """(its tokens, batch of one) of a request of the step."""
    first, last = list(pairwise(accumulate(step.q_lens, initial=0)))[request]
    part = CachedBatch(
        batch.cache,
        select_requests(batch.page_table, [request]),
        batch.kv_lens[request : request + 1],
        int32([0, last - first]),
        LAYER,
    )
    return slice(first, last), part


@pytest.mark.parametrize(
    "step",
    [STEPS["bf16"], STEPS["fp8_block128-flat"], FP8_STEPS["fp8_token"]],
    ids=["bf16", "flat", "fp8"],
)
@pytest.mark.parametrize("decode_up_to", [0, 1, 3, 12])
def test_each_request_of_a_step_gets_what_its_branch_gives_it_alone(step, decode_up_to):
    q, kv, weights, batch = step.arguments()
    out = mla_step(q, kv, weights, batch, decode_up_to=decode_up_to, max_context_rows=4)
    assert_same_bits("q", q, step.q)
    apart_q, apart_kv, _, apart = step.arguments()
    for request, new in enumerate(step.q_lens):
        tokens, part = alone(step, apart, request)
        branch = decode_branch if new <= decode_up_to else prefill_branch
        want = branch(apart_q[tokens], apart_kv[tokens], weights, part)
        # equal up to the roundings of a product of other rows, or of another cut of the context
        assert_matches(f"request {request}", out[tokens], want.double(), want)
    assert_same_bits("payload", batch.cache.payload, apart.cache.payload)
    step.check_appended(batch)


@pytest.mark.parametrize("decode_up_to", [0, 3, 12])
@interpreted(decode_up_to=[3])
def test_a_step_meets_the_oracle(decode_up_to):
    step = STEPS["bf16"]
    q, kv, weights, batch = step.arguments()
    out = mla_step(q, kv, weights, batch, decode_up_to=decode_up_to)
    rows = step.cached_rows(batch)
    exact, decoded, prefilled = step.exact(rows), step.naive_decode(rows), step.naive_prefill(rows)
    bounds = pairwise(accumulate(step.q_lens, initial=0))
    for (first, last), new in zip(bounds, step.q_lens, strict=True):
        naive = decoded if new <= decode_up_to else prefilled
        assert_matches("out", out[first:last], exact[first:last], naive[first:last])


def test_one_long_prompt_does_not_send_the_others_to_prefill(monkeypatch):
    step = STEPS["bf16"]  # new tokens: 3, 5, 1, 0, 1, 12
    spy = Spy(monkeypatch)
    mla_step(*step.arguments())
    assert spy.decoded == [[3, 5, 1, 1]]
    assert {tuple(each) for each in spy.prefilled} == {(12,)}


def test_a_step_of_short_requests_only_decodes(monkeypatch):
    step = replace(STEPS["bf16"], q_lens=(1, 1, 0, 2, 1, 8))
    spy = Spy(monkeypatch)
    mla_step(*step.arguments())
    assert spy.prefilled == []
    assert spy.decoded == [[1, 1, 0, 2, 1, 8]]


def test_a_step_of_long_requests_only_prefills(monkeypatch):
    step = replace(STEPS["bf16"], q_lens=(9, 0, 10, 0, 0, 11))
    spy = Spy(monkeypatch)
    q, kv, weights, batch = step.arguments()
    out = mla_step(q, kv, weights, batch)
    assert spy.decoded == []
    assert {tuple(each) for each in spy.prefilled} == {(9, 10, 11)}
    step.check_prefill(out, batch)


@on_cpu
def test_a_plan_of_a_step_says_who_goes_where():
    plan = plan_step(KV_LENS, Q_LENS, decode_up_to=3, max_context_rows=4)
    assert plan.decode == (0, 2, 4)
    assert plan.prefill == (1, 5)
    assert plan.context == plan_context([0, 3], [5, 12], max_rows=4)
    assert plan_step(KV_LENS, Q_LENS).prefill == (5,)


def test_a_step_follows_its_plan(monkeypatch):
    step = STEPS["bf16"]
    spy = Spy(monkeypatch)
    plan = plan_step(step.kv_lens, step.q_lens, decode_up_to=1, max_context_rows=5)
    out = mla_step(*step.arguments(), plan=plan)
    assert spy.decoded == [[1, 1]]
    assert len(spy.prefilled) == 1 + len(plan.context.chunks) > 2
    assert_same_bits("out", out, mla_step(*step.arguments(), decode_up_to=1, max_context_rows=5))


@pytest.mark.parametrize("branch", [prefill_branch, decode_branch, mla_step])
@pytest.mark.parametrize("q_lens", [(0, 0), ()], ids=["no queries", "no requests"])
@interpreted
def test_a_step_without_tokens_writes_nothing(branch, q_lens):
    step = Step(kv_lens=(5, 0)[: len(q_lens)], q_lens=q_lens)
    if not q_lens:
        step = replace(step, kv_lens=(), q_lens=())
    q, kv, weights, batch = empty_arguments(step)
    before = snapshot(payload=batch.cache.payload)
    out = branch(q, kv, weights, batch)
    assert out.shape == (0, GEOMETRY.num_heads, GEOMETRY.v_head_dim)
    assert_unchanged(before)


def empty_arguments(step: Step) -> tuple[Tensor, Tensor, LayerWeights, CachedBatch]:
    if step.q_lens:
        return step.arguments()
    donor = Step()
    batch = donor.batch()
    assert isinstance(batch.page_table, Tensor)
    nothing = replace(
        batch, page_table=batch.page_table[:0], kv_lens=batch.kv_lens[:0], q_starts=int32([0])
    )
    return donor.q[:0], donor.kv[:0], donor.weights, nothing


# --- lengths that are not on the host ---------------------------------------------------------


@pytest.fixture
def _lengths_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the lengths could not be read without waiting."""
    monkeypatch.setattr(branches, "values_visible", lambda tensor: False)
    monkeypatch.setattr(_arguments, "values_visible", lambda tensor: False)


@pytest.mark.usefixtures("_lengths_on_a_gpu")
@pytest.mark.parametrize(
    ("branch", "maker"), [(prefill_branch, "plan_context"), (mla_step, "plan_step")]
)
@on_cpu
def test_without_lengths_on_the_host_a_plan_must_be_given(branch, maker):
    q, kv, weights, batch = STEPS["bf16"].arguments()
    before = snapshot(q=q, payload=batch.cache.payload)
    message = rf"plan must be given where lengths are not on the host \({maker}\), got None"
    with pytest.raises(ValueError, match=message):
        branch(q, kv, weights, batch)
    assert_unchanged(before)


@pytest.mark.usefixtures("_lengths_on_a_gpu")
@on_cpu
def test_with_plans_lengths_need_not_be_on_the_host():
    step = STEPS["bf16"]
    q, kv, weights, batch = step.arguments()
    plan = plan_context(step.kv_lens, step.q_lens, max_rows=6)
    step.check_prefill(prefill_branch(q, kv, weights, batch, plan=plan), batch, max_rows=6)
    q, kv, weights, batch = step.arguments()
    step.check_decode(decode_branch(q, kv, weights, batch), batch)
    step_plan = plan_step(step.kv_lens, step.q_lens)
    assert_same_bits(
        "out",
        mla_step(*step.arguments(), plan=step_plan),
        mla_step(*step.arguments(), plan=step_plan),
    )


@pytest.mark.usefixtures("_lengths_on_a_gpu")
@on_cpu
def test_what_can_be_seen_of_a_stale_plan_is_seen():
    step = STEPS["bf16"]
    with pytest.raises(ValueError, match="plan must be made for a batch of 6, got 5"):
        prefill_branch(*step.arguments(), plan=plan_context(KV_LENS[1:], Q_LENS[1:]))
    with pytest.raises(ValueError, match="plan must be made for 22 new tokens, got 23"):
        mla_step(*step.arguments(), plan=plan_step(KV_LENS, (3, 5, 1, 0, 2, 12)))


# --- refusals ---------------------------------------------------------------------------------

Change = Callable[[Tensor, Tensor, LayerWeights, CachedBatch], dict[str, Any]]


def bad_page(batch: CachedBatch, page: int) -> CachedBatch:
    """A page of cached context, not of new tokens, that is none."""
    assert isinstance(batch.page_table, Tensor)
    table = batch.page_table.clone()
    table[2, 1] = page
    return replace(batch, page_table=table)


def other_pool(batch: CachedBatch, row: RowShape) -> CachedBatch:
    return replace(batch, cache=PagedLatentCache.allocate(row, num_pages=30, page_size=PAGE_SIZE))


BOTH: list[tuple[Change, str]] = [
    (
        lambda q, kv, w, b: {"q": q[..., :-1]},
        "q.shape[2] (D_N + D_R) must equal the geometry's qk_head_dim, 24, got 23",
    ),
    (
        lambda q, kv, w, b: {"q": q[:, :2]},
        "q.shape[1] (heads) must equal the geometry's num_heads, 3, got 2",
    ),
    (lambda q, kv, w, b: {"q": q.float()}, "q must be bfloat16, got float32"),
    (
        lambda q, kv, w, b: {"q": q.to(E4M3)},
        "q must be bfloat16 or float16 or float32, got float8_e4m3fn",
    ),
    (lambda q, kv, w, b: {"kv": kv[1:]}, "kv.shape[0] (tokens) must equal q.shape[0], 22, got 21"),
    (
        lambda q, kv, w, b: {"kv": kv[:, 1:]},
        "kv.shape[1] (D_C + D_R) must equal the geometry's row width, 40, got 39",
    ),
    (lambda q, kv, w, b: {"weights": w.up}, "weights must be LayerWeights, got UpProjection"),
    (lambda q, kv, w, b: {"batch": b.cache}, "batch must be CachedBatch, got PagedLatentCache"),
    (
        lambda q, kv, w, b: {"batch": replace(b, layer=2)},
        "layer must be below the cache's 2 layers, got 2",
    ),
    (
        lambda q, kv, w, b: {"batch": replace(b, cache=b.cache.payload)},
        "cache must be a PagedLatentCache, got Tensor",
    ),
    (
        lambda q, kv, w, b: {"batch": replace(other_pool(b, RowShape(24, 16)), layer=0)},
        "cache must have rows like the geometry's, "
        "RowShape(kv_lora_rank=32, qk_rope_head_dim=8, v_width=32), "
        "got RowShape(kv_lora_rank=24, qk_rope_head_dim=16, v_width=24)",
    ),
    (lambda q, kv, w, b: {"batch": bad_page(b, -1)}, "page_table[2, 1] must be in [0, 18), got -1"),
    (lambda q, kv, w, b: {"batch": bad_page(b, 18)}, "page_table[2, 1] must be in [0, 18), got 18"),
    (
        lambda q, kv, w, b: {"batch": replace(b, kv_lens=b.kv_lens + 40)},
        "kv_lens[0] must not exceed the 20 tokens its page table holds, got 52",
    ),
    (
        lambda q, kv, w, b: {"batch": replace(b, q_starts=b.q_starts[:-1])},
        "q_starts.shape[0] (batch + 1) must equal one more than the batch, 7, got 6",
    ),
    (
        lambda q, kv, w, b: {"weights": replace(w, freqs=w.freqs[:17])},
        "freqs must have a row for position 17 of request 2, got 17 rows",
    ),
    (lambda q, kv, w, b: {"out": q[..., :24].float()}, "out must be bfloat16, got float32"),
    (
        lambda q, kv, w, b: {"out": q[..., :23]},
        "out.shape[2] (D_V) must equal the geometry's v_head_dim, 24, got 23",
    ),
    (
        lambda q, kv, w, b: {"out": q[:1, :, :24].expand(22, 3, 24)},
        "out must be writable, got stride 0 on axis 0 (an expanded tensor)",
    ),
    (
        lambda q, kv, w, b: {"backend": "fast"},
        f"backend must be one of auto, {', '.join(dispatch.BACKENDS)}, got 'fast'",
    ),
]
PREFILL: list[tuple[Change, str]] = [
    (lambda q, kv, w, b: {"mask": "causal"}, "mask must be a Mask, got str"),
    (
        lambda q, kv, w, b: {"plan": plan_context((9, 0, 16, 4, 0, 3), Q_LENS)},
        f"plan must be made for cached lengths {KV_LENS} and new ones {Q_LENS}, "
        f"got (9, 0, 16, 4, 0, 3) and {Q_LENS}",
    ),
    (
        lambda q, kv, w, b: {"plan": plan_context(KV_LENS, Q_LENS), "max_context_rows": 4},
        "max_context_rows must be left to the plan given, got 4",
    ),
]
DECODE: list[tuple[Change, str]] = [
    (lambda q, kv, w, b: {"mask": None}, "mask must be a Mask, got NoneType"),
    (
        lambda q, kv, w, b: {"plan": plan_decode(KV_LENS, num_workers=2)},
        f"plan must be made for kv_lens (12, 5, 18, 4, 1, 15), got {KV_LENS}",
    ),
    (
        lambda q, kv, w, b: {
            "plan": plan_decode((12, 5, 9, 4, 1, 15), num_workers=2, tile=4).tensors()
        },
        "plan must be made for kv_lens[2] = 18 keys, got 9",
    ),
    (lambda q, kv, w, b: {"topk_lens": int32([1] * 22)}, "topk_lens must come with rows, got none"),
    (
        lambda q, kv, w, b: {"rows": int32([[1]] * 21)},
        "rows.shape[0] (tokens) must equal q.shape[0], 22, got 21",
    ),
    (
        lambda q, kv, w, b: {"rows": int32([[1]] * 22), "topk_lens": int32([2] * 22)},
        "topk_lens[0] must not exceed the entries of rows, 1, got 2",
    ),
    (
        lambda q, kv, w, b: {"rows": int32([[1]] * 22), "mask": masks.NULL},
        "mask must be left alone with rows, which decide, got Mask(kind='null', window=0)",
    ),
    (
        lambda q, kv, w, b: {
            "rows": int32([[1]] * 22),
            "plan": plan_decode((12, 5, 18, 4, 1, 15), num_workers=2),
        },
        "plan must be an EvenSplit with rows, got a DecodePlan",
    ),
    (
        lambda q, kv, w, b: {
            "rows": int32([[1]] * 22),
            "plan": plan_decode((12, 5, 18, 4, 1, 15), num_workers=2).tensors(),
        },
        "plan must be an EvenSplit with rows, got a DecodePlan",
    ),
]
STEP: list[tuple[Change, str]] = [
    (
        lambda q, kv, w, b: {"plan": plan_step(KV_LENS, (3, 5, 1, 1, 0, 12))},
        f"plan must be made for cached lengths {KV_LENS} and new ones {Q_LENS}, "
        f"got {KV_LENS} and (3, 5, 1, 1, 0, 12)",
    ),
    (
        lambda q, kv, w, b: {"plan": plan_step(KV_LENS, Q_LENS), "decode_up_to": 4},
        "decode_up_to must be left to the plan given, got 4",
    ),
    (
        lambda q, kv, w, b: {"plan": plan_step(KV_LENS, Q_LENS), "max_context_rows": 4},
        "max_context_rows must be left to the plan given, got 4",
    ),
]
REFUSALS = [
    *[(prefill_branch, *row) for row in BOTH + PREFILL],
    *[(decode_branch, *row) for row in BOTH + DECODE],
    *[(mla_step, *row) for row in BOTH + STEP],
]


@pytest.mark.parametrize(
    ("branch", "change", "said"),
    REFUSALS,
    ids=[f"{branch.__name__}-{said}" for branch, _, said in REFUSALS],
)
@on_cpu
def test_a_wrong_step_is_refused_and_writes_nothing(branch, change, said):
    """Not even q is rotated: the step may be mended and made again."""
    q, kv, weights, batch = STEPS["bf16"].arguments()
    changed = change(q, kv, weights, batch)
    out = changed.get("out", torch.full((22, 3, 24), 7.0, dtype=BF16))
    before = snapshot(q=q, kv=kv, payload=batch.cache.payload, out=out)
    arguments = {"q": q, "kv": kv, "weights": weights, "batch": batch, "out": out, **changed}
    with pytest.raises((TypeError, ValueError)) as refusal:
        branch(**arguments)
    op, _, message = str(refusal.value).partition(": ")
    assert message == said
    assert op in (branch.__name__, "norm_rope_quant_append", "batched_matmul", "decode_branch")
    assert_unchanged(before)


@pytest.mark.parametrize("branch", [decode_branch, mla_step])
def test_decode_needs_queries_like_the_rows_of_a_float_cache(branch):
    """A prefill branch may read bf16 rows for float32 queries; `mla_decode` may not."""
    step = Step(format="bf16", dtype=F32)
    q, kv, weights, batch = step.arguments()
    before = snapshot(q=q, payload=batch.cache.payload)
    with pytest.raises(TypeError, match=f"^{branch.__name__}: q must be bfloat16, got float32$"):
        branch(q, kv, weights, batch)
    assert_unchanged(before)
    step.check_prefill(prefill_branch(q, kv, weights, batch), batch)


@pytest.mark.parametrize("branch", [prefill_branch, decode_branch, mla_step])
def test_values_that_are_the_whole_row_are_refused(branch):
    """A latent result of other columns than the up-projection takes."""
    g = replace(GEOMETRY, v_width=40)
    q, kv, weights, batch = Step(geometry=g).arguments()
    with pytest.raises(ValueError, match="cache must have its latent columns as values"):
        branch(q, kv, weights, batch)


@pytest.mark.parametrize("branch", [prefill_branch, decode_branch, mla_step])
@pytest.mark.parametrize("name", ["q", "kv", "kv_b_proj", "gamma"])
def test_what_requires_grad_is_refused_before_anything_is_written(branch, name):
    step = STEPS["bf16"]
    q, kv, weights, batch = step.arguments()
    trained = {"q": q, "kv": kv, "kv_b_proj": weights.up.joint.weight, "gamma": weights.gamma}[name]
    trained.requires_grad_()
    before = snapshot(q=q, payload=batch.cache.payload)
    try:
        with pytest.raises(
            UnsupportedError, match=f"{branch.__name__}: {name} must not require grad"
        ):
            branch(q, kv, weights, batch)
        assert_unchanged(before)
        with torch.no_grad():
            branch(q, kv, weights, batch)
    finally:
        trained.requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"gamma": torch.ones(31)},
            "gamma.shape[0] (D_C) must equal the geometry's kv_lora_rank, 32, got 31",
        ),
        (
            {"freqs": torch.ones(9, 6)},
            "freqs.shape[1] (D_R) must equal the geometry's qk_rope_head_dim, 8, got 6",
        ),
        (
            {"gamma": torch.ones(32, dtype=F64)},
            "gamma must be bfloat16 or float16 or float32, got float64",
        ),
        ({"softmax_scale": float("nan")}, "softmax_scale must be finite, got nan"),
        ({"softmax_scale": None}, "softmax_scale must be a number, got NoneType"),
        ({"epsilon": -1.0}, "epsilon must not be negative, got -1.0"),
        ({"rope": "neox"}, "rope must be one of interleaved, half, got 'neox'"),
    ],
)
@on_cpu
def test_weights_of_a_layer_are_checked_when_they_are_made(change, said):
    with pytest.raises((TypeError, ValueError)) as refusal:
        replace(STEPS["bf16"].weights, **change)
    assert str(refusal.value) == f"LayerWeights: {said}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (((1, 2), (3,)), "plan_context: q_lens must have 2 entries, got 1"),
        (((1, -2), (3, 4)), "plan_context: kv_lens[1] must be at least 0, got -2"),
    ],
)
@on_cpu
def test_plans_of_steps_are_checked(arguments, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        plan_step(*arguments)
    with pytest.raises(ValueError, match="plan_step: decode_up_to must be at least 0, got -1"):
        plan_step((1,), (1,), decode_up_to=-1)
    assert isinstance(plan_step((), ()), StepPlan)
