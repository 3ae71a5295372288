"""FlashMLA's test problems of attention over ragged batches: its shapes, its corner cases."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tests.compat.flash_mla.inputs import padded, random_lengths, softmax_over


@dataclass(frozen=True)
class VarlenCase:
    s_q: int
    s_k: int
    b: int = 2
    varlen: bool = True
    h: int = 128
    h_k: int = 128
    d: int = 192
    d_v: int = 128
    causal: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def scale(self) -> float:
        return (self.d + 100) ** -0.5

    def make(self, device: torch.device | str, seed: int = 0) -> VarlenProblem:
        host = torch.Generator().manual_seed(seed)
        draw = {"varlen": self.varlen, "zeros": False, "generator": host}
        q_lens = random_lengths(self.b, self.s_q, 1, **draw)
        k_lens = random_lengths(self.b, self.s_k, 1, **draw)
        k_lens = [max(pair) for pair in zip(q_lens, k_lens, strict=True)]
        generator = torch.Generator(device).manual_seed(seed)
        shapes = (
            (sum(q_lens), self.h, self.d),
            (sum(k_lens), self.h_k, self.d),
            (sum(k_lens), self.h_k, self.d_v),
        )
        q, k, v = (
            padded((torch.randn(shape, generator=generator, device=device) / 10).to(self.dtype))
            for shape in shapes
        )
        starts = [torch.tensor([0, *lens]).cumsum(0).int().to(device) for lens in (q_lens, k_lens)]
        return VarlenProblem(self, q, k, v, *starts, max(q_lens), max(k_lens))


@dataclass(frozen=True, eq=False)
class VarlenProblem:
    case: VarlenCase
    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_qo: Tensor
    cu_seqlens_kv: Tensor
    max_seqlen_qo: int
    max_seqlen_kv: int

    @property
    def arguments(self) -> tuple[Any, ...]:
        """In the positions of `flash_attn_varlen_func`."""
        return (
            *(self.q, self.k, self.v, self.cu_seqlens_qo, self.cu_seqlens_kv),
            *(self.max_seqlen_qo, self.max_seqlen_kv),
        )

    def answer(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """(out [total, h, d_v], lse [total, h])."""
        case, outs, lses = self.case, [], []
        group = case.h // case.h_k
        q_starts, k_starts = self.cu_seqlens_qo.tolist(), self.cu_seqlens_kv.tolist()
        for request in range(case.b):
            own = slice(*k_starts[request : request + 2])
            q = self.q[slice(*q_starts[request : request + 2])].transpose(0, 1)  # [h, s_q, d]
            k, v = self.k[own].transpose(0, 1), self.v[own].transpose(0, 1)
            outs.append(q.new_empty(q.shape[1], case.h, case.d_v, dtype=dtype))
            lses.append(q.new_empty(q.shape[1], case.h, dtype=dtype))
            for head in range(case.h):  # one at a time: 4096 × 4096 scores of 128 heads are 16 GiB
                scores = (q[head].to(dtype) @ k[head // group].to(dtype).T) * case.scale
                if case.causal:
                    seen = torch.ones_like(scores, dtype=torch.bool).tril(k.shape[1] - q.shape[1])
                    scores = scores.masked_fill(~seen, -torch.inf)
                outs[-1][:, head], lses[-1][:, head] = softmax_over(
                    scores, v[head // group].to(dtype)
                )
        return torch.cat(outs), torch.cat(lses)


VARLEN_CASES = [
    VarlenCase(length, length, 2, varlen, h, h_k, d, 128, causal)
    for length, varlen, (h, h_k), d, causal in product(
        (4096, 8192), (False, True), ((128, 128), (32, 4)), (128, 192), (False, True)
    )
]
FEW_VARLEN = [
    VarlenCase(30, 30, varlen=False, h=4, h_k=4),
    VarlenCase(30, 70, 3, h=3, h_k=3, d=128, causal=True),
    VarlenCase(20, 50, 3, h=8, h_k=2, causal=True),
    VarlenCase(20, 20, 3, h=6, h_k=1, d=128),
    # beyond FlashMLA
    VarlenCase(20, 30, 3, h=4, h_k=2, d=256, d_v=256, causal=True),
    VarlenCase(20, 30, 3, h=3, h_k=3, d=40, d_v=24, causal=True, dtype=torch.float16),
    VarlenCase(20, 30, 3, h=4, h_k=2, causal=True, dtype=torch.float32),
]
