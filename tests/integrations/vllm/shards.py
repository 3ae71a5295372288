"""A sparse step of vLLM whose ranks share the tokens of each request.

Ranks are processes, each of which checks its own part, or take turns in one process, on a GPU too.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

import mlakit
from mlakit import KVShard, reference
from mlakit.integrations.vllm import calls, selection
from mlakit.parallel import select as parallel_select
from mlakit.tools.testing import assert_same_bits
from tests.integrations.vllm.shapes import (
    INDEX_WIDTH,
    ROW,
    SCALE,
    IndexCache,
    cache_of,
    index_cache_of,
    starts,
)

CPU = torch.device("cpu")
LENGTHS, Q_LENS, DECODES, K = [200, 3, 90, 300, 33], [1, 3, 20, 150, 33], 2, 32
HEADS, INDEX_HEADS = 4, 32
CHUNKS = [slice(0, 100), slice(100, 203)]


class Inputs(NamedTuple):
    """The keys, rows and queries of all requests, the same on every rank."""

    keys: list[Tensor]
    rows: list[Tensor]
    q_index: Tensor
    weights: Tensor
    q: Tensor


def make_inputs(device: torch.device) -> Inputs:
    generator = torch.Generator().manual_seed(4)
    tokens = sum(Q_LENS)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    return Inputs(
        [random(length, INDEX_WIDTH).bfloat16() for length in LENGTHS],
        [random(length, ROW.width).bfloat16().float() for length in LENGTHS],
        random(tokens, INDEX_HEADS, INDEX_WIDTH).to(torch.float8_e4m3fn),
        random(tokens, INDEX_HEADS).abs(),
        random(tokens, HEADS, ROW.width).bfloat16(),
    )


def check_step(group: dist.ProcessGroup, interleave: int, cache: str) -> None:
    """Ranks select the same tokens, the best of all; merged, they attend to these."""
    shard = KVShard(dist.get_rank(group), dist.get_world_size(group), interleave)
    given = make_inputs(CPU)
    selected = select(shard, group, given)
    for other in gathered(selected, group):
        assert_same_bits("selection", other, selected)
    check_selection(selected, given)
    out, lse = attend(shard, cache, given, selected)
    check_attention(gathered(out, group), gathered(lse, group), cache, given, selected)


def check_turns(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    world: int,
    interleave: int,
    cache: str,
) -> None:
    """The same with ranks that take turns: first each sends its candidates, then all receive."""
    given = make_inputs(device)
    shards = [KVShard(rank, world, interleave) for rank in range(world)]
    sent: list[list[Tensor]] = []

    def send(received: Tensor, mine: Tensor, group: Any) -> None:
        sent[-1].append(mine.clone())
        received.copy_(mine.expand_as(received))

    def receive(received: Tensor, mine: Tensor, group: Any) -> None:
        received.copy_(torch.cat([each.pop(0) for each in sent]))

    monkeypatch.setattr(parallel_select, "gather_over_ranks", send)
    for shard in shards:
        sent.append([])
        select(shard, None, given)
    monkeypatch.setattr(parallel_select, "gather_over_ranks", receive)
    everything = [list(each) for each in sent]
    results = []
    for shard in shards:
        sent[:] = [list(each) for each in everything]
        selected = select(shard, None, given)
        check_selection(selected, given)
        results.append(attend(shard, cache, given, selected))
    out, lse = (torch.stack(each) for each in zip(*results, strict=True))
    check_attention(out, lse, cache, given, selected)


def check_selection(selected: Tensor, given: Inputs) -> None:
    """Every query has its best keys, each once, and no key that it does not see."""
    selected, stored = selected.cpu(), stored_keys(given.keys)
    oracle = reference.indexer_logits(
        given.q_index.cpu().double(), given.weights.cpu(), stored, Q_LENS
    )
    for token, scores in enumerate(oracle):
        found = selected[token][selected[token] >= 0].long()
        assert len(found.unique()) == len(found) == min(K, int(scores.isfinite().sum()))
        assert bool(scores[found].isfinite().all())
        best = scores.topk(len(found)).values
        chosen = scores[found].sort(descending=True).values
        torch.testing.assert_close(chosen, best, rtol=0, atol=0.6)


def own(shard: KVShard, length: int) -> Tensor:
    """The positions of a request's tokens on this rank."""
    position = torch.arange(length)
    return position[shard.owner(position) == shard.rank]


