"""`kv_lens` has one meaning: what the cache holds once the step's tokens are in it.

So what `PageAllocator.kv_lens` gives after room was made for a step is what the step takes, in the
append and in attention, and what `mla_decode` takes afterwards.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from mlakit import (
    CachedBatch,
    PageAllocator,
    PagedLatentCache,
    mla_decode,
    norm_rope_quant_append,
    reference,
)
from mlakit.cache import request_slots, token_positions
from mlakit.model.geometry import RowShape
from mlakit.tools.testing import assert_matches
from tests.steps.step_oracles import (
    KV_LENS,
    LAYER,
    PAGE_SIZE,
    Q_LENS,
    Step,
    decode_branch,
    int32,
    mla_step,
    prefill_branch,
)

ONE_EACH = Step(kv_lens=(11, 18, 1, 6), q_lens=(1, 1, 1, 1))  # their last pages have room for more


class AllocatedStep(Step):
    """A step whose pages, page table and lengths an allocator keeps."""

    @cached_property
    def allocator(self) -> PageAllocator:
        num_pages = sum(-(-kv_len // PAGE_SIZE) for kv_len in self.kv_lens) + 2
        allocator = PageAllocator(num_pages, PAGE_SIZE)
        held = [allocator.reserve(PAGE_SIZE) for _ in range(num_pages)]
        for page in torch.randperm(num_pages, generator=self._generator(6)).tolist():
            allocator.free(held[page])
        return allocator

    @cached_property
    def requests(self) -> list:
        requests = [self.allocator.reserve(before) for before in self.before]
        self.allocator.append_batch(requests, self.q_lens)
        return requests

    @cached_property
    def table(self) -> Tensor:
        return self.allocator.page_table(self.requests)

    def batch(self) -> CachedBatch:
        cache, starts = super().batch().cache, int32([0, *accumulate(self.q_lens)])
        pages, requests = self.allocator, self.requests
        return CachedBatch(
            cache, pages.page_table(requests), pages.kv_lens(requests), starts, LAYER
        )


def allocated(step: Step) -> AllocatedStep:
    return AllocatedStep(kv_lens=step.kv_lens, q_lens=step.q_lens)


@pytest.mark.slow
@pytest.mark.parametrize("step", [ONE_EACH, Step()], ids=["one token each", "mixed"])
@pytest.mark.parametrize("branch", [decode_branch, prefill_branch, mla_step])
def test_a_step_takes_the_lengths_of_the_allocator(step, branch):
    step = allocated(step)
    q, kv, weights, batch = step.arguments()
    out = branch(q, kv, weights, batch)
    step.check_appended(batch)
    check = {
        decode_branch: step.check_decode,
        prefill_branch: step.check_prefill,
        mla_step: step.check_step,
    }[branch]
    check(out, batch)


def test_the_append_and_the_attention_after_it_take_the_same_lengths():
    """A prompt in two chunks and a new token, each with what the allocator says."""
    row, page_size, heads = RowShape(16, 4), 4, 2
    generator = torch.Generator().manual_seed(0)
    cache = PagedLatentCache.allocate(row, "fp32", num_pages=8, page_size=page_size)
    cache.payload.fill_(torch.nan)
    pages = PageAllocator(8, page_size)
    request = pages.reserve(0)
    freqs = torch.randn(16, row.qk_rope_head_dim, generator=generator)
    gamma = torch.ones(row.kv_lora_rank)
    latents, results = [], []
    for new in (6, 4, 1):
        pages.append(request, new)
        where = (cache, pages.page_table([request]), pages.kv_lens([request]))
        starts = int32([0, new])
        q_rope = torch.randn(new, heads, row.qk_rope_head_dim, generator=generator)
        kv = torch.randn(new, row.width, generator=generator)
        rotated = norm_rope_quant_append(q_rope, kv, freqs, gamma, *where, starts, epsilon=1e-6)
        latent = torch.randn(new, heads, row.kv_lora_rank, generator=generator)
        out, _ = mla_decode(latent, *where, q_rope=rotated, q_starts=starts, softmax_scale=0.3)
        latents.append(kv)
        results.append((out, torch.cat([latent, rotated], -1)))
    slots = request_slots(pages.page_table([request]), page_size, 0, 0, request.length)
    rows = cache.layer(0).read(slots)
    raw = torch.cat(latents)
    no_queries = raw.new_zeros(len(raw), 0, row.qk_rope_head_dim)
    exact, naive = (
        reference.norm_rope_quant(
            no_queries, raw, freqs, gamma, range(11), epsilon=1e-6, dtype=dtype
        )[1]
        for dtype in (torch.float64, torch.float32)
    )
    assert_matches("rows", rows, exact, naive)
    kv_len = 0
    for out, q in results:
        kv_len += len(q)
        own = {"softmax_scale": 0.3, "v_width": row.v_width}
        exact, naive = (
            reference.mla_decode(q, [rows[:kv_len]], [len(q)], **own, dtype=dtype)[0]
            for dtype in (torch.float64, torch.float32)
        )
        assert_matches("out", out, exact, naive)
    assert cache.payload.isnan().any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_are_those_of_the_newest_tokens(dtype):
    request, position = token_positions(
        torch.tensor(KV_LENS, dtype=dtype), int32([0, *accumulate(Q_LENS)]), sum(Q_LENS)
    )
    assert request.tolist() == [b for b, new in enumerate(Q_LENS) for _ in range(new)]
    assert position.tolist() == reference.append_positions(KV_LENS, Q_LENS)
    assert position[:3].tolist() == [9, 10, 11]
    assert position.dtype == torch.int64


def test_lengths_that_leave_out_new_tokens_are_refused():
    q, kv, weights, batch = ONE_EACH.arguments()
    before = replace(batch, kv_lens=batch.kv_lens - 1)
    said = r"kv_lens\[2\] must include the 1 new tokens of the request, got 0"
    for branch in (decode_branch, prefill_branch, mla_step):
        with pytest.raises(ValueError, match=said):
            branch(q, kv, weights, before)
