"""vLLM-shaped tensors into the entry calls, compared with the oracles; on a GPU in graphs too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mlakit
from mlakit import KVShard, PagedLatentCache, UnsupportedError, reference
from mlakit.integrations import steps
from mlakit.integrations.vllm import calls, selection
from mlakit.tools.testing import assert_matches, assert_same_bits, poison
from tests.integrations.vllm.shapes import (
    CACHES,
    INDEX_WIDTH,
    LAYER,
    OTHER_ROWS,
    ROW,
    SCALE,
    Cache,
    cache_of,
    index_cache_of,
    index_metadata,
    of_earlier_release,
    starts,
)

HEADS = 16
# the last two are the padding of a CUDA graph
LENGTHS = [70, 300, 1, 129, 0, 0]


def lens(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def queries(tokens: int, device: torch.device, heads: int = HEADS) -> Tensor:
    torch.manual_seed(11)
    return torch.randn(tokens, heads, ROW.width, device=device).bfloat16()


def parts(q: Tensor) -> tuple[Tensor, Tensor]:
    """As vLLM hands it over: the product with W_UK, and a view of the rotated columns."""
    return q[..., :512].clone(), q[..., 512:]


def check_decode(
    results: tuple[Tensor, Tensor], q: Tensor, rows: list[Tensor], q_lens: list[int]
) -> None:
    exact, naive = (
        reference.mla_decode(q.cpu(), rows, q_lens, softmax_scale=SCALE, v_width=512, dtype=dtype)
        for dtype in (torch.float64, torch.float32)
    )
    assert_matches("out", results[0].cpu(), exact[0], naive[0])
    torch.testing.assert_close(results[1].cpu().double(), exact[1], rtol=0, atol=2e-3)


@pytest.mark.parametrize("heads", [HEADS, 96], ids=["16 heads", "Kimi K3's 96"])
@pytest.mark.parametrize("kind", CACHES)
def test_one_query_per_request_over_strided_blocks(kind, heads, device):
    cache = cache_of(kind, LENGTHS, device)
    q = queries(len(LENGTHS), device, heads)
    batch = calls.decode_batch(
        cache.table, lens(LENGTHS, device), starts([1] * len(LENGTHS), device), 1, len(LENGTHS)
    )
    pool = steps.Pools(ROW).of(cache.kv_cache, cache.k_scale)
    results = steps.decode(parts(q), pool, batch, SCALE)
    check_decode(results, q, cache.rows(LENGTHS), [int(length > 0) for length in LENGTHS])
    first = batch.plan
    again = steps.decode(parts(q), pool, batch, SCALE)
    assert batch.plan is first  # another layer of the step takes the plan of the first
    assert_same_bits("out", again[0], results[0])


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("kind", ["float", "fp8"])
@pytest.mark.parametrize("row", OTHER_ROWS, ids=["256 + 64", "512 + 0"])
def test_rows_of_other_models(row, kind, drafts, device):
    """A step writes the newest rows of requests, and attends to them among all others."""
    q_lens = [3, 4, 1, 2, 0, 0] if drafts else [1, 1, 1, 1, 0, 0]
    latent, tokens = row.kv_lora_rank, sum(q_lens)
    cache = cache_of(kind, LENGTHS, device, row=row)
    torch.manual_seed(11)
    q = torch.randn(tokens, HEADS, row.width, device=device).bfloat16()
    kv_c = torch.randn(tokens, latent, device=device).bfloat16()
    k_pe = torch.randn(tokens, 1, row.qk_rope_head_dim, device=device).bfloat16()
    newest = [
        cache.slots(request, length)[length - queries_of :]
        for request, (length, queries_of) in enumerate(zip(LENGTHS, q_lens, strict=True))
        if queries_of
    ]
    pool = steps.Pools(row).of(cache.kv_cache, cache.k_scale)
    calls.update_cache(kv_c, k_pe, pool, torch.cat(newest))
    rows = cache.rows(LENGTHS)
    stored = torch.cat([rows[i][len(rows[i]) - n :] for i, n in enumerate(q_lens) if n])
    given = torch.cat([kv_c, k_pe[:, 0]], -1).cpu().double()
    rtol, atol = (1 / 16, 1e-3) if kind == "fp8" else (0, 0)  # the step of e4m3
    torch.testing.assert_close(stored, given, rtol=rtol, atol=atol)
    batch = calls.decode_batch(
        cache.table, lens(LENGTHS, device), starts(q_lens, device), max(q_lens), tokens
    )
    out, lse = steps.decode((q[..., :latent].clone(), q[..., latent:]), pool, batch, SCALE)
    exact, naive = (
        reference.mla_decode(
            q.cpu(), rows, q_lens, softmax_scale=SCALE, v_width=latent, dtype=dtype
        )
        for dtype in (torch.float64, torch.float32)
    )
    assert_matches("out", out.cpu(), exact[0], naive[0])
    torch.testing.assert_close(lse.cpu().double(), exact[1], rtol=0, atol=2e-3)


@pytest.mark.parametrize("kind", CACHES)
def test_drafts_with_padded_rows(kind, device):
    q_lens = [3, 4, 1, 2, 0, 0]
    cache = cache_of(kind, LENGTHS, device)
    q = queries(sum(q_lens) + 5, device)
    poison(q[sum(q_lens) :])
    batch = calls.decode_batch(
        cache.table, lens(LENGTHS, device), starts(q_lens, device), 4, len(q)
    )
    out, lse = steps.decode(parts(q), cache.pool, batch, SCALE)
    real = sum(q_lens)
    check_decode((out[:real], lse[:real]), q[:real], cache.rows(LENGTHS), q_lens)


@pytest.mark.parametrize("interleave", [None, 1, 16])
def test_drafts_whose_tokens_see_each_other(interleave, device):
    """vLLM says of such a step that a request has one query, and how many tokens there are."""
    whole, q_lens = [70, 300, 3, 129, 0], [3, 3, 3, 3, 0]
    torch.manual_seed(5)
    rows = [torch.randn(length, ROW.width).bfloat16().double() for length in whole]
    q = queries(sum(q_lens), device)
    shards = [None] if interleave is None else [KVShard(rank, 2, interleave) for rank in range(2)]
    results = []
    for shard in shards:
        seen = [row if shard is None else row[shard.owner(torch.arange(len(row))) == shard.rank]
                for row in rows]  # fmt: skip
        cache = cache_of("float", [len(row) for row in seen], device)
        for request, row in enumerate(seen):
            if len(row):
                cache.pool.layer(0).write(cache.slots(request, len(row)), row.float().to(device))
        batch = calls.decode_batch(
            cache.table,
            lens([len(row) for row in seen], device),
            starts(q_lens, device),
            1,
            sum(q_lens),
            global_seq_lens=lens(whole, device),
            shard=shard,
        )
        batch.mask = mlakit.NULL
        results.append(steps.decode(parts(q), cache.pool, batch, SCALE))
    out, lse = (torch.stack(each) for each in zip(*results, strict=True))
    merged = mlakit.merge_states(out, lse)
    exact = reference.mla_decode(
        q.cpu(), rows, q_lens, softmax_scale=SCALE, v_width=512, mask=mlakit.NULL
    )
    errors = (merged[0].cpu().double() - exact[0]).norm(dim=-1)
    assert bool((errors <= 1e-2 * exact[0].norm(dim=-1)).all())
    torch.testing.assert_close(merged[1].cpu().double(), exact[1], rtol=0, atol=2e-3)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("num_splits", [None, 3])
def test_a_request_alone_has_the_bits_that_it_has_in_a_batch(kind, heads, num_splits, device):
    lengths = [9000, 64, 4097, 1, 300]
    cache = cache_of(kind, lengths, device)
    q = queries(len(lengths), device, heads)
    pool = steps.Pools(ROW).of(cache.kv_cache, cache.k_scale)

    def decode(requests: slice) -> tuple[Tensor, Tensor]:
        of = lengths[requests]
        batch = calls.decode_batch(
            cache.table[requests], lens(of, device), starts([1] * len(of), device), 1, len(of),
            is_batch_invariant=True, num_splits=num_splits,
        )  # fmt: skip
        return steps.decode(parts(q[requests]), pool, batch, SCALE)

    together = decode(slice(None))
    for request in range(len(lengths)):
        alone = decode(slice(request, request + 1))
        for name, one, several in zip(("out", "lse"), alone, together, strict=True):
            assert_same_bits(name, one[0], several[request])


def test_queries_as_a_product_of_heads_leaves_them(device):
    """vLLM multiplies by W_UK head by head: a head's tokens lie together."""
    cache = cache_of("float", LENGTHS, device)
    q = queries(len(LENGTHS), device)
    by_heads = q[..., :512].transpose(0, 1).contiguous().transpose(0, 1)
    results = []
    for latent in (by_heads, q[..., :512].contiguous()):
        batch = calls.decode_batch(
            cache.table, lens(LENGTHS, device), starts([1] * len(LENGTHS), device), 1, len(LENGTHS)
        )
        results.append(steps.decode((latent, q[..., 512:]), cache.pool, batch, SCALE))
    assert_same_bits("out", results[0][0], results[1][0])
    check_decode(results[0], q, cache.rows(LENGTHS), [int(length > 0) for length in LENGTHS])


