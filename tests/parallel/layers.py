"""What the ranks do in the tests of context-parallel layers: every function checks its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from mlakit import EvenSplit
from mlakit.cache import KVShard, PagedLatentCache, request_slots
from mlakit.layer import MLAAttention
from mlakit.steps import CachedBatch
from mlakit.tools.testing import assert_same_bits
from tests.layer.serving import Server

Group = dist.ProcessGroup
LENGTHS = (45, 23, 1)
# prompts in pieces, several queries per request, requests without new tokens, then decode steps; of
# the last request all ranks but one have no token
CHUNKS = ((25, 20, 0), (17, 1, 0), (1, 1, 1), (1, 1, 0), (1, 0, 0))


def served(
    layer: MLAAttention,
    inputs: Sequence[Tensor],
    shard: KVShard | None = None,
    splits: int | None = None,
) -> tuple[Tensor, list[Tensor], Server]:
    """(results, the selected rows of each step, the server) of requests served in chunks."""
    lengths = [len(x) if shard is None else shard.local_count(len(x)) for x in inputs]
    server = Server(layer, lengths, page_size=4)
    results, selections = [], []
    for new in CHUNKS:
        x = torch.cat([x[a : a + n] for x, a, n in zip(inputs, server.kv_lens, new, strict=True)])
        options: dict[str, Any] = {}
        if layer.indexer is not None:
            k = layer.indexer.topk
            options["rows"] = torch.empty(len(x), k, dtype=torch.int32)
            selections.append(options["rows"])
        if splits is not None:
            options["plan"] = EvenSplit(splits)
        results.append(layer(x, server.batch(new), index_cache=server.index_cache, **options))
    return torch.cat(results), selections, server


def check_layer(
    group: Group, folder: str, interleave: int, *, is_head_sharded: bool, splits: int | None = None
) -> None:
    """Results, caches and selections are those of one process."""
    generator = torch.Generator().manual_seed(5)
    load: dict[str, Any] = {"dtype": torch.float32}
    whole = MLAAttention.load_safetensors(folder, 0, **load)
    layer = MLAAttention.load_safetensors(
        *(folder, 0),
        tp_group=group if is_head_sharded else None,
        cp_group=group,
        cp_interleave=interleave,
        **load,
    )
    hidden, heads = whole.config.geometry.hidden_size, whole.config.geometry.num_heads
    local = heads // group.size() if is_head_sharded else heads
    assert layer.config.geometry.num_heads == local
    inputs = [torch.randn(n, hidden, generator=generator) for n in LENGTHS]
    shard = KVShard(group.rank(), group.size(), interleave)
    want, want_rows, want_server = served(whole, inputs)
    got, rows, server = served(layer, inputs, shard, splits)
    assert float(want.abs().max()) > 0.5
    torch.testing.assert_close(got, want, rtol=0, atol=3e-5)
    for mine, all_rows in (
        (server.cache, want_server.cache),
        (server.index_cache, want_server.index_cache),
    ):
        if mine is not None and all_rows is not None:
            check_shard_rows(mine, server, all_rows, want_server, shard)
    check_selections(rows, server, want_rows, want_server, shard)


def slots_of_shard(server: Server, whole: Server, shard: KVShard) -> tuple[Tensor, Tensor]:
    """(slots of this rank's tokens here, in the cache of one process), request after request."""
    here, there = [], []
    for request, kv_len in enumerate(whole.kv_lens):
        positions = torch.arange(kv_len)
        owned = positions[shard.owner(positions) == shard.rank]
        here.append(request_slots(server.page_table, 4, request, 0, len(owned)))
        there.append(request_slots(whole.page_table, 4, request, 0, kv_len)[owned])
    return torch.cat(here), torch.cat(there)


def check_shard_rows(
    mine: PagedLatentCache,
    server: Server,
    all_rows: PagedLatentCache,
    whole: Server,
    shard: KVShard,
) -> None:
    """The rank has its tokens, and wrote nothing else."""
    here, there = slots_of_shard(server, whole, shard)
    found, wanted = mine.payload[0].flatten(0, 1), all_rows.payload[0].flatten(0, 1)
    assert_same_bits("rows", found[here], wanted[there])
    others = torch.ones(len(found), dtype=torch.bool)
    others[here] = False
    assert found[others].isnan().all()


def check_selections(
    rows: list[Tensor], server: Server, want: list[Tensor], whole: Server, shard: KVShard
) -> None:
    """The rank's lists are those of one process, without the tokens of other ranks."""
    here, there = slots_of_shard(server, whole, shard)
    moved = dict(zip(there.tolist(), here.tolist(), strict=True))
    assert len(rows) == len(want)
    for found, wanted in zip(rows, want, strict=True):
        assert (wanted >= 0).any()
        for mine, all_ranks in zip(found.tolist(), wanted.tolist(), strict=True):
            owned = [moved[row] for row in all_ranks if row in moved]
            assert mine == owned + [-1] * (len(mine) - len(owned))


def check_shared_selection(group: Group, folder: str) -> None:
    """A layer without an indexer attends to the rows that another layer selected."""
    generator = torch.Generator().manual_seed(6)
    whole = MLAAttention.load_safetensors(folder, 0, dtype=torch.float32)
    layer = MLAAttention.load_safetensors(folder, 0, cp_group=group, dtype=torch.float32)
    x = [torch.randn(n, whole.config.geometry.hidden_size, generator=generator) for n in LENGTHS]
    shard = KVShard(group.rank(), group.size())
    outs = []
    for each, own in ((whole, None), (layer, shard)):
        _, rows, server = served(each, x, own)
        each.indexer = None
        each.config = replace(each.config, selection="shared")
        last = CachedBatch(
            server.cache,
            server.page_table,
            torch.tensor(LENGTHS, dtype=torch.int32),
            torch.tensor([0, 1, 1, 1], dtype=torch.int32),
        )
        outs.append(each(x[0][-1:], last, rows=rows[-1]))
    torch.testing.assert_close(outs[1], outs[0], rtol=0, atol=3e-5)


def check_equal_scores(group: Group, folder: str) -> None:
    """Among keys of equal scores the earliest tokens of all ranks are selected."""
    layer = MLAAttention.load_safetensors(folder, 0, cp_group=group, dtype=torch.float32)
    assert layer.indexer is not None
    layer.indexer.weights_proj.weight.data.zero_()
    x = [torch.randn(n, layer.config.geometry.hidden_size) for n in LENGTHS]
    shard = KVShard(group.rank(), group.size())
    _, rows, server = served(layer, x, shard)
    first = torch.arange(layer.indexer.topk)
    count = int((shard.owner(first) == shard.rank).sum())
    want = request_slots(server.page_table, 4, 0, 0, count).tolist()
    assert rows[-1].tolist() == [want + [-1] * (layer.indexer.topk - count)]
