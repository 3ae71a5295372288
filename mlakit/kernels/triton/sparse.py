"""Launches `sparse_kernel`: absorbed MLA attention over per-token lists of cache rows.

Work       with few tokens, lists are split over several programs and `sparse_merge` combines them
Memory     float32 partials of splits, 256 MiB at most
"""

from __future__ import annotations

from math import e, log2

import torch
import triton
from torch import Tensor

from mlakit.cache import CacheLayer
from mlakit.formats import SMALLEST_SCALE
from mlakit.kernels import workspace
from mlakit.kernels.arguments import SparseArguments, filled, stride_of
from mlakit.kernels.launch import launch, target
from mlakit.kernels.sparse_merge import merge_list_splits
from mlakit.kernels.triton.arguments import cache_arguments, output_arguments, query_arguments
from mlakit.kernels.triton.configs import RowTiles, pick_sparse_config, pick_sparse_splits
from mlakit.kernels.triton.rows import (
    PLAIN,
    ComputeTypes,
    compute_types,
    row_tiles,
    row_traits,
)
from mlakit.kernels.triton.sparse_kernel import RowLists, Traits, sparse_mla_kernel

# page sizes that are constants in a kernel; all others share one kernel
USUAL_PAGES = (1, 16, 32, 64, 128, 256)


def sparse_mla(a: SparseArguments, out: Tensor, lse: Tensor, max_logits: Tensor) -> None:
    q_scale, splits, softmax_scale, sink = a.q_scale, a.splits, a.softmax_scale, a.sink
    d_c = a.layer.codec.row.kv_lora_rank
    q, q_rope = (a.q[..., :d_c], a.q[..., d_c:]) if a.q_rope is None else (a.q, a.q_rope)
    tokens, heads, _ = q.shape
    if tokens == 0 or heads == 0:
        return
    lists = [(a.layer, a.rows, a.topk_lens)]
    if a.extra is not None:
        lists.append((a.extra, filled(a.extra_rows), a.extra_topk_lens))
    types = [_types(q, q_rope, each) for each, _, _ in lists]
    # both caches share the accumulators, so they share the narrower column tiles
    tiles = min((_row_tiles(each) for each, _, _ in lists), key=lambda tiles: tiles.width)
    device = target(q.device)
    config = pick_sparse_config(
        tiles,
        heads=heads,
        itemsize=max(each.latent.itemsize for each in types),
        is_fp8=any(each.payload.dtype not in PLAIN for each, _, _ in lists),
        has_extra=a.extra is not None,
        arch=device.arch,
        shared_bytes=device.shared_bytes,
    )
    head_tiles = triton.cdiv(heads, config.block_h)
    num_splits = pick_sparse_splits(
        wanted=None if splits is None else splits.num_splits,
        rows=tokens * heads,
        head_tiles=tokens * head_tiles,
        list_tiles=sum(triton.cdiv(each.shape[1], config.block_n) for _, each, _ in lists),
        num_sms=device.num_sms,
        row_bytes=4 * (tiles.v_width + 2),
    )
    outputs = output_arguments(out, lse, max_logits, sink=sink)
    if num_splits > 1:
        rows = (num_splits, tokens, heads)
        partials = [
            workspace.scratch(shape, torch.float32, out.device)
            for shape in ((*rows, tiles.v_width), rows, rows)
        ]
        outputs = output_arguments(*partials)
    extra_layer, extra_rows, _ = lists[-1]
    launch(
        sparse_mla_kernel,
        (tokens * num_splits * head_tiles,),
        # a scale of 0 would turn the −inf of an invalid slot into NaN
        scale_log2=max(abs(softmax_scale) * log2(e), SMALLEST_SCALE),
        tokens=tokens,
        heads=heads,
        num_splits=num_splits,
        topk=a.rows.shape[1],
        num_slots=a.layer.num_slots,
        page_size=_page_size(a.layer),
        stride_rows_token=a.rows.stride(0),
        extra_topk=extra_rows.shape[1],
        extra_num_slots=extra_layer.num_slots,
        extra_page_size=_page_size(extra_layer),
        extra_stride_rows_token=extra_rows.stride(0),
        stride_lse_token=outputs.lse.stride(-2),
        stride_max_token=filled(outputs.max_logits).stride(-2),
        query=query_arguments(q, q_rope, q_scale),
        lists=_row_lists(*lists[0]),
        extra=None if a.extra is None else _row_lists(*lists[1]),
        outputs=outputs,
        TRAITS=Traits(
            HAS_EXTRA=a.extra is not None,
            ROW=row_traits(a.layer, tiles, types[0], has_fp8=device.has_fp8),
            EXTRA_ROW=row_traits(extra_layer, tiles, types[-1], has_fp8=device.has_fp8),
            PAGE=_constant_page(a.layer),
            EXTRA_PAGE=_constant_page(extra_layer),
            IS_NEGATIVE=softmax_scale < 0,
            IS_UNCHAINED=config.is_unchained,
            BH=config.block_h,
            BN=config.block_n,
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if num_splits > 1:
        merge_list_splits(partials, sink, out, lse, max_logits)


def _types(q: Tensor, q_rope: Tensor, layer: CacheLayer) -> ComputeTypes:
    """Types that hold q and the rows exactly; the extra cache may have another float than q."""
    stored = layer.payload.dtype
    if stored in PLAIN and q.dtype in PLAIN and stored != q.dtype:
        return ComputeTypes(torch.float32, torch.float32)
    return compute_types(q, q_rope, layer)


def _row_tiles(layer: CacheLayer) -> RowTiles:
    """FP8 in pieces of 128 columns: in one piece of 512 a warp converts one row after the other,
    which takes 1.7 times as long."""
    return row_tiles(layer) if layer.payload.dtype in PLAIN else row_tiles(layer, widest=128)


def _row_lists(layer: CacheLayer, rows: Tensor, lens: Tensor | None) -> RowLists:
    cache = cache_arguments(layer)
    if _pages_adjoin(layer):
        cache = cache._replace(
            stride_page=cache.stride_row, stride_beside_page=cache.stride_beside_row
        )
    return RowLists(cache, rows, lens, rows.stride(1), stride_of(lens, 0))


def _pages_adjoin(layer: CacheLayer) -> bool:
    """Return whether row `slot` is at slot · stride; the cache then has pages of one row."""
    pools = [each for each in (layer.payload, layer.beside) if each is not None]
    return all(each.stride(0) == layer.page_size * each.stride(1) for each in pools)


def _page_size(layer: CacheLayer) -> int:
    return 1 if _pages_adjoin(layer) else layer.page_size


def _constant_page(layer: CacheLayer) -> int:
    page_size = _page_size(layer)
    return page_size if page_size in USUAL_PAGES else 0