@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize("drafts", [False, True])
def test_shards_of_a_context_parallel_group(drafts, interleave, device):
    whole = [70, 300, 1, 129, 0]
    q_lens = [3, 4, 1, 2, 0] if drafts else [1, 1, 1, 1, 1]
    torch.manual_seed(5)
    rows = [torch.randn(length, ROW.width).bfloat16().double() for length in whole]
    q = queries(sum(q_lens), device)
    results = []
    for rank in range(2):
        shard = KVShard(rank, 2, interleave)
        local = [shard.local_count(length) for length in whole]
        cache = cache_of("float", local, device)
        for request, length in enumerate(whole):
            own = shard.owner(torch.arange(length)) == rank
            if local[request]:
                slots = cache.slots(request, local[request])
                cache.pool.layer(0).write(slots, rows[request][own].float().to(device))
        batch = calls.decode_batch(
            cache.table,
            lens(local, device),
            starts(q_lens, device),
            max(q_lens),
            sum(q_lens),
            global_seq_lens=lens(whole, device),
            shard=shard,
        )
        assert (batch.shard is not None) == drafts
        results.append(steps.decode(q, cache.pool, batch, SCALE))
    out, lse = (torch.stack(each) for each in zip(*results, strict=True))
    merged = mlakit.merge_states(out, lse)
    seen = [length if length else 0 for length in q_lens]
    exact = reference.mla_decode(
        q.cpu(), rows, [n if whole[i] else 0 for i, n in enumerate(seen)],
        softmax_scale=SCALE, v_width=512,
    )  # fmt: skip
    errors = (merged[0].cpu().double() - exact[0]).norm(dim=-1)
    assert bool((errors <= 1e-2 * exact[0].norm(dim=-1)).all())
    torch.testing.assert_close(merged[1].cpu().double(), exact[1], rtol=0, atol=2e-3)


