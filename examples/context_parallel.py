"""Context parallel decode: the ranks of a process group share the cached tokens of every request.

Each rank caches its own tokens only and attends to them; the ranks merge their results. Rank 0 also
runs the layer over the whole cache in one process and prints the differences.

    torchrun --nproc-per-node 2 examples/context_parallel.py
    torchrun --nproc-per-node 8 examples/context_parallel.py --heads 128 --lengths 65536 4096 9

Under torchrun the ranks use NCCL if every rank has a GPU, else gloo on CPUs. The exit status is 1
if a difference is above the tolerance.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

import mlakit

PAGE_SIZE = 64
STEPS = 3  # decode steps after the prompts
TOLERANCE = 0.02  # a bf16 result has 8 bits of mantissa
Method = Literal["all_gather", "all_to_all", "all_reduce"]
METHODS: tuple[Method, ...] = get_args(Method)


class Requests:
    """A layer's cache, whole or one rank's shard of it, and its pages."""

    def __init__(
        self,
        model: mlakit.MLAGeometry,
        lengths: Sequence[int],
        shard: mlakit.KVShard,
        device: torch.device,
    ) -> None:
        """lengths  tokens that each request will have at the end"""
        local = [shard.local_count(length) for length in lengths]
        num_pages = sum(-(-length // PAGE_SIZE) for length in local) + 1
        pages = mlakit.PageAllocator(num_pages, PAGE_SIZE)
        sequences = [pages.reserve(length) for length in local]
        self.page_table = pages.page_table(sequences).to(device)
        self.cache = mlakit.PagedLatentCache.allocate(
            model, "bf16", num_pages=num_pages, page_size=PAGE_SIZE, device=device
        )
        self.tokens = sum(local)

    def batch(self, kv_lens: Sequence[int], new: Sequence[int]) -> mlakit.CachedBatch:
        """A step with `new` tokens of each request; `kv_lens` are those of whole requests."""
        device = self.cache.payload.device
        lens = torch.tensor(kv_lens, dtype=torch.int32, device=device)
        q_starts = torch.tensor([0, *accumulate(new)], dtype=torch.int32, device=device)
        return mlakit.CachedBatch(self.cache, self.page_table, lens, q_starts)


def layer_weights(
    model: mlakit.MLAGeometry, positions: int, device: torch.device
) -> mlakit.LayerWeights:
    """Random weights, the same on all ranks."""
    columns = model.qk_nope_head_dim + model.v_head_dim
    w = torch.randn(model.num_heads * columns, model.kv_lora_rank) * model.kv_lora_rank**-0.5
    up = mlakit.UpProjection.from_checkpoint(w.bfloat16().to(device), model)
    gamma = torch.ones(model.kv_lora_rank, device=device)
    freqs = mlakit.rope_table(model, positions).to(device)
    return mlakit.LayerWeights(up, gamma, freqs, model.softmax_scale)


def relative(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected value."""
    return ((actual.float() - expected.float()).abs().max() / expected.float().abs().max()).item()


def device_of_rank() -> torch.device:
    """Starts the process group that torchrun describes."""
    rank, ranks_here = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if torch.cuda.device_count() < ranks_here:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--heads", type=int, default=16, help="query heads; the ranks divide them")
    parser.add_argument("--lengths", type=int, nargs="+", default=[300, 64, 1])
    parser.add_argument("--interleave", type=int, default=1, help="consecutive tokens of one rank")
    options = parser.parse_args(arguments)
    device = device_of_rank()
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same inputs on all ranks

    model = mlakit.MLAGeometry.preset("deepseek-v3").with_heads(options.heads)
    after = [length + STEPS for length in options.lengths]
    weights = layer_weights(model, max(after), device)
    shard = mlakit.KVShard(rank, world, options.interleave)
    whole = Requests(model, after, mlakit.KVShard(0, 1), device)
    caches = {method: Requests(model, after, shard, device) for method in METHODS}
    if rank == 0:
        where = f"{dist.get_backend()} on {device.type}"
        print(f"{world} ranks, {where}; {whole.tokens} tokens, {caches['all_gather'].tokens} here")
        print("".join(f"{name:>14}" for name in ("new tokens", *METHODS)))

    is_right = True
    kv_lens = [0] * len(after)
    for new in (options.lengths, *[[1] * len(after)] * STEPS):  # the prompts, then decode steps
        kv_lens = [length + more for length, more in zip(kv_lens, new, strict=True)]
        q = torch.randn(sum(new), options.heads, model.qk_head_dim).bfloat16().to(device)
        kv = torch.randn(sum(new), model.row.width).bfloat16().to(device)
        expected = mlakit.decode_branch(q, kv, weights, whole.batch(kv_lens, new))
        errors = []
        for method in METHODS:
            out = mlakit.context_parallel_decode(
                *(q, kv, weights, caches[method].batch(kv_lens, new)),
                interleave=options.interleave,
                method=method,
            )
            # all_to_all returns the heads of this rank
            mine = expected.chunk(world, 1)[rank] if method == "all_to_all" else expected
            errors.append(relative(out, mine))
        worst = torch.tensor(errors, device=device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        is_right &= all(error <= TOLERANCE for error in worst.tolist())  # false for NaN
        if rank == 0:
            print(f"{sum(new):>14}" + "".join(f"{error:>14.5f}" for error in worst.tolist()))
    if rank == 0:
        print("one process agrees" if is_right else "DIFFERENT from one process")
    dist.destroy_process_group()
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
