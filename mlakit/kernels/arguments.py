"""The arguments of each op, as one record that travels from the public function to the kernel.

The public function fills the record once. The op checks it, replaces what has another form for
kernels (`_replace`) and passes it whole to the launcher: `launch(arguments, *results)`. A type says
how a field passes through `torch.ops.mlakit` (`ops._library.PACKINGS`) and whether launch replay
looks for tensors in it. To add an argument, add a field here; kernels that take it read it.

Results are no fields: a caller may give the tensors to write to, and a launcher always gets them.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from mlakit.cache import CacheLayer, KVShard, PageTable
from mlakit.model.masks import Mask
from mlakit.plan import DecodePlanTensors, EvenSplit

T = TypeVar("T")
Splits: TypeAlias = DecodePlanTensors | EvenSplit | None
# the schema of torch.library says that the op writes to it
WrittenLayer: TypeAlias = Annotated[CacheLayer, "written"]


def filled(value: T | None) -> T:
    """Declare a field that callers may leave out and that the op fills in for its kernel."""
    assert value is not None
    return value


def stride_of(tensor: Tensor | None, axis: int) -> int:
    """Return a stride, 0 for a tensor that is not there."""
    return 0 if tensor is None else tensor.stride(axis)


class AppendArguments(NamedTuple):
    """Arguments of `norm_rope_quant_append`. Rows are named by page_table, kv_lens and q_starts, or
    by slots and positions; the other fields are None."""

    q_rope: Tensor  # [tokens, heads, D_R]
    kv: Tensor  # [tokens, D_C + D_R] raw latents
    freqs: Tensor  # [positions, D_R]
    gamma: Tensor | None  # [D_C]; None: no norm
    layer: WrittenLayer
    page_table: PageTable | None
    kv_lens: Tensor | None  # [batch] tokens of each request, the new ones included
    q_starts: Tensor | None  # [batch + 1]; filled in with page_table
    slots: Tensor | None  # [tokens], -1: no row is written
    positions: Tensor | None  # [tokens], anything where slots is -1; None: from kv_lens
    shard: KVShard
    epsilon: float
    rope: str  # of `geometry.ROPES`
    power_of_two_scales: bool
    backend: str


class AppendRowsArguments(NamedTuple):
    """Arguments of `append_rows`."""

    latent: Tensor  # [tokens, D_C]
    k_rope: Tensor | None  # [tokens, D_R]; None: D_R is 0
    layer: WrittenLayer
    slots: Tensor  # [tokens], -1: no row is written
    power_of_two_scales: bool
    backend: str


class CompressArguments(NamedTuple):
    """Arguments of `compress_rows`. Columns are D, or 2·D with overlap."""

    kv: Tensor  # [tokens, columns]
    gate: Tensor  # [tokens, columns]
    bias: Tensor  # [rate, columns]
    gamma: Tensor | None  # [D]; None: rows are not normalised
    freqs: Tensor | None  # [positions, D_R]; None: rows are not rotated
    layer: WrittenLayer
    page_table: PageTable  # of windows
    state: WrittenLayer  # float32 rows [kv | gate + bias]
    state_table: PageTable  # of tokens
    kv_lens: Tensor  # [batch] tokens of each request, the new ones included
    q_starts: Tensor | None  # [batch + 1]; filled in
    rate: int
    overlap: bool
    keep: int  # newest tokens that a later step may take back
    state_pages_repeat: bool  # a step may write states that it reads
    epsilon: float
    power_of_two_scales: bool
    backend: str


class BatchedMatmulArguments(NamedTuple):
    """Arguments of `batched_matmul`, which returns a @ bᵀ."""

    a: Tensor  # [batch, M, K]
    b: Tensor  # [batch, N, K]
    backend: str


class QuantizeArguments(NamedTuple):
    """Arguments of `quantize_fp8`."""

    x: Tensor  # [M, K] or [batch, M, K]
    group: int  # columns that share a scale
    scale_ub: float  # upper bound of amax
    backend: str


class ScaledMatmulArguments(NamedTuple):
    """Arguments of `scaled_mm_fp8`, which returns a @ bᵀ; each operand has its scales."""

    a: Tensor  # [M, K] or [batch, M, K] e4m3
    a_scale: Tensor  # [..., ceil(K / k_group), at least M] float32
    b: Tensor  # [..., N, K] e4m3
    b_scale: Tensor  # [..., ceil(N / n_group), ceil(K / k_group)] float32
    n_group: int
    k_group: int
    out_dtype: torch.dtype
    backend: str


class PrefillArguments(NamedTuple):
    """Arguments of `mla_prefill`."""

    q: Tensor  # [tokens, heads, D_N + D_R]
    k_nope: Tensor  # [keys, heads, D_N]
    k_rope: Tensor  # [keys, D_R]
    v: Tensor  # [keys, heads, D_V]
    q_starts: Tensor  # [batch + 1]
    kv_starts: Tensor  # [batch + 1]
    # float32, what e4m3 is multiplied by; None: 1
    q_scale: Tensor | None  # [tokens, heads]
    k_scale: Tensor | None  # [keys], or [keys // keys_per_scale + batch]
    v_scale: Tensor | None  # [keys, heads], or [keys // keys_per_scale + batch, heads]
    keys_per_scale: int  # 1 or `formats.SCALE_BLOCK`
    softmax_scale: float
    mask: Mask
    alibi_slopes: Tensor | None  # [heads] float32
    sink: Tensor | None  # [heads] float32
    backend: str


class DecodeArguments(NamedTuple):
    """Arguments of `mla_decode` for kernels. q and q_rope are separate, or views of one tensor."""

    q: Tensor  # [tokens, heads, D_C + D_R], or [tokens, heads, D_C] with q_rope
    layer: CacheLayer
    page_table: PageTable
    kv_lens: Tensor  # [batch] cached tokens, these queries included, on all ranks together
    q_rope: Tensor | None  # [tokens, heads, D_R]; filled in
    q_scale: Tensor | None  # [tokens] float32: q = stored q · q_scale
    q_starts: Tensor | None  # [batch + 1]; filled in
    most_queries: int  # that a request can have; filled in
    softmax_scale: float
    mask: Mask
    sink: Tensor | None  # [heads] float32
    shard: KVShard
    splits: Splits
    deterministic: bool
    backend: str

    @property
    def is_batch_invariant(self) -> bool:
        """Whether the splits of a request depend on its own length alone.

        Those of a plan do, unless it was made for a kernel.
        """
        if isinstance(self.splits, DecodePlanTensors):
            return self.splits.slot_rows == 0
        return self.splits is not None or self.deterministic


class DecodePlanArguments(NamedTuple):
    """Arguments of `plan_mla_decode`: the part of a decode call that selects the kernel."""

    layer: CacheLayer
    page_table: PageTable
    kv_lens: Tensor  # [batch]
    q_starts: Tensor  # [batch + 1]
    shard: KVShard
    mask: Mask
    heads: int
    num_tokens: int
    dtype: torch.dtype  # of the queries
    out: DecodePlanTensors | None = None  # a plan of such a call, to fill in again


class SparseArguments(NamedTuple):
    """Arguments of `sparse_mla`."""

    q: Tensor  # [tokens, heads, D_C + D_R], or [tokens, heads, D_C] with q_rope
    layer: CacheLayer
    rows: Tensor  # [tokens, topk] slots
    q_rope: Tensor | None  # [tokens, heads, D_R]; None: q has all columns
    q_scale: Tensor | None  # [tokens] float32: q = stored q · q_scale
    topk_lens: Tensor | None  # [tokens]: slots from here on do not count
    extra: CacheLayer | None  # a second cache with lists of its own
    extra_rows: Tensor | None  # [tokens, extra_topk]; given with extra
    extra_topk_lens: Tensor | None  # [tokens]
    splits: Splits
    softmax_scale: float
    sink: Tensor | None  # [heads] float32
    backend: str


class LogitsArguments(NamedTuple):
    """Arguments of `indexer_logits`."""

    q: Tensor  # [tokens, index_heads, D]
    weights: Tensor  # [tokens, index_heads] float32
    layer: CacheLayer
    page_table: PageTable
    kv_lens: Tensor  # [batch]
    q_starts: Tensor | None  # [batch + 1]; filled in
    mask: Mask
    columns: int  # of the result
    num_tokens: int  # of the call where q is a block of its queries; 0: q has all
    backend: str


class TopkArguments(NamedTuple):
    """Arguments of `indexer_topk`."""

    logits: Tensor  # [tokens, columns] float32
    k: int
    row_starts: Tensor | None  # [tokens]
    row_ends: Tensor | None  # [tokens]
    backend: str


class SelectArguments(NamedTuple):
    """Arguments of `indexer_select`."""

    q: Tensor  # [tokens, index_heads, D]
    weights: Tensor  # [tokens, index_heads] float32
    layer: CacheLayer
    page_table: PageTable
    kv_lens: Tensor  # [batch]
    q_starts: Tensor | None  # [batch + 1]; filled in
    mask: Mask
    columns: int  # keys of the longest request, at most
    k: int
    init_tokens: int  # first visible keys that are always selected
    local_tokens: int  # last visible keys that are always selected
    max_score_bytes: int
    backend: str


class SelectBlockArguments(NamedTuple):
    """Arguments of the kernels of `indexer_select`, for the logits of one query block."""

    logits: Tensor  # [block tokens, columns] float32, which may be overwritten
    first_token: int  # of the block
    page_table: PageTable
    page_size: int
    kv_lens: Tensor  # [batch] of the whole call
    q_starts: Tensor  # [batch + 1] of the whole call
    mask: Mask
    init_tokens: int
    local_tokens: int


class PhysicalRowsArguments(NamedTuple):
    """Arguments of `physical_rows`."""

    tokens: Tensor  # [queries, topk] positions
    page_table: PageTable
    page_size: int
    q_starts: Tensor | None  # [batch + 1]; None: one query per request
    backend: str


class MergeArguments(NamedTuple):
    """Arguments of `merge_states`."""

    outs: list[Tensor]  # [tokens, heads, v_width] each
    lses: list[Tensor]  # [tokens, heads] float32 each
    sink: Tensor | None  # [heads] float32
    backend: str
