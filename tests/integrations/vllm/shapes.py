"""Tensors as vLLM has them: blocks among those of other layers, padded requests, −1 slots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from mlakit import PagedLatentCache, RowShape
from mlakit.integrations import steps
from mlakit.tools.testing import poison

ROW = RowShape(512, 64)
OTHER_ROWS = (RowShape(256, 64), RowShape(512, 0))  # Mistral 4's, and rows without positions
LAYERS, LAYER = 3, 1
SCALE = 0.05
K_SCALE = 0.5
CACHES = ("float", "fp8", "fp8_ds_mla")
INDEX_WIDTH = 128


class Cache(NamedTuple):
    """One layer of a pool of blocks, and its rows as an oracle reads them."""

    everything: Tensor  # [blocks, layers, page, row]
    kv_cache: Tensor  # [blocks, page, row]: one layer, blocks lie apart
    k_scale: Tensor
    pool: PagedLatentCache
    table: Tensor  # [requests, max_blocks] int32, anything in unused entries

    def slots(self, request: int, length: int) -> Tensor:
        """Of the first tokens of a request."""
        position = torch.arange(length, device=self.table.device)
        size = self.pool.page_size
        return self.table[request, position // size].long() * size + position % size

    def rows(self, lengths: list[int]) -> list[Tensor]:
        """Per request [length, width] float64 on the host."""
        layer = self.pool.layer(0)
        return [
            layer.read(self.slots(request, length), torch.float64).cpu()
            for request, length in enumerate(lengths)
        ]


def block_table(lengths: list[int], page: int, blocks: int, device: torch.device) -> Tensor:
    """Shuffled blocks; entries that no token needs are no block."""
    generator = torch.Generator().manual_seed(3)
    order = torch.randperm(blocks, generator=generator).tolist()
    widest = max(-(-length // page) for length in lengths) + 2
    table = torch.full((len(lengths), widest), 2**31 - 1, dtype=torch.int32)
    for request, length in enumerate(lengths):
        for entry in range(-(-length // page)):
            table[request, entry] = order.pop()
    return table.to(device)


def cache_of(
    kind: str,
    lengths: list[int],
    device: torch.device,
    page: int = 64,
    dtype=torch.bfloat16,
    row: RowShape = ROW,
) -> Cache:
    """Random rows for the tokens of all requests, NaN in all others."""
    torch.manual_seed(7)
    blocks = sum(-(-length // page) for length in lengths) + 3
    width = 656 if kind == "fp8_ds_mla" else row.width
    stored = dtype if kind == "float" else torch.uint8
    everything = torch.zeros(blocks, LAYERS, page, width, dtype=stored, device=device)
    poison(everything)
    kv_cache = everything[:, LAYER]
    if kind == "fp8":
        kv_cache = kv_cache.view(torch.float8_e4m3fn)  # as vLLM does before it attends
    k_scale = torch.tensor(K_SCALE, device=device)
    pool = steps.wrap(kv_cache, row, k_scale)
    cache = Cache(everything, kv_cache, k_scale, pool, block_table(lengths, page, blocks, device))
    for request, length in enumerate(lengths):
        if length:
            rows = torch.randn(length, row.width, device=device)
            pool.layer(0).write(cache.slots(request, length), rows)
    return cache


class IndexCache(NamedTuple):
    """Index keys [blocks, page, 132] bytes among those of other layers."""

    everything: Tensor
    pool: PagedLatentCache
    table: Tensor

    def keys(self, lengths: list[int]) -> list[Tensor]:
        size = self.pool.page_size
        found = []
        for request, length in enumerate(lengths):
            position = torch.arange(length, device=self.table.device)
            slots = self.table[request, position // size].long() * size + position % size
            found.append(self.pool.layer(0).read(slots, torch.float64).cpu())
        return found


def index_cache_of(lengths: list[int], device: torch.device, page: int = 64) -> IndexCache:
    torch.manual_seed(9)
    blocks = sum(-(-length // page) for length in lengths) + 3
    everything = torch.zeros(
        blocks, LAYERS, page, INDEX_WIDTH + 4, dtype=torch.uint8, device=device
    )
    poison(everything)
    pool = PagedLatentCache.wrap_index_keys(everything[:, LAYER])
    return IndexCache(everything, pool, block_table(lengths, page, blocks, device))


def starts(counts: list[int], device: torch.device) -> Tensor:
    """[0, counts[0], counts[0] + counts[1], …] int32."""
    sums = torch.tensor([0, *counts]).cumsum(0)
    return sums.to(torch.int32).to(device)


def index_metadata(
    cache: IndexCache, lengths: list[int], q_lens: list[int], decodes: int, chunks: list[slice]
) -> SimpleNamespace:
    """DeepseekV32IndexerMetadata of a step: decode requests, then prefill ones in `chunks` of their
    queries, with the fields that vLLM's builder fills in."""
    device = cache.table.device
    prefill_lens, prefill_q = lengths[decodes:], q_lens[decodes:]
    kv_starts = starts(prefill_lens, device)
    first, last = [], []
    for request, (length, queries) in enumerate(zip(prefill_lens, prefill_q, strict=True)):
        begin = sum(prefill_lens[:request])
        first += [begin] * queries
        last += [begin + length - queries + i + 1 for i in range(queries)]
    decode_tokens = sum(q_lens[:decodes])
    made = [
        SimpleNamespace(
            block_table=cache.table[decodes:],
            cu_seqlen_ks=torch.tensor(first[each], dtype=torch.int32, device=device),
            cu_seqlen_ke=torch.tensor(last[each], dtype=torch.int32, device=device),
            cu_seq_lens=kv_starts,
            total_seq_lens=sum(prefill_lens),
            token_start=decode_tokens + each.start,
            token_end=decode_tokens + each.stop,
        )
        for each in chunks
    ]
    per_request = torch.tensor(q_lens[:decodes], dtype=torch.int32, device=device)
    return SimpleNamespace(
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        max_seq_len=max(lengths),
        slot_mapping=torch.empty(0, dtype=torch.int64, device=device),
        num_decodes=decodes,
        num_decode_tokens=decode_tokens,
        num_prefills=len(prefill_q),
        decode=SimpleNamespace(per_req_decode_lens=per_request),
        prefill=SimpleNamespace(chunks=made),
        block_table=cache.table,
    )


def of_earlier_release(metadata: SimpleNamespace, is_flattened: bool) -> SimpleNamespace:
    """The same step as vLLM before 0.32 describes it: only decode requests have a block table.

    is_flattened  every token of them is a request; the last ones are the padding of a CUDA graph
    """
    made = SimpleNamespace(**vars(metadata))
    table, requests = made.block_table[: made.num_decodes], made.num_decodes
    q_lens = made.decode.per_req_decode_lens
    lens = made.seq_lens[:requests]
    del made.block_table
    if is_flattened:
        last = lens.repeat_interleave(q_lens)
        starts_ = (q_lens.cumsum(0) - q_lens).repeat_interleave(q_lens)
        place = torch.arange(len(last), device=lens.device) - starts_
        lens = (last - q_lens.repeat_interleave(q_lens) + place + 1).int()
        table, q_lens = table.repeat_interleave(q_lens, dim=0), torch.ones_like(lens)
    made.decode = SimpleNamespace(
        block_table=table, seq_lens=lens[:, None], decode_lens=q_lens, global_seq_lens=None
    )
    return made
