"""One serving step through the functions of Modular's API, each compared with its oracle.

A ragged batch (a new prompt, two decoding requests, one with draft tokens, an idle one) of one rank
of DeepSeek-V3 goes through every documented function on the device of the demo; the oracles run on
the CPU. Pages are shuffled, and cache rows without a token are NaN: reading them would show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter

import torch
from rich.progress import Progress
from torch import Tensor

from mlakit import reference
from mlakit.cache import token_requests, token_slots
from mlakit.compat import modular
from mlakit.dispatch.checks import E4M3
from mlakit.formats import saturating_cast
from mlakit.model.geometry import MLAGeometry
from mlakit.model.rope import rope_table
from mlakit.tools.demo.check import Check, Result, check_results
from mlakit.tools.testing import poison, shuffled_pages

MODEL = "deepseek-v3"
RANKS = 8
GEOMETRY = MLAGeometry.preset(MODEL)
HEADS = GEOMETRY.num_heads // RANKS
D_C, D_R = GEOMETRY.kv_lora_rank, GEOMETRY.qk_rope_head_dim
D_N, D_V = GEOMETRY.qk_nope_head_dim, GEOMETRY.v_head_dim
WIDTH = GEOMETRY.row.width

CACHED = (0, 64, 130, 10, 191)  # tokens of each request before this step
NEW = (17, 1, 4, 0, 1)  # a prompt, a last page of one token, drafts, an idle request, one token
TOTALS = tuple(before + new for before, new in zip(CACHED, NEW, strict=True))
PAGE_SIZE = 64
NUM_PAGES = 16
NUM_LAYERS, LAYER = 2, 1
TOPK = 32
GROUP = 128  # columns of kv_b_proj that share a scale
EPSILON = 1e-6
DTYPE = torch.bfloat16
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Call:
    """One call of a documented function, and its check."""

    shapes: str
    seconds: float
    check: Check


@dataclass(frozen=True, eq=False)
class Batch:
    """The arguments that the functions of one step share: requests, pages, the model's tables.

    Random numbers are made on the CPU: every device gets the same ones.
    """

    generator: torch.Generator
    page_table: Tensor  # [batch, max_pages] int32, shuffled
    row_offsets: Tensor  # [batch + 1] int32
    cached: Tensor  # [batch] int32
    freqs: Tensor  # [positions, D_R]
    gamma: Tensor  # [D_C]

    @property
    def device(self) -> torch.device:
        return self.page_table.device

    @classmethod
    def make(cls, device: torch.device = CPU, seed: int = 0) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        pages = [-(-total // PAGE_SIZE) for total in TOTALS]
        return cls(
            generator,
            shuffled_pages(len(pages), pages, NUM_PAGES, generator).to(device),
            torch.tensor([0, *accumulate(NEW)], dtype=torch.int32, device=device),
            torch.tensor(CACHED, dtype=torch.int32, device=device),
            rope_table(GEOMETRY, max(TOTALS), device=device).to(DTYPE),
            (1 + 0.1 * torch.randn(D_C, generator=generator)).to(device, DTYPE),
        )

    @property
    def num_tokens(self) -> int:
        return sum(NEW)

    @property
    def new_positions(self) -> list[int]:
        request, index = token_requests(self.row_offsets, self.num_tokens)
        positions: list[int] = (self.cached[request] + index).tolist()
        return positions

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, DTYPE)

    def unwritten(self, *shape: int) -> Tensor:
        """An output full of NaN: elements that a function does not write fail the check."""
        return poison(torch.empty(shape, dtype=DTYPE, device=self.device))

    def timed(self, call: Callable[[], object]) -> float:
        """Seconds of one call; on a CPU this includes importing its kernel."""
        self._finish()
        start = perf_counter()
        call()
        self._finish()
        return perf_counter() - start

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def append_arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        """q_rope, the raw latents kv, and an output for the rotated queries."""
        q_rope = self.normal(self.num_tokens, HEADS, D_R)
        return q_rope, self.normal(self.num_tokens, WIDTH), self.unwritten(*q_rope.shape)

    def slots(self, counts: Sequence[int], first: Tensor) -> Tensor:
        """Slots of `counts[b]` tokens of each request b, from position `first[b]` on."""
        starts = torch.tensor([0, *accumulate(counts)], device=self.device)
        request, index = token_requests(starts, sum(counts))
        return token_slots(self.page_table, PAGE_SIZE, request, first[request] + index)

    @property
    def cached_slots(self) -> Tensor:
        return self.slots(CACHED, torch.zeros_like(self.cached))

    @property
    def new_slots(self) -> Tensor:
        return self.slots(NEW, self.cached)

    def request_rows(self, collection: modular.KVCollection) -> list[Tensor]:
        """The dequantised rows of each request, with its new tokens, float64 on the CPU."""
        slots = self.slots(TOTALS, torch.zeros_like(self.cached))
        rows = collection.cache.layer(LAYER).read(slots, torch.float64)
        return list(rows.cpu().split(TOTALS))

    def collection(self, dtype: torch.dtype) -> modular.KVCollection:
        """A cache with the context of every request, and NaN everywhere else."""
        shape = (NUM_PAGES, 1, NUM_LAYERS, PAGE_SIZE, 1, WIDTH)
        blocks = poison(torch.empty(shape, dtype=dtype, device=self.device))
        collection = modular.KVCollection(blocks, self.page_table, self.cached)
        context = self.normal(sum(CACHED), WIDTH)
        collection.cache.layer(LAYER).write(self.cached_slots, context)
        return collection


def in_both_precisions(oracle: Callable[[torch.dtype], Tensor]) -> tuple[Tensor, Tensor]:
    """(exact, naive): the oracle in float64, and in the float32 the kernels compute in."""
    return oracle(torch.float64), oracle(torch.float32)


def appended(
    batch: Batch, collection: modular.KVCollection, q_rope: Tensor, kv: Tensor, q_out: Tensor
) -> list[Result]:
    """The rotated queries and cache rows of a fused append, with their oracles."""
    layer = collection.cache.layer(LAYER)
    rows = layer.read(batch.new_slots).to(layer.payload.dtype).cpu()
    q_out, freqs, gamma = q_out.cpu(), batch.freqs.cpu(), batch.gamma.cpu()
    step = (q_rope.cpu(), kv.cpu(), freqs, gamma, batch.new_positions)
    exact_q, exact_rows = reference.norm_rope_quant(*step, epsilon=EPSILON)
    naive_q, naive_rows = reference.norm_rope_quant_stepwise(
        *step, epsilon=EPSILON, out_dtype=q_out.dtype, cache_dtype=rows.dtype
    )
    return [Result(q_out, exact_q, naive_q), Result(rows, exact_rows, naive_rows)]


def call_append_kernel(batch: Batch, collection: modular.KVCollection) -> Call:
    q_rope, kv, q_out = batch.append_arguments()
    seconds = batch.timed(
        lambda: modular.fused_rope_rmsnorm_quantization_kernel(
            q_out,
            q_rope,
            kv,
            batch.row_offsets,
            batch.freqs,
            batch.gamma,
            collection.get_key_cache(LAYER),
            EPSILON,
        )
    )
    results = appended(batch, collection, q_rope, kv, q_out)
    shapes = f"kv {shape_of(kv)} into {collection.cache.format} pages"
    return Call(shapes, seconds, check_results("fused_rope_rmsnorm_quantization_kernel", *results))


def call_append_layer(batch: Batch, collection: modular.KVCollection) -> Call:
    q_rope, kv, q_out = batch.append_arguments()
    seconds = batch.timed(
        lambda: modular.mla_fused_rope_rmsnorm_quantization(
            q_out,
            q_rope,
            batch.row_offsets,
            batch.freqs,
            batch.gamma,
            collection,
            LAYER,
            EPSILON,
            kv_input=lambda rows, columns: kv[rows][:, columns],
        )
    )
    results = appended(batch, collection, q_rope, kv, q_out)
    shapes = f"kv {shape_of(kv)} into {collection.cache.format} pages"
    return Call(shapes, seconds, check_results("mla_fused_rope_rmsnorm_quantization", *results))


def call_decode(batch: Batch, collection: modular.KVCollection) -> Call:
    q = batch.normal(batch.num_tokens, HEADS, WIDTH)
    out = batch.unwritten(batch.num_tokens, HEADS, D_C)
    seconds = batch.timed(
        lambda: modular.flare_mla_decoding(
            out,
            q,
            collection.get_key_cache(LAYER),
            modular.CausalMask(),
            batch.row_offsets,
            GEOMETRY.softmax_scale,
            ragged=True,
            num_partitions=3,
        )
    )
    rows = batch.request_rows(collection)
    oracles = in_both_precisions(
        lambda dtype: reference.mla_decode(
            q.cpu(), rows, NEW, softmax_scale=GEOMETRY.softmax_scale, v_width=D_C, dtype=dtype
        )[0]
    )
    shapes = f"q {shape_of(q)} over {collection.cache.format} pages"
    return Call(shapes, seconds, check_results("flare_mla_decoding", Result(out.cpu(), *oracles)))


def call_sparse(batch: Batch, collection: modular.KVCollection) -> Call:
    q = batch.normal(batch.num_tokens, HEADS, WIDTH)
    sink = torch.randn(HEADS, generator=batch.generator).to(batch.device)
    rows, lengths = row_lists(batch)
    out = batch.unwritten(batch.num_tokens, HEADS, D_C)
    seconds = batch.timed(
        lambda: modular.mla_sm100_prefill_sparse(
            out,
            q,
            collection.get_key_cache(LAYER),
            rows,
            lengths,
            sink,
            GEOMETRY.softmax_scale,
            num_q_heads=HEADS,
            qk_depth=WIDTH,
            v_depth=D_C,
            indices_stride=TOPK,
        )
    )
    layer = collection.cache.layer(LAYER)
    slots = torch.arange(layer.num_slots, device=batch.device)
    pool = layer.read(slots, torch.float64).cpu()
    oracles = in_both_precisions(
        lambda dtype: reference.sparse_mla(
            q.cpu(),
            pool,
            rows.cpu(),
            softmax_scale=GEOMETRY.softmax_scale,
            v_width=D_C,
            topk_lens=lengths.cpu(),
            sink=sink.cpu(),
            dtype=dtype,
        )[0]
    )
    shapes = f"q {shape_of(q)}, {TOPK} rows per token"
    return Call(
        shapes, seconds, check_results("mla_sm100_prefill_sparse", Result(out.cpu(), *oracles))
    )


def row_lists(batch: Batch) -> tuple[Tensor, Tensor]:
    """For every new token up to TOPK visible rows, in random order, padded with −1."""
    rows = torch.full((batch.num_tokens, TOPK), -1, dtype=torch.int32)
    lengths = torch.empty(batch.num_tokens, dtype=torch.int32)
    request, _ = token_requests(batch.row_offsets.cpu(), batch.num_tokens)
    page_table = batch.page_table.cpu()
    for token, position in enumerate(batch.new_positions):
        seen = torch.randperm(position + 1, generator=batch.generator)[:TOPK]
        own = request[token].expand(len(seen))
        rows[token, : len(seen)] = token_slots(page_table, PAGE_SIZE, own, seen).int()
        lengths[token] = len(seen)
    return rows.to(batch.device), lengths.to(batch.device)


def call_prefill(batch: Batch, collection: modular.KVCollection) -> Call:
    q = batch.normal(batch.num_tokens, HEADS, D_N + D_R)
    q_rope, raw = q[..., D_N:].clone(), batch.normal(batch.num_tokens, WIDTH)
    collection.cache.layer(LAYER).write(batch.new_slots, raw)
    weight, weight_scale = up_projection(batch)
    buffer_row_offsets, cache_offsets, buffer_lengths = modular.mla_prefill_plan(
        batch.row_offsets, batch.cached, NUM_PAGES * PAGE_SIZE, page_size=PAGE_SIZE, max_chunks=1
    )
    out = batch.unwritten(batch.num_tokens, HEADS, D_V)
    seconds = batch.timed(
        lambda: modular.mla_prefill_branch_fp8(
            out,
            q,
            batch.row_offsets,
            batch.freqs,
            batch.gamma,
            collection,
            LAYER,
            GEOMETRY.softmax_scale,
            EPSILON,
            buffer_row_offsets[0],
            cache_offsets[0],
            int(buffer_lengths[0]),
            weight,
            weight_scale,
        )
    )
    oracles = in_both_precisions(prefill_oracle(batch, collection, q, weight, weight_scale))
    results = appended(batch, collection, q_rope, raw, q[..., D_N:])
    shapes = f"q {shape_of(q)}, kv_b_proj {shape_of(weight)} e4m3"
    attended = Result(out.cpu(), *oracles)
    return Call(shapes, seconds, check_results("mla_prefill_branch_fp8", attended, *results))


def up_projection(batch: Batch) -> tuple[Tensor, Tensor]:
    """kv_b_proj [heads · (D_N + D_V), D_C] e4m3, and a scale for every GROUP × GROUP of it."""
    weight = saturating_cast(batch.normal(HEADS * (D_N + D_V), D_C), E4M3)
    blocks = (len(weight) // GROUP, D_C // GROUP)
    scale = (0.5 + torch.rand(blocks, generator=batch.generator)) / D_C**0.5
    return weight, scale.to(batch.device)


def prefill_oracle(
    batch: Batch,
    collection: modular.KVCollection,
    q: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
) -> Callable[[torch.dtype], Tensor]:
    """Expanded attention over the cache rows after the prefill branch."""
    rows = batch.request_rows(collection)
    q, weight, weight_scale = (x.cpu() for x in (q, weight, weight_scale))
    latent, k_rope = torch.cat(rows).split([D_C, D_R], dim=-1)
    quantised, scales = reference.quantize_fp8(latent, GROUP)

    def attend(dtype: torch.dtype) -> Tensor:
        expanded = reference.scaled_mm_fp8(
            quantised, scales, weight, weight_scale, n_group=GROUP, k_group=GROUP, dtype=dtype
        )
        if dtype != torch.float64:
            expanded = expanded.to(q.dtype)  # K and V are stored in this dtype
        k_nope, v = expanded.unflatten(1, (HEADS, D_N + D_V)).split([D_N, D_V], dim=-1)
        return reference.mla_prefill(
            q,
            k_nope,
            k_rope,
            v,
            batch.row_offsets.tolist(),
            [0, *accumulate(len(each) for each in rows)],
            softmax_scale=GEOMETRY.softmax_scale,
            dtype=dtype,
        )[0]

    return attend


def all_calls(progress: Progress, device: torch.device = CPU) -> list[Call]:
    """One step of the batch: append to a cache, then attend over what was appended."""
    batch = Batch.make(device)
    bf16, fp8 = batch.collection(DTYPE), batch.collection(E4M3)
    unwritten_bf16 = batch.collection(DTYPE)
    calls = [
        (call_append_kernel, bf16),
        (call_append_layer, fp8),
        (call_decode, bf16),
        (call_decode, fp8),
        (call_sparse, bf16),
        (call_prefill, unwritten_bf16),
    ]
    return [
        call(batch, collection)
        for call, collection in progress.track(calls, description="documented functions")
    ]


def shape_of(tensor: Tensor) -> str:
    return "×".join(str(size) for size in tensor.shape)
