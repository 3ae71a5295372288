"""What the launchers of sparse kernels make of a call, on Hopper and on Blackwell."""

from __future__ import annotations

from functools import cache
from math import e, log2
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mlakit.cache import CacheLayer
from mlakit.formats import SMALLEST_SCALE
from mlakit.kernels import workspace
from mlakit.kernels.arguments import SparseArguments, filled
from mlakit.kernels.hopper.sparse.arguments import ListArguments, OutputArguments, RopeArguments
from mlakit.kernels.hopper.sparse.configs import D_R, D_V, Traits
from mlakit.kernels.hopper.sparse.fp8_scales import words_of
from mlakit.kernels.sparse_merge import merge_list_splits
from mlakit.kernels.triton.configs import pick_sparse_splits

CHUNK_BYTES = 16  # that one thread copies at a time: rows lie at multiples of it
Results = tuple[Tensor, Tensor, Tensor]  # out, lse, max_logits


class SplitResults(NamedTuple):
    """What a kernel writes: the results of a call, or float32 partials of several splits."""

    num_splits: int
    outputs: OutputArguments
    partials: list[Tensor]  # of out, lse and max_logits; none of one split


def split_results(
    a: SparseArguments, results: Results, *, list_tile: int, head_tiles: int, num_sms: int
) -> SplitResults:
    """Choose the splits of each list, and allocate their partials.

    list_tile   entries of a list that a work tile takes at a time
    head_tiles  work tiles of all tokens without splits
    """
    out, lse, max_logits = results
    tokens, heads, _ = a.q.shape
    lists = [a.rows] if a.extra is None else [a.rows, filled(a.extra_rows)]
    num_splits = pick_sparse_splits(
        wanted=None if a.splits is None else a.splits.num_splits,
        rows=tokens * heads,
        head_tiles=head_tiles,
        list_tiles=sum(triton.cdiv(rows.shape[1], list_tile) for rows in lists),
        num_sms=num_sms,
        row_bytes=4 * (D_V + 2),
    )
    partials = []
    written = [out, lse, max_logits]
    strides = [out.stride()[:2], lse.stride(), max_logits.stride()]
    if num_splits > 1:
        written = partials = [
            workspace.scratch((num_splits, tokens, heads, n), torch.float32, out.device)
            for n in (D_V, 1, 1)
        ]
        strides = [each.stride()[1:3] for each in partials]
    outputs = OutputArguments(
        *written,
        None if num_splits > 1 else a.sink,
        *(stride for pair in strides for stride in pair),
        0 if a.sink is None else a.sink.stride(0),
    )
    return SplitResults(num_splits, outputs, partials)


def merge(split: SplitResults, sink: Tensor | None, results: Results) -> None:
    """Merge the partials of several splits."""
    if split.num_splits > 1:
        merge_list_splits(split.partials, sink, *results, is_chained=True)


def list_lengths(a: SparseArguments) -> dict[str, object]:
    """The arguments of lists that stay single, `arguments.VARYING`, by name."""
    extra_rows = a.rows if a.extra is None else filled(a.extra_rows)
    return {
        "lens": a.topk_lens,
        "topk": a.rows.shape[1],
        "stride_token": a.rows.stride(0),
        "stride_lens": 0 if a.topk_lens is None else a.topk_lens.stride(0),
        "extra_lens": a.extra_topk_lens,
        "extra_topk": extra_rows.shape[1],
        "extra_stride_token": extra_rows.stride(0),
        "extra_stride_lens": 0 if a.extra_topk_lens is None else a.extra_topk_lens.stride(0),
    }


def list_arguments(a: SparseArguments) -> tuple[ListArguments, ListArguments | None]:
    """Return the lists of the first cache, and those of the second if there is one."""
    main = _list_arguments(a.layer, a.rows)
    return main, None if a.extra is None else _list_arguments(a.extra, filled(a.extra_rows))


def traits(a: SparseArguments) -> Traits:
    """The constants of a call; those of an absent second cache are those of the first."""
    extra_layer = a.layer if a.extra is None else a.extra
    return Traits(
        HAS_ROPE=has_rope(a),
        HAS_EXTRA=a.extra is not None,
        PAGE=_page(a.layer),
        EXTRA_PAGE=_page(extra_layer),
        SIGN=(a.softmax_scale > 0) - (a.softmax_scale < 0),
        FORMAT=a.layer.codec.traits,
        ROW_CHUNKS=_packed_row_chunks(a.layer),
        EXTRA_ROW_CHUNKS=_packed_row_chunks(extra_layer),
    )


def scale_log2(softmax_scale: float) -> float:
    """Return |softmax_scale| · log2(e), but not 0: it would turn the −inf of an invalid entry
    into NaN."""
    return max(abs(softmax_scale) * log2(e), SMALLEST_SCALE)


def has_rope(a: SparseArguments) -> bool:
    """Whether rows have columns past those that are values; if not, q_rope has no columns."""
    return a.layer.codec.row.width > D_V


def _list_arguments(layer: CacheLayer, rows: Tensor) -> ListArguments:
    payload, page_chunks, row_chunks = _chunks(layer.payload)
    return ListArguments(
        payload=payload,
        rows=rows,
        num_slots=layer.num_slots,
        page_chunks=page_chunks,
        row_chunks=row_chunks,
        stride_entry=rows.stride(1),
        rope=None if layer.rope is None else RopeArguments(*_chunks(layer.rope)),
    )


def _chunks(rows: Tensor) -> tuple[Tensor, int, int]:
    """Rows as kernels read them, and how far apart pages and the rows of a page are."""
    page_chunks, row_chunks = (
        stride * rows.element_size() // CHUNK_BYTES for stride in rows.stride()[:2]
    )
    if rows.shape[1] == 1:
        row_chunks = page_chunks  # all rows have the same stride
    return words_of(rows) if rows.element_size() == 1 else rows, page_chunks, row_chunks


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


def query_tiles(
    q: Tensor, q_rope: Tensor | None, heads: int, columns: int
) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """TMA tiles of a token's queries: `heads` x `columns`, and `heads` x 64 of the rotated columns,
    which are q_rope or come after column 512 of q."""
    if q_rope is None and q.shape[-1] > D_V:
        q_rope = q[..., D_V:]
    return _q_tiles(q, heads, columns), None if q_rope is None else _q_tiles(q_rope, heads, D_R)


def _q_tiles(q: Tensor, heads: int, columns: int) -> TensorDescriptor:
    """A third axis: TMA writes zeros for heads past the last one, and does not read them."""
    shape, strides = list(q.shape), list(q.stride())
    for axis in (0, 1):
        if shape[axis] == 1:
            strides[axis] = shape[-1]  # any that TMA takes: nothing is at this distance
    return TensorDescriptor(q, shape, strides, [1, heads, columns], _q_layout())
