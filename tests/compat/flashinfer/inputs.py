"""Problems of FlashInfer's MLA functions with poison in all that must not be read, and answers.

Poison: rows that no request has, the rest of a last page, page ids after a request's last, the
space between strides. The answers are the oracle's, in float64 and as a naive run in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import e, log2
from typing import Any

import torch
from torch import Tensor

from mlakit import reference
from mlakit.model.masks import CAUSAL, NULL
from mlakit.tools.testing import NEVER_A_PAGE, STORED_ROUNDINGS, assert_matches, poison
from mlakit.tools.workloads.case import assert_logits_match, weights_dtype
from tests.compat.flash_mla.inputs import padded

E4M3 = torch.float8_e4m3fn
LOG2_E = log2(e)


def starts_of(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@dataclass(frozen=True)
class Case:
    """kv_lens and q_lens of each request; ckv and kpe are widths."""

    kv_lens: tuple[int, ...] = (37, 0, 5, 64, 1)
    q_lens: tuple[int, ...] = (2, 1, 3, 0, 1)
    page_size: int = 16
    heads: int = 3
    ckv: int = 64
    kpe: int = 16
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False
    ckv_scale: float | None = None  # with a scale the cache is e4m3
    kpe_scale: float | None = None
    is_padded: bool = False
    sm_scale: float = 0.31

    def make(self, device: torch.device | str = "cpu", seed: int = 0) -> Problem:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        counts = [-(-length // self.page_size) for length in self.kv_lens]
        pages = sum(counts) + 3
        order = torch.randperm(pages, generator=generator).int()
        stored = (self.dtype, 1.0, 1.0)
        if self.ckv_scale is not None and self.kpe_scale is not None:
            stored = (E4M3, self.ckv_scale, self.kpe_scale)
        caches = [
            (normal(pages, self.page_size, width) * 2).to(stored[0])
            for width in (self.ckv, self.kpe)
        ]
        kv_indptr = starts_of(counts)
        is_used = torch.zeros(pages, self.page_size, dtype=torch.bool)
        rows = []
        for request, length in enumerate(self.kv_lens):
            own = order[kv_indptr[request] : kv_indptr[request + 1]].long()
            token = torch.arange(length)
            place = own[token // self.page_size], token % self.page_size
            is_used[place] = True
            parts = [
                cache[place].double() * scale
                for cache, scale in zip(caches, stored[1:], strict=True)
            ]
            rows.append(torch.cat(parts, dim=-1))
        for cache in caches:
            poison(cache, is_used)
        tokens = sum(self.q_lens)
        queries = [
            normal(tokens, self.heads, width).to(self.dtype) for width in (self.ckv, self.kpe)
        ]
        exact = torch.cat(queries, dim=-1).double()
        tensors = [each.to(device) for each in (*queries, *caches)]
        if self.is_padded:
            tensors = [padded(each) for each in tensors]
        # more page ids than are listed, none of which exists
        kv_indices = torch.cat([order[: sum(counts)], torch.full((5,), NEVER_A_PAGE).int()])
        return Problem(
            self,
            *tensors,
            qo_indptr=starts_of(self.q_lens).to(device),
            kv_indptr=kv_indptr.to(device),
            kv_indices=kv_indices.to(device),
            kv_len_arr=torch.tensor(self.kv_lens, dtype=torch.int32, device=device),
            rows=rows,
            exact=exact,
        )


@dataclass(frozen=True, eq=False)
class Problem:
    case: Case
    q_nope: Tensor
    q_pe: Tensor
    ckv: Tensor
    kpe: Tensor
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_len_arr: Tensor
    rows: list[Tensor] = field(repr=False)  # per request float64 [kv_len, width]
    exact: Tensor  # the queries, float64

    def plan(self, **changed: Any) -> dict[str, Any]:
        """The arguments of `plan`."""
        case = self.case
        return {
            "qo_indptr": self.qo_indptr,
            "kv_indptr": self.kv_indptr,
            "kv_indices": self.kv_indices,
            "kv_len_arr": self.kv_len_arr,
            "num_heads": case.heads,
            "head_dim_ckv": case.ckv,
            "head_dim_kpe": case.kpe,
            "page_size": case.page_size,
            "causal": case.causal,
            "sm_scale": case.sm_scale,
            "q_data_type": case.dtype,
            "kv_data_type": self.ckv.dtype,
            **changed,
        }

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The tensors of `run`."""
        return self.q_nope, self.q_pe, self.ckv, self.kpe

    def buffers(self, pages: int = 0) -> dict[str, Any]:
        """Buffers for CUDA graphs, with room for so many pages."""
        batch = len(self.case.kv_lens)
        sizes = {
            "qo_indptr": batch + 1,
            "kv_indptr": batch + 1,
            "kv_indices": pages or len(self.kv_indices),
            "kv_len_arr": batch,
        }
        device = self.ckv.device
        return {
            "use_cuda_graph": True,
            **{
                name: torch.empty(size, dtype=torch.int32, device=device)
                for name, size in sizes.items()
            },
        }

    def answer(
        self, dtype: torch.dtype, q: Tensor | None = None, sink: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        out, lse = reference.mla_decode(
            self.exact if q is None else q,
            self.rows,
            self.case.q_lens,
            softmax_scale=self.case.sm_scale,
            v_width=self.case.ckv,
            mask=CAUSAL if self.case.causal else NULL,
            sink=sink,
            weights_dtype=weights_dtype(self.q_nope, dtype),
            dtype=dtype,
        )
        return out, lse

    def check(
        self,
        out: Tensor,
        lse: Tensor | None = None,
        *,
        base: float = LOG2_E,
        naive_q: Tensor | None = None,
        sink: Tensor | None = None,
        roundings: float = STORED_ROUNDINGS,
    ) -> None:
        """Compare with the oracle; naive_q are queries that a naive run would round."""
        exact = self.answer(torch.float64, sink=sink)
        naive = self.answer(torch.float32, naive_q, sink)
        assert_matches("out", out.cpu(), exact[0], naive[0], roundings=roundings)
        if lse is not None:
            assert lse.dtype == torch.float32
            largest = max(
                [0.0, *(float(each.norm(dim=-1).amax()) for each in self.rows if len(each))]
            )
            size = self.exact.norm(dim=-1) * largest * abs(self.case.sm_scale) * base
            assert_logits_match("lse", lse.cpu(), exact[1] * base, naive[1] * base, size)
