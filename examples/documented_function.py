"""The functions that Modular documents for MAX's MLA kernels, under their own names.

Three requests take one step: a prompt of 20 tokens, a request that decodes one token, and one with
two draft tokens. Every function gets the arguments that MAX's documentation gives it, and a few
lines of plain torch compute the same result.

    python examples/documented_function.py
    python examples/documented_function.py --device cuda --heads 128

The table has mlakit's own name of each function, and its largest difference to plain torch,
relative to the largest value of the token. The exit status is 1 if one is above its tolerance.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

import mlakit
from mlakit.compat.modular import (
    CausalMask,
    KVCollection,
    flare_mla_decoding,
    fused_rope_rmsnorm_quantization_kernel,
    mla_fused_rope_rmsnorm_quantization,
    mla_prefill_branch_fp8,
    mla_prefill_plan,
    mla_sm100_prefill_sparse,
)

MODEL = mlakit.MLAGeometry.preset("deepseek-v3")
D_C, D_R = MODEL.kv_lora_rank, MODEL.qk_rope_head_dim
D_N, D_V = MODEL.qk_nope_head_dim, MODEL.v_head_dim
SCALE, EPSILON = MODEL.softmax_scale, 1e-6
CACHED, NEW = (0, 70, 130), (20, 1, 2)  # tokens of each request before the step, and new ones
TOTALS = tuple(before + new for before, new in zip(CACHED, NEW, strict=True))
PAGE_SIZE, NUM_PAGES = 64, 8
TOPK, GROUP = 32, 128  # rows of a sparse list; rows and columns of a weight that share a scale
TOLERANCE = 0.02  # a bf16 result has 8 bits of mantissa


class Step:
    """The tensors that all functions of the step take."""

    def __init__(self, heads: int, device: torch.device) -> None:
        self.heads, self.device = heads, device
        self.tokens = sum(NEW)
        self.table = torch.tensor([[3, -1, -1], [6, 1, -1], [0, 7, 2]]).to(device)
        self.cached = torch.tensor(CACHED).to(device)
        self.offsets = torch.tensor([0, *accumulate(NEW)]).to(device)
        self.freqs = mlakit.rope_table(MODEL, max(TOTALS)).to(device)
        self.gamma = (1 + 0.1 * torch.randn(D_C)).to(device)
        ranges = zip(CACHED, TOTALS, strict=True)
        self.positions = torch.cat([torch.arange(*each) for each in ranges]).to(device)
        self.requests = [request for request, new in enumerate(NEW) for _ in range(new)]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(self.device, torch.bfloat16)

    def collection(self, dtype: torch.dtype = torch.bfloat16) -> KVCollection:
        """A cache of two layers with random rows, in the axes of MAX."""
        blocks = self.normal(NUM_PAGES, 1, 2, PAGE_SIZE, 1, D_C + D_R).to(dtype)
        return KVCollection(blocks, self.table, self.cached)

    def slots(self, request: int, last: int) -> Tensor:
        """The physical rows of the first tokens of a request."""
        return mlakit.request_slots(self.table, PAGE_SIZE, request, 0, last)

    def rows(self, kv: KVCollection, layer: int) -> list[Tensor]:
        """The cached rows of each request, its new tokens included, float32."""
        cached = kv.cache.layer(layer)
        return [cached.read(self.slots(request, last)) for request, last in enumerate(TOTALS)]

    def new_rows(self, kv: KVCollection, layer: int) -> Tensor:
        both = zip(self.rows(kv, layer), CACHED, strict=True)
        return torch.cat([rows[before:] for rows, before in both])


def rotated(x: Tensor, freqs: Tensor) -> Tensor:
    """RoPE of x [tokens, ..., D_R] by freqs [tokens, D_R]: cos0, sin0, cos1, ..."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    angles = torch.view_as_complex(freqs.float().unflatten(-1, (-1, 2)))
    angles = angles.view(len(x), *[1] * (x.ndim - 2), -1)
    return torch.view_as_real(pairs * angles).flatten(-2)


