"""Launches of `indexer_logits` with inputs and oracle on the device: thousands per minute."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mlakit.dispatch.knobs import Backend
from mlakit.formats import Format
from mlakit.model.masks import Mask
from mlakit.ops import indexer_logits
from mlakit.reference.hopper_fp8_mma import fp8_mma
from mlakit.tools.testing import poison
from mlakit.tools.workloads.case import Results, Trial, assert_given, assert_logits_match, repeated
from mlakit.tools.workloads.decode_launch import Queries
from mlakit.tools.workloads.fp8_scores import FORMATS as FP8_FORMATS
from mlakit.tools.workloads.fp8_scores import uses_fp8_logits
from mlakit.tools.workloads.indexer import IndexerLogitsCase
from mlakit.tools.workloads.inputs import Inputs
from mlakit.tools.workloads.paged import SPARE_COLUMNS, map_pages, num_pages_for, starts_of


def score(
    q: Tensor,  # [tokens, heads, width]
    weights: Tensor,  # [tokens, heads]
    keys: Tensor,  # [requests, keys, width], finite
    queries: Queries,
    *,
    key_scales: Tensor | None = None,  # [requests, keys]: with FP8 accumulation
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The same as `reference.indexer_logits`, all keys of the longest request wide."""
    logits = torch.full((len(q), keys.shape[1]), -torch.inf, dtype=dtype, device=q.device)
    for request in range(len(keys)):
        own = queries.request == request
        rows = q[own].to(dtype).flatten(0, 1)
        if key_scales is None:
            products = rows @ keys[request].to(dtype).T
        else:
            scales = key_scales[request]
            stored = torch.where(scales == 0, 0.0, keys[request].T / scales).T
            products = fp8_mma(rows, stored).to(dtype) * scales.to(dtype)
        by_head = products.relu().view(-1, q.shape[1], keys.shape[1])
        logits[own] = torch.einsum("th,thk->tk", weights[own].to(dtype), by_head)
    visible = queries.visible[queries.request, queries.index]
    return logits.masked_fill(~visible, -torch.inf)


@dataclass(frozen=True, kw_only=True, repr=False)
class IndexerLaunch(IndexerLogitsCase):
    """A call of `indexer_logits`.

    calls        consecutive calls, which must all return the same bits; the last is checked. From
                 the third on a GPU may replay the recorded launch of the second.
    spare_pages  page table columns past the longest request
    """

    calls: int = 1
    spare_pages: int = 0
    kv_lora_rank: int = 128
    qk_rope_head_dim: int = 0
    format: Format = "fp8_token"
    dtype: str = "e4m3"
    page_size: int = 64

    def trial(self, device: torch.device | str) -> Trial:
        inputs = Inputs(device, self.seed, padded=self.padded, draws_there=True)
        mask = Mask(self.mask, self.window)
        counts = [-(-kv_len // self.page_size) for kv_len in self.kv_lens]
        keys = max([1, *counts]) * self.page_size
        queries = Queries.of(self.q_lens, self.kv_lens, mask, keys, inputs.device)
        seen = queries.visible.any(1)
        pool = self.pool(inputs, "cache", num_pages_for(self.kv_lens, self.page_size))
        page_table, slots = map_pages(
            pool, counts, seen, spare_columns=SPARE_COLUMNS + self.spare_pages
        )
        at = seen.nonzero(as_tuple=True)
        stored = pool.write(slots[at], inputs.normal(len(at[0]), self.row.width))
        rows = stored.new_zeros(*seen.shape, self.row.width)
        rows[at] = stored
        key_scales = stored.new_ones(seen.shape)
        if self.format in FP8_FORMATS:
            key_scales[at] = pool.row_scales(slots[at]).to(key_scales.device)
        tokens = sum(self.q_lens)
        q = inputs.place("q", inputs.queries(tokens, self.heads, self.row.width), self.dtype)
        weights = inputs.place("weights", inputs.normal(tokens, self.heads))
        kv_lens = inputs.place_ints("kv_lens", self.kv_lens)
        starts = inputs.place_ints("q_starts", starts_of(self.q_lens))
        columns = max(self.kv_lens, default=0) + (self.spare_columns or 0)
        out = inputs.result("out", (tokens, columns), torch.float32)
        is_fp8: list[bool] = []  # the last is that of the results to check

        def call(backend: Backend) -> Results:
            logits = indexer_logits(
                q,
                weights,
                pool.cache,
                page_table,
                kv_lens,
                q_starts=starts,
                layer=pool.layer_index,
                mask=mask,
                max_kv_len=columns,
                out=poison(out),
                backend=backend,
            )
            is_fp8.append(uses_fp8_logits(q, pool.layer, page_table, mask, backend))
            return (logits,)

        def check(results: Results) -> None:
            assert_given("logits", results[0], out)
            exact = score(q.double(), weights.double(), rows, queries)
            naive = score(
                q.double(),
                weights,
                rows,
                queries,
                key_scales=key_scales if is_fp8[-1] else None,
                dtype=torch.float32,
            )
            terms = weights.double().abs() * q.double().norm(dim=-1)
            largest = terms.sum(-1, keepdim=True) * rows.norm(dim=-1).amax()
            exact, naive = _widened(exact, columns), _widened(naive, columns)
            assert_logits_match("logits", results[0], exact, naive, largest)

        return Trial(inputs, repeated(call, self.calls, ("logits",)), check)


def _widened(logits: Tensor, columns: int) -> Tensor:
    """The first `columns`, −inf beyond those that there are."""
    beyond = max(columns - logits.shape[1], 0)
    return torch.nn.functional.pad(logits, (0, beyond), value=-torch.inf)[:, :columns]
