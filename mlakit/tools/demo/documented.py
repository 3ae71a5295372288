"""One serving step through the functions of Modular's API, each compared with its oracle.

A ragged batch (a new prompt, two decoding requests, one with draft tokens, an idle one) of one rank
of DeepSeek-V3 goes through every documented function on the device of the demo; the oracles run on
the CPU. Pages are shuffled, and cache rows without a token are NaN: reading them would show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mlakit import reference
from mlakit.cache import token_requests, token_slots
from mlakit.compat import modular
from mlakit.dispatch.checks import E4M3
from mlakit.formats import saturating_cast
from mlakit.model.geometry import MLAGeometry
from mlakit.model.rope import rope_table
from mlakit.tools.demo.check import Stage
from mlakit.tools.testing import poison, shuffled_pages

GEOMETRY = MLAGeometry.preset("deepseek-v3")
HEADS = GEOMETRY.num_heads // 8
D_C, D_R = GEOMETRY.kv_lora_rank, GEOMETRY.qk_rope_head_dim
D_N, D_V = GEOMETRY.qk_nope_head_dim, GEOMETRY.v_head_dim
WIDTH, SCALE = GEOMETRY.row.width, GEOMETRY.softmax_scale

CACHED = (0, 64, 130, 10, 191)  # tokens of each request before this step
NEW = (17, 1, 4, 0, 1)  # a prompt, a last page of one token, drafts, an idle request, one token
TOTALS = tuple(before + new for before, new in zip(CACHED, NEW, strict=True))
TOKENS = sum(NEW)
PAGE_SIZE, NUM_PAGES = 64, 16
NUM_LAYERS, LAYER = 2, 1
TOPK = 32
GROUP = 128  # columns of kv_b_proj that share a scale
EPSILON = 1e-6
DTYPE = torch.bfloat16


class Batch:
    """What the functions of a step share: requests, pages, the model's tables.

    Random numbers are made on the CPU: every device gets the same ones.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.random = device, torch.Generator().manual_seed(0)
        pages = [-(-total // PAGE_SIZE) for total in TOTALS]
        table = shuffled_pages(len(pages), pages, NUM_PAGES, self.random)
        self.page_table = table.to(device)
        self.offsets = torch.tensor([0, *accumulate(NEW)], dtype=torch.int32, device=device)
        self.cached = torch.tensor(CACHED, dtype=torch.int32, device=device)
        self.freqs = rope_table(GEOMETRY, max(TOTALS), device=device).to(DTYPE)
        self.gamma = 1 + 0.1 * self.normal(D_C)
        self.requests, index = token_requests(self.offsets, TOKENS)
        self.positions = self.cached[self.requests] + index
        self.new_slots = token_slots(self.page_table, PAGE_SIZE, self.requests, self.positions)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random).to(self.device, DTYPE)

    def unwritten(self, *shape: int) -> Tensor:
        """An output full of NaN: elements that a function does not write fail the check."""
        return poison(torch.empty(shape, dtype=DTYPE, device=self.device))

    def slots(self, counts: Sequence[int]) -> Tensor:
        """Slots of the first `counts[b]` tokens of each request b."""
        starts = torch.tensor([0, *accumulate(counts)], device=self.device)
        request, index = token_requests(starts, sum(counts))
        return token_slots(self.page_table, PAGE_SIZE, request, index)

    def rows(self, kv: modular.KVCollection) -> list[Tensor]:
        """The dequantised rows of each request, with its new tokens, float64 on the CPU."""
        rows = kv.cache.layer(LAYER).read(self.slots(TOTALS), torch.float64)
        return list(rows.cpu().split(TOTALS))

    def collection(self, dtype: torch.dtype) -> modular.KVCollection:
        """A cache with the context of every request, and NaN everywhere else."""
        shape = (NUM_PAGES, 1, NUM_LAYERS, PAGE_SIZE, 1, WIDTH)
        blocks = poison(torch.empty(shape, dtype=dtype, device=self.device))
        kv = modular.KVCollection(blocks, self.page_table, self.cached)
        kv.cache.layer(LAYER).write(self.slots(CACHED), self.normal(sum(CACHED), WIDTH))
        return kv

    def timed(self, name: str, call: Callable[[], object]) -> Stage:
        stage = Stage(name)
        stage.timed(TOKENS, self.device, call)
        return stage

    def check_append(
        self, stage: Stage, kv: modular.KVCollection, q_rope: Tensor, raw: Tensor, q_out: Tensor
    ) -> None:
        """The rotated queries and the new cache rows of a fused append."""
        layer = kv.cache.layer(LAYER)
        rows = layer.read(self.new_slots).to(layer.payload.dtype).cpu()
        tensors = (each.cpu() for each in (q_rope, raw, self.freqs, self.gamma))
        step: Any = (*tensors, self.positions.tolist())
        exact = reference.norm_rope_quant(*step, epsilon=EPSILON)
        naive = reference.norm_rope_quant_stepwise(
            *step, epsilon=EPSILON, out_dtype=q_out.dtype, cache_dtype=rows.dtype
        )
        for result in zip((q_out, rows), exact, naive, strict=True):
            stage.check(*result)


def append(batch: Batch, kv: modular.KVCollection, *, by_layer: bool) -> Stage:
    q_rope, raw = batch.normal(TOKENS, HEADS, D_R), batch.normal(TOKENS, WIDTH)
    q_out = batch.unwritten(*q_rope.shape)
    shared = (batch.offsets, batch.freqs, batch.gamma)
    if by_layer:
        name, call = (
            "mla_fused_rope_rmsnorm_quantization",
            lambda: modular.mla_fused_rope_rmsnorm_quantization(
                *(q_out, q_rope, *shared, kv, LAYER, EPSILON),
                kv_input=lambda rows, columns: raw[rows][:, columns],
            ),
        )
    else:
        name, call = (
            "fused_rope_rmsnorm_quantization_kernel",
            lambda: modular.fused_rope_rmsnorm_quantization_kernel(
                q_out, q_rope, raw, *shared, kv.get_key_cache(LAYER), EPSILON
            ),
        )
    stage = batch.timed(name, call)
    batch.check_append(stage, kv, q_rope, raw, q_out)
    return stage


def decode(batch: Batch, kv: modular.KVCollection) -> Stage:
    q, out = batch.normal(TOKENS, HEADS, WIDTH), batch.unwritten(TOKENS, HEADS, D_C)
    arguments = (out, q, kv.get_key_cache(LAYER), modular.CausalMask(), batch.offsets, SCALE)
    options: Any = {"ragged": True, "num_partitions": 3}
    name = "flare_mla_decoding"
    stage = batch.timed(name, lambda: modular.flare_mla_decoding(*arguments, **options))
    exact, naive = (
        reference.mla_decode(
            q.cpu(), batch.rows(kv), NEW, softmax_scale=SCALE, v_width=D_C, dtype=dtype
        )[0]
        for dtype in (torch.float64, torch.float32)
    )
    stage.check(out, exact, naive)
    return stage


def sparse(batch: Batch, kv: modular.KVCollection) -> Stage:
    """For every new token up to TOPK visible rows, in random order, padded with −1."""
    q, out = batch.normal(TOKENS, HEADS, WIDTH), batch.unwritten(TOKENS, HEADS, D_C)
    sink = torch.randn(HEADS, generator=batch.random).to(batch.device)
    rows = torch.full((TOKENS, TOPK), -1, dtype=torch.int32, device=batch.device)
    for token, position in enumerate(batch.positions.tolist()):
        seen = torch.randperm(position + 1, generator=batch.random)[:TOPK].to(batch.device)
        own = batch.requests[token].expand(len(seen))
        rows[token, : len(seen)] = token_slots(batch.page_table, PAGE_SIZE, own, seen).int()
    lengths = (rows >= 0).sum(-1, dtype=torch.int32)
    widths: Any = {"num_q_heads": HEADS, "qk_depth": WIDTH, "v_depth": D_C, "indices_stride": TOPK}
    arguments = (out, q, kv.get_key_cache(LAYER), rows, lengths, sink, SCALE)
    name = "mla_sm100_prefill_sparse"
    stage = batch.timed(name, lambda: modular.mla_sm100_prefill_sparse(*arguments, **widths))
    layer = kv.cache.layer(LAYER)
    pool = layer.read(torch.arange(layer.num_slots, device=batch.device), torch.float64).cpu()
    options: Any = {"topk_lens": lengths.cpu(), "sink": sink.cpu()}
    exact, naive = (
        reference.sparse_mla(
            *(q.cpu(), pool, rows.cpu()), softmax_scale=SCALE, v_width=D_C, dtype=dtype, **options
        )[0]
        for dtype in (torch.float64, torch.float32)
    )
    stage.check(out, exact, naive)
    return stage


def prefill(batch: Batch, kv: modular.KVCollection) -> Stage:
    """Expanded attention over the cache rows after the branch, and the rows themselves."""
    q, raw = batch.normal(TOKENS, HEADS, D_N + D_R), batch.normal(TOKENS, WIDTH)
    q_rope, out = q[..., D_N:].clone(), batch.unwritten(TOKENS, HEADS, D_V)
    kv.cache.layer(LAYER).write(batch.new_slots, raw)
    weight = saturating_cast(batch.normal(HEADS * (D_N + D_V), D_C), E4M3)
    blocks = (len(weight) // GROUP, D_C // GROUP)
    scale = ((0.5 + torch.rand(blocks, generator=batch.random)) / D_C**0.5).to(batch.device)
    starts, skipped, lengths = modular.mla_prefill_plan(
        batch.offsets, batch.cached, NUM_PAGES * PAGE_SIZE, page_size=PAGE_SIZE, max_chunks=1
    )
    chunk = (starts[0], skipped[0], int(lengths[0]), weight, scale)
    shared = (batch.offsets, batch.freqs, batch.gamma, kv, LAYER, SCALE, EPSILON)
    name = "mla_prefill_branch_fp8"
    stage = batch.timed(name, lambda: modular.mla_prefill_branch_fp8(out, q, *shared, *chunk))
    latent, k_rope = torch.cat(batch.rows(kv)).split([D_C, D_R], dim=-1)
    quantised = reference.quantize_fp8(latent, GROUP)
    ranges = (batch.offsets.tolist(), [0, *accumulate(TOTALS)])

    def attended(dtype: torch.dtype) -> Tensor:
        expanded = reference.scaled_mm_fp8(
            *(*quantised, weight.cpu(), scale.cpu()), n_group=GROUP, k_group=GROUP, dtype=dtype
        )
        if dtype != torch.float64:
            expanded = expanded.to(DTYPE)  # K and V are stored in this dtype
        k_nope, v = expanded.unflatten(1, (HEADS, D_N + D_V)).split([D_N, D_V], dim=-1)
        tensors = (q.cpu(), k_nope, k_rope, v)
        return reference.mla_prefill(*tensors, *ranges, softmax_scale=SCALE, dtype=dtype)[0]

    stage.check(out, attended(torch.float64), attended(torch.float32))
    batch.check_append(stage, kv, q_rope, raw, q[..., D_N:])
    return stage


def all_calls(device: torch.device) -> list[Stage]:
    """One step of the batch: append to a cache, then attend over what was appended."""
    batch = Batch(device)
    bf16, fp8, not_appended = (batch.collection(each) for each in (DTYPE, E4M3, DTYPE))
    return [
        append(batch, bf16, by_layer=False),
        append(batch, fp8, by_layer=True),
        decode(batch, bf16),
        decode(batch, fp8),
        sparse(batch, bf16),
        prefill(batch, not_appended),
    ]