def test_a_shard_with_drafts_needs_global_lengths():
    table, length = torch.zeros(1, 1, dtype=torch.int32), lens([4], torch.device("cpu"))
    with pytest.raises(ValueError, match="global_seq_lens must be given"):
        calls.decode_batch(table, length, length, 2, 2, shard=KVShard(0, 2))


def test_e4m3_queries_over_e4m3_rows(device):
    cache = cache_of("fp8", LENGTHS, device)
    q_scale = torch.tensor(0.25, device=device)
    q = (queries(len(LENGTHS), device).float() / 0.25).clamp(-448, 448).to(torch.float8_e4m3fn)
    batch = calls.decode_batch(
        cache.table, lens(LENGTHS, device), starts([1] * len(LENGTHS), device), 1, len(LENGTHS)
    )
    out, lse = steps.decode(q, cache.pool, batch, SCALE, q_scale)
    exact = reference.mla_decode(
        q.cpu().double() * 0.25,
        cache.rows(LENGTHS),
        [int(length > 0) for length in LENGTHS],
        softmax_scale=SCALE,
        v_width=512,
    )
    assert out.dtype == torch.bfloat16
    errors = (out.cpu().double() - exact[0]).norm(dim=-1)
    assert bool((errors <= 4e-2 * exact[0].norm(dim=-1)).all()), errors
    torch.testing.assert_close(lse.cpu().double(), exact[1], rtol=0, atol=2e-2)


