"""Problems as peers take them: tensors on the device, and what to compute over them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class DenseDecode:
    """Absorbed attention over paged rows; the result is [b, s_q, h, 512]."""

    q: Tensor  # [b, s_q, h, 576]
    pages: Tensor  # bf16 [pages, page_size, 576]
    page_table: Tensor  # int32 [b, max_pages]
    kv_lens: Tensor  # int32 [b]
    softmax_scale: float
    causal: bool


@dataclass(frozen=True, eq=False)
class SparsePrefill:
    """Absorbed attention of every token over its own rows; the result is [tokens, h, 512]."""

    q: Tensor  # [tokens, h, 576]
    kv: Tensor  # [rows, 576]
    indices: Tensor  # int32 [tokens, topk]
    softmax_scale: float


@dataclass(frozen=True, eq=False)
class SparseDecode:
    """The same over rows of 656 bytes in pages; the result is [b, s_q, h, 512]."""

    q: Tensor  # [b, s_q, h, 576]
    pages: Tensor  # uint8 [pages, page_size, 656]
    indices: Tensor  # int32 [b, s_q, topk], page * page_size + offset
    softmax_scale: float


@dataclass(frozen=True, eq=False)
class DensePrefill:
    """Expanded attention of ragged prompts; the result is [tokens, h, 128]."""

    q: Tensor  # [tokens, h, 192]
    k: Tensor  # [tokens, h, 192]
    v: Tensor  # [tokens, h, 128]
    starts: Tensor  # int32 [b + 1]
    max_len: int
    softmax_scale: float
    causal: bool


Problem = DenseDecode | SparsePrefill | SparseDecode | DensePrefill
