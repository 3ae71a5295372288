"""What the indexer kernels of all architectures have in common on the host.

Work       one kernel of as many CTAs as there are SMs; no plan, no scratch memory: each CTA finds
           its share of the work from the lengths on the device
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mlakit.cache import CacheLayer
from mlakit.kernels.arguments import LogitsArguments, filled
from mlakit.kernels.hopper.decode.arguments import Batch
from mlakit.kernels.hopper.indexer.arguments import IndexerTraits, ResultArguments
from mlakit.kernels.hopper.indexer.configs import PIECE, WIDTH, fits_int32, is_single_block
from mlakit.kernels.launch import launch, target

E4M3 = torch.float8_e4m3fn


def run(kernel: Any, pick_config: Any, a: LogitsArguments, out: Tensor) -> None:
    """Launch a kernel.

    pick_config  `configs.pick_config`, or that of another architecture, whose configs have TOKENS,
                 HEADS, KEYS, FILL_COLUMNS and MAX_REGISTERS, too
    """
    q, weights, layer, page_table = a.q, a.weights, a.layer, a.page_table
    kv_lens, q_starts = a.kv_lens, filled(a.q_starts)
    assert isinstance(page_table, Tensor)
    (tokens, heads, _), columns, batch = q.shape, out.shape[1], kv_lens.shape[0]
    if tokens == 0 or columns == 0:
        return  # nothing to write, and no tile for TMA to load
    # every block of a call's queries gets the configuration of the whole, and so the same bits
    whole = a.num_tokens or tokens
    is_single = is_single_block(tokens=whole, batch=batch)
    config = pick_config(heads=heads, tokens=whole, batch=batch)
    keys, page_rows = _key_rows(layer.payload)
    scales, page_scales = _scale_words(layer)
    launch(
        kernel,
        (target(q.device).num_sms,),
        q=_queries(q, config.TOKENS, config.HEADS),
        keys=TensorDescriptor(
            keys, list(keys.shape), list(keys.stride()), [PIECE, WIDTH], _layout(8, 2)
        ),
        scales=TensorDescriptor(scales, list(scales.shape), [1], [PIECE], _layout(32, 1)),
        batch=batch,
        tokens=tokens,
        max_pages=page_table.shape[1],
        columns=columns,
        stride_table_request=page_table.stride(0),
        stride_weights_token=weights.stride(0),
        stride_out=out.stride(0),
        ragged=Batch(
            *(q_starts, kv_lens, page_table),
            *(q_starts.stride(0), kv_lens.stride(0), page_table.stride(1)),
        ),
        result=ResultArguments(weights, out, weights.stride(1)),
        TRAITS=IndexerTraits(
            HEADS=heads,
            PAGE=layer.page_size,
            PAGE_ROWS=page_rows,
            PAGE_SCALES=page_scales,
            IS_CAUSAL=a.mask.is_causal,
            IS_SINGLE=is_single,
            FITS_INT32=fits_int32(config, tokens=tokens, batch=batch, columns=columns),
        ),
        CONFIG=config,
        num_warps=4,
        maxnreg=config.MAX_REGISTERS,
    )


# kept: what a layout checks of itself takes the host longer than the rest of a descriptor
@lru_cache(maxsize=8)
def _layout(bits: int, rank: int) -> Any:
    """Rows of 128 bytes, swizzled; of one dimension, as they are."""
    swizzle = 128 if rank > 1 else 0
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank)


def _queries(q: Tensor, tokens: int, heads: int) -> TensorDescriptor:
    """TMA tiles of token blocks; the stride of a dimension of one element may be anything."""
    num_tokens, num_heads, width = q.shape
    by_head = q.stride(1) if num_heads > 1 else width
    by_token = q.stride(0) if num_tokens > 1 else num_heads * by_head
    return TensorDescriptor(
        q, list(q.shape), [by_token, by_head, 1], [tokens, heads, width], _layout(8, 3)
    )


def _key_rows(payload: Tensor) -> tuple[Tensor, int]:
    """Return keys as rows of one stride, and the rows from a page to the next."""
    num_pages, page_size, width = payload.shape
    by_row = payload.stride(1)
    apart = payload.stride(0) // by_row if num_pages > 1 else page_size
    rows = payload.as_strided(((num_pages - 1) * apart + page_size, width), (by_row, 1))
    return rows.view(E4M3), apart


def _scale_words(layer: CacheLayer) -> tuple[Tensor, int]:
    """The scales of all pages with what lies between them, and how far pages are apart."""
    scales = layer.scales
    assert scales is not None  # the format has them
    num_pages, page_size, _ = scales.shape
    apart = scales.stride(0) if num_pages > 1 else page_size
    return scales.as_strided(((num_pages - 1) * apart + page_size,), (1,)), apart
