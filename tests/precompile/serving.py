"""The keys of the kernels that serving launches, beside those that `warmup` compiles.

Run by `test_warmup` in processes of their own: in that of the tests kernels are interpreted. A
launch goes the way that it goes on a GPU, through `kernel[grid](...)`, on a driver that names one.
Tensors have the shapes and strides that an engine's have, and sizes that are drawn at random.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from mlakit import (
    CachedBatch,
    IndexInputs,
    LayerWeights,
    PagedLatentCache,
    PooledKeyCache,
    PooledKeys,
    RowShape,
    UpProjection,
    mla_step,
    plan_step,
    sparse_step,
)
from mlakit.dispatch import knobs, private
from mlakit.dispatch.architectures import NUM_SMS
from mlakit.dispatch.checks import values_hidden
from mlakit.dispatch.specs import pretending
from mlakit.integrations import steps
from mlakit.integrations.sglang import calls as sglang
from mlakit.integrations.vllm import calls as vllm
from mlakit.integrations.vllm import selection
from mlakit.kernels import launch
from mlakit.precompile.deployment import Deployment, deployment
from mlakit.precompile.listing import calls_of, entries_of
from mlakit.tools.emulator.frontend import NoDriver

SCALE = 0.05
SHORTEST = 8  # keys of a request: as many as it has queries that decode
BLOCKS = 3
MAX_LOGITS = 2**27  # scores at the same time, as vLLM limits them
E4M3 = torch.float8_e4m3fn


@contextmanager
def gpu(arch: int, num_sms: int) -> Iterator[dict[str, str]]:
    """Pretend that CPU tensors are on a GPU; yields the kernels of all launches by their keys."""
    found: dict[str, str] = {}
    run, target_of = JITFunction.run, launch._target_of
    driver = triton.runtime.driver._active

    def start(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        assert not warmup
        entry = private.cache_entry(lambda: run(kernel, *args, grid=grid, warmup=False, **options))
        found[entry.key] = entry.kernel
        return SimpleNamespace()

    JITFunction.run = start
    triton.runtime.driver.set_active(NoDriver(arch))
    shared = launch.SHARED_BYTES[arch]
    launch._target_of = lambda kind, index: launch.Target(arch, num_sms, shared)
    try:
        with pretending(arch, num_sms), values_hidden(), knobs.override(launch_cache=False):
            yield found
    finally:
        JITFunction.run, launch._target_of = run, target_of
        triton.runtime.driver.set_active(driver)


class Engine:
    """Persistent buffers of an engine, and random steps over them."""

    def __init__(self, d: Deployment, seed: int) -> None:
        self.d, self.g, self.draw = d, d.geometry, random.Random(seed)
        self.longest = d.max_context
        self.dtype = d.torch_dtype
        self.max_blocks = d.max_pages
        width = {"fp8": self.g.row.width, "fp8_block128": 656}.get(d.format, self.g.row.width)
        stored = self.dtype if d.format == "bf16" else torch.uint8
        self.rows = torch.zeros(BLOCKS, d.page_size, width, dtype=stored)
        self.index_rows = torch.zeros(BLOCKS, d.page_size, 132, dtype=torch.uint8)
        self.pools = steps.Pools(self.g.row)

    def batch(self) -> int:
        return self.draw.choice([1, 2, 3, self.draw.randint(4, 40), self.draw.randint(41, 600)])

    def length(self) -> int:
        any_length = self.draw.randint(65, self.longest)
        return self.draw.choice([SHORTEST, 63, 64, any_length, self.longest])

    def prompt(self) -> int:
        return self.draw.choice([1, 5, self.draw.randint(6, 300), self.draw.randint(300, 3000)])

    def queries(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return queries as vLLM and SGLang make them: a product per head, columns of another."""
        g = self.g
        rope = torch.empty(tokens, g.num_heads, g.qk_head_dim, dtype=self.dtype)
        rope = rope[..., g.qk_nope_head_dim :]
        if self.draw.random() < 0.5:
            latent = torch.empty(g.num_heads, tokens, g.kv_lora_rank, dtype=self.dtype)
            return latent.transpose(0, 1), rope
        return torch.empty(tokens, g.num_heads, g.kv_lora_rank, dtype=self.dtype), rope

    def starts(self, counts: list[int]) -> Tensor:
        return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)


