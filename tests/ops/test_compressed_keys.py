"""Keys of several tokens each: page tables hold the keys, `kv_lens` counts the tokens."""

from __future__ import annotations

import pytest
import torch

from mlakit import PagedLatentCache, RowShape, indexer_logits, indexer_select, mla_decode
from mlakit.cache import request_slots
from mlakit.dispatch import selection
from mlakit.model.masks import compressed_causal
from mlakit.tools.testing import poison

RATE, PAGE, K, SCALE = 4, 4, 3, 0.1
KV_LENS, Q_LENS = (37, 8, 3), (5, 1, 3)


def backend_on(spec, device):
    if spec.backend in ("hopper", "blackwell"):
        pytest.skip("kernels of one architecture refuse this mask")
    if spec.backend == "cpu" and device.type != "cpu":
        pytest.skip("the CPU kernels take CPU tensors only")
    return spec.backend


@pytest.fixture
def problem(device):
    """(arguments of all ops, keys that each query sees, their slots)."""
    generator = torch.Generator().manual_seed(3)
    cache = PagedLatentCache.allocate(RowShape(64, 0), "fp32", num_pages=8, page_size=PAGE)
    poison(cache.payload)
    table, pages = torch.full((3, 3), -1, dtype=torch.int32), torch.randperm(8, generator=generator)
    q = torch.randn(sum(Q_LENS), 6, 64, generator=generator)
    keys, slots = [], []
    for request, (kv_len, q_len) in enumerate(zip(KV_LENS, Q_LENS, strict=True)):
        count = kv_len // RATE
        used = -(-count // PAGE)
        table[request, :used], pages = pages[:used], pages[used:]
        own = request_slots(table, PAGE, request, 0, count)
        cache.layer(0).write(own, torch.randn(count, 64, generator=generator))
        for position in range(kv_len - q_len, kv_len):
            seen = own[: (position + 1) // RATE]
            keys.append(cache.layer(0).read(seen))
            slots.append(seen)
    arguments = {
        "cache": cache.to(device),
        "page_table": table.to(device),
        "kv_lens": torch.tensor(KV_LENS, dtype=torch.int32, device=device),
        "q_starts": torch.tensor([0, 5, 6, 9], dtype=torch.int32, device=device),
        "mask": compressed_causal(RATE),
    }
    return q, arguments, keys, slots


@pytest.mark.parametrize("spec", selection.specs("indexer_logits"), ids=str)
@pytest.mark.parametrize("max_kv_len", [None, KV_LENS[0] // RATE])
def test_the_indexer_scores_finished_keys(max_kv_len, spec, problem, device):
    q, arguments, keys, slots = problem
    weights = torch.randn(len(q), 6, generator=torch.Generator().manual_seed(4))
    given = (q.to(device), weights.to(device))
    common = {**arguments, "max_kv_len": max_kv_len, "backend": backend_on(spec, device)}
    logits = indexer_logits(*given, **common).cpu()
    rows = indexer_select(*given, k=K, **common).cpu()
    for token, (seen, own) in enumerate(zip(keys, slots, strict=True)):
        expected = weights[token] @ (q[token] @ seen.T).relu()
        torch.testing.assert_close(logits[token, : len(seen)], expected, rtol=1e-4, atol=1e-4)
        assert (logits[token, len(seen) :] == -torch.inf).all()
        best = own[expected.topk(min(K, len(seen))).indices]
        assert sorted(rows[token].tolist()) == sorted([*best.tolist(), *[-1] * (K - len(best))])


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_attention_is_over_finished_keys(backend, problem, device):
    if backend == "cpu" and device.type != "cpu":
        pytest.skip("the CPU kernels take CPU tensors only")
    q, arguments, keys, _ = problem
    out, _ = mla_decode(q.to(device), softmax_scale=SCALE, backend=backend, **arguments)
    for token, seen in enumerate(keys):
        expected = (q[token] @ seen.T * SCALE).softmax(-1) @ seen
        torch.testing.assert_close(out[token].cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="values on a GPU are not checked")
def test_a_result_has_a_column_for_each_key(problem, device):
    q, arguments, _, _ = problem
    weights = q.new_ones(len(q), 6)
    with pytest.raises(ValueError, match=r"kv_lens\[0\] must not exceed max_kv_len, 8, got 37$"):
        indexer_logits(q.to(device), weights.to(device), max_kv_len=8, **arguments)