def index_of(shard: KVShard, keys: list[Tensor]) -> IndexCache:
    lengths = [shard.local_count(len(each)) for each in keys]
    device = keys[0].device
    cache = index_cache_of(lengths, device)
    size = cache.pool.page_size
    for request, each in enumerate(keys):
        position = torch.arange(lengths[request], device=device)
        slots = cache.table[request, position // size].long() * size + position % size
        mine = each[own(shard, len(each)).to(device)]
        calls.append_index_keys(mine, cache.pool, slots, power_of_two_scales=True)
    return cache


def stored_keys(keys: list[Tensor]) -> list[Tensor]:
    """All keys as a cache gives them back."""
    return index_of(KVShard(0, 1, 1), keys).keys([len(each) for each in keys])


def select(shard: KVShard, group: dist.ProcessGroup | None, given: Inputs) -> Tensor:
    cache, tokens = index_of(shard, given.keys), len(given.q_index)
    before = cache.everything.clone()
    buffer = torch.full((tokens + 4, K), 10**6, dtype=torch.int32, device=given.q.device)
    selection.select_step(
        given.q_index,
        None,
        given.weights,
        buffer,
        cache.pool,
        metadata_of(shard, cache.table),
        max_model_len=512,
        power_of_two_scales=True,
        ranks=selection.Ranks(shard, group),
    )
    assert bool((buffer[tokens:] == 10**6).all())
    assert_same_bits("index keys", cache.everything, before)
    return buffer[:tokens]


def metadata_of(shard: KVShard, table: Tensor) -> SimpleNamespace:
    """DeepseekV32IndexerMetadata: lengths are those of requests, bounds of chunks this rank's."""
    lens, q_lens, device = LENGTHS[DECODES:], Q_LENS[DECODES:], table.device

    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    local = [shard.local_count(n) for n in lens]
    first, last = [], []
    for request, (length, queries) in enumerate(zip(lens, q_lens, strict=True)):
        begin = sum(local[:request])
        first += [begin] * queries
        last += [begin + shard.local_count(length - queries + i + 1) for i in range(queries)]
    decode_tokens = sum(Q_LENS[:DECODES])
    chunks = [
        SimpleNamespace(
            block_table=table[DECODES:],
            cu_seqlen_ks=int32(first[each]),
            cu_seqlen_ke=int32(last[each]),
            cu_seq_lens=starts(lens, device),
            local_cu_seq_lens=starts(local, device),
            total_seq_lens=sum(lens),
            token_start=decode_tokens + each.start,
            token_end=decode_tokens + each.stop,
        )
        for each in CHUNKS
    ]
    per_request = int32(Q_LENS[:DECODES])
    return SimpleNamespace(
        seq_lens=int32(LENGTHS),
        max_seq_len=max(LENGTHS),
        slot_mapping=torch.empty(0, dtype=torch.int64, device=device),
        num_decodes=DECODES,
        num_decode_tokens=decode_tokens,
        num_prefills=len(lens),
        decode=SimpleNamespace(per_req_decode_lens=per_request),
        prefill=SimpleNamespace(chunks=chunks),
        block_table=table,
    )


def gathered(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, mine.contiguous(), group=group)
    return torch.stack(received)


def attend(shard: KVShard, kind: str, given: Inputs, selected: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of one rank over its own rows."""
    local, device = [shard.local_count(len(each)) for each in given.rows], given.q.device
    cache = cache_of(kind, local, device)
    for request, each in enumerate(given.rows):
        if local[request]:
            slots = cache.slots(request, local[request])
            cache.pool.layer(0).write(slots, each[own(shard, len(each)).to(device)])
    q, q_starts = given.q, starts(Q_LENS, device)
    parts = q[..., :512], q[..., 512:]
    return calls.sparse(parts, cache.pool, selected, cache.table, q_starts, SCALE, shard=shard)


def check_attention(out: Tensor, lse: Tensor, kind: str, given: Inputs, selected: Tensor) -> None:
    """The results of all ranks, merged, are attention to the selection."""
    merged = mlakit.merge_states(out, lse)
    rows = [each.cpu() for each in given.rows]
    everything = torch.cat([_as_stored(kind, each) for each in rows])
    request_of = torch.arange(len(Q_LENS)).repeat_interleave(torch.tensor(Q_LENS))
    offset = starts([len(each) for each in rows], CPU)[request_of][:, None]
    chosen = selected.cpu()
    physical = torch.where(chosen >= 0, chosen + offset, -1)
    q = given.q.cpu()
    exact = reference.sparse_mla(q, everything, physical, softmax_scale=SCALE, v_width=512)
    errors = (merged[0].cpu().double() - exact[0]).norm(dim=-1)
    assert bool((errors <= 1e-2 * exact[0].norm(dim=-1)).all()), errors.max()
    torch.testing.assert_close(merged[1].cpu().double(), exact[1], rtol=0, atol=2e-3)


def _as_stored(kind: str, rows: Tensor) -> Tensor:
    cache = cache_of(kind, [len(rows)], CPU)
    slots = cache.slots(0, len(rows))
    cache.pool.layer(0).write(slots, rows)
    return cache.pool.layer(0).read(slots, torch.float64)