class VllmEngine(Engine):
    """Steps of vLLM: slices of buffers that hold decode requests first, then prompts."""

    def __init__(self, d: Deployment, seed: int) -> None:
        super().__init__(d, seed)
        self.k_scale = torch.ones(())
        if d.format == "fp8":
            self.rows = self.rows.view(E4M3)
        self.block_table = torch.zeros(1024, self.max_blocks, dtype=torch.int32)
        self.seq_lens = torch.full((1024,), SHORTEST, dtype=torch.int32)
        self.topk = torch.zeros(8192, max(self.g.index_topk, 1), dtype=torch.int32)
        self.slots = torch.zeros(8192, dtype=torch.int64)

    def pool(self) -> Any:
        return self.pools.of(self.rows, self.k_scale)

    def append(self) -> None:
        tokens = self.draw.randint(1, 8192)
        projected = torch.empty(tokens, self.g.row.width, dtype=self.dtype)
        normed = torch.empty(tokens, self.g.kv_lora_rank, dtype=self.dtype)
        k_pe = projected[:, None, self.g.kv_lora_rank :]
        vllm.update_cache(normed, k_pe, self.pool(), self.slots[:tokens])

    def decode(self) -> None:
        batch, drafts = self.batch(), self.draw.choice([1, 1, 2, 3, 4])
        starts = self.starts([drafts] * batch)
        invariant = self.d.is_batch_invariant
        table, lens = self.block_table[:batch], self.seq_lens[:batch]
        padding = self.draw.choice([0, 0, 5])  # of a CUDA graph
        tokens = batch * drafts + padding
        made = vllm.decode_batch(
            table, lens, starts, drafts, num_tokens=tokens, is_batch_invariant=invariant
        )
        q: Any = self.queries(tokens)
        if self.d.format == "fp8":
            q = torch.empty(tokens, self.g.num_heads, self.g.row.width, dtype=E4M3)
        for _ in range(2):  # two layers of a step
            steps.decode(q, self.pool(), made, SCALE, torch.ones(1))

    def prefill(self) -> None:
        counts = [self.prompt() for _ in range(self.draw.choice([1, 2, self.batch() % 9 + 1]))]
        before, tokens = self.draw.randint(0, 50), sum(counts)
        g, heads = self.g, self.g.num_heads
        q = torch.empty(before + tokens, heads, g.qk_head_dim, dtype=self.dtype)[before:]
        k = torch.empty(tokens, heads, g.qk_head_dim, dtype=self.dtype)
        kv = torch.empty(tokens, heads, g.qk_nope_head_dim + g.v_head_dim, dtype=self.dtype)
        v = kv[..., g.qk_nope_head_dim :]
        starts = self.starts(counts)
        widths = g.qk_nope_head_dim, SCALE
        out = torch.empty(before + tokens, heads, g.v_head_dim, dtype=self.dtype)[before:]
        vllm.prefill(q, k, v, starts, starts, *widths, is_causal=True, out=out)
        chunks = torch.stack([starts] * 3)  # [chunks, prompts + 1]: rows at any address
        chunk = chunks[self.draw.randrange(3)]
        vllm.prefill(q, k, v, starts, chunk, *widths, is_causal=False)

    def sparse(self) -> None:
        counts = [self.prompt() if self.draw.random() < 0.2 else 1 for _ in range(self.batch())]
        if sum(counts) > 8192:
            counts = [1] * len(counts)
        tokens, requests = sum(counts), len(counts)
        vllm.sparse(
            self.queries(tokens) if self.draw.random() < 0.7 else self.whole_queries(tokens),
            self.pool(),
            self.topk[:tokens],
            self.block_table[:requests],
            self.starts(counts),
            SCALE,
        )

    def whole_queries(self, tokens: int) -> Tensor:
        return torch.empty(tokens, self.g.num_heads, self.g.row.width, dtype=self.dtype)

    def select(self) -> None:
        decodes, drafts = self.draw.choice([0, self.batch()]), self.draw.choice([1, 2, 4])
        prompts = [self.prompt() for _ in range(self.draw.choice([0, 1, 3]))]
        if not decodes and not prompts:
            prompts = [self.prompt()]
        total = sum(prompts) + self.draw.randint(0, 2000)
        if sum(prompts) * total > MAX_LOGITS or decodes * drafts * self.longest > MAX_LOGITS:
            decodes, drafts, prompts, total = 1, 1, [7], 7
        tokens = decodes * drafts + sum(prompts)
        kv_starts = self.starts(prompts)
        rows = torch.arange(sum(prompts), dtype=torch.int32)
        owner = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor(prompts).long())
        first = kv_starts[owner].to(torch.int32)
        chunk = SimpleNamespace(
            block_table=self.block_table[decodes : decodes + len(prompts)],
            cu_seqlen_ks=first,
            cu_seqlen_ke=rows + 1,
            cu_seq_lens=kv_starts,
            total_seq_lens=total,
            token_start=decodes * drafts,
            token_end=tokens,
        )
        metadata = SimpleNamespace(
            seq_lens=self.seq_lens,
            max_seq_len=self.length(),
            slot_mapping=self.slots[:tokens],
            num_decodes=decodes,
            num_decode_tokens=decodes * drafts,
            num_prefills=len(prompts),
            decode=SimpleNamespace(
                per_req_decode_lens=torch.full((decodes,), drafts, dtype=torch.int32)
            ),
            prefill=SimpleNamespace(chunks=[chunk]),
            block_table=self.block_table,
        )
        selection.select_step(
            torch.empty(tokens, self.g.index_n_heads, 128, dtype=E4M3),
            torch.empty(tokens, 128, dtype=self.dtype),
            torch.empty(tokens, self.g.index_n_heads),
            torch.empty(tokens, self.g.index_topk, dtype=torch.int32),
            PagedLatentCache.wrap_index_keys(self.index_rows),
            metadata,
            max_model_len=self.longest,
            power_of_two_scales=self.draw.random() < 0.5,
        )

    def steps(self) -> list[Callable[[], None]]:
        own = [self.sparse, self.select] if self.g.has_indexer else [self.decode]
        return [self.append, self.prefill, *own]


