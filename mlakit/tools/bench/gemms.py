"""The matrix products of a layer, each as one call of torch: what cuBLAS needs for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mlakit.model.geometry import MLAGeometry
from mlakit.tools.bench import gpu
from mlakit.tools.bench.measure import Call
from mlakit.tools.bench.suite import Work

E4M3 = torch.float8_e4m3fn
BF16, F32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Gemm:
    """y [m, n] = x [m, k] · W [n, k]ᵀ for each of `heads` matrices.

    dtype  of x and W; y is bf16, or float32 where they are
    """

    name: str
    m: int
    n: int
    k: int
    heads: int = 1
    dtype: torch.dtype = BF16

    @property
    def work(self) -> Work:
        m, n, k = self.m, self.n, self.k
        read, written = self.dtype.itemsize * (m + n) * k, self._out_dtype.itemsize * m * n
        products = "fp8" if self.dtype == E4M3 else "bf16"
        return Work(2 * self.heads * m * n * k, self.heads * (read + written), products)

    def call(self, generator: torch.Generator) -> Call:
        """The product of random matrices, by cuBLAS on a GPU.

        FP8 has one scale per tensor, the fastest of cuBLAS: torch takes block scales for some
        sizes only.
        """
        x = gpu.normal(generator, self.heads, self.m, self.k).to(self.dtype)
        weight = gpu.normal(generator, self.heads, self.n, self.k).to(self.dtype)
        if self.dtype != E4M3:
            x, weight = (x, weight) if self.heads > 1 else (x[0], weight[0])
            return lambda: torch.matmul(x, weight.mT)
        one = torch.ones((), device=x.device)
        return lambda: torch._scaled_mm(x[0], weight[0].t(), one, one, out_dtype=BF16)

    @property
    def _out_dtype(self) -> torch.dtype:
        return F32 if self.dtype == F32 else BF16


def projections(g: MLAGeometry, tokens: int, *, is_fp8: bool) -> Iterator[Gemm]:
    """The products of a decode step, without those of attention and scores.

    The products by head are bf16 in FP8 layers too: torch has no batched FP8 product.
    """
    dtype = E4M3 if is_fp8 else BF16
    rank, heads = g.q_lora_rank, g.num_heads
    assert rank is not None
    yield Gemm("q_a_proj", tokens, rank, g.hidden_size, dtype=dtype)
    yield Gemm("q_b_proj", tokens, heads * g.qk_head_dim, rank, dtype=dtype)
    yield Gemm("kv_a_proj", tokens, g.row.width, g.hidden_size, dtype=dtype)
    yield Gemm("absorb", tokens, g.kv_lora_rank, g.qk_nope_head_dim, heads)
    yield Gemm("up-project", tokens, g.v_head_dim, g.kv_lora_rank, heads)
    yield Gemm("o_proj", tokens, g.hidden_size, heads * g.v_head_dim, dtype=dtype)
    if g.has_indexer:
        width = g.index_head_dim
        yield Gemm("wq_b", tokens, g.index_n_heads * width, rank, dtype=dtype)
        yield Gemm("wk", tokens, width, g.hidden_size, dtype=dtype)
        yield Gemm("weights_proj", tokens, g.index_n_heads, g.hidden_size, dtype=F32)
