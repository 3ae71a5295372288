"""Plans that a kernel makes on the device: every key once, everyone's share alike."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import pytest
import torch

from mlakit import knobs
from mlakit.cache import WHOLE
from mlakit.kernels.triton.decode_plan import plan_decode
from mlakit.masks import CAUSAL

pytestmark = pytest.mark.skipif(
    not knobs.interpreted() and not torch.cuda.is_available(), reason="needs a GPU or its stand-in"
)
HEADS, TILE = 4, 16


def random_batch(seed: int) -> tuple[list[int], list[int], int, int]:
    """(q_lens, kv_lens, workers, rows of a partial), with empty requests and idle ones."""
    draw = random.Random(seed)
    batch = draw.choice([1, 2, 5, 17, 40])
    q_lens = [draw.choice([1, 1, 1, 0, 2, 9]) for _ in range(batch)]
    kv_lens = [max(q, draw.choice([0, 1, 5, 64, 100, draw.randrange(1, 3000)])) for q in q_lens]
    return q_lens, kv_lens, draw.choice([1, 3, 7, 40]), draw.choice([4, 8, 64])


@pytest.mark.parametrize("seed", range(30))
def test_triton_plans_give_every_key_to_one_worker(seed):
    q_lens, kv_lens, num_workers, slot_rows = random_batch(seed)
    device = "cpu" if knobs.interpreted() else "cuda"
    plan = plan_decode(
        torch.tensor([0, *accumulate(q_lens)], dtype=torch.int32, device=device),
        torch.tensor(kv_lens, dtype=torch.int32, device=device),
        shard=WHOLE,
        mask=CAUSAL,
        heads=HEADS,
        num_workers=num_workers,
        tile=TILE,
        least_tiles=2,
        slot_rows=slot_rows,
        capacity=3000 if seed % 2 else 2**40,  # the arithmetic is wide where it must be
    )
    starts = plan.worker_starts.tolist()
    assert starts[0] == 0
    assert starts == sorted(starts)
    assert starts[-1] <= len(kv_lens) + num_workers
    items = plan.items[: starts[-1]].tolist()
    slots = plan.partial_starts.tolist()
    for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        own = [item[1:] for item in items if item[0] == request]
        if q_len == 0:
            assert own == []
            assert slots[request] == slots[request + 1]
            continue
        assert own[0][0] == 0
        assert kv_len <= own[-1][1] < kv_len + 2 * TILE
        assert all(before[1] == after[0] for before, after in pairwise(own))
        assert all(first < last for first, last, _ in own)
        expected = list(range(slots[request], slots[request + 1])) or [-1]
        assert [slot for _, _, slot in own] == expected
        if q_len * HEADS > slot_rows:
            assert len(own) == 1


@pytest.mark.parametrize("num_workers", [1, 7, 40])
def test_triton_plans_are_even(num_workers):
    kv_lens = [3000, 1, 900, 64, 2000]
    device = "cpu" if knobs.interpreted() else "cuda"
    plan = plan_decode(
        torch.arange(6, dtype=torch.int32, device=device),
        torch.tensor(kv_lens, dtype=torch.int32, device=device),
        shard=WHOLE,
        mask=CAUSAL,
        heads=HEADS,
        num_workers=num_workers,
        tile=TILE,
        least_tiles=2,
        slot_rows=HEADS,
        capacity=4096,
    )
    starts, items = plan.worker_starts.tolist(), plan.items.tolist()
    shares = [
        sum((last - first) // TILE for _, first, last, _ in items[begin:end])
        for begin, end in pairwise(starts)
    ]
    assert sum(shares) == sum(-(-kv_len // TILE) for kv_len in kv_lens)
    assert max(shares) - min(shares) <= 1
