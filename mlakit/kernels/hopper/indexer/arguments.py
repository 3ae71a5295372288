"""The arguments of an indexer kernel, on the host and on the device.

Varying integers are single arguments (`hopper.decode.arguments` says why).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlakit.kernels.hopper.indexer.consumer import Outputs
from mlakit.kernels.hopper.indexer.loads import Sources
from mlakit.kernels.hopper.indexer.scheduler import Requests, first_work_tile

VARYING = [
    "batch",
    "tokens",
    "max_pages",
    "columns",
    "stride_table_request",
    "stride_weights_token",
    "stride_out",
]


class ResultArguments(NamedTuple):
    """Weights and logits."""

    weights: Tensor  # [tokens, heads] float32
    out: Tensor  # [tokens, columns] float32
    stride_weights_head: int


class IndexerTraits(NamedTuple):
    """Constants that the indexer kernel is compiled for."""

    HEADS: int
    PAGE: int  # keys of a page
    PAGE_ROWS: int  # rows of the keys' descriptor from a page to the next
    PAGE_SCALES: int  # scales from a page to the next
    IS_CAUSAL: bool
    FITS_INT32: bool  # sums of work tiles
    IS_SINGLE: bool  # one token block


@gluon.jit
def unpack(
    q,
    keys,
    scales,
    tokens,
    max_pages,
    columns,
    stride_table_request,
    stride_weights_token,
    stride_out,
    ragged,
    result,
    TRAITS: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """Return (Requests, Sources, Outputs) of a kernel's arguments."""
    requests = Requests(
        q_starts=ragged.q_starts,
        kv_lens=ragged.kv_lens,
        page_table=ragged.page_table,
        stride_q_starts=ragged.stride_q_starts,
        stride_kv_lens=ragged.stride_kv_lens,
        stride_request=stride_table_request,
        stride_entry=ragged.stride_entry,
        tokens=tokens,
        max_pages=max_pages,
        columns=columns,
        IS_CAUSAL=TRAITS.IS_CAUSAL,
        IS_SINGLE=TRAITS.IS_SINGLE,
        TOKENS=CONFIG.TOKENS,
        KEYS=CONFIG.KEYS,
        FILL_COLUMNS=CONFIG.FILL_COLUMNS,
    )
    sources = Sources(
        q=q,
        keys=keys,
        scales=scales,
        PAGE=TRAITS.PAGE,
        PAGE_ROWS=TRAITS.PAGE_ROWS,
        PAGE_SCALES=TRAITS.PAGE_SCALES,
    )
    outputs = Outputs(
        weights=result.weights,
        out=result.out,
        stride_weights_token=stride_weights_token,
        stride_weights_head=result.stride_weights_head,
        stride_out=stride_out,
        HEADS=TRAITS.HEADS,
    )
    return requests, sources, outputs


@gluon.jit
def first_tile(requests, batch, TRAITS: gl.constexpr):
    """Return (request, block, tile, left) that this CTA starts with; called by four warps."""
    if TRAITS.IS_SINGLE:
        request, block, tile = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
        left = gl.to_tensor(1)
    else:
        LINE: gl.constexpr = gl.int32 if TRAITS.FITS_INT32 else gl.int64
        request, block, tile, left = first_work_tile(requests, batch, LINE)
    return request, block, tile, left