class SglangEngine(Engine):
    """Steps of SGLang, whose page tables are made at every step."""

    def __init__(self, d: Deployment, seed: int) -> None:
        super().__init__(d, seed)
        self.req_to_token = torch.zeros(1024, d.max_context, dtype=torch.int32)
        self.key_buffer = self.rows.view(-1, 1, self.rows.shape[-1])
        if d.format == "fp8":
            self.key_buffer = self.key_buffer.view(E4M3)

    def pool(self) -> Any:
        return self.pools.of(sglang.paged(self.key_buffer, self.d.page_size), None)

    def step(self) -> Any:
        batch = self.batch()
        requests, lens = torch.zeros(batch, dtype=torch.int64), torch.full((batch,), SHORTEST)
        pages = self.req_to_token, requests, lens, self.d.page_size
        kind = self.draw.choice(["decode", "decode", "verify", "extend"])
        if kind == "decode":
            longest = self.draw.choice([self.length(), self.longest])
            return sglang.decode_step(*pages, longest)
        if kind == "verify" and not self.g.has_indexer:
            return sglang.window_step(*pages, self.longest, self.draw.choice([2, 3, 4]))
        counts = [self.prompt() if self.draw.random() < 0.2 else 1 for _ in range(batch)]
        while sum(counts) > 8192:
            counts = [1] * batch
        lens = torch.tensor(counts).clamp(min=SHORTEST)
        longest = max(self.length(), int(lens.max()))
        tensors = self.req_to_token, requests, lens, torch.tensor(counts)
        return sglang.extend_step(*tensors, self.d.page_size, longest, sum(counts))

    def decode(self) -> None:
        step = self.step()
        steps.decode(self.queries(step.num_tokens), self.pool(), step.batch, SCALE)

    def select(self) -> None:
        from mlakit import sparse_mla

        step, g = self.step(), self.g
        padded = step.num_tokens + self.draw.choice([0, 3])
        rows = sglang.select_rows(
            torch.empty(padded, g.index_n_heads, 128, dtype=E4M3),
            torch.empty(padded, g.index_n_heads, 1),
            self.index_rows.view(BLOCKS, -1),
            step,
            g.index_topk,
        )
        sglang.visible_rows(step, g.index_topk)
        latent, rope = self.queries(step.num_tokens)
        sparse_mla(
            latent.contiguous(),
            self.pool(),
            rows[: step.num_tokens],
            q_rope=rope.contiguous(),
            softmax_scale=SCALE,
        )

    def prefill(self) -> None:
        counts = [self.prompt() for _ in range(self.draw.choice([1, 2, 5]))]
        tokens, g, heads = sum(counts), self.g, self.g.num_heads
        q, k = (torch.empty(tokens, heads, g.qk_head_dim, dtype=self.dtype) for _ in range(2))
        v = torch.empty(tokens, heads, g.v_head_dim, dtype=self.dtype)
        starts = self.starts(counts)
        for is_causal in (True, False):
            other = starts if is_causal else torch.stack([starts] * 3)[self.draw.randrange(3)]
            steps.prefill(q, k, v, starts, other, g.qk_nope_head_dim, SCALE, is_causal=is_causal)

    def steps(self) -> list[Callable[[], None]]:
        return [self.prefill, self.select if self.g.has_indexer else self.decode]


