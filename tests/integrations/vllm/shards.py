"""A sparse step of vLLM whose ranks share the tokens of each request; every rank checks its own."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor
from torch import distributed as dist

import mlakit
from mlakit import KVShard, reference
from mlakit.integrations.vllm import calls, selection
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


def check_step(group: dist.ProcessGroup, interleave: int, cache: str) -> None:
    """Ranks select the same tokens, the best of all; merged, they attend to these."""
    shard = KVShard(dist.get_rank(group), dist.get_world_size(group), interleave)
    generator = torch.Generator().manual_seed(4)
    keys = [torch.randn(n, INDEX_WIDTH, generator=generator).bfloat16() for n in LENGTHS]
    rows = [torch.randn(n, ROW.width, generator=generator).bfloat16().float() for n in LENGTHS]
    tokens = sum(Q_LENS)
    q_index = torch.randn(tokens, INDEX_HEADS, INDEX_WIDTH, generator=generator)
    q_index = q_index.to(torch.float8_e4m3fn)
    weights = torch.rand(tokens, INDEX_HEADS, generator=generator)
    q = torch.randn(tokens, HEADS, ROW.width, generator=generator).bfloat16()

    selected = select(shard, group, keys, q_index, weights)
    check_same(selected, group)
    oracle = reference.indexer_logits(q_index.double(), weights, stored(keys), Q_LENS)
    for token, scores in enumerate(oracle):
        found = selected[token][selected[token] >= 0].long()
        assert len(found.unique()) == len(found) == min(K, int(scores.isfinite().sum()))
        assert bool(scores[found].isfinite().all())
        best = scores.topk(len(found)).values
        torch.testing.assert_close(
            scores[found].sort(descending=True).values, best, rtol=0, atol=0.6
        )
    check_attention(shard, group, cache, rows, q, selected)


def own(shard: KVShard, length: int) -> Tensor:
    """The positions of a request's tokens on this rank."""
    position = torch.arange(length)
    return position[shard.owner(position) == shard.rank]


def index_of(shard: KVShard, keys: list[Tensor]) -> IndexCache:
    lengths = [shard.local_count(len(each)) for each in keys]
    cache = index_cache_of(lengths, CPU)
    size = cache.pool.page_size
    for request, each in enumerate(keys):
        position = torch.arange(lengths[request])
        slots = cache.table[request, position // size].long() * size + position % size
        mine = each[own(shard, len(each))]
        calls.append_index_keys(mine, cache.pool, slots, power_of_two_scales=True)
    return cache


def stored(keys: list[Tensor]) -> list[Tensor]:
    """All keys as a cache gives them back."""
    return index_of(KVShard(0, 1, 1), keys).keys([len(each) for each in keys])


def select(
    shard: KVShard, group: dist.ProcessGroup, keys: list[Tensor], q: Tensor, weights: Tensor
) -> Tensor:
    cache = index_of(shard, keys)
    before = cache.everything.clone()
    buffer = torch.full((len(q) + 4, K), 10**6, dtype=torch.int32)
    selection.select_step(
        q, None, weights, buffer, cache.pool, metadata_of(shard, cache.table),
        max_model_len=512, power_of_two_scales=True, ranks=selection.Ranks(shard, group),
    )  # fmt: skip
    assert bool((buffer[len(q) :] == 10**6).all())
    assert_same_bits("index keys", cache.everything, before)
    return buffer[: len(q)]


def metadata_of(shard: KVShard, table: Tensor) -> SimpleNamespace:
    """DeepseekV32IndexerMetadata: lengths are those of requests, bounds of chunks this rank's."""
    lens, q_lens = LENGTHS[DECODES:], Q_LENS[DECODES:]
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
            cu_seqlen_ks=torch.tensor(first[each], dtype=torch.int32),
            cu_seqlen_ke=torch.tensor(last[each], dtype=torch.int32),
            cu_seq_lens=starts(lens, CPU),
            local_cu_seq_lens=starts(local, CPU),
            total_seq_lens=sum(lens),
            token_start=decode_tokens + each.start,
            token_end=decode_tokens + each.stop,
        )
        for each in CHUNKS
    ]
    per_request = torch.tensor(Q_LENS[:DECODES], dtype=torch.int32)
    return SimpleNamespace(
        seq_lens=torch.tensor(LENGTHS, dtype=torch.int32),
        max_seq_len=max(LENGTHS),
        slot_mapping=torch.empty(0, dtype=torch.int64),
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


def check_same(selected: Tensor, group: dist.ProcessGroup) -> None:
    for other in gathered(selected, group):
        assert_same_bits("selection", other, selected)


def check_attention(
    shard: KVShard,
    group: dist.ProcessGroup,
    kind: str,
    rows: list[Tensor],
    q: Tensor,
    selected: Tensor,
) -> None:
    local = [shard.local_count(len(each)) for each in rows]
    cache = cache_of(kind, local, CPU)
    for request, each in enumerate(rows):
        if local[request]:
            slots = cache.slots(request, local[request])
            cache.pool.layer(0).write(slots, each[own(shard, len(each))])
    out, lse = calls.sparse(
        (q[..., :512], q[..., 512:]), cache.pool, selected, cache.table, starts(Q_LENS, CPU), SCALE,
        shard=shard,
    )  # fmt: skip
    merged = mlakit.merge_states(gathered(out, group), gathered(lse, group))
    everything = torch.cat([_as_stored(kind, each) for each in rows])
    request_of = torch.arange(len(Q_LENS)).repeat_interleave(torch.tensor(Q_LENS))
    offset = starts([len(each) for each in rows], CPU)[request_of][:, None]
    physical = torch.where(selected >= 0, selected + offset, -1)
    exact = reference.sparse_mla(q, everything, physical, softmax_scale=SCALE, v_width=512)
    errors = (merged[0].double() - exact[0]).norm(dim=-1)
    assert bool((errors <= 1e-2 * exact[0].norm(dim=-1)).all()), errors.max()
    torch.testing.assert_close(merged[1].double(), exact[1], rtol=0, atol=2e-3)


def _as_stored(kind: str, rows: Tensor) -> Tensor:
    cache = cache_of(kind, [len(rows)], CPU)
    slots = cache.slots(0, len(rows))
    cache.pool.layer(0).write(slots, rows)
    return cache.pool.layer(0).read(slots, torch.float64)
