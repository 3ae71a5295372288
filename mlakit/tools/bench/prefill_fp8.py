"""The suite `prefill-fp8`: prefill of e4m3 queries, keys and values on a GPU, against bf16.

Scales  q has one per token and head. "token": so has v, and k has one per token; "block": each 128
        keys of a request have one, and so have their values of each head; "uniform": all keys have
        one, and so have all values of a head
Target  1.35x the speed of bf16 with prompts of 8k tokens
Bytes   q, k_nope, k_rope, v and their scales, and out, once
Check   some tokens, all heads, against the float64 oracle of the dequantised tensors
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from mlakit import reference
from mlakit.dispatch.checks import E4M3
from mlakit.formats import E4M3_MAX, SCALE_BLOCK
from mlakit.kernels.arguments import filled
from mlakit.model.masks import CAUSAL, NULL
from mlakit.ops import mla_prefill
from mlakit.reference.prefill import scales_of_keys
from mlakit.tools.bench import correctness, gpu
from mlakit.tools.bench.pool import SCALE
from mlakit.tools.bench.prefill import D_N, D_R, D_V, Prefill
from mlakit.tools.bench.shapes import Batch, Shape, even_lengths
from mlakit.tools.bench.suite import Baseline, BenchmarkCase, Workload
from mlakit.tools.workloads.prefill_fp8 import HALF_ROUNDING

BF16 = "mlakit bf16"
Scales: TypeAlias = Literal["token", "block", "uniform"]


@dataclass(frozen=True)
class PrefillFp8(Prefill):
    """min_speedup  target for the time of bf16 / the time of e4m3; None: no target
    scales  of keys and values, see above
    """

    scales: Scales = "token"

    target_baseline = BF16
    products = "fp8"

    @property
    def name(self) -> str:
        return f"prefill-fp8-{self.label}{'' if self.scales == 'token' else '-' + self.scales}"

    @property
    def bytes(self) -> int:
        e4m3 = self.heads * (2 * D_N + D_R + D_V) + D_R
        scales = 4 * (2 * self.heads + 1)
        return self.batch.tokens * (e4m3 + scales + 2 * self.heads * D_V)

    def build_case(self) -> BenchmarkCase:
        bf16 = super().build_case()
        starts, mask = gpu.int32(self.batch.starts), CAUSAL if self.causal else NULL
        fp8 = _quantised(*self.tensors(), self.scales, self.batch.starts)

        def call() -> tuple[Tensor, Tensor]:
            return mla_prefill(
                *(fp8.q, fp8.k_nope, fp8.k_rope, fp8.v, starts, starts),
                softmax_scale=SCALE,
                q_scale=fp8.q_scale,
                k_scale=fp8.k_scale,
                v_scale=fp8.v_scale,
                keys_per_scale=SCALE_BLOCK if self.scales == "block" else 1,
                mask=mask,
            )

        return BenchmarkCase(
            call,
            [Baseline(BF16, bf16.call)],
            check=lambda: correctness.assert_correct(("out",), call()[:1], self._fp8_samples(fp8)),
        )

    def _fp8_samples(self, fp8: _Quantised) -> Iterator[correctness.Sample]:
        starts = self.batch.starts
        if self.scales == "block":
            k_scale, v_scale = (_of_keys(each, starts) for each in (fp8.k_scale, fp8.v_scale))
            fp8 = fp8._replace(k_scale=k_scale, v_scale=v_scale)
        ends = list(pairwise(starts))
        for request in self.batch.checked_requests:
            start, end = ends[request]
            for place in correctness.evenly_spaced(end - start, self.max_checked):
                token = start + place
                yield _sample(token, slice(start, token + 1 if self.causal else end), fp8)


def _sample(token: int, keys: slice, fp8: _Quantised) -> correctness.Sample:
    """`out` of a token; the naive run has probabilities that are wrong by half a rounding."""
    own = slice(token, token + 1)
    signs = torch.arange(keys.start, keys.stop, device=fp8.v.device) % 2 * 2 - 1

    def out(v_scale: Tensor) -> Tensor:
        return reference.mla_prefill(
            *(fp8.q[own], fp8.k_nope[keys], fp8.k_rope[keys], fp8.v[keys]),
            [0, 1],
            [0, keys.stop - keys.start],
            softmax_scale=SCALE,
            q_scale=fp8.q_scale[own],
            k_scale=fp8.k_scale[keys],
            v_scale=v_scale,
            mask=NULL,
        )[0]

    v_scale = fp8.v_scale[keys]
    naive = out(v_scale * (1 + HALF_ROUNDING * signs[:, None]))
    return correctness.Sample(f"token {token}", own, [out(v_scale)], [naive])


class _Quantised(NamedTuple):
    """Arguments of `mla_prefill`."""

    q: Tensor
    k_nope: Tensor
    k_rope: Tensor
    v: Tensor
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor


def _quantised(
    q: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor, scales: Scales, starts: Sequence[int]
) -> _Quantised:
    q_scale = q.abs().amax(-1).float() / E4M3_MAX
    v_scale = v.abs().amax(-1).float() / E4M3_MAX
    k_scale = torch.maximum(k_nope.abs().amax((1, 2)), k_rope.abs().amax(1)).float() / E4M3_MAX
    if scales == "uniform":
        k_scale, v_scale = (each.amax(0).expand_as(each) for each in (k_scale, v_scale))
    k_of_keys, v_of_keys = k_scale, v_scale
    if scales == "block":
        k_scale, v_scale = (_largest_of_blocks(each, starts) for each in (k_scale, v_scale))
        k_of_keys, v_of_keys = (_of_keys(each, starts) for each in (k_scale, v_scale))
    return _Quantised(
        (q / q_scale[..., None]).to(E4M3),
        (k_nope / k_of_keys[:, None, None]).to(E4M3),
        (k_rope / k_of_keys[:, None]).to(E4M3),
        (v / v_of_keys[..., None]).to(E4M3),
        q_scale,
        k_scale,
        v_scale,
    )


def _largest_of_blocks(scale: Tensor, starts: Sequence[int]) -> Tensor:
    """[blocks, ...] of scales [keys, ...]."""
    blocks = len(scale) // SCALE_BLOCK + len(starts) - 1
    own = _of_keys(torch.arange(blocks, device=scale.device), starts)
    index = own.reshape(-1, *[1] * (scale.ndim - 1)).expand_as(scale)
    return scale.new_zeros(blocks, *scale.shape[1:]).scatter_reduce(0, index, scale, "amax")


def _of_keys(scale: Tensor, starts: Sequence[int]) -> Tensor:
    """[keys, ...] of scales [blocks, ...]."""
    return filled(scales_of_keys(scale, starts, SCALE_BLOCK))


def of_shape(shape: Shape) -> tuple[Workload, ...]:
    given = {"heads": 128, **shape.accept("prefill-fp8", "heads", "causal")}
    batch = even_lengths("prefill-fp8", shape.batch)
    return (PrefillFp8(batch, **given),)  # type: ignore[arg-type]  # checked by their options


def _prompts(
    count: int, heads: int, length: int, causal: bool, scales: Scales = "token"
) -> PrefillFp8:
    min_speedup = 1.35 if length == 8192 else None
    return PrefillFp8(Batch.of(count, length, length), heads, causal, min_speedup, scales=scales)


WORKLOADS: tuple[Workload, ...] = (
    _prompts(8, 128, 2048, True),
    _prompts(2, 128, 8192, True),
    _prompts(2, 128, 8192, False),
    _prompts(2, 128, 8192, True, "block"),
    _prompts(2, 128, 8192, False, "block"),
    _prompts(2, 128, 8192, True, "uniform"),
    _prompts(2, 128, 8192, False, "uniform"),
    _prompts(4, 16, 4096, True),
    _prompts(1, 16, 32768, True),
)
