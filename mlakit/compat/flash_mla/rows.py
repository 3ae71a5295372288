"""FlashMLA's cache tensors seen as pools, by the width of a query and of a stored row."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache
from mlakit.checks import E4M3, FLOATS, Dims
from mlakit.formats import Format, row_codec
from mlakit.geometry import RowShape

BYTES = (torch.uint8, torch.int8, E4M3)
FOOTER_ROPE = 64  # rotated columns of the rows that keep their scales at the end of a page
_PLAIN: dict[torch.dtype, Format] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}


def check_rows(
    dims: Dims, arg: str, blocks: Tensor, q: Tensor, d_v: int
) -> tuple[Format, RowShape]:
    """The format of cache rows [..., width] that queries [..., d] attend to, and their columns."""
    d, width = q.shape[-1], blocks.shape[-1]
    dims.dtype(arg, blocks, *FLOATS, *BYTES)
    dims.rows_contiguous(arg, blocks)
    if blocks.dtype in FLOATS:
        if q.dtype != E4M3:
            dims.dtype(arg, blocks, q.dtype)
        dims.require(width == d, f"{arg}.shape[{blocks.ndim - 1}]", f"equal d of q, {d}", width)
        return _PLAIN[blocks.dtype], _plain_row(d, d_v)
    formats = _byte_formats(d, d_v)
    if width not in formats:
        known = " or ".join(f"{size} ({name})" for size, (name, _) in formats.items())
        dims.fail(arg, f"have rows of {known} bytes for d = {d} and {d_v} value columns", width)
    return formats[width]


def wrap(
    dims: Dims,
    arg: str,
    blocks: Tensor,  # [num_blocks, page_block_size, width]
    rows: tuple[Format, RowShape],
    tensor_scale: float | Tensor = 1.0,
) -> PagedLatentCache:
    """The pool in the memory of `blocks`."""
    format, row = rows
    page_size, width = blocks.shape[1:]
    dims.require(page_size >= 1, f"{arg}.shape[1]", "be at least 1", page_size)
    if format == "fp8_block64":
        dims.require(
            page_size == 1 or blocks.stride(1) == width,
            arg,
            f"have contiguous pages, a row every {width} bytes",
            f"one every {blocks.stride(1)}",
        )
    return PagedLatentCache.wrap(blocks, row, format=format, tensor_scale=tensor_scale)


def _plain_row(d: int, d_v: int) -> RowShape:
    """Where nothing is scaled apart, the rotated columns are columns like the others."""
    return RowShape(d_v, d - d_v) if (d - d_v) % 2 == 0 else RowShape(d, 0, d_v)


@lru_cache(maxsize=64)
def _byte_formats(d: int, d_v: int) -> dict[int, tuple[Format, RowShape]]:
    """By the bytes of a row, what it may be: 576, 656 for 576 columns, 512, 528, 584 for 512."""
    formats: dict[int, tuple[Format, RowShape]] = {d: ("fp8", _plain_row(d, d_v))}
    candidates: list[tuple[Format, int, int]] = [("fp8_block128", d_v, d - d_v)]
    if d == d_v:
        candidates.append(("fp8_block64", d - FOOTER_ROPE, FOOTER_ROPE))
    for name, latent, rope in candidates:
        if latent < 1 or rope % 2:
            continue
        row = RowShape(latent, rope, d_v)
        try:
            size = row_codec(name, row).bytes_per_token
        except ValueError:  # a row this format cannot hold
            continue
        formats.setdefault(size, (name, row))
    return formats
