"""The memory that calls take on a GPU, found without one."""

from __future__ import annotations

import pytest
import torch

from mlakit import PagedLatentCache, RowShape, indexer_topk, mla_decode
from mlakit.integrations.vllm.selection import Limits, workspace_bytes
from mlakit.kernels.launch import SHARED_BYTES, Target, compiling
from mlakit.precompile.allocation import allocated_bytes

HOPPER = Target(90, 132, SHARED_BYTES[90])


def test_results_and_scratch_are_counted():
    logits, out = torch.empty(3, 100), torch.empty(3, 7, dtype=torch.int32)
    assert allocated_bytes(lambda: indexer_topk(logits, 7), HOPPER) == 3 * 7 * 4
    assert allocated_bytes(lambda: indexer_topk(logits, 7, out=out), HOPPER) == 0

    cache = PagedLatentCache.allocate(RowShape(512, 64), "bf16", num_pages=2, page_size=64)
    table, lens = torch.zeros(1, 512, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    q = torch.empty(1, 16, 576, dtype=torch.bfloat16)
    taken = allocated_bytes(lambda: mla_decode(q, cache, table, lens, softmax_scale=1.0), HOPPER)
    results = 16 * 512 * 2 + 16 * 4
    partials = 2 * 132 * 16 * 513 * 4  # two of each CTA of the plan
    assert results + partials / 4 < taken < results + 2 * partials


@pytest.mark.parametrize("max_model_len", [900, 163_840])
def test_no_step_of_the_indexer_takes_more_than_was_reserved(max_model_len):
    """vLLM's chunks of prefill have at most `logits_bytes` of scores."""
    k, draw = 2048, torch.Generator().manual_seed(max_model_len)
    limits = Limits(max_model_len, decode_tokens=48, prefill_tokens=5000, logits_bytes=2**24)
    q = torch.empty(1, 64, 128, dtype=torch.float8_e4m3fn)

    def integer(last: int) -> int:
        return int(torch.randint(1, last + 1, (), generator=draw))

    with compiling(HOPPER):
        reserved = workspace_bytes(q, k, limits)
    assert reserved >= 48 * max_model_len * 4
    for _ in range(15):
        columns = integer(max_model_len)
        tokens = integer(min(limits.prefill_tokens, limits.logits_bytes // (4 * columns)))
        with compiling(HOPPER):
            step = limits._replace(max_model_len=columns, decode_tokens=tokens, prefill_tokens=0)
            assert workspace_bytes(q, k, step) <= reserved, (tokens, columns)
