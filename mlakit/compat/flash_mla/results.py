"""Results in FlashMLA's shapes: tokens split into requests and queries, +inf for an empty row."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, nan

import torch
from torch import Tensor

from mlakit.checks import E4M3, Dims


@dataclass(frozen=True, eq=False)
class Results:
    """Where the ops write, and what the caller gets of it."""

    out: Tensor  # [b, s_q, h_q, d_v], the caller's where one was given
    out_tokens: Tensor  # [b · s_q, h_q, d_v], in the memory of `out` where its strides allow
    lse_tokens: Tensor  # [b · s_q, h_q] float32
    is_apart: bool = False  # `out_tokens` has memory of its own, to be copied

    @classmethod
    def of(cls, dims: Dims, q: Tensor, d_v: int, out: Tensor | None) -> Results:
        """For queries [b, s_q, h_q, d]."""
        b, s_q, h_q, _ = q.shape
        dtype = torch.bfloat16 if q.dtype == E4M3 else q.dtype
        lse = q.new_empty(b * s_q, h_q, dtype=torch.float32)
        if out is None:
            tokens = q.new_empty(b * s_q, h_q, d_v, dtype=dtype)
            return cls(tokens.view(b, s_q, h_q, d_v), tokens, lse)
        dims.bind("head_dim_v", d_v, "head_dim_v")
        dims.match("out", out, "b", "s_q", "h_q", "head_dim_v", dtypes=[dtype])
        dims.writable("out", out)
        if b > 1 and s_q > 1 and out.stride(0) != s_q * out.stride(1):
            return cls(out, q.new_empty(b * s_q, h_q, d_v, dtype=dtype), lse, is_apart=True)
        return cls(out, out.flatten(0, 1), lse)

    def finish(self) -> tuple[Tensor, Tensor]:
        """(out, lse [b, h_q, s_q])."""
        if self.is_apart:
            self.out.copy_(self.out_tokens.view(self.out.shape))
        b, s_q, h_q, _ = self.out.shape
        by_head = self.lse_tokens.view(b, s_q, h_q).transpose(1, 2)
        return self.out, positive_where_empty(by_head)


def positive_where_empty(lse: Tensor) -> Tensor:
    """A contiguous copy of `lse` with +inf for −inf; a NaN stays one."""
    contiguous = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
    return torch.nan_to_num(lse, nan=nan, posinf=inf, neginf=inf, out=contiguous)
