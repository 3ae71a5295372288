"""What the ranks do in the tests: every function checks its own results."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional

from mlakit import reference
from mlakit.cache import KVShard, request_slots
from mlakit.model import masks
from mlakit.model.geometry import MLAGeometry
from mlakit.parallel import (
    context_parallel_decode,
    groups,
    merge,
    merge_over_ranks,
    sum_over_ranks,
)
from mlakit.parallel.decode import NAME
from mlakit.plan import EvenSplit, plan_decode
from mlakit.steps import CachedBatch, LayerWeights, decode_attend, decode_branch
from mlakit.steps.weights import UpProjection
from mlakit.tools.testing import assert_matches, assert_same_bits, assert_unchanged, snapshot
from tests.steps.step_oracles import BF16, F32, LAYER, PAGE_SIZE, Step

HEADS = 4
GEOMETRY = MLAGeometry(
    num_heads=HEADS,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=8,  # a quarter of the latent, as DeepSeek-V3 has it
    hidden_size=1,
)
# ragged, with several queries; a request without tokens, one without new tokens, and requests of
# which some ranks have no token
STEP = Step(
    kv_lens=(12, 5, 18, 4, 1, 0, 15),
    q_lens=(3, 5, 1, 0, 1, 0, 12),
    format="fp32",
    dtype=F32,
    geometry=GEOMETRY,
)
HALF = replace(STEP, format="bf16", dtype=BF16)
SINK = torch.tensor([0.5, -torch.inf, 2.0, 1.0])
Group = dist.ProcessGroup


def assert_close(got: Tensor, want: Tensor) -> None:
    """Two ways to one float32 result."""
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def heads_of(group: Group) -> slice:
    each = HEADS // group.size()
    return slice(group.rank() * each, (group.rank() + 1) * each)


def whole_result(sink: Tensor | None = None) -> Tensor:
    """What one process computes over the whole cache."""
    q, kv, weights, batch = STEP.arguments()
    out = decode_branch(q, kv, weights, batch)
    if sink is None:
        return out
    rotated, scale = STEP.rotated(torch.float64).float(), weights.softmax_scale
    return decode_attend(rotated, weights.up, batch, softmax_scale=scale, sink=sink)[0]


def check_shard_rows(step: Step, batch: CachedBatch, shard: KVShard) -> None:
    """A rank's pool is its share of one process's pool, and poison elsewhere."""
    whole = step.batch()
    decode_branch(step.q.clone(), step.kv, step.weights, whole)
    wanted = step.shard(shard).cache
    for request, kv_len in enumerate(step.kv_lens):
        positions = torch.arange(kv_len)
        owned = positions[shard.owner(positions) == shard.rank]
        source = request_slots(whole.page_table, PAGE_SIZE, request, 0, kv_len)[owned]
        target = request_slots(batch.page_table, PAGE_SIZE, request, 0, len(owned))
        for part in ("payload", "beside"):
            rows, found = getattr(wanted, part), getattr(whole.cache, part)
            if rows is not None:
                stored = found[LAYER, source // PAGE_SIZE, source % PAGE_SIZE]
                rows[LAYER, target // PAGE_SIZE, target % PAGE_SIZE] = stored
    for part in ("payload", "beside"):
        if getattr(wanted, part) is not None:
            assert_same_bits(part, getattr(batch.cache, part), getattr(wanted, part))


def weights_of_heads(step: Step, heads: slice) -> LayerWeights:
    """The weights that a tensor-parallel rank has."""
    g, up = step.geometry, step.weights.up
    matrix = up.kv_b_proj.weight[0].unflatten(0, (g.num_heads, -1))[heads]
    local = g.with_heads(len(matrix))
    return replace(step.weights, up=UpProjection.from_checkpoint(matrix.flatten(0, 1), local))


def check_decode(group: Group, interleave: int, method: str) -> None:
    shard = KVShard(group.rank(), group.size(), interleave)
    for sink in (None, SINK):
        batch = STEP.shard(shard)
        q, kv = STEP.q.clone(), STEP.kv.clone()
        before = snapshot(q=q, kv=kv)
        out = context_parallel_decode(
            q, kv, STEP.weights, batch, group, interleave=interleave, method=method, sink=sink
        )
        want = whole_result(sink)
        if method == "all_to_all":
            want = want[:, heads_of(group)]
        assert float(want.abs().max()) > 0.5
        assert_close(out, want)
        assert_unchanged(before)
        check_shard_rows(STEP, batch, shard)


def check_plans(group: Group) -> None:
    shard = KVShard(group.rank(), group.size(), 2)
    lens = [shard.local_count(n) for n in STEP.kv_lens]
    for plan in (EvenSplit(3), plan_decode(lens, num_ctas=3, tile=2)):
        out = context_parallel_decode(
            STEP.q, STEP.kv, STEP.weights, STEP.shard(shard), group, interleave=2, plan=plan
        )
        assert_close(out, whole_result())


def check_head_sharded(group: Group, interleave: int) -> None:
    """q, weights and result of the rank's heads; the cache of the rank's tokens."""
    shard, heads = KVShard(group.rank(), group.size(), interleave), heads_of(group)
    weights = weights_of_heads(STEP, heads)
    for sink in (None, SINK):
        batch = STEP.shard(shard)
        out = context_parallel_decode(
            *(STEP.q[:, heads].clone(), STEP.kv, weights, batch, group),
            interleave=interleave,
            is_head_sharded=True,
            sink=None if sink is None else sink[heads],
        )
        assert_close(out, whole_result(sink)[:, heads])
        check_shard_rows(STEP, batch, shard)


def naive_bf16(
    step: Step, rows: list[Tensor], world: int, interleave: int, *, is_head_sharded: bool
) -> Tensor:
    """The naive run: float32, rounded where the ranks round."""
    requests = [b for b, new in enumerate(step.q_lens) for _ in range(new)]
    outs, lses = [], []
    for rank in range(world):
        shard = KVShard(rank, world, interleave)
        seen = []
        for request, position in zip(requests, step.positions, strict=True):
            visible = torch.arange(position + 1)
            seen.append(rows[request][visible[shard.owner(visible) == rank]])
        latent, lse = reference.mla_decode(
            step.absorbed(F32),
            seen,
            [1] * step.tokens,
            softmax_scale=step.weights.softmax_scale,
            v_width=GEOMETRY.kv_lora_rank,
            mask=masks.NULL,
            dtype=F32,
        )
        latent = latent.to(BF16)
        outs.append(latent if is_head_sharded else step.projected(latent, F32).to(BF16))
        lses.append(lse)
    merged, _ = reference.merge_states(torch.stack(outs), torch.stack(lses), dtype=F32)
    return step.projected(merged.to(BF16), F32) if is_head_sharded else merged


def check_bf16(group: Group, format: str, method: str, *, is_head_sharded: bool = False) -> None:
    """Against the oracle in float64."""
    step = replace(HALF, format=format)
    shard, heads = KVShard(group.rank(), group.size(), 2), heads_of(group)
    given = heads if is_head_sharded else slice(None)
    weights = weights_of_heads(step, heads) if is_head_sharded else step.weights
    batch = step.shard(shard)
    out = context_parallel_decode(
        *(step.q[:, given], step.kv, weights, batch, group),
        interleave=2,
        method=method,
        is_head_sharded=is_head_sharded,
    )
    check_shard_rows(step, batch, shard)
    whole = step.batch()
    decode_branch(step.q.clone(), step.kv, step.weights, whole)
    rows = step.cached_rows(whole)
    found = heads if method == "all_to_all" else slice(None)
    naive = naive_bf16(step, rows, group.size(), 2, is_head_sharded=is_head_sharded)
    assert out.dtype == BF16
    assert_matches("out", out, step.exact(rows)[:, found], naive[:, found])


def reduced(x: Tensor, group: Group) -> Tensor:
    """x, as the result of a functional collective that may still be under way."""
    mine = x if group.rank() == 0 else torch.zeros_like(x)
    made = functional.all_reduce(mine, "sum", group)
    assert type(made) is functional.AsyncCollectiveTensor
    return made


def check_functional_collectives(group: Group) -> None:
    shard = KVShard(group.rank(), group.size())
    for method in ("all_gather", "all_to_all", "all_reduce"):
        out = context_parallel_decode(
            *(reduced(STEP.q, group), reduced(STEP.kv, group), STEP.weights, STEP.shard(shard)),
            group,
            method=method,
            sink=reduced(SINK.clamp(min=-5), group),
        )
        want = whole_result(SINK.clamp(min=-5))
        want = want[:, heads_of(group)] if method == "all_to_all" else want
        assert_close(out, want)
        outs, lses = partials(group.size(), 5, F32, 6)
        merged = merge_over_ranks(
            reduced(outs[0], group), reduced(lses[0].clamp(min=-9), group), group, method=method
        )
        mine = heads_of(group) if method == "all_to_all" else slice(None)
        assert_close(merged[0], outs[0][:, mine])


def partials(
    world: int, tokens: int, dtype: torch.dtype, width: int
) -> tuple[list[Tensor], list[Tensor]]:
    """One partial per rank; NaN where a partial is empty, and a token without any key."""
    generator = torch.Generator().manual_seed(7)
    outs, lses = [], []
    for rank in range(world):
        out = torch.randn(tokens, HEADS, width, generator=generator).to(dtype)
        lse = 3 * torch.randn(tokens, HEADS, generator=generator)
        if rank and tokens:
            empty = torch.rand(tokens, HEADS, generator=generator) < 0.4
            empty[-1] = True
            lse[empty] = -torch.inf
            out[empty] = torch.nan
        outs.append(out)
        lses.append(lse)
    return outs, lses


def check_merge(group: Group, method: str, dtype: torch.dtype, width: int) -> None:
    """Against the oracle: strided and empty partials, a token without keys."""
    outs, lses = partials(group.size(), 5, dtype, width)
    lses[0][2] = -torch.inf
    outs[0][2] = torch.nan
    for each in lses[1:]:
        each[2] = -torch.inf
    out = outs[group.rank()].transpose(0, 1).contiguous().transpose(0, 1)
    lse = lses[group.rank()].T.contiguous().T
    mine = heads_of(group) if method == "all_to_all" else slice(None)
    for sink in (None, SINK):
        before = snapshot(out=out, lse=lse)
        got = merge_over_ranks(
            out, lse, group, method=method, sink=None if sink is None else sink[mine]
        )
        want = reference.merge_states(torch.stack(outs), torch.stack(lses), sink=sink)
        exact = want[0][:, mine].to(dtype)
        if dtype == F32:
            assert_close(got[0], exact)
        else:
            torch.testing.assert_close(got[0], exact, rtol=2**-7, atol=1e-6)  # rounded once
        assert_close(got[1], want[1][:, mine].float())
        assert not got[0][2].any()
        assert got[1][2].isneginf().all()
        assert_unchanged(before)


def check_no_tokens(group: Group) -> None:
    for method in ("all_gather", "all_to_all", "all_reduce"):
        heads = HEADS // group.size() if method == "all_to_all" else HEADS
        out, lse = merge_over_ranks(
            torch.empty(0, HEADS, 6), torch.empty(0, HEADS), group, method=method
        )
        assert out.shape == (0, heads, 6)
        assert lse.shape == (0, heads)


def check_ranks_agree(group: Group) -> None:
    """All ranks get the same bits, so that they sample the same token."""
    outs, lses = partials(group.size(), 5, BF16, 6)
    for method in ("all_gather", "all_reduce"):
        got = merge_over_ranks(outs[group.rank()], lses[group.rank()], group, method=method)
        for tensor in got:
            bits = tensor.contiguous().view(torch.uint8)
            everywhere = [torch.empty_like(bits) for _ in range(group.size())]
            dist.all_gather(everywhere, bits, group=group)
            for other in everywhere:
                assert torch.equal(other, bits)


def check_bytes(group: Group) -> None:
    """The result of W_UV is sent, not the latents it is made of."""
    sent = []

    def counted(received: Tensor, mine: Tensor, group: Group) -> None:
        sent.append(mine.numel() * mine.element_size())
        groups.gather_over_ranks(received, mine, group)

    shard = KVShard(group.rank(), group.size())
    with mock.patch.object(merge, "gather_over_ranks", counted):
        context_parallel_decode(STEP.q, STEP.kv, STEP.weights, STEP.shard(shard), group)
    columns = STEP.tokens * HEADS * 4  # bytes of a float32 column of all heads
    assert sent == [columns * (GEOMETRY.v_head_dim + 1)]  # and lse


def check_compiled(group: Group) -> None:
    """Traced to functional collectives, in one graph."""
    shard = KVShard(group.rank(), group.size())

    def decode(q: Tensor, kv: Tensor) -> Tensor:
        return context_parallel_decode(q, kv, weights, batch, group)

    weights, batch = STEP.weights, STEP.shard(shard)
    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    assert_close(compiled(STEP.q.clone(), STEP.kv), whole_result())
    check_shard_rows(STEP, batch, shard)


def check_sum(group: Group) -> None:
    x = torch.full((3,), float(group.rank() + 1))
    assert sum_over_ranks(x, group) is x
    assert x.tolist() == [group.size() * (group.size() + 1) / 2] * 3
    assert sum_over_ranks(torch.empty(0), group).shape == (0,)


def check_refused(group: Group, changes: dict[str, Any], said: str) -> None:
    """The error of a wrong call, which changes nothing."""
    batch = STEP.shard(KVShard(group.rank(), group.size()))
    before = snapshot(cache=batch.cache.payload)
    arguments = {"q": STEP.q, "kv": STEP.kv, "weights": STEP.weights, "batch": batch, **changes}
    with pytest.raises((TypeError, ValueError), match=f"^{NAME}: {re.escape(said)}"):
        context_parallel_decode(**arguments, group=group)
    assert_unchanged(before)


def fail(group: Group) -> None:
    """One rank fails."""
    assert group.rank() == 0, "on purpose"
