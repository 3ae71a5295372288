"""Results in FlashMLA's shapes and conventions: [b, s_q, …], lse = +inf without keys."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, nan

import torch
from torch import Tensor

from mlakit.dispatch.checks import E4M3, Dims


@dataclass(frozen=True, eq=False)
class Results:
    """The tensors that the ops write, and those that the caller gets."""

    out: Tensor  # [b, s_q, h_q, d_v], the caller's if given
    out_tokens: Tensor  # [b · s_q, h_q, d_v], in the memory of `out` if its strides allow
    lse_tokens: Tensor  # [b · s_q, h_q] float32
    needs_copy: bool = False  # from `out_tokens` to `out`

    @classmethod
    def of(cls, dims: Dims, q: Tensor, d_v: int, out: Tensor | None) -> Results:
        """Results for queries [b, s_q, h_q, d]."""
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
            return cls(out, q.new_empty(b * s_q, h_q, d_v, dtype=dtype), lse, needs_copy=True)
        return cls(out, out.flatten(0, 1), lse)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return (out, lse [b, h_q, s_q])."""
        if self.needs_copy:
            self.out.copy_(self.out_tokens.view(self.out.shape))
        b, s_q, h_q, _ = self.out.shape
        by_head = self.lse_tokens.view(b, s_q, h_q).transpose(1, 2)
        return self.out, flash_mla_lse(by_head)


def flash_mla_lse(lse: Tensor) -> Tensor:
    """A contiguous copy of `lse` with +inf for −inf; NaN stays NaN."""
    contiguous = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
    return torch.nan_to_num(lse, nan=nan, posinf=inf, neginf=inf, out=contiguous)