class StepsEngine(Engine):
    """Steps of an engine that calls `mlakit.steps`."""

    def __init__(self, d: Deployment, seed: int) -> None:
        super().__init__(d, seed)
        g, self.cache = d.geometry, PagedLatentCache.allocate(d.geometry, d.format, num_pages=3)
        rows = g.num_heads * (g.qk_nope_head_dim + g.v_head_dim)
        matrix, scale = torch.zeros(rows, g.kv_lora_rank, dtype=self.dtype), None
        if d.has_fp8_weights:
            matrix = matrix.to(E4M3)
            scale = torch.ones(rows // 128, g.kv_lora_rank // 128)
        up = UpProjection.from_checkpoint(matrix, g, scale)
        gamma = torch.ones(g.kv_lora_rank, dtype=self.dtype)
        self.weights = LayerWeights(up, gamma, torch.zeros(1024, g.qk_rope_head_dim), SCALE)

    def step(self) -> None:
        g, batch = self.g, self.draw.choice([1, 2, 3, 9, 40])
        q_lens = [self.draw.choice([1, 1, 3, 20, 300]) for _ in range(batch)]
        kv_lens = [n + self.draw.choice([0, 500]) for n in q_lens]
        tokens = sum(q_lens)
        q = torch.zeros(tokens, g.num_heads, g.qk_head_dim, dtype=self.dtype)
        kv = torch.zeros(tokens, g.row.width, dtype=self.dtype)
        table = torch.zeros(batch, self.d.max_pages, dtype=torch.int32)
        lens = torch.tensor(kv_lens, dtype=torch.int32)
        cached = CachedBatch(self.cache, table, lens, self.starts(q_lens))
        plan = plan_step(kv_lens, q_lens, max_context_rows=self.draw.choice([None, 256]))
        mla_step(q, kv, self.weights, cached, plan=plan)
        if g.has_indexer:
            keys = torch.zeros(tokens, g.index_head_dim, dtype=self.dtype)
            cache, pools = self.index_keys(keys)
            index = IndexInputs(
                torch.empty(tokens, g.index_n_heads, g.index_head_dim, dtype=E4M3),
                keys,
                torch.zeros(tokens, g.index_n_heads),
                cache,
                pools=pools,
            )
            sparse_step(q, kv, self.weights, cached, index, g.index_topk)

    def index_keys(self, keys: Tensor) -> tuple[PagedLatentCache, PooledKeys | None]:
        width, size = self.g.index_head_dim, self.d.index_pool
        if size == 1:
            row = RowShape(width, 0)
            return PagedLatentCache.allocate(row, "fp8_token", num_pages=3), None
        cache = PooledKeyCache.allocate(width, size, num_pages=3, page_size=self.d.page_size)
        bias = torch.zeros(size, width, dtype=self.dtype)
        return cache.keys, PooledKeys(torch.zeros_like(keys), bias, cache.states)

    def steps(self) -> list[Callable[[], None]]:
        return [self.step] * 4


def main(
    model: str,
    heads: str,
    format: str,
    user: str,
    arch: str,
    num_sms: str,
    longest: str,
    seeds: str,
    mode: str = "",
) -> None:
    assert model in ("deepseek-v3", "deepseek-v3.2", "glm-5", "glm-5.3-flash")
    number = int(arch)
    d = deployment(
        model,
        heads=int(heads),
        format=format,
        page_size=64,
        page_rows=None,
        dtype="bf16",
        user=user,
        max_context=int(longest),
        max_tokens=8192,
        has_fp8_weights=mode == "fp8-weights",
        is_batch_invariant=mode == "batch-invariant",
    )
    kind = {"vllm": VllmEngine, "sglang": SglangEngine, "steps": StepsEngine}[user]
    with gpu(number, int(num_sms)) as served:
        for seed in range(int(seeds)):
            for step in kind(d, seed).steps():
                step()
    usual = launch.Target(number, NUM_SMS[number], launch.SHARED_BYTES[number])
    compiled = {entry.key: entry.kernel for entry in entries_of(list(calls_of(d)), usual)}
    # a product that cuBLAS computes on a GPU
    served = {key: name for key, name in served.items() if name != "_batched_matmul_kernel"}
    json.dump({"served": served, "compiled": compiled}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