@pytest.mark.parametrize("kind", CACHES)
def test_the_cache_update_writes_the_rows_at_slots_and_nothing_else(kind, device):
    cache = cache_of(kind, [40, 30], device)
    torch.manual_seed(1)
    tokens = 9
    kv_c = torch.randn(tokens, 512, device=device).bfloat16()
    k_pe = torch.randn(tokens, 3, 64, device=device).bfloat16()[:, 1:2]  # a view, as after a split
    slots = torch.tensor([[5, -1, 129, 64, -1, 2, 77]], device=device)  # fewer than tokens
    poison(kv_c[7:])
    poison(kv_c[1])
    before = cache.everything.clone()
    # the tensor of the layer is bytes when it is written, e4m3 when it is read
    pool = steps.Pools(ROW).of(cache.everything[:, LAYER], cache.k_scale)
    calls.update_cache(kv_c, k_pe, pool, slots)

    kept = [i for i, slot in enumerate(slots.flatten().tolist()) if slot >= 0]
    rows = torch.cat([kv_c, k_pe[:, 0]], -1)[kept]
    scale = {"tensor_scale": 0.5} if kind == "fp8" else {}
    payload, _ = pool.codec.encode(rows.float(), **scale)
    want = before.clone()
    flat = want[:, LAYER].contiguous()
    at = slots.flatten()[kept]
    flat[at // 64, at % 64] = payload.view(flat.dtype)
    want[:, LAYER] = flat
    assert_same_bits("cache", cache.everything, want)


def test_a_layer_wraps_its_tensor_once(device):
    cache = cache_of("fp8", [3], device)
    pools = steps.Pools(ROW)
    first = pools.of(cache.kv_cache, cache.k_scale)
    view = cache.everything[:, LAYER].view(torch.float8_e4m3fn)  # vLLM makes one at every call
    assert pools.of(view, cache.k_scale) is first
    assert pools.of(cache.kv_cache[1:], cache.k_scale) is not first


def sparse_step(cache: Cache, q_lens: list[int], device: torch.device, k: int = 64) -> Tensor:
    """Lists of positions: -1 where a query sees fewer than k, and in the middle."""
    torch.manual_seed(2)
    made = torch.full((sum(q_lens) + 4, k), -1, dtype=torch.int32)
    token = 0
    for length, queries_of in zip(LENGTHS, q_lens, strict=True):
        for i in range(queries_of):
            visible = length - queries_of + i + 1
            chosen = torch.randperm(visible)[:k].sort().values
            made[token, : len(chosen)] = chosen.to(torch.int32)
            made[token, 3::7] = -1
            token += 1
    made[token:] = 10**6  # the buffer after the tokens of this step
    return made.to(device)


def rows_of(cache: Cache, topk: Tensor, q_lens: list[int]) -> Tensor:
    rows = topk.cpu().clone()
    token = 0
    for request, queries_of in enumerate(q_lens):
        slots = cache.slots(request, LENGTHS[request]).cpu()
        for _ in range(queries_of):
            found = rows[token] >= 0
            rows[token, found] = slots[rows[token, found].long()].to(torch.int32)
            token += 1
    return rows[:token]


@pytest.mark.slow
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("kind", CACHES)
def test_tokens_attend_to_their_selection(kind, with_sink, device):
    q_lens = [3, 40, 1, 2, 0, 0]
    cache = cache_of(kind, LENGTHS, device)
    topk = sparse_step(cache, q_lens, device)
    tokens = sum(q_lens)
    q = queries(tokens + 3, device)  # padded by a CUDA graph
    sink = torch.linspace(-2, 6, HEADS) if with_sink else None
    results = calls.sparse(
        parts(q), cache.pool, topk[: tokens + 3], cache.table, starts(q_lens, device), SCALE,
        None if sink is None else sink.to(device),
    )  # fmt: skip
    everything = torch.zeros(cache.pool.num_pages * cache.pool.page_size, ROW.width).double()
    for request, rows in enumerate(cache.rows(LENGTHS)):
        everything[cache.slots(request, LENGTHS[request]).cpu()] = rows
    exact, naive = (
        reference.sparse_mla(
            q[:tokens].cpu(), everything, rows_of(cache, topk, q_lens),
            softmax_scale=SCALE, v_width=512, dtype=dtype, sink=sink,
        )
        for dtype in (torch.float64, torch.float32)
    )  # fmt: skip
    assert_matches("out", results[0][:tokens].cpu(), exact[0], naive[0])
    torch.testing.assert_close(results[1][:tokens].cpu().double(), exact[1], rtol=0, atol=2e-3)
    assert not results[0][tokens:].any()  # padding attends to nothing


def test_sinks_are_those_of_the_heads_of_one_rank():
    calls.check_sinks("NAME", torch.zeros(16), 16, context_ranks=1)
    with pytest.raises(ValueError, match=r"^NAME: sinks\.shape\[0\] \(heads\) must .*, got 16"):
        calls.check_sinks("NAME", torch.zeros(16), 32, context_ranks=1)
    with pytest.raises(TypeError, match=r"^NAME: sinks must be float32, got "):
        calls.check_sinks("NAME", torch.zeros(16).bfloat16(), 16, context_ranks=1)
    with pytest.raises(UnsupportedError, match=r"^NAME: sinks need .* of 1, got 2"):
        calls.check_sinks("NAME", torch.zeros(16), 16, context_ranks=2)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("heads", [16, 128])
def test_a_selection_by_queries_as_a_product_of_heads_leaves_them(kind, heads, device):
    """Those of a head together, of every head's product or of a slice of more tokens."""
    q_lens = [3, 4, 1, 2, 0, 0]
    cache, tokens = cache_of(kind, LENGTHS, device), 10
    topk, q = sparse_step(cache, q_lens, device)[:tokens], queries(tokens, device, heads)
    longer = torch.full((heads, tokens + 3, 512), torch.nan, device=device).bfloat16()
    longer[:, :tokens] = q[..., :512].transpose(0, 1)
    results = [
        calls.sparse(
            (latent, q[..., 512:]), cache.pool, topk, cache.table, starts(q_lens, device), SCALE
        )
        for latent in (
            q[..., :512].contiguous(),
            q[..., :512].transpose(0, 1).contiguous().transpose(0, 1),
            longer.transpose(0, 1)[:tokens],
        )
    ]
    assert results[0][0].abs().amax((1, 2)).min() > 0
    for other in results[1:]:
        for name, one, wanted in zip(("out", "lse"), other, results[0], strict=True):
            assert_same_bits(name, one, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [True, False])
def test_expanded_attention_of_new_tokens_and_of_a_chunk_of_context(is_causal, device):
    q_lens = [33, 1, 130]
    kv_lens = q_lens if is_causal else [64, 0, 200]
    heads, nope, rope, v_width = 8, 128, 64, 128
    torch.manual_seed(4)
    tokens, keys = sum(q_lens), sum(kv_lens)
    q = torch.randn(tokens, heads, nope + rope, device=device).bfloat16()
    kv = torch.randn(keys, heads, nope + v_width, device=device).bfloat16()  # kv_b_proj's result
    k_pe = torch.randn(keys, 1, rope, device=device).bfloat16()
    k = torch.cat([kv[..., :nope], k_pe.expand(-1, heads, -1)], -1)
    v = kv[..., nope:]  # a view
    q_starts, kv_starts = starts(q_lens, device), starts(kv_lens, device)
    given = torch.empty(tokens, heads, v_width, dtype=q.dtype, device=device)
    out, lse = calls.prefill(
        q, k, v, q_starts, kv_starts, nope, SCALE, is_causal=is_causal, out=given
    )
    assert out.data_ptr() == given.data_ptr()
    assert lse.shape == (heads, tokens)
    exact, naive = (
        reference.mla_prefill(
            q.cpu(), kv[..., :nope].cpu(), k_pe[:, 0].cpu(), v.cpu(), q_starts.tolist(),
            kv_starts.tolist(), softmax_scale=SCALE, dtype=dtype,
            mask=mlakit.CAUSAL if is_causal else mlakit.NULL,
            weights_dtype=torch.bfloat16 if dtype == torch.float32 else None,
        )
        for dtype in (torch.float64, torch.float32)
    )  # fmt: skip
    assert_matches("out", out.cpu(), exact[0], naive[0])
    torch.testing.assert_close(lse.T.cpu().double(), exact[1], rtol=0, atol=2e-3)


INDEX_LENGTHS = [200, 70, 90, 300, 33]
INDEX_QUERIES = [1, 3, 20, 150, 33]
DECODES = 2


def index_queries(tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    torch.manual_seed(12)
    q = torch.randn(tokens, 32, INDEX_WIDTH, device=device).to(torch.float8_e4m3fn)
    return q, torch.rand(tokens, 32, device=device)


def fill_index(cache, lengths: list[int], device: torch.device) -> None:
    for request, length in enumerate(lengths):
        if length == 0:
            continue
        position = torch.arange(length, device=device)
        size = cache.pool.page_size
        slots = cache.table[request, position // size].long() * size + position % size
        keys = torch.randn(length, INDEX_WIDTH, device=device).bfloat16()
        calls.append_index_keys(keys, cache.pool, slots, power_of_two_scales=True)


def check_selection(selected: Tensor, q: Tensor, weights: Tensor, keys, q_lens, k: int) -> None:
    """The scores of what is selected are the k best, up to rounding; each once, and visible."""
    logits = reference.indexer_logits(q.cpu().double(), weights.cpu(), keys, q_lens)
    for token, row in enumerate(logits):
        found = selected[token][selected[token] >= 0].long().cpu()
        visible = int(row.isfinite().sum())
        assert len(found) == min(k, visible)
        assert len(found.unique()) == len(found)
        assert bool(row[found].isfinite().all())
        best = row.topk(len(found)).values
        torch.testing.assert_close(row[found].sort(descending=True).values, best, rtol=0, atol=0.6)


@pytest.mark.parametrize("release", ["0.32", "0.26", "0.26-flattened"])
@pytest.mark.parametrize("chunks", [[slice(0, 203)], [slice(0, 100), slice(100, 203)]])
def test_the_indexer_selects_for_decode_requests_and_chunks_of_prefill(chunks, release, device):
    cache = index_cache_of(INDEX_LENGTHS, device)
    fill_index(cache, INDEX_LENGTHS, device)
    tokens, k = sum(INDEX_QUERIES), 64
    q, weights = index_queries(tokens + 6, device)
    metadata = index_metadata(cache, INDEX_LENGTHS, INDEX_QUERIES, DECODES, chunks)
    if release != "0.32":
        metadata = of_earlier_release(metadata, release.endswith("flattened"))
    buffer = torch.full((tokens + 10, k), 10**6, dtype=torch.int32, device=device)
    before = cache.everything.clone()
    selection.select_step(
        q, None, weights, buffer, cache.pool, metadata, max_model_len=512, power_of_two_scales=True
    )
    check_selection(
        buffer[:tokens], q[:tokens], weights[:tokens], cache.keys(INDEX_LENGTHS), INDEX_QUERIES, k
    )
    assert bool((buffer[tokens:] == 10**6).all())
    assert_same_bits("index keys", cache.everything, before)


def test_the_indexer_selects_for_one_query_per_request_of_an_earlier_release(device):
    lengths = [200, 70]
    cache = index_cache_of(lengths, device)
    fill_index(cache, lengths, device)
    q, weights = index_queries(2, device)
    metadata = of_earlier_release(index_metadata(cache, lengths, [1, 1], 2, []), False)
    buffer = torch.full((2, 64), 10**6, dtype=torch.int32, device=device)
    selection.select_step(
        q, None, weights, buffer, cache.pool, metadata, max_model_len=512, power_of_two_scales=True
    )
    check_selection(buffer, q, weights, cache.keys(lengths), [1, 1], 64)


def test_the_indexer_appends_keys_and_leaves_an_unused_selection(device):
    cache = index_cache_of([64], device)
    keys = torch.randn(4, INDEX_WIDTH, device=device).bfloat16()
    metadata = index_metadata(cache, [64], [1], 1, [])
    metadata.slot_mapping = torch.tensor([7, -1, 130], device=device)
    other = PagedLatentCache.allocate(mlakit.RowShape(INDEX_WIDTH, 0), "fp8_token", num_pages=1)
    other.layer(0).write(torch.tensor([0, 1]), keys[[0, 2]].float().cpu(), power_of_two_scales=True)
    buffer = torch.full((1, 8), 10**6, dtype=torch.int32, device=device)
    q, weights = index_queries(1, device)
    selection.select_step(
        q, keys, weights, buffer, cache.pool, metadata,
        max_model_len=64, power_of_two_scales=True, is_unused=True,
    )  # fmt: skip
    got = cache.pool.layer(0).read(torch.tensor([7, 130], device=device)).cpu()
    assert_same_bits("keys", got, other.layer(0).read(torch.tensor([0, 1])))
    assert bool((buffer == 10**6).all())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("drafts", [1, 2])
def test_a_graph_decodes_with_other_lengths_than_it_was_captured_with(kind, drafts):
    device = torch.device("cuda")
    longest = [257, 300, 64, 190, 5, 2]
    cache = cache_of(kind, longest, device)
    tokens = len(longest) * drafts
    static_q = queries(tokens, device)
    static_lens, static_starts = lens(longest, device), starts([drafts] * len(longest), device)
    slots = torch.full((tokens,), -1, device=device)
    kv_c = torch.randn(tokens, 512, device=device).bfloat16()
    k_pe = torch.randn(tokens, 1, 64, device=device).bfloat16()

    def step() -> list[tuple[Tensor, Tensor]]:
        batch = calls.decode_batch(cache.table, static_lens, static_starts, drafts, tokens)
        calls.update_cache(kv_c, k_pe, cache.pool, slots)
        # two layers of one step
        return [steps.decode(parts(static_q), cache.pool, batch, SCALE) for _ in range(2)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # the inputs are written there
    with torch.cuda.stream(side):
        step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for active, lengths in ((6, longest), (4, [70, 299, 2, 129, 0, 0]), (1, [256, 0, 0, 0, 0, 0])):
        q_lens = [drafts] * active + [0] * (len(longest) - active)
        static_q.copy_(torch.randn(static_q.shape, device=device))
        static_lens.copy_(lens(lengths, device))
        static_starts.copy_(starts(q_lens, device))
        slots.fill_(-1)
        last = cache.slots(0, lengths[0])[-1]
        slots[0] = last  # the newest token of the first request
        graph.replay()
        real = tokens if drafts == 1 else active * drafts
        oracle_q_lens = [int(length > 0) for length in lengths] if drafts == 1 else q_lens
        rows = cache.rows(lengths)
        for out, lse in results:
            check_decode((out[:real], lse[:real]), static_q[:real], rows, oracle_q_lens)


@pytest.mark.gpu
def test_a_graph_selects_and_attends_with_other_lengths():
    device = torch.device("cuda")
    longest, k = [257, 300, 64, 190], 64
    index, cache = index_cache_of(longest, device), cache_of("fp8_ds_mla", longest, device)
    fill_index(index, longest, device)
    index.table.copy_(cache.table)
    fill_index(index, longest, device)
    q_index, weights = index_queries(4, device)
    q = queries(4, device)
    metadata = index_metadata(index, longest, [1] * 4, 4, [])
    buffer = torch.full((8, k), 10**6, dtype=torch.int32, device=device)
    q_starts = starts([1] * 4, device)

    def step() -> tuple[Tensor, Tensor]:
        selection.select_step(
            q_index, None, weights, buffer, index.pool, metadata,
            max_model_len=320, power_of_two_scales=True,
        )  # fmt: skip
        return calls.sparse(parts(q), cache.pool, buffer[:4], cache.table, q_starts, SCALE)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # the inputs are written there
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for lengths in ([257, 300, 64, 190], [70, 299, 2, 0]):
        metadata.seq_lens.copy_(lens(lengths, device))
        graph.replay()
        keys = [each for each in index.keys(lengths) if len(each)]
        seen = len(keys)
        check_selection(buffer[:seen], q_index[:seen], weights[:seen], keys, [1] * seen, k)
        rows = cache.rows(lengths)
        for token, length in enumerate(lengths):
            chosen = buffer[token][buffer[token] >= 0].long().cpu()
            assert len(chosen) == min(k, length)
            own = rows[token][chosen]
            exact = reference.mla_decode(
                q[token : token + 1].cpu(), [own], [int(length > 0)],
                softmax_scale=SCALE, v_width=512,
            )  # fmt: skip
            error = (out[token].cpu().double() - exact[0][0]).norm(dim=-1)
            assert bool((error <= 1e-2 * exact[0][0].norm(dim=-1)).all())
            torch.testing.assert_close(lse[token].cpu().double(), exact[1][0], rtol=0, atol=2e-3)
