"""Problems as peers get them: tensors on one device, with the dimensions of DeepSeek-V3.

A cache row has 512 latent columns and 64 rope columns; `h` heads share it. In expanded attention K
has 192 columns per head and V has 128. An index key has 128 columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

LATENT = 512
ROPE = 64


@dataclass(frozen=True, eq=False)
class DenseDecode:
    """Absorbed attention of the newest s_q tokens of each request over its cached rows (MQA)."""

    q: Tensor  # [b, s_q, h, 576]
    pages: Tensor  # [pages, page_size, 576] bf16
    page_table: Tensor  # [b, max_pages] int32
    kv_lens: Tensor  # [b] int32, including the newest tokens
    softmax_scale: float
    causal: bool


@dataclass(frozen=True, eq=False)
class SparsePrefill:
    """Absorbed attention of each token over its top-k rows."""

    q: Tensor  # [tokens, h, 576]
    kv: Tensor  # [rows, 576] bf16
    indices: Tensor  # [tokens, topk] int32; -1 marks an unused slot
    softmax_scale: float


@dataclass(frozen=True, eq=False)
class SparseDecode:
    """The same over a paged cache of 656-byte FP8 rows (`fp8_block128`)."""

    q: Tensor  # [b, s_q, h, 576]
    pages: Tensor  # [pages, page_size, 656] uint8
    indices: Tensor  # [b, s_q, topk] int32, page * page_size + offset; -1 marks an unused slot
    softmax_scale: float


@dataclass(frozen=True, eq=False)
class DensePrefill:
    """Expanded attention of whole prompts (MHA); request i has tokens starts[i]:starts[i + 1]."""

    q: Tensor  # [tokens, h, 192]
    k: Tensor  # [tokens, h, 192]
    v: Tensor  # [tokens, h, 128]
    starts: Tensor  # [b + 1] int32
    max_len: int  # of the longest request
    softmax_scale: float
    causal: bool


@dataclass(frozen=True, eq=False)
class IndexLogits:
    """Index scores of the newest s_q tokens of each request over its cached keys, causal."""

    q: Tensor  # [b, s_q, h, 128] e4m3
    weights: Tensor  # [b * s_q, h] float32
    pages: Tensor  # [pages, page_size, 132] uint8: the keys of a page, then their float32 scales
    page_table: Tensor  # [b, max_pages] int32
    kv_lens: Tensor  # [b] int32, including the newest tokens
    max_kv_len: int  # columns of the result


@dataclass(frozen=True, eq=False)
class ScaledMatmul:
    """a @ bᵀ of e4m3 matrices with float32 scales; the result is bf16 [m, n]."""

    a: Tensor  # [m, k]
    a_scale: Tensor  # [m, ceil(k / 128)]
    b: Tensor  # [n, k]
    b_scale: Tensor  # [ceil(n / 128), ceil(k / 128)]


Attention: TypeAlias = DenseDecode | SparsePrefill | SparseDecode | DensePrefill
Problem: TypeAlias = Attention | IndexLogits | ScaledMatmul
