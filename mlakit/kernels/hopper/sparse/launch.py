"""Launching the sparse kernels of Hopper.

Work       a persistent CTA per SM; with few tokens, lists are split, and `sparse_merge` combines
           the splits. Of many tokens the last few may get a launch of their own (`tail_start`)
Memory     float32 partials of splits, 256 MiB at most
Limits     `kernels.hopper.support` refuses what the kernels cannot take
"""

from __future__ import annotations

from functools import cache
from math import e, log2
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mlakit.cache import CacheLayer
from mlakit.formats import SMALLEST_SCALE
from mlakit.kernels import workspace
from mlakit.kernels.arguments import SparseArguments, filled
from mlakit.kernels.hopper.sparse.arguments import (
    ListArguments,
    OutputArguments,
    ScaleArguments,
)
from mlakit.kernels.hopper.sparse.configs import (
    BLOCK,
    D_R,
    D_V,
    HEAD_TILE,
    PAIR,
    Traits,
    head_tile,
    m64_bf16_config,
    m64_fp8_kv_config,
    small_m_fp8_kv_config,
    tail_start,
)
from mlakit.kernels.hopper.sparse.fp8_scales import row_scale_arguments, words_of
from mlakit.kernels.hopper.sparse.m64_bf16 import sparse_mla_m64_bf16_kernel
from mlakit.kernels.hopper.sparse.m64_fp8_kv import sparse_mla_m64_fp8_kv_kernel
from mlakit.kernels.hopper.sparse.small_m_fp8_kv import sparse_mla_small_m_fp8_kv_kernel
from mlakit.kernels.launch import launch, target
from mlakit.kernels.sparse_merge import merge_list_splits
from mlakit.kernels.triton.configs import pick_sparse_splits

CHUNK_BYTES = 16  # that one thread copies at a time: rows lie at multiples of it
# a kernel, and the configuration that it is compiled with
KERNELS: dict[str, tuple[Any, Any]] = {
    "m64_bf16": (sparse_mla_m64_bf16_kernel, m64_bf16_config),  # by a second cache
    "m64_fp8_kv": (sparse_mla_m64_fp8_kv_kernel, m64_fp8_kv_config),
    # by the format of rows, and heads
    "small_m_fp8_kv": (sparse_mla_small_m_fp8_kv_kernel, small_m_fp8_kv_config),
}
# list entries of the tiles that `pick_sparse_splits` counts: a split has two of them or more
LIST_TILES = {"m64_bf16": PAIR, "m64_fp8_kv": BLOCK, "small_m_fp8_kv": PAIR}


def sparse_mla(
    kernel: str, a: SparseArguments, out: Tensor, lse: Tensor, max_logits: Tensor
) -> None:
    """Launch one of `KERNELS`."""
    tokens, heads, _ = a.q.shape
    if tokens == 0 or heads == 0:
        return
    topk = a.rows.shape[1] + (0 if a.extra_rows is None else a.extra_rows.shape[1])
    first = tokens
    if a.splits is None:
        head_tiles = triton.cdiv(heads, head_tile(kernel, heads))
        first = tail_start(tokens, head_tiles, topk, target(a.q.device).num_sms)
    if first == tokens:
        _launch(kernel, a, out, lse, max_logits)
        return
    for some in (slice(0, first), slice(first, tokens)):
        _launch(kernel, _of_tokens(a, some), out[some], lse[some], max_logits[some])


