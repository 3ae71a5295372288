"""Sparse decode as in DeepSeek-V3.2: an indexer selects the cached tokens that a query attends to.

Two pools share the page table: latent rows, which attention reads, and one small index key per
token, by which the indexer scores all cached tokens. One decode step of three requests runs twice:

by ops       `append_rows` of index keys, `indexer_select`, `sparse_mla`, for several k. Plain torch
             scores and selects the same rows and computes full attention over them
by one call  `sparse_step` appends the new token to both pools, selects, attends and projects up.
             Plain torch expands the selected rows to K and V, as an attention without MLA would

    python examples/sparse_decode.py
    python examples/sparse_decode.py --device cuda --heads 128 --lengths 30000 8000 20000

In the random contexts 24 tokens matter to each query, and the indexer knows them. The table shows
what a selection loses: the share of the softmax of full attention that lies on the selected rows,
and the distance to full attention. The exit status is 1 if a selected row or a result differs from
plain torch's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

import mlakit

PAGE_SIZE, RELEVANT = 64, 24
TOPK = (8, 24, 64)
TOLERANCE = 0.02  # a bf16 result has 8 bits of mantissa


class Contexts:
    """Requests with cached latent rows and index keys, and the queries of one decode step."""

    def __init__(self, heads: int, lengths: Sequence[int], device: torch.device) -> None:
        self.model = mlakit.MLAGeometry.preset("deepseek-v3.2").with_heads(heads)
        pages = mlakit.PageAllocator(sum(-(-length // PAGE_SIZE) for length in lengths), PAGE_SIZE)
        # longest first: the requests' pages are not in the order of the batch
        by_length = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        reserved = {i: pages.reserve(lengths[i]) for i in by_length}
        sequences = [reserved[i] for i in range(len(lengths))]
        self.page_table = pages.page_table(sequences, device=device)
        self.kv_lens = pages.kv_lens(sequences, device=device)
        self.slots = [
            mlakit.request_slots(self.page_table, PAGE_SIZE, i, 0, length)
            for i, length in enumerate(lengths)
        ]
        self.cache = mlakit.PagedLatentCache.allocate(
            self.model, "bf16", num_pages=pages.num_pages, page_size=PAGE_SIZE, device=device
        )
        self.index_cache = mlakit.PagedLatentCache.allocate(
            mlakit.RowShape(self.model.index_head_dim, 0),
            "fp8_token",
            num_pages=pages.num_pages,
            page_size=PAGE_SIZE,
            device=device,
        )
        self._fill(lengths, device)

    def _fill(self, lengths: Sequence[int], device: torch.device) -> None:
        """Random rows, keys and queries; some tokens of each request are like its query."""
        g = self.model
        width, index_width = g.row.width, g.index_head_dim
        q = torch.randn(len(lengths), g.num_heads, width)
        index_q = torch.randn(len(lengths), g.index_n_heads, index_width)
        index_weights = torch.rand(len(lengths), g.index_n_heads) / g.index_n_heads
        for i, length in enumerate(lengths):
            rows, keys = torch.randn(length, width), torch.randn(length, index_width)
            relevant = torch.randperm(length)[:RELEVANT]
            rows[relevant] += 0.15 * q[i].sum(0) / g.num_heads**0.5
            keys[relevant] += index_q[i].sum(0) / g.index_n_heads**0.5
            self.cache.layer(0).write(self.slots[i], rows.to(device))
            mlakit.append_rows(keys.to(device), None, self.index_cache, self.slots[i])
        q += 0.5 * q.sum(1, keepdim=True) / g.num_heads**0.5  # heads agree about the tokens
        self.q, self.index_q = (each.to(device, torch.bfloat16) for each in (q, index_q))
        self.index_weights = index_weights.to(device)

    def rows(self, request: int) -> Tensor:
        """The latent rows of a request, float32."""
        return self.cache.layer(0).read(self.slots[request])

    def best(self, request: int, k: int) -> Tensor:
        """The positions of the k best tokens of a request by plain torch, in token order."""
        keys = self.index_cache.layer(0).read(self.slots[request])
        scores = (self.index_q[request].float() @ keys.T).relu()
        total = self.index_weights[request] @ scores
        return total.topk(min(k, len(total))).indices.sort().values


def relative(actual: Tensor, expected: Tensor) -> float:
    """The largest difference of a request, relative to its largest expected value."""
    difference = (actual.float() - expected).flatten(1).abs().amax(1)
    return (difference / expected.flatten(1).abs().amax(1)).max().item()


def by_ops(c: Contexts) -> bool:
    """`indexer_select` and `sparse_mla` for several k, and what the selection loses."""
    g, requests = c.model, range(len(c.kv_lens))
    scale, v_width = g.softmax_scale, g.row.v_width
    weights = [(c.q[i].float() @ c.rows(i).T * scale).softmax(-1) for i in requests]
    full = torch.stack([weights[i] @ c.rows(i)[:, :v_width] for i in requests])
    print(f"{'k':>6}{'same rows':>11}{'kernel error':>14}{'softmax share':>15}{'to full':>9}")
    is_right = True
    for k in (*TOPK, int(c.kv_lens.max())):
        rows = mlakit.indexer_select(
            c.index_q, c.index_weights, c.index_cache, c.page_table, c.kv_lens, k
        )
        out, _, _ = mlakit.sparse_mla(c.q, c.cache, rows, softmax_scale=scale)

        chosen = [c.best(i, k) for i in requests]
        same = all(
            torch.equal(rows[i, : len(best)].long(), c.slots[i][best].long())
            and bool((rows[i, len(best) :] == -1).all())  # k is more than the request has
            for i, best in enumerate(chosen)
        )
        expected = []
        for i, best in enumerate(chosen):
            seen = c.rows(i)[best]
            probabilities = (c.q[i].float() @ seen.T * scale).softmax(-1)
            expected.append(probabilities @ seen[:, :v_width])
        error = relative(out, torch.stack(expected))
        share = min(weights[i][:, best].sum(-1).mean().item() for i, best in enumerate(chosen))
        distance = relative(out, full)
        print(f"{k:>6}{same!s:>11}{error:>14.5f}{share:>15.3f}{distance:>9.3f}")
        is_right &= same and error <= TOLERANCE
    return is_right


def by_one_call(c: Contexts, k: int) -> bool:
    """`sparse_step` of one new token per request, which is the last one of each context."""
    g, batch = c.model, len(c.kv_lens)
    device = c.q.device
    kv_b_proj = torch.randn(g.num_heads * (g.qk_nope_head_dim + g.v_head_dim), g.kv_lora_rank)
    kv_b_proj = (kv_b_proj / g.kv_lora_rank**0.5).to(device, torch.bfloat16)
    freqs = mlakit.rope_table(g, int(c.kv_lens.max()), device=device)
    weights = mlakit.LayerWeights(
        mlakit.UpProjection.from_checkpoint(kv_b_proj, g),
        gamma=torch.ones(g.kv_lora_rank, device=device),
        freqs=freqs,
        softmax_scale=g.softmax_scale,
    )
    q = torch.randn(batch, g.num_heads, g.qk_head_dim).to(device, torch.bfloat16)
    new_latents = torch.randn(batch, g.row.width).to(device, torch.bfloat16)
    new_keys = torch.randn(batch, g.index_head_dim).to(device, torch.bfloat16)
    rows = torch.empty(batch, k, dtype=torch.int32, device=device)  # receives the selection
    out = mlakit.sparse_step(
        q,
        new_latents,
        weights,
        mlakit.CachedBatch(
            c.cache,
            c.page_table,
            c.kv_lens,
            torch.arange(batch + 1, dtype=torch.int32, device=device),
        ),
        mlakit.IndexInputs(c.index_q, new_keys, c.index_weights, c.index_cache),
        k,
        rows=rows,
    )

    same, expected = True, []
    pairs = torch.view_as_complex(q[..., g.qk_nope_head_dim :].float().unflatten(-1, (-1, 2)))
    angles = torch.view_as_complex(freqs[c.kv_lens.long() - 1].unflatten(-1, (-1, 2)))
    q_rope = torch.view_as_real(pairs * angles[:, None]).flatten(-2)
    rotated = torch.cat([q[..., : g.qk_nope_head_dim].float(), q_rope], -1)
    for i in range(batch):
        best = c.best(i, k)
        same &= torch.equal(rows[i, : len(best)].long(), c.slots[i][best].long())
        latent, key = c.rows(i)[best].split([g.kv_lora_rank, g.qk_rope_head_dim], -1)
        expanded = (latent @ kv_b_proj.float().T).unflatten(-1, (g.num_heads, -1))
        k_nope, v = expanded.split([g.qk_nope_head_dim, g.v_head_dim], -1)
        keys = torch.cat([k_nope, key[:, None].expand(-1, g.num_heads, -1)], -1)
        scores = torch.einsum("hd,nhd->hn", rotated[i], keys) * g.softmax_scale
        expected.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), v))
    error = relative(out, torch.stack(expected))
    print(f"sparse_step, k = {k}: same rows {same}, kernel error {error:.5f}")
    return same and error <= TOLERANCE


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--heads", type=int, default=8, help="query heads of this rank")
    parser.add_argument("--lengths", type=int, nargs="+", default=[400, 150, 700])
    options = parser.parse_args(arguments)
    torch.manual_seed(0)

    contexts = Contexts(options.heads, options.lengths, torch.device(options.device))
    results = [by_ops(contexts), by_one_call(contexts, TOPK[-1])]
    print("plain torch agrees" if all(results) else "DIFFERENT from plain torch")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
