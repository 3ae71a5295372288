"""Problems as every contender gets them: tensors on one device, at the widths of DeepSeek-V3.

A row has 512 latent columns, then 64 rotated ones; `h` heads share it. In expanded attention a
head's keys have 192 columns and its values 128.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

LATENT = 512
ROPE = 64


@dataclass(frozen=True, eq=False)
class DenseDecode:
    """Absorbed attention of the newest s_q tokens of each request over its cached rows."""

    q: Tensor  # [b, s_q, h, 576]
    pages: Tensor  # [pages, page_size, 576] bf16
    page_table: Tensor  # [b, max_pages] int32
    kv_lens: Tensor  # [b] int32, the newest tokens included
    softmax_scale: float
    causal: bool


@dataclass(frozen=True, eq=False)
class SparsePrefill:
    """Absorbed attention of each token over the rows it lists."""

    q: Tensor  # [tokens, h, 576]
    kv: Tensor  # [rows, 576] bf16
    indices: Tensor  # [tokens, topk] int32; -1 is no row
    softmax_scale: float


@dataclass(frozen=True, eq=False)
class SparseDecode:
    """The same over a paged cache of 656-byte rows (`fp8_block128`)."""

    q: Tensor  # [b, s_q, h, 576]
    pages: Tensor  # [pages, page_size, 656] uint8
    indices: Tensor  # [b, s_q, topk] int32, page * page_size + offset; -1 is no row
    softmax_scale: float


@dataclass(frozen=True, eq=False)
class DensePrefill:
    """Expanded attention of whole prompts; request i owns tokens starts[i]:starts[i + 1]."""

    q: Tensor  # [tokens, h, 192]
    k: Tensor  # [tokens, h, 192]
    v: Tensor  # [tokens, h, 128]
    starts: Tensor  # [b + 1] int32
    max_len: int  # of the longest request
    softmax_scale: float
    causal: bool


Problem: TypeAlias = DenseDecode | SparsePrefill | SparseDecode | DensePrefill