def _of_tokens(a: SparseArguments, some: slice) -> SparseArguments:
    """Return the call for some of its tokens."""

    def part(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[some]

    return a._replace(
        q=a.q[some],
        q_rope=part(a.q_rope),
        rows=a.rows[some],
        topk_lens=part(a.topk_lens),
        extra_rows=part(a.extra_rows),
        extra_topk_lens=part(a.extra_topk_lens),
    )


def _launch(kernel: str, a: SparseArguments, out: Tensor, lse: Tensor, max_logits: Tensor) -> None:
    tokens, heads, _ = a.q.shape
    # without a second cache, the arguments that describe it are those of the first, and not read
    extra_layer, extra_rows = a.layer, a.rows
    lists = [a.rows]
    if a.extra is not None:
        extra_layer, extra_rows = a.extra, filled(a.extra_rows)
        lists.append(extra_rows)
    num_sms = target(a.q.device).num_sms
    tile = head_tile(kernel, heads)
    head_tiles = tokens * triton.cdiv(heads, tile)
    num_splits = pick_sparse_splits(
        wanted=None if a.splits is None else a.splits.num_splits,
        rows=tokens * heads,
        head_tiles=head_tiles,
        list_tiles=sum(triton.cdiv(rows.shape[1], LIST_TILES[kernel]) for rows in lists),
        num_sms=num_sms,
        row_bytes=4 * (D_V + 2),
    )
    results = [out, lse, max_logits]
    strides = [out.stride()[:2], lse.stride(), max_logits.stride()]
    if num_splits > 1:
        scratch = [
            workspace.scratch((num_splits, tokens, heads, n), torch.float32, out.device)
            for n in (D_V, 1, 1)
        ]
        results = scratch
        strides = [each.stride()[1:3] for each in scratch]
    function, pick_config = KERNELS[kernel]
    config = pick_config(*_config_arguments(kernel, a, heads))
    q_tiles, rope_tiles = _query_tiles(a.q, a.q_rope if _has_rope(a) else None, tile)
    launch(
        function,
        (min(num_sms, head_tiles * num_splits),),
        q=q_tiles,
        q_rope=rope_tiles,
        tokens=tokens,
        heads=heads,
        num_splits=num_splits,
        lens=a.topk_lens,
        topk=a.rows.shape[1],
        stride_token=a.rows.stride(0),
        stride_lens=0 if a.topk_lens is None else a.topk_lens.stride(0),
        extra_lens=a.extra_topk_lens,
        extra_topk=extra_rows.shape[1],
        extra_stride_token=extra_rows.stride(0),
        extra_stride_lens=0 if a.extra_topk_lens is None else a.extra_topk_lens.stride(0),
        main=_list_arguments(a.layer, a.rows),
        extra=None if a.extra is None else _list_arguments(a.extra, extra_rows),
        outputs=OutputArguments(
            *results,
            None if num_splits > 1 else a.sink,
            *(stride for pair in strides for stride in pair),
            0 if a.sink is None else a.sink.stride(0),
        ),
        scales=_scale_arguments(kernel, a),
        TRAITS=Traits(
            HAS_ROPE=_has_rope(a),
            HAS_EXTRA=a.extra is not None,
            PAGE=_page(a.layer),
            EXTRA_PAGE=_page(extra_layer),
            SIGN=(a.softmax_scale > 0) - (a.softmax_scale < 0),
            FORMAT=a.layer.codec.traits,
            ROW_CHUNKS=_packed_row_chunks(a.layer),
            EXTRA_ROW_CHUNKS=_packed_row_chunks(extra_layer),
        ),
        CONFIG=config,
        num_warps=4,
        maxnreg=config.MAX_REGISTERS,
    )
    if num_splits > 1:
        merge_list_splits(scratch, a.sink, out, lse, max_logits, is_chained=True)


def _config_arguments(kernel: str, a: SparseArguments, heads: int) -> tuple[object, ...]:
    if kernel == "m64_bf16":
        return (a.extra is not None,)
    has_rope = a.layer.codec.row.qk_rope_head_dim > 0
    return (a.layer.codec.traits, heads, has_rope) if kernel == "small_m_fp8_kv" else (has_rope,)


def _has_rope(a: SparseArguments) -> bool:
    """Whether rows have columns past those that are values; if not, q_rope has no columns."""
    return a.layer.codec.row.width > D_V


def _list_arguments(layer: CacheLayer, rows: Tensor) -> ListArguments:
    payload = layer.payload
    page_chunks, row_chunks = (
        stride * payload.element_size() // CHUNK_BYTES for stride in payload.stride()[:2]
    )
    if _page(layer) == 0 and layer.page_size == 1:
        row_chunks = page_chunks  # all rows have the same stride
    return ListArguments(
        payload=words_of(payload) if payload.element_size() == 1 else payload,
        rows=rows,
        num_slots=layer.num_slots,
        page_chunks=page_chunks,
        row_chunks=row_chunks,
        stride_entry=rows.stride(1),
    )


def _scale_arguments(kernel: str, a: SparseArguments) -> ScaleArguments:
    # a scale of 0 would turn the −inf of an invalid entry into NaN
    scale_log2 = max(abs(a.softmax_scale) * log2(e), SMALLEST_SCALE)
    if kernel == "m64_bf16":
        return ScaleArguments(scale_log2, None, None)
    extra = None if a.extra is None else row_scale_arguments(a.extra)
    return ScaleArguments(scale_log2, row_scale_arguments(a.layer), extra)


def _page(layer: CacheLayer) -> int:
    """Return the rows of a page; 0 where all rows, and their scales, have one stride."""
    tensors = [layer.payload] if layer.beside is None else [layer.payload, layer.beside]
    return 0 if all(_is_even(each) for each in tensors) else layer.page_size


def _is_even(rows: Tensor) -> bool:
    num_pages, page_size, _ = rows.shape
    page_stride, row_stride, _ = rows.stride()
    return num_pages <= 1 or page_size == 1 or page_stride == page_size * row_stride


def _packed_row_chunks(layer: CacheLayer) -> int:
    """Chunks of a row where the next one of its page follows it; 0 where there is a gap."""
    payload = layer.payload
    width = payload.shape[-1]
    is_packed = payload.stride(0 if layer.page_size == 1 else 1) == width
    return width * payload.element_size() // CHUNK_BYTES if is_packed else 0


@cache
def _q_layout() -> gl.NVMMASharedLayout:
    # kept: what a layout checks of itself takes the host longer than the rest of a descriptor
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


def _query_tiles(
    q: Tensor, q_rope: Tensor | None, heads: int
) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """TMA tiles of a token's queries: 64 heads x 256 columns or fewer x 128, and `heads` x 64 of
    the rotated columns, which are q_rope or come after column 512 of q."""
    if q_rope is None and q.shape[-1] > D_V:
        q_rope = q[..., D_V:]
    rope = None if q_rope is None else _q_tiles(q_rope, heads, D_R)
    return _q_tiles(q, heads, D_V // 2 if heads == HEAD_TILE else D_V // 4), rope


def _q_tiles(q: Tensor, heads: int, columns: int) -> TensorDescriptor:
    """A third axis: TMA writes zeros for heads past the last one, and does not read them."""
    shape, strides = list(q.shape), list(q.stride())
    for axis in (0, 1):
        if shape[axis] == 1:
            strides[axis] = shape[-1]  # any that TMA takes: nothing is at this distance
    return TensorDescriptor(q, shape, strides, [1, heads, columns], _q_layout())