def finished(step: Step, raw: Tensor) -> Tensor:
    """The cache rows of raw latents [tokens, D_C + D_R]: RMSNorm, then RoPE."""
    latent, key = raw.float().split([D_C, D_R], dim=-1)
    norm = torch.rsqrt(latent.square().mean(-1, keepdim=True) + EPSILON)
    return torch.cat([latent * norm * step.gamma, rotated(key, step.freqs[step.positions])], -1)


def attended(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One query [heads, width] over keys [n, heads or 1, width] and values [n, heads or 1, ...]."""
    scores = (q.float() * keys).sum(-1) * SCALE  # [n, heads]
    return (scores.softmax(0)[..., None] * values).sum(0)


def relative(actual: Tensor, expected: Tensor) -> float:
    """The largest difference of a token, relative to its largest expected value."""
    difference = (actual.float() - expected).flatten(1).abs().amax(1)
    return (difference / expected.flatten(1).abs().amax(1)).max().item()


def append_by_layer(step: Step, kv: KVCollection, q: Tensor, raw: Tensor) -> list[float]:
    """`mla_fused_rope_rmsnorm_quantization`: rotate q, norm, rotate and cache the latents."""
    q_out = torch.empty_like(q)
    mla_fused_rope_rmsnorm_quantization(
        q_out, q, step.offsets, step.freqs, step.gamma, kv, 0, EPSILON, kv_input=raw
    )
    expected = rotated(q, step.freqs[step.positions])
    return [relative(q_out, expected), relative(step.new_rows(kv, 0), finished(step, raw))]


def append_kernel(step: Step, q: Tensor, raw: Tensor) -> list[float]:
    """`fused_rope_rmsnorm_quantization_kernel`: the same for one layer's cache, here e4m3 rows."""
    kv, q_out = step.collection(torch.float8_e4m3fn), torch.empty_like(q)
    fused_rope_rmsnorm_quantization_kernel(
        q_out, q, raw, step.offsets, step.freqs, step.gamma, kv.get_key_cache(1), EPSILON
    )
    expected = finished(step, raw)
    # e4m3 has 3 bits of mantissa, and 2**-9 is its smallest value
    is_off = (step.new_rows(kv, 1) - expected).abs() > 0.07 * expected.abs() + 2**-10
    q_error = relative(q_out, rotated(q, step.freqs[step.positions]))
    return [q_error, is_off.float().mean(-1).max().item()]


def decode(step: Step, kv: KVCollection) -> list[float]:
    """`flare_mla_decoding`: absorbed attention over the rows that the append has cached."""
    q = step.normal(step.tokens, step.heads, D_C + D_R)
    out = q.new_empty(step.tokens, step.heads, D_C)
    k = kv.get_key_cache(0)
    flare_mla_decoding(out, q, k, CausalMask(), step.offsets, SCALE, ragged=True)
    rows = step.rows(kv, 0)
    expected = []
    for each, request, position in zip(q, step.requests, step.positions.tolist(), strict=True):
        seen = rows[request][: position + 1, None]
        expected.append(attended(each, seen, seen[..., :D_C]))
    return [relative(out, torch.stack(expected))]


def sparse(step: Step, kv: KVCollection) -> list[float]:
    """`mla_sm100_prefill_sparse`: absorbed attention over a list of rows per token."""
    q = step.normal(step.tokens, step.heads, D_C + D_R)
    out = q.new_empty(step.tokens, step.heads, D_C)
    indices = torch.full((step.tokens, TOPK), -1, device=step.device)
    expected = []
    for token, position in enumerate(step.positions.tolist()):
        seen = step.slots(step.requests[token], position + 1)
        chosen = seen[torch.randperm(len(seen))[:TOPK].to(step.device)]
        indices[token, : len(chosen)] = chosen
        rows = kv.cache.layer(0).read(chosen)[:, None]
        expected.append(attended(q[token], rows, rows[..., :D_C]))
    mla_sm100_prefill_sparse(
        out,
        q,
        kv.get_key_cache(0),
        indices,
        (indices >= 0).sum(-1),
        None,
        SCALE,
        num_q_heads=step.heads,
        qk_depth=D_C + D_R,
        v_depth=D_C,
        indices_stride=TOPK,
    )
    return [relative(out, torch.stack(expected))]


def prefill(step: Step) -> list[float]:
    """`mla_prefill_branch_fp8`: it norms the new rows in the cache, expands all, and attends."""
    kv = step.collection()
    raw = step.new_rows(kv, 0)  # MAX writes the raw latents first
    q = step.normal(step.tokens, step.heads, D_N + D_R)
    out, given = q.new_empty(step.tokens, step.heads, D_V), q.clone()
    weight = step.normal(step.heads * (D_N + D_V), D_C).to(torch.float8_e4m3fn)
    blocks = (len(weight) // GROUP, D_C // GROUP)
    weight_scale = (0.5 + torch.rand(blocks)).to(step.device) / D_C**0.5
    starts, skipped, lengths = mla_prefill_plan(
        step.offsets, step.cached, NUM_PAGES * PAGE_SIZE, page_size=PAGE_SIZE, max_chunks=1
    )
    mla_prefill_branch_fp8(
        *(out, q, step.offsets, step.freqs, step.gamma, kv, 0, SCALE, EPSILON),
        *(starts[0], skipped[0], int(lengths[0]), weight, weight_scale),
    )
    scales = weight_scale.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    projection = weight.float() * scales
    keys, values = [], []
    for rows in step.rows(kv, 0):
        latent, key = rows.split([D_C, D_R], dim=-1)
        # K and V are stored in q's dtype
        expanded = (e4m3(latent) @ projection.T).bfloat16().float()
        expanded = expanded.unflatten(-1, (step.heads, D_N + D_V))
        shared = key[:, None].expand(-1, step.heads, -1)
        keys.append(torch.cat([expanded[..., :D_N], shared], -1))
        values.append(expanded[..., D_N:])
    q_rope = rotated(given[..., D_N:], step.freqs[step.positions])
    queries = torch.cat([given[..., :D_N].float(), q_rope], -1)
    expected = [
        attended(each, keys[request][: position + 1], values[request][: position + 1])
        for each, request, position in zip(
            queries, step.requests, step.positions.tolist(), strict=True
        )
    ]
    cached = relative(step.new_rows(kv, 0), finished(step, raw))
    return [relative(out, torch.stack(expected)), cached]


def e4m3(latent: Tensor) -> Tensor:
    """What remains of the latents after FP8 with a scale per token and GROUP columns."""
    groups = latent.unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    # by a tensor: CUDA divides by a number with its reciprocal, and codes between two others flip
    scale = largest / torch.full_like(largest, torch.finfo(torch.float8_e4m3fn).max)
    codes = (groups * (1 / scale)).to(torch.float8_e4m3fn)
    return torch.flatten(codes.float() * scale, -2)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--heads", type=int, default=16, help="query heads of this rank")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)

    step = Step(options.heads, torch.device(options.device))
    kv = step.collection()
    q, raw = step.normal(step.tokens, step.heads, D_R), step.normal(step.tokens, D_C + D_R)
    append = "norm_rope_quant_append"
    errors = {
        ("mla_fused_rope_rmsnorm_quantization", append): append_by_layer(step, kv, q, raw),
        ("fused_rope_rmsnorm_quantization_kernel", append): append_kernel(step, q, raw),
        ("flare_mla_decoding", "mla_decode"): decode(step, kv),
        ("mla_sm100_prefill_sparse", "sparse_mla"): sparse(step, kv),
        ("mla_prefill_branch_fp8", "prefill_branch"): prefill(step),
    }
    print(f"{'documented function':<40}{'in mlakit':<24}{'difference':>10}")
    for (name, own), found in errors.items():
        print(f"{name:<40}{own:<24}{max(found):>10.5f}")
    # `all` of comparisons, which are false for NaN
    is_right = all(error <= TOLERANCE for found in errors.values() for error in found)
    print("plain torch agrees" if is_right else "DIFFERENT from plain torch")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
